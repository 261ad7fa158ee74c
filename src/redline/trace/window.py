"""This module says which of a trace's work belongs to its steps, and to the phases of a step: forward, backward, optimizer, data.

The device runs behind the host: when recording starts, it is still busy with work that was launched before. Such work
is in the file, without its launch, and belongs to no recorded step; counted in, it makes every figure per step too
large.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from redline.model.fields import Frozen
from redline.model.note import note
from redline.model.units import format_seconds
from redline.trace.columns import HostRanges, Ints, Mask, Trace
from redline.trace.host import HostView
from redline.trace.intervals import NEVER, Intervals, distinct, joined, overlap, seconds, union, without
from redline.trace.links import Links, matching, where_name

_STEP = re.compile(r"^ProfilerStep\s*#\d+$")


class Outside(Frozen):
    """Device work in the file that is not counted. Of several traces, sums."""

    before_work: int = 0
    """This much was launched before the first recorded step, or before recording began."""
    before_s: float = 0.0
    between_work: int = 0
    """This much was launched while recording, but after the last step."""
    between_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.before_work or self.between_work)


@dataclass(frozen=True)
class Recorded:
    """A trace reduced to its steps, and what was left out. Without marks of steps, only early work is left out."""

    links: Links
    steps: Intervals
    """On the host; none where the trace has no marks of steps, or no work was launched in them."""
    device_free: dict[int, int]
    """Each device was busy with work from before until then."""
    outside: Outside

    @property
    def trace(self) -> Trace:
        return self.links.trace

    def bounds(self, device: int, busy: Intervals) -> tuple[int, int]:
        """From when until when a device could have worked for these steps.

        A step may begin with a wait and end with one. Without marks of steps neither is known.
        """
        start, end = int(busy.start[0]), int(busy.end[-1])
        if not len(self.steps):
            return start, end
        begin = max(int(self.steps.start[0]), self.device_free.get(device, int(self.steps.start[0])))
        return min(start, begin), max(end, int(self.steps.end[-1]))


_EVERY_STREAM = re.compile(r"^(cuda|hip)DeviceSynchronize|^cuCtxSynchronize")
_A_STREAM = re.compile(r"^(cuda|hip|cu)(Device|Ctx|Stream)Synchronize")


def clocks_aligned(trace: Trace) -> Trace:
    """Returns the trace with the device's times moved if its clock and the host's do not agree.

    Nothing starts before it is launched, and nothing ends after a call that waited for all of it. Times are moved by
    as little as both allow; one broken event moves nothing.
    """
    links, work = Links(trace), trace.work
    if not links.is_launched.any():
        return trace
    shift = np.zeros(len(work), np.int64)
    for device in distinct(work.device).tolist():
        rows = np.flatnonzero((work.device == device) & links.is_launched)
        shift[work.device == device] = _clock_shift(links, rows)
    if not shift.any():
        return trace
    most = int(np.abs(shift).max())
    text = f"the clocks of host and device disagree by {format_seconds(most / 1e9)} or more: the device's times were moved by that"
    moved = replace(work, start=work.start + shift)
    return replace(trace, work=moved, notes=(*trace.notes, note("clocks-disagree", text)))


def _clock_shift(links: Links, rows: Ints) -> int:
    """Returns by how much the device's times are to be moved; 0 where all is possible as it is."""
    if not len(rows):
        return 0
    trace, work = links.trace, links.trace.work
    early = links.launched_at[rows] - work.start[rows]
    if (early > 0).sum() > BROKEN * len(rows):
        return int(np.percentile(early[early > 0], 100 * (1 - BROKEN)))
    calls = np.flatnonzero(
        matching(trace, trace.calls, _EVERY_STREAM if len(distinct(work.stream[rows])) > 1 else _A_STREAM)
    )
    order = rows[np.argsort(links.launched_at[rows], kind="stable")]
    latest = np.maximum.accumulate(work.end[order])
    before = np.searchsorted(links.launched_at[order], trace.calls.start[calls])
    told = before > 0
    late = latest[before[told] - 1] - trace.calls.end[calls[told]]
    return -int(np.median(late[late > 0])) if (late > 0).sum() > BROKEN * len(late) and (late > 0).any() else 0


