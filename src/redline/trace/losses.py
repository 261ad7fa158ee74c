"""What the steps lose time to, each loss by itself: how long it took, and how much earlier the steps would end without.

The second figure comes from playing the steps again (`replay`). Losses overlap: without a wait the host may have time for
a slow loader, so that removing either saves both. They are not to be added up.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from redline.model.fields import Frozen
from redline.trace.collectives import Calls, Waiting, calls_of, kind_of, waiting_of
from redline.trace.columns import Ints, Mask, Work
from redline.trace.host import WAITS_FOR_WORK, HostView, meanwhile, other_threads, picked
from redline.trace.idle import LAUNCH_GAP_NS
from redline.trace.intervals import NEVER, Intervals, both, gaps, joined, seconds, union, without
from redline.trace.links import matching
from redline.trace.names import short_name
from redline.trace.patterns import cold_kernels, launching, recomputed, strict_products, unfused_attention
from redline.trace.replay import DeviceRun, on_launching_threads, plain_time, stalls_of

LossCode = Literal[
    "data", "sync", "blocking-copy", "allocator", "warm-up", "cold", "stall", "no-work", "host", "launch", "dependency",
    "communication", "straggler", "copies", "attention", "layout", "fp32", "norm", "elementwise", "recompute",
]  # fmt: skip

_UPDATE = re.compile(r"^Optimizer\.step#")

FUSED_ATTENTION_SAVES = 0.6
FUSED_ELEMENTWISE_SAVES = 0.6
TENSOR_CORES_SAVE = 0.75
"""What doing it the better way usually saves of its time. Only the order of findings rests on these."""


class Loss(Frozen):
    code: LossCode
    seconds: float
    """How long the device waited for it, or worked at it."""
    saves_s: float
    """How much earlier the steps would end, as far as can be told."""
    most_s: float
    """They would not end earlier than by this much."""
    count: int
    """Pieces of work, or calls."""
    what: str = ""
    """What took most of it."""
    host_s: float = 0.0
    """Of work: the host's time, under the profiler, that goes with it where it is done in another way."""


@dataclass
class _Sum:
    ns: int = 0
    saved: int = 0
    most: int = 0
    count: int = 0
    what: str = ""
    longest: int = 0
    host: int = 0

    def add(self, ns: int, saved: int, most: int | None = None, count: int = 0, what: str = "", host: int = 0) -> None:
        self.ns += ns
        self.saved += saved
        self.most += max(saved, ns) if most is None else most
        self.count += count
        self.host += host
        if what and ns > self.longest:
            self.what, self.longest = what, ns


Sums: TypeAlias = defaultdict[LossCode, _Sum]
"""The losses of one device, or of all."""


def losses_of(runs: Sequence[DeviceRun]) -> tuple[list[Loss], list[Calls], Waiting]:
    """Of all devices together, the largest saving first; and the collectives, which some of them rest on."""
    calls = [calls_of(run.view) for run in runs]
    waiting = waiting_of(calls)
    each = []
    for run, own, waits in zip(runs, calls, waiting.waits, strict=True):
        each.append(sums := Sums(_Sum))
        _of_the_host(run, sums)
        _of_waits(run, sums)
        _of_communication(run, own, _exposed_waiting(own, waits) if waiting.from_ranks else 0, sums)
        _of_copies(run, sums)
        _of_work(run, sums)
    if waiting.late:
        _of_stragglers(runs, each, waiting.late, _share_saved(runs, calls, waiting.waits))
    if waiting.from_ranks:
        # Ranks go on together: what makes one of them faster may do as much for those that wait for it.
        for code in {code for sums in each for code in sums}:
            most = max(sums[code].most for sums in each)
            for sums in each:
                sums[code].most = most
    total = Sums(_Sum)
    for sums in each:
        for code, one in sums.items():
            total[code].add(one.ns, one.saved, max(one.most, one.saved), one.count, one.what, one.host)
    found = [
        Loss(
            code=code,
            seconds=seconds(one.ns),
            saves_s=seconds(one.saved),
            most_s=seconds(one.most),
            count=one.count,
            what=one.what,
            host_s=seconds(one.host),
        )
        for code, one in total.items()
        if one.ns or one.saved
    ]
    return sorted(found, key=lambda loss: -loss.saves_s), calls, waiting


