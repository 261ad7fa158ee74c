"""This module plays the recorded steps again without some of their time, to tell how much earlier they would have ended.

Work on a stream starts when the work before it on that stream has ended, when its launch has reached the device, and
when the work of other streams or ranks that it waits for has ended, whichever comes last. The host launches in its own
time, except that a call which waits for the device ends only when the device is done with what it waits for. Whatever
none of these explains is kept as a delay of its own. Played with nothing taken out, every event lands where it was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property

import numpy as np

from redline.trace.collectives import Calls, calls_of, clock_offsets, matched
from redline.trace.columns import UNKNOWN, Ints, Mask, Work
from redline.trace.host import HostView
from redline.trace.idle import IdleTime, idle_time, latency_ns
from redline.trace.intervals import NEVER, Intervals, both, distinct, union
from redline.trace.timeline import DeviceTime, DeviceView, device_time, device_views
from redline.trace.window import Recorded

_NEVER = -(2**62)
"""This stands for a moment before everything. It is half of what 64 bits hold, so that adding to it does not overflow."""


@dataclass(frozen=True)
class Without:
    """This says what is taken out of one device's steps."""

    work: Ints | None = None
    """For each row of the trace's device work it says by how much the row is shorter. A row that loses all its time is removed."""
    host: Intervals = NEVER
    """This time of the host is taken out."""
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
    latency_ns: int
    idle: IdleTime
    time: DeviceTime

    @cached_property
    def waits(self) -> Intervals:
        """Returns when the host waited. Nested waits and those of several threads at once are one. `first` is the call."""
        calls, rows = self.host.trace.calls, self.host.waits
        merged = union(calls.start[rows], np.maximum(calls.end[rows] - 1, calls.start[rows]))
        inside = merged.end >= self.bounds[0]
        start, end = np.maximum(merged.start[inside], self.bounds[0]), merged.end[inside] + 1
        return Intervals(start, end, rows[merged.first[inside]])

    @cached_property
    def calls(self) -> Calls:
        """Returns its collectives."""
        return calls_of(self.view)

    def cut(self, rows: Mask) -> Ints:
        """Returns what `Without.work` is if these rows of device work lose all their time."""
        return np.where(rows, self.recorded.trace.work.duration, 0)


def device_runs(recorded: Recorded, host: HostView) -> list[DeviceRun]:
    """Returns a run for each device that has work in the recorded steps."""
    found = []
    for view in device_views(recorded.links):
        bounds, latency = recorded.bounds(view.device, view.busy), latency_ns(recorded.links, view.rows, view.busy)
        idle = idle_time(host, view.rows, bounds, view.busy, latency)
        found.append(DeviceRun(recorded, host, view, bounds, latency, idle, device_time(view, bounds)))
    return found


@dataclass(frozen=True)
class _Wait:
    """The host waits here until an entry of the device's work has ended."""

    index: int
    start: int
    end: int
    entry: int
    """This is the last work to end before the wait did, even if that was done before. It is UNKNOWN if there is none."""
    done: int
    """What it waited for was done at this time, which is no later than the wait's end."""
    goes_on: int
    """The work is still busy for this long after the wait."""


@dataclass
class _Node:
    """This is a stretch of one stream that nothing but its own launches and its beginning can delay."""

    device: int
    low: int
    high: int
    before: int
    """This is the node before on the same stream. It is UNKNOWN for the first one."""
    waits: int
    """This many of the host's waits had ended when its work was launched."""
    other: int
    """This is the node of another stream whose end it waits for. It is UNKNOWN if there is none."""
    after: int
    """It starts this long after that one."""
    meets: list[int] = field(default_factory=list)
    """These are the nodes that are the same collective on every rank."""
    transfer: int = 0
    """The collective goes on for this long once all ranks have arrived."""


class _Kind(IntEnum):
    """These are the kinds of things that are played. At one moment they are played in this order."""

    MET = 0
    WAIT = 1
    NODE = 2


