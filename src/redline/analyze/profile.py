"""A profile: everything that can be told from one or more traces, and what was measured beside them."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import msgspec
import numpy as np

from redline.analyze.blocks import timed_blocks
from redline.analyze.bound import Bound, TraceEvidence, bound_of_counters, bound_of_trace
from redline.analyze.diagnose import Finding, diagnose
from redline.identity import conditions_text
from redline.note import Note, note
from redline.record import Capabilities, RunRecord
from redline.spec import Frozen
from redline.trace.classes import MEMORY_CLASSES
from redline.trace.columns import Lost, Trace, Work
from redline.trace.kernels import (
    ClassRow,
    Direction,
    KernelRow,
    NamedTime,
    class_rows,
    copy_rows,
    kernel_rows,
    most_of_the_time,
    times_by_name,
    unclassified_share,
)
from redline.trace.links import Links
from redline.trace.operators import OperatorRow, class_times, operator_rows
from redline.trace.phases import (
    Host,
    Launches,
    Phase,
    Steps,
    bottleneck,
    host_of,
    launches_of,
    loading_ranges,
    phases_of,
    steps_of,
)
from redline.trace.timeline import (
    DeviceTime,
    Idle,
    IdleTime,
    Timeline,
    device_time,
    host_time,
    idle_of,
    idle_time,
    per_device,
    timeline_of,
)
from redline.trace.vendors.tool import Counter, Reading, bandwidth_share, counters_of
from redline.work import Ceilings

KERNELS_WITH_COUNTERS = 10
"""Of the longest kernels, counters are told one by one."""


class Capture(Frozen):
    """What was captured, by Redline itself."""

    record_id: str
    model: str
    task: str
    recipe: str
    batch: int | None
    device: str
    device_name: str
    capture_s: float
    """What capturing cost, all in all."""
    step_s: float | None
    """Median of a step without the profiler."""
    profiled_step_s: float | None
    trace: str | None = None
    """Where the trace lies."""
    tool: str = "torch.profiler"
    setting: str = ""
    """Sizes, threads, versions, in words."""
    switches: dict[str, Capabilities] = {}
    """What each switch of the recipe does to the program."""

    @property
    def capabilities(self) -> Capabilities:
        """Of the whole recipe."""
        return Capabilities.together(self.switches.values())


class RankTime(Frozen):
    """One device of one trace."""

    source: str
    rank: int | None
    device: int
    timeline: Timeline
    idle: Idle


class Profile(Frozen):
    timeline: Timeline
    idle: Idle
    bound: Bound
    findings: tuple[Finding, ...]
    """The largest possible gain first."""
    classes: tuple[ClassRow, ...]
    unclassified_share: float
    kernels: tuple[KernelRow, ...]
    kernels_for_most: int
    """So many kernels, from the top of the table, take 80 % of the time in kernels."""
    operators: tuple[OperatorRow, ...]
    phases_s: dict[str, float]
    """What each phase needs at least: the longer of its host and device time, over all steps."""
    phases: tuple[Phase, ...]
    bottleneck: str | None
    steps: Steps | None
    launches: Launches
    host: Host
    copies: tuple[Direction, ...]
    counters: tuple[Counter, ...]
    ranks: tuple[RankTime, ...]
    lost: Lost | None
    has_device: bool
    sources: tuple[str, ...]
    capture: Capture | None = None
    notes: tuple[Note, ...] = ()

    @property
    def steps_seen(self) -> int | None:
        return self.steps.count if self.steps else None

    @property
    def wall_s(self) -> float:
        """How long the profiled steps take without the profiler, where that is known; else how long they took."""
        if self.capture and self.capture.step_s and self.steps:
            return self.capture.step_s * self.steps.count
        return self.timeline.span_s


def profile_of(
    traces: Sequence[Trace],
    record: RunRecord | None = None,
    *,
    by_shape: bool = False,
    ceilings: Ceilings | None = None,
) -> Profile:
    """All tables, the bound and the findings. `record`: what was measured without the profiler, if Redline captured."""
    links = [Links(trace) for trace in traces]
    has_device = any(trace.has_device for trace in traces)
    ranks = [rank for each in links for rank in _ranks(each)]
    timeline = timeline_of([time for _, time, _ in ranks]) if has_device else timeline_of(list(map(host_time, traces)))
    idle = idle_of([idle for _, _, idle in ranks])
    kernels = times_by_name(traces, [Work.KERNEL])
    others = times_by_name(traces, [Work.COPY, Work.FILL])
    classes = class_rows(kernels, others) if has_device else class_rows(class_times(links))
    phases = phases_of(links)
    steps = steps_of(links)
    rows = kernel_rows(kernels)
    profile = Profile(
        timeline=timeline,
        idle=idle,
        bound=Bound(label="unknown", evidence=note("not-measured", "")),
        findings=(),
        classes=tuple(classes),
        unclassified_share=unclassified_share(classes),
        kernels=tuple(rows),
        kernels_for_most=most_of_the_time(rows),
        operators=tuple(operator_rows(links, by_shape=by_shape)),
        phases_s={phase.name: phase.needs_s for phase in phases},
        phases=tuple(phases),
        bottleneck=bottleneck(phases),
        steps=steps,
        launches=launches_of(links),
        host=host_of(traces, timeline.busy_s if has_device else 0.0),
        copies=tuple(copy_rows(traces)),
        counters=(),
        ranks=tuple(rank for rank, _, _ in ranks),
        lost=_lost(links),
        has_device=has_device,
        sources=tuple(trace.source for trace in traces),
        capture=None if record is None else _capture(record, steps),
    )
    return _concluded(profile, record, ceilings)


def _concluded(profile: Profile, record: RunRecord | None = None, ceilings: Ceilings | None = None) -> Profile:
    """The same with its bound and findings."""
    bound = bound_of_trace(evidence_of(profile), record, ceilings)
    profile = msgspec.structs.replace(profile, bound=bound)
    return msgspec.structs.replace(profile, findings=tuple(diagnose(profile)))


def with_tool(
    kernels: Sequence[NamedTime],
    readings: Sequence[Reading],
    record: RunRecord | None,
    tool: str,
    notes: tuple[Note, ...] = (),
    sources: tuple[str, ...] = (),
) -> Profile:
    """What another profiler's kernel table tells; it knows nothing of the host and of when things ran.

    `record`: what was measured where Redline ran the tool. `sources`: the files, where somebody else did.
    """
    rows, classes = kernel_rows(kernels), class_rows(kernels)
    counters = counters_of(readings, [row.name for row in rows[:KERNELS_WITH_COUNTERS]])
    total = sum(row.total_s for row in rows)
    talking = sum(row.total_s for row in rows if row.kernel_class == "communication")
    capture = msgspec.structs.replace(_capture(record, None), tool=tool) if record is not None else None
    profile = Profile(
        timeline=Timeline(
            span_s=total,
            busy_s=total,
            idle_s=0.0,
            compute_s=total - talking,
            communication_s=talking,
            exposed_communication_s=0.0,
            copy_s=0.0,
            exposed_copy_s=0.0,
        ),
        idle=idle_of([]),
        bound=bound_of_counters(bandwidth_share(counters)),
        findings=(),
        classes=tuple(classes),
        unclassified_share=unclassified_share(classes),
        kernels=tuple(rows),
        kernels_for_most=most_of_the_time(rows),
        operators=(),
        phases_s={},
        phases=(),
        bottleneck=None,
        steps=None,
        launches=launches_of([]),
        host=host_of([], 0.0),
        copies=(),
        counters=tuple(counters),
        ranks=(),
        lost=None,
        has_device=True,
        sources=sources or (tool,),
        capture=capture,
        notes=(*notes, note("kernel-table", "a kernel table has no timeline: its span is the sum of its kernels")),
    )
    return msgspec.structs.replace(profile, findings=tuple(diagnose(profile)))


def evidence_of(profile: Profile) -> TraceEvidence:
    timeline, idle = profile.timeline, profile.idle
    in_memory = sum(row.share for row in profile.classes if row.name in MEMORY_CLASSES)
    known = profile.capture and profile.capture.step_s and profile.steps and profile.has_device
    return TraceEvidence(
        has_device=profile.has_device,
        span_s=timeline.span_s,
        busy_s=timeline.busy_s,
        host_wait_s=idle.host_wait_s,
        data_wait_s=idle.data_wait_s,
        launch_gap_s=idle.launch_gap_s,
        exposed_communication_s=timeline.exposed_communication_s,
        exposed_copy_s=timeline.exposed_copy_s,
        memory_classes_share=in_memory,
        busy_share=min(timeline.busy_s / profile.wall_s, 1.0) if known else None,
    )


def _ranks(links: Links) -> list[tuple[RankTime, DeviceTime, IdleTime]]:
    trace = links.trace
    loading = loading_ranges(trace)
    found = []
    for device, work in per_device(trace):
        time = device_time(trace, work)
        idle = idle_time(work, links.launched_at[trace.work.device == device], loading)
        row = RankTime(
            source=trace.source,
            rank=trace.rank,
            device=device,
            timeline=timeline_of([time]),
            idle=idle_of([idle]),
        )
        found.append((row, time, idle))
    return found


def _lost(links: Sequence[Links]) -> Lost | None:
    damaged = [each for each in links if each.trace.lost]
    if not damaged:
        return None
    reasons = [
        f"{each.trace.source}: {reason}" if len(links) > 1 else reason
        for each in damaged
        for reason in each.trace.lost.reasons
    ]
    launches = sum(_launches_without_work(each) for each in damaged if each.trace.lost.truncated)
    if launches:
        reasons.append(f"{launches:,} launches whose work is not in the file")
    return Lost(
        truncated=any(each.trace.lost.truncated for each in damaged),
        bytes=sum(each.trace.lost.bytes for each in damaged),
        events=sum(each.trace.lost.events for each in damaged),
        launches=launches,
        reasons=tuple(reasons),
    )


def _launches_without_work(links: Links) -> int:
    """Calls that must have put something on the device which the file does not show."""
    trace = links.trace
    numbers = np.unique(trace.calls.name).tolist()
    launching = [number for number in numbers if "Launch" in trace.names[number] and "Host" not in trace.names[number]]
    rows = np.isin(trace.calls.name, launching)
    return int((~np.isin(np.flatnonzero(rows), links.call)).sum())


def _capture(record: RunRecord, steps: Steps | None) -> Capture:
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
        profiled_step_s=steps.mean_s if steps else None,
        trace=trace.path if trace else None,
        switches=prepared.switches if prepared else {},
    )
