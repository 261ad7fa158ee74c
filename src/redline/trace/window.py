"""This module says which of a trace's work belongs to its steps, and to the phases of a step: forward, backward, optimizer, data.

The device runs behind the host. When recording starts, it is still busy with work that was launched before. Such work is in
the file, without its launch, and belongs to no recorded step. If it were counted, every figure per step would be too large.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Any

import numpy as np

from redline.model.fields import Frozen
from redline.model.note import note
from redline.model.units import format_seconds
from redline.trace.columns import HostRanges, Ints, Mask, Trace
from redline.trace.host import STEP, HostView, picked, union_of
from redline.trace.intervals import (
    NEVER,
    QUARTILES,
    Intervals,
    distinct,
    joined,
    overlap,
    seconds,
    union,
    without,
)
from redline.trace.links import Links, matching
from redline.trace.timeline import device_views


class Outside(Frozen):
    """This is device work in the file that is not counted. For several traces it is the sum."""

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
    """This is a trace reduced to its steps, and what was left out. Without marks of steps, only early work is left out."""

    links: Links
    steps: Intervals
    """These are the steps on the host. There are none if the trace has no marks of steps, or no work was launched in them."""
    device_free: dict[int, int]
    """Each device was busy with earlier work until this time."""
    outside: Outside

    @property
    def trace(self) -> Trace:
        return self.links.trace

    def bounds(self, device: int, busy: Intervals) -> tuple[int, int]:
        """Returns from when until when a device could have worked for these steps.

        A step may begin with a wait and end with one. Without marks of steps neither is known.
        """
        start, end = int(busy.start[0]), int(busy.end[-1])
        if not len(self.steps):
            return start, end
        begin = max(int(self.steps.start[0]), self.device_free.get(device, int(self.steps.start[0])))
        return min(start, begin), max(end, int(self.steps.end[-1]))


_EVERY_STREAM = re.compile(r"^(cuda|hip)DeviceSynchronize|^cuCtxSynchronize")
_A_STREAM = re.compile(r"^(cuda|hip|cu)(Device|Ctx|Stream)Synchronize")
BROKEN = 0.01
"""This share of the events may have wrong times without meaning that the clocks disagree."""
SLOWEST_START_NS = 100_000
"""The slowest device known (MI300) starts work 24 µs after its launch. A device that always takes four times that has another clock."""


def clocks_aligned(trace: Trace) -> Trace:
    """Returns the trace with the device's times moved if its clock and the host's do not agree.

    Nothing starts before it is launched, nothing ends after a call that waited for all of it, and a device that starts its work
    as the host launches it does so at once. Times are moved by as little as these allow. One broken event moves nothing.
    """
    links, work = Links(trace), trace.work
    shift = np.zeros(len(work), np.int64)
    for view in device_views(links):
        rows = view.rows[links.is_launched[view.rows]]
        shift[view.rows] = _clock_shift(links, rows, view.busy) if len(rows) else 0
    if not shift.any():
        return trace
    moved = format_seconds(int(np.abs(shift).max()) / 1e9)
    text = f"the clocks of host and device disagree by {moved} or more: the device's times were moved by that"
    told = note("clocks-disagree", text)
    return replace(trace, work=replace(work, start=work.start + shift), notes=(*trace.notes, told))


def _clock_shift(links: Links, rows: Ints, busy: Intervals) -> int:
    """Returns by how much the device's times are to be moved. It is 0 if everything is possible as it is."""
    trace, work, launched = links.trace, links.trace.work, links.launched_at[rows]
    early = launched - work.start[rows]
    if (early > 0).sum() > BROKEN * len(rows):
        return int(np.percentile(early[early > 0], 100 * (1 - BROKEN)))
    waits = _EVERY_STREAM if len(distinct(work.stream[rows])) > 1 else _A_STREAM
    calls = np.flatnonzero(matching(trace, trace.calls, waits))
    order = np.argsort(launched, kind="stable")
    latest = np.append(-(2**62), np.maximum.accumulate(work.end[rows[order]]))
    late = latest[np.searchsorted(launched[order], trace.calls.start[calls])] - trace.calls.end[calls]
    if (late > 0).sum() > BROKEN * len(late):
        return -int(np.median(late[late > 0]))
    # Work that finds the device idle follows its launch if its delays differ by less than the gaps before it.
    follows = np.isin(work.start[rows], busy.start[1:])
    delays = (work.start - links.launched_by)[rows[follows]]
    if len(delays) < QUARTILES or delays.min() < SLOWEST_START_NS:
        return 0
    gaps, spread = busy.start[1:] - busy.end[:-1], np.subtract(*np.percentile(delays, (75, 25)))
    usual_call = int(np.median(trace.calls.duration[links.call[rows]]))
    return usual_call - int(delays.min()) if spread < np.median(gaps) else 0


