"""This is a profile: everything that can be told from one or more traces, and what was measured beside them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import msgspec
import numpy as np

from redline.analyze.blocks import timed_blocks
from redline.analyze.bound import bound_of_counters, least_issue_s, telling_host_share
from redline.analyze.finding import Bound, Finding
from redline.analyze.generation import Generation, generation_of
from redline.analyze.hardware import Hardware, OperatorLimit, hardware_by_kernels, hardware_of, operator_limits
from redline.analyze.removals import TraceFacts
from redline.analyze.rules import diagnose, limit_of
from redline.model.fields import Frozen
from redline.model.identity import conditions_text
from redline.model.note import Note, note
from redline.model.record import Capabilities, RunRecord
from redline.model.work import Ceilings
from redline.trace.collectives import (
    CollectiveRow,
    Straggler,
    Waiting,
    collective_rows,
    gradient_reductions,
    host_calls,
    waiting_of,
)
from redline.trace.columns import Lost, Trace, Work
from redline.trace.host import Host, HostView, Launches, host_of, launches_of
from redline.trace.idle import Idle, Wait, idle_of, waits_of
from redline.trace.intervals import seconds
from redline.trace.links import Links, matching
from redline.trace.names import UNCLASSIFIED
from redline.trace.replay import DeviceRun, device_runs
from redline.trace.selections import OnDevice, OnHost
from redline.trace.tables import (
    ClassRow,
    Direction,
    KernelRow,
    NamedTime,
    OperatorRow,
    class_rows,
    class_times,
    copy_rows,
    kernel_rows,
    most_of_the_time,
    operator_rows,
    times_by_name,
)
from redline.trace.timeline import DeviceTime, Timeline, host_time, timeline_of
from redline.trace.tree import PartRow, TreeNode, parts_of, tree_of
from redline.trace.vendors import Counter, Reading, bandwidth_share, counters_of
from redline.trace.window import Outside, Phase, Steps, phases_of, recorded, steps_of

KERNELS_WITH_COUNTERS = 10
"""This many of the longest kernels have their counters listed one by one."""


class Capture(Frozen):
    """This says what Redline itself captured."""

    record_id: str
    model: str
    task: str
    recipe: str
    batch: int | None
    device: str
    device_name: str
    capture_s: float
    """Capturing took so long, all in all."""
    step_s: float | None
    """This is the median of a step without the profiler."""
    trace: str | None = None
    """The trace lies here."""
    tool: str = "torch.profiler"
    setting: str = ""
    """It says sizes, threads and versions in words."""
    switches: dict[str, Capabilities] = {}
    """Says what each switch of the recipe does to the program."""
    issue_share: float | None = None
    """This is the host time to issue a step over the time of a step, without the profiler. It is None where that says nothing."""
    least_issue_s: float | None = None
    """The host was seen to need at least so long for a step, without the profiler. It is None where that says nothing."""

    @property
    def capabilities(self) -> Capabilities:
        """Returns what the whole recipe does to the program."""
        return Capabilities.together(self.switches.values())


class RankTime(Frozen):
    """This is how one device of one trace spent its time."""

    source: str
    rank: int | None
    device: int
    timeline: Timeline
    idle: Idle
    world_size: int | None = None
    process: str | None = None
    """It is given for a file that holds several."""
    waiting_s: float | None = None
    """It waited so long in collectives, until the last rank arrived. It is None where the traces of the other ranks are not there."""


class Profile(Frozen):
    timeline: Timeline
    idle: Idle
    bound: Bound
    launches: Launches
    host: Host
    has_device: bool
    sources: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    """The one that would save the most time comes first."""
    classes: tuple[ClassRow, ...] = ()
    kernels: tuple[KernelRow, ...] = ()
    operators: tuple[OperatorRow, ...] = ()
    phases: tuple[Phase, ...] = ()
    steps: Steps | None = None
    copies: tuple[Direction, ...] = ()
    counters: tuple[Counter, ...] = ()
    ranks: tuple[RankTime, ...] = ()
    lost: Lost | None = None
    capture: Capture | None = None
    notes: tuple[Note, ...] = ()
    hardware: Hardware = Hardware()
    outside: Outside = Outside()
    """Device work in the files that belongs to none of the steps, and is not counted."""
    waits: tuple[Wait, ...] = ()
    """Says where the host waited for the device."""
    collectives: tuple[CollectiveRow, ...] = ()
    stragglers: tuple[Straggler, ...] = ()
    limits: tuple[OperatorLimit, ...] = ()
    """Operators against what the device can do, from the shapes of their inputs."""
    gradient_reductions: int | None = None
    """Gradients are reduced so often for each step of the optimizer. It is None where the trace does not tell."""
    parts: tuple[PartRow, ...] = ()
    """These are the times by module and by annotation."""
    generation: Generation | None = None
    """Prefill and decode without the profiler, where a generation was captured."""
    missing: str = ""
    """This is what the traces tell of a device whose work they do not hold. Such a profile says nothing of the program's time."""
    tree: TreeNode | None = None
    """This is the program as a tree with host and device time; flame graphs are drawn from it, and comparisons align it."""

    @property
    def unclassified_share(self) -> float:
        return next((row.share for row in self.classes if row.name == UNCLASSIFIED), 0.0)

    @property
    def rows(self) -> tuple[KernelRow | OperatorRow, ...]:
        """Returns a row for whatever ran, on the device and on the host."""
        return (*self.kernels, *self.operators)

    @property
    def launches_missing(self) -> float:
        """Returns the share of the device's work for which the trace holds no launch."""
        return sum(row.device_share for row in self.operators if row.source == "no-launch")

    @property
    def kernels_for_most(self) -> int:
        """Returns how many kernels, from the top of the table, take 80 % of the time in kernels."""
        return most_of_the_time(self.kernels, 0.8)

    @property
    def bottleneck(self) -> str | None:
        """Returns the phase that needs most: the longer of its host and device time."""
        return max(self.phases, key=lambda phase: phase.needs_s).name if len(self.phases) > 1 else None

    @property
    def steps_seen(self) -> int | None:
        return self.steps.count if self.steps else None

    @property
    def wall_s(self) -> float:
        """Returns how long the profiled steps take without the profiler, where that is known; else how long they took."""
        if self.capture and self.capture.step_s and self.steps:
            return self.capture.step_s * self.steps.count
        return self.timeline.span_s

    @property
    def whole_s(self) -> float:
        """Returns the time of the steps that findings are held against. Work may take longer under the profiler than whole steps without
        it, as on a CPU."""
        return max(self.wall_s, self.timeline.busy_s if self.has_device else self.timeline.span_s)

    @property
    def whole_work_s(self) -> float:
        """Returns what the device did, or the host where it is the device."""
        if self.has_device:
            return sum(row.total_s for row in self.kernels) + sum(row.total_s for row in self.copies)
        return sum(row.cpu_self_s for row in self.operators)


