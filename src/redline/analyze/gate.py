"""What a gate says of one benchmark: is the candidate slower than the baseline, and is that certain?

The threshold is the slowdown that must be caught. A candidate is `slower` when the interval leaves out "no change" and
the estimate is beyond half of the threshold, which is half way between the two; it is `same` when the interval leaves
out the threshold on both sides. As soon as the interval is narrower than the threshold one of the two holds, so that
more processes always decide.

A gate is looked at after each process and ends when it is decided, which favours processes that happen to agree. So no
verdict comes from fewer than five, or twelve where they scatter widely around a change that is not much larger, and
intervals are of 98.5 %: `benchmarks/gate_trials.py` has the false alarms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median, stdev, variance
from typing import Literal

import msgspec
import numpy as np

from redline.analyze.checks import Check
from redline.analyze.compare import allowance, between_processes, valid_step_s
from redline.analyze.pairs import SMALLEST_SPREAD, undisturbed
from redline.analyze.statistics import PairedLog, student_t
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import RunRecord

GateVerdict = Literal["faster", "slower", "same", "inconclusive", "incomparable", "failed"]
GateBasis = Literal["interleaved", "stored", "none"]

THRESHOLD = 0.03
FEWEST_PROCESSES = 5
CONFIDENCE = 0.985
WIDE = 0.5
"""Pairs that scatter by more than this share of the threshold, such as processes with two choices of an autotuner."""
FEWEST_OF_WIDE = 12
WIDE_CONFIDENCE = 0.99
"""Of such, five often happen to agree, and there are more looks until the end."""
WIDE_CHANCE = 0.002
SIGN_DRAWS = 4000
"""And a mean so far from 0 must be rare among the same values with signs at random."""
FIRM = 0.45
"""Of such, `same` could still be a slowdown of two thirds of the threshold unless half the interval is below this share
of it: as long as there is time, more processes are measured."""
FEWEST_AGAINST_STORED = 8
"""The baseline does not grow with each look: chance in it stays, so that the candidate must say more."""
FEWEST_STORED = 3
"""With fewer, what differs between processes is not known and is allowed for."""
OUTLYING = 4.0
"""An outlier is this many times the scatter of the others away, so that one disturbed process does not decide."""
SMALLEST_OUTLIER = 0.003
FEWEST_FOR_OUTLIERS = 8
"""Of fewer values one cannot say what is usual."""
USUAL = 0.75
"""At least this share lies near the middle, or those that do not are another mode: of two, one is often drawn more."""
USUAL_OF_ONE_SIDE = 0.85
"""The same of single processes, of which each pair has two; not of those that are too far out for a mode."""
FAR_OUT = 0.1
"""Neither modes nor ordinary neighbours make processes differ by so much: where every pair does, few are enough."""
DRIFTING = 0.5
"""Neighbours in time vary by less than this share of what all vary by: the machine's pace has been changing."""
NEW_SESSION_S = 1800.0
"""A pause after which stored records belong to another session, with clocks and neighbours of its own."""


class GateRow(Frozen):
    """What the gate says of one benchmark. `ratio` is time of the baseline over time now: below 1 it got slower."""

    name: str
    verdict: GateVerdict
    ratio: float | None
    low: float | None
    high: float | None
    threshold: float
    basis: GateBasis
    confidence: float | None = None
    """Of the interval from `low` to `high`."""
    change: float | None = None
    """Of the time of a step: +0.05 is 5 % slower."""
    baseline_s: float | None = None
    candidate_s: float | None = None
    baseline_processes: int = 0
    candidate_processes: int = 0
    checks: tuple[Check, ...] = ()
    reasons: tuple[Note, ...] = ()
    """Why there is no clear verdict, or what broke."""
    notes: tuple[Note, ...] = ()
    record_ids: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        return self.verdict in ("slower", "failed") or any(each.failed for each in self.checks)

    @property
    def undecided(self) -> bool:
        return self.verdict in ("inconclusive", "incomparable")


class Judged(Frozen):
    """A ratio with its interval. `ratio` is time of the baseline over time of the candidate: above 1 it is faster."""

    verdict: GateVerdict
    ratio: float
    low: float | None
    high: float | None
    confidence: float = CONFIDENCE
    """Of the interval."""
    is_firm: bool = True
    """False: more processes might still say otherwise, where there is time for them."""
    disturbed: int = 0
    """Pairs it comes from beside which other processes had the processors."""


