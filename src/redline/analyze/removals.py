"""What each rule of the diagnosis removes from recorded steps, and what the steps save without it.

Where a device worked, the steps are played again without it. Where the host is the device nothing runs beside anything else, so
that what is removed is saved. A table of kernels has their names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.analyze.finding import Removal
from redline.analyze.hardware import OperatorLimit, slowest_operator
from redline.trace.classes import Described, describe
from redline.trace.collectives import Calls, Waiting
from redline.trace.columns import Ints, Mask
from redline.trace.host import WAITS_FOR_WORK, HostView, meanwhile, other_threads
from redline.trace.idle import Cause
from redline.trace.intervals import Intervals, both, distinct, joined, seconds, union, without
from redline.trace.names import short_name
from redline.trace.patterns import cold_kernels, recomputed, unfused_attention
from redline.trace.replay import NOTHING, DeviceRun, Replay, Without
from redline.trace.selections import WORTH_A_LINE, OnDevice, OnHost
from redline.trace.timeline import DeviceTime

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

Kind = Literal["wait", "work", "fused", "other"]
"""`wait`: the device had nothing to do. `work`: it was busy with this, and could be done sooner. `fused`: the same, and hardly
any time to launch it would be left."""


@dataclass(frozen=True)
class TraceFacts:
    """Recorded steps, as rules look at them: their tables, and every device, or every host that is the device."""

    profile: Profile
    devices: Sequence[OnDevice] = ()
    hosts: Sequence[OnHost] = ()
    times: Sequence[DeviceTime] = ()
    calls: Sequence[Calls] = ()
    """The collectives of each."""
    waiting: Waiting | None = None

    @property
    def whole_s(self) -> float:
        return self.profile.whole_s

    @property
    def span_s(self) -> float:
        return self.profile.timeline.span_s

    @cached_property
    def replay(self) -> Replay:
        return Replay([seen.run for seen in self.devices])

    def saves(self, saved_s: float, seconds: float, kind: Kind) -> float:
        """What the replay of the recorded steps saves, corrected for the profiler, which slows the host down."""
        profile = self.profile
        capture = profile.capture
        if capture is None or capture.step_s is None or profile.steps is None or not profile.has_device:
            return saved_s
        if kind == "wait":
            # Without the profiler there may be less waiting than the trace shows.
            return min(saved_s, max(profile.wall_s - profile.timeline.busy_s, 0.0))
        if kind == "other":
            return saved_s
        # The host hides less work, and what it takes to launch the work is shorter.
        issue_s = 0.0 if kind == "fused" else (capture.least_issue_s or 0.0) * profile.steps.count
        slowed = max(profile.timeline.span_s / profile.wall_s, 1.0)
        return max(saved_s / slowed, min(seconds, profile.wall_s - issue_s))


@dataclass(frozen=True)
class Taken:
    """The time that one device, or one host, loses to a cause."""

    ns: int
    """How long the device waited for this, or worked at it."""
    count: int
    what: str = ""
    without: Without = NOTHING
    """Played without this on a device."""
    also_ns: int = 0
    """On a host, time that is not of this cause and would go with it."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """What a rule removes: on devices, on hosts that are the device, and in tables that have only names."""

    kind: Kind
    on_device: Callable[[OnDevice], Taken] | None = None
    on_host: Callable[[OnHost], Taken] | None = None
    named: Callable[[Described], bool] | None = None
    never_with: Callable[[Described], bool] | None = None
    """Names that say that the others mean something else."""

    def __call__(self, facts: TraceFacts) -> Removal | None:
        if facts.devices:
            return self._removed(facts, [self.on_device(seen) for seen in facts.devices] if self.on_device else [])
        if facts.hosts:
            return self._removed(facts, [self.on_host(seen) for seen in facts.hosts] if self.on_host else [])
        return self._of_table(facts.profile) if self.named is not None else None

    def _removed(self, facts: TraceFacts, taken: Sequence[Taken]) -> Removal | None:
        total, count = sum(one.ns for one in taken), sum(one.count for one in taken)
        if not total and not (count and facts.devices):
            return None
        if facts.devices:
            saved = facts.replay.saved([one.without for one in taken])
        else:
            saved = sum(one.ns + one.also_ns for one in taken)
        return Removal(
            saves_s=facts.saves(seconds(saved), seconds(total), self.kind),
            seconds=seconds(total),
            count=count,
            what=max(taken, key=lambda one: one.ns).what,
        )

    def _of_table(self, profile: Profile) -> Removal | None:
        assert self.named is not None
        told = [describe(row.name) for row in profile.kernels]
        if self.never_with is not None and any(map(self.never_with, told)):
            return None
        meant = [row for row, one in zip(profile.kernels, told, strict=True) if self.named(one)]
        total = sum(row.total_s for row in meant)
        if not total:
            return None
        top = short_name(max(meant, key=lambda row: row.total_s).name)
        return Removal(saves_s=total, seconds=total, count=sum(row.calls for row in meant), what=top)


Removes = Callable[[TraceFacts], Removal | None]


def only_if(holds: Callable[[Profile], bool], removes: Removes) -> Removes:
    return lambda facts: removes(facts) if holds(facts.profile) else None


HOST_LATE_SHARE = 0.05
"""Recording slows the host down, so that a smaller share of its own time says little about the program without."""


def unless_cleared(removes: Removes) -> Removes:
    """What the host is late with, unless steps without the profiler show that it keeps up: only recording made it late."""

    def late(facts: TraceFacts) -> Removal | None:
        removal = None if _is_cleared(facts) else removes(facts)
        return removal if removal is not None and removal.seconds >= WORTH_A_LINE * facts.span_s else None

    return late


def _is_cleared(facts: TraceFacts) -> bool:
    profile = facts.profile
    if profile.capture is None:
        return False
    if profile.has_device:
        share = profile.capture.issue_share
        return share is not None and share <= HOST_BOUND_SHARE
    # Operators that really work take no less time without the profiler than with it.
    worked_s = profile.timeline.busy_s - seconds(sum(seen.calling for seen in facts.hosts))
    return profile.capture.step_s is not None and profile.wall_s - worked_s < HOST_LATE_SHARE * profile.wall_s


# The host's time


def idle_for(
    cause: Cause, host: Callable[[OnDevice], Intervals], calls: Callable[[HostView], Sized]
) -> Callable[[OnDevice], Taken]:
    """Take the time of the host that one kind of call or mark stands for."""
    return lambda seen: Taken(seen.run.idle.ns(cause), len(calls(seen.run.host)), without=Without(host=host(seen)))


def stalls(*, for_work: bool) -> Selection:
    """Pauses far longer than usual; `for_work`: those in which the program waits for something to do."""

    def on_device(seen: OnDevice) -> Taken:
        stalled = both(seen.run.idle.when["host"], seen.own_stalls)
        gone = Without(host=seen.own_stalls, waits=seen.waits_into_stalls)
        return taken(stalled, len(seen.own_stalls), meanwhile(seen.run.host, stalled) if len(stalled) else "", gone)

    def on_host(seen: OnHost) -> Taken:
        return taken(
            seen.stalls, len(seen.stalls), meanwhile(seen.view, seen.stalls) if len(seen.stalls) else "", NOTHING
        )

    def taken(stalled: Intervals, count: int, doing: str, gone: Without) -> Taken:
        is_meant = bool(WAITS_FOR_WORK.search(doing)) == for_work
        return Taken(stalled.total, count, doing, gone) if is_meant else Taken(0, 0)

    return Selection(kind="wait", on_device=on_device, on_host=on_host)


def late_host(seen: OnDevice) -> Taken:
    """Fewer launches also have fewer gaps between them."""
    run = seen.run
    own = joined(run.idle.when["host"], run.idle.when["latency"])
    late = own.total - both(run.idle.when["host"], seen.stalls).total
    beside = other_threads(run.host, both(run.idle.when["host"], seen.steady))
    gaps = ~seen.links.by_graph if late else None
    return Taken(late, len(run.view.rows), beside, Without(host=seen.steady, gaps=gaps))


def python(seen: OnHost) -> Taken:
    """A compiler takes the calls of operators away together with the Python between them."""
    return Taken(without(seen.python, seen.reading).total, len(seen.python), also_ns=seen.calling)


def waits(*, copies: bool) -> Callable[[OnDevice], Taken]:
    """The waits with the operators that make them, and what the host does after them for their sake."""

    def on_device(seen: OnDevice) -> Taken:
        calls = seen.waits(copies=copies)
        rows = seen.blocking_copies if copies else np.zeros(len(seen.trace.work), np.bool_)
        around = both(seen.operators_around(calls), joined(seen.plain, seen.warming_up))
        host = joined(around, seen.claimed(copies=copies))
        blocked = int(seen.run.idle.by_call[calls].sum())
        gone = Without(host=host, waits=calls, work=seen.run.cut(rows))
        return Taken(blocked + seen.total(rows), int(calls.sum()), without=gone)

    return on_device


def reading(seen: OnHost) -> Taken:
    """Take the operators that turn tensors into numbers one by one, with the Python around them."""
    rows, parent = seen.numbers_read, seen.links.nesting.parent
    outermost = rows & ~(rows[np.maximum(parent, 0)] & (parent >= 0))
    return Taken(seen.reading.total, int(outermost.sum()), seen.longest(rows))


def launch_gaps(seen: OnDevice) -> Taken:
    every = np.ones(len(seen.trace.work), np.bool_)
    return Taken(seen.run.idle.ns("launch"), len(seen.run.view.rows), without=Without(gaps=every))


def late_work(seen: OnDevice) -> Taken:
    idle = seen.run.idle
    return Taken(idle.ns("dependency") + idle.ns("unknown"), 0, without=Without(delays=True))


# Work


def rows_of(seen: OnDevice, rows: Mask, *, launches: bool = True) -> Taken:
    """These rows of device work; `launches`: with what launches them."""
    host = seen.launching(rows) if launches else NOTHING.host
    count = int(rows[seen.run.view.rows].sum())
    return Taken(seen.total(rows), count, seen.longest(rows), Without(work=seen.run.cut(rows), host=host))


def communication(seen: OnDevice) -> Taken:
    """Ranks whose traces are given still wait for each other."""
    return replace(rows_of(seen, seen.talking), ns=seen.run.time.exposed_communication, count=len(seen.run.calls))


def copies_alone(seen: OnDevice) -> Taken:
    """Take the copies between the host and the device beside which no kernel runs."""
    rows = seen.moving & ~seen.blocking_copies
    exposed = min(seen.total(rows), seen.run.time.exposed_copy)
    return replace(rows_of(seen, rows), ns=exposed, count=int(rows.sum()))


def unfused(seen: OnDevice) -> Taken:
    """Kernels that take no longer than starting them takes are not bound by memory. What the device has to wait for while they are
    launched is the host's own finding."""
    rows = seen.links.are(lambda name: name.is_unfused) & (seen.trace.work.duration > seen.run.latency.ns)
    rows &= ~unfused_attention(seen.links) & ~recomputed(seen.links)
    gone = Without(work=seen.run.cut(rows), host=both(seen.launching(rows), seen.run.view.busy))
    return replace(rows_of(seen, rows, launches=False), without=gone)


