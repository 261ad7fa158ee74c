"""This module says what each rule of the diagnosis removes from recorded steps, and what the steps save without it.

Where a device worked, the steps are played again without it. Where the host is the device nothing runs beside anything else, so
that what is removed is saved. A table of kernels has their names alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from redline.analyze.bound import HOST_BOUND_SHARE
from redline.analyze.finding import WORTH_A_LINE, Removal, words_of
from redline.analyze.generation import Generation
from redline.analyze.hardware import OperatorLimit, slowest_operator
from redline.model.units import format_bytes, format_seconds, format_share
from redline.trace.collectives import Calls, Waiting
from redline.trace.columns import Mask
from redline.trace.host import WAITS_FOR_WORK, HostView, NamedCause, meanwhile
from redline.trace.intervals import Intervals, both, distinct, joined, seconds, union, without
from redline.trace.names import Described, describe, short_name
from redline.trace.patterns import cold_kernels, recomputed, unfused_attention
from redline.trace.replay import NOTHING, Replay, Without
from redline.trace.selections import OnDevice, OnHost
from redline.trace.timeline import DeviceTime

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

Kind = Literal["wait", "work", "fused", "other"]
"""`wait`: the device had nothing to do. `work`: it was busy with this, and could be done sooner. `fused`: the same, and hardly
any time to launch it would be left."""


@dataclass(frozen=True)
class TraceFacts:
    """These are recorded steps, as rules look at them: their tables, and every device, or every host that is the device."""

    profile: Profile
    devices: Sequence[OnDevice] = ()
    hosts: Sequence[OnHost] = ()
    times: Sequence[DeviceTime] = ()
    calls: Sequence[Calls] = ()
    """These are the collectives of each."""
    waiting: Waiting | None = None

    @property
    def whole_s(self) -> float:
        return self.profile.whole_s

    @property
    def span_s(self) -> float:
        """The steps were this long under the profiler; `whole_s` is shorter where Redline also timed them without it."""
        return self.profile.timeline.span_s

    @cached_property
    def replay(self) -> Replay:
        return Replay([seen.run for seen in self.devices])

    @property
    def generation(self) -> Generation | None:
        """Returns what was measured of a generation without the profiler."""
        capture = self.profile.capture
        return self.profile.generation if capture is not None and capture.step_s and self.profile.steps else None

    def words(self, gone: Removal) -> Mapping[str, str]:
        profile, length, whole = self.profile, format_seconds(gone.seconds), self.profile.whole_work_s
        words = words_of(gone) | {
            "time": f"{length} ({gone.seconds / self.span_s:.0%} of the time)" if self.span_s else length,
            "idle": "the device is idle" if profile.has_device else "the model does not run for",
            "part": f"{length}, {gone.seconds / whole:.0%} of the device's work," if whole else "the device's work",
            "pieces": "kernels" if profile.has_device else "operators",
        }
        if (found := self.generation) is not None:
            words |= {
                "token": "n/a" if found.tpot_s is None else format_seconds(found.tpot_s.p50),
                "bytes": format_bytes(found.read_bytes),
                "read": format_seconds(found.read_s),
                "reached": format_share(found.bandwidth_share),
                "host": format_share(found.host_share),
                "prompt": format_share(1 - found.decode_share),
                "first": format_seconds(found.ttft_s),
            }
        return words

    def saves(self, saved_s: float, seconds: float, kind: Kind) -> float:
        """Returns what is saved by the replay of the recorded steps, corrected for the profiler, which slows the host down."""
        profile, capture = self.profile, self.profile.capture
        if capture is None or capture.step_s is None or not profile.steps or not profile.has_device or kind == "other":
            return saved_s
        if kind == "wait":
            # Without the profiler there may be less waiting than the trace shows.
            return min(saved_s, max(profile.wall_s - profile.timeline.busy_s, 0.0))
        # The host hides less work, and what it takes to launch the work is shorter.
        issue_s = 0.0 if kind == "fused" else (capture.least_issue_s or 0.0) * profile.steps.count
        return max(saved_s / max(self.span_s / profile.wall_s, 1.0), min(seconds, profile.wall_s - issue_s))


@dataclass(frozen=True)
class Taken:
    """This is the time that one device, or one host, loses to a cause."""

    ns: int
    """The device was waiting for this, or working at it, for so long."""
    count: int
    what: str = ""
    without: Without = NOTHING
    """The device is played without this."""
    also_ns: int = 0
    """On a host, time that is not of this cause and would go with it."""


@dataclass(frozen=True, kw_only=True)
class Selection:
    """This says what a rule removes: on devices, on hosts that are the device, and in tables that have only names."""

    kind: Kind
    on_device: Callable[[OnDevice], Taken] | None = None
    on_host: Callable[[OnHost], Taken] | None = None
    named: Callable[[Described], bool] | None = None

    def __call__(self, facts: TraceFacts) -> Removal | None:
        taken: list[Taken] = []
        saved = 0
        if facts.devices and self.on_device is not None:
            taken = [self.on_device(seen) for seen in facts.devices]
            saved = facts.replay.saved([one.without for one in taken])
        elif facts.hosts and self.on_host is not None:
            taken = [self.on_host(seen) for seen in facts.hosts]
            saved = sum(one.ns + one.also_ns for one in taken)
        elif self.named is not None and not facts.devices and not facts.hosts:
            rows = [row for row in facts.profile.kernels if self.named(describe(row.name))]
            taken = [Taken(round(row.total_s * 1e9), row.calls, short_name(row.name)) for row in rows]
            saved = sum(one.ns for one in taken)
        total_s = seconds(sum(one.ns for one in taken))
        if not total_s and not saved:
            return None
        most, count = max(taken, key=lambda one: one.ns), sum(one.count for one in taken)
        return Removal(
            saves_s=facts.saves(seconds(saved), total_s, self.kind), seconds=total_s, count=count, what=most.what
        )


Removes = Callable[[TraceFacts], Removal | None]


def only_if(holds: Callable[[Profile], bool], removes: Removes) -> Removes:
    return lambda facts: removes(facts) if holds(facts.profile) else None


def unless_cleared(removes: Removes) -> Removes:
    """Removes what the host is late with, unless steps without the profiler show that it keeps up: only recording made it late."""

    def late(facts: TraceFacts) -> Removal | None:
        removal = None if _is_cleared(facts) else removes(facts)
        return removal if removal is not None and removal.seconds >= WORTH_A_LINE * facts.span_s else None

    return late


def _is_cleared(facts: TraceFacts) -> bool:
    profile, capture = facts.profile, facts.profile.capture
    if capture is None:
        return False
    if profile.has_device:
        return capture.issue_share is not None and capture.issue_share <= HOST_BOUND_SHARE
    # Operators that really work take no less time without the profiler than with it.
    worked_s = profile.timeline.busy_s - seconds(sum(seen.calling for seen in facts.hosts))
    return capture.step_s is not None and profile.wall_s - worked_s < WORTH_A_LINE * profile.wall_s


# The host's time


def named(cause: NamedCause) -> Selection:
    """Removes the time in which the host is in one kind of call or mark."""

    def on_device(seen: OnDevice) -> Taken:
        return Taken(seen.run.idle.ns(cause), len(seen.view.named[cause]), without=Without(host=seen.named[cause]))

    def on_host(seen: OnHost) -> Taken:
        return Taken(seen.named[cause].total, int(seen.named[cause].holds(seen.view.named[cause].start).sum()))

    return Selection(kind="wait", on_device=on_device, on_host=on_host)


def stalls(*, for_work: bool) -> Selection:
    """Pauses far longer than usual; `for_work`: those in which the program waits for something to do."""

    def taken(host: HostView, stalled: Intervals, gone: Without = NOTHING) -> Taken:
        doing = meanwhile(host, stalled) if len(stalled) else ""
        is_meant = bool(WAITS_FOR_WORK.search(doing)) == for_work
        return Taken(stalled.total, len(stalled), doing, gone) if is_meant else Taken(0, 0)

    def on_device(seen: OnDevice) -> Taken:
        gone = Without(host=seen.own_stalls, waits=seen.waits_into_stalls)
        return taken(seen.view, both(seen.run.idle.when["host"], seen.own_stalls), gone)

    return Selection(kind="wait", on_device=on_device, on_host=lambda seen: taken(seen.view, seen.stalls))


def late_host(seen: OnDevice) -> Taken:
    """Fewer launches also have fewer gaps between them."""
    late = seen.run.idle.when["host"]
    ns = joined(late, seen.run.idle.when["latency"]).total - both(late, seen.stalls).total
    gone = Without(host=seen.steady, gaps=~seen.links.by_graph if ns else None)
    return Taken(ns, len(seen.run.view.rows), without=gone)


def python(seen: OnHost) -> Taken:
    """A compiler takes the calls of operators away together with the Python between them."""
    return Taken(without(seen.python, seen.reading).total, len(seen.python), also_ns=seen.calling)


def waits(*, copies: bool) -> Callable[[OnDevice], Taken]:
    """Takes away the waits with the operators that make them, and what the host does after them for their sake."""

    def on_device(seen: OnDevice) -> Taken:
        calls = seen.waits & (seen.view.copying == copies)
        rows = seen.blocking_copies & copies
        host = joined(seen.making(calls), without(seen.after(calls), seen.own_stalls))
        gone = Without(host=host, waits=calls, work=seen.run.cut(rows))
        return Taken(int(seen.run.idle.by_call[calls].sum()) + seen.total(rows), int(calls.sum()), without=gone)

    return on_device


def reading(seen: OnHost) -> Taken:
    """Removes the operators whose work is to turn tensors into numbers one by one, with the Python that is around them."""
    rows, parent = seen.numbers_read, seen.links.nesting.parent
    return Taken(seen.reading.total, int((rows & ~(rows[parent] & (parent >= 0))).sum()), seen.longest(rows))


def launch_gaps(seen: OnDevice) -> Taken:
    every = np.ones(len(seen.trace.work), np.bool_)
    return Taken(seen.run.idle.ns("launch"), len(seen.run.view.rows), without=Without(gaps=every))


def late_work(seen: OnDevice) -> Taken:
    return Taken(seen.run.idle.ns("dependency", "unknown"), 0, without=Without(delays=True))


# Work


def rows_of(seen: OnDevice, rows: Mask, *, launches: bool = True) -> Taken:
    """These rows of device work; `launches`: with what launches them."""
    host = seen.launching(rows) if launches else NOTHING.host
    count = int(rows[seen.run.view.rows].sum())
    return Taken(seen.total(rows), count, seen.longest(rows), Without(work=seen.run.cut(rows), host=host))


def copies_alone(seen: OnDevice) -> Taken:
    """Removes the copies that are between the host and the device, beside which no kernel runs."""
    found = rows_of(seen, seen.run.view.moves & ~seen.blocking_copies)
    return replace(found, ns=min(found.ns, seen.run.time.exposed_copy))


def unfused(seen: OnDevice) -> Taken:
    """Kernels that take no longer than starting them takes are not bound by memory. What the device has to wait for while they are
    launched is the host's own finding."""
    rows = seen.links.are(lambda name: name.is_unfused) & (seen.trace.work.duration > seen.run.latency_ns)
    found = rows_of(seen, rows & ~unfused_attention(seen.links) & ~recomputed(seen.links))
    return replace(found, without=replace(found.without, host=both(found.without.host, seen.run.view.busy)))