class _Device:
    """This is the work of one device as entries in order of stream and start, each with what it had to wait for."""

    def __init__(self, run: DeviceRun) -> None:
        self.run = run
        links, work, rows = run.recorded.links, run.recorded.trace.work, run.view.rows
        self.row = order = rows[np.lexsort((work.start[rows], work.stream[rows]))]
        self.start, self.length, stream = work.start[order], work.duration[order], work.stream[order]
        self.end = self.start + self.length
        same = np.concatenate(([False], stream[1:] == stream[:-1]))
        before = np.concatenate(([0], self.end[:-1]))
        known = links.is_launched[order]
        # A call that waits for its own copy had launched the copy when it began.
        blocks = known & np.isin(links.call[order], run.host.blocking)
        launched = np.where(blocks, links.launched_at[order], links.launched_by[order])
        launched = np.where(known, np.minimum(launched, self.start), _NEVER)
        ready = np.maximum(np.where(same, before, _NEVER), launched)
        # Nothing is ready earlier than the device was free for these steps.
        ready = np.where(ready > _NEVER, np.maximum(ready, run.bounds[0]), _NEVER)
        computes = (work.kind[order] == Work.KERNEL) & ~links.is_class("communication")[order]
        self.waits_for = self._others(stream, computes, ready, known & (ready == launched))
        """For each entry, it is another entry that ended right before it started. It is UNKNOWN if there is none."""
        ended = np.where(self.waits_for >= 0, self.end[self.waits_for], _NEVER)
        ready = np.maximum(ready, ended)
        # Work that is the first of its stream and whose launch is not in the file starts when it started in the trace.
        free = ready == _NEVER
        self.delay = np.where(free, 0, np.maximum(self.start - ready - run.latency_ns, 0))
        """Each entry was late by this much for reasons that the trace does not show."""
        begun = self.start - self.delay
        self.idle_delay = self.delay - run.view.busy.within(begun, self.start)
        """This is the part of the delay in which the device had nothing else to do."""
        # If something else held the work up, the gap before it may be none, and its launch may be as quick as any.
        is_queued, is_late = same & (ready == before), known & (ready == np.maximum(launched, run.bounds[0]))
        soonest = int(np.min((begun - launched)[is_late], initial=run.latency_ns))
        reaches = np.where(is_late, begun, np.minimum(begun, launched + soonest))
        self.queue = np.where(same, np.where(is_queued, begun - before, np.minimum(begun - before, 0)), _NEVER)
        """This is the gap after the work before it on its stream. It is `_NEVER` for the first one."""
        self.asked = np.where(known, reaches, np.where(free, self.start, _NEVER))
        """Its launch reached the device at this time. It is `_NEVER` if the file does not tell."""
        self.launched = np.where(known, launched, np.where(free, run.bounds[0], _NEVER))
        self.is_short = is_queued & known & (self.start > ready)
        """It is true if the gap before it is no longer than usual and it was launched in time."""
        after = np.where(ready == ended, begun - ended, np.minimum(begun - ended, 0))
        self.after = np.where(self.waits_for >= 0, after, 0)
        """It started this long after the work that it waits for."""
        self.waits = list(self._host_waits())

    def _others(self, stream: Ints, computes: Mask, ready: Ints, is_late: Mask) -> Ints:
        """Returns which work of another stream each piece of work is waiting for. It is UNKNOWN if there is none.

        That is the last to end before it started. It counts in three cases: it ended later than the work's own stream and its
        launch explain, only its launch kept the work from starting and nothing else was running, or the two streams never
        computed side by side.
        """
        start, end, found = self.start, self.end, np.full(len(stream), UNKNOWN, np.int64)
        streams = distinct(stream).tolist()
        if len(streams) < 2:
            return found
        busy = {one: union(start[mine], end[mine]) for one in streams if (mine := (stream == one) & computes).any()}
        apart = {
            (one, other) for one in busy for other in busy if one != other and not len(both(busy[one], busy[other]))
        }
        by_end = np.argsort(end, kind="stable")
        sorted_end, sorted_stream = end[by_end], stream[by_end]
        last = np.searchsorted(sorted_end, start, side="right") - 1
        own = np.isin(stream, [one for one, _ in apart])
        is_delayed = start - ready > self.run.latency_ns
        alone = is_late & (np.searchsorted(np.sort(start), start, side="left") <= last + 1)
        since = np.where(alone, _NEVER, np.where(is_delayed, ready, np.iinfo(np.int64).max))
        for entry in np.flatnonzero((last >= 0) & (alone | is_delayed | own) & (ready > _NEVER)).tolist():
            at, own_end, mine = int(last[entry]), _NEVER, int(stream[entry])
            # The work before it on its own stream is over only after everything that comes earlier.
            while at >= 0 and sorted_end[at] >= own_end:
                if sorted_stream[at] == mine:
                    own_end = int(sorted_end[at])
                elif sorted_end[at] > since[entry] or (mine, int(sorted_stream[at])) in apart:
                    found[entry] = by_end[at]
                    break
                at -= 1
        return found

    def _host_waits(self) -> Iterator[_Wait]:
        links, merged, calls = self.run.recorded.links, self.run.waits, self.run.host.trace.calls
        known = links.is_launched[self.row]
        # A wait that is a copy waits for the copy that the call itself launched.
        call = links.call[self.row]
        entries = np.flatnonzero(known & np.isin(call, self.run.host.waits))
        inside = np.searchsorted(merged.start, calls.start[call[entries]], side="right") - 1
        own = dict(zip(inside.tolist(), entries.tolist(), strict=True))
        by_end = np.argsort(self.end, kind="stable")
        asked_at = np.where(known, links.launched_at[self.row], self.run.bounds[0])[by_end]
        last = np.searchsorted(self.end[by_end], merged.end, side="right") - 1
        columns = (merged.start.tolist(), merged.end.tolist(), last.tolist())
        for index, (start, end, at) in enumerate(zip(*columns, strict=True)):
            entry, done = own.get(index, UNKNOWN), end
            # A copy may go on for a little after the call that waits for it. Otherwise the last work to end was waited for.
            if entry < 0 or self.end[entry] <= end:
                while at >= 0 and asked_at[at] >= end:
                    at -= 1
                entry = int(by_end[at]) if at >= 0 else UNKNOWN
                done = int(self.end[entry]) if entry >= 0 else start
            yield _Wait(index, start, end, entry, done, int(self.end[entry]) - done if entry >= 0 else 0)

    def cut_into_nodes(self, device: int, first: int, meets: Collection[int]) -> list[_Node]:
        count, has_other = len(self.row), self.waits_for >= 0
        # Work that is launched after a wait is as early as the host is then.
        waited = np.searchsorted(np.array([wait.end for wait in self.waits]), self.launched, side="right")
        heads = (self.queue == _NEVER) | has_other
        heads[1:] |= waited[1:] != waited[:-1]
        self.meets = list(meets)
        tails = [*self.waits_for[has_other].tolist(), *(wait.entry for wait in self.waits), *meets]
        heads[[*meets, *(entry + 1 for entry in tails if 0 <= entry < count - 1)]] = True
        self.low = np.flatnonzero(heads)
        self.node_of = first + np.cumsum(heads) - 1
        return [
            _Node(
                device,
                begin,
                end,
                before=UNKNOWN if self.queue[begin] == _NEVER else number - 1,
                waits=int(waited[begin]),
                other=int(self.node_of[self.waits_for[begin]]) if has_other[begin] else UNKNOWN,
                after=int(self.after[begin]),
            )
            for number, (begin, end) in enumerate(
                zip(self.low.tolist(), [*self.low[1:].tolist(), count], strict=True), first
            )
        ]