def profile_of(
    traces: Sequence[Trace],
    record: RunRecord | None = None,
    *,
    ceilings: Ceilings | None = None,
) -> Profile:
    """Returns all tables, the bound and the findings. `record`: what was measured without the profiler, if Redline captured."""
    facts = facts_of(traces, record, ceilings=ceilings)
    profile = msgspec.structs.replace(facts.profile, findings=tuple(diagnose(facts)))
    return msgspec.structs.replace(profile, bound=limit_of(profile, record, ceilings))


UNKNOWN = Bound(label="unknown", evidence=note("not-measured", ""))


def facts_of(
    traces: Sequence[Trace],
    record: RunRecord | None = None,
    *,
    ceilings: Ceilings | None = None,
) -> TraceFacts:
    """Returns the tables without conclusions, and what the rules of the diagnosis look at."""
    traces = _without_captures(traces)
    cuts = [recorded(trace) for trace in traces]
    links, cut = [one.links for one in cuts], [one.trace for one in cuts]
    views = [HostView(one) for one in links]
    by_trace = [device_runs(one, view) for one, view in zip(cuts, views, strict=True)]
    runs = [run for own in by_trace for run in own]
    has_device = bool(runs)
    hosts = [] if has_device else [OnHost(one, view) for one, view in zip(cuts, views, strict=True)]
    times = [run.time for run in runs] if has_device else [host_time(one.trace, one.steps) for one in cuts]
    timeline, hardware, tree = timeline_of(times), hardware_of(traces, record), tree_of(links)
    kernels, others = times_by_name(cut, Work.KERNEL), times_by_name(cut, Work.COPY, Work.FILL)
    calls = [run.calls for run in runs] if has_device else [host_calls(one) for one in links]
    waiting, host = waiting_of(calls), host_of(views, timeline.busy_s if has_device else 0.0)
    reductions = {gradient_reductions(run.host, run.calls) for run in runs}
    profile = Profile(
        timeline=timeline,
        idle=idle_of([run.idle for run in runs] or [one.idle for one in hosts]),
        bound=UNKNOWN,
        classes=tuple(class_rows(kernels, others) if has_device else class_rows(class_times(links))),
        kernels=tuple(kernel_rows(kernels)),
        operators=tuple(operator_rows(links)),
        phases=tuple(phases_of(views)),
        steps=steps_of(cuts),
        launches=launches_of(views),
        host=host,
        copies=tuple(copy_rows(cut)),
        ranks=tuple(rank_times(runs or hosts, times, waiting)),
        lost=_lost(links),
        has_device=has_device,
        sources=tuple(dict.fromkeys(trace.source for trace in traces)),
        capture=None if record is None else _capture(record),
        notes=tuple(note for trace in cut for note in trace.notes),
        hardware=hardware,
        outside=Outside(
            **{name: sum(getattr(one.outside, name) for one in cuts) for name in Outside.__struct_fields__}
        ),
        missing=_missing(traces, host.launched, record, has_device),
        waits=tuple(waits_of([(view, [run.idle for run in own]) for view, own in zip(views, by_trace, strict=True)])),
        collectives=tuple(collective_rows(calls, waiting)),
        gradient_reductions=reductions.pop() if len(reductions) == 1 else None,
        stragglers=tuple(waiting.stragglers),
        limits=tuple(operator_limits(links, hardware, ceilings)),
        parts=tuple(parts_of(tree)),
        generation=generation_of(record, ceilings) if record is not None else None,
        tree=tree,
    )
    # A host that launches work of which nothing was recorded is not the device.
    working = [one for one in hosts if not one.view.launched]
    return TraceFacts(profile, list(map(OnDevice, runs)), working, times, calls, waiting)