def _of_the_host(run: DeviceRun, sums: Sums) -> None:
    host, replay, idle = run.host, run.replay, run.idle
    loading, warming = on_launching_threads(host, host.loader), on_launching_threads(host, host.warming_up)
    allocating = on_launching_threads(host, picked(host.trace.calls, host.allocating))
    plain = plain_time(run)
    every_wait = np.ones(len(replay.waits), np.bool_)
    every_stall = both(plain, stalls_of(host, run.bounds))
    stalls = without(every_stall, idle.when["sync"])
    stalled = both(idle.when["host"], stalls)
    steady = without(plain, stalls)
    if len(loading):
        sums["data"].add(idle.ns("data"), replay.saved(without_host=loading), count=len(host.loader))
    if len(allocating):
        saved = replay.saved(without_host=allocating)
        sums["allocator"].add(idle.ns("allocator"), saved, count=len(host.allocating))
    if len(warming):
        sums["warm-up"].add(idle.ns("warm-up"), replay.saved(without_host=warming), count=len(host.warming_up))
    if len(stalled):
        saved = replay.saved(without_host=stalls)
        doing = meanwhile(host, stalled)
        code: LossCode = "no-work" if WAITS_FOR_WORK.search(doing) else "stall"
        # Where a wait had let the device run dry, taking out either of the two is enough: both may save that time.
        most = replay.saved(without_host=every_stall)
        sums[code].add(stalled.total, saved, max(most, saved), len(stalls), doing)
    late = idle.ns("host") + idle.ns("latency") - both(idle.when["host"], stalls).total
    if late > 0:
        # What the host could make good without its waits is theirs.
        with_waits = replay.saved(without_host=steady)
        beyond = replay.saved(without_host=steady, without_waits=every_wait) - replay.saved(without_waits=every_wait)
        # A faster host would also start its loader and its waits earlier, which is not what is asked here.
        saved = min(max(beyond, 0), with_waits, late)
        beside = other_threads(host, without(idle.when["host"], stalls))
        # Fewer launches are fewer kernels too, with fewer gaps between them.
        most = max(replay.saved(without_host=steady, without_gaps=True), late)
        sums["host"].add(late, saved, most, count=len(replay.start), what=beside)
    if idle.ns("launch"):
        saved = replay.saved(without_gaps=True)
        sums["launch"].add(idle.ns("launch"), saved, max(saved, _short_gaps(run)), len(replay.start))
    other = idle.ns("dependency") + idle.ns("unknown")
    if other:
        sums["dependency"].add(other, other, _gaps_around(run, joined(idle.when["dependency"], idle.when["unknown"])))


def _gaps_around(run: DeviceRun, when: Intervals) -> int:
    """The whole gaps of which these are parts: what makes work wait makes its start late by all of it."""
    busy, (begin, over) = run.view.busy, run.bounds
    start, end = np.concatenate(([begin], busy.end)), np.concatenate((busy.start, [over]))
    return max(int((end - start)[when.within(start, end) > 0].sum()), when.total)


def _short_gaps(run: DeviceRun) -> int:
    """Between one kernel and the next: other work that runs beside such a gap may only be waiting for the kernels."""
    work, rows = run.recorded.trace.work, run.view.rows
    rows = rows[(work.kind[rows] == Work.KERNEL) & ~run.recorded.links.is_class("communication")[rows]]
    between = gaps(union(work.start[rows], work.end[rows]))
    length = between.end - between.start
    return int(length[length <= LAUNCH_GAP_NS].sum())


def _of_waits(run: DeviceRun, sums: Sums) -> None:
    """Calls that wait for the device. Copies among them are gone with their own work, which is not counted as copies."""
    host, replay, idle = run.host, run.replay, run.idle
    copies = host.copying[replay.waits]
    own = run.replay.shorter(run.view, _blocking_copies(run))
    for code, mask, work in (("blocking-copy", copies, own), ("sync", ~copies, None)):
        ns = int(idle.by_call[host.copying if code == "blocking-copy" else ~host.copying].sum())
        if ns or mask.any():
            copying = int(work.sum()) if work is not None else 0
            saved = replay.saved(without_waits=mask, without_work=work)
            # What the host did next while the device had run dry may have been there for the sake of the result.
            around = joined(_operators_around(host, replay.waits[mask]), idle.when["sync"], run.stalls_after_waits)
            most = replay.saved(without_waits=mask, without_work=work, without_host=around, closing_up=True)
            sums[code].add(ns + copying, saved, max(most, ns + copying), int(mask.sum()))  # type: ignore[index]


def _blocking_copies(run: DeviceRun) -> Mask:
    """Copies between host and device whose call blocks the host."""
    links = run.recorded.links
    return _moving(run) & links.is_launched & np.isin(links.call, run.host.blocking)


