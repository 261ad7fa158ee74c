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
from redline.analyze.compare import valid_step_s
from redline.analyze.history import sessions
from redline.analyze.pairs import undisturbed
from redline.analyze.statistics import PairedLog, autocorrelation_inflation, by_ranks, shift_between, student_t
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import RunRecord

GateVerdict = Literal["faster", "slower", "same", "inconclusive", "incomparable", "failed"]
GateBasis = Literal["interleaved", "stored", "none"]

THRESHOLD = 0.03
"""The gate must catch a slowdown of this share, unless another threshold is asked for."""
LOOKS = {5: 0.992, 6: 0.9955, 7: 0.9955, 8: 0.9955, 10: 0.994, 12: 0.994, 15: 0.992, 18: 0.992, 22: 0.99, 27: 0.989, 33: 0.987, 40: 0.986, 48: 0.985}  # fmt: skip
"""The numbers of processes at which a verdict may be drawn, with the confidence that each look needs.

Together they err in 5 % of all gates: a Gaussian walk of 48 steps crosses these bounds so often, 0.05 · ln(1 + (e - 1) · n / 48) of all by look n.
"""
FEWEST_PROCESSES, MOST_PROCESSES = min(LOOKS), max(LOOKS)
FEWEST_STORED = 3
"""A baseline needs this many stored processes: with fewer, nobody knows what differs between processes. The same holds for sessions."""


class Judged(Frozen, frozen=True, kw_only=True):
    """`ratio` is time of the baseline over time now: below 1 it got slower."""

    verdict: GateVerdict
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    confidence: float | None = None
    """The interval from `low` to `high` has this confidence."""
    disturbed: int = 0
    """This many pairs count although other processes had the processors beside them."""

    @property
    def change(self) -> tuple[float | None, float | None, float | None]:
        """Returns the change of the time of a step and its interval: +0.05 is 5 % slower."""
        value, low, high = (None if bound is None else 1 / bound - 1 for bound in (self.ratio, self.high, self.low))
        return value, low, high


class GateRow(Judged, frozen=True, kw_only=True):
    """The gate says this of one benchmark."""

    name: str
    threshold: float
    basis: GateBasis
    baseline_s: float | None = None
    candidate_s: float | None = None
    baseline_processes: int = 0
    candidate_processes: int = 0
    checks: tuple[Check, ...] = ()
    notes: tuple[Note, ...] = ()
    """They begin with why there is no clear verdict, or with what broke."""
    record_ids: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.verdict in ("slower", "failed") or any(check.failed for check in self.checks)

    @property
    def undecided(self) -> bool:
        return self.verdict in ("inconclusive", "incomparable")

    def __str__(self) -> str:
        change, low, high = self.change
        said = [] if change is None else [f"time {change:+.1%}", f"threshold {self.threshold:.1%}"]
        if change is not None and low is not None and high is not None:
            said[0] += f" ({low:+.1%} to {high:+.1%})"
        checks = [f"{check.name} {check.said}" for check in self.checks if check.failed]
        return f"{self.verdict}: {'; '.join([*said, *checks, *map(str, self.notes[: not said])])}"


def judge(logs: Sequence[PairedLog], threshold: float) -> Judged | None:
    """Judges processes that were measured interleaved, a pair in each replicate. Returns None before there is any.

    On a CPU beside other processes the pairs that these left alone decide, once there are enough of them; until then the interval has room
    for what either side may have lost.
    """
    if not logs:
        return None
    logs = undisturbed(logs, FEWEST_PROCESSES)
    centres, count = [log.centre for log in logs], len(logs)
    if count < 2:
        return Judged(verdict="inconclusive", ratio=math.exp(centres[0]))
    confidence = confidence_after(count)
    averages = [(one + other) / 2 for one, other in combinations_with_replacement(centres, 2)]
    by_rank = by_ranks(averages, count * (count + 1) * (2 * count + 1) / 24, confidence)
    middle = fmean(centres)
    half = student_t(count - 1, confidence) * stdev(centres) / math.sqrt(count)
    low, middle, high = by_rank or (middle - half, middle, middle + half)
    error = math.sqrt(sum(log.error**2 for log in logs)) / count
    within = student_t(max(sum(log.rounds - 1 for log in logs), 1), confidence) * error
    doubt = fmean(log.doubt for log in logs)
    bounds = min(low, middle - within) - doubt, middle, max(high, middle + within) + doubt
    return _judged(bounds, threshold, count, disturbed=sum(log.doubt > 0 for log in logs))


