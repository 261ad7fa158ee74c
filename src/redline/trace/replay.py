"""This module plays the recorded steps again without some of their time, to tell how much earlier they would have ended.

Work on a stream starts when the work before it on that stream has ended, when its launch has reached the device, and
when the work of other streams or ranks that it waits for has ended, whichever comes last. The host launches in its own
time, except that a call which waits for the device ends only when the device is done with what it waits for. Whatever
none of these explains is kept as a delay of its own. Played with nothing taken out, every event lands where it was.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from redline.trace.collectives import Calls, calls_of, clock_offsets, kind_of, matched
from redline.trace.columns import UNKNOWN, Ints, Mask, Work
from redline.trace.host import HostView
from redline.trace.idle import IdleTime, Latency, idle_time
from redline.trace.intervals import NEVER, Intervals, both, distinct, union
from redline.trace.links import matching
from redline.trace.timeline import DeviceTime, DeviceView, device_time, device_views
from redline.trace.window import Recorded

_NEVER = -(2**62)
_UPDATE = re.compile(r"^Optimizer\.step#")


@dataclass(frozen=True)
class Without:
    """This says what is taken out of one device's steps."""

    work: Ints | None = None
    """For each row of the trace's device work, by how much it is shorter; a row that loses all its time is gone."""
    host: Intervals = NEVER
    """Time of the host."""
    waits: Mask | None = None
    """The mask is true for calls of the host whose wait is skipped."""
    gaps: Mask | None = None
    """The mask is true for rows of the trace's device work that lose the short gap before them."""
    delays: bool = False
    """If true, work that left the device idle for no known reason starts in time."""
    is_awaited: bool = True
    """If false, other ranks do not wait in collectives until this one arrives."""


NOTHING = Without()


@dataclass(frozen=True)
class DeviceRun:
    """A run is one device over the recorded steps, with the host that drives it."""

    recorded: Recorded
    host: HostView
    view: DeviceView
    bounds: tuple[int, int]
    latency: Latency
    idle: IdleTime
    time: DeviceTime

    @cached_property
    def waits(self) -> Intervals:
        """When the host waited; nested waits and those of several threads at once are one. `first`: the call."""
        calls, rows = self.host.trace.calls, self.host.waits
        merged = union(calls.start[rows], np.maximum(calls.end[rows] - 1, calls.start[rows]))
        inside = merged.end >= self.bounds[0]
        first = rows[merged.first[inside]] if len(rows) else merged.first
        return Intervals(np.maximum(merged.start[inside], self.bounds[0]), merged.end[inside] + 1, first)

    @cached_property
    def calls(self) -> Calls:
        """Its collectives."""
        return calls_of(self.view)

    def cut(self, rows: Mask) -> Ints:
        """Returns what `Without.work` is where these rows of device work lose all their time."""
        return np.where(rows, self.recorded.trace.work.duration, 0)


def device_runs(recorded: Recorded, host: HostView) -> list[DeviceRun]:
    """Returns a run for each device that has work in the recorded steps."""
    found = []
    for view in device_views(recorded.links):
        bounds = recorded.bounds(view.device, view.busy)
        latency = Latency.of(recorded.links, view.rows, view.busy)
        idle = idle_time(host, view.rows, bounds, view.busy, latency)
        found.append(DeviceRun(recorded, host, view, bounds, latency, idle, device_time(view, bounds)))
    return found


def gradient_reductions(runs: Sequence[DeviceRun]) -> int | None:
    """How often gradients are reduced for each step of the optimizer: more than once where accumulation forgets to wait."""
    found = {_reductions(run) for run in runs}
    return found.pop() if len(found) == 1 else None


def _reductions(run: DeviceRun) -> int | None:
    """A backward pass reduces in one go; between two passes the main thread launches a forward."""
    host, links, calls = run.host, run.recorded.links, run.calls
    trace = host.trace
    updates = max(int(matching(trace, marks, _UPDATE).sum()) for marks in (trace.annotations, trace.operators))
    reduces = np.array([kind_of(one.name) in ("allreduce", "reducescatter") for one in calls.kinds], np.bool_)
    rows = calls.rows[reduces]
    rows = rows[links.is_launched[rows]]
    rows = rows[trace.calls.thread[links.call[rows]] != host.main_thread]
    if not updates or not len(rows):
        return None
    forward = np.sort(trace.calls.start[host.launching[trace.calls.thread[host.launching] == host.main_thread]])
    # The number is how many launches of the main thread came before: those of one backward pass share it.
    passes = np.unique(np.searchsorted(forward, links.launched_at[rows]), return_counts=True)[1]
    usual = np.bincount(passes).argmax()  # a pass that the window cuts has fewer
    return max(round(int((passes == usual).sum()) / updates), 1)


