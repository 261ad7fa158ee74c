"""This module draws a profile (a page that fetches nothing, the captured step, memory over a step) and writes kernels as rocprof's CSV."""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from typing import Any, Literal, get_args

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from redline.analyze.profile import Profile
from redline.model.units import format_bytes, format_seconds, format_share
from redline.model.work import MemoryRow
from redline.show.canvas import COLOURS, label_text, new_figure
from redline.show.dashboard import lanes_script, script_policy
from redline.show.export import harmless
from redline.show.payload import as_json
from redline.show.result import Result, web_table
from redline.trace.lanes import Lane, Lanes
from redline.trace.tree import TreeNode

# The page

WIDTH, ROW_HEIGHT = 960, 16
NARROWEST = 0.8
"""Boxes of a flame graph that are narrower than this, in units of `WIDTH`, cannot be seen and are left out."""
DEEPEST_ROW = 40
"""Deeper calls are left out of the flame graph."""
NEARLY_ALL = 0.97
"""A Python function is left out of the flame graph if one callee takes this share of its time or more."""

Side = Literal["device", "host"]


def profile_page(result: Result, profile: Profile, lanes: Lanes | None = None) -> str:
    """Returns one page that has the pictures and every table of a profile. `lanes` are the captured steps, to be looked at box by box."""
    script = lanes_script() if lanes is not None else ""
    return _template().render(
        result=result,
        profile=profile,
        flames=[flame for side in get_args(Side) if (flame := _flame(profile.tree, side)) is not None],
        width=WIDTH,
        tables=[Markup(web_table(table)) for table in result.tables if table.rows and not table.is_list],
        lanes=Markup(as_json(msgspec.to_builtins(lanes))) if lanes is not None else "",
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'{script_policy(script) if script else ''}",
    )


@cache
def _template() -> Template:
    # Everything is escaped, because anyone may write the names in traces.
    environment = Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"time": format_seconds, "share": format_share, "bytes": format_bytes}
    return environment.get_template("profile.html.j2")


def _flame(tree: TreeNode | None, side: Side) -> dict[str, Any] | None:
    """Returns the tree as boxes. Each is as wide as the time it takes, and callers are above what they call."""
    whole = tree.seconds(side) if tree is not None else 0.0
    if tree is None or not whole:
        return None
    boxes: list[dict[str, Any]] = []

    def add(parent: TreeNode, left: float, level: int) -> None:
        for child in parent.children:
            seconds, node = child.seconds(side), child
            wide = seconds / whole * WIDTH
            while node.kind == "function" and node.children:
                inner = max(node.children, key=lambda one: one.seconds(side))
                if inner.seconds(side) < NEARLY_ALL * node.seconds(side):
                    break
                node = inner
            if wide >= NARROWEST and level < DEEPEST_ROW:
                text = node.plain_name[: int(wide / 6.5)] if wide > 20 else ""
                boxes.append(
                    {"x": f"{left:.2f}", "y": level * ROW_HEIGHT, "w": f"{wide:.2f}", "node": node, "seconds": seconds}
                    | {"text": text}
                )
                add(node, left, level + 1)
            left += wide

    add(tree, 0.0, 0)
    height = ROW_HEIGHT + max((box["y"] for box in boxes), default=0)
    return {"side": side, "whole": whole, "boxes": boxes, "height": height}


# Kernels as CSV

COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")


def kernel_csv(profile: Profile) -> str:
    """Returns the kernel table in the layout that `rocprof --stats` has. If the host is the device, it has the operators."""
    rows = [(row.name, row.calls, row.total_s) for row in profile.kernels]
    if not profile.has_device:
        rows = [(row.name, row.calls, row.cpu_self_s) for row in profile.operators]
    whole = sum(seconds for _, _, seconds in rows) or 1.0
    text = io.StringIO()
    # rocprof quotes names and nothing else.
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, calls, seconds in sorted(rows, key=lambda row: -row[2]):
        total = round(seconds * 1e9)
        share = round(100 * seconds / whole, 6)
        writer.writerow((harmless(name), calls, total, round(total / calls) if calls else 0, share))
    return text.getvalue()


# The captured step

MOST_ROWS = 4
"""Each thread and each device has this many rows, which show what calls what from the outside; deeper boxes are too short to be seen."""
MOST_THREADS = 3
"""At most this many threads of the host are drawn."""
NAMED_SHARE = 0.05
"""Boxes that are narrower than this share of the picture have no name."""
LETTERS = 150
"""The picture is wide enough for this many characters of labels side by side."""
UNKNOWN_COLOUR, HOST_COLOUR, PHASE_COLOUR = "#8a94a3", "#c3ccd6", "#e2e5ea"
IDLE_COLOURS = {
    "host": "#d55e00", "sync": "#b5478a", "data": "#b07c00", "allocator": "#7a5c22", "warm-up": "#6b57a8",
    "latency": "#3d9bd6", "launch": "#e69f00", "dependency": UNKNOWN_COLOUR, "unknown": UNKNOWN_COLOUR,
}  # fmt: skip


