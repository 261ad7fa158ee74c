"""What each cause costs: the recorded steps played again without it, or added up where the host is the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from redline.analyze.hardware import OperatorLimit, slowest_operator
from redline.model.fields import Frozen
from redline.trace.classes import Described, describe
from redline.trace.collectives import Calls, Waiting, host_calls, waiting_of
from redline.trace.columns import Ints, Mask
from redline.trace.host import WAITS_FOR_WORK, meanwhile, other_threads
from redline.trace.intervals import both, distinct, joined, seconds, union, without
from redline.trace.kernels import KernelRow
from redline.trace.names import short_name
from redline.trace.patterns import cold_kernels, recomputed, strict_products, unfused_attention
from redline.trace.replay import NOTHING, DeviceRun, Replay, Without
from redline.trace.selections import OnDevice, OnHost
from redline.trace.timeline import DeviceTime

Kind = Literal["wait", "work", "other"]
"""`wait`: the device had nothing to do. `work`: the device was busy with it, and could be done sooner."""


class Cost(Frozen):
    code: str
    seconds: float
    """How long the device waited for it, or worked at it."""
    saves_s: float
    """How much earlier the steps would end without it."""
    count: int
    """Pieces of work, or calls."""
    what: str = ""
    """What took most of it."""
    kind: Kind = "other"


@dataclass(frozen=True)
class Removal:
    """What one cause stands for on one device."""

    without: Without
    ns: int
    """How long the device waited for it, or worked at it."""
    count: int
    what: str = ""
    code: str = ""
    """Where it is another than the rule's own."""


def _data(seen: OnDevice) -> Removal:
    return Removal(Without(host=seen.loading), seen.run.idle.ns("data"), len(seen.run.host.loader))


def _warm_up(seen: OnDevice) -> Removal:
    return Removal(Without(host=seen.warming_up), seen.run.idle.ns("warm-up"), len(seen.run.host.warming_up))


def _allocator(seen: OnDevice) -> Removal:
    return Removal(Without(host=seen.allocating), seen.run.idle.ns("allocator"), len(seen.run.host.allocating))


def _stall(seen: OnDevice) -> Removal:
    stalls = seen.own_stalls
    stalled = both(seen.run.idle.when["host"], stalls)
    doing = meanwhile(seen.run.host, stalled) if len(stalled) else ""
    code = "no-work" if WAITS_FOR_WORK.search(doing) else "host-stall"
    return Removal(Without(host=stalls), stalled.total, len(stalls), doing, code=code)


def _host(seen: OnDevice) -> Removal:
    """Fewer launches also have fewer gaps between them."""
    run = seen.run
    own = joined(run.idle.when["host"], run.idle.when["latency"])
    late = own.total - both(run.idle.when["host"], seen.stalls).total
    beside = other_threads(run.host, both(run.idle.when["host"], seen.steady))
    gaps = ~seen.links.by_graph if late else None
    return Removal(Without(host=seen.steady, gaps=gaps), late, len(run.view.rows), beside)


def _waits(seen: OnDevice, *, copies: bool) -> Removal:
    """The waits with the operators that make them, and what the host does after them for their sake."""
    calls = seen.waits(copies=copies)
    work = seen.run.cut(seen.blocking_copies) if copies else None
    copied = seen.total(seen.blocking_copies) if copies else 0
    around = both(seen.operators_around(calls), joined(seen.plain, seen.warming_up))
    host = joined(around, seen.claimed(calls))
    blocked = int(seen.run.idle.by_call[calls].sum())
    return Removal(Without(host=host, waits=calls, work=work), blocked + copied, int(calls.sum()))


def _synchronisation(seen: OnDevice) -> Removal:
    return _waits(seen, copies=False)


def _blocking_copy(seen: OnDevice) -> Removal:
    return _waits(seen, copies=True)


def _launch_gaps(seen: OnDevice) -> Removal:
    every = np.ones(len(seen.trace.work), np.bool_)
    return Removal(Without(gaps=every), seen.run.idle.ns("launch"), len(seen.run.view.rows))


def _dependency(seen: OnDevice) -> Removal:
    idle = seen.run.idle
    return Removal(Without(delays=True), idle.ns("dependency") + idle.ns("unknown"), 0)


def _communication(seen: OnDevice) -> Removal:
    """Ranks whose traces are given still wait for each other."""
    rows = seen.talking
    gone = Without(work=seen.run.cut(rows), host=seen.launching(rows))
    return Removal(gone, seen.run.time.exposed_communication, len(seen.run.calls), seen.longest(rows))


