"""A search's result as the way from the baseline to its winner."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.analyze.headroom import Headroom, HeadroomStep
from redline.analyze.summary import RunSummary
from redline.analyze.tune.certainty import winner_verdict
from redline.analyze.tune.finding import TuneFinding, Winner
from redline.spec import BASELINE

TOGETHER = "together"
"""What the steps bring only in company: each alone was left out without it showing."""
TWICE = "counted twice"
"""The steps need each other: leaving out one takes from the others what they bring."""
OTHERS = "the other steps"
"""What nobody measured apart, for want of time."""
ALL = "all steps"
"""The same where no step at all was measured apart."""
WORTH_A_BAR = 0.01


def headroom_of(finding: TuneFinding, rows: Sequence[RunSummary]) -> Headroom | None:
    """None where there is no winner but the baseline itself, or its time is not known.

    The gain of each step was measured by leaving it out of the winner. Steps that help each other then count the help
    twice, and steps that do the same work hide it: what is left to the whole ratio is a bar of its own.
    """
    winner = finding.winner
    row = next((row for row in rows if winner is not None and row.record_id == winner.record_id), None)
    winner_s = _step_s(row, finding.objective) if row is not None else None
    if (
        winner is None
        or row is None
        or winner_s is None
        or winner.recipe == BASELINE
        or not math.isfinite(winner.ratio)
    ):
        return None
    limit_s = row.roofline.attainable_s if row.roofline is not None and row.roofline.error is None else None
    return Headroom(
        title=f"{finding.model} · {finding.task} · batch {winner.batch} · {finding.objective}",
        baseline=BASELINE,
        baseline_s=winner_s * winner.ratio,
        winner=winner.recipe,
        steps=tuple(_steps(finding, winner)),
        low=winner.low,
        high=winner.high,
        verdict=", ".join([*row.verdict.labels, *_doubts(finding, winner)]),
        roofline_s=limit_s if limit_s is not None and 0 < limit_s < winner_s else None,
        record_id=winner.record_id,
    )


def _doubts(finding: TuneFinding, winner: Winner) -> list[str]:
    """What the ratio leaves open, beside what is to be said of the winner's own time."""
    verdict = winner_verdict(finding, winner)
    only = ["seen in one process only"] if winner.low is None else []
    return [*([verdict] if verdict != "faster" else []), *only]


def _steps(finding: TuneFinding, winner: Winner) -> list[HeadroomStep]:
    steps = [HeadroomStep(name=each.step, gain=each.gain, low=each.low, high=each.high) for each in finding.steps]
    rest = winner.ratio / math.prod(step.gain for step in steps)
    if abs(math.log(rest)) <= WORTH_A_BAR:
        return steps
    return [*steps, HeadroomStep(name=_name_of_rest(rest, steps, winner), gain=rest)]


def _name_of_rest(rest: float, steps: Sequence[HeadroomStep], winner: Winner) -> str:
    if not steps:
        return ALL
    if not {step.name for step in steps} >= set(winner.recipe.split("+")):
        return OTHERS
    return TOGETHER if rest > 1 else TWICE


def _step_s(row: RunSummary, objective: str) -> float | None:
    if objective == "latency":
        return row.latency_s.p50 if row.latency_s is not None else None
    return row.batch / row.throughput_per_s if row.batch and row.throughput_per_s else None
