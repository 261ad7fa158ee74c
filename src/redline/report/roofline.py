"""A device's ceilings, how far the recipes of a model are from them, and single operators against them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from redline.analyze.attainable import OperatorRow
from redline.analyze.ceilings import CeilingsSummary, Figure, RooflineRow
from redline.analyze.replicates import Line
from redline.analyze.summary import CeilingsOf, RunSummary
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.units import counted, format_bytes, format_count, format_seconds, format_share, significant
from redline.model.work import Ceilings
from redline.report.canvas import check_picture, save_figure
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
            _flops_text(figure.measured),
            _flops_text(figure.usual),
            _flops_text(figure.datasheet),
            _reached(figure),
            found.shapes.get(form, "–"),
        )
    copy = found.copy_bytes_per_s
    table.add_row(
        "copy, read and write",
        _with_unit(_giga(copy.measured), "GB/s"),
        _with_unit(_giga(copy.usual), "GB/s"),
        _with_unit(_giga(copy.datasheet), "GB/s"),
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


def _with_unit(value: float | None, unit: str) -> str:
    return "–" if value is None else f"{significant(value, 3)} {unit}"


def _flops_text(tera: float | None) -> str:
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


def operators_report(rows: Sequence[OperatorRow], device_name: str, notes: Sequence[Note] = ()) -> RenderableType:
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
            "in cache" if row.in_cache and row.efficiency is None else format_share(row.efficiency),
            row.limited_by or "–",
        )
    # How near the roofline an operator comes is what it was timed for.
    shown = Fitted(table, ("GB/s", "TFLOP/s", "±", "limit", "format", "of roofline"))
    remarks = [f"  {each}" for each in notes]
    remarks += [f"  {row.operator} {row.shape} {row.number_format}: {row.refusal}" for row in rows if row.refusal]
    remarks += [
        f"  {row.operator} {row.shape} {row.number_format}: {_why_above(row)}" for row in rows if _is_above(row)
    ]
    return Group(shown, *(Text(line, style="dim") for line in remarks))


def _is_above(row: OperatorRow) -> bool:
    return row.efficiency is not None and row.efficiency > ABOVE


def _why_above(row: OperatorRow) -> str:
    if row.kind == "convolution" and row.limited_by == "compute":
        return "faster than the count allows: the library uses an algorithm with fewer products (Winograd or FFT)"
    return "faster than the roofline: measure the ceilings again ('redline roofline --fresh')"


class RooflineReport:
    def __init__(self, rows: Sequence[RooflineRow], failures: Mapping[str, str]) -> None:
        self._rows = rows
        self._failures = failures

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Fitted(
            _whole(self._rows),
            ("achieved", "bytes", "MFU", "FLOP/byte", "FLOPs", "of peak", "bound", "roof from", "roofline"),
        )
        for row in self._rows:
            yield Fitted(_classes(row), ("min bytes", "FLOP/byte", "FLOPs", "calls", "limited by", "attainable"))
            if row.error:
                yield Text(f"  {row.recipe}: {row.error}", style="red")
            for line in (f"bound: {row.bound.evidence}", *row.notes, *_in_cache(row)):
                yield Text(f"  {row.recipe}: {line}", style="dim")
        for recipe, said in self._failures.items():
            yield Text(f"  {recipe}: failed: {said}", style="red")
        yield Text(_next(self._rows), style="bold")


def _batch(row: RooflineRow) -> str:
    return f"batch {row.batch}" if row.batch else "batch unknown"


def _whole(rows: Sequence[RooflineRow]) -> Table:
    first = rows[0]
    title = " · ".join(
        part for part in (first.model, first.task, _batch(first), first.setting, first.device_name) if part
    )
    table = make_table(Text(title, style="bold"))
    table.add_column("recipe", overflow="fold")
    for header in (
        "FLOPs",
        "bytes",
        "FLOP/byte",
        "roofline",
        "roof from",
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
            row.limited_by or "n/a",
            format_seconds(row.measured_s),
            headroom_text(row.headroom, beaten=row.error is not None),
            format_share(row.efficiency),
            format_share(row.mfu),
            f"{format_count(row.achieved_flops_per_s)}FLOP/s, {format_bytes(row.achieved_bytes_per_s)}/s",
            row.bound.label,
        )
    return table


def headroom_text(headroom: float | None, *, beaten: bool) -> Text:
    if headroom is None:
        return Text("n/a")
    return Text(f"{headroom:.2f}× ✗", style="red") if beaten else Text(f"{headroom:.1f}×")


def _classes(row: RooflineRow) -> Table:
    title = f"{row.recipe}: operators unfused, one by one, need {format_seconds(row.unfused_s)}"
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
            one.limited_by or "n/a",
        )
    return table


def _in_cache(row: RooflineRow) -> list[str]:
    quick = [one.name for one in row.classes if (one.efficiency or 0) > 1 and one.limited_by == "memory"]
    return (
        [f"{', '.join(quick)} exceed the copy bandwidth: their data was still in cache, or fused away"] if quick else []
    )


def _next(rows: Sequence[RooflineRow]) -> str:
    if any(row.error for row in rows):
        return "next: a step is faster than its limit, so a count or a ceiling is wrong: run 'redline roofline --fresh' and repeat"
    best = min(rows, key=lambda row: row.measured_s)
    if best.headroom is None and best.efficiency is None:
        return f"next: the device's ceilings do not tell how fast {', '.join(best.formats)} products can be"
    if best.headroom is None:
        return "next: no work was counted to compare with the device's limits"
    left = f"next: {best.headroom:.1f}× left to the roofline under {best.recipe}"
    by_label = {
        "host": "the host limits it",
        "memory": "unfused operators move too many bytes",
        "compute": "matrix products limit it",
    }
    told = f"{left}; {by_label[best.bound.label]}" if best.bound.label in by_label else left
    known = {row.recipe for row in rows}
    options = [recipe for recipe in best.worth_trying if recipe not in known]
    if best.bound.label in by_label and options and best.bound.evidence.code != "outside-operators":
        return f"{told}: -r {' or -r '.join(options)} may help"
    return f"{told}; '{best.profiled}' shows where the time goes" if best.profiled is not None else told


class Roof(Frozen):
    """A ceiling: of bandwidth (bytes per second, the slope) or of arithmetic (FLOP per second, flat)."""

    label: str
    bytes_per_s: float | None = None
    flops_per_s: float | None = None


class OperatorPoint(Frozen):
    """One kind of operators at its own limit, unfused."""

    label: str
    intensity: float
    flops_per_s: float
    limited_by: str


class RooflinePoint(Frozen):
    row: int
    """The index of its line in the report."""
    label: str
    intensity: float
    """FLOP per compulsory byte."""
    flops_per_s: float
    told: str
    beaten: str = ""
    """Why it lies above a roof; empty where it does not."""
    operators: tuple[OperatorPoint, ...] = ()


class RooflineChart(Frozen):
    title: str
    roofs: tuple[Roof, ...]
    points: tuple[RooflinePoint, ...]


def roofline_charts(lines: Sequence[Line], ceilings_of: CeilingsOf) -> list[RooflineChart]:
    """Of the lines whose work was counted and whose device's ceilings are known."""
    points: dict[str, list[RooflinePoint]] = {}
    ceilings_by_title: dict[str, Ceilings] = {}
    formats: dict[str, dict[str, None]] = {}
    for number, line in enumerate(lines):
        record = line.record
        known, point = ceilings_of(record), _point(number, line.row)
        if known is None or point is None:
            continue
        title = _title(known)
        ceilings_by_title.setdefault(title, known)
        assert record.prepared is not None
        assert record.prepared.work is not None
        formats.setdefault(title, {}).update(dict.fromkeys(record.prepared.work.flops_by_format()))
        points.setdefault(title, []).append(point)
    return [
        RooflineChart(title=title, roofs=_roofs(ceilings_by_title[title], list(formats[title])), points=tuple(under))
        for title, under in points.items()
    ]


