"""This module says why a device was idle: each gap is split along time by what it waited for.

Between two pieces of work, up to the end of the call that launches the second, the host was late: what it did meanwhile
is the cause. From there to the start of the work, launching takes some microseconds. The rest is waiting for an event
of another stream, or unknown.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, Ints, Mask
from redline.trace.host import HostView, on_thread, picked
from redline.trace.intervals import (
    QUARTILES,
    Intervals,
    both,
    seconds,
    union,
    usual_at_least,
    without,
)
from redline.trace.links import Links, Nesting, matching
from redline.trace.names import label_of

Cause = Literal["host", "sync", "data", "allocator", "warm-up", "latency", "launch", "dependency", "unknown"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""`host` is Python, operators and launching. `sync` is a call that waits for the device. `data` is a data loader.
`allocator` is cudaMalloc, cudaFree and similar calls. `warm-up` is loading code, compiling and capturing. `latency` goes
from a launch that came late to its work. `launch` goes from one kernel to the next, which was launched in time. In
`dependency` the work waits for an event of another stream."""

_WAIT_EVENT = re.compile(r"StreamWaitEvent")
_OF_LIBRARIES = re.compile(
    r"^(<built-in|<string>|torch/|threading\.py|contextlib\.py|nn\.Module: |.*site-packages/torch/)"
)


class Idle(Frozen):
    """This is a device's idle time by cause. The causes together are all of it."""

    host_wait_s: float
    """The host was late because of Python, operators or launching."""
    sync_s: float
    """The host was in a call that waits for the device."""
    data_wait_s: float
    """The host sat in a data loader."""
    allocator_s: float
    """The host sat in a call that takes memory from the driver or gives it back."""
    warm_up_s: float
    """The host was loading code, compiling or capturing a graph, which happens once."""
    latency_s: float
    """This is the time from the end of a launch that came late to the start of its work."""
    launch_gap_s: float
    """The next work was launched in time and the gap is short. It is the price of one kernel after another."""
    dependency_s: float
    """The next work was launched in time, but waited for an event of another stream."""
    unknown_s: float
    """The next work was launched in time, the gap is long, and nothing in the trace says why."""


class Wait(Frozen):
    """These are calls from one place in the program that made the host wait."""

    call: str
    operator: str | None
    """This operator called it."""
    frame: str | None
    """This Python function called it, if stacks were recorded."""
    calls: int
    blocked_s: float
    """This is the time in the calls, whether the device worked or not."""
    idle_s: float
    """This is the device's idle time that they caused."""
    copies: bool = False
    """It is true if the calls copy."""


@dataclass(frozen=True)
class IdleTime:
    """This is the idle time of one device, in nanoseconds, and when it was idle for each cause."""

    when: dict[Cause, Intervals]
    by_call: Ints
    """Each call of the trace has the idle time here that it caused by making the host wait."""

    def ns(self, *causes: Cause) -> int:
        return sum(self.when[cause].total for cause in causes)


def latency_ns(links: Links, rows: Ints, busy: Intervals) -> int:
    """Returns how long work usually takes to start on a device that has nothing else to do, after the host asks for it.

    The makers of GPUs differ by an order of magnitude, so every trace is asked for its own latency. If the host is hardly
    ever late, the latency is what a launch takes: a device starts work about as fast as the host can ask for it.
    """
    first, single = rows[busy.first], links.is_launched & ~links.by_graph
    before = np.concatenate(([np.iinfo(np.int64).min], busy.end[:-1]))
    late = single[first] & (links.launched_at[first] >= before)
    latencies = links.trace.work.start[first[late]] - links.launched_at[first[late]]
    if len(latencies) < QUARTILES:
        gaps = (busy.start - before)[1:][links.is_launched[first[1:]]]
        # Work that follows the work before without a gap (ROCm writes 1 ns) says nothing about the others.
        latencies = links.trace.calls.duration[links.call[single]] if single.any() else gaps[gaps > 1]
    # Clocks that disagree, or damaged times, may give less than 0.
    return max(usual_at_least(latencies), 0)


