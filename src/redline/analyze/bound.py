"""What limits a run (`bound`, `bound_of_trace`), and the least time that its work can take (`attainable`).

The least time has two meanings, which are never mixed. The *roofline* of the whole step: all products at the speed of the matrix units, and
the compulsory bytes at the speed of memory, whichever takes longer; no fusion gets below it. The *unfused* time: every
operator by itself, its products or its own bytes; what eager execution must take at least.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from statistics import median
from typing import Literal

from redline.analyze.attainable import attainable
from redline.analyze.blocks import device_kind, median_step_s, timed_blocks
from redline.analyze.generation import generation_of
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Block, RunRecord
from redline.model.training import steady_epochs, wait_share
from redline.model.units import counted, format_bytes
from redline.model.work import Ceilings


def step_s(record: RunRecord) -> float | None:
    """The median time of a step, without waiting in between."""
    return median_step_s(timed_blocks(record, "throughput"))


BoundLabel = Literal["host", "launch", "compute", "memory", "data", "communication", "device", "unknown"]
"""`device`: the device is the limit, and whether by its arithmetic or by its memory is not known."""

HOST_BOUND_SHARE = 0.9
"""Issuing a step takes this share of the step or more: the device waits for the host."""

HOST_WAIT_SHARE = 0.2
"""In a trace without issue times, the share of the time that the device waits for the host. Recording slows the host down by half or
more, so that a smaller share proves nothing about the run without the profiler."""

DEVICE_BUSY_SHARE = 0.9
"""Kernels fill this share of a step or more: a faster host would hardly make it shorter."""

DATA_WAIT_SHARE = 0.1
EXPOSED_SHARE = 0.1
"""Communication or copies that overlap nothing else, as a share of the whole time."""
LAUNCH_GAP_SHARE = 0.1
MEMORY_CLASSES_SHARE = 0.5
"""Share of the device's busy time, in kernels that do little with each byte."""

MEMORY_BOUND_BANDWIDTH = 0.8
"""Share of the peak that counters report; more is hardly ever reached."""

_ISSUED_FREELY = 3
"""Steps at a block's start whose issue cannot yet be held up by a full launch queue."""

EXPLAINED_SHARE = 0.3
"""Operators at their limits must make up this share of the step before one of the limits is named."""

FUSED_SHARE = 0.5
"""The same for a recipe that fuses operators, of which only products and compulsory bytes are known: most of the step."""

OPERATORS_SHARE = 0.5
"""On a CPU, operators that take less of a step are not its limit: whatever they gain, most of the step stays."""

SAME_AS_DEVICE = note("same-as-device", "host and device are the same")

SHAPES_SHARE = 0.5
"""Operators of known shapes must make up this share of the device's time before they name the limit."""


class TraceEvidence(Frozen, frozen=True, kw_only=True):
    """What a trace shows about waiting. Seconds, over all steps and devices of the trace."""

    has_device: bool
    span_s: float
    busy_s: float
    launches_without_device: bool = False
    """Work was launched, but no record of it is in the trace."""
    host_wait_s: float = 0.0
    sync_s: float = 0.0
    """Idle because the host waited for the device."""
    waits_in: str = ""
    """The call it waited in longest."""
    data_wait_s: float = 0.0
    launch_gap_s: float = 0.0
    exposed_communication_s: float = 0.0
    exposed_copy_s: float = 0.0
    memory_classes_share: float = 0.0
    busy_share: float | None = None
    """Measured on the same steps without the profiler, where their time is known."""
    compute_limited_s: float = 0.0
    memory_limited_s: float = 0.0
    """Device time in operators limited by either, from their shapes."""

    def share(self, seconds: float) -> float:
        return seconds / self.span_s if self.span_s else 0.0


class Bound(Frozen, frozen=True, kw_only=True):
    label: BoundLabel
    evidence: Note


def bound(record: RunRecord, ceilings: Ceilings | None = None) -> Bound:
    if (nothing := _not_measured(record)) is not None:
        return nothing
    if (waiting := _waits_for_data(record)) is not None:
        return waiting
    if (reading := _reads_all_the_time(record, ceilings)) is not None:
        return reading
    if (python := _runs_python(record)) is not None:
        return python
    if (untold := _untold_by_issuing(record)) is not None:
        return _by_work(record, ceilings, untold, otherwise="device" if untold.code == "same-as-device" else "unknown")
    share = host_share(record)
    if share is None:
        return _by_work(record, ceilings, note("no-issue-times", "no issue times were kept"))
    if share > HOST_BOUND_SHARE:
        return Bound(label="host", evidence=note("host", f"issue/step {share:.2f}: the device waits for the host"))
    told = note("not-host", f"issue/step {share:.2f}: the device is the limit, not the host")
    return _by_work(record, ceilings, told, otherwise="device")


