"""Why a device was idle: each gap split along time by what it waited for.

Between two pieces of work, up to the end of the call that launches the second, the host was late: what it did meanwhile
is the cause. From there to the start of the work, launching takes some microseconds; the rest is waiting for an event
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
from redline.trace.columns import UNKNOWN, HostRanges, Ints, Mask
from redline.trace.host import HostView, on_thread, picked
from redline.trace.intervals import NEVER, Intervals, both, distinct, joined, seconds, union, without
from redline.trace.links import Links, matching
from redline.trace.names import label_of

_FENCE = 1.5
"""Tukey's fence: what lies further above the upper quartile than this many ranges between the quartiles is unusual."""

Cause = Literal["host", "sync", "data", "allocator", "warm-up", "latency", "launch", "dependency", "unknown"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
"""`host`: Python, operators and launching. `sync`: the host sat in a call that waits for the device. `data`: in a data loader. `allocator`: in cudaMalloc, cudaFree and their kin.
`warm-up`: loading code, compiling, capturing. `latency`: from a launch that came late to its work. `launch`: from one
kernel to the next, which was launched in time. `dependency`: the work waits for an event of another stream."""

_WAIT_EVENT = re.compile(r"StreamWaitEvent")
_OF_LIBRARIES = re.compile(
    r"^(<built-in|<string>|torch/|threading\.py|contextlib\.py|nn\.Module: |.*site-packages/torch/)"
)


class Idle(Frozen):
    """A device's idle time by cause; together all of it, except for `other_s`."""

    host_wait_s: float
    """The host was late: Python, operators, launching."""
    launch_gap_s: float
    """The next work was launched in time and the gap is short: the price of one kernel after another."""
    data_wait_s: float = 0.0
    """The host sat in a data loader."""
    sync_s: float = 0.0
    """The host sat in a call that waits for the device."""
    allocator_s: float = 0.0
    """The host sat in a call that takes memory from the driver or gives it back."""
    warm_up_s: float = 0.0
    """The host loaded code, compiled or captured a graph: this happens once."""
    latency_s: float = 0.0
    """From the end of a launch that came late to the start of its work."""
    dependency_s: float = 0.0
    """The next work was launched in time, but waited for an event of another stream."""
    unknown_s: float = 0.0
    """Launched in time, the gap is long, and nothing in the trace says why."""


class Wait(Frozen):
    """Calls that made the host wait, from one place in the program."""

    call: str
    operator: str | None
    """The operator that called it."""
    frame: str | None
    """The Python function that called it, where stacks were recorded."""
    calls: int
    blocked_s: float
    """Spent in the calls, whether the device worked or not."""
    idle_s: float
    """The device's idle time that they caused."""
    copies: bool = False
    """Whether it copies."""


@dataclass(frozen=True)
class IdleTime:
    """The idle time of one device, in nanoseconds, and when it was idle for each cause."""

    when: dict[Cause, Intervals]
    by_call: Ints
    """For each call of the trace, the idle time it caused by making the host wait."""

    def ns(self, cause: Cause) -> int:
        return self.when[cause].total


@dataclass(frozen=True)
class Gaps:
    """A device's gaps. The last may have no work after it, the first none before."""

    start: Ints
    end: Ints
    late_until: Ints
    """Up to here the host was late; the gap's own start where it was not."""
    call: Ints
    """The call that launched the work after the gap; UNKNOWN where there is none."""


def gaps_of(view: HostView, rows: Ints, bounds: tuple[int, int], busy: Intervals) -> Gaps:
    """`rows`: the device's work among that of the trace. `busy`: its union, whose `first` counts within `rows`."""
    links = view.links
    start, end = np.concatenate(([bounds[0]], busy.end)), np.concatenate((busy.start, [bounds[1]]))
    following = np.concatenate((rows[busy.first], [UNKNOWN]))
    call = np.where(following >= 0, links.call[following], UNKNOWN)
    known = call >= 0
    late_until = np.where(known, np.clip(links.launched_by[following], start, end), start)
    late_until[-1] = end[-1]  # nothing follows: the host has not launched anything yet, or is through
    real = end > start
    return Gaps(start[real], end[real], late_until[real], call[real])


@dataclass(frozen=True)
class Latency:
    """How long work usually takes to start on a device that has nothing else to do, after the host asks for it.

    It differs between makers of GPUs by an order of magnitude, so that every trace is asked for its own. Where the host is
    hardly ever late it is what a launch takes: a device starts work about as fast as the host can ask for it.
    """

    ns: int

    @classmethod
    def of(cls, links: Links, rows: Ints, busy: Intervals) -> Latency:
        work = links.trace.work
        first = rows[busy.first]
        before = np.concatenate(([np.iinfo(np.int64).min], busy.end[:-1]))
        late = links.is_launched[first] & (links.launched_at[first] >= before) & ~links.by_graph[first]
        latencies = work.start[first[late]] - links.launched_at[first[late]]
        if len(latencies) < QUARTILES:
            calls = distinct(links.call[links.is_launched & ~links.by_graph])
            gaps = (busy.start - before)[1:]
            # Work that follows the work before without a gap (ROCm writes 1 ns) says nothing of the others.
            latencies = links.trace.calls.duration[calls] if len(calls) else gaps[gaps > 1]
        return cls(usual_at_least(latencies))


QUARTILES = 4
"""Fewer values have no quartiles."""


def usual(lengths: Ints) -> int:
    """The longest that is not unusual, by Tukey's fence."""
    if not len(lengths):
        return 0
    low, high = np.percentile(lengths, (25, 75))
    return int(high + _FENCE * (high - low))


def usual_at_least(lengths: Ints) -> int:
    """The same from the shorter half alone, for lengths that only ever come out too long: by symmetry."""
    if not len(lengths):
        return 0
    low, middle = np.percentile(lengths, (25, 50))
    return int(middle + (1 + 2 * _FENCE) * (middle - low))


def idle_time(view: HostView, rows: Ints, bounds: tuple[int, int], busy: Intervals, latency: Latency) -> IdleTime:
    gaps = gaps_of(view, rows, bounds, busy)
    when: dict[Cause, Intervals] = dict.fromkeys(CAUSES, NEVER)
    by_call = np.zeros(len(view.trace.calls), np.int64)
    _split_lateness(view, gaps, when, by_call)
    _split_the_rest(view, gaps, when, latency.ns)
    return IdleTime(when, by_call)


def _split_lateness(view: HostView, gaps: Gaps, when: dict[Cause, Intervals], by_call: Ints) -> None:
    """From the beginning of a gap to the end of the launch: by what the launching thread did, else the main one."""
    calls = view.trace.calls
    main = view.main_thread
    thread = np.where(gaps.call >= 0, calls.thread[gaps.call] if len(calls) else main, main)
    late = gaps.late_until > gaps.start
    for one in distinct(thread[late]).tolist():
        mine = late & (thread == one)
        rest = union(gaps.start[mine], gaps.late_until[mine])
        for where in dict.fromkeys((one, main)):
            rest = _take_named(view, where, rest, when, by_call)
            if where != main:
                busy = joined(on_thread(view.trace.operators, where), on_thread(calls, where))
                _add(when, "host", both(rest, busy))
                rest = without(rest, busy)
        _add(when, "host", rest)


def _take_named(view: HostView, thread: int, rest: Intervals, when: dict[Cause, Intervals], by_call: Ints) -> Intervals:
    """Give what a thread's calls and marks explain to their causes; what is left is returned."""
    calls = view.trace.calls
    blocking, allocating = picked(calls, view.blocking), picked(calls, view.allocating)
    causes: tuple[tuple[Cause, HostRanges], ...] = (
        ("warm-up", view.warming_up),
        ("sync", blocking),
        ("allocator", allocating),
        ("data", view.loader),
    )
    for cause, ranges in causes:
        if not len(rest):
            return rest
        busy = on_thread(ranges, thread)
        if not len(busy):
            continue
        if cause == "sync":
            rows = view.blocking[blocking.thread == thread]
            by_call[rows] += rest.within(calls.start[rows], calls.end[rows])
        _add(when, cause, both(rest, busy))
        rest = without(rest, busy)
    return rest


def _split_the_rest(view: HostView, gaps: Gaps, when: dict[Cause, Intervals], usual_ns: int) -> None:
    """From the launch to the start of the work. What the host does meanwhile cannot delay work that is launched."""
    late = gaps.late_until > gaps.start
    launched = np.minimum(gaps.late_until + usual_ns, gaps.end)
    _add(when, "latency", union(gaps.late_until[late], launched[late]))
    _add(when, "launch", union(gaps.late_until[~late], launched[~late]))
    longer = gaps.end > launched
    rest = union(launched[longer], gaps.end[longer])
    waits = longer & _waits_for_event(view, gaps.call)
    waiting = union(launched[waits], gaps.end[waits])
    _add(when, "dependency", both(rest, waiting))
    _add(when, "unknown", without(rest, waiting))


def _waits_for_event(view: HostView, call: Ints) -> Mask:
    """Whether the thread made a stream wait for an event since its last launch."""
    calls = view.trace.calls
    events = np.flatnonzero(matching(view.trace, calls, _WAIT_EVENT))
    launches = view.launching
    found = np.zeros(len(call), np.bool_)
    for thread in distinct(calls.thread[events]).tolist():
        mine = (call >= 0) & (calls.thread[call] == thread)
        at = calls.start[call[mine]]
        event = _last_before(calls.start[events[calls.thread[events] == thread]], at)
        launch = _last_before(calls.start[launches[calls.thread[launches] == thread]], at)
        found[mine] = event > launch
    return found


def _last_before(times: Ints, at: Ints) -> Ints:
    if not len(times):
        return np.full(len(at), np.iinfo(np.int64).min)
    times = np.sort(times)
    index = np.searchsorted(times, at, side="left") - 1
    return np.where(index >= 0, times[np.maximum(index, 0)], np.iinfo(np.int64).min)


def _add(when: dict[Cause, Intervals], cause: Cause, more: Intervals) -> None:
    if len(more):
        when[cause] = joined(when[cause], more)


def idle_of(times: Sequence[IdleTime]) -> Idle:
    ns = {cause: sum(time.ns(cause) for time in times) for cause in CAUSES}
    return Idle(
        host_wait_s=seconds(ns["host"]),
        launch_gap_s=seconds(ns["launch"]),
        data_wait_s=seconds(ns["data"]),
        sync_s=seconds(ns["sync"]),
        allocator_s=seconds(ns["allocator"]),
        warm_up_s=seconds(ns["warm-up"]),
        latency_s=seconds(ns["latency"]),
        dependency_s=seconds(ns["dependency"]),
        unknown_s=seconds(ns["unknown"]),
    )


def waits_of(views: Sequence[tuple[HostView, Sequence[IdleTime]]]) -> list[Wait]:
    """Where the host waited for devices, the largest idle time first, then the longest wait."""
    sums: defaultdict[tuple[str, str | None, str | None, bool], list[int]] = defaultdict(lambda: [0, 0, 0])
    for view, times in views:
        rows = view.blocking
        idle = sum((time.by_call[rows] for time in times), start=np.zeros(len(rows), np.int64))
        trace, names = view.trace, view.trace.names
        operators = view.links.operators_of(rows)
        copies = view.copying[rows].tolist()
        columns = zip(rows.tolist(), operators.tolist(), _callers(view, rows), copies, idle.tolist(), strict=True)
        for row, operator, frame, is_copy, caused in columns:
            called = label_of(names[trace.operators.name[operator]]) if operator >= 0 else None
            key = (label_of(names[trace.calls.name[row]]), called, frame, is_copy)
            for index, value in enumerate((1, int(trace.calls.duration[row]), caused)):
                sums[key][index] += value
    rows_of = [
        Wait(
            call=call,
            operator=operator,
            frame=frame,
            calls=count,
            blocked_s=seconds(blocked),
            idle_s=seconds(idle),
            copies=is_copy,
        )
        for (call, operator, frame, is_copy), (count, blocked, idle) in sums.items()
    ]
    return sorted(rows_of, key=lambda wait: (-wait.idle_s, -wait.blocked_s, wait.call))


def _callers(view: HostView, rows: Ints) -> list[str | None]:
    """The innermost Python function around each call that is not torch's own."""
    calls, frames = view.trace.calls, view.trace.frames
    if not len(frames):
        return [None] * len(rows)
    own = ~matching(view.trace, frames, _OF_LIBRARIES)
    found = view.frames.around(calls.thread[rows], calls.start[rows])
    for _ in range(int(view.frames.depth.max(initial=0)) + 1):
        foreign = (found >= 0) & ~own[found]
        if not foreign.any():
            break
        found[foreign] = view.frames.parent[found[foreign]]
    return [label_of(view.trace.names[frames.name[frame]]) if frame >= 0 else None for frame in found.tolist()]
