"""Figures for notebooks, as plotly's own objects: what the dashboard shows, one picture at a time."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import Any

from redline.analyze.batch import BatchFinding
from redline.analyze.knee import SATURATED
from redline.analyze.profile import Profile
from redline.report.one_line import one_line
from redline.report.plots import COLOURS

KERNELS = 15


def batch_figure(finding: BatchFinding) -> Any:
    """Throughput against the batch, with the knee; None where fewer than two batches ran."""
    fitting = sorted((trial for trial in finding.trials if trial.fits), key=lambda trial: trial.batch)
    if len(fitting) < 2:
        return None
    figure = _figure(f"{finding.model}: throughput against batch", "batch", f"{finding.item or 'items'} per second")
    batches, speeds = [trial.batch for trial in fitting], [trial.throughput_per_s for trial in fitting]
    figure.add_scatter(x=batches, y=speeds, mode="lines+markers", name=_text(finding.recipe), line_color=COLOURS[0])
    if finding.knee_batch is not None and finding.saturation is not None:
        at_knee = SATURATED * finding.saturation.limit_per_s
        star = {"symbol": "star", "size": 15, "color": COLOURS[1]}
        figure.add_scatter(x=[finding.knee_batch], y=[at_knee], mode="markers", name="knee", marker=star)
    figure.update_xaxes(type="log", tickvals=batches, ticktext=[str(batch) for batch in batches])
    figure.update_yaxes(rangemode="tozero")
    return figure


def phase_figure(profile: Profile) -> Any:
    """Host and device seconds of each phase, per step; None for inference, which has one."""
    if len(profile.phases) < 2:
        return None
    steps = profile.steps_seen or 1
    figure = _figure("phases of a step", "", "ms per step")
    names = [phase.name for phase in profile.phases]
    sides: list[tuple[str, Sequence[float]]] = [("host", [phase.host_s for phase in profile.phases])]
    if profile.has_device:
        sides.append(("device", [phase.device_s for phase in profile.phases]))
    for number, (side, seconds) in enumerate(sides):
        figure.add_bar(x=names, y=[1e3 * each / steps for each in seconds], name=side, marker_color=COLOURS[number])
    return figure


def class_figure(profile: Profile) -> Any:
    """Where the busy time goes."""
    if not profile.classes:
        return None
    rows = [row for row in profile.classes if row.total_s > 0]
    figure = _figure(
        "time by kernel class" if profile.has_device else "time by operator class", "% of the busy time", ""
    )
    figure.add_bar(
        y=[row.name for row in rows],
        x=[100 * row.share for row in rows],
        orientation="h",
        marker_color=COLOURS[0],
        hovertext=[f"{row.total_s * 1e3:.3f} ms in {row.calls} calls" for row in rows],
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def kernel_figure(profile: Profile) -> Any:
    """The longest kernels; None where the host is the device."""
    if not profile.kernels:
        return None
    rows = profile.kernels[:KERNELS]
    figure = _figure("longest kernels", "ms in all captured steps", "")
    figure.add_bar(
        y=[_text(f"{place + 1}. {row.short_name[:60]}") for place, row in enumerate(rows)],
        x=[1e3 * row.total_s for row in rows],
        orientation="h",
        marker_color=COLOURS[2],
        hovertext=[f"{row.kernel_class}, {row.calls} calls, {row.share:.1%}" for row in rows],
    )
    figure.update_yaxes(autorange="reversed")
    return figure


def _figure(title: str, x: str, y: str) -> Any:
    from plotly.graph_objects import Figure

    figure = Figure()
    figure.update_layout(
        title=_text(title), xaxis_title=_text(x), yaxis_title=_text(y), template="plotly_white", height=380
    )
    return figure


def _text(text: str) -> str:
    """plotly reads a few tags in any text."""
    return html.escape(one_line(text, 120), quote=False)
