"""The ranks of a profile: the time of each, which of them the others waited for, and what it did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import numpy as np

from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.units import format_seconds
from redline.trace.classes import class_of
from redline.trace.collectives import Waiting
from redline.trace.columns import Trace, Work
from redline.trace.idle import Idle, idle_of
from redline.trace.intervals import seconds
from redline.trace.kernels import NamedTime, times_by_name
from redline.trace.links import Links, matching
from redline.trace.operators import class_times
from redline.trace.replay import DeviceRun
from redline.trace.selections import OnHost
from redline.trace.timeline import ANNOTATED, DeviceTime, Timeline, timeline_of

NOTED = 0.02
"""Of its own time: when the others wait less than this for a rank, it is not called slow."""
EXPLAINS = 0.2
"""Of the waiting: what differs by less does not explain it."""
CAUSES = {
    "host": "its host is late with launches: Python, or operators",
    "sync": "its host waits for the device",
    "data": "its data loader",
    "allocator": "its host takes memory from the driver or gives it back",
    "warm-up": "its host loads code or compiles",
    "latency": "its launches come late",
    "launch": "the gaps between its kernels",
    "dependency": "another of its streams",
    "unknown": "nothing that the trace shows",
}


class SlowestRank(Frozen):
    """The rank that the others waited for."""

    label: str
    waited_s: float
    """How long the others waited for it, on average over them."""
    why: Note


@dataclass(frozen=True)
class RankWork:
    """What one rank did."""

    label: str
    time: DeviceTime
    names: dict[str, NamedTime]
    """Kernels, or operators where the host is the device, without communication."""
    idle: dict[str, float]
    """In nanoseconds, by cause; of a host, by the annotation around it."""
    on_device: bool


def works_of(runs: Sequence[DeviceRun], links: Sequence[Links], times: Sequence[DeviceTime]) -> list[RankWork]:
    """One for each device; without devices one for each host, whose `times` are given."""
    if runs:
        return [
            RankWork(
                label=run.recorded.trace.label,
                time=run.time,
                names=_computing(times_by_name([run.recorded.trace], [Work.KERNEL])),
                idle={cause: float(run.idle.ns(cause)) for cause in run.idle.when},
                on_device=True,
            )
            for run in runs
        ]
    return [
        RankWork(each.trace.label, time, _computing(class_times([each])), _annotated(each.trace), on_device=False)
        for each, time in zip(links, times, strict=True)
    ]


def _computing(times: Sequence[NamedTime]) -> dict[str, NamedTime]:
    return {each.name: each for each in times if class_of(each.name) != "communication"}


def _annotated(trace: Trace) -> dict[str, float]:
    """Time in each annotation, whatever is inside it; collectives and the profiler's own steps are left out."""
    table = trace.annotations
    found: Counter[str] = Counter()
    for row in np.flatnonzero(~matching(trace, table, ANNOTATED)).tolist():
        name = trace.names[table.name[row]]
        if not name.startswith("ProfilerStep"):
            found[name] += int(table.end[row] - table.start[row])
    return {name: float(total) for name, total in found.items()}


def slowest_rank(works: Sequence[RankWork], waiting: Waiting) -> SlowestRank | None:
    """None where the ranks are not all there, or where none is clearly late."""
    if not waiting.from_ranks or len(works) < 2 or len(works) != len(waiting.waits):
        return None
    # The others wait; the one that waits least is the one they wait for.
    waited = [float(np.nansum(each)) for each in waiting.waits]
    late = min(range(len(works)), key=lambda index: waited[index])
    cost = float(np.mean([each for index, each in enumerate(waited) if index != late])) - waited[late]
    if cost <= NOTED * works[late].time.span:
        return None
    others = [work for index, work in enumerate(works) if index != late]
    why = _why(works[late], others, cost)
    return SlowestRank(label=works[late].label, waited_s=seconds(cost), why=why)


