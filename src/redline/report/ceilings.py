"""A device's ceilings, measured and from its datasheet, side by side; and timed operators against them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.attainable import OperatorRow
from redline.analyze.ceilings import CeilingsSummary, Figure
from redline.model.note import Note
from redline.model.units import counted, format_bytes, format_count, format_seconds, format_share, significant
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, make_table


def ceilings_report(found: CeilingsSummary) -> RenderableType:
    threads = f" · {counted(found.threads, 'thread')}" if found.threads else ""
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


ABOVE = 1.05
"""Efficiency beyond which a row cannot be explained by the spread of the two measurements."""


def ops_json(rows: Sequence[OperatorRow], device_name: str, notes: Sequence[Note] = ()) -> JsonDocument:
    return json_document("ops", {"device_name": device_name, "results": rows, "notes": notes})


def ops_report(
    rows: Sequence[OperatorRow], device_name: str, has_ceilings: bool, notes: Sequence[Note] = ()
) -> RenderableType:
    table = make_table(Text(f"single operators · {device_name}", style="bold"))
    table.add_column("operator", no_wrap=True)
    table.add_column("shape", overflow="fold", min_width=12)
    table.add_column("format", no_wrap=True)
    for header in ("time", "±", "TFLOP/s", "GB/s", "of roofline", "limit"):
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        if row.refusal is not None:
            table.add_row(row.operator, row.shape, row.number_format, Text("–", style="dim"), "", "", "", "", "")
            continue
        name = row.operator if row.calls == 1 else f"{row.operator} ({row.calls} calls)"
        table.add_row(
            name,
            row.shape,
            row.number_format,
            format_seconds(row.seconds),
            "–" if row.spread is None else format_share(row.spread),
            "–" if row.flops_per_s is None else significant(row.flops_per_s / 1e12, 3),
            "–" if row.bytes_per_s is None else significant(row.bytes_per_s / 1e9, 3),
            "in cache" if row.in_cache and row.efficiency is None else _ops_share(row.efficiency),
            row.limited_by or "–",
        )
    # How near the roofline an operator comes is what it was timed for.
    shown = Fitted(table, ("GB/s", "TFLOP/s", "±", "limit", "format", "of roofline"))
    remarks = (*(f"  {each}" for each in notes), *_ops_remarks(rows, has_ceilings))
    return Group(shown, *(Text(line, style="dim") for line in remarks))


def _ops_share(value: float | None) -> str:
    return "–" if value is None else format_share(value)


def _ops_remarks(rows: Sequence[OperatorRow], has_ceilings: bool) -> list[str]:
    told = [f"  {row.operator} {row.shape} {row.number_format}: {row.refusal}" for row in rows if row.refusal]
    told += [f"  {row.operator} {row.shape} {row.number_format}: {_why_above(row)}" for row in rows if _is_above(row)]
    if not has_ceilings:
        told.append("  next: 'redline ceilings' measures the device's limits; then each row says how near it is")
    return told


def _is_above(row: OperatorRow) -> bool:
    return row.efficiency is not None and row.efficiency > ABOVE


def _why_above(row: OperatorRow) -> str:
    if row.kind == "convolution" and row.limited_by == "compute":
        return "faster than the count allows: the library uses an algorithm with fewer products (Winograd or FFT)"
    return "faster than the roofline: measure the ceilings again ('redline ceilings --fresh')"
