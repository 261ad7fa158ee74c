"""How far from the device's limits: one line per recipe, each with its classes of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.limits import RooflineRow
from redline.report.terminal import make_table
from redline.units import format_bytes, format_count, format_seconds, format_share, significant


class RooflineReport:
    def __init__(self, rows: Sequence[RooflineRow], failures: Mapping[str, str]) -> None:
        self._rows = rows
        self._failures = failures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield _whole(self._rows)
        for row in self._rows:
            yield _classes(row)
            if row.error:
                yield Text(f"  {row.recipe}: {row.error}", style="red")
            for line in (f"bound: {row.bound.evidence}", *row.notes, *_in_cache(row)):
                yield Text(f"  {row.recipe}: {line}", style="dim")
        for recipe, said in self._failures.items():
            yield Text(f"  {recipe}: failed: {said}", style="red")
        yield Text(_next(self._rows), style="bold")


def _whole(rows: Sequence[RooflineRow]) -> Table:
    first = rows[0]
    title = " · ".join(part for part in (first.model, first.task, f"batch {first.batch}", first.device_name) if part)
    table = make_table(Text(title, style="bold"))
    table.add_column("recipe", overflow="fold")
    for header in (
        "FLOPs",
        "bytes",
        "FLOP/byte",
        "roofline",
        "by",
        "measured",
        "headroom",
        "of peak",
        "MFU",
        "achieved",
    ):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("bound")
    for row in rows:
        table.add_row(
            Text(row.recipe),
            format_count(row.flops),
            format_bytes(row.compulsory_bytes),
            "n/a" if row.intensity is None else significant(row.intensity, 3),
            format_seconds(row.attainable_s),
            row.limited_by,
            format_seconds(row.measured_s),
            headroom_text(row.headroom, row.error),
            format_share(row.efficiency),
            format_share(row.mfu),
            f"{significant(row.achieved_flops_per_s / 1e12, 3)} TFLOP/s, {format_bytes(row.achieved_bytes_per_s)}/s",
            row.bound.label,
        )
    return table


def headroom_text(headroom: float | None, error: str | None) -> Text:
    if headroom is None:
        return Text("n/a")
    return Text(f"{headroom:.2f}× ✗", style="red") if error else Text(f"{headroom:.1f}×")


def _classes(row: RooflineRow) -> Table:
    title = f"{row.recipe}: operators one by one, unfused, need {format_seconds(row.unfused_s)}"
    table = make_table(Text(title, style="dim"))
    table.add_column("class")
    for header in ("calls", "FLOPs", "min bytes", "FLOP/byte", "attainable", "measured", "efficiency"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("limited by")
    for one in row.classes:
        table.add_row(
            one.name,
            str(one.calls),
            format_count(one.flops),
            format_bytes(one.bytes),
            significant(one.intensity, 3),
            format_seconds(one.attainable_s),
            format_seconds(one.measured_s),
            format_share(one.efficiency),
            one.limited_by,
        )
    return table


def _in_cache(row: RooflineRow) -> list[str]:
    quick = [one.name for one in row.classes if (one.efficiency or 0) > 1 and one.limited_by == "memory"]
    return (
        [f"{', '.join(quick)} beat the copy bandwidth: what they read was still in cache, or fused away"]
        if quick
        else []
    )


def _next(rows: Sequence[RooflineRow]) -> str:
    if any(row.error for row in rows):
        return "next: a step beats its limit, so a number here is wrong: 'redline ceilings --fresh', then again"
    best = min(rows, key=lambda row: row.measured_s)
    if best.headroom is None:
        return "next: nothing was counted that the device's limits could be set against"
    left = f"next: {best.headroom:.1f}× left to the roofline under {best.recipe}"
    advice = {
        "host": "the host is in the way: compile:reduce-overhead, or a larger batch",
        "memory": "unfused operators move too many bytes: compile fuses them, fp16 halves them",
        "compute": "the products are in the way: a shorter number format (tf32, fp16, bf16) computes faster",
    }
    return f"{left}; {advice.get(best.bound.label, 'redline profile shows where the time goes')}"
