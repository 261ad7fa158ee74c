"""This module says what limits a run (`bound`) and tells its least time (`attainable`).

The least time has two meanings, which are never mixed. The *roofline* of the whole step: all products at the speed of the matrix units, and
the compulsory bytes at the speed of memory, whichever takes longer; no fusion gets below it. The *unfused* time: every
operator by itself, its products or its own bytes; what eager execution must take at least.
"""

from __future__ import annotations

import math
from itertools import chain
from statistics import median
from typing import Literal

from redline.analyze.attainable import attainable
from redline.analyze.blocks import device_kind, median_step_s, timed_blocks
from redline.analyze.generation import generation_of
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Block, RunRecord, steady_epochs, wait_share
from redline.model.units import counted, format_bytes
from redline.model.work import Ceilings


def step_s(record: RunRecord) -> float | None:
    """Returns the median time of a step when there is no waiting in between."""
    return median_step_s(timed_blocks(record, "throughput"))


BoundLabel = Literal["host", "launch", "compute", "memory", "data", "communication", "device", "unknown"]
"""`device`: the device is the limit, and whether by its arithmetic or by its memory is not known."""

HOST_BOUND_SHARE = 0.9
"""Issuing a step takes this share of the step or more: the device waits for the host."""

DATA_WAIT_SHARE = 0.1
MEMORY_BOUND_BANDWIDTH = 0.8
"""Share of the peak that counters report; more is hardly ever reached."""

_ISSUED_FREELY = 3
"""The issue of so many steps at a block's start is not yet held up by a full launch queue."""

EXPLAINED_SHARE = 0.3
"""Operators at their limits must make up this share of the step before one of the limits is named."""

FUSED_SHARE = 0.5
"""The same for a recipe that fuses operators, of which only products and compulsory bytes are known: most of the step."""

OPERATORS_SHARE = 0.5
"""On a CPU, operators that take less of a step are not its limit: whatever they gain, most of the step stays."""

SAME_AS_DEVICE = note("same-as-device", "host and device are the same")


class Bound(Frozen, frozen=True, kw_only=True):
    label: BoundLabel
    evidence: Note


def bound(record: RunRecord, ceilings: Ceilings | None = None) -> Bound:
    if (nothing := _not_measured(record)) is not None:
        return nothing
    if (waiting := _waits_for_data(record)) is not None:
        return waiting
    if (reading := reads_all_the_time(record, ceilings)) is not None:
        return reading
    if (python := runs_python(record)) is not None:
        return python
    if (untold := _untold_by_issuing(record)) is not None:
        return by_work(record, ceilings, untold, otherwise="device" if untold.code == "same-as-device" else "unknown")
    share = host_share(record)
    if share is None:
        return by_work(record, ceilings, note("no-issue-times", "no issue times were kept"))
    if share > HOST_BOUND_SHARE:
        return Bound(label="host", evidence=note("host", f"issue/step {share:.2f}: the device waits for the host"))
    told = note("not-host", f"issue/step {share:.2f}: the device is the limit, not the host")
    return by_work(record, ceilings, told, otherwise="device")


def runs_python(record: RunRecord) -> Bound | None:
    """Returns the host as the bound if a CPU is outside of operators most of a step."""
    share = record.prepared.operators_share if record.prepared is not None else None
    if share is None or share >= OPERATORS_SHARE:
        return None
    text = f"operators take {share:.0%} of the step: Python, or what it waits for, takes the rest"
    return Bound(label="host", evidence=note("outside-operators", text))


def reads_all_the_time(record: RunRecord, ceilings: Ceilings | None) -> Bound | None:
    """For a generation whose tokens take little longer than reading the weights."""
    found = generation_of(record, ceilings)
    if found is None or not found.reads_all_the_time or found.bandwidth_share is None:
        return None
    read = f"a decode step reads {format_bytes(found.read_bytes)}"
    return Bound(
        label="memory", evidence=note("memory", f"{read} at {found.bandwidth_share:.0%} of the copy bandwidth")
    )


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
    """Returns the host time that is needed to issue a step over the time of a step; None where nothing is issued ahead or kept."""
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


def by_work(
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
    """Returns true if the recipe makes a program in which operators no longer run one by one."""
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