def cold(seen: OnDevice) -> Taken:
    """Removes the time by which kernels are slower in the first steps, with the host that launches and times the algorithms it compares."""
    cold, table = cold_kernels(seen.run.recorded), seen.trace.operators
    by = distinct(seen.links.operator[cold.tried])
    comparing = union(table.start[by], table.end[by]).holds(seen.trace.calls.start)
    gone = Without(work=cold.excess, host=seen.launching(cold.tried), waits=seen.waits & comparing)
    excess = int(cold.excess[seen.run.view.rows].sum())
    return Taken(excess, cold.steps, seen.longest(cold.excess > 0), gone if excess else NOTHING)


def operators(select: Callable[[OnHost], Mask]) -> Callable[[OnHost], Taken]:
    """Removes operators with what is there to prepare their work and with the Python beside them. Those that a checkpoint runs again have
    a rule of their own."""

    def on_host(seen: OnHost) -> Taken:
        meant = select(seen)
        rows = seen.with_helpers(meant) & ~seen.again
        total = int(seen.own_ns[rows].sum())
        return Taken(total, int(meant.sum()), seen.longest(rows), also_ns=seen.python_beside(meant) if total else 0)

    return on_host


def again(seen: OnHost) -> Taken:
    """Removes the operators that are run again by a checkpoint, with the Python that calls them."""
    rows = seen.again
    return Taken(int(seen.own_ns[rows].sum()), int(rows.sum()), seen.longest(rows), also_ns=seen.around(rows))


