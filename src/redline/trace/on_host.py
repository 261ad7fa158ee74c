"""What the steps lose where the host is the device: to loading, to Python between operators, to work done in a costly way.

Nothing runs beside anything else here, so taking out a piece of time saves all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from redline.trace.classes import Described, class_of, describe
from redline.trace.columns import HostRanges, Ints, Mask
from redline.trace.host import WAITS_FOR_WORK, HostView, meanwhile, on_thread
from redline.trace.idle import CAUSES, Cause, IdleTime
from redline.trace.intervals import NEVER, Intervals, both, distinct, joined, seconds, union, without
from redline.trace.links import Links
from redline.trace.losses import FUSED_ATTENTION_SAVES, FUSED_ELEMENTWISE_SAVES, Loss, LossCode
from redline.trace.names import short_name
from redline.trace.operators import self_times
from redline.trace.patterns import attention_on_host, recomputed_operators
from redline.trace.replay import STALL_NS, STALL_RATIO
from redline.trace.timeline import host_communication, host_compute
from redline.trace.window import Recorded

LONG_NS = 2_000_000
"""Python that calls no operator for so long does something else, however seldom it calls any."""
SEVERAL = 3
"""Pauses, before any is called usual."""
SHORT_CALL_NS = 20_000
"""An operator that is through so soon was called for longer than it computed."""


@dataclass(frozen=True)
class HostRun:
    """One process over the recorded steps."""

    recorded: Recorded
    view: HostView
    bounds: tuple[int, int]
    loading: Intervals
    """The main thread sat in a data loader."""
    compiling: Intervals
    idle: IdleTime
    """When no operator was under way, by cause."""
    stalls: Intervals
    """Of the idle time of the host's own, long stretches."""

    @property
    def python(self) -> Intervals:
        """Short stretches between one operator and the next."""
        return without(self.idle.when["host"], self.stalls)


def host_run(recorded: Recorded, view: HostView) -> HostRun:
    trace = recorded.trace
    busy = joined(host_compute(trace), host_communication(trace))
    bounds = recorded.bounds(0, busy) if len(busy) else (0, 0)
    whole = union(np.array([bounds[0]]), np.array([bounds[1]]))
    loading = both(whole, on_thread(view.loader, view.main_thread))
    compiling = both(whole, on_thread(view.warming_up, view.main_thread))
    idle = without(whole, busy)
    when: dict[Cause, Intervals] = dict.fromkeys(CAUSES, NEVER)
    when["warm-up"] = both(idle, compiling)
    when["data"] = without(both(idle, loading), compiling)
    when["host"] = without(idle, joined(loading, compiling))
    return HostRun(
        recorded=recorded,
        view=view,
        bounds=bounds,
        loading=loading,
        compiling=compiling,
        idle=IdleTime(when, np.zeros(len(trace.calls), np.int64)),
        stalls=_stalls(when["host"]),
    )


def _stalls(pauses: Intervals) -> Intervals:
    """Far longer than usual, or long by any measure."""
    if not len(pauses):
        return NEVER
    length = pauses.end - pauses.start
    long = length >= max(STALL_NS, min(STALL_RATIO * float(np.median(length)), LONG_NS))
    return union(pauses.start[long], pauses.end[long])


def losses_on_host(runs: Sequence[HostRun]) -> list[Loss]:
    """Of all processes together. One that launches work of which nothing was recorded is not the device."""
    found: defaultdict[LossCode, list[Loss]] = defaultdict(list)
    for run in runs:
        if run.view.launched:
            continue
        for loss in (*_waits(run), *_work(run)):
            found[loss.code].append(loss)
    return [_together(each) for each in found.values()]


def _together(each: Sequence[Loss]) -> Loss:
    longest = max(each, key=lambda loss: loss.seconds)
    return Loss(
        code=longest.code,
        seconds=sum(loss.seconds for loss in each),
        saves_s=sum(loss.saves_s for loss in each),
        most_s=sum(loss.most_s for loss in each),
        count=sum(loss.count for loss in each),
        what=longest.what,
    )