def step_figure(lanes: Lanes, title: str) -> Any:
    """Draws one step: its host and device rows, the idle time of the device by cause, and the phases. Times are in milliseconds."""
    start, end = _window(lanes)
    scale, busy = 1e3, {lane.label: _busy(lane, start, end) for lane in lanes.lanes}
    hosts = [lane for lane in sorted(lanes.lanes, key=lambda lane: -busy[lane.label]) if not lane.on_device]
    shown = [lane for lane in hosts[:MOST_THREADS] if busy[lane.label]] + [
        lane for lane in lanes.lanes if lane.on_device
    ]
    times: defaultdict[str, float] = defaultdict(float)
    for box in (box for lane in shown if lane.on_device for box in lane.boxes):
        times[box.kind] += box.length_us
    # The classes with the most device time have colours of their own.
    colours = dict.fromkeys(times, UNKNOWN_COLOUR) | dict(
        zip(sorted(times, key=lambda kind: -times[kind]), COLOURS, strict=False)
    )
    depths = [min(MOST_ROWS, 1 + max((box.depth for box in lane.boxes), default=0)) for lane in shown]
    figure, axes = new_figure(10.5, 1.7 + 0.3 * (sum(depths) + 1.2 * len(shown)))

    bars: defaultdict[tuple[float, float, str, float], list[tuple[float, float]]] = defaultdict(list)

    def bar(
        left: float, length: float, top: float, height: float, colour: str, name: str = "", size: float = 6.5
    ) -> None:
        right, left = min(left + length, end), max(left, start)
        wide = (right - left) / (end - start)
        if wide <= 0:
            return
        # An edge would hide boxes that are no wider than itself. Boxes that look alike are drawn at once.
        bars[top, height, colour, 0.3 if wide > 4e-3 else 0.0].append(((left - start) / scale, (right - left) / scale))
        if wide > NAMED_SHARE and name:
            room = int(wide * LETTERS)
            text = label_text(name if len(name) <= room else f"{name[: room - 1]}…")
            axes.text((left - start) / scale, top + height / 2, f" {text}", fontsize=size, va="center", clip_on=True)

    middles: list[float] = []
    top = 0.0
    for lane, depth in zip(shown, depths, strict=True):
        for box in (box for box in lane.boxes if box.depth < depth):
            colour = colours[box.kind] if lane.on_device else HOST_COLOUR
            bar(box.start_us, box.length_us, top + box.depth + 0.06, 0.88, colour, lanes.names[box.name])
        for gap in (gap for gap in lanes.gaps if lanes.lanes[gap.lane] is lane):
            bar(gap.start_us, gap.length_us, top + depth + 0.08, 0.3, IDLE_COLOURS[gap.cause])
        middles.append(top + depth / 2)
        top += depth + 1.4
    for name, begin, length in lanes.phases:
        bar(begin, length, -1.3, 0.8, PHASE_COLOUR, name, 7.5)
    for (low, height, colour, edge), ranges in bars.items():
        axes.broken_barh(ranges, (low, height), facecolor=colour, edgecolor="white", linewidth=edge)
    axes.set_yticks(middles, [label_text(lane.label, 28) for lane in shown], fontsize=8.5)
    axes.set_ylim(top - 0.8, -1.6 if lanes.phases else -0.4)
    axes.set_xlim(0, (end - start) / scale)
    axes.set_xlabel("ms of one step")
    axes.grid(visible=False)
    axes.set_title(label_text(title, 100), fontsize=10.5, loc="left")
    causes = sorted({gap.cause for gap in lanes.gaps})
    _legend(
        figure,
        dict(list(colours.items())[: len(COLOURS)]) | {f"idle: {cause}": IDLE_COLOURS[cause] for cause in causes},
    )
    return figure


def _window(lanes: Lanes) -> tuple[float, float]:
    """Returns when the last marked step begins and when the device is done with it. If no step is marked, it is the whole capture."""
    if not lanes.steps:
        return 0.0, lanes.span_us
    start, length = lanes.steps[-1]
    boxes = [box for lane in lanes.lanes if lane.on_device for box in lane.boxes]
    ends = [box.start_us + box.length_us for box in boxes if box.launch_us is not None and box.launch_us >= start]
    return start, max([start + length, *ends])


def _busy(lane: Lane, start: float, end: float) -> float:
    return sum(box.length_us for box in lane.boxes if box.depth == 0 and start <= box.start_us < end)


def _legend(figure: Any, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    if colours:
        keys = [Patch(color=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=keys, loc="outside lower center", ncols=6, fontsize=7.5, frameon=False)


# Memory over a step


def memory_figure(rows: Sequence[MemoryRow]) -> Any:
    """Draws the allocated bytes over a step. One recipe is shown by kind, and each of several has a line; what is reserved is dashed."""
    figure, axes = new_figure(8.0, 4.4)
    several_models = len({row.model for row in rows}) > 1
    for number, row in enumerate(rows):
        points, colour = row.use.timeline, COLOURS[number % len(COLOURS)]
        across = [point.at for point in points]
        if len(rows) == 1:
            kinds = list(dict.fromkeys(kind for point in points for kind, size in point.categories.items() if size))
            heights = [[point.categories.get(kind, 0) / 2**20 for point in points] for kind in kinds]
            axes.stackplot(
                across, heights, labels=kinds, colors=[COLOURS[at % len(COLOURS)] for at in range(len(kinds))]
            )
            colour = "black"
        else:
            name = f"{row.model} {row.recipe}" if several_models else row.recipe
            axes.plot(across, [point.bytes / 2**20 for point in points], color=colour, label=label_text(name))
        held = [(point.at, point.reserved_bytes / 2**20) for point in points if point.reserved_bytes is not None]
        if held:
            label = "reserved" if len(rows) == 1 else None
            axes.plot(*zip(*held, strict=True), color=colour, linestyle="--", linewidth=1.2, label=label)
    axes.set_xlabel("course of a step, by allocations")
    axes.set_ylabel("MiB, allocated (reserved: dashed)")
    axes.legend()
    return figure
