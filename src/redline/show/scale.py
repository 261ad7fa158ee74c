"""Scaling over ranks for the terminal and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from redline.analyze.scale import Mode, ScaleFinding, ScalePoint
from redline.model.units import counted, format_bytes, format_count, format_seconds, format_share
from redline.show.canvas import COLOURS, check_picture, label_text, new_figure, save_figure
from redline.show.terminal import Fitted, make_table, one_line

HEADERS = (
    "ranks", "global batch", "per rank", "items/s", "ideal", "efficiency", "communication", "exposed", "hidden",
    "gradients", "bus", "memory per rank", "straggler", "trust",
)  # fmt: skip
EXPENDABLE = ("gradients", "memory per rank", "bus", "communication", "hidden", "ideal", "straggler", "global batch")
"""Columns that a narrow terminal does without, in this order."""


def scale_report(points: Sequence[ScalePoint], findings: Sequence[ScaleFinding], mode: Mode) -> RenderableType:
    parts: list[RenderableType] = []
    for model in dict.fromkeys(point.model for point in points):
        parts.append(_table([point for point in points if point.model == model], mode))
    for point in points:
        where = _where(point)
        if point.failure is not None:
            parts.append(Text(f"{where}: failed: {one_line(point.failure.told)}", style="red"))
        notes = [each for each in point.notes if each.code != "oversubscribed"]  # that has a finding
        parts += [Text(f"{where}: {one_line(str(each))}", style="yellow") for each in notes]
    for finding in findings:
        parts.append(Text(f"{_where(finding)}: {finding.code}: {one_line(finding.evidence)}"))
        parts.append(Text(f"  next: {one_line(finding.next)}", style="bold"))
    return Group(*parts)


def _where(one: ScalePoint | ScaleFinding) -> str:
    each = f", {one.batch_per_rank} per rank" if one.batch_per_rank else ""
    return f"{one_line(one.model)}, {counted(one.ranks, 'rank')}{each}"


def _table(points: Sequence[ScalePoint], mode: Mode) -> RenderableType:
    first = points[0]
    how = "batch per rank kept" if mode == "weak" else "one batch split"
    threads = f" · {counted(first.threads, 'thread')} per rank" if first.threads else ""
    title = f"{one_line(first.model)} · {first.task} · {first.recipe} · {mode} scaling ({how}){threads}"
    table = make_table(Text(title, style="bold"))
    for header in HEADERS:
        table.add_column(header.replace("items", points[0].item), justify="left" if header == "trust" else "right")
    for point in points:
        style = "red" if point.failure else "yellow" if point.oversubscribed else ""
        table.add_row(*(Text(cell, style=style) for cell in _cells(point)))
    return Fitted(table, EXPENDABLE)


def _cells(point: ScalePoint) -> list[str]:
    efficiency = format_share(point.efficiency) if point.efficiency is not None else "–"
    if point.low is not None and point.high is not None:
        efficiency += f" ({format_share(point.low)}–{format_share(point.high)})"
    if point.oversubscribed:
        efficiency = "not scaling"
    return [
        str(point.ranks),
        str(point.global_batch or "–"),
        str(point.batch_per_rank or "–"),
        "failed" if point.failure else format_count(point.throughput_per_s),
        format_count(point.ideal_per_s) if point.ideal_per_s else "–",
        efficiency,
        format_seconds(point.communication_s) if point.communication_s is not None else "–",
        format_share(point.communication_share) if point.communication_share is not None else "–",
        format_share(point.overlap) if point.overlap is not None else "–",
        format_bytes(point.gradient_bytes) if point.gradient_bytes else "–",
        f"{format_bytes(point.bus_bytes_per_s)}/s" if point.bus_bytes_per_s else "–",
        format_bytes(max(peaks)) if (peaks := [each for each in point.peak_bytes if each is not None]) else "–",
        f"rank {point.straggler}" if point.straggler is not None else "–",
        ", ".join(point.trust) or "–",
    ]


def plot_scale(points: Sequence[ScalePoint], path: Path) -> Path:
    """Throughput beside the ideal, and the efficiency; points that are not scaling are hollow."""
    check_picture(path)
    figure, (left, right) = new_figure(11.0, 4.2, 2)
    series: dict[tuple[str, int | None], list[ScalePoint]] = {}
    for point in points:
        if point.throughput_per_s:
            is_split = point.ranks * (point.batch_per_rank or 0) != point.global_batch
            series.setdefault((point.model, None if is_split else point.batch_per_rank), []).append(point)
    for number, ((model, batch), some) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        label = label_text(f"{model}, {batch} per rank" if batch else model)
        ranks = [point.ranks for point in some]
        left.plot(ranks, [point.throughput_per_s for point in some], "o-", color=colour, label=label)
        ideal = [(point.ranks, point.ideal_per_s) for point in some if point.ideal_per_s]
        left.plot([each[0] for each in ideal], [each[1] for each in ideal], "--", color=colour, alpha=0.5)
        known = [point for point in some if point.efficiency is not None]
        right.plot([point.ranks for point in known], [point.efficiency for point in known], "o-", color=colour)
        for point in known:
            if point.low is not None and point.high is not None:
                right.vlines(point.ranks, point.low, point.high, color=colour, alpha=0.6)
        marked = [point for point in some if point.oversubscribed]
        left.scatter(
            [p.ranks for p in marked], [p.throughput_per_s for p in marked], s=90, facecolors="white", zorder=3
        )
    left.set_ylabel("items per second (dashed: ideal)")
    right.set_ylabel("efficiency")
    right.set_ylim(0, 1.15)
    right.axhline(1.0, color="#888888", linewidth=0.8)
    for axes in (left, right):
        axes.set_xlabel("ranks")
        axes.set_xticks(sorted({point.ranks for point in points}))
    if series:
        left.legend(fontsize=8)
    return save_figure(figure, path)