def _point(number: int, row: RunSummary) -> RooflinePoint | None:
    found = row.roofline
    if found is None or not found.intensity:
        return None
    left = "n/a" if found.headroom is None else f"{found.headroom:.1f}×"
    wrong = f"; {found.error}" if found.error else ""
    told = f"{left} left to the roofline of {format_seconds(found.attainable_s)} ({found.limited_by or 'n/a'})"
    return RooflinePoint(
        row=number,
        label=f"{row.recipe} · b{row.batch}" if row.batch else row.recipe,
        intensity=found.intensity,
        flops_per_s=found.achieved_flops_per_s,
        told=f"{told}; {format_share(found.efficiency)} of the peak{wrong}",
        beaten=str(found.error) if found.error else "",
        operators=tuple(
            OperatorPoint(
                label=one.name,
                intensity=one.intensity,
                flops_per_s=one.flops / one.attainable_s,
                limited_by=one.limited_by,
            )
            for one in found.classes
            if one.flops and one.attainable_s and one.limited_by is not None
        ),
    )


def _roofs(ceilings: Ceilings, formats: Sequence[str]) -> tuple[Roof, ...]:
    bandwidth = ceilings.copy_bytes_per_s
    slope = Roof(label=f"copy, {bandwidth / 1e9:.4g} GB/s", bytes_per_s=bandwidth)
    flat = [
        Roof(label=f"{form}, {ceilings.flops_per_s[form] / 1e12:.3g} TFLOP/s", flops_per_s=ceilings.flops_per_s[form])
        for form in formats
        if form in ceilings.flops_per_s
    ]
    return (slope, *flat)