def recorded(trace: Trace) -> Recorded:
    trace = clocks_aligned(trace)
    links, steps, work = Links(trace), step_marks(trace), trace.work
    before = _before_recording(links)
    inside, launched = ~before, links.is_launched
    if len(steps) and trace.has_device:
        # Work that is launched between two steps keeps the device busy there. Without it the device would seem idle.
        within = launched & (links.launched_at >= steps.start[0]) & (links.launched_at < steps.end[-1])
        if within.any():
            inside, before = within | ~(launched | before), before | (launched & (links.launched_at < steps.start[0]))
        else:
            steps = NEVER
    between = ~inside & ~before
    free = {device: int(work.end[before & (work.device == device)].max()) for device in distinct(work.device[before])}
    outside = Outside(
        before_work=int(before.sum()),
        before_s=seconds(int(work.duration[before].sum())),
        between_work=int(between.sum()),
        between_s=seconds(int(work.duration[between].sum())),
    )
    tables: dict[str, Any] = {} if inside.all() else {"work": work.only(inside)}
    # What the host did before the first and after the last step is left out. A frame or an annotation may have begun long
    # before, so what matters is that it reaches into the steps.
    for name in ("operators", "calls", "annotations", "frames", "allocations") if len(steps) else ():
        table = getattr(trace, name)
        begin, end = (table.at, table.at) if name == "allocations" else (table.start, table.end)
        since = (end > steps.start[0]) if name in ("annotations", "frames") else (begin >= steps.start[0])
        if not (keep := since & (begin <= steps.end[-1])).all():
            tables[name] = table.only(keep)
    return Recorded(Links(replace(trace, **tables)) if tables else links, steps, free, outside)


def _before_recording(links: Links) -> Mask:
    """Returns True for work that has no launch in the file and began before anything launched in it, on its own stream or on any."""
    work, known = links.trace.work, links.is_launched
    if not known.any():
        return known
    keys = np.stack((work.device.astype(np.int64), work.stream))
    _, queue = np.unique(keys, axis=1, return_inverse=True)
    latest = np.iinfo(np.int64).max
    first = np.full(len(work), latest)
    np.minimum.at(first, queue.ravel()[known], work.start[known])
    first[first == latest] = work.start[known].min()
    found: Mask = ~known & (work.start < first[queue.ravel()])
    return found


def step_marks(trace: Trace) -> Intervals:
    """Returns each step on the host, in order."""
    rows = matching(trace, trace.annotations, STEP)
    order = np.argsort(trace.annotations.start[rows], kind="stable")
    start, end = trace.annotations.start[rows][order], trace.annotations.end[rows][order]
    # Steps follow each other, so marks that overlap are cut where the next begins, and one that is there twice counts once.
    end[:-1] = np.minimum(end[:-1], start[1:])
    real = end > start
    return Intervals(start[real], end[real], order[real])


class Steps(Frozen):
    count: int
    seconds: tuple[float, ...]
    """These are the seconds of each step, in order. With a device a step goes from the start of its first work to that
    of the next step's first work."""
    mean_s: float
    std_s: float | None
    min_s: float
    max_s: float
    spread: float | None
    """This is the standard deviation over the mean."""


def steps_of(several: Sequence[Recorded]) -> Steps | None:
    """Returns the steps of several traces together. Returns None if no trace has marks of steps."""
    borders = [(one, step_borders(one)) for one in several]
    each = [one.steps.end - one.steps.start if found is None else np.diff(found) for one, found in borders]
    lengths = [length / 1e9 for found in each for length in found.tolist()]
    if not lengths:
        return None
    mean, std = fmean(lengths), stdev(lengths) if len(lengths) > 1 else None
    return Steps(
        count=len(lengths),
        seconds=tuple(lengths),
        mean_s=mean,
        std_s=std,
        min_s=min(lengths),
        max_s=max(lengths),
        spread=std / mean if std is not None and mean else None,
    )


def step_borders(one: Recorded) -> Ints | None:
    """Returns when each step begins for the device, and when the last one ends. Returns None if one of them has no work there."""
    steps, links, work = one.steps, one.links, one.trace.work
    known = links.is_launched
    if not len(steps) or not known.any():
        return None
    # The host runs ahead, so a step is over for the device when the next one begins there.
    first = np.full(len(steps), np.iinfo(np.int64).max)
    np.minimum.at(first, np.searchsorted(steps.start, links.launched_at[known], side="right") - 1, work.start[known])
    is_whole = (first < np.iinfo(np.int64).max).all()
    return np.maximum.accumulate(np.append(first, work.end[known].max())) if is_whole else None


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
        """Returns the least time that a step can spend on this phase. Host and device may overlap, but neither can be skipped."""
        return max(self.host_s, self.device_s)


def phases_of(views: Sequence[HostView]) -> list[Phase]:
    """Returns the phases that occur, in the order of a step; the figures are sums over the traces."""
    sums = {name: [0, 0] for name in PHASES}
    for view in views:
        links, work, left = view.links, view.trace.work, view.links.is_launched
        for name, when in phases_marked(view).items():
            inside = left & when.holds(links.launched_at)
            left = left & ~inside
            sums[name][0] += when.total - overlap(when, view.blocked)
            sums[name][1] += union(work.start[inside], work.end[inside]).total
    found = {name: (seconds(host), seconds(device)) for name, (host, device) in sums.items() if host or device}
    return [Phase(name=name, host_s=host, device_s=device) for name, (host, device) in found.items()]


def phases_marked(view: HostView) -> dict[str, Intervals]:
    """Returns when each phase was under way on the host. Phases without marks are left out.

    Marks of Redline's own tell all of them. Torch marks some, and whatever else the host does is then forward.
    """
    trace = view.trace
    found = {name: _named(trace, trace.annotations, re.compile(f"^{OWN_PREFIX}{name}$")) for name in PHASES}
    if not any(map(len, found.values())):
        optimizer = joined(*(_named(trace, table, _OPTIMIZER) for table in (trace.annotations, trace.operators)))
        backward = _named(trace, trace.operators, _BACKWARD)
        found = {"data": union_of(view.loader), "optimizer": optimizer, "backward": backward}
        found["forward"] = without(view.active, joined(*found.values()))
    return {name: when for name, when in found.items() if len(when)}


def _named(trace: Trace, ranges: HostRanges, rule: re.Pattern[str]) -> Intervals:
    return union_of(picked(ranges, matching(trace, ranges, rule)))
