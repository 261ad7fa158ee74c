"""What if the host had not waited, or had been faster, or some work were gone: the same steps played again.

The device's work is a row of busy blocks. A block starts when the one before has ended and its launch has reached the
device; the host launches in its own time, except that a call which waits for the device ends only when the device has
done what was launched before. Played again with some host time, waits or work taken out, this says how long the steps
would have taken: a wait that the host has time for anyway costs nothing, and one that lets the queue run dry costs more
than its own length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from redline.trace.columns import HostRanges, Ints, Mask
from redline.trace.host import HostView, picked
from redline.trace.idle import LAUNCH_GAP_NS, IdleTime, idle_time
from redline.trace.intervals import NEVER, Intervals, both, union, without
from redline.trace.timeline import DeviceTime, DeviceView, device_time, device_views
from redline.trace.window import Recorded

STALL_NS = 300_000
STALL_RATIO = 10
"""A pause between launches at least this long, and this many times the usual one: the host did something else."""
_LONG_AGO = -(2**62)


@dataclass(frozen=True)
class Replay:
    """One device and the host that drives it."""

    start: Ints
    end: Ints
    launched: Ints
    """When the host had launched each busy block; long ago where that is not known."""
    late: Mask
    """Whether the block had to wait for its launch."""
    bounds: tuple[int, int]
    wait_start: Ints
    wait_end: Ints
    waited_for: Ints
    """When the device had done what each wait was for; its own start where it waited for nothing."""
    waits: Ints
    """The calls that waited, among those of the trace."""

    @classmethod
    def of(cls, host: HostView, device: DeviceView, bounds: tuple[int, int]) -> Replay:
        links, calls, work = host.links, host.trace.calls, host.trace.work
        first = device.rows[device.busy.first]
        known = links.is_launched[first]
        launched = np.where(known, links.launched_by[first], _LONG_AGO)
        before = np.concatenate(([bounds[0]], device.busy.end[:-1]))
        # A copy that blocks the host was launched when its call began, if all it then waited for was the device.
        began = np.where(known, links.launched_at[first], _LONG_AGO)
        queued = known & np.isin(links.call[first], host.blocking)
        queued &= (began <= before) & (device.busy.start - before <= LAUNCH_GAP_NS)
        launched = np.where(queued, began, launched)
        waits = host.waits
        # Nested waits, and those of several threads at once, are one; two that follow each other are two.
        inner = union(calls.start[waits], np.maximum(calls.end[waits] - 1, calls.start[waits]))
        merged = Intervals(inner.start, inner.end + 1, inner.first)
        mine = device.rows[links.is_launched[device.rows]]
        # A copy that blocks the host may go on for a little after its call.
        its_call = links.call[mine]
        done = np.where(
            np.isin(its_call, host.blocking), np.minimum(work.end[mine], calls.end[its_call]), work.end[mine]
        )
        return cls(
            start=device.busy.start,
            end=device.busy.end,
            launched=launched,
            late=known & (launched > before),
            bounds=bounds,
            wait_start=merged.start,
            wait_end=merged.end,
            waited_for=_done(links.launched_at[mine], done, merged),
            waits=waits[merged.first],
        )

    def saved(
        self,
        *,
        without_host: Intervals = NEVER,
        without_waits: Mask | None = None,
        without_work: Ints | None = None,
        without_gaps: bool = False,
        closing_up: bool = False,
    ) -> int:
        """Nanoseconds by which the steps end earlier when so much is taken out.

        `without_host`: time on the host. `without_waits`: which waits the host skips. `without_work`: how much shorter
        each block is. `without_gaps`: whether kernels launched in time follow each other at once. `closing_up`: whether the
        short gap after work that is gone goes with it.
        """
        taken = without_host.before
        length = self.end - self.start
        if without_work is not None:
            length = length - np.minimum(without_work, length)
        before = np.concatenate(([self.bounds[0]], self.end[:-1]))
        gap = np.where(self.late | (length == 0), 0, self.start - before)  # work that is gone needs no gap before it
        if closing_up:
            after = np.concatenate(([False], length[:-1] == 0))
            gap = np.where(after & (gap <= LAUNCH_GAP_NS), 0, gap)
        if without_gaps:
            gap = np.where(gap <= LAUNCH_GAP_NS, 0, gap)
        # What lay between a late launch and its work stays; of work launched in time, that was the queue.
        asked = np.where(self.late, self.start, self.launched) - taken(np.maximum(self.launched, self.bounds[0]))
        # Work that is gone is not waited for.
        asked = np.where((self.launched > _LONG_AGO) & (length > 0), asked, _LONG_AGO)
        # Were each block asked for in time, it would end so long after the beginning; a late one moves all behind it.
        along = np.cumsum(gap + length)
        pushed = asked + length - along
        ends = np.empty(len(along), np.int64)
        pause = _Pauses.of(self, without_waits, taken)
        shift, previous, done = 0, self.bounds[0], 0
        for until, wait in pause.steps(len(along)):
            if until > done:
                so_far = int(along[done - 1]) if done else 0
                part = np.maximum(np.maximum.accumulate(pushed[done:until]) - shift, previous - so_far)
                ends[done:until] = part + along[done:until]
                previous, done = int(ends[until - 1]), until
            if wait >= 0:
                shift = pause.shift_after(wait, shift, ends, done, self.end)
        over = previous
        if self.bounds[1] > self.end[-1]:  # the host had the last word
            over = max(over, self.bounds[1] - shift - int(taken(np.array([self.bounds[1]]))[0]))
        return max(int(self.bounds[1] - over), 0)

    def shorter(self, device: DeviceView, rows: Mask) -> Ints:
        """How much shorter each block is without this work of the trace; what runs beside it stays."""
        work = device.links.trace.work
        kept = device.rows[~rows[device.rows]]
        left = union(work.start[kept], work.end[kept])
        return (self.end - self.start) - left.within(self.start, self.end)

    def shorter_by(self, device: DeviceView, amount: Ints) -> Ints:
        """How much shorter each block is when each row of the trace's work is so much shorter."""
        found = np.zeros(len(self.start), np.int64)
        block = np.searchsorted(self.start, device.links.trace.work.start[device.rows], side="right") - 1
        np.add.at(found, block, amount[device.rows])
        return found


