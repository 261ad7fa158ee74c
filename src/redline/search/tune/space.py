"""Every recipe that may be tried: at most one step of each family, none beside what it excludes or without what it needs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from redline.analyze.tune.record import Refused, TuneSpec
from redline.errors import SpecError, UnknownName
from redline.protocol import StepChoice, StepNeed
from redline.spec import Recipe

Steps = frozenset[str]
"""A recipe as the set of its steps' texts."""

BASELINE: Steps = frozenset()

MOST_RECIPES = 20_000
"""Beyond it only recipes with few steps are enumerated."""

READING_ORDER = (
    "precision",
    "tf32",
    "quantization",
    "layout",
    "fold-bn",
    "sdpa",
    "compiler",
    "runtime",
    "optimizer",
    "graphs",
    "autotune",
)
"""Families in the order in which a recipe reads well; others stand before the last."""


@dataclass(frozen=True)
class Space:
    """The steps that may be used, and which recipes they make."""

    choices: tuple[StepChoice, ...]

    @cached_property
    def by_step(self) -> dict[str, StepChoice]:
        return {choice.step: choice for choice in self.choices}

    @cached_property
    def families(self) -> dict[str, tuple[StepChoice, ...]]:
        names = sorted({choice.family for choice in self.choices}, key=_reading_place)
        return {name: tuple(choice for choice in self.choices if choice.family == name) for name in names}

    @cached_property
    def _needs(self) -> dict[str, tuple[StepNeed, ...]]:
        return {choice.step: choice.needs for choice in self.choices if choice.needs}

    @cached_property
    def recipes(self) -> tuple[Steps, ...]:
        """All valid ones, those with fewer steps first; the baseline is the first."""
        found: list[Steps] = []
        for most in range(len(self.families) + 1):
            found += self._with_exactly(most)
            if len(found) > MOST_RECIPES:
                break
        return tuple(found[:MOST_RECIPES])

    def text(self, steps: Steps) -> str:
        order = {choice.step: place for place, choice in enumerate(_in_reading_order(self.families))}
        return "+".join(sorted(steps, key=lambda step: order[step])) or "baseline"

    def checked(self, text: str) -> Steps:
        """The recipe of a text that someone asks for; mistakes in it are told in one line."""
        steps = self.steps_of(text)
        lacking = self._lacking(steps)
        if lacking is not None:
            raise SpecError(f"recipe {text}: {lacking}")
        return steps

    def steps_of(self, text: str) -> Steps:
        """The recipe of a text. What was tried before may lack what its steps need: that is how it was learned."""
        steps = frozenset(str(step) for step in Recipe.parse(text).steps)
        unknown = sorted(steps - self.by_step.keys())
        if unknown:
            raise UnknownName("step", unknown[0], self.by_step, hint="not among those that can be tried here")
        if not self._fit_together(steps):
            raise SpecError(f"recipe {text}: its steps exclude each other")
        return steps

    def is_valid(self, steps: Steps) -> bool:
        return self._fit_together(steps) and self._lacking(steps) is None

    def _fit_together(self, steps: Steps) -> bool:
        chosen = [self.by_step[step] for step in sorted(steps)]
        return all(self._fits(chosen[:place], choice) for place, choice in enumerate(chosen))

    def less_one(self, steps: Steps) -> list[tuple[str, Steps]]:
        """Each step, and the recipe without it, where that is one."""
        return [(step, steps - {step}) for step in sorted(steps, key=self.text_place) if self.is_valid(steps - {step})]

    def text_place(self, step: str) -> int:
        return [choice.step for choice in _in_reading_order(self.families)].index(step)

    def _with_exactly(self, count: int) -> Iterator[Steps]:
        yield from self._grown([], list(self.families.values()), count)

    def _grown(self, chosen: list[StepChoice], families: list[tuple[StepChoice, ...]], more: int) -> Iterator[Steps]:
        if more == 0:
            steps = frozenset(choice.step for choice in chosen)
            if self._lacking(steps) is None:
                yield steps
            return
        for place, family in enumerate(families[: len(families) - more + 1]):
            for choice in family:
                if self._fits(chosen, choice):
                    yield from self._grown([*chosen, choice], families[place + 1 :], more - 1)

    def _lacking(self, steps: Steps) -> str | None:
        """Why some step cannot do without one that is not there; None where all have what they need."""
        if not self._needs.keys() & steps:
            return None
        names = {name for step in steps for name in _names(self.by_step[step])}
        needs = ((step, need) for step in sorted(steps) for need in self._needs.get(step, ()))
        return next((f"{step}: {need.reason}" for step, need in needs if not need.is_met(names)), None)

    def _fits(self, chosen: Iterable[StepChoice], new: StepChoice) -> bool:
        return all(
            other.family != new.family and not (_names(other) & set(new.excludes) or _names(new) & set(other.excludes))
            for other in chosen
        )


def space_for(tune: TuneSpec, choices: Sequence[StepChoice]) -> tuple[Space, list[Refused]]:
    """The steps that can be tried, and those that cannot with the reason."""
    known = [*choices, *_own_variants(tune.seeds, choices)]
    names = {name for choice in known for name in _names(choice)}
    for asked in (*tune.steps, *tune.without):
        if asked not in names:
            raise UnknownName("step", asked, names, hint=f"there are {', '.join(sorted(c.step for c in choices))}")
    usable, refused = [], []
    for choice in known:
        reason = _reason_against(choice, tune)
        if reason is None:
            usable.append(choice)
        else:
            refused.append(Refused(step=choice.step, reason=reason))
    return Space(tuple(usable)), refused


def _reason_against(choice: StepChoice, tune: TuneSpec) -> str | None:
    if choice.refusal is not None:
        return choice.refusal
    if choice.quantizes and not tune.allow_quantized:
        return "changes the weights; --allow-quantized tries it"
    if tune.steps and not _names(choice) & set(tune.steps):
        return "not among the steps that were asked for"
    if _names(choice) & set(tune.without):
        return "left out as asked"
    return None


def _own_variants(seeds: Iterable[str], choices: Sequence[StepChoice]) -> list[StepChoice]:
    """Steps of a person's recipes with arguments or options of their own: tried like the plain step."""
    known = {choice.step for choice in choices}
    own = []
    for step in (step for seed in seeds for step in Recipe.parse(seed).steps):
        plain = next((choice for choice in choices if choice.step.partition(":")[0] == step.name), None)
        if str(step) in known:
            continue
        if plain is None:
            raise UnknownName("step", str(step), known, hint="not among those that can be tried here")
        known.add(str(step))
        own.append(msgspec.structs.replace(plain, step=str(step), refusal=None))
    return own


def _names(choice: StepChoice) -> set[str]:
    return {choice.step, choice.step.partition(":")[0]}


def _in_reading_order(families: dict[str, tuple[StepChoice, ...]]) -> list[StepChoice]:
    return [choice for family in families.values() for choice in family]


def _reading_place(family: str) -> tuple[float, str]:
    return (READING_ORDER.index(family) if family in READING_ORDER else len(READING_ORDER) - 1.5, family)
