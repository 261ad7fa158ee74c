"""What a trial will take, by what those like it took: a budget is kept by asking before, not by stopping halfway."""

from __future__ import annotations

from statistics import median

from redline.search.tune.rules import prepare_s
from redline.search.tune.space import Steps
from redline.search.tune.tuner import Tuner

FIRST_TRIAL_S = 4.0
SLOW_SHARE = 0.25
"""A step that takes minutes to prepare is tried only when it takes no more than this share of what is left."""
ALIKE = 3
"""Of the trials like it, so many of the nearest say what a recipe will take."""


class Costs:
    """What trials took so far, and what others will take by that."""

    def __init__(self, tuner: Tuner) -> None:
        self._choices = tuner.space.by_step
        self._known: dict[Steps, float] = {}
        self._paid_first: set[Steps] = set()
        """Those that met a step first, and may have paid for it once and for all: kernels loaded, caches filled."""
        sound, met = tuner.seen(), set[str]()
        for trial in tuner.tune.trials:
            steps = tuner.space.steps_of(trial.recipe)
            if steps not in sound:
                continue  # what broke says nothing about what it takes to the end
            if steps - met and steps not in self._known:
                self._paid_first.add(steps)
            met |= steps
            self._known[steps] = min(trial.cost_s, self._known.get(steps, trial.cost_s))
        self._met = {self._kind(step) for step in met}

    def expected_s(self, steps: Steps) -> float:
        """As trials like it took that paid for no first time, and what steps take to prepare that were never there."""
        fresh_s = sum(prepare_s(self._choices[step]) for step in steps if self._kind(step) not in self._met)
        return fresh_s + (self._as_others(steps) if self._known else FIRST_TRIAL_S)

    def reopening_s(self, steps: Steps) -> float:
        """What was compiled before is in the cache; what was not will take as long as those like it did."""
        expected_s = self.expected_s(steps)
        return min(expected_s, warm_s(self._known[steps])) if steps in self._known else expected_s

    def _as_others(self, steps: Steps) -> float:
        prepared = self._prepared(steps)
        apart = {other: len(prepared ^ self._prepared(other)) for other in self._known}
        alike = [other for other in self._known if apart[other] == min(apart.values())]
        settled = [other for other in alike if other not in self._paid_first]
        if not settled:
            return min(self._known[other] for other in alike)
        nearest = sorted(settled, key=lambda other: len(steps ^ other))[:ALIKE]
        return median(self._known[other] for other in nearest)

    def _prepared(self, steps: Steps) -> set[tuple[str, bool]]:
        """Who compiles is like who compiles, in whichever mode."""
        return {self._kind(step) for step in steps if prepare_s(self._choices[step]) > 0}

    def _kind(self, step: str) -> tuple[str, bool]:
        return self._choices[step].family, self._choices[step].is_slow_to_prepare


def warm_s(cost_s: float) -> float:
    """Opening it again: what it took beyond a plain trial was mostly compiling, and that is in the cache now."""
    return min(cost_s, FIRST_TRIAL_S + 0.25 * cost_s)
