"""A ladder for the terminal, as Markdown and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.ladder import Rung
from redline.model.units import format_bytes, format_seconds, format_share, significant
from redline.report.canvas import COLOURS, new_figure, save_figure
from redline.report.terminal import Fitted, make_table, one_line
from redline.report.train import rate

HEADERS = ["rung", "batch", "epoch", "items/s", "accuracy", "steps", "memory", "top operator", "× last", "× first"]


def ladder_report(rungs: Sequence[Rung]) -> RenderableType:
    parts: list[RenderableType] = [_table(rungs)]
    parts += [Text(f"{one_line(rung.name)}: {one_line(rung.limit)}", style="dim") for rung in rungs if rung.limit]
    parts += [Text(f"{rung.name}: failed: {one_line(rung.failure)}", style="red") for rung in rungs if rung.failure]
    parts += [
        Text(f"{one_line(rung.name)}: not to be relied on: {one_line(str(each))}", style="yellow")
        for rung in rungs
        for each in rung.doubts
    ]
    for why, together in _skipped(rungs).items():
        parts.append(Text(f"skipped ({one_line(why)}): {', '.join(together)}", style="yellow"))
    if told := accuracy_remark(rungs):
        parts.append(Text(told, style="dim"))
    if any(rung.is_cut for rung in rungs):
        told = (
            "~ the time for a rung was over before its epochs were: what the whole epoch would have taken at that speed"
        )
        parts.append(Text(told, style="dim"))
    parts.append(Text(conclusion(rungs), style="bold"))
    return Group(*parts)


def conclusion(rungs: Sequence[Rung]) -> str:
    ran = [rung for rung in rungs if rung.samples_per_s]
    if len(ran) < 2:
        return "next: see above why the rungs did not run"
    best = max(ran, key=lambda rung: rung.samples_per_s or 0.0)
    gain = f"{_times(best.gain_over_first)} the first rung" if best.gain_over_first else "the first rung itself"
    limit = f"; {best.limit}" if best.limit else ""
    told = f"{best.name}: {rate(best.samples_per_s)} items/s, {gain}{limit}"
    if any(rung.doubts for rung in ran):
        return f"not decided, because some speeds are not to be relied on: {told}"
    return told


def accuracy_remark(rungs: Sequence[Rung]) -> str:
    """Why accuracies differ where recipes need not be the reason; empty where all took as many steps."""
    steps = [rung.steps for rung in rungs if rung.accuracy is not None and rung.steps]
    if not steps or max(steps) < 1.5 * min(steps):
        return ""
    told = f"accuracy is that after so many steps, {min(steps)} to {max(steps)} here"
    return f"{told}: larger batches take fewer in as many epochs, so it does not compare recipes"


def _times(gain: float | None) -> str:
    return "–" if gain is None else f"{significant(gain, 3)}×"


def _table(rungs: Sequence[Rung]) -> Fitted:
    shown = make_table(Text("from one CPU thread to the best recipe", style="bold"))
    for header in HEADERS:
        shown.add_column(header, justify="left" if header in ("rung", "top operator") else "right", overflow="fold")
    for rung in rungs:
        shown.add_row(*(Text(one_line(each), style="dim" if rung.skipped else "") for each in _cells(rung)))
    return Fitted(shown, ("steps", "top operator", "memory", "accuracy", "batch", HEADERS[-2], HEADERS[2]))


def _cells(rung: Rung) -> list[str]:
    if rung.skipped or rung.failure:
        return [rung.name, str(rung.batch or "–"), "skipped" if rung.skipped else "failed", *["–"] * (len(HEADERS) - 3)]
    epoch = format_seconds(rung.epoch_s)
    return [
        rung.name,
        str(rung.batch or "–"),
        f"~{epoch}" if rung.is_cut else epoch,
        rate(rung.samples_per_s),
        format_share(rung.accuracy),
        str(rung.steps or "–"),
        format_bytes(rung.peak_bytes),
        rung.top_operator or "–",
        _times(rung.gain_over_last),
        _times(rung.gain_over_first),
    ]


def _skipped(rungs: Sequence[Rung]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for rung in rungs:
        if rung.skipped:
            found.setdefault(rung.skipped, []).append(rung.name)
    return found


def draw_ladder(rungs: Sequence[Rung], path: Path) -> Path:
    """A bar for each rung that ran, on a scale that shows one thread beside a GPU."""
    ran = [rung for rung in rungs if rung.samples_per_s]
    figure, axes = new_figure(9.0, 1.4 + 0.45 * max(1, len(ran)))
    for number, rung in enumerate(ran):
        colour = COLOURS[0] if rung.device == "cpu" else COLOURS[2]
        axes.barh(number, rung.samples_per_s, color=colour, height=0.65)
        accuracy = f", accuracy {rung.accuracy:.0%}" if rung.accuracy is not None else ""
        gain = f", {_times(rung.gain_over_first)}" if rung.gain_over_first else ""
        text = f"  {rate(rung.samples_per_s)} items/s{gain}, epoch {format_seconds(rung.epoch_s)}{accuracy}"
        axes.annotate(text, (rung.samples_per_s, number), va="center", fontsize=8)
    axes.set_yticks(range(len(ran)), [one_line(rung.name, 46).replace("$", r"\$") for rung in ran], fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.6)
    axes.set_xlabel("samples per second in training")
    return save_figure(figure, path)