def _runs_python(record: RunRecord) -> Bound | None:
    """For a CPU that spends most of a step outside of operators."""
    share = record.prepared.operators_share if record.prepared is not None else None
    if share is None or share >= OPERATORS_SHARE:
        return None
    text = f"operators take {share:.0%} of the step: Python, or what it waits for, takes the rest"
    return Bound(label="host", evidence=note("outside-operators", text))


def _reads_all_the_time(record: RunRecord, ceilings: Ceilings | None) -> Bound | None:
    """For a generation whose tokens take little longer than reading the weights."""
    found = generation_of(record, ceilings)
    if found is None or not found.reads_all_the_time or found.bandwidth_share is None:
        return None
    read = f"a decode step reads {format_bytes(found.read_bytes)}"
    return Bound(
        label="memory", evidence=note("memory", f"{read} at {found.bandwidth_share:.0%} of the copy bandwidth")
    )


def bound_of_trace(trace: TraceEvidence, record: RunRecord | None = None, ceilings: Ceilings | None = None) -> Bound:
    """The same question to a profile. The record's issue times, taken without the profiler, outweigh the trace's."""
    if trace.launches_without_device:
        evidence = "work was launched on a device, but no record of it is in the trace: nothing can be said"
        return Bound(label="unknown", evidence=note("not-measured", evidence))
    if record is not None and (reading := _reads_all_the_time(record, ceilings)) is not None:
        return reading
    if not trace.has_device:
        waiting = _waits_on_host(trace) if record is None else _runs_python(record)
        return waiting or _by_work(record, ceilings, SAME_AS_DEVICE, otherwise="device")
    found = [one for test in _TRACE_TESTS if (one := test(trace, record)) is not None]
    if found:
        return max(found, key=lambda one: one[0])[1]
    share = trace.busy_share if trace.busy_share is not None else trace.share(trace.busy_s)
    busy = note("device-busy", f"the device is busy {share:.0%} of the time: it is the limit")
    by_work = _by_work(record, ceilings, busy)
    if by_work.label != "unknown":
        return by_work
    return _by_shapes(trace, share) or _memory_in_trace(trace) or _device_is_the_limit(share, by_work)


def _waits_on_host(trace: TraceEvidence) -> Bound | None:
    """Where the host is the device: what else it does for a large part of the time."""
    found = (
        _at_least(DATA_WAIT_SHARE, trace.share(trace.data_wait_s), "data", "the data loader takes {:.0%} of the time"),
        _at_least(HOST_WAIT_SHARE, trace.share(trace.host_wait_s), "host", "no operator runs {:.0%} of the time"),
    )
    return max((one for one in found if one is not None), key=lambda one: one[0], default=(0.0, None))[1]


def _device_is_the_limit(share: float, by_work: Bound) -> Bound:
    evidence = (
        f"the device is busy {share:.0%} of the time, but whether compute or memory limits it is not known: "
        "shapes were not recorded, or the device's peaks are not known"
    )
    return by_work if share < EXPLAINED_SHARE else Bound(label="device", evidence=note("device-busy", evidence))


def _by_shapes(trace: TraceEvidence, share: float) -> Bound | None:
    """From operators held against the device's limits, where they make up most of its time."""
    told = trace.compute_limited_s + trace.memory_limited_s
    if not told or told < SHAPES_SHARE * trace.busy_s:
        return None
    label: BoundLabel = "compute" if trace.compute_limited_s >= trace.memory_limited_s else "memory"
    most = max(trace.compute_limited_s, trace.memory_limited_s) / told
    limited = "the matrix units" if label == "compute" else "memory bandwidth"
    evidence = f"the device is busy {share:.0%} of the time, {most:.0%} of it in operators limited by {limited}"
    return Bound(label=label, evidence=note("work", evidence))


