"""Judges one benchmark of a gate: is the candidate slower than the baseline, and is that certain?

The threshold is the slowdown that must be caught. Where the estimate is beyond half of the
threshold, a candidate is `slower` as soon as the interval excludes "no change"; below half of it, `same` as soon as the interval excludes the threshold on
both sides. An interval narrower than the threshold always decides.

Processes of one program may differ by several percent, in modes or with outliers, so that estimate and interval are those of Hodges and
Lehmann (Annals of Mathematical Statistics 34, 1963), which go by ranks. With so few pairs that ranks cannot have the confidence, Student's interval stands
in. A gate is looked at while it grows, and every look may err: `LOOKS` shares an error of 5 % between them, by the spending function of
Lan and DeMets (Biometrika 70, 1983). `benchmarks/gate_trials.py` has the false alarms and the power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement, pairwise
from statistics import fmean, median, stdev, variance
from typing import Literal

import numpy as np

from redline.analyze.checks import Check
from redline.analyze.compare import allowance, valid_step_s
from redline.analyze.history import sessions
from redline.analyze.pairs import undisturbed
from redline.analyze.statistics import PairedLog, autocorrelation_inflation, by_ranks, shift_between, student_t
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import RunRecord

GateVerdict = Literal["faster", "slower", "same", "inconclusive", "incomparable", "failed"]
GateBasis = Literal["interleaved", "stored", "none"]

THRESHOLD = 0.03
LOOKS = {5: 0.992, 6: 0.9955, 7: 0.9955, 8: 0.9955, 10: 0.994, 12: 0.994, 15: 0.992, 18: 0.992, 22: 0.99, 27: 0.989, 33: 0.987, 40: 0.986, 48: 0.985}  # fmt: skip
"""The numbers of processes at which a verdict may be drawn, with the confidence that each look needs.

