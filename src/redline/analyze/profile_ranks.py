"""The ranks of a profile: the time of each, which of them the others waited for, and what it did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.units import counted, format_seconds
from redline.trace.collectives import Waiting
from redline.trace.columns import Trace, Work
from redline.trace.idle import Idle, idle_of
from redline.trace.intervals import seconds
from redline.trace.links import Links
from redline.trace.names import class_of, label_of, short_name
from redline.trace.replay import DeviceRun
from redline.trace.selections import OnHost
from redline.trace.tables import NamedTime, class_times, times_by_name
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


def slowest_rank(
    runs: Sequence[DeviceRun], links: Sequence[Links], times: Sequence[DeviceTime], waiting: Waiting
) -> SlowestRank | None:
    """None where the ranks are not all there, or where none is clearly late. Without devices, `times` are of the hosts."""
    if len(times) < 2 or len(times) != len(waiting.waits):
        return None
    # The others wait; the one that waits least is the one they wait for.
    waited = [float(np.nansum(each)) for each in waiting.waits]
    late = min(range(len(times)), key=lambda index: waited[index])
    cost = float(np.mean([each for index, each in enumerate(waited) if index != late])) - waited[late]
    if cost <= NOTED * times[late].span:
        return None
    traces = [run.recorded.trace for run in runs] or [each.trace for each in links]
    compute, idle = (_beside(late, [getattr(time, name) for time in times]) for name in ("compute", "idle"))
    if max(own - usual for own, usual in (compute, idle)) < EXPLAINS * cost:
        why = note(
            "cause-unknown",
            "it computes no longer and pauses no longer than the others: its clock may differ, or its memory is slower",
        )
    elif compute[0] - compute[1] >= idle[0] - idle[1]:
        computing = (
            [times_by_name([trace], [Work.KERNEL]) for trace in traces]
            if runs
            else [class_times([each]) for each in links]
        )
        names = [{one.name: one for one in each if class_of(one.name) != "communication"} for each in computing]
        took = f"it computes {_time(compute[0])}, the others {_time(compute[1])}"
        why = note("computes-longer", f"{took}{_most_of_it(names.pop(late), names, short_name if runs else label_of)}")
    elif runs:
        causes: list[dict[str, float]] = [{cause: float(run.idle.ns(cause)) for cause in run.idle.when} for run in runs]
        most = _most_extra(causes.pop(late), causes)
        pauses = f"its device is idle {_time(idle[0])}, those of the others {_time(idle[1])}"
        why = note("waits-for-something", f"{pauses}: {CAUSES[most or 'unknown']}")
    else:
        marks = [_annotated(trace) for trace in traces]
        own = marks.pop(late)
        most = _most_extra(own, marks)
        is_more = most is not None and own[most] > median(each.get(most, 0.0) for each in marks)
        inside = f", most of it in {most}" if is_more else ""
        pauses = f"it spends outside any operator {_time(idle[0])}, the others {_time(idle[1])}"
        why = note(
            "waits-for-something", f"{pauses}: Python code, loading data, or a processor that others use{inside}"
        )
    return SlowestRank(label=traces[late].label, waited_s=seconds(cost), why=why)


def _beside(late: int, values: Sequence[int]) -> tuple[float, float]:
    """The value of one rank, and the usual one of the others."""
    return values[late], median(value for index, value in enumerate(values) if index != late)


def _annotated(trace: Trace) -> dict[str, float]:
    """Time in each annotation, whatever is inside it; collectives and the profiler's own steps are left out."""
    table, found = trace.annotations, Counter[str]()
    for number, lasts in zip(table.name.tolist(), table.duration.tolist(), strict=True):
        found[trace.names[number]] += lasts
    return {
        name: float(total)
        for name, total in found.items()
        if not name.startswith("ProfilerStep") and not ANNOTATED.search(name)
    }


def _most_of_it(
    late: Mapping[str, NamedTime], others: Sequence[Mapping[str, NamedTime]], shown: Callable[[str], str]
) -> str:
    def usual(name: str) -> NamedTime:
        found = [each.get(name, NamedTime(name, 0, 0, None, None)) for each in others]
        return sorted(found, key=lambda each: each.total_ns)[len(found) // 2]

    most = max(late.values(), key=lambda each: each.total_ns - usual(each.name).total_ns, default=None)
    if most is None or most.total_ns <= usual(most.name).total_ns:
        return ""
    there = usual(most.name)
    calls = (
        "in as many calls" if most.calls == there.calls else f"in {counted(most.calls, 'call')} against {there.calls:,}"
    )
    kind = "it has more work" if most.calls > there.calls else "larger inputs, or a slower device"
    return f"; most of the difference is {shown(most.name)}, {_time(most.total_ns)} against {_time(there.total_ns)} {calls}: {kind}"


def _most_extra(late: Mapping[str, float], others: Sequence[Mapping[str, float]]) -> str | None:
    """What one rank has most more of than the others; of what differs by less than a tenth of a millisecond, the least itself."""
    extra = {name: own - median(each.get(name, 0.0) for each in others) for name, own in late.items()}
    return max(extra, key=lambda name: (round(extra[name], -5), -late[name]), default=None)


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


def rank_times(
    runs: Sequence[DeviceRun], on_host: Sequence[OnHost], times: Sequence[DeviceTime], waiting: Waiting
) -> list[RankTime]:
    """Devices; where there are none, the hosts of traces that belong to ranks, whose `times` are given."""
    one_of: list[DeviceRun | OnHost] = [*runs, *on_host]
    traces = [one.recorded.trace for one in one_of]
    waited: list[float | None] = (
        [seconds(float(np.nansum(waits))) for waits in waiting.waits] if waiting.from_ranks else [None] * len(one_of)
    )
    return [
        RankTime(
            source=trace.source,
            rank=trace.rank,
            device=one.view.device if isinstance(one, DeviceRun) else 0,
            timeline=timeline_of([time]),
            idle=idle_of([one.idle]),
            world_size=trace.world_size,
            process=trace.process,
            waiting_s=waits,
        )
        for one, trace, time, waits in zip(one_of, traces, times, waited, strict=True)
        if runs or (trace.rank is not None and (trace.world_size or 1) > 1)
    ]