def bound_of_counters(bandwidth_share: float | None) -> Bound:
    """The bound from a kernel table with hardware counters, which has no data about the host."""
    if bandwidth_share is None:
        text = "a kernel table does not show what waits for what"
        return Bound(label="unknown", evidence=note("kernel-table", text))
    used = f"kernels use {bandwidth_share:.0%} of the memory bandwidth"
    if bandwidth_share > MEMORY_BOUND_BANDWIDTH:
        return Bound(label="memory", evidence=note("memory", used))
    evidence = note("kernel-table", f"{used}; a kernel table does not show what waits for what")
    return Bound(label="unknown", evidence=evidence)


def host_share(record: RunRecord) -> float | None:
    """Host time to issue a step over the time of a step; None where nothing is issued ahead or nothing was kept."""
    blocks = timed_blocks(record, "throughput")
    issue_s = list(chain.from_iterable(_free_issues(block) for block in blocks))
    step_s = list(chain.from_iterable(block.samples for block in blocks))
    if not issue_s or not step_s:
        return None
    step_median_s = median(step_s)
    return median(issue_s) / step_median_s if step_median_s > 0 else math.inf


def _free_issues(block: Block) -> tuple[float, ...]:
    first = block.issue_s[:_ISSUED_FREELY]
    # The very first issue may pay for waking up the process or the device.
    return first[1:] if len(first) > 1 else first


def _not_measured(record: RunRecord) -> Bound | None:
    if record.failure is not None or not any(block.samples for block in record.blocks):
        return Bound(label="unknown", evidence=note("not-measured", "nothing was measured"))
    return None


def _waits_for_data(record: RunRecord) -> Bound | None:
    share = wait_share(steady_epochs(record.epochs))
    if share is None or share <= DATA_WAIT_SHARE:
        return None
    return Bound(label="data", evidence=note("data", f"{share:.0%} of the training time is spent waiting for batches"))


def _untold_by_issuing(record: RunRecord) -> Note | None:
    """Why this record's issue times tell nothing about the host, or None."""
    if device_kind(record) == "cpu":
        return SAME_AS_DEVICE
    if record.prepared is not None and record.prepared.step_synchronises:
        return note("step-waits", "issue time says nothing here: the step itself waits for the device")
    return None


def _by_work(
    record: RunRecord | None, ceilings: Ceilings | None, so_far: Note, *, otherwise: BoundLabel = "unknown"
) -> Bound:
    """Compute or memory: on which of the two limits the work spends more of its least time.

    Operators one by one, where they run one by one. A recipe that fuses them moves fewer bytes than they would, so there only
    the products and the compulsory bytes are counted. `so_far` is what is known without the work, `otherwise` the label where the work does not tell.
    """

    def untold(why: str) -> Bound:
        return Bound(label=otherwise, evidence=note(so_far.code, f"{so_far}; {why}"))

    work = record.prepared.work if record is not None and record.prepared is not None else None
    measured_s = step_s(record) if record is not None else None
    if work is None or not measured_s:
        return untold("work not counted")
    if ceilings is None:
        return untold(_no_ceilings(record))
    found = attainable(work, ceilings)
    if is_fused(record):
        compute_s, memory_s, enough, what = found.compute_s, found.memory_s, FUSED_SHARE, "fused work needs"
    else:
        compute_s, memory_s = found.unfused_compute_s, found.unfused_memory_s
        enough, what = EXPLAINED_SHARE, "unfused operators need"
    told = (
        f"at the device's limits, {what} {compute_s / measured_s:.0%} of the step for arithmetic and "
        f"{memory_s / measured_s:.0%} for memory traffic"
    )
    # Products without a ceiling might take all of the step that the bytes leave.
    if found.without_ceiling and compute_s <= memory_s < measured_s / 2:
        return untold(f"no ceiling is known for {', '.join(found.without_ceiling)}")
    explained_s = max(compute_s, memory_s) if is_fused(record) else found.unfused_s
    if explained_s < enough * measured_s:
        return untold(told)
    label: BoundLabel = "compute" if compute_s >= memory_s else "memory"
    return Bound(label=label, evidence=note("work", told))


def _no_ceilings(record: RunRecord | None) -> str:
    """On a CPU ceilings hold for one number of threads: those of another say nothing here."""
    environment = record.prepared.environment if record is not None and record.prepared is not None else None
    if environment is None or environment.device.kind != "cpu" or not environment.threads:
        return "the device's ceilings are not measured yet: 'redline roofline' measures them"
    threads = environment.threads
    return (
        f"the ceilings of this CPU with {counted(threads, 'thread')} are not measured yet: "
        f"'redline roofline --threads {threads}' measures them"
    )