def _copies(seen: OnDevice) -> Removal:
    rows = seen.moving & ~seen.blocking_copies
    gone = Without(work=seen.run.cut(rows), host=seen.launching(rows))
    exposed = min(seen.total(rows), seen.run.time.exposed_copy)
    return Removal(gone, exposed, int(rows.sum()), seen.longest(rows))


def _work(seen: OnDevice, rows: Mask, *, launches: bool) -> Removal:
    """`launches`: whether what launches the work goes with it."""
    host = seen.launching(rows) if launches else NOTHING.host
    return Removal(
        Without(work=seen.run.cut(rows), host=host),
        seen.total(rows),
        int(rows[seen.run.view.rows].sum()),
        seen.longest(rows),
    )


def _attention(seen: OnDevice) -> Removal:
    return _work(seen, unfused_attention(seen.links), launches=True)


def _recompute(seen: OnDevice) -> Removal:
    return _work(seen, recomputed(seen.links), launches=True)


def _layout(seen: OnDevice) -> Removal:
    return _work(seen, seen.links.are(lambda name: name.converts_layout), launches=True)


def _fp32(seen: OnDevice) -> Removal:
    return _work(seen, strict_products(seen.links) & ~unfused_attention(seen.links), launches=False)


def _norm(seen: OnDevice) -> Removal:
    in_training = seen.links.are(lambda name: name.is_training_norm).any()
    return _work(seen, seen.links.are(lambda name: name.is_fixed_norm) & ~in_training, launches=True)


def _elementwise(seen: OnDevice) -> Removal:
    """Kernels that take no longer than starting them takes are not bound by memory. What the device has to wait for while they are
    launched is the host's own finding."""
    rows = seen.links.are(lambda name: name.is_unfused) & (seen.trace.work.duration > seen.run.latency.ns)
    rows &= ~unfused_attention(seen.links) & ~recomputed(seen.links)
    host = both(seen.launching(rows), seen.run.view.busy)
    return replace(_work(seen, rows, launches=False), without=Without(work=seen.run.cut(rows), host=host))


def _cold(seen: OnDevice) -> Removal:
    cold = cold_kernels(seen.run.recorded)
    gone = Without(work=cold.most)
    if cold.tried.any():  # and the host that launches and times them
        operators = distinct(seen.links.operator[cold.tried & (seen.links.operator >= 0)])
        table, calls = seen.trace.operators, seen.trace.calls
        tried = union(table.start[operators], table.end[operators]).holds(calls.start)
        gone = Without(work=cold.most, host=seen.launching(cold.tried), waits=seen.every_wait & tried)
    excess = int(cold.excess[seen.run.view.rows].sum())
    return Removal(gone, excess, cold.steps, seen.longest(cold.excess > 0))


ON_DEVICE: dict[str, Callable[[OnDevice], Removal]] = {
    "data-wait": _data,
    "warm-up": _warm_up,
    "allocator": _allocator,
    "host-stall": _stall,
    "host-bound": _host,
    "sync-in-loop": _synchronisation,
    "blocking-copy": _blocking_copy,
    "launch-bound": _launch_gaps,
    "dependency": _dependency,
    "communication-bound": _communication,
    "copy-bound": _copies,
    "attention": _attention,
    "recompute": _recompute,
    "layout-conversions": _layout,
    "fp32-matmul": _fp32,
    "batch-norm-eval": _norm,
    "elementwise": _elementwise,
    "cold-start": _cold,
}
"""For each rule, what it removes from one device's steps."""

_WORK = frozenset(
    (
        "attention",
        "recompute",
        "layout-conversions",
        "fp32-matmul",
        "batch-norm-eval",
        "elementwise",
        "copies",
        "slow-kernel",
    )
)
_BUSY = frozenset(("blocking-copy", "communication-bound", "straggler", "copy-bound", "cold-start"))


def kind_of(code: str) -> Kind:
    return "work" if code in _WORK else "other" if code in _BUSY else "wait"


def device_costs(runs: Sequence[DeviceRun], limits: Sequence[OperatorLimit]) -> tuple[list[Cost], Waiting]:
    """Of all devices together. `limits`: operators against what the device can do."""
    replay, seen = Replay(runs), [OnDevice(run) for run in runs]
    waiting = waiting_of([run.calls for run in runs])
    found = []
    for code, removes in ON_DEVICE.items():
        found.append(_played(code, replay, [removes(one) for one in seen]))
    slowest = slowest_operator(limits)
    if slowest is not None:
        found.append(_played("slow-kernel", replay, [_beyond_need(one, slowest) for one in seen]))
    if waiting.stragglers:
        found.append(_straggler(replay, runs, waiting))
    return [cost for cost in found if cost is not None], waiting


