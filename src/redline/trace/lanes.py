"""This module has the recorded steps as lanes of boxes for people to look at: operators on host threads, work on device streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import Trace
from redline.trace.host import HostView
from redline.trace.intervals import Intervals, distinct
from redline.trace.names import class_of, label_of, short_name
from redline.trace.replay import DeviceRun, device_runs
from redline.trace.tree import TreeNode, tree_of
from redline.trace.window import phases_marked, recorded

MOST_BOXES = 20_000
"""Longer traces lose their shortest boxes, which are too small to see, so that the page stays fast."""
MOST_PHASES = 200
MOST_DEPTH = 12
FLAME_NODES = 600


class Box(NamedTuple):
    """One operator, kernel or copy. Times in microseconds since the first recorded moment."""

    name: int
    start_us: float
    length_us: float
    depth: int
    kind: str
    """A kernel's class, or `operator`."""
    launch_us: float | None = None
    """When the host launched it; None where that is not known."""


class Lane(Frozen):
    label: str
    on_device: bool
    boxes: tuple[Box, ...]


class Gap(NamedTuple):
    """The device had nothing to do."""

    lane: int
    start_us: float
    length_us: float
    cause: str


class Flame(NamedTuple):
    """A place in the program: its share of the host's time, and where it starts."""

    name: int
    start: float
    share: float
    depth: int
    seconds: float
    calls: int


class Lanes(Frozen):
    span_us: float
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    gaps: tuple[Gap, ...]
    phases: tuple[tuple[str, float, float], ...]
    """Name, start and length in microseconds."""
    flame: tuple[Flame, ...]
    steps: tuple[tuple[float, float], ...] = ()
    """These are start and length of each step on the host, where the trace marks them."""
    left_out: int = 0
    """Boxes too short to be shown."""


class _Names(dict[str, int]):
    def __missing__(self, name: str) -> int:
        self[name] = len(self)
        return self[name]


def lanes_of(trace: Trace, most: int = MOST_BOXES) -> Lanes | None:
    """None where the trace holds neither operators nor device work."""
    one = recorded(trace)
    trace, host = one.trace, HostView(one.links)
    runs = device_runs(one, host)
    tables = [table for table in (trace.operators, trace.work) if len(table)]
    if not tables:
        return None
    begin, end = min(int(table.start.min()) for table in tables), max(int(table.end.max()) for table in tables)
    durations = np.sort(np.concatenate([table.duration for table in tables]))
    least = 0 if len(durations) <= most else int(durations[-most]) + 1
    names = _Names()
    lanes = [*_host_lanes(host, begin, least, names), *_device_lanes(runs, begin, least, names)]
    devices = [number for number, lane in enumerate(lanes) if lane.on_device]
    return Lanes(
        span_us=_us(end - begin),
        gaps=tuple(
            Gap(lane, start, length, cause)
            for lane, run in zip(devices, runs, strict=True)
            for cause, when in run.idle.when.items()
            for start, length in _boxed(when, begin, MOST_BOXES // 4)
        ),
        phases=tuple(
            (name, *box) for name, when in phases_marked(host).items() for box in _boxed(when, begin, MOST_PHASES)
        ),
        flame=tuple(_flame(tree_of([one.links]), names)),
        steps=tuple(_boxed(one.steps, begin)),
        lanes=tuple(lanes),
        names=tuple(names),
        left_out=len(durations) - sum(len(lane.boxes) for lane in lanes),
    )


def _us(ns: int) -> float:
    return round(ns / 1e3, 2)


def _boxed(when: Intervals, begin: int, most: int | None = None) -> list[tuple[float, float]]:
    """Returns start and length of as many as asked."""
    pairs = zip(when.start.tolist()[:most], when.end.tolist()[:most], strict=True)
    return [(_us(start - begin), _us(end - start)) for start, end in pairs]


def _host_lanes(host: HostView, begin: int, least: int, names: _Names) -> Iterator[Lane]:
    trace, operators, depth = host.trace, host.trace.operators, host.links.nesting.depth
    for thread in distinct(operators.thread).tolist():
        rows = np.flatnonzero((operators.thread == thread) & (operators.duration >= least) & (depth < MOST_DEPTH))
        columns = (operators.name[rows], operators.start[rows] - begin, operators.duration[rows], depth[rows])
        boxes = tuple(
            Box(names[label_of(trace.names[name])], _us(start), _us(length), level, "operator")
            for name, start, length, level in zip(*(column.tolist() for column in columns), strict=True)
        )
        if boxes:
            yield Lane(label=f"host thread {label_of(str(trace.threads[thread][1]))}", on_device=False, boxes=boxes)


def _device_lanes(runs: Sequence[DeviceRun], begin: int, least: int, names: _Names) -> Iterator[Lane]:
    """One lane for each device; its streams lie below each other."""
    for run in runs:
        links, work = run.view.links, run.view.links.trace.work
        rows = run.view.rows[work.duration[run.view.rows] >= least]
        streams, depth = np.unique(work.stream[run.view.rows]), np.minimum(np.arange(len(work)), MOST_DEPTH - 1)
        columns = (
            work.name[rows],
            work.start[rows] - begin,
            work.duration[rows],
            depth[np.searchsorted(streams, work.stream[rows])],
            np.where(links.is_launched[rows], links.launched_at[rows] - begin, np.iinfo(np.int64).min),
        )
        boxes = []
        for number, start, length, level, launch in zip(*(column.tolist() for column in columns), strict=True):
            name = links.trace.names[number]
            launched = _us(launch) if launch > np.iinfo(np.int64).min else None
            boxes.append(Box(names[short_name(name)], _us(start), _us(length), level, class_of(name), launched))
        several = f", {len(streams)} streams" if len(streams) > 1 else ""
        yield Lane(label=f"device {run.view.device}{several}", on_device=True, boxes=tuple(boxes))


def _flame(tree: TreeNode | None, names: _Names) -> Iterator[Flame]:
    """Yields the places in the program by the host's time; the widest is first in each row."""
    rows = [(node, 0.0) for node in (tree,) if node is not None]
    whole, shown = (tree.host_s if tree is not None else 0.0) or 1.0, 0
    for depth in range(MOST_DEPTH):
        below = []
        for node, start in rows:
            for child in sorted(node.children, key=lambda one: -one.host_s):
                if shown < FLAME_NODES:
                    share = child.host_s / whole
                    yield Flame(names[child.name], round(start, 6), round(share, 6), depth, child.host_s, child.calls)
                    below.append((child, start))
                    start += share
                    shown += 1
        rows = below