def cold(seen: OnDevice) -> Taken:
    cold = cold_kernels(seen.run.recorded)
    gone = Without(work=cold.most)
    if cold.tried.any():  # and the host that launches and times them
        operators = distinct(seen.links.operator[cold.tried & (seen.links.operator >= 0)])
        table, calls = seen.trace.operators, seen.trace.calls
        tried = union(table.start[operators], table.end[operators]).holds(calls.start)
        gone = Without(work=cold.most, host=seen.launching(cold.tried), waits=seen.every_wait & tried)
    excess = int(cold.excess[seen.run.view.rows].sum())
    return Taken(excess, cold.steps, seen.longest(cold.excess > 0), gone)


def operators(
    named: Callable[[OnHost], Mask],
    beside: Callable[[OnHost, Mask], int] = lambda seen, rows: 0,
    *,
    again: bool = False,
) -> Callable[[OnHost], Taken]:
    """Operators with those that prepare their work, and what goes along with them. `again`: those that a checkpoint runs again,
    which belong to no other rule."""

    def on_host(seen: OnHost) -> Taken:
        meant = named(seen)
        rows = seen.with_helpers(meant) & (seen.again if again else ~seen.again)
        total = int(seen.own_ns[rows].sum())
        return Taken(total, int(meant.sum()), seen.longest(rows), also_ns=beside(seen, meant) if total else 0)

    return on_host


