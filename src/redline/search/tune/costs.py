"""What a trial will take, by what those like it took: a budget is kept by asking before, not by stopping halfway."""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from redline.search.tune.rules import prepare_s
from redline.search.tune.space import Steps
from redline.search.tune.tuner import Tuner

FIRST_TRIAL_S = 4.0
WARM_SHARE = 0.25
"""Of what compiling took, when it is found in the cache: reading it, and loading what was made."""
ALIKE = 3
"""Of the trials like it, so many of the nearest say what a recipe will take."""

Kind = frozenset[tuple[str, bool]]
"""How a recipe is prepared: who compiles is like who compiles, whatever the mode, unless that one takes minutes."""


class Costs:
    """What trials took so far, and what other recipes will take by that.

    Some things are paid once and must not be charged to whoever comes later: the first use of a step, whose kernels and
    libraries come from disk, and the first compilation of a program, which is in a cache then. What a trial took that
    broke before its end says nothing.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._choices = tuner.space.by_step
        self._known: dict[Steps, float] = {}
        self._paid_first: set[Steps] = set()
        """Those that were the first with one of their steps."""
        self._cold: set[Steps] = set()
        """Those that were the first to have their program compiled."""
        self._compiled: set[Steps] = set()
        met: set[str] = set()
        unsure: set[Steps] = set()
        for trial in tuner.tune.trials:
            steps = tuner.space.steps_of(trial.recipe)
            program, record = self._program(steps), tuner.records.get(trial.record_id)
            if steps in tuner.seen() and steps not in self._known and program not in unsure:
                self._known[steps] = trial.cost_s
                self._paid_first |= {steps} if steps - met else set()
                self._cold |= {steps} if program not in self._compiled else set()
                met |= steps
            if record is not None and record.prepared is not None:
                self._compiled.add(program)
            elif self._kind(steps):
                unsure.add(program)  # it broke before or after it was compiled: nobody knows what is in the cache
        recipes = {str(record.spec.recipe) for record in tuner.records.values() if record.prepared is not None}
        self._compiled |= {self._program(tuner.space.steps_of(recipe)) for recipe in recipes}

    def expected_s(self, steps: Steps) -> float:
        """To open this recipe, now for the first time or again, to check it and to time it."""
        is_warm = self._program(steps) in self._compiled
        return self._warm_s(steps) if is_warm or not self._kind(steps) else self._cold_s(steps)

    def anew_s(self, steps: Steps) -> float:
        """At a batch it was never opened at: whatever it compiles is compiled again."""
        return self._cold_s(steps) if self._kind(steps) else self._plain_s(steps)

    def _warm_s(self, steps: Steps) -> float:
        """The same once its program has been compiled."""
        warm = [other for other in self._alike(steps) if other not in self._cold]
        if not self._kind(steps):
            return self._plain_s(steps)
        if warm:
            return self._middle(steps, warm)
        plain_s = self._plain_s(steps)
        return plain_s + WARM_SHARE * max(self._cold_s(steps) - plain_s, 0.0)

    def _cold_s(self, steps: Steps) -> float:
        """By others that had to compile; else a plain trial, and what experience says about compiling."""
        cold = [other for other in self._alike(steps) if other in self._cold]
        own = [other for other in cold if self._program(other) == self._program(steps)]
        if cold:
            return self._known[own[0]] if own else self._middle(steps, cold)
        return self._plain_s(steps) + sum(prepare_s(self._choices[step]) for step in steps)

    def _plain_s(self, steps: Steps) -> float:
        """With nothing to compile."""
        plain = [other for other in self._known if not self._kind(other)]
        return self._middle(steps, plain) if plain else FIRST_TRIAL_S

    def _alike(self, steps: Steps) -> list[Steps]:
        return [other for other in self._known if self._kind(other) == self._kind(steps)]

    def _middle(self, steps: Steps, others: Iterable[Steps]) -> float:
        """The median of the nearest that paid for no first use; where all did, the cheapest."""
        settled = [other for other in others if other not in self._paid_first]
        if not settled:
            return min(self._known[other] for other in others)
        nearest = sorted(settled, key=lambda other: len(steps ^ other))[:ALIKE]
        return median(self._known[other] for other in nearest)

    def _kind(self, steps: Iterable[str]) -> Kind:
        choices = (self._choices[step] for step in steps)
        return frozenset((choice.family, choice.is_slow_to_prepare) for choice in choices if prepare_s(choice) > 0)

    def _program(self, steps: Steps) -> Steps:
        return frozenset(step for step in steps if not self._choices[step].leaves_program)
