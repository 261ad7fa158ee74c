"""Which recipes are likely to break as others did.

Suspects are the steps, and pairs of steps, of broken recipes that no sound recipe holds. Whoever was there each time
something broke is likelier to be the one than who was there once; a step is likelier than a pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import combinations

from redline.search.tune.space import Steps

SAME_AGAIN = 0.005
"""Chance that a recipe with all steps of a broken one works after all."""
PAIR_WEIGHT = 0.3
"""Of a pair being to blame, against one step by itself."""
THERE_AGAIN = 20.0
"""By so much each further broken recipe speaks against those that were in it too."""
MOST_TOLD = 12
"""More breakages than this say nothing new."""


class Blame:
    """What broke, set against what worked."""

    def __init__(self, sound: Iterable[Steps], broken: Iterable[Steps]) -> None:
        self._broken = list(broken)
        cleared = {part for recipe in sound for part in _parts(recipe)}
        suspects = [[part for part in _parts(recipe) if part not in cleared] for recipe in self._broken]
        present = Counter(part for parts in suspects for part in parts)
        self._guilt: dict[Steps, float] = {}
        for parts in suspects:
            weights = {part: _weight(part, present[part]) for part in parts}
            whole = sum(weights.values())
            for part, weight in weights.items():
                self._guilt[part] = max(self._guilt.get(part, 0.0), weight / whole)

    def chance(self, recipe: Steps) -> float:
        """That this recipe runs and keeps its numbers."""
        if any(broken <= recipe for broken in self._broken):
            return SAME_AGAIN
        chance = 1.0
        for part, guilt in self._guilt.items():
            if part <= recipe:
                chance *= 1 - guilt
        return chance


def _parts(recipe: Steps) -> list[Steps]:
    steps = sorted(recipe)
    return [frozenset(part) for size in (1, 2) for part in combinations(steps, size)]


def _weight(part: Steps, times: int) -> float:
    return (1.0 if len(part) == 1 else PAIR_WEIGHT) * THERE_AGAIN ** (min(times, MOST_TOLD) - 1)
