"""What a person reads in a terminal: aligned numbers with units, rounded to what their interval supports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.accuracy import error_text
from redline.analyze.summary import RunSummary
from redline.analyze.trust import IN_COMPANY, SPREAD
from redline.protocol import HealthItem, ModelNames
from redline.record import QUANTIZED_FORMATS, Numerics
from redline.report.limit_cells import limit_cells, limit_lines, limit_remarks
from redline.store import Row
from redline.units import format_bytes, format_seconds, format_share, significant

PIPE_WIDTH = 160
"""Where there is no terminal to measure: wide enough for every column."""

TRUST_STYLE = {"valid": "green", "invalid": "red"}


def make_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=stderr, highlight=False, width=PIPE_WIDTH)
    return console


def as_text(report: RenderableType) -> str:
    """A report without colours, as wide as it needs to be."""
    console = Console(width=PIPE_WIDTH, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as captured:
        console.print(report)
    return captured.get()


def run_table_text(rows: Sequence[RunSummary]) -> str:
    return as_text(RunReport(rows))


class RunReport:
    """One table per workload, what to know about single rows below, the next step last."""

    def __init__(self, rows: Sequence[RunSummary]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for _, together in groupby(self._rows, key=_workload):
            group = list(together)
            yield fitting_table(group, console)
            if any(row.cold_start_s for row in group):
                yield cold_start_table(group)
            yield from _remarks(group)
            yield from limit_remarks(group)
        yield Text(_next_step(self._rows), style="bold")


EXPENDABLE = ("optimizer", "backward", "forward", "of peak", "memory", "p95 ms", "left", "bound", "p50 ms")
"""What a narrow terminal does without, in this order. Trust is never hidden."""
FOLDED = {"recipe": 24, "trust": 14}
"""Columns whose text may go on in the next line, and the width below which that is no longer readable."""
GAP = 3


def fitting_table(rows: Sequence[RunSummary], console: Console) -> Table:
    """The table with as many columns as the terminal has room for."""
    hidden: list[str] = []
    for column in EXPENDABLE:
        if _needed_width(rows, hidden) <= console.width:
            break
        if column in _columns(rows):
            hidden.append(column)
    table = run_table(rows, hidden)
    if hidden:
        table.caption = f"not shown in this width: {', '.join(hidden)}"
    return table


def _needed_width(rows: Sequence[RunSummary], hidden: Collection[str]) -> int:
    needed = 0
    for name, header in _columns(rows).items():
        if name not in hidden:
            texts = [header, *(str(_row_cells(row).get(name, "–")) for row in rows)]
            needed += min(max(map(len, texts)), FOLDED.get(name, 1000)) + GAP
    return needed


def run_table(rows: Sequence[RunSummary], hidden: Collection[str] = ()) -> Table:
    columns = {name: header for name, header in _columns(rows).items() if name not in hidden}
    table = make_table(_title(rows))
    for name, header in columns.items():
        if name in FOLDED:
            table.add_column(header, overflow="fold")
        else:
            table.add_column(Text(header), justify="left" if name == "bound" else "right", no_wrap=True)
    for row in rows:
        cells = _row_cells(row)
        table.add_row(*(cells.get(name, "–") for name in columns))
    return table


def _row_cells(row: RunSummary) -> dict[str, str | Text]:
    return _failed_cells(row) if row.failure else _cells(row)


def _columns(rows: Sequence[RunSummary]) -> dict[str, str]:
    """Names of the columns and what stands above them."""
    first = rows[0]
    item = next((row.item for row in rows if row.item), "item")
    phases = ("forward", "backward", "optimizer") if first.task == "train" else ()
    return {
        "recipe": "recipe",
        "throughput": f"{item}/s",
        "p50 ms": "p50 ms",
        "p95 ms": "p95 ms",
        "±": "±",
        **{phase: phase for phase in phases},
        "memory": _memory_header(rows),
        "versus": f"vs {first.vs_first.recipe if first.vs_first else first.recipe}"[:24],
        "error": "rel. error",
        **({"of peak": "of peak", "left": "left"} if any(row.roofline for row in rows) else {}),
        "bound": "bound",
        "trust": "trust",
    }


def cold_start_table(rows: Sequence[RunSummary]) -> Table:
    table = make_table(Text("cold start, apart", style="dim"))
    table.add_column("recipe", overflow="fold", min_width=12)
    for header in ("import", "worker", "build", "first call", "compiling", "cache"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if (cold := row.cold_start_s) is not None:
            times = (cold.import_, cold.start, cold.build, cold.first_call, cold.compile)
            told = ["–" if value is None else format_seconds(value) for value in times]
            table.add_row(Text(row.recipe), *told, cold.compile_cache or "–")
    return table


def _cells(row: RunSummary) -> dict[str, str | Text]:
    latency = row.latency_s
    half_width = row.throughput_interval.half_width if row.throughput_interval else None
    phases = row.phases_s or {}
    return {
        "recipe": Text(row.recipe),
        "throughput": _rounded(row.throughput_per_s, half_width),
        "p50 ms": _milliseconds(latency.p50 if latency else None, half_width),
        "p95 ms": _milliseconds(latency.p95 if latency else None, half_width),
        "±": format_share(half_width),
        **{name: format_seconds(phases.get(name)) for name in ("forward", "backward", "optimizer")},
        "memory": _memory_cell(row),
        "versus": _ratio_cell(row),
        "error": error_cell(row.numerics),
        **limit_cells(row),
        "bound": _bound_cell(row),
        "trust": _trust_cell(row),
    }


def _failed_cells(row: RunSummary) -> dict[str, str | Text]:
    assert row.failure is not None
    told = Text(f"failed: {row.failure.kind} at {row.failure.stage}", style="red")
    return {"recipe": Text(row.recipe), "trust": told}


def _ratio_cell(row: RunSummary) -> str:
    versus = row.vs_first
    if versus is None:
        return "–" if row.group else ""
    if versus.low is None or versus.high is None:
        return f"{versus.ratio:.2f}× (few rounds)"
    return f"{versus.ratio:.2f}× ({versus.low:.2f}–{versus.high:.2f})"


def error_cell(numerics: Numerics | None, *, with_steps: bool = False) -> Text:
    told = error_text(numerics, with_steps=with_steps)
    dim = numerics is None or not numerics.is_compared
    return Text(told, style="red" if told.endswith("✗") else "dim" if dim else "")


def bound_word(row: RunSummary) -> str:
    if row.bound.label != "unknown":
        return row.bound.label
    return "not host" if "not the host" in row.bound.evidence else "unknown"


def _bound_cell(row: RunSummary) -> Text:
    if row.bound.label != "unknown":
        return Text(row.bound.label, style="yellow" if row.bound.label == "host" else "")
    return Text(bound_word(row), style="dim")


def _trust_cell(row: RunSummary) -> Text:
    told = ", ".join(row.verdict.labels)
    if row.verdict.labels == ("noisy",) and all(reason.startswith("latency:") for reason in row.verdict.reasons):
        told = "noisy (latency)"  # the throughput beside it is sound
    if row.verdict.trusted and any(SPREAD in note for note in row.verdict.notes):
        told = "valid, noted"  # how wide it scatters stands below the table
    return Text(told, style=TRUST_STYLE.get(row.verdict.labels[0], "yellow"))


def _memory_cell(row: RunSummary) -> str:
    memory = row.memory
    if memory is None:
        return "n/a"
    value = memory.peak_reserved_bytes if memory.peak_reserved_bytes is not None else memory.peak_rss_bytes
    return "n/a" if value is None else significant(value / 1e6, 3 if value < 1e8 else 4)


def _memory_header(rows: Iterable[RunSummary]) -> str:
    on_device = any(row.memory and row.memory.peak_reserved_bytes is not None for row in rows)
    return "reserved MB" if on_device else "RSS MB"


def _milliseconds(value: float | None, half_width: float | None) -> str:
    return "n/a" if value is None else _rounded(value * 1e3, half_width)


def _rounded(value: float | None, half_width: float | None) -> str:
    """As many digits as the interval supports, and one more."""
    if value is None:
        return "n/a"
    digits = 3 if half_width is None or half_width > 0.02 else 4
    return significant(value, digits) if value < 10**digits else significant(round(value), len(str(round(value))))


def _title(rows: Sequence[RunSummary]) -> Text:
    first = rows[0]
    where = next((row.device_name for row in rows if row.device_name), None)
    batch = next((row.batch for row in rows if row.batch), None)
    parts = [
        first.model,
        first.task,
        f"batch {batch}" if batch else "",
        f"{where} ({first.device})" if where else first.device,
    ]
    return Text(" · ".join(part for part in parts if part), style="bold")


def _workload(row: RunSummary) -> tuple[Any, ...]:
    return row.model, row.task, row.device, row.group or row.batch


def _remarks(rows: Sequence[RunSummary]) -> list[Text]:
    """Why rows failed, why numbers are not to be trusted, why numerics did not pass."""
    told = []
    for row in rows:
        if row.failure:
            about = "" if row.failure.message.startswith(f"{row.recipe}:") else f"{row.recipe}: "
            told.append(Text(f"  {about}{row.failure.message}", style="red"))
            continue
        if not row.verdict.trusted:
            told += [Text(f"  {row.recipe}: {reason}", style="yellow") for reason in row.verdict.reasons]
        if row.numerics and row.numerics.is_wrong:
            told.append(Text(f"  {row.recipe}: numerics: {row.numerics.reason}", style="red"))
        elif _is_quantized(row):
            told.append(
                Text(f"  {row.recipe}: quantized: only a check on your own data tells whether the model bears it")
            )
        told += [
            Text(f"  {row.recipe}: {note}", style="dim")
            for note in row.verdict.notes
            if "without a ratio" in note or note.startswith(IN_COMPANY) or (row.verdict.trusted and SPREAD in note)
        ]
    return told


def _next_step(rows: Sequence[RunSummary]) -> str:
    measured = [row for row in rows if row.failure is None]
    if not measured:
        return "next: nothing could be measured; 'redline doctor' looks at the machine, 'redline show ID' tells the whole error"
    best = max(
        (row for row in measured if row.vs_first and (row.vs_first.low or 0) > 1 and _may_be_recommended(row)),
        key=lambda row: row.vs_first.ratio if row.vs_first else 0.0,
        default=None,
    )
    if best and best.vs_first:
        told = f"next: {best.recipe} is the fastest here that keeps the numbers right ({best.vs_first.ratio:.2f}×)"
        if any(reason.startswith("throughput:") for reason in best.verdict.reasons):
            told += ", but its times are noisy: look again on a quieter machine or with a larger batch"
        return (
            f"{told}; it is host-bound: a CUDA graph (graphs) takes Python out of the way"
            if (best.bound.label == "host")
            else f"{told}; 'redline show {best.record_id[:13]}' tells all about it"
        )
    host = next((row for row in measured if row.bound.label == "host"), None)
    if host:
        return f"next: {host.recipe} is host-bound: try it with +graphs, or a larger batch"
    if not any(row.vs_first for row in measured):
        return "next: set it against other recipes, e.g. -r baseline -r channels-last -r channels-last+compile"
    if any(row.vs_first and (row.vs_first.low or 0) > 1 and _is_quantized(row) for row in measured):
        return "next: only quantized recipes are faster than the first here; check them on your own data, or try others"
    return "next: no recipe here is faster than the first; try others ('redline run --help' lists the steps)"


def _may_be_recommended(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.passed and not _is_quantized(row)


def _is_quantized(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.number_format in QUANTIZED_FORMATS


def listing(rows: Sequence[Row]) -> Table:
    table = make_table(None)
    for header in ("id", "when", "model", "task", "batch", "recipe", "device", "status"):
        table.add_column(header, overflow="fold", justify="right" if header == "batch" else "left")
    for row in rows:
        when = datetime.fromtimestamp(row.created_at).strftime("%Y-%m-%d %H:%M")
        batch = str(row.batch) if row.batch else "–"
        cells = (row.id, when, row.model, row.task, batch, row.recipe, row.device_name or row.device, row.status)
        table.add_row(*(Text(cell) for cell in cells))
    return table


def model_listing(names: ModelNames) -> RenderableType:
    table = make_table(None)
    for header in ("model", "source", "kind"):
        table.add_column(header)
    for model in names.models:
        table.add_row(Text(model.name), model.source, model.kind)
    return Group(table, f"{len(names.models)} models", *(Text(line, style="dim") for line in names.missing))


def health_report(items: Sequence[HealthItem]) -> Table:
    table = make_table(None)
    table.add_column("")
    table.add_column("what", no_wrap=True)
    table.add_column("seen", overflow="fold")
    table.add_column("how to mend it", overflow="fold")
    signs = {True: Text("ok", style="green"), False: Text("✗", style="red"), None: Text("–", style="dim")}
    for item in items:
        table.add_row(signs[item.ok], Text(item.name), Text(item.seen), Text(item.mend))
    return table


def detail(row: RunSummary, record: Any) -> RenderableType:
    """Everything about one record, in plain words."""
    lines: list[tuple[str, str]] = [("record", record.id), ("key", record.key or "n/a")]
    if (prepared := record.prepared) is not None:
        environment, workload = prepared.environment, prepared.workload
        versions = ", ".join(f"{name} {version}" for name, version in environment.versions.items())
        lines += [
            ("device", f"{environment.device.name} ({row.device}), driver {environment.device.driver or 'n/a'}"),
            ("host", f"{environment.cpu}, {environment.logical_cores} cores, {environment.threads} threads"),
            ("versions", f"python {environment.python}, {versions}"),
            ("model", f"{workload.class_name} from {workload.source}, {workload.parameters:,} parameters"),
            ("inputs", ", ".join(workload.input_shapes)),
            (
                "warm-up",
                f"{len(prepared.warmup.samples)} steps in {prepared.warmup.seconds:.1f} s: {prepared.warmup.reason}",
            ),
            ("numerics", prepared.numerics.reason),
        ]
        lines += [("note", note) for note in workload.notes]
        lines += [(f"step {name}", note) for name, note in prepared.recipe_notes.items()]
    lines += [("stopped", f"{record.stopped or 'running'} after {len(record.blocks)} blocks")]
    lines += _latency_lines(row) + _memory_lines(row) + limit_lines(row)
    lines += [("bound", f"{row.bound.label}: {row.bound.evidence}"), ("trust", ", ".join(row.verdict.labels))]
    lines += [("because", reason) for reason in row.verdict.reasons] + [("note", note) for note in row.verdict.notes]
    grid = Table.grid(padding=(0, 2))
    for name, value in lines:
        grid.add_row(Text(name, style="dim"), Text(value))
    failure = [Text(record.failure.traceback, style="red")] if record.failure and record.failure.traceback else []
    return Group(run_table([row]), grid, *failure)


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


def plain_table(title: str) -> Table:
    return make_table(Text(title, style="dim"))


def make_table(title: Text | None) -> Table:
    return Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", pad_edge=False, show_edge=False, padding=(0, 1)
    )
