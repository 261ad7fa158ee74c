"""A device's ceilings, measured and from its datasheet, side by side."""

from __future__ import annotations

from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.ceilings import CeilingsSummary, Figure
from redline.report.terminal import Fitted, make_table
from redline.units import format_bytes, format_count, format_seconds, format_share, significant


def ceilings_report(found: CeilingsSummary) -> RenderableType:
    threads = f" · {found.threads} threads" if found.threads else ""
    when = datetime.fromtimestamp(found.measured_at).strftime("%Y-%m-%d %H:%M")
    title = f"{found.name}{threads} · torch {found.torch} · driver {found.driver or 'n/a'} · measured {when}"
    table = make_table(Text(title, style="bold"))
    table.add_column("what")
    for header in ("measured", "half of the bursts ≥", "datasheet", "reached"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("by")
    for form, figure in found.tflops.items():
        table.add_row(
            f"{form} products",
            _flops(figure.measured),
            _flops(figure.usual),
            _flops(figure.datasheet),
            _reached(figure),
            found.shapes.get(form, "–"),
        )
    copy = found.copy_bytes_per_s
    table.add_row(
        "copy, read and write",
        _told(_giga(copy.measured), "GB/s"),
        _told(_giga(copy.usual), "GB/s"),
        _told(_giga(copy.datasheet), "GB/s"),
        _reached(copy),
        f"buffers larger than the cache of {format_bytes(found.cache_bytes)}" if found.cache_bytes else "large buffers",
    )
    launch = format_seconds(found.launch_s.measured)
    table.add_row("tiny operator to tiny operator", launch, launch, "–", "–", "from Python")
    doubts = [Text(f"  not trusted: {doubt}; measured again at the next use", style="yellow") for doubt in found.doubts]
    trust = Text(f"  trust: {'valid' if found.trusted else 'doubted'}", style="green" if found.trusted else "yellow")
    return Group(
        Fitted(table, ("by", "half of the bursts ≥", "datasheet", "reached")),
        trust,
        *doubts,
        *(Text(f"  {line}", style="dim") for line in _remarks(found)),
    )


def _remarks(found: CeilingsSummary) -> list[str]:
    if found.card is None and found.device_kind != "cpu":
        sheet = ["no datasheet peaks are known for this card: measured only"]
    elif found.card is not None:
        checked = "" if found.verified else ", not checked against a source"
        sheet = [f"datasheet: {found.card} ({found.source}{checked})"]
    else:
        sheet = []
    return [*sheet, *map(str, found.notes)]


def _told(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{significant(value, 3)} {unit}"


def _flops(tera: float | None) -> str:
    """In the unit that keeps the number readable: 0.78 GFLOP/s, not 0.000781 TFLOP/s."""
    return "–" if tera is None else f"{format_count(tera * 1e12)}FLOP/s"


def _giga(value: float | None) -> float | None:
    return None if value is None else value / 1e9


def _reached(figure: Figure) -> str:
    if figure.measured is None or not figure.datasheet:
        return "–"
    return format_share(figure.measured / figure.datasheet)
