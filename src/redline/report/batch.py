"""A batch search in a terminal and as a document: a line per trial once it is done, then the result."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.text import Text

from redline.analyze.batch import BatchSummary, BatchTrial, curve_of, items_of_one
from redline.analyze.knee import SATURATED
from redline.model.units import format_bytes, format_seconds, format_share, significant
from redline.report.canvas import check_picture, save_figure
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import PIPE_WIDTH, Fitted, make_table

_COLUMNS = {
    "batch": 6,
    "items/s": 9,
    "±": 6,
    "p50": 7,
    "p95": 7,
    "memory": 9,
    "share": 5,
    "items/s/GiB": 11,
}
_EXPENDABLE = ("share", "items/s/GiB", "p95")
"""What is hidden first on a narrow terminal: two that follow from others, and one that short trials lack."""
_REMARK = 19
"""Characters that are left for what to know of a trial, such as its trust."""


def batch_json(rows: Sequence[BatchSummary]) -> JsonDocument:
    """The first recipe's answers at the top, those of all under `recipes`, each with its ratio to the first."""
    first = rows[0].max_batch
    entries = [
        {
            **msgspec.to_builtins(found),
            "knee_batch": found.knee_batch,
            "ratio": found.max_batch / first if found.max_batch and first else None,
        }
        for found in rows
    ]
    return json_document("batch", {**_answers(rows[0]), "recipes": entries})


def _answers(found: BatchSummary) -> dict[str, Any]:
    return {
        "max_batch": found.max_batch,
        "max_batch_below": found.max_batch_below,
        "knee_batch": found.knee_batch,
        "knee": found.knee,
        "slo_batch": found.slo_batch,
        "slo_p95_s": found.slo_p95_s,
        "slo_ttft_s": found.slo_ttft_s,
        "slo_tpot_s": found.slo_tpot_s,
        "limit_bytes": found.limit_bytes,
        "trials": found.trials,
        "ooms": found.ooms,
        "notes": found.notes,
    }


def batch_report(rows: Sequence[BatchSummary]) -> RenderableType:
    """Every trial, recipe by recipe, then what was found."""
    parts: list[RenderableType] = []
    for found in rows:
        parts += [Text(search_title(found.model, found.task, found.recipe), style="bold"), TrialLine()]
        parts += [TrialLine(trial) for trial in sorted(found.trials, key=lambda trial: trial.batch)]
    return Group(*parts, found_report(rows))


def search_title(model: str, task: str, recipe: str) -> str:
    return f"{model} · {task} · {recipe}"


class TrialLine:
    """One trial in as many columns as the terminal has room for, or without a trial their header."""

    def __init__(self, trial: BatchTrial | None = None) -> None:
        self._trial = trial

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield Text(trial_header(width)) if self._trial is None else trial_line(self._trial, width)


def _shown(width: int) -> list[str]:
    shown = list(_COLUMNS)
    for name in _EXPENDABLE:
        if sum(_COLUMNS[each] + 1 for each in shown) - 1 + _REMARK > width:
            shown.remove(name)
    return shown


def trial_header(width: int = PIPE_WIDTH) -> str:
    return " ".join(name.rjust(_COLUMNS[name]) for name in _shown(width))


def trial_line(trial: BatchTrial, width: int = PIPE_WIDTH) -> Text:
    """One trial, aligned with `trial_header`; what there is to know of it goes on below itself."""
    if not trial.fits:
        assert trial.failure is not None
        why = "does not fit" if trial.is_oom else f"{trial.failure.kind}: {trial.failure.told}"
        style = "yellow" if trial.is_oom else "red"
        return Text(_remarked(str(trial.batch).rjust(_COLUMNS["batch"]), why, width), style=style)
    cells = _cells(trial)
    figures = " ".join(cells[name].rjust(_COLUMNS[name]) for name in _shown(width))
    return Text(_remarked(figures, _remark(trial), width))


