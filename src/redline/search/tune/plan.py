"""What to try first when the budget does not hold everything: a cheap look must not cost the chance of a better one.

A plan is a set of recipes that fits into what is left, and is worth what the best of them is expected to bring. The
usual plan takes the most improvement per second first; the others begin with one of the more promising recipes that the
usual one would leave no time for. (Taking the better of the two is what keeps such a greedy choice from ever being far
off the best plan there is.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redline.search.tune.space import Steps

Floats = NDArray[np.float64]

RIVALS = 6
"""Of those the usual plan leaves no time for, so many of the most promising are weighed against it."""


@dataclass(frozen=True)
class Candidate:
    """A recipe that is worth its seconds and fits into what is left."""

    place: int
    steps: Steps
    gain: float
    cost_s: float
    room_s: float
    """What may be spent before it is done."""

    @property
    def density(self) -> float:
        return self.gain / self.cost_s

    def fits_after(self, spent_s: float) -> bool:
        return spent_s + self.cost_s <= self.room_s


def crowded_out(candidates: Sequence[Candidate]) -> list[Candidate]:
    """More promising ones than the one that brings most per second, for which it would leave no time."""
    usual = max(candidates, key=lambda each: each.density)
    lost = [each for each in candidates if each.gain > usual.gain and not each.fits_after(usual.cost_s)]
    return sorted(lost, key=lambda each: -each.gain)[:RIVALS]


def best_first(candidates: Sequence[Candidate], rivals: Sequence[Candidate], futures: Floats) -> Candidate:
    """The one to begin with; `futures` has a row for each candidate, in their order."""
    usual = max(candidates, key=lambda each: each.density)
    rows = {each.place: row for each, row in zip(candidates, futures, strict=True)}
    return max([usual, *rivals], key=lambda first: worth(first, candidates, rows))


def worth(first: Candidate, candidates: Sequence[Candidate], rows: dict[int, Floats]) -> float:
    """What is expected of a plan that begins with this one and goes on with what brings most per second."""
    brings, spent_s = rows[first.place], first.cost_s
    costs = np.array([each.cost_s for each in candidates])
    rooms = np.array([each.room_s for each in candidates])
    futures = np.array([rows[each.place] for each in candidates])
    while True:
        more = np.maximum(futures, brings).mean(axis=1) - brings.mean()
        more[spent_s + costs > rooms] = 0.0
        place = int(np.argmax(more / costs))
        if more[place] <= 1e-6:
            return float(brings.mean())
        brings, spent_s = np.maximum(brings, futures[place]), spent_s + costs[place]
