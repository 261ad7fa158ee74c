"""This module says what limits a run of which no trace was recorded: the first finding of the rules for records, else its work.

The least time has two meanings, which are never mixed. The *roofline* of the whole step: all products at the speed of the matrix units, and
the compulsory bytes at the speed of memory, whichever takes longer; no fusion gets below it. The *unfused* time: every
operator by itself, its products or its own bytes; what eager execution must take at least.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from statistics import median
from typing import cast

from redline.analyze.attainable import attainable
from redline.analyze.blocks import device_kind, median_step_s, timed_blocks
from redline.analyze.finding import Bound as Bound
from redline.analyze.finding import BoundLabel as BoundLabel
from redline.analyze.finding import Lanes, Removal, Rule, findings_of
from redline.analyze.generation import Generation, generation_of
from redline.model.note import Code, Note, note
from redline.model.record import Block, RunRecord, steady_epochs, wait_share
from redline.model.units import counted, format_bytes
from redline.model.work import Ceilings

HOST_BOUND_SHARE = 0.9
"""Issuing a step takes this share of the step or more: the device waits for the host."""
DATA_WAIT_SHARE = 0.1
"""A training that waits for its loader for this share of the time or more is said to wait for data."""
MEMORY_BOUND_BANDWIDTH = 0.8
"""This is a share of the peak, as counters report it; more is hardly ever reached."""
_ISSUED_FREELY = 3
"""The issue of so many steps at a block's start is not yet held up by a full launch queue."""
EXPLAINED_SHARE = 0.3
"""Operators at their limits must make up this share of the step before one of the limits is named."""
FUSED_SHARE = 0.5
"""The same for a recipe that fuses operators, of which only products and compulsory bytes are known: most of the step."""
OPERATORS_SHARE = 0.5
"""On a CPU, operators that take less of a step are not its limit: whatever they gain, most of the step stays."""

SAME_AS_DEVICE = note("same-as-device", "host and device are the same")


def step_s(record: RunRecord) -> float | None:
    """Returns the median time of a step when there is no waiting in between."""
    return median_step_s(timed_blocks(record, "throughput"))


@dataclass(frozen=True)
class RecordFacts:
    """This holds what a record tells without a trace: its phases, and how long the host and the device take in a step."""

    record: RunRecord
    ceilings: Ceilings | None = None

    @cached_property
    def whole_s(self) -> float:
        return step_s(self.record) or 1.0

    @cached_property
    def generation(self) -> Generation | None:
        return generation_of(self.record, self.ceilings)

    def words(self, gone: Removal) -> Mapping[str, str]:
        share, read = gone.seconds / self.whole_s, self.generation
        words = {"share": f"{share:.0%}", "rest": f"{1 - share:.0%}", "issue": f"{share:.2f}"}
        if read is not None:
            words |= {"read": format_bytes(read.read_bytes), "reached": f"{read.bandwidth_share or 0.0:.0%}"}
        return words

    def part(self, share: float | None, least: float) -> Removal | None:
        """Returns the step without a part in which nothing else was going on, if that is more than a least share."""
        if share is None or share <= least:
            return None
        return Lanes(self.whole_s, self.whole_s, 0.0).without(host_s=share * self.whole_s)


def _reading(facts: RecordFacts) -> Removal | None:
    found = facts.generation
    return facts.part(found.bandwidth_share, 0.0) if found is not None and found.reads_all_the_time else None


def _outside_operators(facts: RecordFacts) -> Removal | None:
    share = facts.record.prepared.operators_share if facts.record.prepared is not None else None
    return facts.part(None if share is None else 1 - share, 1 - OPERATORS_SHARE)


RULES: tuple[Rule[RecordFacts], ...] = (
    Rule(
        code="data",
        removes=lambda facts: facts.part(wait_share(steady_epochs(facts.record.epochs)), DATA_WAIT_SHARE),
        says="{share} of the training time is spent waiting for batches",
        limit="data",
    ),
    Rule(
        code="memory",
        removes=_reading,
        says="a decode step reads {read} at {reached} of the copy bandwidth",
        limit="memory",
    ),
    Rule(
        code="outside-operators",
        removes=_outside_operators,
        says="operators take {rest} of the step: Python, or what it waits for, takes the rest",
        limit="host",
    ),
    Rule(
        code="host",
        removes=lambda facts: facts.part(telling_host_share(facts.record), HOST_BOUND_SHARE),
        says="issue/step {issue}: the device waits for the host",
        limit="host",
    ),
)
LIMITS = {rule.code: rule.limit for rule in RULES}


def first_limit(record: RunRecord, ceilings: Ceilings | None, *codes: str) -> Bound | None:
    """Returns what the first finding of these rules says, of all where none is named, or None where there is none."""
    rules = (rule for rule in RULES if not codes or rule.code in codes)
    for first in findings_of(rules, RecordFacts(record, ceilings)):
        return Bound(label=LIMITS[first.code] or "unknown", evidence=note(cast("Code", first.code), first.evidence))
    return None