def _beyond_need(seen: OnDevice, limit: OperatorLimit) -> Removal:
    """The time of one operator's kernels beyond what the device needs for them."""
    trace, links = seen.trace, seen.links
    operators = trace.operators
    names = [number for number in distinct(operators.name).tolist() if trace.names[number] == limit.name]
    shapes = [number for number, shape in enumerate(trace.shapes) if shape.dims == limit.dims]
    meant = np.isin(operators.name, names) & np.isin(operators.shape, shapes)
    rows = (links.operator >= 0) & ~links.by_graph
    rows[rows] = meant[links.operator[rows]]
    share = 1 - (limit.efficiency or 0.0)
    cut = (seen.run.cut(rows) * share).astype(np.int64)
    return Removal(Without(work=cut), round(seen.total(rows) * share), int(rows.sum()), limit.label)


def _played(code: str, replay: Replay, removals: Sequence[Removal]) -> Cost | None:
    total = sum(one.ns for one in removals)
    if not total and not any(one.count for one in removals):
        return None
    saved = replay.saved([one.without for one in removals])
    longest = max(removals, key=lambda one: one.ns)
    return Cost(
        code=longest.code or code,
        seconds=seconds(total),
        saves_s=seconds(saved),
        count=sum(one.count for one in removals),
        what=longest.what,
        kind=kind_of(code),
    )


def _straggler(replay: Replay, runs: Sequence[DeviceRun], waiting: Waiting) -> Cost | None:
    """The work that the rank which comes last has more of than the others, from one collective to the next."""
    worst = waiting.stragglers[0]
    late = [run.calls.label for run in runs].index(worst.label)
    windows = [_by_window(run) for run in runs]
    count = max(len(run.calls) for run in runs) + 1
    worked = np.array([np.bincount(window, work, count) for _, window, work in windows])
    others = np.delete(worked, late, axis=0).mean(axis=0)
    share = np.where(worked[late] > 0, np.maximum(1 - others / np.maximum(worked[late], 1), 0), 0)
    rows, window, work = windows[late]
    cut = np.zeros(len(runs[late].recorded.trace.work), np.int64)
    cut[rows] = np.ceil(share[window] * work)
    own_cut = Without(work=cut, gaps=cut > 0)  # less work also has fewer gaps in it
    gone = [own_cut if at == late else NOTHING for at in range(len(runs))]
    waited = [np.nan_to_num(waits) for waits in waiting.waits]
    exposed = sum(int(np.maximum(own - run.calls.hidden, 0).sum()) for own, run in zip(waited, runs, strict=True))
    return Cost(code="straggler", seconds=seconds(exposed), saves_s=seconds(replay.saved(gone)), count=worst.last)


def _by_window(run: DeviceRun) -> tuple[Ints, Ints, Ints]:
    """Rows of work that is no communication, after how many collectives each starts, and how long it takes."""
    work, talking = run.recorded.trace.work, run.recorded.links.is_class("communication")
    rows = run.view.rows[~talking[run.view.rows]]
    return rows, np.searchsorted(run.calls.start, work.start[rows]), work.duration[rows]


def host_costs(
    seen: Sequence[OnHost], times: Sequence[DeviceTime], limits: Sequence[OperatorLimit]
) -> tuple[list[Cost], list[Calls], Waiting]:
    """Where hosts are the devices: what each loses by itself, to communication and to the others; and their collectives."""
    calls = [host_calls(one.links) for one in seen]
    waiting = waiting_of(calls)
    found: dict[str, Cost] = {}
    for one in seen:
        # One that launches work of which nothing was recorded is not the device.
        for cost in _on_host(one) if not one.view.launched else ():
            _add(found, cost)
    slowest = slowest_operator(limits)
    if slowest is not None and not any(one.view.launched for one in seen):
        excess = round(slowest.device_s * 1e9 * (1 - (slowest.efficiency or 0.0)))
        _add(found, _serial("slow-kernel", excess, slowest.calls, slowest.label))
    exposed = sum(time.exposed_communication for time in times)
    waits = [
        np.nan_to_num(one) if waiting.from_ranks else np.zeros(len(own))
        for own, one in zip(calls, waiting.waits, strict=True)
    ]
    waited = min(
        sum(int(np.maximum(one - own.hidden, 0).sum()) for own, one in zip(calls, waits, strict=True)), exposed
    )
    count = sum(map(len, calls))
    if exposed:
        _add(found, _serial("communication-bound", exposed - waited, count))
    if waited and waiting.late:
        _add(found, _serial("straggler", waited, count))
    return list(found.values()), calls, waiting