def written_out(seen: OnHost) -> Mask:
    """Elementwise operators that do not belong to attention and take longer than being called."""
    return seen.with_name(lambda name: name.is_unfused) & ~seen.attention & seen.is_work


def copying(seen: OnHost) -> Mask:
    """Returns which operators move values and compute nothing; turning one layout into another has a rule of its own."""
    moving = seen.with_name(
        lambda name: name.kernel_class == "copy" and not name.converts_layout and not name.is_unfused
    )
    return moving & ~seen.attention & seen.is_work


def of_names(is_meant: Callable[[Described], bool]) -> Selection:
    """Work whose name tells what is meant."""
    return Selection(
        kind="work",
        on_device=lambda seen: rows_of(seen, seen.links.are(is_meant)),
        on_host=operators(lambda seen: seen.with_name(is_meant)),
        named=is_meant,
    )


def trains_norms(profile: Profile) -> bool:
    """Returns true if a batch-norm is updating its statistics: then none of them are fixed, whatever the other names say."""
    return any(describe(row.name).is_training_norm for row in profile.rows)


# The next removals are about communication, ranks that wait for each other, and single operators.


def exchanges(facts: TraceFacts) -> Removal | None:
    """Communication that nothing is computed beside. Ranks whose traces are given still wait for each other."""
    if not facts.devices:
        return _serial(_exposed(facts) - _waited_on_hosts(facts), facts)

    def on_device(seen: OnDevice) -> Taken:
        found = rows_of(seen, seen.links.is_class("communication"))
        return replace(found, ns=seen.run.time.exposed_communication, count=len(seen.run.calls))

    return Selection(kind="other", on_device=on_device)(facts)