def _operators_around(host: HostView, calls: Ints) -> Intervals:
    operators = host.trace.operators
    rows = host.links.operators_of(calls)
    rows = rows[rows >= 0]
    return union(operators.start[rows], operators.end[rows])


def _of_communication(run: DeviceRun, calls: Calls, waited: int, sums: Sums) -> None:
    """`waited`: for other ranks, as far as their traces are known; that is theirs."""
    links, view, replay = run.recorded.links, run.view, run.replay
    talking = links.is_class("communication")
    exposed = run.time.exposed_communication
    if exposed:
        shorter = replay.shorter(view, talking)
        saved = replay.saved(without_work=shorter)
        # A host that waits for it, without the trace showing where, would be faster too: all of it at most.
        gone = launching(links, talking)
        most = max(replay.saved(without_work=shorter, without_host=gone, closing_up=True), exposed)
        sums["communication"].add(exposed - waited, max(saved - waited, 0), most, len(calls), _longest(run, talking))
        sums["straggler"].ns += waited


def gradient_reductions(runs: Sequence[DeviceRun], calls: Sequence[Calls]) -> int | None:
    """How often gradients are reduced for each step of the optimizer: more than once where accumulation forgets to wait.

    A backward pass reduces in one go; between two passes the main thread launches a forward.
    """
    found = [_reductions(run, own) for run, own in zip(runs, calls, strict=True)]
    return found[0] if found and len(set(found)) == 1 else None


def _reductions(run: DeviceRun, calls: Calls) -> int | None:
    host, links = run.host, run.recorded.links
    trace = host.trace
    updates = max(int(matching(trace, marks, _UPDATE).sum()) for marks in (trace.annotations, trace.operators))
    reduces = np.array([kind_of(one.name) in ("allreduce", "reducescatter") for one in calls.kinds], np.bool_)
    rows = calls.rows[reduces & links.is_launched[calls.rows]] if len(calls) else calls.rows
    rows = rows[trace.calls.thread[links.call[rows]] != host.main_thread]
    if not updates or not len(rows):
        return None
    launches = host.launching
    forward = np.sort(trace.calls.start[launches[trace.calls.thread[launches] == host.main_thread]])
    # How many launches of the main thread came before each: those of one backward pass share that number.
    _, passes = np.unique(np.searchsorted(forward, links.launched_at[rows]), return_counts=True)
    usual = np.bincount(passes).argmax()  # a pass that the window cuts has fewer
    return max(round(int((passes == usual).sum()) / updates), 1)


_WAITED_FOR: tuple[LossCode, ...] = (
    "data", "sync", "blocking-copy", "allocator", "warm-up", "stall", "no-work", "host", "launch", "dependency",
)  # fmt: skip


def _share_saved(runs: Sequence[DeviceRun], calls: Sequence[Calls], waits: Sequence[NDArray[np.float64]]) -> float:
    """How much of the ranks' waiting for each other they would save: where their hosts are late anyway, little."""
    waited = saved = 0
    for run, own, wait in zip(runs, calls, waits, strict=True):
        amount = np.zeros(len(run.recorded.trace.work), np.int64)
        amount[own.rows] = np.maximum(np.nan_to_num(wait) - own.hidden, 0).astype(np.int64)
        if amount.any():
            waited += int(amount.sum())
            saved += run.replay.saved(without_work=run.replay.shorter_by(run.view, amount))
    return min(saved / waited, 1.0) if waited else 1.0


def _of_stragglers(runs: Sequence[DeviceRun], each: Sequence[Sums], late: int, share_saved: float) -> None:
    """What all ranks lose when one is late: to its work where it has more of it, else to what made it late.

    A rank whose loader stalls is late because of its loader: there the others' waiting belongs.
    """
    latest = min(range(len(runs)), key=lambda index: each[index]["straggler"].ns)
    others = [index for index in range(len(runs)) if index != latest]
    worked = [run.time.busy - run.time.communication for run in runs]
    by_work = min(max(worked[latest] - int(np.mean([worked[index] for index in others])), 0), late)
    extra = {
        code: max(each[latest][code].ns - float(np.mean([each[index][code].ns for index in others])), 0.0)
        for code in _WAITED_FOR
    }
    whole = sum(extra.values())
    if not whole:
        by_work = late
    for index, sums in enumerate(each):
        talking = sums["communication"].most
        sums["straggler"].saved += int(by_work * share_saved)
        sums["straggler"].most += late + talking
        sums["straggler"].count += 1
        for code, more in extra.items():
            if more and index != latest:
                sums[code].saved += int((late - by_work) * share_saved * more / whole)
            if sums[code].ns or more:
                sums[code].most = max(sums[code].most, sums[code].saved) + late