def _remarked(figures: str, remark: str, width: int) -> str:
    indent = " " * (len(figures) + 2)
    lines = textwrap.wrap(remark, max(width - len(indent), _REMARK), break_on_hyphens=False)
    return (figures + "  " + f"\n{indent}".join(lines)).rstrip()


def _cells(trial: BatchTrial) -> dict[str, str]:
    assert trial.throughput_per_s is not None
    rate = trial.throughput_per_s
    return {
        "batch": str(trial.batch),
        "items/s": significant(rate, max(3, len(str(round(rate))))),
        "±": format_share(trial.throughput_interval.half_width if trial.throughput_interval else None),
        "p50": format_seconds(trial.latency_p50_s),
        "p95": format_seconds(trial.latency_p95_s),
        "memory": format_bytes(trial.needed_bytes),
        "share": "n/a" if trial.memory_share is None else f"{trial.memory_share:.0%}",
        "items/s/GiB": "n/a" if trial.items_per_s_per_gib is None else significant(trial.items_per_s_per_gib, 3),
    }


class _Hidden:
    """Names the columns that the trials above lack at this width."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = _shown(options.max_width)
        if hidden := [name for name in _COLUMNS if name not in shown]:
            yield Text(f"  not shown at this width: {', '.join(hidden)}", style="dim italic")


def found_report(rows: Sequence[BatchSummary]) -> RenderableType:
    """The answers side by side, what to know about them, the next step."""
    first = rows[0]
    table = make_table(Text(_title(first), style="bold"))
    table.add_column("recipe", overflow="fold", min_width=12)
    headers = ["largest", f"vs {first.recipe}"[:24], f"knee ({SATURATED:.0%})", *_slo_header(first), "trials", "OOMs"]
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for found in rows:
        ratio = f"{found.max_batch / first.max_batch:.2f}×" if found.max_batch and first.max_batch else "–"
        slo = [_number(found.slo_batch)] if first.slo else []
        table.add_row(
            Text(found.recipe),
            _largest(found),
            ratio,
            _number(found.knee_batch),
            *slo,
            str(len(found.trials)),
            str(found.ooms),
        )
    notes = [Text(f"  {found.recipe}: {note}", style="dim") for found in rows for note in found.notes]
    return Group(_Hidden(), Fitted(table), *notes, Text(_next_step(rows), style="bold"))


def _title(found: BatchSummary) -> str:
    where = f"{found.device_name} ({found.device})" if found.device_name else found.device
    limit = f"up to {format_bytes(found.limit_bytes)}" if found.limit_bytes else ""
    return " · ".join(part for part in (found.model, found.task, found.setting, where, limit) if part)


def _largest(found: BatchSummary) -> str:
    """With what is known of how much larger it could be."""
    if found.max_batch is None:
        return "none fits" if found.ooms else "none runs"
    if found.max_batch_below is None or found.max_batch_below > found.max_batch * 1.03 + 1:
        return f"≥ {found.max_batch}"
    return str(found.max_batch)


def _slo_header(found: BatchSummary) -> list[str]:
    return [str(found.slo)] if found.slo else []


def _remark(trial: BatchTrial) -> str:
    remarks = [] if trial.ttft_s is None else [f"TTFT {format_seconds(trial.ttft_s)}"]
    remarks += [] if trial.tpot_s is None else [f"TPOT {format_seconds(trial.tpot_s)}"]
    remarks += [label for label in trial.trust if label != "valid"]
    if trial.bound == "host":
        remarks.append("host-bound")
    if trial.allocator_retries:
        remarks.append("short of memory")
    return ", ".join(remarks)


def _next_step(rows: Sequence[BatchSummary]) -> str:
    running = [found for found in rows if found.max_batch is not None]
    if not running:
        tried = next((trial.record_id for found in rows for trial in found.trials if trial.failure), "")
        return f"next: no batch ran at all; 'redline history show {tried[:13]}' has the whole error"
    best = max(running, key=lambda found: found.max_batch or 0)
    if best.slo:
        return _next_under_target(running)
    if any(each.code == "doubted-trials" for each in best.notes):
        return "next: run it again on a quiet machine: what the trials say about speed is doubted"
    if best.knee is not None:
        share = "all" if best.knee.share >= 1 else f"{best.knee.share:.0%}"
        told = f"batch {best.knee.batch} already has {share} of the speed"
        return f"next: with {best.recipe}, {told}; more only pays if you need it"
    if best.at_length is None:
        return f"next: measure batch {best.max_batch} thoroughly"
    return f"next: '{best.at_length}' measures it thoroughly"


def _next_under_target(running: Sequence[BatchSummary]) -> str:
    """Of the recipes that keep the target, the one that is fastest there."""
    keeping = [found for found in running if found.slo_batch is not None]
    if not keeping:
        return "next: no batch keeps the latency target; a faster recipe may ('redline tune' looks for one)"
    best = max(keeping, key=_rate_under_target)
    return f"next: batch {best.slo_batch} with {best.recipe} keeps the latency target"


def _rate_under_target(found: BatchSummary) -> float:
    return max((trial.throughput_per_s or 0.0 for trial in found.trials if trial.batch == found.slo_batch), default=0.0)


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def plot_batches(rows: Sequence[BatchSummary], path: Path) -> Path:
    check_picture(path)
    # The figure is made without pyplot: no window system is asked for, and a notebook's own state stays untouched.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(13, 4.2), layout="constrained")
    speed, latency, memory = figure.subplots(1, 3)
    for number, found in enumerate(rows):
        fitting = sorted((trial for trial in found.trials if trial.fits), key=lambda trial: trial.batch)
        if fitting:
            _draw(found, fitting, f"C{number % 10}", speed, latency, memory)
    first = rows[0]
    item = first.item or "items"
    _label(speed, f"{item}/s", "throughput; dashed: a + c·b, dot: knee")
    _label(latency, "ms per step", "median latency")
    _label(memory, "GiB", "memory needed; crosses: did not fit")
    if first.limit_bytes:
        memory.axhline(first.limit_bytes / 2**30, color="0.4", linestyle=":")
    if first.slo_p95_s is not None:
        latency.axhline(first.slo_p95_s * 1e3, color="0.4", linestyle=":")
    speed.legend(fontsize="small")
    figure.suptitle(" · ".join(part for part in (first.model, first.task, first.device_name or first.device) if part))
    return save_figure(figure, path, dpi=120)


def _draw(
    found: BatchSummary, fitting: Sequence[BatchTrial], colour: str, speed: Any, latency: Any, memory: Any
) -> None:
    batches = [trial.batch for trial in fitting]
    speed.plot(batches, [trial.throughput_per_s for trial in fitting], "o-", color=colour, label=found.recipe)
    latency.plot(batches, [(trial.latency_p50_s or np.nan) * 1e3 for trial in fitting], "o-", color=colour)
    needed = [trial.needed_bytes / 2**30 if trial.needed_bytes else np.nan for trial in fitting]
    memory.plot(batches, needed, "o-", color=colour)
    failed = [trial.batch for trial in found.trials if trial.is_oom]
    if failed and found.limit_bytes:
        memory.plot(failed, [found.limit_bytes / 2**30] * len(failed), "x", color=colour)
    if (curve := curve_of(found.trials)) is not None:
        grid = np.geomspace(batches[0], batches[-1], 100)
        items = items_of_one(found.trials)
        speed.plot(grid, [items * batch / curve.seconds(batch) for batch in grid], "--", color=colour, alpha=0.6)
    if found.knee is not None:
        speed.plot([found.knee.batch], [found.knee.throughput_per_s], "o", color=colour, markersize=10, alpha=0.5)


def _label(axes: Any, what: str, title: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("batch")
    axes.set_ylabel(what)
    axes.set_title(title, fontsize="small")
    axes.grid(alpha=0.3)