def idle_time(view: HostView, rows: Ints, bounds: tuple[int, int], busy: Intervals, latency: int) -> IdleTime:
    """Returns the idle time of one device. `rows` is the device's work among that of the trace. `busy` is its union,
    whose `first` counts within `rows`.

    The last gap may have no work after it, the first none before.
    """
    links, calls = view.links, view.trace.calls
    start, end = np.append(bounds[0], busy.end), np.append(busy.start, bounds[1])
    following = np.append(rows[busy.first], UNKNOWN)
    call = np.append(links.call, UNKNOWN)[following]
    # Up to this time the host was late. If nothing follows, it has not launched anything yet, or it has finished.
    until = np.where(call >= 0, np.clip(np.append(links.launched_by, 0)[following], start, end), start)
    until[-1] = end[-1]
    real = end > start
    start, end, until, call = start[real], end[real], until[real], call[real]
    late, by_call = until > start, np.zeros(len(calls), np.int64)
    when: dict[Cause, Intervals] = {}
    rest = union(start[late], until[late])
    for cause, ranges in view.named.items():
        if cause == "sync":
            by_call[view.waits] = rest.within(calls.start[view.waits], calls.end[view.waits])
        own = on_thread(ranges, *view.launching_threads)
        when[cause], rest = both(rest, own), without(rest, own)
    # The rest is from the launch to the start of the work, because the host cannot delay work that is launched. If the
    # launch is not in the file, nobody knows whether work was launched in time.
    launched = np.where(call >= 0, np.minimum(until + latency, end), until)
    waits = (end > launched) & _waits_for_event(view, call)
    when |= {
        "host": rest,
        "latency": union(until[late], launched[late]),
        "launch": union(until[~late], launched[~late]),
        "dependency": union(launched[waits], end[waits]),
        "unknown": union(launched[~waits], end[~waits]),
    }
    return IdleTime({cause: when[cause] for cause in CAUSES}, by_call)


def _waits_for_event(view: HostView, call: Ints) -> Mask:
    """Returns True where the thread made a stream wait for an event since its last launch."""
    calls, events = view.trace.calls, view.calls(_WAIT_EVENT)
    order = np.concatenate((view.launching, np.flatnonzero(events)))
    order = order[np.lexsort((calls.start[order], calls.thread[order]))]
    found = np.zeros(len(calls) + 1, np.bool_)  # the last entry stands for no call
    found[order[1:]] = events[order[:-1]] & (calls.thread[order[1:]] == calls.thread[order[:-1]])
    return found[call]


_FIELDS = {"host": "host_wait_s", "data": "data_wait_s", "launch": "launch_gap_s", "warm-up": "warm_up_s"}


def idle_of(times: Sequence[IdleTime]) -> Idle:
    return Idle(
        **{
            _FIELDS.get(cause, f"{cause}_s"): seconds(sum(time.ns(cause) for time in times if cause in time.when))
            for cause in CAUSES
        }
    )


def waits_of(views: Sequence[tuple[HostView, Sequence[IdleTime]]]) -> list[Wait]:
    """Returns where the host was waiting for devices. The largest idle time comes first, then the longest wait."""
    sums: defaultdict[tuple[str, str | None, str | None, bool], Ints] = defaultdict(lambda: np.zeros(3, np.int64))
    for view, times in views:
        rows, trace, names = view.blocking, view.trace, view.trace.names
        idle = sum((time.by_call[rows] for time in times), start=np.zeros(len(rows), np.int64))
        # The innermost Python function around each call tells where it is, unless it is torch's own.
        own = picked(trace.frames, ~matching(trace, trace.frames, _OF_LIBRARIES))
        frames = Nesting(own).around(trace.calls.thread[rows], trace.calls.start[rows])
        columns = (rows, view.links.operators_of(rows), frames, trace.calls.duration[rows], idle)
        for row, operator, frame, lasts, caused in zip(*(column.tolist() for column in columns), strict=True):
            called = label_of(names[trace.operators.name[operator]]) if operator >= 0 else None
            inside = label_of(names[own.name[frame]]) if frame >= 0 else None
            key = (label_of(names[trace.calls.name[row]]), called, inside, bool(view.copying[row]))
            sums[key] += (1, lasts, caused)
    found = [
        Wait(
            call=call,
            operator=operator,
            frame=frame,
            calls=int(count),
            blocked_s=seconds(int(blocked)),
            idle_s=seconds(int(idle)),
            copies=copies,
        )
        for (call, operator, frame, copies), (count, blocked, idle) in sums.items()
    ]
    return sorted(found, key=lambda wait: (-wait.idle_s, -wait.blocked_s, wait.call))