def judge(logs: Sequence[PairedLog], threshold: float) -> Judged | None:
    """From processes measured interleaved, a pair in each replicate; None before there is any.

    Beside other processes on a CPU, by the pairs that these left alone, once there are enough of them; until then the interval
    has room for what either side may have lost.
    """
    if not logs:
        return None
    logs = undisturbed(logs, FEWEST_PROCESSES)
    if len(logs) < 2:
        return Judged(verdict="inconclusive", ratio=math.exp(logs[0].centre), low=None, high=None)
    means = [log.centre for log in logs]
    kept, band = without_outliers(means), math.log1p(threshold)
    scatter = max(stdev(kept), SMALLEST_SPREAD)
    is_wide = stdev(means) > WIDE * band and not (min(means) > FAR_OUT or max(means) < -FAR_OUT)
    confidence, fewest = (WIDE_CONFIDENCE, FEWEST_OF_WIDE) if is_wide else (CONFIDENCE, FEWEST_PROCESSES)
    between = student_t(len(kept) - 1, confidence) * scatter / math.sqrt(len(kept))
    error = math.sqrt(sum(log.error**2 for log in logs)) / len(logs)
    within = student_t(max(sum(log.rounds - 1 for log in logs), 1), confidence) * error
    middle, half = fmean(kept), max(between, within) + fmean(log.doubt for log in logs)
    found = _judged(middle - half, middle, middle + half, threshold, enough=len(logs) >= fewest)
    is_firm = not is_wide or found.verdict != "same" or half < FIRM * band
    if is_wide and found.verdict in ("slower", "faster") and chance_by_signs(kept) > WIDE_CHANCE:
        found = msgspec.structs.replace(found, verdict="inconclusive")
    disturbed = sum(log.doubt > 0 for log in logs)
    return msgspec.structs.replace(found, confidence=confidence, is_firm=is_firm, disturbed=disturbed)


def inputs_apart(baseline: RunRecord, candidate: RunRecord) -> Note | None:
    """Why the steps of the two are not of one size; None where they are, or where one of them never ran."""
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


def chance_by_signs(values: Sequence[float]) -> float:
    """The chance of a mean this far from 0 if every value could as well have had the other sign.

    Two sides that are the same differ by as much in either direction, whatever the distribution: two modes too.
    """
    signs = np.random.default_rng(0).choice((-1.0, 1.0), (SIGN_DRAWS, len(values)))
    means = np.abs(signs @ np.asarray(values))
    return float(np.mean(means >= abs(sum(values)) * (1 - 1e-9)))


def judge_stored(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], threshold: float) -> Judged | None:
    """Against records that were measured at another time, each a process."""
    ours = [math.log(seconds) for record in baseline if (seconds := valid_step_s(record))]
    theirs = [math.log(seconds) for record in candidate if (seconds := valid_step_s(record))]
    if not ours or not theirs:
        return None
    sides = [without_outliers(side, USUAL_OF_ONE_SIDE) for side in (ours, theirs)]
    middle = fmean(sides[0]) - fmean(sides[1])
    if min(len(ours), len(theirs)) < FEWEST_STORED:
        is_wide, half = False, math.log1p(allowance(baseline[0]))
    else:
        apart = max(min(ours) - max(theirs), min(theirs) - max(ours))
        is_wide = max(map(stdev, (ours, theirs))) > WIDE * math.log1p(threshold) and apart < FAR_OUT
        half = math.hypot(_welch(sides[0], sides[1]), _since(baseline, candidate))
    fewest = FEWEST_OF_WIDE if is_wide else FEWEST_AGAINST_STORED
    found = _judged(middle - half, middle, middle + half, threshold, enough=len(theirs) >= fewest)
    if is_wide and found.verdict in ("slower", "faster") and chance_by_sides(sides[0], sides[1]) > WIDE_CHANCE:
        found = msgspec.structs.replace(found, verdict="inconclusive")
    if len(ours) < FEWEST_STORED and found.verdict == "same":
        # What processes differ by is only assumed: enough for a clear alarm, not to call two things the same.
        return msgspec.structs.replace(found, verdict="inconclusive")
    return found