def _add(found: dict[str, Cost], more: Cost) -> None:
    so_far = found.get(more.code)
    if so_far is not None:
        longer = so_far if so_far.seconds >= more.seconds else more
        more = Cost(
            code=more.code,
            seconds=so_far.seconds + more.seconds,
            saves_s=so_far.saves_s + more.saves_s,
            count=so_far.count + more.count,
            what=longer.what,
            kind=more.kind,
        )
    found[more.code] = more


def _serial(code: str, ns: int, count: int, what: str = "", *, beside: int = 0) -> Cost:
    """`beside`: what goes with it."""
    return Cost(
        code=code, seconds=seconds(ns), saves_s=seconds(ns + beside), count=count, what=what, kind=kind_of(code)
    )


def _on_host(seen: OnHost) -> list[Cost]:
    doing = meanwhile(seen.view, seen.stalls) if len(seen.stalls) else ""
    stalled = "no-work" if WAITS_FOR_WORK.search(doing) else "host-stall"
    entered = int(seen.loading.holds(seen.view.loader.start).sum())
    read = seen.with_helpers(seen.numbers_read)
    in_python = without(seen.python, seen.reading).total
    found = [
        _serial("data-wait", seen.loading.total, entered),
        _serial("warm-up", seen.warming_up.total, len(seen.warming_up)),
        _serial(stalled, seen.stalls.total, len(seen.stalls), doing),
        # A compiler takes the calls of operators away together with the Python between them.
        _serial("host-bound", in_python, len(seen.python), beside=seen.calling),
        _serial(
            "sync-in-loop", seen.reading.total, _outermost(seen, seen.numbers_read), seen.longest(seen.numbers_read)
        ),
    ]
    again, attention = seen.again, seen.attention
    fixed = seen.named(lambda name: name.is_fixed_norm) & ~seen.named(lambda name: name.is_training_norm).any()
    elementwise = seen.named(lambda name: name.is_unfused) & ~attention & ~read
    work: list[tuple[str, Mask, int]] = [
        ("attention", attention, seen.python_beside(attention)),
        ("recompute", again, seen.around(again)),
        ("layout-conversions", seen.named(lambda name: name.converts_layout), 0),
        ("batch-norm-eval", fixed, 0),
        ("elementwise", elementwise, seen.python_beside(elementwise)),
        ("copies", _copying(seen) & ~attention & ~elementwise & ~read, 0),
    ]
    for code, named, beside in work:
        rows = seen.with_helpers(named) & (again if code == "recompute" else ~again)
        total = int(seen.own_ns[rows].sum())
        found.append(_serial(code, total, int(named.sum()), seen.longest(rows), beside=beside if total else 0))
    return [cost for cost in found if cost.seconds]


def _outermost(seen: OnHost, rows: Mask) -> int:
    parent = seen.links.nesting.parent
    return int((rows & ~(rows[np.maximum(parent, 0)] & (parent >= 0))).sum())


def _copying(seen: OnHost) -> Mask:
    """Operators that move values and compute nothing; turning one layout into another has a rule of its own."""
    return seen.named(lambda name: name.kernel_class == "copy" and not name.converts_layout)


def table_costs(kernels: Sequence[KernelRow]) -> list[Cost]:
    """From a table of kernels alone, by their names."""
    in_training = any(describe(row.name).is_training_norm for row in kernels)
    rules: dict[str, Callable[[Described], bool]] = {
        "layout-conversions": lambda name: name.converts_layout,
        "fp32-matmul": lambda name: name.is_strict_fp32,
        "elementwise": lambda name: name.is_unfused,
        "batch-norm-eval": lambda name: name.is_fixed_norm and not in_training,
    }
    found = []
    for code, is_meant in rules.items():
        meant = [row for row in kernels if is_meant(describe(row.name))]
        total = sum(row.total_s for row in meant)
        if total:
            top = short_name(max(meant, key=lambda row: row.total_s).name)
            count = sum(row.calls for row in meant)
            found.append(Cost(code=code, seconds=total, saves_s=total, count=count, what=top, kind="work"))
    return found
