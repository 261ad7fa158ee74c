"""The recorded steps as lanes of boxes, for people to look at: operators on host threads, work on device streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from redline.model.fields import Frozen
from redline.trace.classes import class_of
from redline.trace.columns import UNKNOWN, Ints, Trace
from redline.trace.host import HostView
from redline.trace.intervals import distinct
from redline.trace.names import label_of, short_name
from redline.trace.replay import DeviceRun, device_runs
from redline.trace.window import phases_marked, recorded

MOST_BOXES = 20_000
"""Longer traces lose their shortest boxes, which are too small to see, so that the page stays fast."""
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
    """Operators by what called them, added up over all steps: a share of the host's time, and where it starts."""

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
    """Start and length of each step on the host, where the trace marks them."""
    left_out: int = 0
    """Boxes too short to be shown."""


class _Names:
    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, name: str) -> int:
        return self.numbers.setdefault(name, len(self.numbers))


def lanes_of(trace: Trace, most: int = MOST_BOXES) -> Lanes | None:
    """None where the trace holds neither operators nor device work."""
    one = recorded(trace)
    trace = one.trace
    host = HostView(one.links)
    runs = device_runs(one, host)
    starts = [column.min() for column in (trace.operators.start, trace.work.start) if len(column)]
    ends = [column.max() for column in (trace.operators.end, trace.work.end) if len(column)]
    if not starts:
        return None
    begin, end = int(min(starts)), int(max(ends))
    least = _least(np.concatenate([trace.operators.duration, trace.work.duration]), most)
    names = _Names()
    lanes = [*_host_lanes(host, begin, least, names), *_device_lanes(runs, begin, least, names)]
    shown = sum(len(lane.boxes) for lane in lanes)
    devices = [number for number, lane in enumerate(lanes) if lane.on_device]
    return Lanes(
        span_us=_us(end - begin),
        gaps=tuple(_gaps(runs, devices, begin)),
        phases=tuple(
            (name, _us(int(start) - begin), _us(int(stop - start)))
            for name, when in phases_marked(host).items()
            for start, stop in zip(when.start[:200], when.end[:200], strict=True)
        ),
        flame=tuple(_flame(host, names)),
        steps=tuple(
            (_us(int(start) - begin), _us(int(stop - start)))
            for start, stop in zip(one.steps.start, one.steps.end, strict=True)
        ),
        lanes=tuple(lanes),
        names=tuple(names.numbers),
        left_out=len(trace.operators) + len(trace.work) - shown,
    )


def _us(ns: int) -> float:
    return round(ns / 1e3, 2)


def _least(durations: Ints, most: int) -> int:
    """The shortest box that is shown, in nanoseconds."""
    return (
        0 if len(durations) <= most else int(np.partition(durations, len(durations) - most)[len(durations) - most]) + 1
    )


def _host_lanes(host: HostView, begin: int, least: int, names: _Names) -> Iterator[Lane]:
    trace, nesting = host.trace, host.links.nesting
    operators = trace.operators
    depth = nesting.depth
    for thread in distinct(operators.thread).tolist():
        rows = np.flatnonzero((operators.thread == thread) & (operators.duration >= least) & (depth < MOST_DEPTH))
        boxes = tuple(
            Box(
                names(label_of(trace.names[operators.name[row]])),
                _us(int(operators.start[row]) - begin),
                _us(int(operators.duration[row])),
                int(depth[row]),
                "operator",
            )
            for row in rows.tolist()
        )
        if boxes:
            yield Lane(label=f"host thread {label_of(str(trace.threads[thread][1]))}", on_device=False, boxes=boxes)


def _device_lanes(runs: Sequence[DeviceRun], begin: int, least: int, names: _Names) -> Iterator[Lane]:
    """One lane for each device; its streams lie below each other."""
    for run in runs:
        links = run.view.links
        work = links.trace.work
        streams = np.unique(work.stream[run.view.rows]).tolist()
        depth = {stream: min(number, MOST_DEPTH - 1) for number, stream in enumerate(streams)}
        boxes = tuple(
            Box(
                names(short_name(links.trace.names[work.name[row]])),
                _us(int(work.start[row]) - begin),
                _us(int(work.duration[row])),
                depth[int(work.stream[row])],
                class_of(links.trace.names[work.name[row]]),
                _us(int(links.launched_at[row]) - begin) if links.is_launched[row] else None,
            )
            for row in run.view.rows[work.duration[run.view.rows] >= least].tolist()
        )
        several = f", {len(streams)} streams" if len(streams) > 1 else ""
        yield Lane(label=f"device {run.view.device}{several}", on_device=True, boxes=boxes)


def _gaps(runs: Sequence[DeviceRun], lanes: Sequence[int], begin: int) -> Iterator[Gap]:
    for lane, run in zip(lanes, runs, strict=True):
        for cause, when in run.idle.when.items():
            for start, end in list(zip(when.start.tolist(), when.end.tolist(), strict=True))[: MOST_BOXES // 4]:
                yield Gap(lane, _us(start - begin), _us(end - start), cause)


def _flame(host: HostView, names: _Names) -> Iterator[Flame]:
    """Merged by the path of names, widest first."""
    trace, operators = host.trace, host.trace.operators
    parents = host.links.nesting.parent
    paths: dict[tuple[int, ...], list[int]] = {}
    path_of: list[tuple[int, ...]] = [()] * len(operators)
    for row in np.lexsort((-operators.duration, operators.start)).tolist():
        above = path_of[parents[row]] if parents[row] != UNKNOWN else ()
        path_of[row] = (*above, names(label_of(trace.names[operators.name[row]])))
        entry = paths.setdefault(path_of[row], [0, 0])
        entry[0] += int(operators.duration[row])
        entry[1] += 1
    whole = sum(ns for path, (ns, _) in paths.items() if len(path) == 1) or 1
    starts: dict[tuple[int, ...], float] = {(): 0.0}
    widest = sorted(paths, key=lambda path: (len(path), -paths[path][0]))
    for path in widest[:FLAME_NODES]:
        ns, calls = paths[path]
        above = path[:-1]
        if len(path) > MOST_DEPTH or above not in starts:
            continue
        start = starts[above]
        starts[above] = start + ns / whole
        starts[path] = start
        yield Flame(path[-1], round(start, 6), round(ns / whole, 6), len(path) - 1, ns / 1e9, calls)