def _exposed(facts: TraceFacts) -> int:
    return sum(time.exposed_communication for time in facts.times)


def _serial(ns: int, facts: TraceFacts, what: str = "") -> Removal:
    return Removal(saves_s=seconds(ns), seconds=seconds(ns), count=sum(map(len, facts.calls)), what=what)


def _waited_on_hosts(facts: TraceFacts) -> int:
    """Return how long hosts that are the devices wait for each other while nothing computes."""
    waits = facts.waiting.waits if facts.waiting is not None and facts.waiting.stragglers else ()
    return min(sum(map(_exposed_waits, facts.calls, waits)), _exposed(facts))


def _exposed_waits(calls: Calls, waits: NDArray[np.float64]) -> int:
    return int(np.maximum(np.nan_to_num(waits) - calls.hidden, 0).sum())


def straggler(facts: TraceFacts) -> Removal | None:
    """Removes the waits for the rank that is last: it would be as fast as the others are on average."""
    waiting, runs = facts.waiting, [seen.run for seen in facts.devices]
    if waiting is None or not waiting.stragglers:
        return None
    worst = waiting.stragglers[0]
    if not runs:
        return _serial(_waited_on_hosts(facts), facts, worst.label)
    gone = [Without(is_awaited=run.calls.label != worst.label) for run in runs]
    saved_s = seconds(facts.replay.saved(gone)) * len(runs) / (len(runs) - 1)
    exposed = sum(map(_exposed_waits, facts.calls, waiting.waits))
    return Removal(saves_s=saved_s, seconds=seconds(exposed), count=worst.last, what=worst.label)


def beyond_need(facts: TraceFacts) -> Removal | None:
    """Removes the time of one operator's kernels beyond what the device needs for them."""
    limit = slowest_operator(facts.profile.limits)
    if limit is None:
        return None
    if facts.devices:
        return Selection(kind="work", on_device=lambda seen: _beyond_need(seen, limit))(facts)
    excess_s = limit.device_s * (1 - (limit.efficiency or 0.0))
    return Removal(saves_s=excess_s, seconds=excess_s, count=limit.calls, what=limit.label)


def _beyond_need(seen: OnDevice, limit: OperatorLimit) -> Taken:
    trace, links, share = seen.trace, seen.links, 1 - (limit.efficiency or 0.0)
    name = [number for number in distinct(trace.operators.name).tolist() if trace.names[number] == limit.name]
    shapes = [number for number, shape in enumerate(trace.shapes) if shape.dims == limit.dims]
    meant = np.isin(trace.operators.name, name) & np.isin(trace.operators.shape, shapes)
    rows = np.append(meant, False)[links.operator] & ~links.by_graph
    cut = (seen.run.cut(rows) * share).astype(np.int64)
    return Taken(round(seen.total(rows) * share), int(rows.sum()), limit.label, Without(work=cut))


# Generation


def decoding(holds: Callable[[Generation], bool], share: Callable[[Generation], float]) -> Removes:
    """`share`: of a generation's time, what would be gone."""

    def removes(facts: TraceFacts) -> Removal | None:
        found = facts.generation
        saves_s = facts.profile.wall_s * max(share(found), 0.0) if found is not None and holds(found) else 0.0
        return Removal(saves_s=saves_s, seconds=saves_s)

    return removes


def beyond_reading(found: Generation) -> float:
    return found.decode_share * (1 - (found.bandwidth_share or 0.0))


def is_slow(found: Generation) -> bool:
    """Returns true if its tokens are slower than reading what they need, though the host issues them in time."""
    told = found.tpot_s is not None and found.read_s is not None
    return told and not found.reads_all_the_time and (found.host_share or 0.0) <= HOST_BOUND_SHARE


def is_late(found: Generation) -> bool:
    """Returns true if they are as slow because the host is late."""
    told = found.tpot_s is not None and found.read_s is not None
    return told and not found.reads_all_the_time and (found.host_share or 0.0) > HOST_BOUND_SHARE
