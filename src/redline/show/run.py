"""The report of a run: aligned numbers with units, rounded to what their interval supports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.summary import RunSummary
from redline.model.spec import BASELINE
from redline.model.units import format_seconds, format_share, significant
from redline.show.cells import (
    bound_cell,
    cheapest,
    energy_cells,
    energy_columns,
    error_cell,
    generation_cells,
    headline,
    limit_cells,
    limit_remarks,
    milliseconds,
    overview,
    ratio_cell,
    rounded,
    trust_cell,
)
from redline.show.next_step import next_step, remarks
from redline.show.notebook import Bars
from redline.show.terminal import GAP, make_table

EXPENDABLE = (
    "cache", "weights", "prefill tok/s", "TPOT p95",
    "utilisation", "power", "optimizer", "backward", "forward", "of peak", "memory", "p95 ms", "energy", "left", "bound",
    "p50 ms", "cost",
)  # fmt: skip
"""Columns that a narrow terminal hides, in this order."""

LAST_RESORT = ("error", "±", "versus")
"""Columns that a very narrow terminal hides too, once recipe and trust have their least width; those two always stay."""

COMFORTABLE = {"recipe": 24, "trust": 14}
"""Columns whose text may wrap, and the width they keep while other columns can be hidden instead."""
READABLE = {"recipe": 14, "trust": 12}
"""The width below which they cannot be read."""

COLD_EXPENDABLE = ("cache", "import", "worker", "build", "first call")


def speed_bars(rows: Sequence[RunSummary]) -> Bars | None:
    """Speeds with their intervals, row by row."""
    timed = [row for row in rows if row.throughput_per_s is not None]
    if not timed:
        return None
    several = len({(row.model, row.batch) for row in timed}) > 1
    bars = [
        (
            f"{row.model} b{row.batch} {row.recipe}" if several else row.recipe,
            row.throughput_per_s or 0.0,
            row.throughput_interval.low if row.throughput_interval else None,
            row.throughput_interval.high if row.throughput_interval else None,
        )
        for row in timed
    ]
    return Bars(headline(timed) if not several else "speed", f"{timed[0].item or 'items'} per second", bars)


class RunReport:
    """One table per workload, what to know about single rows below; then all in one table, and the next step."""

    def __init__(self, rows: Sequence[RunSummary], *, with_next: bool = True) -> None:
        self._rows = rows
        self._with_next = with_next

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups = [list(together) for _, together in groupby(self._rows, key=_workload)]
        for group in groups:
            yield FittingTable(group)
            if any(row.cold_start_s for row in group):
                yield cold_start_table(group, console.width)
            yield from remarks(group)
            yield from limit_remarks(group)
            yield from cheapest(group)
        if len(groups) > 1:
            yield overview(groups)
        if self._with_next:
            yield Text(next_step(self._rows), style="bold")


class FittingTable:
    """The table with as many columns as the terminal has room for."""

    def __init__(self, rows: Sequence[RunSummary]) -> None:
        self._rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths, room = _widths(self._rows), console.width + GAP
        hidden = _too_many(_at_most(widths, COMFORTABLE), EXPENDABLE, room)
        left = {name: width for name, width in widths.items() if name not in hidden}
        hidden += _too_many(_at_most(left, READABLE), LAST_RESORT, room)
        table = run_table(self._rows, hidden)
        _share_out(table, widths, room - _taken(widths, {*hidden, *COMFORTABLE}))
        if hidden:
            table.caption = _not_shown(hidden)
        yield table


def _widths(rows: Sequence[RunSummary]) -> dict[str, int]:
    """What each column needs to stand on one line."""
    cells = [_row_cells(row) for row in rows]
    return {
        name: max(len(header), *(len(str(row.get(name, "–"))) for row in cells))
        for name, header in _columns(rows).items()
    }


def _at_most(widths: Mapping[str, int], folded: Mapping[str, int]) -> dict[str, int]:
    return {name: min(width, folded.get(name, width)) for name, width in widths.items()}


def _taken(widths: Mapping[str, int], hidden: Collection[str]) -> int:
    return sum(width + GAP for name, width in widths.items() if name not in hidden)


def _too_many(widths: Mapping[str, int], expendable: Iterable[str], room: int) -> list[str]:
    """The columns to hide, in the order in which they may go, until the rest fits."""
    hidden: list[str] = []
    for name in expendable:
        if _taken(widths, hidden) <= room:
            break
        if name in widths:
            hidden.append(name)
    return hidden


def _share_out(table: Table, widths: Mapping[str, int], room: int) -> None:
    """Between recipe and trust. By itself rich would take from the recipe alone until it is as narrow as trust."""
    room -= len(COMFORTABLE) * GAP
    modest = min(COMFORTABLE["recipe"], room - READABLE["trust"])
    table.columns[0].width = max(1, min(widths["recipe"], max(room - widths["trust"], modest)))


def _not_shown(hidden: Iterable[str]) -> str:
    return f"not shown at this width: {', '.join(hidden)}"


def run_table(rows: Sequence[RunSummary], hidden: Collection[str] = ()) -> Table:
    columns = {name: header for name, header in _columns(rows).items() if name not in hidden}
    table = make_table(_title(rows))
    for name, header in columns.items():
        if name in COMFORTABLE:
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
    phases: tuple[str, ...] = ("forward", "backward", "optimizer") if first.task == "train" else ()
    if first.task == "generate":
        phases = ("TTFT", "TPOT", "TPOT p95", "prefill tok/s", "decode tok/s", "of copy", "weights", "cache")
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
        **energy_columns(rows, item, on_gpu=any(row.device != "cpu" for row in rows)),
        "bound": "bound",
        "trust": "trust",
    }


def cold_start_table(rows: Sequence[RunSummary], width: int) -> Table:
    """What came before the first step, in as many columns as there is room for."""
    told = [cells for row in rows if (cells := _cold_cells(row))]
    widths = {name: max(len(name), *(len(cells[name]) for cells in told)) for name in told[0]}
    hidden = _too_many(_at_most(widths, READABLE), COLD_EXPENDABLE, width + GAP)
    table = make_table(Text("Cold start (not included above)", style="dim"))
    table.add_column("recipe", overflow="fold", min_width=READABLE["recipe"])
    shown = [name for name in widths if name not in ("recipe", *hidden)]
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for cells in told:
        table.add_row(Text(cells["recipe"]), *(cells[name] for name in shown))
    if hidden:
        table.caption = _not_shown(hidden)
    return table


def _cold_cells(row: RunSummary) -> dict[str, str]:
    if (cold := row.cold_start_s) is None:
        return {}
    times = {
        "import": cold.import_s,
        "worker": cold.start_s,
        "build": cold.build_s,
        "first call": cold.first_call_s,
        "compiling": cold.compile_s,
    }
    told = {name: "–" if value is None else format_seconds(value) for name, value in times.items()}
    return {"recipe": row.recipe, **told, "cache": cold.compile_cache or "–"}


def _cells(row: RunSummary) -> dict[str, str | Text]:
    latency = row.latency_s
    half_width = row.throughput_interval.half_width if row.throughput_interval else None
    phases = row.phases_s or {}
    return {
        "recipe": Text(_label(row)),
        "throughput": rounded(row.throughput_per_s, half_width),
        "p50 ms": milliseconds(latency.p50 if latency else None, half_width),
        "p95 ms": milliseconds(latency.p95 if latency else None, half_width),
        "±": format_share(half_width),
        **{name: format_seconds(phases.get(name)) for name in ("forward", "backward", "optimizer")},
        **generation_cells(row),
        "memory": _memory_cell(row),
        "versus": ratio_cell(row),
        "error": error_cell(row.numerics),
        **limit_cells(row),
        **energy_cells(row),
        "bound": bound_cell(row),
        "trust": trust_cell(row),
    }


def _failed_cells(row: RunSummary) -> dict[str, str | Text]:
    assert row.failure is not None
    told = Text(f"failed: {row.failure.kind} at {row.failure.stage}", style="red")
    return {"recipe": Text(_label(row)), "trust": told}


def _label(row: RunSummary) -> str:
    """The recipe. Functions that were compared go by their own names."""
    if row.task != "step" or not row.group:
        return row.recipe
    return row.model if row.recipe == BASELINE else f"{row.model} {row.recipe}"


def _memory_cell(row: RunSummary) -> str:
    memory = row.memory
    if memory is None:
        return "n/a"
    value = memory.peak_reserved_bytes if memory.peak_reserved_bytes is not None else memory.peak_rss_bytes
    return "n/a" if value is None else significant(value / 1e6, 3 if value < 1e8 else 4)


def _memory_header(rows: Iterable[RunSummary]) -> str:
    on_device = any(row.memory and row.memory.peak_reserved_bytes is not None for row in rows)
    return "reserved MB" if on_device else "RSS MB"


def _title(rows: Sequence[RunSummary]) -> Text:
    processes = max(len(row.replicate_ids) for row in rows)
    return Text(headline(rows, f"{processes} processes each" if processes else ""), style="bold")


def _workload(row: RunSummary) -> tuple[Any, ...]:
    """Rows of one table: those measured together, or the same work under other recipes."""
    model = "" if row.task == "step" and row.group else row.model  # functions that were compared stand in one table
    return model, row.task, row.device, row.group or (row.batch, row.conditions)
