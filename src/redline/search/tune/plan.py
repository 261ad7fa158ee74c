"""Who goes first when the budget does not hold everything: a cheap look must not cost the chance of a far better one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from redline.search.tune.space import Steps

FAR_BETTER = 2.0
"""By so much more a recipe must promise than the one that would leave no time for it."""


@dataclass(frozen=True)
class Candidate:
    """A recipe that is worth its seconds and fits into what is left."""

    steps: Steps
    gain: float
    """The improvement it promises, as a share of the fastest time so far."""
    cost_s: float
    room_s: float
    """What may be spent until it is done: all but what the end of the search needs."""

    def fits_after(self, other: Candidate) -> bool:
        return other.cost_s + self.cost_s <= self.room_s


def first_of(candidates: Sequence[Candidate]) -> Candidate:
    """Most improvement per second; but the most promising of all, where that one would leave no time for it."""
    usual = max(candidates, key=lambda each: each.gain / each.cost_s)
    crowded_out = [each for each in candidates if each.gain >= FAR_BETTER * usual.gain and not each.fits_after(usual)]
    return max(crowded_out, key=lambda each: each.gain, default=usual)
