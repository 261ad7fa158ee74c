"""The history for a person: as a list, everything about one of its records, and benchmarks over time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from redline.analyze.generation import Generation
from redline.analyze.history import SMALLEST_CHANGE, Drift
from redline.analyze.rows import columns_for, row_of, table_of
from redline.analyze.summary import RunSummary
from redline.model.conditions import Conditions, condition_words
from redline.model.fields import Frozen
from redline.model.identity import Benchmark
from redline.model.record import BatchOrigin
from redline.model.units import counted, format_bytes, format_seconds, format_share
from redline.show.cells import generation_cells, limit_lines, ratio_cell, rounded, trust_cell
from redline.show.export import JsonDocument, json_document
from redline.show.result import terminal_table
from redline.show.terminal import Fitted, make_table, one_line
from redline.store import Row

RUNNING = (
    "running: still being measured, or killed on another machine or under an older Redline (these cannot be told apart)"
)


BATCH_WORDS: dict[BatchOrigin, str] = {
    "asked": "as the factory was told",
    "scaled": "found by asking the model which axis holds items",
    "declared": "declared",
    "source": "made so",
    "unknown": "no axis is known to hold items",
    "guessed": "guessed from dimension 0 of the first input, as older versions did",
}


"""What the list also carries of a generation."""


class Listed(NamedTuple):
    """A record in the list: its row in the history, and what tells it from its neighbours."""

    row: Row
    conditions: Conditions
    result: RunSummary | None = None
    """What it measured; None of one that cannot be read."""

    def plain(self) -> dict[str, Any]:
        """As `--json` prints it."""
        found = self.result
        interval = found.throughput_interval if found else None
        return {
            **msgspec.to_builtins(self.row),
            "conditions": msgspec.to_builtins(self.conditions),
            "throughput_per_s": found.throughput_per_s if found else None,
            "sustained_per_s": found.sustained_per_s if found else None,
            "item": found.item if found else None,
            "half_width": interval.half_width if interval else None,
            "vs_first": msgspec.to_builtins(found.vs_first) if found else None,
            "trust": list(found.verdict.labels) if found else None,
            "generation": msgspec.to_builtins(found.generation) if found else None,
        }


SHORT_ID = 13
"""How many characters of an id are shown: they tell records apart, and every command accepts them."""

LISTED = (
    "id", "when", "model", "task", "batch", "recipe", "speed", "±", "vs first", "trust", "conditions", "device", "status",
)  # fmt: skip


def listing(listed: Sequence[Listed]) -> RenderableType:
    table = make_table(None)
    for header in LISTED:
        right = header in ("batch", "speed", "±", "vs first")
        table.add_column(header, justify="right" if right else "left", no_wrap=right or header in ("id", "when"))
    for each in listed:
        table.add_row(*map(Text, _listed_cells(each)))
    shown = Fitted(
        table, ("device", "conditions", "when", "status", "±", "task", "vs first", "trust", "batch", "model")
    )
    running = any(each.row.status == "running" for each in listed)
    return Group(shown, Text(RUNNING, style="dim")) if running else shown


def _listed_cells(each: Listed) -> list[str]:
    row, found = each.row, each.result
    kept = [f"{found.generation.cache} cache"] if found and found.generation else []
    words = ", ".join([*condition_words(each.conditions, row.device).values(), *kept])
    interval = found.throughput_interval if found else None
    half_width = interval.half_width if interval else None
    has_speed = found is not None and found.throughput_per_s is not None
    return [
        row.id[:SHORT_ID],
        _day(row.created_at),
        row.model,
        row.task,
        str(row.batch) if row.batch else "–",
        row.recipe,
        f"{rounded(found.throughput_per_s, half_width)} {found.item or 'item'}/s" if found and has_speed else "–",
        format_share(half_width) if half_width is not None else "–",
        (ratio_cell(found) or "–") if found else "–",
        str(trust_cell(found)) if found and has_speed else "–",
        words,
        row.device_name or row.device,
        row.status,
    ]


def detail(row: RunSummary, record: Any, *, is_cut_off: bool = False) -> RenderableType:
    """Everything about one record, in plain words."""
    unfinished = "cut off: the measuring process ended" if is_cut_off else "running"
    lines: list[tuple[str, str]] = [("record", record.id), ("key", record.key or "n/a")]
    if (prepared := record.prepared) is not None:
        environment, workload = prepared.environment, prepared.workload
        trains = record.spec.workload.task == "train"
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
        lines += [
            ("device", f"{environment.device.name} ({row.device}), driver {environment.device.driver or 'n/a'}"),
            (
                "host",
                f"{environment.cpu}, {counted(environment.logical_cores, 'core')}, {counted(environment.threads, 'thread')}",
            ),
            ("versions", f"python {environment.python}, {versions}"),
            ("model", f"{workload.class_name} from {workload.source}, {workload.parameters:,} parameters"),
            ("inputs", ", ".join(workload.input_shapes)),
            ("batch", f"{workload.batch or 'unknown'}: {BATCH_WORDS[workload.batch_from]}"),
            ("counted", f"{workload.items_per_step} {workload.item} per step"),
            *([("trained", f"{row.conditions.optimizer} on {workload.loss or 'the default loss'}")] if trains else []),
            ("settings", f"seed {row.conditions.seed}, effort {row.conditions.effort}"),
            (
                "warm-up",
                f"{len(prepared.warmup.samples)} steps in {prepared.warmup.seconds:.1f} s: {prepared.warmup.reason}",
            ),
            ("numerics", str(prepared.numerics.reason or "")),
        ]
        lines += [("note", str(each)) for each in workload.notes]
        lines += [(f"switch {each.about}", str(each)) for each in prepared.recipe_notes]
    lines += [("stopped", f"{record.stopped or unfinished} after {len(record.blocks)} blocks")]
    lines += _generation_lines(row) + _latency_lines(row) + _memory_lines(row) + limit_lines(row)
    lines += [("bound", f"{row.bound.label}: {row.bound.evidence}"), ("trust", ", ".join(row.verdict.labels))]
    lines += [("because", str(reason)) for reason in row.verdict.reasons]
    own = record.prepared.workload.notes if record.prepared is not None else ()
    lines += [("note", str(each)) for each in row.verdict.notes if each.code not in {one.code for one in own}]
    if record.failure:
        lines += [("failed", f"{record.failure.kind} at {record.failure.stage}: {record.failure.told}")]
    lines += [("printed", line) for line in (record.closed.printed if record.closed else "").splitlines()]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="dim"), Text(value))
    failure = [Text(record.failure.traceback, style="red")] if record.failure and record.failure.traceback else []
    table, _ = table_of([row_of(row)], "record", columns_for([row]))
    return Group(terminal_table(table), grid, *failure)


def _generation_lines(row: RunSummary) -> list[tuple[str, str]]:
    if (found := row.generation) is None:
        return []
    asked = row.conditions
    cells = generation_cells(row)
    p99 = f", p99 {format_seconds(row.tpot_s.p99)}" if row.tpot_s and row.tpot_s.p99 is not None else ""
    energy = "" if row.energy_per_item_j is None else f"; {row.energy_per_item_j:.3g} J per token"
    return [
        ("text", f"prompt {asked.prompt}, {asked.new_tokens} new tokens, batch {row.batch}, {found.cache} cache"),
        ("first token", f"TTFT {cells['TTFT']}: {cells['prefill tok/s']} tokens of the prompt per second"),
        (
            "further tokens",
            f"TPOT p50 {cells['TPOT']}, p95 {cells['TPOT p95']}{p99}: {cells['decode tok/s']} tok/s{energy}",
        ),
        (
            "reads",
            f"weights {cells['weights']}, cache {format_bytes(found.cache_bytes)}; {_bandwidth(found, cells)}",
        ),
    ]


def _bandwidth(found: Generation, cells: dict[str, str]) -> str:
    faster = "faster than memory can be copied: they stay in a cache of the processor"
    return faster if found.reads_from_cache else f"{cells['of copy']} of the copy bandwidth"


def _latency_lines(row: RunSummary) -> list[tuple[str, str]]:
    if (latency := row.latency_s) is None:
        return []
    tails = ", ".join(
        f"{name} {format_seconds(getattr(latency, name))}" for name in ("p50", "p90", "p95", "p99", "mean", "std")
    )
    return [("latency", f"{tails} ({latency.n} samples, {latency.clock} clock)")]


def _memory_lines(row: RunSummary) -> list[tuple[str, str]]:
    if (memory := row.memory) is None:
        return []
    figures = (
        ("allocated", memory.peak_allocated_bytes),
        ("reserved", memory.peak_reserved_bytes),
        ("context and libraries", memory.context_bytes),
        ("resident on the host", memory.peak_rss_bytes),
    )
    return [("peak memory", ", ".join(f"{name} {format_bytes(value)}" for name, value in figures if value is not None))]


class TrendPoint(Frozen):
    """One record of a series."""

    record_id: str
    at: float
    """Seconds since the epoch."""
    step_s: float
    per_s: float
    """Items per second."""
    commit: str | None = None
    torch: str | None = None
    driver: str | None = None
    tags: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class TrendChange(Frozen):
    """A step. `ratio` is time before over time after: below 1 it got slower."""

    at: float
    ratio: float
    low: float
    high: float
    record_id: str
    """The first record after it."""
    commit_before: str | None = None
    commit: str | None = None
    torch_before: str | None = None
    torch: str | None = None
    driver_before: str | None = None
    driver: str | None = None


class SeriesTrend(Frozen):
    """One benchmark on one device, over time."""

    benchmark: str
    key: str
    device_name: str
    identity: Benchmark
    points: tuple[TrendPoint, ...]
    changes: tuple[TrendChange, ...] = ()
    drift: Drift | None = None


def history_json(series: Sequence[SeriesTrend], *, left_out: int) -> JsonDocument:
    return json_document("history", {"series": msgspec.to_builtins(series), "left_out": left_out})


TEXTS = ("benchmark", "device", "last change")


def history_report(series: Sequence[SeriesTrend], *, left_out: int) -> RenderableType:
    table = make_table(Text("benchmarks over time; the line shows speed, higher is faster", style="bold"))
    for header in ("benchmark", "device", "records", "first", "latest", "step", "trend", "last change"):
        is_text = header in (*TEXTS, "trend")
        table.add_column(header, justify="left" if is_text else "right", overflow="fold", no_wrap=header not in TEXTS)
    for each in series:
        table.add_row(*(Text(one_line(cell)) for cell in _series_cells(each)))
    shown = Fitted(table, ("first", "device", "records", "latest", "step", "last change"))
    told = [Text(f"  {one_line(line)}", style="dim") for each in series for line in _change_lines(each)]
    more = [Text(f"  {left_out} more series: name a model, or raise --limit", style="dim")] if left_out else []
    return Group(shown, *told, *more)


def _series_cells(each: SeriesTrend) -> list[str]:
    steps = [point.step_s for point in each.points]
    last = each.changes[-1] if each.changes else None
    return [
        each.benchmark,
        each.device_name,
        str(len(steps)),
        _day(each.points[0].at),
        _day(each.points[-1].at),
        format_seconds(steps[-1]),
        sparkline(steps),
        "none found" if last is None else f"{1 / last.ratio - 1:+.1%} on {_day(last.at)}",
    ]


def _change_lines(each: SeriesTrend) -> list[str]:
    found = []
    for change in each.changes:
        pairs = (
            ("commit", change.commit_before, change.commit),
            ("torch", change.torch_before, change.torch),
            ("driver", change.driver_before, change.driver),
        )
        told = [f"{name} {_short(before)} → {_short(after)}" for name, before, after in pairs if before != after]
        bounds = f"{1 / change.high - 1:+.1%} to {1 / change.low - 1:+.1%}"
        by = f" ({', '.join(told)})" if told else " (same commit, torch and driver)"
        found.append(f"{each.benchmark}: time {1 / change.ratio - 1:+.1%} ({bounds}) from {_day(change.at)} on{by}")
    if each.drift is not None:
        found.append(
            f"{each.benchmark}: drifts, time {1 / each.drift.ratio - 1:+.1%} "
            f"({1 / each.drift.high - 1:+.1%} to {1 / each.drift.low - 1:+.1%}) from the first record to the last"
        )
    marked = [point for point in each.points if point.tags or point.notes]
    for point in marked[-5:]:
        words = ", ".join((*(f"tag {tag}" for tag in point.tags), *(f"note: {note}" for note in point.notes)))
        found.append(f"{each.benchmark}: {_day(point.at)} {point.record_id[:13]} {words}")
    return found


def plot_history(series: Sequence[SeriesTrend], path: Path) -> None:
    """A picture with one panel per series: throughput over time, changes as vertical lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(series), 1, figsize=(9, 2.4 * len(series)), squeeze=False, layout="constrained")
    for axis, each in zip(axes[:, 0], series, strict=True):
        times = [datetime.fromtimestamp(point.at) for point in each.points]
        axis.plot(times, [point.per_s for point in each.points], ".-", linewidth=0.8)
        for change in each.changes:
            colour = "tab:red" if change.ratio < 1 else "tab:green"
            axis.axvline(datetime.fromtimestamp(change.at), color=colour, linestyle="--")
        axis.set_title(
            one_line(f"{each.benchmark} ({each.device_name})", 110).replace("$", r"\$"), fontsize=8, loc="left"
        )
        axis.set_ylabel("per second", fontsize=8)
        axis.tick_params(labelsize=7)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _day(at: float) -> str:
    return datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")


def _short(value: str | None) -> str:
    return "unknown" if value is None else value[:12]


SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(seconds: Sequence[float], width: int = 24) -> str:
    """The speed over time, higher is faster: medians of equally many records each."""
    if not seconds:
        return ""
    count = min(width, len(seconds))
    edges = [round(index * len(seconds) / count) for index in range(count + 1)]
    speeds = [1 / median(seconds[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(speeds), max(speeds)
    if high / low < 1 + SMALLEST_CHANGE:
        return SPARKS[len(SPARKS) // 2] * count
    return "".join(SPARKS[min(int((each - low) / (high - low) * len(SPARKS)), len(SPARKS) - 1)] for each in speeds)
