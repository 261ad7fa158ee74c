"""Timed operators in a terminal and as a document."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.attainable import OperatorRow
from redline.report.export import JsonDocument, json_document
from redline.report.terminal import Fitted, make_table
from redline.units import format_seconds, format_share, significant

ABOVE = 1.05
"""Efficiency beyond which a row cannot be explained by the spread of the two measurements."""


def ops_json(rows: Sequence[OperatorRow], device_name: str) -> JsonDocument:
    return json_document("ops", {"device_name": device_name, "results": rows})


def ops_report(rows: Sequence[OperatorRow], device_name: str, has_ceilings: bool) -> RenderableType:
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
            "in cache" if row.in_cache and row.efficiency is None else _share(row.efficiency),
            row.limited_by or "–",
        )
    return Group(Fitted(table), *(Text(line, style="dim") for line in _remarks(rows, has_ceilings)))


def _share(value: float | None) -> str:
    return "–" if value is None else format_share(value)


def _remarks(rows: Sequence[OperatorRow], has_ceilings: bool) -> list[str]:
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
