"""What limits a run? One definition for run, profile and roofline.

Each test looks at one kind of evidence and answers with a bound or passes on; the first answer counts. Today only the
host can be told from the record's own issue times; compute and memory join as tests of their own once work is counted.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from statistics import median
from typing import Literal

from redline.analyze.trust import device_kind
from redline.record import Block, RunRecord
from redline.spec import Spec

BoundLabel = Literal["host", "launch", "compute", "memory", "data", "communication", "unknown"]

HOST_BOUND_SHARE = 0.9
"""Issuing a step takes this share of the step or more: the device waits for the host."""

_ISSUED_FREELY = 3
"""Steps at a block's start whose issue cannot yet be held up by a full launch queue."""

NOT_COUNTED = "work not counted"


class Bound(Spec, frozen=True, kw_only=True):
    label: BoundLabel
    evidence: str


def bound(record: RunRecord) -> Bound:
    for test in _TESTS:
        found = test(record)
        if found is not None:
            return found
    return Bound(label="unknown", evidence=_what_is_left(record))


def host_share(record: RunRecord) -> float | None:
    """Host time to issue a step over the time of a step; None where nothing is issued ahead or nothing was kept."""
    blocks = [block for block in record.blocks if block.kind == "throughput"]
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
        return Bound(label="unknown", evidence="nothing was measured")
    return None


def _same_as_device(record: RunRecord) -> Bound | None:
    if device_kind(record) == "cpu":
        return Bound(label="unknown", evidence=f"host and device are the same; {NOT_COUNTED}")
    return None


def _waits_by_itself(record: RunRecord) -> Bound | None:
    if record.prepared is not None and record.prepared.step_synchronises:
        evidence = f"issue time cannot tell: the step itself waits for the device; {NOT_COUNTED}"
        return Bound(label="unknown", evidence=evidence)
    return None


def _host(record: RunRecord) -> Bound | None:
    share = host_share(record)
    if share is not None and share > HOST_BOUND_SHARE:
        return Bound(label="host", evidence=f"issue/step {share:.2f}: the device waits for the host")
    return None


def _what_is_left(record: RunRecord) -> str:
    share = host_share(record)
    if share is None:
        return f"no issue times were kept; {NOT_COUNTED}"
    return f"issue/step {share:.2f}: the device is the limit, not the host; {NOT_COUNTED}"


_TESTS: tuple[Callable[[RunRecord], Bound | None], ...] = (_not_measured, _same_as_device, _waits_by_itself, _host)
"""In this order: a test may rely on those before it having passed on."""