def _why(late: RankWork, others: Sequence[RankWork], cost: float) -> Note:
    usual_compute = median(each.time.compute for each in others)
    usual_idle = median(each.time.idle for each in others)
    by_compute, by_idle = late.time.compute - usual_compute, late.time.idle - usual_idle
    if max(by_compute, by_idle) < EXPLAINS * cost:
        text = (
            "it computes no longer and pauses no longer than the others: its clock may differ, or its memory is slower"
        )
        return note("cause-unknown", text)
    if by_compute >= by_idle:
        told = f"it computes {_time(late.time.compute)}, the others {_time(usual_compute)}"
        return note("computes-longer", f"{told}{_most_of_it(late, others)}")
    where = "its device is idle" if late.on_device else "it spends outside any operator"
    told = f"{where} {_time(late.time.idle)}, {'those of ' if late.on_device else ''}the others {_time(usual_idle)}"
    return note("waits-for-something", f"{told}: {_cause(late, others)}")


def _most_of_it(late: RankWork, others: Sequence[RankWork]) -> str:
    def usual(name: str) -> NamedTime:
        found = [each.names.get(name, NamedTime(name, 0, 0, None, None)) for each in others]
        return sorted(found, key=lambda each: each.total_ns)[len(found) // 2]

    if not late.names:
        return ""
    most = max(late.names.values(), key=lambda each: each.total_ns - usual(each.name).total_ns)
    there = usual(most.name)
    if most.total_ns <= there.total_ns:
        return ""
    calls = "in as many calls" if most.calls == there.calls else f"in {most.calls:,} calls against {there.calls:,}"
    kind = "it has more work" if most.calls > there.calls else "larger inputs, or a slower device"
    return f"; most of the difference is {most.name}, {_time(most.total_ns)} against {_time(there.total_ns)} {calls}: {kind}"


def _cause(late: RankWork, others: Sequence[RankWork]) -> str:
    extra = {name: own - median(each.idle.get(name, 0.0) for each in others) for name, own in late.idle.items()}
    most = max(extra, key=lambda name: (round(extra[name], -5), -late.idle[name]), default=None)
    if late.on_device:
        return CAUSES[most] if most is not None else CAUSES["unknown"]
    inside = f", most of it in {most}" if most is not None and extra[most] > 0 else ""
    return f"Python code, loading data, or a processor that others use{inside}"


def _time(nanoseconds: float) -> str:
    return format_seconds(nanoseconds / 1e9)


class RankTime(Frozen):
    """One device of one trace."""

    source: str
    rank: int | None
    device: int
    timeline: Timeline
    idle: Idle
    world_size: int | None = None
    process: str | None = None
    """For a file that holds several."""
    waiting_s: float | None = None
    """In collectives, until the last rank arrived; None where the traces of the other ranks are not there."""


def rank_times(runs: Sequence[DeviceRun], on_host: Sequence[OnHost], times: Sequence[DeviceTime]) -> list[RankTime]:
    """Devices; where there are none, the hosts of traces that belong to ranks, whose `times` are given."""
    if runs:
        return list(map(_rank, runs))
    return [
        RankTime(
            source=trace.source,
            rank=trace.rank,
            device=0,
            timeline=timeline_of([time]),
            idle=idle_of([run.idle]),
            world_size=trace.world_size,
            process=trace.process,
        )
        for run, time in zip(on_host, times, strict=True)
        if (trace := run.recorded.trace).rank is not None and (trace.world_size or 1) > 1
    ]


def with_waiting(ranks: Sequence[RankTime], waiting: Waiting) -> list[RankTime]:
    if not waiting.from_ranks or len(ranks) != len(waiting.waits):
        return list(ranks)
    waited = [float(np.nansum(waits)) / 1e9 for waits in waiting.waits]
    return [msgspec.structs.replace(rank, waiting_s=each) for rank, each in zip(ranks, waited, strict=True)]


def _rank(run: DeviceRun) -> RankTime:
    trace = run.recorded.trace
    return RankTime(
        source=trace.source,
        rank=trace.rank,
        device=run.view.device,
        timeline=timeline_of([run.time]),
        idle=idle_of([run.idle]),
        world_size=trace.world_size,
        process=trace.process,
    )