def _title(ceilings: Ceilings) -> str:
    """Everything ceilings are stored under, so that two devices never share a chart."""
    threads = counted(ceilings.threads, "thread") if ceilings.threads else ""
    driver = f"driver {ceilings.driver}" if ceilings.driver else ""
    torch = f"torch {ceilings.torch}" if ceilings.torch else ""
    return ", ".join(part for part in (ceilings.name or ceilings.kind, threads, driver, torch) if part)


def plot_roofline(rows: Sequence[RooflineRow], ceilings: CeilingsSummary, path: Path) -> Path:
    check_picture(path)
    # The figure is made without pyplot: no window system is asked for, and a notebook's own state stays untouched.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    low, high = _span(rows)
    _roofs_roofline_plot(axes, rows, ceilings, low, high)
    for number, row in enumerate(rows):
        _points(axes, row, f"C{number % 10}")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(low, high)
    axes.set_xlabel("FLOPs per byte (points: unfused; stars: whole step, compulsory bytes)")
    axes.set_ylabel("FLOP/s")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize="small", loc="lower right")
    first = rows[0]
    about = (first.model, first.task, _batch(first), first.device_name)
    figure.suptitle(" · ".join(part for part in about if part))
    return save_figure(figure, path, dpi=120)


def _span(rows: Sequence[RooflineRow]) -> tuple[float, float]:
    found = [row.intensity for row in rows if row.intensity]
    found += [point.flops / point.bytes for row in rows for point in row.points if point.bytes]
    found += [one.intensity for row in rows for one in row.classes if one.intensity]
    return min(found, default=0.1) / 3, max(found, default=1000.0) * 3


def _roofs_roofline_plot(
    axes: Any, rows: Sequence[RooflineRow], ceilings: CeilingsSummary, low: float, high: float
) -> None:
    bandwidth = ceilings.copy_bytes_per_s.measured or np.nan
    grid = np.geomspace(low, high, 200)
    formats = dict.fromkeys(form for row in rows for form in row.formats)
    for form in formats:
        figure = ceilings.tflops.get(form)
        if figure is None or figure.measured is None:
            continue
        roof = np.minimum(grid * bandwidth, figure.measured * 1e12)
        axes.plot(grid, roof, "-", color="0.3", linewidth=1.2)
        axes.annotate(f"{form} {figure.measured:.3g} TFLOP/s", (high, roof[-1]), ha="right", va="bottom", fontsize=8)
    axes.annotate(f"copy {bandwidth / 1e9:.4g} GB/s", (low * 1.5, low * 1.5 * bandwidth), fontsize=8, rotation=30)


def _points(axes: Any, row: RooflineRow, colour: str) -> None:
    points = [point for point in row.points if point.bytes and point.seconds]
    if points:
        across = [point.flops / point.bytes for point in points]
        axes.plot(across, [point.flops / point.seconds for point in points], ".", color=colour, alpha=0.5)
    for one in row.classes:
        if one.intensity and one.measured_s:
            height = one.flops / one.measured_s
            axes.plot([one.intensity], [height], "o", color=colour)
            axes.annotate(one.name, (one.intensity, height), fontsize=7, xytext=(3, 3), textcoords="offset points")
    if row.intensity:
        left = "" if row.headroom is None else f" ({row.headroom:.1f}× left)"
        axes.plot(
            [row.intensity], [row.achieved_flops_per_s], "*", color=colour, markersize=14, label=f"{row.recipe}{left}"
        )