def judge_stored(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], threshold: float) -> Judged | None:
    """Judges against records that were measured at another time, each a process. Returns None where they are too few."""
    ours, theirs = (
        [math.log(seconds) for record in side if (seconds := valid_step_s(record))] for side in (baseline, candidate)
    )
    if not theirs or len(ours) < FEWEST_STORED:
        return None
    if len(theirs) < 2:
        return Judged(verdict="inconclusive", ratio=math.exp(median(ours) - theirs[0]))
    confidence = confidence_after(len(theirs))
    low, middle, high = shift_between(ours, theirs, confidence)
    # Records that follow each other say less than as many independent ones, and sessions differ as a whole.
    wider = math.sqrt(max(autocorrelation_inflation(np.asarray(side)) for side in (ours, theirs)))
    apart = _between_sessions(baseline, confidence)
    below, above = (math.hypot(wider * half, apart) for half in (middle - low, high - middle))
    return _judged((middle - below, middle, middle + above), threshold, len(theirs))


def confidence_after(processes: int) -> float:
    return LOOKS[max((look for look in LOOKS if look <= processes), default=FEWEST_PROCESSES)]


def _between_sessions(records: Sequence[RunRecord], confidence: float) -> float:
    """Returns how far one more session may lie from those that are stored, or 0 where too few say so."""
    timed = sorted((record.created_at, math.log(s)) for record in records if (s := valid_step_s(record)))
    starts = sessions([moment for moment, _ in timed])
    means = [fmean(log for _, log in timed[a:b]) for a, b in pairwise([*starts, len(timed)])]
    if len(means) < FEWEST_STORED:
        return 0.0
    return student_t(len(means) - 1, confidence) * math.sqrt(variance(means) * (1 + 1 / len(means)))


def _judged(logs: tuple[float, float, float], threshold: float, processes: int, disturbed: int = 0) -> Judged:
    """Judges low, middle and high of the logarithm of a ratio: below 0 the candidate is slower.

    The side of halfway on which the estimate lies says what may be claimed, and the interval must exclude the other.
    """
    (low, middle, high), band = logs, math.log1p(threshold)
    verdict: GateVerdict = "inconclusive"
    if processes not in LOOKS:
        pass
    elif abs(middle) < band / 2:
        verdict = "same" if -band < low and high < band else "inconclusive"
    else:
        verdict = "slower" if high < 0 else "faster" if low > 0 else "inconclusive"
    return Judged(
        verdict=verdict,
        ratio=math.exp(middle),
        low=math.exp(low),
        high=math.exp(high),
        confidence=confidence_after(processes),
        disturbed=disturbed,
    )


def inputs_apart(baseline: RunRecord, candidate: RunRecord) -> Note | None:
    """Says why the steps of the two are not of one size. Returns None where they are, or where one of them never ran."""
    sides = [record.prepared.workload for record in (baseline, candidate) if record.prepared is not None]
    shapes = [", ".join(side.input_shapes) or str(side.items_per_step) for side in sides]
    if len(set(shapes)) < 2:
        return None
    told = f"a step of the baseline is of {shapes[0]}, now of {shapes[1]}"
    return note("differs", f"{told}: their times do not compare; give both the same inputs", about="inputs")


def middle_s(records: Sequence[RunRecord]) -> float | None:
    """Returns the step of the middle process."""
    found = [seconds for record in records if (seconds := valid_step_s(record))]
    return median(found) if found else None