def written_out(seen: OnHost) -> Mask:
    """Elementwise operators that do not belong to attention and take longer than being called."""
    return seen.named(lambda name: name.is_unfused) & ~seen.attention & seen.is_work


def copying(seen: OnHost) -> Mask:
    """Operators that move values and compute nothing; turning one layout into another has a rule of its own."""
    moving = seen.named(lambda name: name.kernel_class == "copy" and not name.converts_layout)
    return moving & ~seen.attention & ~seen.named(lambda name: name.is_unfused) & seen.is_work


def of_names(
    kind: Kind, named: Callable[[Described], bool], *, never_with: Callable[[Described], bool] | None = None
) -> Selection:
    """Work whose name tells what is meant; none of it where other work has a name that `never_with` finds."""

    def on_device(seen: OnDevice) -> Taken:
        return rows_of(seen, meant(seen.links.are))

    def meant(are: Callable[[Callable[[Described], bool]], Mask]) -> Mask:
        rows = are(named)
        return rows & False if never_with is not None and are(never_with).any() else rows

    return Selection(
        kind=kind,
        on_device=on_device,
        on_host=operators(lambda seen: meant(seen.named)),
        named=named,
        never_with=never_with,
    )


FIXED_NORM = of_names("work", lambda name: name.is_fixed_norm, never_with=lambda name: name.is_training_norm)