class Replay:
    """A replay has the devices of one or several ranks, with the collectives in which ranks wait for each other."""

    def __init__(self, runs: Sequence[DeviceRun]) -> None:
        self._devices = [_Device(run) for run in runs]
        calls = [run.calls for run in runs]
        groups = matched(calls) if len(runs) > 1 else []
        self._offsets = clock_offsets(calls, groups) if groups else [0] * len(runs)
        entry_of = [np.argsort(device.row) for device in self._devices]
        meetings = [
            [
                (at, int(entry_of[at][np.searchsorted(np.sort(self._devices[at].row), calls[at].rows[index])]))
                for at, index in group.items()
            ]
            for group in groups
        ]
        self._nodes: list[_Node] = []
        self._order: list[tuple[int, _Kind, int, int]] = []
        for at, device in enumerate(self._devices):
            meets = [entry for one in meetings for where, entry in one if where == at]
            nodes = device.cut_into_nodes(at, len(self._nodes), meets)
            starts = (device.start[device.low] - self._offsets[at]).tolist()
            self._order += [(start, _Kind.NODE, at, number) for number, start in enumerate(starts, len(self._nodes))]
            self._order += [(wait.end - self._offsets[at], _Kind.WAIT, at, wait.index) for wait in device.waits]
            self._nodes += nodes
        for meeting in meetings:
            self._meet([int(self._devices[at].node_of[entry]) for at, entry in meeting])
        self._order.sort()

    def _meet(self, numbers: list[int]) -> None:
        """Joins the nodes that are one collective."""
        nodes = [self._nodes[number] for number in numbers]
        starts = [int(self._devices[node.device].start[node.low]) - self._offsets[node.device] for node in nodes]
        for number, node, start in zip(numbers, nodes, starts, strict=True):
            end = start + int(self._devices[node.device].length[node.low])
            node.meets, node.transfer = numbers, end - max(starts)
            self._order.append((max(end, *starts), _Kind.MET, node.device, number))

    def saved(self, without: Sequence[Without]) -> int:
        """Returns how much earlier the steps are over, in nanoseconds summed over the devices. Each run has one `Without`."""
        return sum(max(was - now, 0) for was, now in zip(self.ends, self.played(without), strict=True))

    @cached_property
    def ends(self) -> list[int]:
        """This is when the steps of each device end with nothing taken out."""
        return self.played([NOTHING] * len(self._devices))

    def played(self, without: Sequence[Without]) -> list[int]:
        """Returns when the steps of each device end."""
        scenes = [_Scene(*given) for given in zip(self._devices, without, strict=True)]
        sums = [stretch for scene in scenes for stretch in scene.stretches]
        ends = [_NEVER] * len(self._nodes)
        arrived: dict[int, int] = {}
        shifts = [[0] for _ in scenes]
        for _, kind, at, number in self._order:
            scene, device = scenes[at], self._devices[at]
            if kind == _Kind.WAIT:
                wait = device.waits[number]
                done = ends[int(device.node_of[wait.entry])] if wait.entry >= 0 else _NEVER
                shifts[at].append(scene.shift_after(wait, shifts[at][-1], done))
                continue
            node = self._nodes[number]
            if kind == _Kind.MET:
                latest = [
                    arrived[one] - self._offsets[self._nodes[one].device]
                    for one in node.meets
                    if one in arrived and without[self._nodes[one].device].is_awaited
                ]
                cut = min(int(scene.cut[node.low]), max(node.transfer, 0))
                met = max(latest, default=_NEVER) + node.transfer - cut + self._offsets[at]
                ends[number] = max(met, arrived[number])
                continue
            whole, end, queue = sums[number]
            end -= shifts[at][min(node.waits, len(shifts[at]) - 1)]
            end = max(end, (ends[node.before] if node.before >= 0 else device.run.bounds[0]) + whole)
            if node.other >= 0:
                # Work that was removed needs no pause around it.
                gone = scene.gone[node.low] or scene.gone[self._nodes[node.other].high - 1]
                end = max(end, ends[node.other] + (0 if gone else node.after) + whole - queue)
            ends[number] = arrived[number] = end
        return [
            scene.over(max(ends[int(device.node_of[0]) : int(device.node_of[-1]) + 1]), shift[-1])
            for scene, device, shift in zip(scenes, self._devices, shifts, strict=True)
        ]