def with_tool(
    kernels: Sequence[NamedTime],
    readings: Sequence[Reading],
    record: RunRecord | None,
    tool: str,
    notes: tuple[Note, ...] = (),
    sources: tuple[str, ...] = (),
) -> Profile:
    """Returns what another profiler's kernel table tells; it knows nothing of the host and of when things ran.

    `record`: what was measured where Redline ran the tool. `sources`: the files, where somebody else did.
    """
    rows = kernel_rows(kernels)
    counters = counters_of(readings, [row.name for row in rows[:KERNELS_WITH_COUNTERS]])
    total = sum(row.total_s for row in rows)
    talking = sum(row.total_s for row in rows if row.kernel_class == "communication")
    timeline = Timeline(
        span_s=total, busy_s=total, idle_s=0.0, compute_s=total - talking, communication_s=talking,
        exposed_communication_s=0.0, copy_s=0.0, exposed_copy_s=0.0,
    )  # fmt: skip
    capture = msgspec.structs.replace(_capture(record), tool=tool) if record is not None else None
    profile = Profile(
        timeline=timeline,
        idle=idle_of([]),
        bound=bound_of_counters(bandwidth_share(counters)),
        classes=tuple(class_rows(kernels)),
        kernels=tuple(rows),
        launches=launches_of([]),
        host=host_of([], 0.0),
        counters=tuple(counters),
        has_device=True,
        sources=sources or (tool,),
        capture=capture,
        hardware=hardware_by_kernels([row.name for row in rows], tool, record),
        notes=(*notes, NO_TIMELINE),
    )
    return msgspec.structs.replace(profile, findings=tuple(diagnose(TraceFacts(profile))))


NO_TIMELINE = note(
    "kernel-table", "a kernel table has no timeline: nothing is known of idle time and of what runs at the same time"
)
_CAPTURES = re.compile(r"(Begin|End)Capture")
_REPLAYS = re.compile(r"GraphLaunch")
_LAUNCHES = re.compile(r"^(?!.*Host).*Launch")