@dataclass
class _Columns:
    """Each piece of work of one device is an entry, in order of stream and start."""

    row: Ints
    """Among the work of the trace."""
    start: Ints
    length: Ints
    queue: Ints
    """The gap after the work before it on its stream is this long; `_NEVER` where it is the first."""
    asked: Ints
    """When its launch reached the device; `_NEVER` where the file does not tell."""
    launched: Ints
    """When the host had launched it."""
    delay: Ints
    """How late it was for reasons that the trace does not show."""
    idle_delay: Ints
    """The part of the delay in which the device had nothing else to do."""
    is_short: Mask
    """True if the gap before it is no longer than usual and it was launched in time."""
    waits_for: Ints
    """This is another entry that ended right before it started; UNKNOWN where there is none."""
    after: Ints
    """How long after that one it started."""


def _columns(run: DeviceRun) -> _Columns:
    links, work, rows = run.recorded.links, run.recorded.trace.work, run.view.rows
    order = rows[np.lexsort((work.start[rows], work.stream[rows]))]
    start, length, stream = work.start[order], work.duration[order], work.stream[order]
    same = np.concatenate(([False], stream[1:] == stream[:-1]))
    before = np.concatenate(([0], (start + length)[:-1]))
    known = links.is_launched[order]
    # A call that waits for its own copy had launched the copy when it began.
    blocks = known & np.isin(links.call[order], run.host.blocking)
    launched = np.where(blocks, links.launched_at[order], links.launched_by[order])
    launched = np.where(known, np.minimum(launched, start), _NEVER)
    ready = np.maximum(np.where(same, before, _NEVER), launched)
    ready = np.where(ready > _NEVER, np.maximum(ready, run.bounds[0]), _NEVER)  # the device was not there before
    usual = run.latency.ns
    computes = (work.kind[order] == Work.KERNEL) & ~links.is_class("communication")[order]
    waits_for = _other_streams(
        start, start + length, stream, computes, ready, start - ready > usual, known & (ready == launched)
    )
    ended = np.where(waits_for >= 0, (start + length)[waits_for], _NEVER)
    ready = np.maximum(ready, ended)
    late = start - ready
    # Work that is the first of its stream and whose launch is not in the file starts when it started.
    free = ready == _NEVER
    delay = np.where(free, 0, np.maximum(late - usual, 0))
    begun = start - delay
    # If something else held the work up, the gap before it may be none, and its launch may be as quick as any.
    is_queued, is_late = same & (ready == before), known & (ready == np.maximum(launched, run.bounds[0]))
    soonest = int(np.min((begun - launched)[is_late], initial=usual))
    queue = np.where(is_queued, begun - before, np.minimum(begun - before, 0))
    reaches = np.where(is_late, begun, np.minimum(begun, launched + soonest))
    after = np.where(ready == ended, begun - ended, np.minimum(begun - ended, 0))
    return _Columns(
        row=order,
        start=start,
        length=length,
        queue=np.where(same, queue, _NEVER),
        asked=np.where(known, reaches, np.where(free, start, _NEVER)),
        launched=np.where(known, launched, np.where(free, run.bounds[0], _NEVER)),
        delay=delay,
        idle_delay=delay - run.view.busy.within(start - delay, start),
        is_short=is_queued & known & (late > 0),
        waits_for=waits_for,
        after=np.where(waits_for >= 0, after, 0),
    )


