"""How sure a search is that its winner is faster than the baseline."""

from __future__ import annotations

import math
from typing import Literal

from redline.analyze.race import RaceVerdict, verdict_of
from redline.analyze.tune.finding import ONE_PROCESS_DOUBT, TuneFinding, Winner
from redline.spec import BASELINE

Certainty = Literal["decided", "one process", "undecided"]
"""`decided`: the interval over processes lies above 1. `one process`: a gain that no other process has confirmed."""


def certainty_of(winner: Winner) -> Certainty:
    """As everywhere in the advice: a recipe whose interval reaches down to 1 may be no faster at all."""
    if winner.recipe == BASELINE or not math.isfinite(winner.ratio):
        return "undecided"
    if winner.low is not None:
        return "decided" if winner.low > 1 else "undecided"
    return "one process" if math.log(winner.ratio) > ONE_PROCESS_DOUBT else "undecided"


def winner_verdict(finding: TuneFinding, winner: Winner) -> RaceVerdict:
    """By its own interval; where it has none, as the ranking has it."""
    if winner.low is not None and winner.high is not None:
        return verdict_of(winner.low, winner.high)
    return next((ranked.verdict for ranked in finding.ranking if ranked.recipe == winner.recipe), "inconclusive")
