"""What was seen of a watched script, for a person."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.watch import Rates
from redline.model.environment import TelemetrySample
from redline.model.record import RunRecord
from redline.model.units import format_bytes, format_seconds, format_share, significant
from redline.model.watching import PHASES, Watched
from redline.show.terminal import plain_table

NAMES = {"data": "waiting for data", "copy": "copy to the GPU", "other": "everything else"}


def status_line(rates: Rates, card: TelemetrySample | None = None) -> str:
    """How it goes, on one line; with what the GPU says of itself, `?` where it does not tell."""
    if not rates.steps:
        return "no step yet"
    parts = [
        f"step {rates.steps}",
        f"{_rate(rates.steps_per_s)} steps/s",
        f"{_rate(rates.samples_per_s)} samples/s",
        " ".join(
            f"{name} {format_share(rates.shares.get(name))}" for name in PHASES if rates.shares.get(name, 0) >= 0.005
        ),
    ]
    parts += [f"loss {rates.loss:.4g}"] if rates.loss is not None else []
    parts += [f"{rates.outliers} slow steps"] if rates.outliers else []
    if card is not None:
        busy = "?" if card.utilisation is None else format_share(card.utilisation)
        held = "?" if card.memory_used_bytes is None else format_bytes(card.memory_used_bytes)
        power = "?" if card.power_w is None else f"{card.power_w:.0f} W"
        parts.append(f"GPU {busy} {held} {power}")
    return " · ".join(part for part in parts if part)


def watch_report(record: RunRecord) -> RenderableType:
    watched = record.watched
    assert watched is not None
    name = record.spec.workload.model.removeprefix("watch:")
    notes = [Text(str(each)) for each in record.notes]
    if record.failure is not None:
        return Group(Text(f"{name}: {record.failure.message}"), *notes)
    parts: list[RenderableType] = [Text(_headline(name, record, watched)), _table(watched)]
    parts += [Text(line) for line in _remarks(watched)]
    for finding in watched.findings:
        bound = f" (up to {finding.gain_bound:.2f}×)" if finding.gain_bound > 1 else ""
        parts += [Text(f"{finding.code}: {finding.text}{bound}"), Text(f"  change: {finding.change}", style="dim")]
    if not watched.findings and watched.shares:
        parts.append(Text("nothing stands out"))
    parts += notes
    if not any(each.code == "not-kept" for each in record.notes):
        parts.append(Text(f"record {record.id}: redline history show {record.id}", style="dim"))
    return Group(*parts)


def _headline(name: str, record: RunRecord, watched: Watched) -> str:
    device = record.prepared.environment.device.name if record.prepared else ""
    ranks = f" · {watched.ranks} ranks" if watched.ranks > 1 else ""
    return (
        f"{name} · {device}{ranks} · {watched.steps} steps in {format_seconds(watched.seconds)} · "
        f"{_rate(watched.steps_per_s)} steps/s · {_rate(watched.samples_per_s)} samples/s"
    )


def _table(watched: Watched) -> RenderableType:
    table = plain_table("where the time of a step goes" + (", by the GPU's clock" if watched.device_clock else ""))
    table.add_column("part")
    table.add_column("share", justify="right")
    for phase in PHASES:
        table.add_row(NAMES.get(phase, phase), format_share(watched.shares.get(phase)))
    return table


def _remarks(watched: Watched) -> list[str]:
    told = {
        "loss": None if watched.loss is None else f"{watched.loss:.4g}",
        "first step": None if watched.first_step_s is None else format_seconds(watched.first_step_s),
        "evaluation and profiling": format_seconds(watched.paused_s) if watched.paused_s > 0 else None,
        "slow steps": str(watched.outliers) if watched.outliers else None,
        "GPU utilisation": None if watched.gpu_utilisation is None else format_share(watched.gpu_utilisation),
        "energy": None if watched.energy_j is None else f"{significant(watched.energy_j, 3)} J",
        "peak memory": None if watched.peak_bytes is None else format_bytes(watched.peak_bytes),
    }
    line = " · ".join(f"{name} {value}" for name, value in told.items() if value is not None)
    windows = [
        f"profiled {each.steps} steps after step {each.step - each.steps}: {', '.join(each.top) or 'nothing stands out'}"
        for each in watched.windows
    ]
    return [line, *windows] if line else windows


def _rate(value: float | None) -> str:
    return "?" if value is None else significant(value, 4)