def _other_streams(
    start: Ints, end: Ints, stream: Ints, computes: Mask, ready: Ints, is_delayed: Mask, is_late: Mask
) -> Ints:
    """Returns which work of another stream each piece of work is waiting for; UNKNOWN where there is none.

    That is the last to end before it started: where it is later than its own stream and its launch explain, where only its
    launch kept it from starting and nothing else was running, and where the two streams never computed side by side.
    """
    found = np.full(len(start), UNKNOWN, np.int64)
    streams = distinct(stream).tolist()
    if len(streams) < 2:
        return found
    busy = {one: union(start[mine], end[mine]) for one in streams if (mine := (stream == one) & computes).any()}
    apart = {(one, other) for one in busy for other in busy if one != other and not len(both(busy[one], busy[other]))}
    by_end = np.argsort(end, kind="stable")
    sorted_end, sorted_stream = end[by_end], stream[by_end]
    last = np.searchsorted(sorted_end, start, side="right") - 1
    own = np.array([any(pair[0] == one for pair in apart) for one in streams])[np.searchsorted(streams, stream)]
    alone = is_late & (np.searchsorted(np.sort(start), start, side="left") <= last + 1)
    since = np.where(alone, _NEVER, np.where(is_delayed, ready, np.iinfo(np.int64).max))
    for entry in np.flatnonzero((last >= 0) & (alone | is_delayed | own) & (ready > _NEVER)).tolist():
        at, own_end = int(last[entry]), _NEVER
        # The work before it on its own stream is over only after everything that comes earlier.
        while at >= 0 and sorted_end[at] >= own_end:
            if sorted_stream[at] == stream[entry]:
                own_end = int(sorted_end[at])
            elif sorted_end[at] > since[entry] or (int(stream[entry]), int(sorted_stream[at])) in apart:
                found[entry] = by_end[at]
                break
            at -= 1
    return found


@dataclass(frozen=True)
class _Wait:
    """The host waits here until an entry of the device's work has ended."""

    index: int
    start: int
    end: int
    entry: int
    """The last work to end before the wait did, even if that was done before; UNKNOWN where there is none."""
    done: int
    """When what it waited for was done; no later than the wait's end."""
    goes_on: int = 0
    """The work is still busy for so long after the wait."""


def _waits(run: DeviceRun, columns: _Columns) -> Iterator[_Wait]:
    links, merged = run.recorded.links, run.waits
    ends = columns.start + columns.length
    by_end = np.argsort(ends, kind="stable")
    sorted_ends = ends[by_end]
    asked_at = np.where(links.is_launched[columns.row], links.launched_at[columns.row], run.bounds[0])
    last = np.searchsorted(sorted_ends, merged.end, side="right") - 1
    own = _own_copies(run, columns)
    for index, (start, end, at) in enumerate(
        zip(merged.start.tolist(), merged.end.tolist(), last.tolist(), strict=True)
    ):
        entry, done = own.get(index, UNKNOWN), end
        # A copy may go on for a little after the call that waits for it; else the last work to end was waited for.
        if entry < 0 or ends[entry] <= end:
            while at >= 0 and asked_at[by_end[at]] >= end:
                at -= 1
            entry = int(by_end[at]) if at >= 0 else UNKNOWN
            done = int(ends[entry]) if entry >= 0 else start
        yield _Wait(index, start, end, entry, done, int(ends[entry]) - done if entry >= 0 else 0)


def _own_copies(run: DeviceRun, columns: _Columns) -> dict[int, int]:
    """For waits that are copies, the copy that the call itself launched."""
    links, calls = run.recorded.links, run.host.trace.calls
    entries = np.flatnonzero(links.is_launched[columns.row])
    call = links.call[columns.row[entries]]
    mine = np.isin(call, run.host.waits)
    entries, call = entries[mine], call[mine]
    wait = np.searchsorted(run.waits.start, calls.start[call], side="right") - 1
    return dict(zip(wait.tolist(), entries.tolist(), strict=True))


@dataclass
class _Node:
    """A stretch of one stream that nothing but its own launches and its beginning can delay."""

    device: int
    low: int
    high: int
    before: int
    """The node before on the same stream; UNKNOWN where it is the first."""
    waits: int
    """How many of the host's waits had ended when its work was launched."""
    other: int
    """This is the node of another stream whose end it waits for; UNKNOWN where there is none."""
    after: int
    """How long after that one it starts."""
    meets: list[int] = field(default_factory=list)
    """The nodes that are the same collective on every rank."""
    transfer: int = 0
    """How long the collective goes on once all ranks have arrived."""