Together they err in 5 % of all gates: a Gaussian walk of 48 steps crosses these bounds so often, 0.05 · ln(1 + (e - 1) · n / 48) of all by look n.
"""
FEWEST_PROCESSES, MOST_PROCESSES = min(LOOKS), max(LOOKS)
FEWEST_STORED = 3
"""With fewer stored processes, what differs between processes is not known and is allowed for."""


class Compared(Frozen, frozen=True, kw_only=True):
    """`ratio` is time of the baseline over time now: below 1 it got slower."""

    verdict: GateVerdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """The interval from `low` to `high` has this confidence."""

    @property
    def change(self) -> tuple[float | None, float | None, float | None]:
        """Returns the change of the time of a step and its interval: +0.05 is 5 % slower."""
        value, low, high = (None if bound is None else 1 / bound - 1 for bound in (self.ratio, self.high, self.low))
        return value, low, high


class GateRow(Compared, frozen=True, kw_only=True):
    """The gate says this of one benchmark."""

    name: str
    threshold: float
    basis: GateBasis
    baseline_s: float | None = None
    candidate_s: float | None = None
    baseline_processes: int = 0
    candidate_processes: int = 0
    checks: tuple[Check, ...] = ()
    reasons: tuple[Note, ...] = ()
    """They say why there is no clear verdict, or what broke."""
    notes: tuple[Note, ...] = ()
    record_ids: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.verdict in ("slower", "failed") or any(check.failed for check in self.checks)

    @property
    def undecided(self) -> bool:
        return self.verdict in ("inconclusive", "incomparable")

    def __str__(self) -> str:
        failed = [f"{check.name} {check.said}" for check in self.checks if check.failed]
        change, low, high = self.change
        if change is None:
            return f"{self.verdict}: {'; '.join([*failed, *map(str, self.reasons)])}"
        bounds = "" if low is None or high is None else f" ({low:+.1%} to {high:+.1%})"
        return "; ".join([f"{self.verdict}: time {change:+.1%}{bounds}, threshold {self.threshold:.1%}", *failed])


class Judged(Compared, frozen=True, kw_only=True):
    ratio: float
    disturbed: int = 0
    """Pairs that count although other processes had the processors beside them."""


def judge(logs: Sequence[PairedLog], threshold: float) -> Judged | None:
    """Judges processes that were measured interleaved, a pair in each replicate. Returns None before there is any.

    On a CPU beside other processes the pairs that these left alone decide, once there are enough of them; until then the interval has room
    for what either side may have lost.
    """
    if not logs:
        return None
    logs = undisturbed(logs, FEWEST_PROCESSES)
    centres = [log.centre for log in logs]
    if len(logs) < 2:
        return Judged(verdict="inconclusive", ratio=math.exp(centres[0]), low=None, high=None)
    confidence = confidence_after(len(logs))
    averages = [(one + other) / 2 for one, other in combinations_with_replacement(centres, 2)]
    count = len(logs)
    low, middle, high = by_ranks(averages, count * (count + 1) * (2 * count + 1) / 24, confidence) or _by_student(
        centres, confidence
    )
    error = math.sqrt(sum(log.error**2 for log in logs)) / count
    within = student_t(max(sum(log.rounds - 1 for log in logs), 1), confidence) * error
    doubt = fmean(log.doubt for log in logs)
    bounds = min(low, middle - within) - doubt, middle, max(high, middle + within) + doubt
    return _judged(bounds, threshold, confidence, is_look=count in LOOKS, disturbed=sum(log.doubt > 0 for log in logs))


def judge_stored(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], threshold: float) -> Judged | None:
    """Judges against records that were measured at another time, each a process."""
    sides = [
        [math.log(seconds) for record in side if (seconds := valid_step_s(record))] for side in (baseline, candidate)
    ]
    ours, theirs = sides
    if not all(sides):
        return None
    confidence = confidence_after(len(theirs))
    few = min(map(len, sides)) < FEWEST_STORED
    if few:
        middle, half = median(ours) - median(theirs), math.log1p(allowance(baseline[0]))
        low, high = middle - half, middle + half
    else:
        low, middle, high = shift_between(ours, theirs, confidence)
        # Records that follow each other say less than as many independent ones, and sessions differ as a whole.
        wider = math.sqrt(max(autocorrelation_inflation(np.asarray(side)) for side in sides))
        apart = _between_sessions(baseline, confidence)
        low, high = (
            middle - math.hypot(wider * (middle - low), apart),
            middle + math.hypot(wider * (high - middle), apart),
        )
    found = _judged((low, middle, high), threshold, confidence, is_look=len(theirs) in LOOKS)
    # An assumed spread is enough for a clear alarm, but not to call two things the same.
    is_assumed = few and found.verdict == "same"
    return Judged(verdict="inconclusive", ratio=found.ratio, low=found.low, high=found.high) if is_assumed else found


def confidence_after(processes: int) -> float:
    return LOOKS[max((look for look in LOOKS if look <= processes), default=FEWEST_PROCESSES)]


def _by_student(values: Sequence[float], confidence: float) -> tuple[float, float, float]:
    middle, half = fmean(values), student_t(len(values) - 1, confidence) * stdev(values) / math.sqrt(len(values))
    return middle - half, middle, middle + half


def _between_sessions(records: Sequence[RunRecord], confidence: float) -> float:
    """Returns how far one more session may lie from those that are stored; 0 where too few say so."""
    timed = sorted((record.created_at, math.log(s)) for record in records if (s := valid_step_s(record)))
    starts = sessions([moment for moment, _ in timed])
    means = [fmean(log for _, log in timed[a:b]) for a, b in pairwise([*starts, len(timed)])]
    if len(means) < FEWEST_STORED:
        return 0.0
    return student_t(len(means) - 1, confidence) * math.sqrt(variance(means) * (1 + 1 / len(means)))


def _judged(
    logs: tuple[float, float, float], threshold: float, confidence: float, *, is_look: bool, disturbed: int = 0
) -> Judged:
    """Judges low, middle and high of the logarithm of a ratio: below 0 the candidate is slower."""
    ratio = [math.exp(log) for log in logs]
    return Judged(
        verdict=verdict_at(logs, threshold) if is_look else "inconclusive",
        ratio=ratio[1],
        low=ratio[0],
        high=ratio[2],
        confidence=confidence,
        disturbed=disturbed,
    )


def verdict_at(logs: tuple[float, float, float], threshold: float) -> GateVerdict:
    """The side of halfway on which the estimate lies says what may be claimed, and the interval must exclude the other."""
    (low, middle, high), band = logs, math.log1p(threshold)
    if abs(middle) < band / 2:
        return "same" if -band < low and high < band else "inconclusive"
    return "slower" if high < 0 else "faster" if low > 0 else "inconclusive"


def judged_at(found: Judged, threshold: float) -> GateVerdict:
    """Returns the verdict by a smaller threshold: a change below half of a large one may be far above a small one."""
    if found.verdict != "same" or found.low is None or found.high is None:
        return found.verdict
    again = verdict_at((math.log(found.low), math.log(found.ratio), math.log(found.high)), threshold)
    return again if again in ("slower", "faster") else "same"


def inputs_apart(baseline: RunRecord, candidate: RunRecord) -> Note | None:
    """Says why the steps of the two are not of one size. Returns None where they are, or where one of them never ran."""
    if baseline.prepared is None or candidate.prepared is None:
        return None
    sides = [baseline.prepared.workload, candidate.prepared.workload]
    shapes = [", ".join(side.input_shapes) for side in sides]
    if not all(shapes):
        shapes = [f"{side.items_per_step} {side.item}" for side in sides]
    if shapes[0] == shapes[1]:
        return None
    told = f"a step of the baseline is of {shapes[0]}, now of {shapes[1]}"
    return note("differs", f"{told}: their times do not compare; give both the same inputs", about="inputs")


def middle_s(records: Sequence[RunRecord]) -> float | None:
    """Returns the step of the middle process."""
    found = [seconds for record in records if (seconds := valid_step_s(record))]
    return median(found) if found else None
