"""The memory of a step: by kind, by module, over its course."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from rich.console import Group, RenderableType
from rich.text import Text

from redline.model.fields import Frozen
from redline.model.units import format_bytes, format_share
from redline.model.work import MemoryCategory, MemoryUse
from redline.show.canvas import COLOURS, label_text, new_figure, save_figure
from redline.show.terminal import Fitted, make_table, one_line

SHOWN = 12
"""Modules a person is shown; the document has more."""


class MemoryRow(Frozen):
    """One model under one recipe."""

    model: str
    task: str
    recipe: str
    batch: int | None
    device: str
    use: MemoryUse
    saved_bytes: int | None = None
    """Of the peak, against the first row of the same model."""
    compared: str | None = None
    """The command that compares it with bf16; None for a live module."""
    sized: str | None = None
    """The command that finds its largest batch."""


def memory_report(rows: Sequence[MemoryRow], failures: Mapping[str, str] | None = None) -> RenderableType:
    """Of each model, recipes beside each other by kind of memory, then who holds the first one's peak."""
    models = dict.fromkeys(row.model for row in rows)
    parts = [_of_one_model([row for row in rows if row.model == model]) for model in models]
    failed = [Text(one_line(f"  {name}: failed: {said}"), style="red") for name, said in (failures or {}).items()]
    return Group(*parts, *failed)


def _of_one_model(rows: Sequence[MemoryRow]) -> RenderableType:
    first = rows[0]
    batch = f" · batch {first.batch}" if first.batch else ""
    table = make_table(Text(f"{one_line(first.model)} · {first.task}{batch} · {first.device}", style="bold"))
    kinds = [kind for kind in get_args(MemoryCategory) if any(kind in row.use.categories for row in rows)]
    table.add_column("recipe", overflow="fold")
    for header in ("peak", *kinds, "fragments", "saved"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        cells = [format_bytes(row.use.categories.get(kind, 0)) for kind in kinds]
        saved = "–" if row.saved_bytes is None else format_share(row.saved_bytes / rows[0].use.peak_bytes)
        table.add_row(
            row.recipe, format_bytes(row.use.peak_bytes), *cells, format_bytes(row.use.fragments_bytes), saved
        )
    holders = make_table(Text(f"who holds the peak, which is in the {first.use.peak_phase} pass", style="dim"))
    for header in ("module", "bytes", "share", "mostly", "made at"):
        number = header in ("bytes", "share")
        holders.add_column(header, justify="right" if number else "left", overflow="fold", no_wrap=number)
    for holder in first.use.holders[:SHOWN]:
        share = format_share(holder.bytes / first.use.peak_bytes)
        name = one_line(holder.module) or "(no module)"
        holders.add_row(name, format_bytes(holder.bytes), share, holder.category, holder.line or "–")
    # The kind that the advice names is the largest: in a narrow window the small ones go first.
    smallest = sorted(kinds, key=lambda kind: max(row.use.categories.get(kind, 0) for row in rows))
    hidden = ("fragments", *smallest, "saved")
    shown = Fitted(holders, ("made at", "mostly", "share"))
    return Group(Fitted(table, hidden), shown, Text(_next(rows), style="bold"))


def _next(rows: Sequence[MemoryRow]) -> str:
    """What to do about the largest part. A batch that is not known is not searched for either."""
    first, parts = rows[0], rows[0].use.categories
    most = max(parts, key=lambda kind: parts[kind])
    if most == "optimizer state":
        return "next: the optimizer's state is the largest part; SGD without momentum holds none"
    told = f"next: {most} are the largest part"
    if len(rows) == 1 and first.task == "train" and most == "activations" and first.compared is not None:
        return f"{told}; '{first.compared}' shows what bf16 saves of them"
    if first.batch is None or first.sized is None:
        return told
    return f"{told}; '{first.sized}' finds the largest batch that fits"


def _draw_kinds(axes: Any, use: MemoryUse) -> None:
    """Each kind on top of the ones before it."""
    points = use.timeline
    kinds = [kind for kind in get_args(MemoryCategory) if any(point.categories.get(kind) for point in points)]
    axes.stackplot(
        [point.at for point in points],
        [[point.categories.get(kind, 0) / 2**20 for point in points] for kind in kinds],
        labels=kinds,
        colors=[COLOURS[number % len(COLOURS)] for number in range(len(kinds))],
    )
    _draw_reserved(axes, use, "black", "reserved")


def _draw_reserved(axes: Any, use: MemoryUse, colour: str, label: str | None) -> None:
    """Dashed, above what is given out; nothing where no allocator tells."""
    known = [point for point in use.timeline if point.reserved_bytes is not None]
    if known:
        heights = [(point.reserved_bytes or 0) / 2**20 for point in known]
        axes.plot([point.at for point in known], heights, color=colour, linestyle="--", linewidth=1.2, label=label)


def _tells_reserved(rows: Sequence[MemoryRow]) -> bool:
    return any(point.reserved_bytes is not None for row in rows for point in row.use.timeline)


def draw_memory(rows: Sequence[MemoryRow], path: Path) -> None:
    """Allocated bytes over a step, of one recipe by kind, of several a line each; what is reserved is dashed."""
    figure, axes = new_figure(8.0, 4.4)
    drawn = list(rows)
    if len(rows) == 1:
        _draw_kinds(axes, rows[0].use)
        rows = ()
    for number, row in enumerate(rows):
        points = row.use.timeline
        axes.plot(
            [point.at for point in points],
            [point.bytes / 2**20 for point in points],
            color=COLOURS[number % len(COLOURS)],
            label=label_text(row.recipe if len({each.model for each in rows}) == 1 else f"{row.model} {row.recipe}"),
        )
        _draw_reserved(axes, row.use, COLOURS[number % len(COLOURS)], None)
    axes.set_xlabel("course of a step, by allocations")
    axes.set_ylabel("MiB, allocated (reserved: dashed)" if _tells_reserved(drawn) else "allocated MiB")
    axes.legend()
    save_figure(figure, path)