def _without_captures(traces: Sequence[Trace]) -> Sequence[Trace]:
    """Without recordings of how a graph was captured, where others of the same device show how it is replayed.

    Two recordings of one device, one after the other, are not two devices.
    """
    captured = [bool(matching(trace, trace.calls, _CAPTURES).any()) for trace in traces]
    replays = [
        trace
        for trace, is_capture in zip(traces, captured, strict=True)
        if not is_capture and matching(trace, trace.calls, _REPLAYS).any()
    ]
    left_out = [
        trace.source
        for trace, is_capture in zip(traces, captured, strict=True)
        if is_capture and any(_same_device(trace, replay) for replay in replays)
    ]
    if not left_out:
        return traces
    first, *others = [trace for trace in traces if trace.source not in left_out]
    text = f"{', '.join(left_out)} shows how a graph was captured, and {first.source} its replay: the figures are of the replay alone"
    return [replace(first, notes=(*first.notes, note("capture-and-replay", text))), *others]


def _same_device(one: Trace, other: Trace) -> bool:
    return one.rank == other.rank and bool(np.isin(one.work.device, other.work.device).any() or not len(one.work))


def _missing(traces: Sequence[Trace], launched: int, record: RunRecord | None, has_device: bool) -> str:
    """Returns what the traces do not hold of the program's time, so that nothing can be concluded from it, or nothing where they are
    whole."""
    cut = any(trace.lost.truncated and trace.lost.bytes for trace in traces)
    on_cpu = record is not None and record.spec.device.startswith("cpu")
    named = sorted({info.name for trace in traces for info in trace.devices if info.name})
    if has_device or (not launched and (not named or on_cpu)):
        # Events do not stand in the order of time: any of them may be gone.
        lost = "the file ends in the middle of an event, so that time in which nothing seems to run may be time whose events are gone"
        return f"{lost}: get the whole file" if cut else ""
    told = (
        f"{launched:,} launches put work on a device, but no record of it is in the trace"
        if launched
        else f"the header names {', '.join(named)}, but no record of its work is in the trace"
    )
    if cut:
        return f"{told}: the file ends early, and profilers write the device's work last"
    return f"{told}: record with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or nothing ran on the device"


def _lost(links: Sequence[Links]) -> Lost | None:
    damaged = [each for each in links if each.trace.lost]
    if not damaged:
        return None
    reasons = [
        f"{each.trace.source}: {reason}" if len(links) > 1 else reason
        for each in damaged
        for reason in each.trace.lost.reasons
    ]
    # Calls that must have put something on the device which the file does not show.
    launches = sum(
        int((~np.isin(np.flatnonzero(matching(one.trace, one.trace.calls, _LAUNCHES)), one.call)).sum())
        for one in damaged
        if one.trace.lost.truncated
    )
    if launches:
        reasons.append(f"{launches:,} launches whose work is not in the file")
    return Lost(
        truncated=any(one.trace.lost.truncated for one in damaged),
        bytes=sum(one.trace.lost.bytes for one in damaged),
        events=sum(one.trace.lost.events for one in damaged),
        launches=launches,
        reasons=tuple(reasons),
    )


def _capture(record: RunRecord) -> Capture:
    spec, prepared, trace = record.spec, record.prepared, record.trace
    samples = [sample for block in timed_blocks(record, "throughput") for sample in block.samples]
    return Capture(
        record_id=record.id,
        model=spec.workload.model,
        task=spec.workload.task,
        recipe=str(spec.recipe),
        batch=prepared.workload.batch if prepared else spec.workload.batch,
        device=spec.device,
        setting=conditions_text(record),
        device_name=prepared.environment.device.name if prepared else "",
        capture_s=trace.capture_s if trace else 0.0,
        step_s=median(samples) if samples else None,
        trace=trace.path if trace else None,
        switches=prepared.switches if prepared else {},
        issue_share=telling_host_share(record),
        least_issue_s=least_issue_s(record),
    )


# Ranks


def rank_times(ran: Sequence[DeviceRun | OnHost], times: Sequence[DeviceTime], waiting: Waiting) -> list[RankTime]:
    """Returns the devices, or where there are none, the hosts of traces that belong to ranks."""
    return [
        RankTime(
            source=trace.source,
            rank=trace.rank,
            device=one.view.device if isinstance(one, DeviceRun) else 0,
            timeline=timeline_of([time]),
            idle=idle_of([one.idle]),
            world_size=trace.world_size,
            process=trace.process,
            waiting_s=seconds(float(np.nansum(waits))) if waiting.stragglers else None,
        )
        for one, time, waits in zip(ran, times, waiting.waits, strict=True)
        for trace in (one.recorded.trace,)
        if isinstance(one, DeviceRun) or (trace.rank is not None and (trace.world_size or 1) > 1)
    ]
