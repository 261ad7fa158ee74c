"""What a row of a run says about the device's limits: how much of the peak, how much is left."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from redline.analyze.summary import RunSummary
from redline.units import format_count, format_seconds, format_share


def limit_cells(row: RunSummary) -> dict[str, str | Text]:
    if (found := row.roofline) is None:
        return {}
    left = "n/a" if found.headroom is None else f"{found.headroom:.1f}×"
    return {
        "of peak": format_share(found.efficiency),
        "left": Text(f"{left} ✗", style="red") if found.error else Text(left),
    }


def limit_remarks(rows: Sequence[RunSummary]) -> list[Text]:
    """Limits that were beaten, and once what would make them known."""
    told = [
        Text(f"  {row.recipe}: {row.roofline.error}", style="red")
        for row in rows
        if row.roofline and row.roofline.error
    ]
    measured = [row for row in rows if row.failure is None]
    if any(row.flops for row in measured) and not any(row.roofline for row in measured):
        told.append(
            Text("  'redline ceilings' measures this device's limits once; rows then say how much is left", style="dim")
        )
    return told


def limit_lines(row: RunSummary) -> list[tuple[str, str]]:
    """All about one record."""
    if row.flops is None:
        return []
    lines = [("work", f"{format_count(row.flops)} FLOPs of products in a step")]
    if (found := row.roofline) is not None:
        left = "" if found.headroom is None else f", {found.headroom:.2f}× less than measured"
        lines.append(("roofline", f"{format_seconds(found.attainable_s)} ({found.limited_by}){left}"))
        lines.append(("unfused", f"{format_seconds(found.unfused_s)}, operator by operator"))
        lines += [("note", note) for note in found.notes]
    return lines