# Communication, ranks that wait for each other, and single operators


def exchanges(facts: TraceFacts) -> Removal | None:
    """Communication that nothing is computed beside. Ranks whose traces are given still wait for each other."""
    if facts.devices:
        return Selection(kind="other", on_device=communication)(facts)
    exposed = sum(time.exposed_communication for time in facts.times)
    taken = exposed - _waited_on_hosts(facts)
    return _serial(taken, sum(map(len, facts.calls))) if exposed else None


def _serial(ns: int, count: int, what: str = "") -> Removal:
    return Removal(saves_s=seconds(ns), seconds=seconds(ns), count=count, what=what)


def _waited_on_hosts(facts: TraceFacts) -> int:
    """Return how long hosts that are the devices wait for each other while nothing computes."""
    if facts.waiting is None or not facts.waiting.from_ranks:
        return 0
    exposed = sum(time.exposed_communication for time in facts.times)
    return min(sum(map(_exposed_waits, facts.calls, facts.waiting.waits)), exposed)


def _exposed_waits(calls: Calls, waits: NDArray[np.float64]) -> int:
    return int(np.maximum(np.nan_to_num(waits) - calls.hidden, 0).sum())


def straggler(facts: TraceFacts) -> Removal | None:
    """The work that the rank which comes last has more of than the others, from one collective to the next."""
    waiting, runs = facts.waiting, [seen.run for seen in facts.devices]
    if waiting is None or not waiting.stragglers:
        return None
    if not runs:
        waited = _waited_on_hosts(facts)
        return _serial(waited, sum(map(len, facts.calls))) if waited and waiting.late else None
    worst = waiting.stragglers[0]
    late = [run.calls.label for run in runs].index(worst.label)
    windows = [_by_window(run) for run in runs]
    sums = [np.bincount(window, work) for _, window, work in windows]
    rows, window, work = windows[late]
    cut = np.zeros(len(runs[late].recorded.trace.work), np.int64)
    # Nobody knows which work it is: the last before a collective, whose end the others wait for.
    later = np.cumsum(sums[late])[window] - np.cumsum(work)
    cut[rows] = np.clip(np.ceil(_more_than_others(sums, late) * sums[late])[window] - later, 0, work)
    # Less work also has fewer gaps in it, and takes less of the host.
    own_cut = Without(work=cut, gaps=cut > 0, host=_launched_less(facts.devices, late))
    saved = facts.replay.saved([own_cut if at == late else NOTHING for at in range(len(runs))])
    exposed = sum(_exposed_waits(run.calls, waits) for run, waits in zip(runs, waiting.waits, strict=True))
    return Removal(saves_s=seconds(saved), seconds=seconds(exposed), count=worst.last)