def _welch(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The wider of Welch's interval and the one that takes both sides to scatter alike: a few may agree by chance."""
    sides = (ours, theirs)
    first_s, other_s = ([math.exp(each) for each in side] for side in sides)
    found = between_processes(first_s, other_s, CONFIDENCE)
    degrees = sum(map(len, sides)) - 2
    pooled = sum(variance(side) * (len(side) - 1) for side in sides) / degrees
    alike = math.sqrt(max(pooled, SMALLEST_SPREAD**2) * sum(1 / len(side) for side in sides))
    return max(math.log(found.high / found.ratio), student_t(degrees, CONFIDENCE) * alike)


def _since(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> float:
    """How much the machine may have changed since the baseline was measured, from its drift meanwhile; 0 where it was steady.

    Between sessions, where there are several; and within them, where neighbours in time are more alike than others.
    """
    return max(_between_sessions(baseline), _drift(baseline, candidate))


def _drift(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> float:
    """A random walk, at the rate that the baseline shows, over the time from the one to the other."""
    timed = sorted((record.blocks[0].started_at, math.log(s)) for record in baseline if (s := valid_step_s(record)))
    logs = [log for _, log in timed]
    span_s = timed[-1][0] - timed[0][0]
    if len(logs) < FEWEST_PROCESSES or span_s <= 0:
        return 0.0
    whole, neighbours = variance(logs), fmean((one - other) ** 2 for one, other in pairwise(logs)) / 2
    if neighbours > DRIFTING * whole:
        return 0.0
    later = fmean(record.blocks[0].started_at for record in candidate if record.blocks)
    gap_s = abs(later - fmean(at for at, _ in timed))
    # A walk that is looked at evenly over its span varies by a sixth of what it is apart at the ends.
    return 3 * math.sqrt(6 * (whole - neighbours) * gap_s / span_s)


def _between_sessions(records: Sequence[RunRecord]) -> float:
    """How far one more session may lie from those that are stored; 0 where too few say so."""
    means = [
        fmean(math.log(s) for record in session if (s := valid_step_s(record))) for session in sessions_of(records)
    ]
    if len(means) < FEWEST_STORED:
        return 0.0
    return student_t(len(means) - 1, CONFIDENCE) * math.sqrt(variance(means) * (1 + 1 / len(means)))


def sessions_of(records: Sequence[RunRecord]) -> list[list[RunRecord]]:
    """Timed records, apart where nothing was measured for a while."""
    timed = sorted((record for record in records if valid_step_s(record)), key=lambda record: record.created_at)
    found: list[list[RunRecord]] = [timed[:1]] if timed else []
    for before, record in pairwise(timed):
        if record.created_at - before.created_at > NEW_SESSION_S:
            found.append([])
        found[-1].append(record)
    return found


def chance_by_sides(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Of means as far apart, had the same processes been dealt to the two sides at random."""
    every = np.asarray([*ours, *theirs])
    dealt = np.random.default_rng(0).permuted(np.tile(every, (SIGN_DRAWS, 1)), axis=1)
    means = dealt[:, : len(ours)].mean(axis=1) - dealt[:, len(ours) :].mean(axis=1)
    return float(np.mean(np.abs(means) >= abs(fmean(ours) - fmean(theirs)) * (1 - 1e-9)))


def without_outliers(values: Sequence[float], usual: float = USUAL) -> list[float]:
    """Without those that lie far from the middle, where they are few: they met a neighbour, and say nothing of the code."""
    if len(values) < FEWEST_FOR_OUTLIERS:
        return list(values)
    middle = median(values)
    scatter = 1.4826 * median(abs(value - middle) for value in values)
    kept = [value for value in values if abs(value - middle) <= max(OUTLYING * scatter, SMALLEST_OUTLIER)]
    dropped = [value for value in values if value not in kept]
    is_far = all(abs(value - middle) > FAR_OUT for value in dropped)
    return kept if len(kept) >= (usual if not is_far else USUAL) * len(values) else list(values)


def judged_at(found: Judged, threshold: float) -> GateVerdict:
    """Its verdict where a smaller threshold decides it: below half of a large one may still be far above a small one."""
    if found.verdict != "same" or found.low is None or found.high is None:
        return found.verdict
    again = _judged(math.log(found.low), math.log(found.ratio), math.log(found.high), threshold, enough=True)
    return again.verdict if again.verdict in ("slower", "faster") else found.verdict


def _judged(low: float, middle: float, high: float, threshold: float, *, enough: bool) -> Judged:
    """All logarithms of a ratio: below 0 the candidate is slower."""
    band = math.log1p(threshold)
    verdict: GateVerdict = "inconclusive"
    if enough and high < 0 and middle <= -band / 2:
        verdict = "slower"
    elif enough and low > 0 and middle >= band / 2:
        verdict = "faster"
    elif enough and low > -band and high < band:
        verdict = "same"
    return Judged(verdict=verdict, ratio=math.exp(middle), low=math.exp(low), high=math.exp(high))


def middle_s(records: Sequence[RunRecord]) -> float | None:
    """The step of the middle process."""
    found = [seconds for record in records if (seconds := valid_step_s(record))]
    return median(found) if found else None