def _of_copies(run: DeviceRun, sums: Sums) -> None:
    """Copies that no kernel runs beside, less those that block the host."""
    moving = _moving(run) & ~_blocking_copies(run)
    if not moving[run.view.rows].any():
        return
    shorter = run.replay.shorter(run.view, moving)
    exposed = min(int(shorter.sum()), run.time.exposed_copy)
    saved = run.replay.saved(without_work=shorter)
    gone = launching(run.recorded.links, moving)
    most = run.replay.saved(without_work=shorter, without_host=gone, closing_up=True)
    sums["copies"].add(exposed, saved, max(most, exposed), int(moving.sum()), _longest(run, moving))


def _exposed_waiting(calls: Calls, waits: NDArray[np.float64]) -> int:
    """Waiting comes first in a collective; what is computed beside it hides the waiting first."""
    known = np.nan_to_num(waits)
    return int(np.maximum(known - calls.hidden, 0).sum())


def _moving(run: DeviceRun) -> Mask:
    work = run.recorded.trace.work
    copying: Mask = work.kind == Work.COPY
    return run.view.moving.holds(work.start) & copying


def _of_work(run: DeviceRun, sums: Sums) -> None:
    links = run.recorded.links
    in_training = links.are(lambda name: name.is_training_norm).any()
    attention = unfused_attention(links)
    again = recomputed(links)
    found: list[tuple[LossCode, Mask, float]] = [
        ("attention", attention, FUSED_ATTENTION_SAVES),
        ("recompute", again, 1.0),
        ("layout", links.are(lambda name: name.converts_layout), 1.0),
        ("fp32", strict_products(links) & ~attention, TENSOR_CORES_SAVE),
        (
            "elementwise",
            links.are(lambda name: name.is_unfused) & ~attention & ~again,
            FUSED_ELEMENTWISE_SAVES,
        ),
    ]
    if not in_training:
        found.append(("norm", links.are(lambda name: name.is_fixed_norm), 1.0))
    for code, rows, share in found:
        _add_work(run, sums[code], rows, share, same_operators=code == "fp32", fewer_launches=code == "attention")
    cold = cold_kernels(run.recorded)
    excess = cold.excess[run.view.rows]
    if excess.any():
        saved, most = (
            run.replay.saved(without_work=run.replay.shorter_by(run.view, more)) for more in (cold.excess, cold.most)
        )
        if cold.tried.any():  # and the host that launches and times them
            every_wait = np.ones(len(run.replay.waits), np.bool_)
            most = run.replay.saved(
                without_work=run.replay.shorter_by(run.view, cold.most),
                without_host=launching(links, cold.tried),
                without_waits=every_wait,
            )
        sums["cold"].add(int(excess.sum()), saved, max(most, saved), cold.steps, _longest(run, cold.excess > 0))


def _add_work(
    run: DeviceRun, total: _Sum, rows: Mask, share: float, *, same_operators: bool, fewer_launches: bool
) -> None:
    """`same_operators`: the better way is another kernel of the same operator, which the host still has to call.

    `fewer_launches`: a host that is late gains by it as well; what a compiler fuses is named by the host's own finding there.
    """
    mine = rows[run.view.rows]
    if not mine.any():
        return
    replay, links = run.replay, run.recorded.links
    shorter = replay.shorter(run.view, rows)
    host = launching(links, rows)
    # Work that is gone need not be launched either; where it is only faster, most of its launches go all the same.
    most = replay.saved(without_work=shorter, without_host=host)
    partly = host.shortened(share) if fewer_launches else NEVER
    saved = most if share == 1.0 else replay.saved(without_work=(shorter * share).astype(np.int64), without_host=partly)
    ns = int(links.trace.work.duration[run.view.rows][mine].sum())
    goes = host.total
    if same_operators:
        calls, launches = links.trace.calls, links.call[run.view.rows[mine & links.is_launched[run.view.rows]]]
        goes = union(calls.start[launches], calls.end[launches]).total
    total.add(ns, saved, max(most, saved), int(mine.sum()), _longest(run, rows), goes)


def _longest(run: DeviceRun, rows: Mask) -> str:
    """The name that takes most of these rows' time."""
    work, names = run.recorded.trace.work, run.recorded.trace.names
    mine = run.view.rows[rows[run.view.rows]]
    if not len(mine):
        return ""
    numbers, which = np.unique(work.name[mine], return_inverse=True)
    total = np.zeros(len(numbers), np.int64)
    np.add.at(total, which, work.duration[mine])
    return short_name(names[int(numbers[total.argmax()])])
