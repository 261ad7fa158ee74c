"""This module lays out the recorded steps as lanes of boxes for people to look at: operators on host threads, work on device streams."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import Trace
from redline.trace.decode import Numbering
from redline.trace.host import HostView
from redline.trace.intervals import Intervals, distinct
from redline.trace.names import class_of, label_of, short_name
from redline.trace.replay import device_runs
from redline.trace.window import phases_marked, recorded

MOST_BOXES = 20_000
"""Longer traces lose their shortest boxes, which are too small to see, so that the page stays fast."""
MOST_PHASES = 200
"""A page shows at most this many stretches of each phase."""
MOST_DEPTH = 12
"""Operators that are nested deeper than this are not shown, and further streams share the last place."""


class Box(NamedTuple):
    """This is one operator, kernel or copy. Times are in microseconds since the first recorded moment."""

    name: int
    start_us: float
    length_us: float
    depth: int
    kind: str
    """This is a kernel's class, or `operator`."""
    launch_us: float | None = None
    """The host launched it then. It is None if that is not known."""


class Lane(Frozen):
    label: str
    on_device: bool
    boxes: tuple[Box, ...]


class Gap(NamedTuple):
    """In this time the device had nothing to do."""

    lane: int
    start_us: float
    length_us: float
    cause: str


class Lanes(Frozen):
    span_us: float
    names: tuple[str, ...]
    lanes: tuple[Lane, ...]
    gaps: tuple[Gap, ...]
    phases: tuple[tuple[str, float, float], ...]
    """These are name, start and length in microseconds."""
    steps: tuple[tuple[float, float], ...] = ()
    """These are start and length of each step on the host, if the trace marks them."""
    left_out: int = 0
    """This many boxes are too short to be shown."""


def lanes_of(trace: Trace, most: int = MOST_BOXES) -> Lanes | None:
    """Returns the lanes of a trace. Returns None if it holds neither operators nor device work."""
    one = recorded(trace)
    trace, links, host = one.trace, one.links, HostView(one.links)
    runs, operators, work = device_runs(one, host), trace.operators, trace.work
    durations = np.sort(np.concatenate((operators.duration, work.duration)))
    if not len(durations):
        return None
    begin = int(np.min(np.concatenate((operators.start, work.start))))
    least = 0 if len(durations) <= most else int(durations[-most]) + 1
    names: Numbering[str] = Numbering()

    def us(ns: int) -> float:
        return round(ns / 1e3, 2)

    def boxed(when: Intervals, at_most: int) -> list[tuple[float, float]]:
        """Returns start and length of at most `at_most` intervals."""
        pairs = zip(when.start.tolist()[:at_most], when.end.tolist(), strict=False)
        return [(us(start - begin), us(end - start)) for start, end in pairs]

    lanes = []
    for thread in distinct(operators.thread).tolist():
        own = (operators.thread == thread) & (operators.duration >= least) & (links.nesting.depth < MOST_DEPTH)
        columns = (operators.name, operators.start - begin, operators.duration, links.nesting.depth)
        boxes = tuple(
            Box(names[label_of(trace.names[name])], us(start), us(length), depth, "operator")
            for name, start, length, depth in zip(*(column[own].tolist() for column in columns), strict=True)
        )
        label = f"host thread {label_of(str(trace.threads[thread][1]))}"
        lanes += [Lane(label=label, on_device=False, boxes=boxes)] if boxes else []
    gaps: list[Gap] = []
    for run in runs:
        # The streams of a device lie below each other.
        streams, depth = np.unique(work.stream[run.view.rows], return_inverse=True)
        own = work.duration[run.view.rows] >= least
        rows, depth = run.view.rows[own], np.minimum(depth[own], MOST_DEPTH - 1)
        columns = (work.name[rows], work.start[rows] - begin, work.duration[rows], depth)
        known, launched = links.is_launched[rows].tolist(), (links.launched_at[rows] - begin).tolist()
        boxes = tuple(
            Box(names[short_name(name)], us(start), us(length), depth, class_of(name), us(at) if is_known else None)
            for number, start, length, depth, is_known, at in zip(
                *(column.tolist() for column in columns), known, launched, strict=True
            )
            for name in (trace.names[number],)
        )
        gaps += [
            Gap(len(lanes), *box, cause)
            for cause, when in run.idle.when.items()
            for box in boxed(when, MOST_BOXES // 4)
        ]
        several = f", {len(streams)} streams" if len(streams) > 1 else ""
        lanes.append(Lane(label=f"device {run.view.device}{several}", on_device=True, boxes=boxes))
    return Lanes(
        span_us=us(int(np.max(np.concatenate((operators.end, work.end)))) - begin),
        gaps=tuple(gaps),
        phases=tuple((name, *box) for name, when in phases_marked(host).items() for box in boxed(when, MOST_PHASES)),
        steps=tuple(boxed(one.steps, len(one.steps))),
        lanes=tuple(lanes),
        names=tuple(names),
        left_out=len(durations) - sum(len(lane.boxes) for lane in lanes),
    )