def _more_than_others(per_window: Sequence[Ints], late: int) -> NDArray[np.float64]:
    """For each window between two collectives, the share that the late rank has more of than the others on average."""
    count = max(map(len, per_window))
    every = np.array([np.pad(one, (0, count - len(one))) for one in per_window], np.float64)
    others = np.delete(every, late, axis=0).mean(axis=0)
    more = np.where(every[late] > 0, np.maximum(1 - others / np.maximum(every[late], 1), 0), 0)
    return more[: len(per_window[late])]


def _by_window(run: DeviceRun) -> tuple[Ints, Ints, Ints]:
    """Rows of work that is no communication, after how many collectives each was launched, and how long it takes.

    Programs launch in the same order on every rank, while on the device work and collectives may overlap.
    """
    links, work, rows = run.recorded.links, run.recorded.trace.work, run.view.rows
    at = np.where(links.is_launched[rows], links.launched_at[rows], work.start[rows])
    talking = links.is_class("communication")[rows]
    begins, order = np.sort(at[talking]), np.argsort(at[~talking], kind="stable")
    rows, at = rows[~talking][order], at[~talking][order]
    return rows, np.searchsorted(begins, at), work.duration[rows]


def _launched_less(devices: Sequence[OnDevice], late: int) -> Intervals:
    """The host's time that the late rank needs more than the others, from the launch of one collective to the next."""
    edges, times = [], []
    for seen in devices:
        known = seen.run.calls.rows[seen.links.is_launched[seen.run.calls.rows]]
        begin, end = seen.run.bounds
        moments = np.clip(np.sort(seen.links.launched_at[known]), begin, end)
        edges.append(np.concatenate(([begin], moments, [end])))
        times.append(seen.steady.within(edges[-1][:-1], edges[-1][1:]))
    share = _more_than_others(times, late)
    return union(edges[late][1:] - np.ceil(share * times[late]).astype(np.int64), edges[late][1:])


def beyond_need(facts: TraceFacts) -> Removal | None:
    """The time of one operator's kernels beyond what the device needs for them."""
    limit = slowest_operator(facts.profile.limits)
    if limit is None:
        return None
    if not facts.devices:
        excess = round(limit.device_s * 1e9 * (1 - (limit.efficiency or 0.0)))
        return _serial(excess, limit.calls, limit.label)
    return Selection(kind="work", on_device=lambda seen: _beyond_need(seen, limit))(facts)


def _beyond_need(seen: OnDevice, limit: OperatorLimit) -> Taken:
    trace, links = seen.trace, seen.links
    operators = trace.operators
    names = [number for number in distinct(operators.name).tolist() if trace.names[number] == limit.name]
    shapes = [number for number, shape in enumerate(trace.shapes) if shape.dims == limit.dims]
    meant = np.isin(operators.name, names) & np.isin(operators.shape, shapes)
    rows = (links.operator >= 0) & ~links.by_graph
    rows[rows] = meant[links.operator[rows]]
    share = 1 - (limit.efficiency or 0.0)
    cut = (seen.run.cut(rows) * share).astype(np.int64)
    return Taken(round(seen.total(rows) * share), int(rows.sum()), limit.label, Without(work=cut))
