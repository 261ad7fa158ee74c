"""The captured step as a picture, and kernels as areas: for reports that cannot be zoomed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from redline.analyze.profile import Profile
from redline.show.canvas import COLOURS, label_text, new_figure, save_figure
from redline.trace.lanes import Lane, Lanes

HOST_ROWS = 4
"""For each thread: what calls what, from the outside; deeper ones are too short to be seen."""
HOST_THREADS = 3
DEVICE_ROWS = 4
ROW = 1.0
NAMED_SHARE = 0.05
"""Boxes narrower than this share of the picture carry no name."""
IDLE_COLOURS = {
    "host": "#d55e00", "sync": "#b5478a", "data": "#b07c00", "allocator": "#7a5c22", "warm-up": "#6b57a8",
    "latency": "#3d9bd6", "launch": "#e69f00", "dependency": "#8a94a3",
}  # fmt: skip
UNKNOWN_COLOUR = "#8a94a3"
HOST_COLOUR = "#c3ccd6"
LETTERS = 150
"""How many characters of the labels fit side by side."""


def draw_step(lanes: Lanes, title: str, path: Path) -> Path:
    """Host and device rows of one step, the idle time of the device by cause, and the phases."""
    start, end = _window(lanes)
    shown = [*_hosts(lanes, start, end), *(lane for lane in lanes.lanes if lane.on_device)]
    rows = [_depth(lane) for lane in shown]
    figure, axes = new_figure(10.5, 1.7 + 0.3 * (sum(rows) + 1.2 * len(shown)))
    classes = _class_colours(shown)
    ticks, labels, top = [], [], 0.0
    for number, (lane, depth) in enumerate(zip(shown, rows, strict=True)):
        _draw_lane(axes, lanes, lane, top, (start, end), classes)
        if lane.on_device:
            _draw_gaps(axes, lanes, lanes.lanes.index(lane), top + depth, (start, end))
        ticks.append(top + depth / 2)
        labels.append(label_text(lane.label, 28))
        top += depth + (1.4 if number + 1 < len(shown) else 0.6)
    _draw_phases(axes, lanes, (start, end))
    axes.set_yticks(ticks, labels, fontsize=8.5)
    axes.set_ylim(top, -1.6 if lanes.phases else -0.4)
    axes.set_xlim(0, (end - start) / 1e3)
    axes.set_xlabel("ms of one step")
    axes.grid(visible=False)
    axes.set_title(label_text(title, 100), fontsize=10.5, loc="left")
    _legend(figure, classes, {gap.cause for gap in lanes.gaps})
    return save_figure(figure, path)


def _window(lanes: Lanes) -> tuple[float, float]:
    """The last marked step until the device is done with it; everything where no step is marked."""
    if not lanes.steps:
        return 0.0, lanes.span_us
    start, length = lanes.steps[-1]
    launched = (
        box.start_us + box.length_us
        for lane in lanes.lanes
        if lane.on_device
        for box in lane.boxes
        if box.launch_us is not None and box.launch_us >= start
    )
    return start, max([start + length, *launched])


def _hosts(lanes: Lanes, start: float, end: float) -> list[Lane]:
    """The threads that do the most in the window."""

    def busy(lane: Lane) -> float:
        return sum(box.length_us for box in lane.boxes if box.depth == 0 and start <= box.start_us < end)

    hosts = sorted((lane for lane in lanes.lanes if not lane.on_device), key=busy, reverse=True)
    return [lane for lane in hosts[:HOST_THREADS] if busy(lane)]


def _depth(lane: Lane) -> int:
    most = DEVICE_ROWS if lane.on_device else HOST_ROWS
    return min(most, 1 + max((box.depth for box in lane.boxes), default=0))


def _class_colours(shown: Sequence[Lane]) -> dict[str, str]:
    """The classes with the most device time have colours of their own."""
    times: dict[str, float] = {}
    for box in (box for lane in shown if lane.on_device for box in lane.boxes):
        times[box.kind] = times.get(box.kind, 0.0) + box.length_us
    ordered = sorted(times, key=lambda kind: -times[kind])
    return {kind: COLOURS[index] if index < len(COLOURS) else UNKNOWN_COLOUR for index, kind in enumerate(ordered)}


def _draw_lane(
    axes: Any, lanes: Lanes, lane: Lane, top: float, window: tuple[float, float], classes: dict[str, str]
) -> None:
    start, end = window
    by_row: dict[tuple[int, str, bool], list[tuple[float, float]]] = {}
    for box in lane.boxes:
        if box.depth < _depth(lane) and box.start_us < end and box.start_us + box.length_us > start:
            left, right = max(box.start_us, start), min(box.start_us + box.length_us, end)
            colour = classes[box.kind] if lane.on_device else HOST_COLOUR
            is_wide = right - left > 4e-3 * (end - start)
            by_row.setdefault((box.depth, colour, is_wide), []).append(((left - start) / 1e3, (right - left) / 1e3))
            if right - left > NAMED_SHARE * (end - start):
                room = int((right - left) / (end - start) * LETTERS)
                position = ((left - start) / 1e3 + (end - start) * 2e-6, top + box.depth + ROW / 2)
                ink = "white" if lane.on_device else "#15181d"
                name = lanes.names[box.name]
                told = label_text(name if len(name) <= room else f"{name[: room - 1]}…")
                axes.text(*position, told, fontsize=6.5, va="center", color=ink, clip_on=True)
    for (depth, colour, is_wide), ranges in by_row.items():
        # An edge would hide boxes that are no wider than itself.
        edge = {"edgecolor": "white", "linewidth": 0.3} if is_wide else {"linewidth": 0}
        axes.broken_barh(ranges, (top + depth + 0.06, ROW - 0.12), facecolor=colour, **edge)


def _draw_gaps(axes: Any, lanes: Lanes, lane: int, bottom: float, window: tuple[float, float]) -> None:
    start, end = window
    for cause in {gap.cause for gap in lanes.gaps}:
        ranges = [
            ((gap.start_us - start) / 1e3, gap.length_us / 1e3)
            for gap in lanes.gaps
            if gap.lane == lane and gap.cause == cause and start <= gap.start_us < end
        ]
        axes.broken_barh(ranges, (bottom + 0.08, 0.3), color=IDLE_COLOURS.get(cause, UNKNOWN_COLOUR))


def _draw_phases(axes: Any, lanes: Lanes, window: tuple[float, float]) -> None:
    start, end = window
    for name, begin, length in lanes.phases:
        left, right = max(begin, start), min(begin + length, end)
        if right <= left:
            continue
        axes.broken_barh(
            [((left - start) / 1e3, (right - left) / 1e3)], (-1.3, 0.8), color="#e2e5ea", edgecolor="white"
        )
        if right - left > NAMED_SHARE * (end - start):
            axes.text((left - start) / 1e3, -0.9, f" {name}", fontsize=7.5, va="center", clip_on=True)


def _legend(figure: Any, classes: dict[str, str], causes: set[str]) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(color=colour, label=kind) for kind, colour in list(classes.items())[: len(COLOURS)]]
    keys += [Patch(color=IDLE_COLOURS.get(cause, UNKNOWN_COLOUR), label=f"idle: {cause}") for cause in sorted(causes)]
    if keys:
        figure.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=7.5, frameon=False)


class Tile(NamedTuple):
    """A kernel as an area, in the units of the rectangle that all share."""

    name: str
    short_name: str
    kernel_class: str
    seconds: float
    share: float
    calls: int
    x: float
    y: float
    width: float
    height: float


TILES = 60


def treemap(profile: Profile, width: float, height: float) -> list[Tile]:
    """The kernels with the most time, each as large as its time; kernels of one class lie together."""
    rows = profile.kernels[:TILES]
    totals: dict[str, float] = {}
    for row in rows:
        totals[row.kernel_class] = totals.get(row.kernel_class, 0.0) + row.total_s
    classes = sorted((name for name, total in totals.items() if total > 0), key=lambda name: -totals[name])
    found: list[Tile] = []
    areas = squarified([totals[name] for name in classes], (0.0, 0.0, width, height))
    for name, area in zip(classes, areas, strict=True):
        own = [row for row in rows if row.kernel_class == name and row.total_s > 0]
        for row, box in zip(own, squarified([row.total_s for row in own], area), strict=True):
            found.append(
                Tile(
                    row.name,
                    row.short_name,
                    name,
                    row.total_s,
                    row.share,
                    row.calls,
                    *(round(each, 2) for each in box),
                )
            )
    return found


Rectangle = tuple[float, float, float, float]


def squarified(sizes: Sequence[float], area: Rectangle) -> Iterator[Rectangle]:
    """Rectangles as large as the sizes, largest first, that fill the area and are as square as can be."""
    x, y, width, height = area
    scale = width * height / sum(sizes) if sizes else 0.0
    left = [size * scale for size in sizes]
    while left:
        side = max(min(width, height), 1e-9)
        count = 1
        while count < len(left) and _worst(left[: count + 1], side) <= _worst(left[:count], side):
            count += 1
        row, left = left[:count], left[count:]
        thickness = sum(row) / side
        offset = 0.0
        for size in row:
            along = size / thickness
            yield (x, y + offset, thickness, along) if width >= height else (x + offset, y, along, thickness)
            offset += along
        if width >= height:
            x, width = x + thickness, width - thickness
        else:
            y, height = y + thickness, height - thickness


def _worst(row: Sequence[float], side: float) -> float:
    """The largest ratio of sides in a row of areas along this side."""
    whole = sum(row)
    return max(max(side**2 * size / whole**2, whole**2 / (side**2 * size)) for size in row)