BROKEN = 0.01
"""Share of the events whose times may be wrong by themselves."""


def recorded(trace: Trace) -> Recorded:
    trace = clocks_aligned(trace)
    links = Links(trace)
    steps = step_marks(trace)
    if not trace.has_device:
        return Recorded(Links(_on_host(trace, steps)), steps, {}, Outside())
    before = _before_recording(links)
    inside = ~before
    if len(steps):
        # Work that is launched between two steps keeps the device busy there: without it the device would seem idle.
        within = (links.launched_at >= steps.start[0]) & (links.launched_at < steps.end[-1])
        launched = links.is_launched & within
        early = links.is_launched & (links.launched_at < steps.start[0])
        if launched.any():
            inside, before = launched | ~(links.is_launched | before), before | early
        else:
            steps = union(steps.start[:0], steps.end[:0])
    work = trace.work
    free = {device: int(work.end[before & (work.device == device)].max()) for device in distinct(work.device[before])}
    between = ~inside & ~before
    outside = Outside(
        before_work=int(before.sum()),
        before_s=seconds(int(work.duration[before].sum())),
        between_work=int(between.sum()),
        between_s=seconds(int(work.duration[between].sum())),
    )
    if not inside.all():
        trace = replace(trace, work=work.only(inside))
        links = Links(trace)
    cut = _on_host(trace, steps)
    return Recorded(links if cut is trace else Links(cut), steps, free, outside)


def _before_recording(links: Links) -> Mask:
    """Returns true for work that has no launch in the file and began before anything launched in it, on its own stream or on any."""
    work, known = links.trace.work, links.is_launched
    if not known.any() or known.all():
        return np.zeros(len(work), np.bool_)
    order = np.lexsort((work.stream, work.device))
    device, stream = work.device[order], work.stream[order]
    begins = np.concatenate(([True], (device[1:] != device[:-1]) | (stream[1:] != stream[:-1])))
    queue = np.empty(len(work), np.int64)
    queue[order] = np.cumsum(begins) - 1
    first = np.full(int(begins.sum()), np.iinfo(np.int64).max)
    np.minimum.at(first, queue[known], work.start[known])
    first[first == np.iinfo(np.int64).max] = work.start[known].min()
    found: Mask = ~known & (work.start < first[queue])
    return found


def _on_host(trace: Trace, steps: Intervals) -> Trace:
    """Without what the host did before the first and after the last step."""
    if not len(steps):
        return trace
    first, last = int(steps.start[0]), int(steps.end[-1])
    tables: dict[str, Any] = {}
    for name in ("operators", "calls", "annotations", "frames", "allocations"):
        table = getattr(trace, name)
        at: Ints = table.at if name == "allocations" else table.start
        keep = (at >= first) & (at <= last)
        if not keep.all():
            # A frame or an annotation may have begun long before: what matters is that it reaches into the steps.
            keep |= (table.end > first) & (at <= last) if name in ("annotations", "frames") else keep
            tables[name] = replace(table, **{column: values[keep] for column, values in vars(table).items()})
    return replace(trace, **tables) if tables else trace


def step_marks(trace: Trace) -> Intervals:
    """Each step on the host, in order."""
    rows = matching(trace, trace.annotations, _STEP)
    start, end = trace.annotations.start[rows], trace.annotations.end[rows]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    # Steps follow each other; marks that overlap are cut where the next begins, and one that is there twice is one.
    end = np.concatenate((np.minimum(end[:-1], start[1:]), end[-1:]))
    real = end > start
    return Intervals(start[real], end[real], order[real])


class Steps(Frozen):
    count: int
    seconds: tuple[float, ...]
    """For each step, in order. With a device: from the start of its first work to that of the next step's first work."""
    mean_s: float
    std_s: float | None
    min_s: float
    max_s: float
    spread: float | None
    """Standard deviation over mean."""