def is_fused(record: RunRecord | None) -> bool:
    """Whether the recipe builds a program in which operators no longer run one by one."""
    return record is not None and record.prepared is not None and record.prepared.capabilities.compiles


def telling_host_share(record: RunRecord) -> float | None:
    """The host's share of a step, where it says who waits for whom."""
    return host_share(record) if _issuing_tells(record) else None


def least_issue_s(record: RunRecord) -> float | None:
    """The shortest issue of a step. The usual one is longer: a host that has just been waiting is slow at first, and one
    whose queue is full waits for the device."""
    issues = [issue_s for block in timed_blocks(record, "throughput") for issue_s in block.issue_s]
    return min(issues, default=None) if _issuing_tells(record) else None


def _issuing_tells(record: RunRecord) -> bool:
    return _not_measured(record) is None and _untold_by_issuing(record) is None


Tested = tuple[float, Bound] | None
"""The share of the time, and what it shows."""


def _at_least(
    limit: float, share: float, label: Literal["communication", "launch", "data", "host"], told: str
) -> Tested:
    """A bound where `share` of the time reaches `limit`; `told` has a gap for the share."""
    return (share, Bound(label=label, evidence=note(label, told.format(share)))) if share >= limit else None


def _data_in_trace(trace: TraceEvidence, record: RunRecord | None) -> Tested:
    waiting, copying = trace.share(trace.data_wait_s), trace.share(trace.exposed_copy_s)
    if waiting >= DATA_WAIT_SHARE and waiting >= copying:
        return _at_least(DATA_WAIT_SHARE, waiting, "data", "the device waits for the data loader {:.0%} of the time")
    return _at_least(EXPOSED_SHARE, copying, "data", "copies alone keep the device busy {:.0%} of the time")


def _communication_in_trace(trace: TraceEvidence, record: RunRecord | None) -> Tested:
    told = "communication with nothing computed beside it takes {:.0%} of the time"
    return _at_least(EXPOSED_SHARE, trace.share(trace.exposed_communication_s), "communication", told)


def _host_in_trace(trace: TraceEvidence, record: RunRecord | None) -> Tested:
    issued = telling_host_share(record) if record is not None else None
    share = trace.share(trace.host_wait_s + trace.sync_s)
    if issued is not None:
        if issued <= HOST_BOUND_SHARE or (trace.busy_share or 0.0) >= DEVICE_BUSY_SHARE:
            return None
        busy = "" if trace.busy_share is None else f"; kernels keep the device busy {trace.busy_share:.0%} of the step"
        evidence = f"issue/step {issued:.2f}: the device waits for the host{busy}"
        return max(share, 1 - (trace.busy_share or 0.0)), Bound(label="host", evidence=note("host", evidence))
    if share < HOST_WAIT_SHARE:
        return None
    if trace.sync_s > trace.host_wait_s:
        where = f" in {trace.waits_in}" if trace.waits_in else ""
        evidence = f"the device is idle {share:.0%} of the time, mostly because the host waits for it{where}"
        return share, Bound(label="host", evidence=note("host", evidence))
    evidence = f"the device waits for the host {share:.0%} of the time"
    return share, Bound(label="host", evidence=note("host", evidence))


def _launch_in_trace(trace: TraceEvidence, record: RunRecord | None) -> Tested:
    told = "gaps between kernels that were launched in time take {:.0%} of the time"
    return _at_least(LAUNCH_GAP_SHARE, trace.share(trace.launch_gap_s), "launch", told)


def _memory_in_trace(trace: TraceEvidence) -> Bound | None:
    """From the kernels' names alone, where nothing better is known."""
    if trace.memory_classes_share >= MEMORY_CLASSES_SHARE:
        evidence = f"{trace.memory_classes_share:.0%} of the device's work moves data and computes little"
        return Bound(label="memory", evidence=note("memory", evidence))
    return None


_TRACE_TESTS: tuple[Callable[[TraceEvidence, RunRecord | None], Tested], ...] = (
    _data_in_trace,
    _communication_in_trace,
    _host_in_trace,
    _launch_in_trace,
)