def _waits(run: HostRun) -> list[Loss]:
    """Time in which the model's operators have to wait for something else on the host."""
    doing = meanwhile(run.view, run.stalls) if len(run.stalls) else ""
    python = run.python
    stalled: LossCode = "no-work" if WAITS_FOR_WORK.search(doing) else "stall"
    listed = (
        _loss("data", run.loading.total, count=_entered(run.view.loader, run.loading)),
        _loss("warm-up", run.compiling.total, count=len(run.compiling)),
        _loss(stalled, run.stalls.total, count=len(run.stalls), what=doing),
        # A compiler takes the calls of operators away together with the Python between them.
        _loss(
            "host", python.total if len(python) >= SEVERAL else 0, most=python.total + _calling(run), count=len(python)
        ),
    )
    return [loss for loss in listed if loss.seconds]


def _entered(ranges: HostRanges, when: Intervals) -> int:
    return int(when.holds(ranges.start).sum())


def _calling(run: HostRun) -> int:
    """In operators that have little to do themselves: being called is most of it."""
    own = self_times(run.recorded.links)[0]
    return int(own[own <= SHORT_CALL_NS].sum())


def _work(run: HostRun) -> list[Loss]:
    links = run.recorded.links
    attention, again = attention_on_host(links), recomputed_operators(links)
    found: list[tuple[LossCode, Mask, float, int]] = [
        ("attention", attention, FUSED_ATTENTION_SAVES, run.python.total),
        ("recompute", again, 1.0, _around(links, again)),
        ("layout", _are(links, lambda name: name.converts_layout), 1.0, 0),
        (
            "elementwise",
            _are(links, lambda name: name.is_unfused) & ~attention & ~again,
            FUSED_ELEMENTWISE_SAVES,
            run.python.total + _calling(run),
        ),
    ]
    if not _are(links, lambda name: name.is_training_norm).any():
        found.append(("norm", _are(links, lambda name: name.is_fixed_norm), 1.0, 0))
    own = self_times(links)[0]
    losses = []
    for code, named, share, beside in found:
        rows = _with_helpers(links, named) & (again if code == "recompute" else ~again)
        total = int(own[rows].sum())
        if total:
            top, count = _longest(links, own, rows), int(named.sum())
            losses.append(_loss(code, total, saved=total * share, most=total + beside, count=count, what=top))
    return losses


def _with_helpers(links: Links, rows: Mask) -> Mask:
    """With the operators that these call to prepare their work: views, allocations, conversions of a number."""
    names, column, nesting = links.trace.names, links.trace.operators.name, links.nesting
    helping = [number for number in distinct(column).tolist() if class_of(names[number]) in ("other", "copy")]
    helps, found = np.isin(column, helping), rows.copy()
    for level in list(nesting.levels())[1:]:
        found[level] |= helps[level] & found[nesting.parent[level]]
    return found


def _are(links: Links, is_meant: Callable[[Described], bool]) -> Mask:
    """Operators whose name tells what is meant."""
    names, column = links.trace.names, links.trace.operators.name
    meant = [number for number in distinct(column).tolist() if is_meant(describe(names[number]))]
    found: Mask = np.isin(column, meant)
    return found


def _around(links: Links, again: Mask) -> int:
    """The own time of the backward's ranges around recomputed operators: the Python that calls these is in there."""
    parent = links.nesting.parent[again]
    around = distinct(parent[(parent >= 0) & ~again[np.maximum(parent, 0)]])
    return int(self_times(links)[0][around].sum())


def _longest(links: Links, own: Ints, rows: Mask) -> str:
    """The name that takes most of these operators' own time."""
    numbers, which = np.unique(links.trace.operators.name[rows], return_inverse=True)
    total = np.zeros(len(numbers), np.int64)
    np.add.at(total, which, own[rows])
    return short_name(links.trace.names[int(numbers[total.argmax()])])


def _loss(
    code: LossCode, lost: float, *, saved: float | None = None, most: float | None = None, count: int, what: str = ""
) -> Loss:
    return Loss(
        code=code,
        seconds=seconds(lost),
        saves_s=seconds(lost if saved is None else saved),
        most_s=seconds(lost if most is None else most),
        count=count,
        what=what,
    )
