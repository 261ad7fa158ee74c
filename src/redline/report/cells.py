"""Cells that several tables have: how far off, what limits it, whether to believe it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from redline.analyze.summary import RunSummary
from redline.analyze.trust import error_text
from redline.record import Numerics
from redline.units import format_count, format_seconds, format_share

TRUST_STYLE = {"valid": "green", "invalid": "red"}


def error_cell(numerics: Numerics | None, *, with_steps: bool = False) -> Text:
    is_plain = numerics is not None and numerics.is_compared
    style = "red" if numerics is not None and numerics.is_wrong else "" if is_plain else "dim"
    return Text(error_text(numerics, with_steps=with_steps), style=style)


def bound_word(row: RunSummary) -> str:
    if row.bound.label != "unknown":
        return row.bound.label
    return "not host" if row.bound.evidence.code == "not-host" else "unknown"


def bound_cell(row: RunSummary) -> Text:
    if row.bound.label != "unknown":
        return Text(row.bound.label, style="yellow" if row.bound.label == "host" else "")
    return Text(bound_word(row), style="dim")


def trust_cell(row: RunSummary) -> Text:
    told = ", ".join(row.verdict.labels)
    if row.verdict.labels == ("noisy",) and not row.verdict.doubts("throughput"):
        told = "noisy (latency)"  # the throughput beside it is sound
    if row.verdict.trusted and row.verdict.noted("spread"):
        told = "valid, noted"  # the spread is below the table
    return Text(told, style=TRUST_STYLE.get(row.verdict.labels[0], "yellow"))


def limit_cells(row: RunSummary) -> dict[str, str | Text]:
    if (found := row.roofline) is None:
        return {}
    left = "n/a" if found.headroom is None else f"{found.headroom:.1f}×"
    return {
        "of peak": format_share(found.efficiency),
        "left": Text(f"{left} ✗", style="red") if found.error else Text(left),
    }


def limit_remarks(rows: Sequence[RunSummary]) -> list[Text]:
    """Rows faster than their limit, and once how to measure limits."""
    told = [
        Text(f"  {row.recipe}: {row.roofline.error}", style="red")
        for row in rows
        if row.roofline and row.roofline.error
    ]
    measured = [row for row in rows if row.failure is None]
    if any(row.flops for row in measured) and not any(row.roofline for row in measured):
        told.append(
            Text(
                "  'redline ceilings' measures this device's limits; tables then show how close each row is",
                style="dim",
            )
        )
    return told


def limit_lines(row: RunSummary) -> list[tuple[str, str]]:
    """All about one record."""
    if row.flops is None:
        return []
    lines = [("work", f"{format_count(row.flops)} FLOPs of matrix products and convolutions per step")]
    if (found := row.roofline) is not None:
        left = "" if found.headroom is None else f", {found.headroom:.2f}× less than measured"
        lines.append(("roofline", f"{format_seconds(found.attainable_s)} ({found.limited_by}){left}"))
        lines.append(("unfused", f"{format_seconds(found.unfused_s)}, operator by operator"))
        lines += [("note", str(each)) for each in found.notes]
    return lines