def steps_of(each: Sequence[Recorded]) -> Steps | None:
    """None where the trace has no marks of steps; of several traces, all their steps."""
    lengths = np.concatenate([np.empty(0, np.int64), *map(step_lengths, each)])
    if not len(lengths):
        return None
    mean, std = float(lengths.mean()), float(lengths.std(ddof=1)) if len(lengths) > 1 else None
    return Steps(
        count=len(lengths),
        seconds=tuple(map(seconds, lengths.tolist())),
        mean_s=seconds(mean),
        std_s=None if std is None else seconds(std),
        min_s=seconds(int(lengths.min())),
        max_s=seconds(int(lengths.max())),
        spread=std / mean if std is not None and mean else None,
    )


def step_lengths(one: Recorded) -> Ints:
    borders = step_borders(one)
    return borders[1:] - borders[:-1] if borders is not None else one.steps.end - one.steps.start


def step_borders(one: Recorded) -> Ints | None:
    """Returns when each step is beginning for the device, and when the last one ends; None where one of them has no device work."""
    steps, links, work = one.steps, one.links, one.trace.work
    if not len(steps) or not links.is_launched.any():
        return None
    known = links.is_launched
    step = np.searchsorted(steps.start, links.launched_at[known], side="right") - 1
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, step, work.start[known])
    if (first == np.iinfo(np.int64).max).any():
        return None  # only the host's view covers all steps
    # The host runs ahead; a step is over for the device when the next one begins there.
    borders = np.concatenate((first, [work.end[known].max()]))
    return np.maximum.accumulate(borders)


PHASES = ("data", "forward", "backward", "optimizer", "prefill", "decode")
OWN_PREFIX = "redline/"

_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")


class Phase(Frozen):
    name: str
    host_s: float
    """This is time on the host, less the time blocked waiting for the device."""
    device_s: float
    """This is the union of the device work launched from it."""

    @property
    def needs_s(self) -> float:
        """No step can spend less on it: host and device may overlap, but neither can be skipped."""
        return max(self.host_s, self.device_s)


def phases_of(views: Sequence[HostView]) -> list[Phase]:
    """Returns the phases that occur, in the order of a step; the figures are sums over the traces."""
    sums = dict.fromkeys(PHASES, np.zeros(2, np.int64))
    for view in views:
        for name, times in _times(view, phases_marked(view)).items():
            sums[name] = sums[name] + np.array(times)
    return [
        Phase(name=name, host_s=seconds(int(host)), device_s=seconds(int(device)))
        for name, (host, device) in sums.items()
        if host or device
    ]


def phases_marked(view: HostView) -> dict[str, Intervals]:
    """When each phase was under way on the host; those without marks are left out."""
    trace = view.trace
    own = {name: _named(trace, trace.annotations, re.compile(f"^{OWN_PREFIX}{name}$")) for name in PHASES}
    by_torch = {
        "data": union(view.loader.start, view.loader.end),
        "optimizer": joined(*(_named(trace, table, _OPTIMIZER) for table in (trace.annotations, trace.operators))),
        "backward": _named(trace, trace.operators, _BACKWARD),
    }
    found = own if any(map(len, own.values())) else by_torch
    return {name: ranges for name, ranges in found.items() if len(ranges)}


def _times(view: HostView, marks: dict[str, Intervals]) -> dict[str, tuple[int, int]]:
    """Returns what each phase takes on host and device, in nanoseconds; without marks of our own, the rest is forward."""
    links, blocked = view.links, view.blocked
    left, times = links.is_launched.copy(), {}
    for name, ranges in marks.items():
        inside = left & ranges.holds(links.launched_at)
        left &= ~inside
        times[name] = (ranges.total - overlap(ranges, blocked), _device(links, inside))
    if not {*marks} <= {"data", "optimizer", "backward"} or _is_marked_by_us(view.trace):
        return times
    rest = without(view.active, joined(NEVER, *marks.values()))
    times["forward"] = (rest.total - overlap(rest, blocked), _device(links, left))
    return times


def _is_marked_by_us(trace: Trace) -> bool:
    marks = {OWN_PREFIX + name for name in PHASES}
    return bool(where_name(trace, trace.annotations, lambda name: name in marks).any())


def _device(links: Links, rows: Mask) -> int:
    work = links.trace.work
    return union(work.start[rows], work.end[rows]).total


def _named(trace: Trace, ranges: HostRanges, rule: re.Pattern[str]) -> Intervals:
    rows = matching(trace, ranges, rule)
    return union(ranges.start[rows], ranges.end[rows])