class _Kind(IntEnum):
    """The kinds of things that are played, at one moment in this order."""

    MET = 0
    WAIT = 1
    NODE = 2


class Replay:
    """A replay has the devices of one or several ranks, with the collectives in which ranks wait for each other."""

    def __init__(self, runs: Sequence[DeviceRun]) -> None:
        self._runs = runs
        self._columns = [_columns(run) for run in runs]
        self._waits = [list(_waits(run, columns)) for run, columns in zip(runs, self._columns, strict=True)]
        calls = [run.calls for run in runs]
        groups = matched(calls) if len(runs) > 1 else []
        self._offsets = clock_offsets(calls, groups) if groups else [0] * len(runs)
        meetings = [
            [
                (device, int(np.flatnonzero(self._columns[device].row == calls[device].rows[index])[0]))
                for device, index in group.items()
            ]
            for group in groups
        ]
        self._meets = [[entry for one in meetings for at, entry in one if at == device] for device in range(len(runs))]
        self._nodes: list[_Node] = []
        self._low: list[Ints] = []
        self._node_of: list[Ints] = []
        self._order: list[tuple[int, _Kind, int, int]] = []
        for device in range(len(runs)):
            self._cut_into_nodes(device)
        for meeting in meetings:
            self._meet([int(self._node_of[device][entry]) for device, entry in meeting])
        self._order.sort()

    def _cut_into_nodes(self, device: int) -> None:
        columns, waits, offset = self._columns[device], self._waits[device], self._offsets[device]
        count, meets, has_other = len(columns.row), self._meets[device], columns.waits_for >= 0
        # Work that is launched after a wait is as early as the host is then.
        waited = np.searchsorted(np.array([wait.end for wait in waits], np.int64), columns.launched, side="right")
        heads = (columns.queue == _NEVER) | has_other
        heads[1:] |= waited[1:] != waited[:-1]
        heads[meets] = True
        tails = [*columns.waits_for[has_other].tolist(), *(wait.entry for wait in waits), *meets]
        heads[[entry + 1 for entry in tails if 0 <= entry < count - 1]] = True
        low, first = np.flatnonzero(heads), len(self._nodes)
        node_of = first + np.cumsum(heads) - 1
        for number, (begin, end) in enumerate(zip(low.tolist(), [*low[1:].tolist(), count], strict=True), start=first):
            before = UNKNOWN if columns.queue[begin] == _NEVER else number - 1
            other = int(node_of[columns.waits_for[begin]]) if has_other[begin] else UNKNOWN
            self._nodes.append(_Node(device, begin, end, before, int(waited[begin]), other, int(columns.after[begin])))
            self._order.append((int(columns.start[begin]) - offset, _Kind.NODE, device, number))
        self._order += [(wait.end - offset, _Kind.WAIT, device, wait.index) for wait in waits]
        self._low.append(low)
        self._node_of.append(node_of)

    def _meet(self, numbers: list[int]) -> None:
        """Join the nodes that are one collective."""
        starts, ends = [], []
        for node in (self._nodes[number] for number in numbers):
            columns, offset = self._columns[node.device], self._offsets[node.device]
            starts.append(int(columns.start[node.low]) - offset)
            ends.append(starts[-1] + int(columns.length[node.low]))
        for number, end in zip(numbers, ends, strict=True):
            node = self._nodes[number]
            node.meets, node.transfer = numbers, end - max(starts)
            self._order.append((max(end, *starts), _Kind.MET, node.device, number))

    def saved(self, without: Sequence[Without]) -> int:
        """Returns how much earlier the steps are over, in nanoseconds summed over the devices. Each run has one `Without`."""
        return sum(max(was - now, 0) for was, now in zip(self.ends, self.played(without), strict=True))

    @cached_property
    def ends(self) -> list[int]:
        """This is when the steps of each device end with nothing taken out."""
        return self.played([NOTHING] * len(self._runs))

    def played(self, without: Sequence[Without]) -> list[int]:
        """When the steps of each device end."""
        scenes = [
            _Scene(*given) for given in zip(self._runs, self._columns, self._low, without, self._meets, strict=True)
        ]
        sums = [stretch for scene in scenes for stretch in scene.stretches]
        ends = [_NEVER] * len(self._nodes)
        arrived: dict[int, int] = {}
        shifts = [[0] for _ in scenes]
        for _, kind, device, number in self._order:
            scene = scenes[device]
            if kind == _Kind.WAIT:
                wait = self._waits[device][number]
                done = ends[int(self._node_of[device][wait.entry])] if wait.entry >= 0 else _NEVER
                shifts[device].append(scene.shift_after(wait, shifts[device][-1], done))
                continue
            node = self._nodes[number]
            if kind == _Kind.MET:
                latest = [
                    arrived[one] - self._offsets[self._nodes[one].device]
                    for one in node.meets
                    if one in arrived and scenes[self._nodes[one].device].without.is_awaited
                ]
                cut = min(int(scene.cut[node.low]), max(node.transfer, 0))
                met = max(latest, default=_NEVER) + node.transfer - cut + self._offsets[device]
                ends[number] = max(met, arrived[number])
                continue
            whole, end, queue = sums[number]
            end -= shifts[device][min(node.waits, len(shifts[device]) - 1)]
            end = max(end, (ends[node.before] if node.before >= 0 else self._runs[device].bounds[0]) + whole)
            if node.other >= 0:
                # Work that is gone needs no pause around it.
                gone = scene.gone[node.low] or scene.gone[self._nodes[node.other].high - 1]
                end = max(end, ends[node.other] + (0 if gone else node.after) + whole - queue)
            ends[number] = arrived[number] = end
        return [
            scene.over(max(ends[int(own[0]) : int(own[-1]) + 1]), shift[-1])
            for scene, own, shift in zip(scenes, self._node_of, shifts, strict=True)
        ]


