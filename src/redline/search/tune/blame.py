"""Which recipes are likely to break as others did: the steps, or pairs of steps, that every sound recipe lacks."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import combinations

from redline.search.tune.space import Steps

SAME_AGAIN = 0.03
"""Chance that a recipe with all steps of a broken one works after all."""
GUILTY = 0.6
"""That of a single suspect being to blame by itself: it may only not go with one of the others."""


class Blame:
    """What broke, set against what worked."""

    def __init__(self, sound: Iterable[Steps], broken: Iterable[Steps]) -> None:
        self._cleared = list(sound)
        self._broken = list(broken)
        self._suspects = [(recipe, self._suspects_in(recipe)) for recipe in self._broken]

    def chance(self, recipe: Steps) -> float:
        """That this recipe runs and keeps its numbers."""
        chance = 1.0
        for broken, suspects in self._suspects:
            if broken <= recipe:
                return SAME_AGAIN
            held = sum(suspect <= recipe for suspect in suspects)
            if held:
                chance *= 1 - GUILTY * held / len(suspects)
        return chance

    def _suspects_in(self, recipe: Steps) -> list[Steps]:
        """The smallest parts of it that no sound recipe holds."""
        for size in (1, 2, 3):
            parts = [frozenset(part) for part in combinations(sorted(recipe), size)]
            found = [part for part in parts if not self._is_cleared(part)]
            if found:
                return found
        return [recipe]

    def _is_cleared(self, part: Collection[str]) -> bool:
        return any(set(part) <= sound for sound in self._cleared)
