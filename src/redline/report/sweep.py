"""A sweep in a terminal and as a document: its cells, what they measured, what failed and why."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.summary import RunSummary
from redline.analyze.sweep import Estimate, SweepCell, SweepSummary, UnderTargets
from redline.model.units import counted, format_seconds, format_share, significant
from redline.report.cells import TRUST_STYLE, cheapest, energy_cells, energy_columns
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, make_table

NO_RATIOS = (
    "cells were measured one after the other, so ratios between rows have no interval; "
    "'redline run MODEL -r A -r B' measures recipes interleaved"
)


def sweep_json(
    summary: SweepSummary,
    rows: Sequence[RunSummary],
    estimate: Estimate | None = None,
    under: UnderTargets | None = None,
) -> JsonDocument:
    """`results` are rows as a run has them; a cell names its own by `record_id`."""
    known: dict[str, Any] = {} if estimate is None else {"estimate": estimate}
    known |= {} if under is None else {"under_slo": under}
    return json_document("sweep", {**msgspec.to_builtins(summary), "results": rows, **known})


def sweep_report(
    summary: SweepSummary,
    rows: Sequence[RunSummary],
    estimate: Estimate | None = None,
    under: UnderTargets | None = None,
) -> RenderableType:
    """The table, what to know about single rows below, the next step last."""
    by_record = {record_id: row for row in rows for record_id in (row.replicate_ids or (row.record_id,))}
    parts = _tables(summary, by_record) if estimate is None else [_plan_table(summary)]
    parts += [Text(f"  {_name(cell)}: {cell.failure.told}", style="red") for cell in summary.cells if cell.failure]
    parts += [
        Text(f"  left out: {left.model} {left.task} {left.recipe}: {left.reason}", style="dim")
        for left in _once_per_reason(summary)
    ]
    parts += [Text(f"  {idle}", style="yellow") for idle in summary.idle_exclusions]
    if estimate is not None:
        parts.append(Text(estimate_text(estimate)))
    elif summary.done:
        parts.append(Text(NO_RATIOS, style="dim"))
    if under is not None and estimate is None:
        parts.append(Text(_under_sentence(under)))
    return Group(*parts, Text(_next_step(summary, estimate), style="bold"))


def _under_sentence(under: UnderTargets) -> str:
    targets = [
        f"{what} within {format_seconds(seconds)}"
        for what, seconds in (("first token", under.targets.ttft_s), ("each token", under.targets.tpot_s))
        if seconds is not None
    ]
    told = " and ".join(targets)
    if under.record_id is None:
        return f"no cell keeps its {told}"
    where = f"batch {under.batch}, prompt {under.prompt}, {under.new_tokens} new tokens"
    speed = significant(under.decode_tokens_per_s or 0.0, 4)
    return f"fastest with {told}: {under.recipe} at {where}, {speed} tokens/s ({len(under.kept)} cells keep it)"


def estimate_text(estimate: Estimate) -> str:
    if not estimate.known and not estimate.unknown:
        return "nothing left to measure"
    parts = []
    if estimate.known:
        parts.append(
            f"about {_duration(estimate.seconds)} for {estimate.known} cells whose models were measured before"
        )
    if estimate.unknown:
        models = ", ".join(estimate.unknown_models[:5]) + (" …" if len(estimate.unknown_models) > 5 else "")
        parts.append(f"no estimate for {estimate.unknown} cells: {models} not measured yet")
    return "time: " + "; ".join(parts)


def _plan_table(summary: SweepSummary) -> RenderableType:
    """In the order in which they will be measured."""
    table = make_table(Text(f"sweep {summary.name} · {_counts(summary)}", style="bold"))
    axes = ["batch", *(axis for axis in ("prompt", "new_tokens") if any(getattr(each, axis) for each in summary.cells))]
    axes.append("threads")
    for header in ("model", "task", "recipe", *axes, "status"):
        table.add_column(header, overflow="fold", justify="right" if header in axes else "left")
    for cell in _combinations(summary.cells):
        numbers = (_number(getattr(cell, axis)) for axis in axes)
        table.add_row(Text(cell.model), cell.task, Text(cell.recipe), *numbers, _status(cell, None))
    return Fitted(table, ("threads", "task"))


def _counts(summary: SweepSummary) -> str:
    counts = [f"{summary.planned} cells", f"{summary.done} done"]
    counts += [f"{summary.failed} failed"] if summary.failed else []
    return ", ".join([*counts, f"{summary.pending} to do"] if summary.pending else counts)


def _tables(summary: SweepSummary, by_record: dict[str, RunSummary]) -> list[RenderableType]:
    """One table per model and task, so that recipe and numbers fit beside each other."""
    parts: list[RenderableType] = [Text(f"sweep {summary.name} · {_counts(summary)}", style="bold")]
    for (model, task), together in groupby(_in_reading_order(summary.cells), key=lambda cell: (cell.model, cell.task)):
        cells = list(together)
        always = ("recipe", "batch")
        axes = [
            axis
            for axis in ("recipe", "threads", "batch", "prompt", "new_tokens")
            if axis in always or any(getattr(cell, axis) for cell in cells)
        ]
        table = make_table(Text(f"{model} · {task}", style="bold"))
        for axis in axes:
            table.add_column(axis, justify="left" if axis == "recipe" else "right", overflow="fold")
        told = [row for cell in cells if (row := by_record.get(cell.record_id or "")) is not None]
        energy = energy_columns(told, "item", on_gpu=any(row.device != "cpu" for row in told))
        last = ("TTFT", "TPOT") if task == "generate" else ("p50 ms", "p95 ms")
        stalled = ["sustained"] if any(row.sustained_per_s is not None for row in told) else []
        speed = "tok/s" if task == "generate" else "items/s"
        for header in (speed, "±", *stalled, *last, "memory MB", *energy.values()):
            table.add_column(header, justify="right", no_wrap=True)
        table.add_column("status", overflow="fold", min_width=len("shared-cpu,"))
        for cell in _combinations(cells):
            row = by_record.get(cell.record_id or "")
            where = (Text(_axis_text(cell, axis, row)) for axis in axes)
            metered = energy_cells(row) if row is not None and row.failure is None else {}
            measured = _measured(row)
            measured[2:2] = [_sustained(row) for _ in stalled]
            table.add_row(*where, *measured, *(metered.get(name, "–") for name in energy), _status(cell, row))
        # Threads that differ tell rows apart, so they go last.
        figures = ["memory MB", "p95 ms", "p50 ms", "±"]
        figures.insert(2 if len({cell.threads for cell in cells}) == 1 else 4, "threads")
        hideable = (*list(energy.values())[1:3], *figures)
        parts += [Fitted(table, hideable), *map(Text, _curves(told)), *cheapest(told)]
    return parts


def _curves(rows: Sequence[RunSummary]) -> list[str]:
    """Time per token against tokens per second as the batch grows, one line per recipe and lengths."""
    curves: dict[tuple[Any, ...], dict[int, RunSummary]] = {}
    for row in rows:
        if row.tpot_s is not None and row.decode_tokens_per_s is not None and row.batch is not None:
            key = row.recipe, row.conditions.threads, row.conditions.prompt, row.conditions.new_tokens
            curves.setdefault(key, {})[row.batch] = row
    told = []
    for (recipe, _, prompt, new_tokens), points in curves.items():
        if len(points) < 2:
            continue
        line = ", ".join(
            f"{format_seconds(row.tpot_s.p50)} at {significant(row.decode_tokens_per_s, 3)} tok/s (batch {batch})"
            for batch, row in sorted(points.items())
            if row.tpot_s is not None and row.decode_tokens_per_s is not None
        )
        told.append(f"time per token, {recipe}, prompt {prompt}, {new_tokens} new tokens: {line}")
    return told


def _combinations(cells: Iterable[SweepCell]) -> list[SweepCell]:
    """One cell for all replicates of a combination: one that failed, else one that is done."""
    found: dict[tuple[Any, ...], SweepCell] = {}
    for cell in cells:
        key = cell.model, cell.task, cell.recipe, cell.threads, cell.batch, cell.prompt, cell.new_tokens
        known = found.get(key)
        if known is None or (known.failure is None and (cell.failure is not None or known.status == "pending")):
            found[key] = cell
    return list(found.values())


def _axis_text(cell: SweepCell, axis: str, row: RunSummary | None) -> str:
    value = getattr(cell, axis)
    if value is None and axis == "batch" and row is not None:
        value = row.batch  # the model's own default
    return "–" if value is None else str(value)


def _measured(row: RunSummary | None) -> list[str]:
    if row is None or row.failure is not None or row.throughput_per_s is None or row.latency_s is None:
        return ["–"] * 5
    half_width = row.throughput_interval.half_width if row.throughput_interval else None
    memory = row.memory
    held = (memory.peak_reserved_bytes or memory.peak_rss_bytes) if memory else None
    return [
        significant(row.throughput_per_s, max(3, len(str(round(row.throughput_per_s))))),
        format_share(half_width),
        *_latency_cells(row),
        "n/a" if held is None else significant(held / 1e6, 4),
    ]


def _sustained(row: RunSummary | None) -> str:
    """By the wall clock, where the machine stalled between steps: what a user would get."""
    return "–" if row is None or row.sustained_per_s is None else significant(row.sustained_per_s, 3)


def _latency_cells(row: RunSummary) -> list[str]:
    if row.task == "generate":
        return [format_seconds(row.ttft_s), format_seconds(row.tpot_s.p50 if row.tpot_s else None)]
    assert row.latency_s is not None
    p95 = row.latency_s.p95
    return [significant(row.latency_s.p50 * 1e3, 4), "n/a" if p95 is None else significant(p95 * 1e3, 4)]


def _status(cell: SweepCell, row: RunSummary | None) -> Text:
    if cell.failure is not None:
        return Text(f"failed: {cell.failure.kind} at {cell.failure.stage}", style="red")
    if row is None:
        return Text(cell.status, style="dim")
    doubts = ["numerics ✗"] if row.numerics is not None and row.numerics.is_wrong else []
    bound = [f"{row.bound.label}-bound"] if row.bound.label not in ("unknown", "device") else []
    return Text(
        ", ".join([*row.verdict.labels, *doubts, *bound]), style=TRUST_STYLE.get(row.verdict.labels[0], "yellow")
    )


def _in_reading_order(cells: Iterable[SweepCell]) -> list[SweepCell]:
    """Sorted by model, task, threads, recipe and batch; they were measured in another order."""
    models: dict[str, int] = {}
    recipes: dict[str, int] = {}
    cells = list(cells)
    for cell in cells:
        models.setdefault(cell.model, len(models))
        recipes.setdefault(cell.recipe, len(recipes))
    return sorted(
        cells,
        key=lambda cell: (
            models[cell.model],
            cell.task,
            cell.threads or 0,
            recipes[cell.recipe],
            cell.prompt or 0,
            cell.new_tokens or 0,
            cell.batch or 0,
        ),
    )


def _once_per_reason(summary: SweepSummary) -> list[Any]:
    return list({(left.model, left.task, left.recipe, left.reason): left for left in summary.left_out}.values())


def _name(cell: SweepCell) -> str:
    parts = [cell.model, cell.task, cell.recipe, f"batch {cell.batch}" if cell.batch else ""]
    parts += [f"prompt {cell.prompt}" if cell.prompt else ""]
    parts += [f"{cell.new_tokens} new tokens" if cell.new_tokens else ""]
    parts.append(counted(cell.threads, "thread") if cell.threads else "")
    parts.append(f"replicate {cell.replicate}" if cell.replicate > 1 else "")
    return " ".join(part for part in parts if part)


def _next_step(summary: SweepSummary, estimate: Estimate | None) -> str:
    if estimate is not None:
        return "next: run it without --dry-run; you can stop it at any time, the same command continues"
    if summary.pending:
        return "next: the same command continues with the rest"
    if summary.failed:
        failed = next(cell.record_id or "" for cell in summary.cells if cell.status == "failed")
        return (
            f"next: 'redline history show {failed[:13]}' has the whole error; --retry-failed tries failed cells again"
        )
    return "next: all cells are done; --fresh measures them again, 'redline history export' writes them as CSV"


def _number(value: int | None) -> str:
    return "–" if value is None else str(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