class _Scene:
    """One device with something taken out."""

    def __init__(self, run: DeviceRun, columns: _Columns, low: Ints, without: Without, meets: list[int]) -> None:
        self._run, self.without = run, without
        none = np.zeros(len(columns.row), np.int64)
        self.cut = np.minimum(without.work[columns.row], columns.length) if without.work is not None else none
        length = columns.length - self.cut
        self.gone = (self.cut > 0) & (length == 0)
        length[meets] = 0  # a collective goes on once all have arrived
        queue = np.where(self.gone | (columns.queue == _NEVER), 0, columns.queue)
        if without.delays:  # what makes work late makes it late by the whole gap
            queue = np.where(columns.idle_delay > 0, 0, queue)
        if without.gaps is not None:
            queue = np.where(without.gaps[columns.row] & columns.is_short, 0, queue)
        lasts = length + np.where(self.gone, 0, columns.delay - without.delays * columns.idle_delay)
        asked = columns.asked - without.host.before(np.maximum(columns.launched, run.bounds[0]))
        asked = np.where((columns.asked == _NEVER) | self.gone, _NEVER, asked)
        along = np.cumsum(queue + lasts)
        high = np.concatenate((low[1:], [len(along)])) - 1
        whole = along[high] - (along - queue - lasts)[low]
        latest = np.maximum.reduceat(asked + lasts - along, low) + along[high]
        self.stretches = list(zip(whole.tolist(), latest.tolist(), queue[low].tolist(), strict=True))
        waits = run.waits
        inside = without.host.holds(waits.start) & without.host.holds(waits.end - 1)
        skipped = np.isin(waits.first, np.flatnonzero(without.waits)) if without.waits is not None else inside
        self._skipped = (skipped | inside).tolist()
        self._taken_in_all = int(without.host.before(np.array([run.bounds[1]]))[0])
        self._taken: list[list[int]] = [without.host.before(moments).tolist() for moments in (waits.start, waits.end)]

    def shift_after(self, wait: _Wait, shift: int, ended: int) -> int:
        """How much earlier the host is after a wait, beside what was taken out of its own time."""
        before, after = self._taken[0][wait.index], self._taken[1][wait.index]
        leaves = wait.start - shift - before
        if not self._skipped[wait.index]:
            if wait.entry >= 0 and ended > _NEVER:
                leaves = max(leaves, ended - wait.goes_on)
            leaves += wait.end - max(wait.start, wait.done)
        return wait.end - leaves - after

    def over(self, device: int, shift: int) -> int:
        end = self._run.bounds[1]
        if end <= int(self._run.view.busy.end[-1]):
            return device
        return max(device, end - shift - self._taken_in_all)
