"""Modules, classes of operators and whole steps as points under the measured roofs, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from redline.analyze.limits import CeilingsSummary, RooflineRow
from redline.errors import SpecError
from redline.report.batch_plot import check_place


def plot_roofline(rows: Sequence[RooflineRow], ceilings: CeilingsSummary, path: Path) -> Path:
    check_place(path)
    # The figure is made without pyplot: no window system is asked for, and a notebook's own state stays untouched.
    from matplotlib.figure import Figure

    figure: Any = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    low, high = _span(rows)
    _roofs(axes, rows, ceilings, low, high)
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
    figure.suptitle(f"{first.model} · {first.task} · batch {first.batch} · {first.device_name}")
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise SpecError(f"cannot write the plot to {path}: {error.strerror}") from None
    return path


def _span(rows: Sequence[RooflineRow]) -> tuple[float, float]:
    found = [row.intensity for row in rows if row.intensity]
    found += [point.flops / point.bytes for row in rows for point in row.points if point.bytes]
    found += [one.intensity for row in rows for one in row.classes if one.intensity]
    return min(found, default=0.1) / 3, max(found, default=1000.0) * 3


def _roofs(axes: Any, rows: Sequence[RooflineRow], ceilings: CeilingsSummary, low: float, high: float) -> None:
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