@dataclass(frozen=True)
class _Pauses:
    """The waits that matter, one after the other: each sets anew how much earlier the host is than it was."""

    start: list[int]
    end: list[int]
    device: list[int]
    """When the device had done what the host waited for."""
    block: list[int]
    """The block that was."""
    skipped: list[bool]
    taken_before: list[int]
    taken_after: list[int]
    """Host time taken out before the wait, and before its end."""
    first: list[int]
    """The first block that was launched after the wait."""

    @classmethod
    def of(cls, replay: Replay, skipped: Mask | None, taken: Callable[[Ints], Ints]) -> _Pauses:
        # A call that found the device done costs the host its own time and nothing else.
        real = np.flatnonzero(replay.waited_for > replay.wait_start)
        start, end, device = (column[real] for column in (replay.wait_start, replay.wait_end, replay.waited_for))
        launched = np.maximum.accumulate(replay.launched)
        return cls(
            start=start.tolist(),
            end=end.tolist(),
            device=device.tolist(),
            block=(np.searchsorted(replay.start, device, side="left") - 1).tolist(),
            skipped=(skipped[real] if skipped is not None else np.zeros(len(real), np.bool_)).tolist(),
            taken_before=taken(start).tolist(),
            taken_after=taken(end).tolist(),
            first=np.searchsorted(launched, end, side="left").tolist(),
        )

    def steps(self, blocks: int) -> Iterator[tuple[int, int]]:
        """Up to which block to play, and the wait that comes then; -1 after the last."""
        yield from zip(self.first, range(len(self.first)), strict=True)
        yield blocks, -1

    def shift_after(self, wait: int, shift: int, ends: Ints, played: int, was: Ints) -> int:
        """How much earlier the host is after a wait, less what was taken out of its own time."""
        arrives = self.start[wait] - shift - self.taken_before[wait]
        device, end, block = self.device[wait], self.end[wait], self.block[wait]
        if self.skipped[wait]:
            return end - arrives - self.taken_after[wait]
        if not 0 <= block < played:
            return shift  # it waits for work that comes later: nothing can be said
        leaves = max(arrives, int(ends[block]) - (int(was[block]) - device))
        return end - (leaves + end - device) - self.taken_after[wait]