class _Scene:
    """This is one device with something taken out."""

    def __init__(self, device: _Device, without: Without) -> None:
        self._run, low, high = device.run, device.low, np.append(device.low[1:], len(device.row)) - 1
        none = np.zeros(len(device.row), np.int64)
        self.cut = none if without.work is None else np.minimum(without.work[device.row], device.length)
        length = device.length - self.cut
        self.gone = (self.cut > 0) & (length == 0)
        # A collective goes on once all have arrived.
        length[device.meets] = 0
        # A cause that makes work late makes it late by the whole gap.
        closed = (device.idle_delay > 0) & without.delays
        if without.gaps is not None:
            closed |= without.gaps[device.row] & device.is_short
        queue = np.where(self.gone | closed | (device.queue == _NEVER), 0, device.queue)
        lasts = length + np.where(self.gone, 0, device.delay - without.delays * device.idle_delay)
        taken = without.host.before(np.maximum(device.launched, self._run.bounds[0]))
        asked = np.where((device.asked == _NEVER) | self.gone, _NEVER, device.asked - taken)
        along = np.cumsum(queue + lasts)
        whole = along[high] - (along - queue - lasts)[low]
        latest = np.maximum.reduceat(asked + lasts - along, low) + along[high]
        self.stretches = list(zip(whole.tolist(), latest.tolist(), queue[low].tolist(), strict=True))
        waits = self._run.waits
        skipped = without.host.holds(waits.start) & without.host.holds(waits.end - 1)
        if without.waits is not None:
            skipped |= without.waits[waits.first]
        self._skipped = skipped.tolist()
        self._taken: list[list[int]] = [without.host.before(moments).tolist() for moments in (waits.start, waits.end)]
        self._taken_in_all = int(without.host.before(np.array([self._run.bounds[1]]))[0])

    def shift_after(self, wait: _Wait, shift: int, ended: int) -> int:
        """Returns how much earlier the host is after a wait, not counting what was taken out of its own time."""
        before, after = self._taken[0][wait.index], self._taken[1][wait.index]
        leaves: int = wait.start - shift - before
        if not self._skipped[wait.index]:
            if wait.entry >= 0 and ended > _NEVER:
                leaves = max(leaves, ended - wait.goes_on)
            leaves += wait.end - max(wait.start, wait.done)
        return wait.end - leaves - after

    def over(self, device: int, shift: int) -> int:
        end = self._run.bounds[1]
        return device if end <= int(self._run.view.busy.end[-1]) else max(device, end - shift - self._taken_in_all)
