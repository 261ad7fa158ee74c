"""A profile as files: one HTML page that fetches nothing, kernels as CSV, every table as a workbook or as Parquet."""

from __future__ import annotations

import csv
import io
from functools import cache
from typing import Any, Literal

import msgspec
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup

from redline.analyze.profile import Profile
from redline.model.units import format_bytes, format_share
from redline.show.dashboard import lanes_script, script_policy
from redline.show.export import harmless
from redline.show.payload import as_json
from redline.show.profile_facts import PERFETTO, facts, hints, idle_parts, title, told_time
from redline.show.step import treemap
from redline.trace.lanes import Lanes
from redline.trace.memory import MemoryLine
from redline.trace.timeline import Strip
from redline.trace.tree import TreeNode

HEIGHT = 60
WIDTH = 960
KERNELS_SHOWN = 200
OPERATORS_SHOWN = 100
PARTS_SHOWN = 60
ROW_HEIGHT = 16
LEAST_WIDTH = 0.8
MAP_HEIGHT = 300
MAP_COLOURS = 6
DEEPEST_ROW = 40
NEARLY_ALL = 0.97

Side = Literal["device", "host"]
SIDES: tuple[Side, ...] = ("device", "host")


def profile_page(profile: Profile, lanes: Lanes | None = None) -> str:
    """`lanes`: the captured steps, to be looked at box by box."""
    script = lanes_script() if lanes is not None else ""
    return _template().render(
        profile=profile,
        title=title(profile),
        facts=list(facts(profile)),
        hints=list(hints(profile)),
        pictures=[(strip, _bars(strip)) for strip in profile.strips],
        idle=idle_parts(profile) if profile.has_device and profile.ranks else [],
        flames=[flame for side in SIDES if (flame := _flame(profile, side)) is not None],
        memory=[(line, _curve(line)) for line in profile.memory if line.on_device],
        width=WIDTH,
        height=HEIGHT,
        tiles=_tiles(profile),
        map_height=MAP_HEIGHT,
        kernels=profile.kernels[:KERNELS_SHOWN],
        operators=profile.operators[:OPERATORS_SHOWN],
        limits=profile.limits[:OPERATORS_SHOWN],
        parts=profile.parts[:PARTS_SHOWN],
        perfetto=PERFETTO,
        lanes=Markup(as_json(msgspec.to_builtins(lanes))) if lanes is not None else "",
        script=Markup(script),
        policy=f"default-src 'none'; style-src 'unsafe-inline'{script_policy(script) if script else ''}",
    )


def _tiles(profile: Profile) -> list[dict[str, Any]]:
    """The treemap, with the colour of each tile's class and a name where it has room."""
    tiles = treemap(profile, WIDTH, MAP_HEIGHT)
    colours = {
        name: index % MAP_COLOURS for index, name in enumerate(dict.fromkeys(tile.kernel_class for tile in tiles))
    }
    return [
        {
            **tile._asdict(),
            "colour": colours[tile.kernel_class],
            "text": tile.short_name[: int(tile.width / 6.4)] if tile.width > 40 and tile.height > 14 else "",
        }
        for tile in tiles
    ]


@cache
def _template() -> Template:
    # Names in traces are anyone's to write: everything is escaped.
    environment = Environment(
        loader=PackageLoader("redline.show"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters |= {"time": told_time, "share": format_share, "bytes": format_bytes}
    return environment.get_template("profile.html.j2")


def _flame(profile: Profile, side: Side) -> dict[str, Any] | None:
    """The tree as boxes: as wide as the time they take, callers above what they call."""
    tree = profile.tree
    whole = _seconds(tree, side) if tree is not None else 0.0
    if tree is None or not whole:
        return None
    boxes: list[dict[str, Any]] = []
    _add_boxes(boxes, tree, side, 0.0, 0, WIDTH / whole)
    depth = max((box["level"] for box in boxes), default=0) + 1
    return {"side": side, "whole": whole, "boxes": boxes, "height": depth * ROW_HEIGHT}


def _seconds(node: TreeNode, side: Side) -> float:
    return node.device_s if side == "device" else node.host_s


def _add_boxes(
    boxes: list[dict[str, Any]], parent: TreeNode, side: Side, left: float, level: int, scale: float
) -> None:
    for child in parent.children:
        node = _without_wrappers(child, side)
        wide = _seconds(child, side) * scale
        if wide >= LEAST_WIDTH and level < DEEPEST_ROW:
            boxes.append(
                {
                    "x": f"{left:.2f}", "y": level * ROW_HEIGHT, "w": f"{wide:.2f}", "level": level, "kind": node.kind,
                    "name": node.name, "seconds": _seconds(child, side), "calls": node.calls,
                    "text": node.plain_name[: int(wide / 6.5)] if wide > 20 else "",
                }
            )  # fmt: skip
            _add_boxes(boxes, node, side, left, level + 1, scale)
        left += wide


def _without_wrappers(node: TreeNode, side: Side) -> TreeNode:
    """Python functions that do nearly nothing but call one other thing are looked through."""
    while node.kind == "function" and node.children:
        inner = max(node.children, key=lambda child: _seconds(child, side))
        if _seconds(inner, side) < NEARLY_ALL * _seconds(node, side):
            break
        node = inner
    return node


def _curve(line: MemoryLine) -> str:
    """The points of a polygon under the memory in use."""
    step, most = WIDTH / len(line.allocated), max(line.peak_bytes, 1)
    tops = [(number * step, HEIGHT * (1 - size / most)) for number, size in enumerate(line.allocated)]
    points = [(0.0, float(HEIGHT)), *tops, (float(WIDTH), tops[-1][1]), (float(WIDTH), float(HEIGHT))]
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _bars(strip: Strip) -> list[dict[str, Any]]:
    """Rectangles of the picture, one on top of the other in each stretch; those of no height are left out."""
    wide = WIDTH / len(strip.compute)
    bars = []
    columns = [("compute", strip.compute), ("communication", strip.communication), ("copy", strip.copy)]
    columns += [(f"idle-{cause}", shares) for cause, shares in strip.idle.items()]
    kinds = [kind for kind, _ in columns]
    for number, shares in enumerate(zip(*(column for _, column in columns), strict=True)):
        top = float(HEIGHT)
        for kind, share in zip(kinds, shares, strict=True):
            tall = share * HEIGHT
            if tall >= 0.1:
                top -= tall
                bars.append(
                    {
                        "x": f"{number * wide:.2f}",
                        "y": f"{top:.2f}",
                        "w": f"{wide:.2f}",
                        "h": f"{tall:.2f}",
                        "kind": kind,
                    }
                )
    return bars


COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")


def kernel_csv(profile: Profile) -> str:
    """The kernel table in the layout of `rocprof --stats`; where the host is the device, its operators."""
    text = io.StringIO()
    # rocprof quotes names and nothing else.
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, calls, seconds, share in _kernels_or_operators(profile):
        total = round(seconds * 1e9)
        writer.writerow((harmless(name), calls, total, round(total / calls) if calls else 0, round(share * 100, 6)))
    return text.getvalue()


def _kernels_or_operators(profile: Profile) -> list[tuple[str, int, float, float]]:
    if profile.has_device:
        return [(row.name, row.calls, row.total_s, row.share) for row in profile.kernels]
    whole = sum(row.cpu_self_s for row in profile.operators)
    rows = sorted(profile.operators, key=lambda row: -row.cpu_self_s)
    return [(row.name, row.calls, row.cpu_self_s, row.cpu_self_s / whole if whole else 0.0) for row in rows]
