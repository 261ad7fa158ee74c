"""What a model has to do: the summary, the modules that do most of it at each depth, and the whole tree."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.flops import FlopsSummary, ModuleRow
from redline.model.units import format_bytes, format_count, format_seconds, format_share
from redline.report.terminal import Fitted, make_table

DEFAULT_DEPTH = 2
TOP = 3
"""Modules named at each depth."""
MOST_LISTED = 200
"""How many modules of the tree are shown without --depth: those that do the most."""


class FlopsReport:
    def __init__(self, found: FlopsSummary, depth: int | None = None) -> None:
        self._found = found
        self._depth = DEFAULT_DEPTH if depth is None else depth
        within = [row for row in found.modules if row.depth <= self._depth]
        self._rows = within if depth is not None else _largest(within)
        self._left_out = len(within) - len(self._rows)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _summary(self._found)
        yield Text("")
        if self._depth:
            yield _top(self._found, self._depth)
            yield Text("")
        yield _tree(self._found, self._rows)
        if self._left_out:
            yield Text(
                f"  {self._left_out} smaller modules are not shown: --depth {self._depth} lists all", style="dim"
            )
        hidden = sum(row.depth > self._depth for row in self._found.modules)
        if hidden:
            yield Text(f"  {hidden} modules are nested deeper: --depth {self._depth + 1} shows more", style="dim")
        for note in self._found.notes:
            yield Text(f"  {note}", style="dim")


def _summary(found: FlopsSummary) -> Table:
    grid = Table.grid(padding=(0, 2))
    batch = f"batch {found.batch}" if found.batch else "" if found.task == "step" else "batch unknown"
    parts = (found.model, found.task, batch, found.recipe)
    grid.title = Text(" · ".join(part for part in parts if part), style="bold")
    grid.title_justify = "left"
    for name, value in _lines(found):
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid


def _lines(found: FlopsSummary) -> Iterator[tuple[str, str]]:
    if found.input_shapes:
        yield "inputs", ", ".join(found.input_shapes)
    yield "parameters", format_count(found.params)
    yield "forward", f"{format_count(found.macs)} MACs = {format_count(found.flops)} FLOPs of products"
    if found.backward_flops is not None:
        ratio = f" ({found.backward_flops / found.flops:.2f}× forward)" if found.flops else ""
        yield "backward", f"{format_count(found.backward_flops)} FLOPs{ratio}"
    others = ", ".join(f"{kind} {format_count(flops)}" for kind, flops in found.other_flops.items())
    yield "besides", f"{others} FLOPs" if others else "nothing"
    yield "in", ", ".join(f"{form} {format_count(flops)}" for form, flops in found.flops_by_format.items()) or "–"
    yield "minimum bytes", f"{format_bytes(found.min_bytes)} operator by operator, unfused (forward)"
    once = (
        "weights and optimizer state read and written" if found.task == "train" else "weights, inputs and outputs once"
    )
    yield "compulsory bytes", f"{format_bytes(found.compulsory_bytes)}: {once}"
    uncounted = ", ".join(f"{one.name} ({one.calls}×)" for one in found.uncounted)
    yield "not counted", uncounted or "nothing was left out"
    if found.for_these_inputs is not None:
        yield "for these inputs", f"counted in one real step: {found.for_these_inputs}"
    if found.latency_s is not None:
        yield "latency", f"{format_seconds(found.latency_s)} in modules on {found.device_name}, by {found.latency_by}"
    for phase in found.phases:
        reached = f" at {format_count(phase.flops_per_s)} FLOP/s" if phase.flops else ""
        yield _PHASES[phase.name], f"{format_seconds(phase.latency_s)}{reached}, without the profiler"


_PHASES = {"forward": "forward time", "backward": "backward time", "optimizer": "optimizer time", "step": "step time"}


def _top(found: FlopsSummary, depth: int) -> Fitted:
    table = make_table(Text("most at each depth", style="dim"))
    table.add_column("depth", justify="right")
    for header in ("parameters", "MACs", *(("latency",) if found.latency_s is not None else ())):
        table.add_column(header, overflow="fold")
    for level in range(1, depth + 1):
        rows = [row for row in found.modules if row.depth == level]
        if rows:
            cells = [_most(rows, "params", found.params), _most(rows, "macs", found.macs)]
            if found.latency_s is not None:
                cells.append(_most(rows, "latency_s", found.latency_s))
            table.add_row(str(level), *cells)
    return Fitted(table)


def _most(rows: list[ModuleRow], figure: str, whole: float) -> str:
    best = sorted(rows, key=lambda row: -(getattr(row, figure) or 0))[:TOP]
    return (
        ", ".join(
            f"{row.path} {format_share((getattr(row, figure) or 0) / whole)}" for row in best if getattr(row, figure)
        )
        or "–"
        if whole
        else "–"
    )


UNFOLDED = 28
"""Characters of a module's name that stand on one line; columns are left out before."""


def _largest(rows: list[ModuleRow]) -> list[ModuleRow]:
    """Those that do the most, in the order of the tree."""
    if len(rows) <= MOST_LISTED:
        return rows
    ranked = sorted(range(len(rows)), key=lambda at: (-rows[at].macs, -rows[at].params, -rows[at].min_bytes, at))
    return [rows[at] for at in sorted(ranked[:MOST_LISTED])]


def _tree(found: FlopsSummary, listed: list[ModuleRow]) -> Fitted:
    table = make_table(Text("modules, each with everything inside it", style="dim"))
    rows = [(Text("  " * row.depth + _name(row)), row) for row in listed]
    longest = max((len(name) for name, _ in rows), default=0)
    table.add_column("module", overflow="fold", min_width=min(longest, UNFOLDED))
    headers = ["params", "params %", "MACs", "MACs %", "FLOPs", "backward", "min bytes"]
    if found.latency_s is not None:
        headers += ["latency", "of time", "FLOP/s"]
    if any(row.bound for row in found.modules):
        headers.append("bound")
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for name, row in rows:
        cells = _cells(row, found)
        table.add_row(name, *(cells[header] for header in headers))
    return Fitted(table)


def _name(row: ModuleRow) -> str:
    own = row.path.rpartition(".")[2]
    return f"{own} ({row.type})" if own else row.type


def _cells(row: ModuleRow, found: FlopsSummary) -> dict[str, str]:
    return {
        "params": format_count(row.params),
        "MACs": format_count(row.macs),
        "FLOPs": format_count(row.flops),
        "params %": "–" if row.params_share is None else format_share(row.params_share),
        "MACs %": "–" if row.macs_share is None else format_share(row.macs_share),
        "backward": format_count(row.backward_flops),
        "min bytes": format_bytes(row.min_bytes),
        "latency": format_seconds(row.latency_s),
        "of time": format_share(row.share),
        "FLOP/s": "–" if row.achieved_flops_per_s is None else format_count(row.achieved_flops_per_s),
        "bound": row.bound or "–",
    }