def bound(record: RunRecord, ceilings: Ceilings | None = None) -> Bound:
    if not _is_measured(record):
        return Bound(label="unknown", evidence=note("not-measured", "nothing was measured"))
    if (found := first_limit(record, ceilings)) is not None:
        return found
    if (untold := _untold_by_issuing(record)) is not None:
        return by_work(record, ceilings, untold, otherwise="device" if untold.code == "same-as-device" else "unknown")
    if (share := host_share(record)) is None:
        return by_work(record, ceilings, note("no-issue-times", "no issue times were kept"))
    told = note("not-host", f"issue/step {share:.2f}: the device is the limit, not the host")
    return by_work(record, ceilings, told, otherwise="device")


def bound_of_counters(bandwidth_share: float | None) -> Bound:
    """Returns the bound from a kernel table with hardware counters, which has no data about the host."""
    unknown = "a kernel table does not show what waits for what"
    if bandwidth_share is None:
        return Bound(label="unknown", evidence=note("kernel-table", unknown))
    used = f"kernels use {bandwidth_share:.0%} of the memory bandwidth"
    if bandwidth_share > MEMORY_BOUND_BANDWIDTH:
        return Bound(label="memory", evidence=note("memory", used))
    return Bound(label="unknown", evidence=note("kernel-table", f"{used}; {unknown}"))


def host_share(record: RunRecord) -> float | None:
    """Returns the host time that is needed to issue a step over the time of a step, or None where nothing is issued ahead or kept."""
    blocks = timed_blocks(record, "throughput")
    issues = list(chain.from_iterable(_free_issues(block) for block in blocks))
    steps = list(chain.from_iterable(block.samples for block in blocks))
    if not issues or not steps:
        return None
    return median(issues) / median(steps) if median(steps) > 0 else math.inf


def _free_issues(block: Block) -> tuple[float, ...]:
    first = block.issue_s[:_ISSUED_FREELY]
    # The very first issue may pay for waking up the process or the device.
    return first[1:] or first


def _is_measured(record: RunRecord) -> bool:
    return record.failure is None and any(block.samples for block in record.blocks)


def _untold_by_issuing(record: RunRecord) -> Note | None:
    """Returns why this record's issue times tell nothing about the host, or None."""
    if device_kind(record) == "cpu":
        return SAME_AS_DEVICE
    if record.prepared is not None and record.prepared.step_synchronises:
        return note("step-waits", "issue time says nothing here: the step itself waits for the device")
    return None


def by_work(
    record: RunRecord | None, ceilings: Ceilings | None, so_far: Note, *, otherwise: BoundLabel = "unknown"
) -> Bound:
    """Returns compute or memory: the one of the two limits on which the work spends more of its least time.

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
        explained_s = max(compute_s, memory_s)
    else:
        compute_s, memory_s, explained_s = found.unfused_compute_s, found.unfused_memory_s, found.unfused_s
        enough, what = EXPLAINED_SHARE, "unfused operators need"
    told = (
        f"at the device's limits, {what} {compute_s / measured_s:.0%} of the step for arithmetic and "
        f"{memory_s / measured_s:.0%} for memory traffic"
    )
    # Products without a ceiling might take all of the step that the bytes leave.
    if found.without_ceiling and compute_s <= memory_s < measured_s / 2:
        return untold(f"no ceiling is known for {', '.join(found.without_ceiling)}")
    if explained_s < enough * measured_s:
        return untold(told)
    return Bound(label="compute" if compute_s >= memory_s else "memory", evidence=note("work", told))


def _no_ceilings(record: RunRecord | None) -> str:
    """On a CPU ceilings hold for one number of threads: those of another say nothing here."""
    environment = record.prepared.environment if record is not None and record.prepared is not None else None
    threads = environment.threads if environment is not None and environment.device.kind == "cpu" else None
    if not threads:
        return "the device's ceilings are not measured yet: 'redline roofline' measures them"
    return (
        f"the ceilings of this CPU with {counted(threads, 'thread')} are not measured yet: "
        f"'redline roofline --threads {threads}' measures them"
    )


def is_fused(record: RunRecord | None) -> bool:
    """Returns true if the recipe makes a program in which operators no longer run one by one."""
    return record is not None and record.prepared is not None and record.prepared.capabilities.compiles


def telling_host_share(record: RunRecord) -> float | None:
    """Returns the host's share of a step, where it says who waits for whom."""
    return host_share(record) if _issuing_tells(record) else None


def least_issue_s(record: RunRecord) -> float | None:
    """Returns the shortest issue of a step. The usual one is longer: a host that has just been waiting is slow at first, and one whose
    queue is full waits for the device."""
    issues = [issue_s for block in timed_blocks(record, "throughput") for issue_s in block.issue_s]
    return min(issues, default=None) if _issuing_tells(record) else None


def _issuing_tells(record: RunRecord) -> bool:
    return _is_measured(record) and _untold_by_issuing(record) is None