def _done(launched: Ints, ended: Ints, waits: Intervals) -> Ints:
    """For each wait, when everything launched before it had ended; its own start where there was nothing."""
    if not len(launched):
        return waits.start
    order = np.argsort(launched, kind="stable")
    latest = np.maximum.accumulate(ended[order])
    index = np.searchsorted(launched[order], waits.start, side="left") - 1
    found = np.where(index >= 0, latest[np.maximum(index, 0)], waits.start)
    # A copy's own work is launched within the call that waits for it.
    inside = np.searchsorted(launched[order], waits.end, side="left") - 1
    own = np.where(inside > index, latest[np.maximum(inside, 0)], found)
    return np.clip(np.maximum(found, np.where(own <= waits.end, own, found)), waits.start, waits.end)


def host_time_without(host: HostView, bounds: tuple[int, int], *named: Intervals) -> Intervals:
    """All the host's time between the bounds, less what is named otherwise."""
    everything = union(np.array([bounds[0]]), np.array([max(bounds[1], bounds[0])]))
    for part in named:
        everything = without(everything, part)
    return everything


@dataclass(frozen=True)
class DeviceRun:
    """One device over the recorded steps."""

    recorded: Recorded
    host: HostView
    view: DeviceView
    bounds: tuple[int, int]
    idle: IdleTime
    time: DeviceTime
    stalls_after_waits: Intervals = NEVER
    """Idle time that began in a wait, but is the host's own: it was busy with something else for long."""

    @cached_property
    def replay(self) -> Replay:
        return Replay.of(self.host, self.view, self.bounds)


def device_runs(recorded: Recorded, host: HostView) -> list[DeviceRun]:
    """One run for each device that worked in the recorded steps."""
    found = []
    for view in device_views(recorded.links):
        bounds = recorded.bounds(view.device, view.busy)
        idle = idle_time(host, view.rows, bounds, view.busy)
        run = DeviceRun(recorded, host, view, bounds, idle, device_time(view, bounds))
        stalls = _stalls_after_waits(run)
        if len(stalls):
            run = replace(run, idle=idle_time(host, view.rows, bounds, view.busy, stalls), stalls_after_waits=stalls)
        found.append(run)
    return found


def _stalls_after_waits(run: DeviceRun) -> Intervals:
    """A device that ran dry while the host waited for it stays so while the host does something else.

    That is the wait's doing, unless the host would be as late without it: then these are the stretches.
    """
    replay = run.replay
    stalls = both(both(plain_time(run), stalls_of(run.host, run.bounds)), run.idle.when["sync"])
    if not len(stalls):
        return NEVER
    every_wait = np.ones(len(replay.waits), np.bool_)
    saved = replay.saved(without_host=stalls)
    return stalls if saved > replay.saved(without_waits=every_wait) else NEVER


def plain_time(run: DeviceRun) -> Intervals:
    """When the host did none of the things that have a name of their own."""
    host = run.host
    calls = host.trace.calls
    named = (host.loader, host.warming_up, picked(calls, host.blocking), picked(calls, host.allocating))
    return host_time_without(host, run.bounds, *(on_launching_threads(host, ranges) for ranges in named))


def on_launching_threads(host: HostView, ranges: HostRanges) -> Intervals:
    mine = np.isin(ranges.thread, host.launching_threads)
    return union(ranges.start[mine], ranges.end[mine])


def stalls_of(host: HostView, bounds: tuple[int, int]) -> Intervals:
    """Stretches in which no thread launched anything, far longer than usual."""
    calls = host.trace.calls
    launches = host.launching
    if len(launches) < 2:
        return NEVER
    busy = union(calls.start[launches], calls.end[launches])
    start, end = np.concatenate(([bounds[0]], busy.end)), np.concatenate((busy.start, [bounds[1]]))
    usual = float(np.median(end[1:-1] - start[1:-1])) if len(busy) > 1 else 0.0
    long = (end - start) >= max(STALL_NS, STALL_RATIO * usual)
    return union(start[long], end[long])
