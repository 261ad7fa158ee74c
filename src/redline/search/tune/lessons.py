"""This module says why a recipe may not be recommended, and what its failure teaches.

There is one rule: a failure accuses every part of its recipe, a switch or a pair, that no sound recipe has held yet. The bench may name the
part; then that part is ruled out. Else the blame is shared, and each further failure of a part counts many times. A recipe is worth
what it promises times the chance that it holds nothing that breaks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import combinations, product
from statistics import median

from redline.analyze.blocks import latency_blocks
from redline.analyze.statistics import percentile
from redline.model.note import Note, note
from redline.model.record import LARGEST_TOLERANCE, TOLERANCE_OVER_FLOOR, FailureScope, Numerics, RunRecord
from redline.model.spec import MeasureSpec
from redline.model.units import format_seconds
from redline.search.tune.record import Lesson, Metric, Tolerance, TuneRecord
from redline.search.tune.space import Switches

CHECK_LOSS = 0.01
"""A recipe may lose this share of the baseline's metric, as `--check` promises."""
HANGS = 0.03
"""This is taken to be the chance that a switch that nobody has seen running breaks or never ends."""
BLAME = 3.0
"""A pair, or all variants of a switch alike, is blamed this many times less than one switch, because most faults are of one switch. Each
further broken recipe that holds a part raises its blame by three such steps."""
EXACTLY = ("oom", "timeout", "late")
"""After a failure of these kinds only the recipe itself is ruled out, because another switch may cure it. A recipe that is `late` was given
up after far longer than was expected: something in it may hang, so its parts are accused like those of what broke."""


def is_checked_long(record: RunRecord) -> bool:
    """Returns whether the numbers of a record were looked at as closely as they are in the last race."""
    measure = record.spec.measure
    is_long = measure.check_numerics and measure.loss_path_steps >= MeasureSpec().loss_path_steps
    return is_long and record.prepared is not None


def rejection(record: RunRecord, tune: TuneRecord) -> Note | None:
    """Returns why the recipe of this record must not be recommended; None if it may be."""
    if record.failure is not None:
        return note("failed", f"{record.failure.kind}: {record.failure.told}", about=record.failure.kind)
    wrong = wrong_numbers(record.prepared.numerics, tune.tune.tolerance) if record.prepared is not None else None
    if wrong is not None:
        return note(wrong.code, f"numerics: {wrong}", about="numerics")
    return _too_late(record, tune.tune.slo_p95_s)


def wrong_numbers(numerics: Numerics, tolerance: Tolerance) -> Note | None:
    """Returns why outputs are too far from strict fp32, by the tolerance that was asked for or the bench's own; None if they are not."""
    limit = tolerance.absolute
    if tolerance.factor is not None and numerics.tolerance is not None:
        limit = numerics.tolerance * tolerance.factor / TOLERANCE_OVER_FLOOR
    reason = numerics.reason or note("above-tolerance", "the outputs are too far from strict fp32")
    if limit is None or not numerics.is_compared:
        return reason if numerics.is_wrong else None
    if not numerics.finite or numerics.degenerate or numerics.rel_l2 is None:
        return reason
    limit = min(limit, LARGEST_TOLERANCE)
    text = f"error {numerics.rel_l2:.2g} is above the tolerance {limit:.2g} that was asked for"
    return note("above-tolerance", text) if numerics.rel_l2 > limit else None


def _too_late(record: RunRecord, slo_p95_s: float | None) -> Note | None:
    """Returns why a record misses the latency target, or None. With too few samples for a p95, the median must miss it."""
    samples = [sample for block in latency_blocks(record) for sample in block.samples] if record.blocks else []
    if slo_p95_s is None or not samples:
        return None
    p95_s = percentile(samples, 0.95)
    figure, latency_s = ("p50", median(samples)) if p95_s is None else ("p95", p95_s)
    text = f"latency: {figure} {format_seconds(latency_s)} is over the target {format_seconds(slo_p95_s)}"
    return note("too-late", text, about="latency") if latency_s > slo_p95_s else None


def quantizing_of(switches: Iterable[str], tune: TuneRecord) -> set[str]:
    """Returns those switches that change the weights themselves. Their names decide, whatever options they have."""
    names = {switch.partition(":")[0] for switch in tune.quantizing}
    return {switch for switch in switches if switch.partition(":")[0] in names}


def metric_of(recipe: str, tune: TuneRecord) -> Metric | None:
    """Returns what the user's check has said about a recipe; None if it was not run on it."""
    return next((metric for metric in tune.metrics if metric.recipe == recipe), None)


def unproven(recipe: str, tune: TuneRecord) -> Note | None:
    """Returns why a recipe must not be recommended, however fast it is: the user's check says so, or it is quantized without one.

    Returns None for what the check approves, and for what is neither quantized nor checked yet.
    """
    quantized = ", ".join(sorted(quantizing_of(recipe.split("+"), tune)))
    metric = metric_of(recipe, tune)
    if metric is None and not quantized:
        return None
    if tune.tune.check is None:
        text = "accuracy of a quantized model cannot be judged on random weights; give a check of your own (--check)"
        return note("no-check", f"{quantized}: {text}")
    if metric is None:
        return note("check-not-run", f"{quantized}: your check has not been run on it")
    if metric.failure is not None or metric.value is None or metric.baseline is None:
        return note("check-error", f"your check raised an error: {metric.failure or 'it gave no number'}")
    if metric.value < metric.baseline - CHECK_LOSS * abs(metric.baseline):
        return note("check-failed", f"your check fell from {metric.baseline:.4g} to {metric.value:.4g}")
    return None


# These say what a failure teaches.


def lesson_of(switches: Switches, text: str, record: RunRecord, tune: TuneRecord, *, raced: bool) -> Lesson | None:
    """Returns what is ruled out because this recipe broke, or None. `raced` says that it broke in the last race."""
    why, failure = rejection(record, tune), record.failure
    if why is None or why.code == "too-late":
        return None
    named = frozenset(failure.switches) if failure is not None and failure.scope != "recipe" else frozenset[str]()
    part = named if named and named <= switches else switches
    is_known = part == named or len(part) == 1  # else any of its switches, or two of them together, may be to blame
    scope: FailureScope = "recipe" if not is_known or why.about in EXACTLY else "switch" if len(part) == 1 else "pair"
    return Lesson(
        switches=tuple(sorted(part)),
        scope=scope,
        reason=why,
        recipe=text,
        suspects=tuple(sorted(set(failure.switches) & switches)) if failure is not None else (),
        overrules_trials=raced or (why.about == "numerics" and is_checked_long(record)),
    )


def rules_out(lesson: Lesson, recipe: Collection[str]) -> bool:
    part = frozenset(lesson.switches)
    return part == frozenset(recipe) if is_exact(lesson) else part.issubset(recipe)


def is_exact(lesson: Lesson) -> bool:
    """Returns whether only the recipe itself is ruled out: it ran out of memory or time, or broke once in the race after it had run."""
    by_chance = lesson.overrules_trials and lesson.reason.about != "numerics"
    return lesson.reason.about in EXACTLY or (by_chance and lesson.scope == "recipe")


def overruled_by(recipe: Collection[str], lessons: Iterable[Lesson]) -> Lesson | None:
    """Returns a lesson that speaks against this recipe though its trial has gone well, or None."""
    return next((lesson for lesson in lessons if lesson.overrules_trials and rules_out(lesson, recipe)), None)


class Lessons:
    """This class knows what is ruled out, and says how likely the rest is to break."""

    def __init__(
        self,
        lessons: Collection[Lesson],
        sound: Iterable[Switches],
        ran: Iterable[Switches] = (),
        kin: Mapping[str, str] | None = None,
        doubted: Iterable[str] = (),
    ) -> None:
        """`sound` are recipes that ran and kept their numbers, as closely as these are looked at by now; `ran` are those that ran at all.

        `kin` maps a switch to what it shares with others that often break where it breaks (`sdpa:*` for `sdpa:flash`). `doubted` are
        switches that often do not run on a model like this one.
        """
        self._kin, self._lessons = kin or {}, lessons
        cleared = {part for recipe in sound for part in self._parts(recipe)}
        self._ran = {part for recipe in ran for part in self._parts(recipe)}
        known = [frozenset(lesson.switches) for lesson in lessons if lesson.scope != "recipe"]
        accused: list[list[Switches]] = []
        for lesson in lessons:
            recipe, named = frozenset(lesson.switches), self._with(lesson.suspects)
            if any(part < recipe for part in known):
                continue  # a smaller part is known to break, which explains it
            if lesson.reason.about != "late" and (lesson.scope != "recipe" or is_exact(lesson)):
                continue  # the part is known, or nothing but the recipe is to blame
            innocent = cleared if lesson.overrules_trials else self._ran
            parts = [part for part in self._parts(recipe) if part not in innocent and (not named or part & named)]
            accused.append(parts or [recipe])  # all of its parts run elsewhere: the whole is to blame
        present = Counter(part for parts in accused for part in parts)
        self._blames = [{frozenset({switch}): 0.5} for switch in doubted if frozenset({switch}) not in self._ran]
        """There is one entry for each failure: the parts that may explain it, each with its share of the blame."""
        for parts in accused:
            weights = {part: self._weight(part, present[part]) for part in parts}
            self._blames.append({part: weight / sum(weights.values()) for part, weight in weights.items()})

    def rules_out(self, recipe: Switches) -> bool:
        return any(rules_out(lesson, recipe) for lesson in self._lessons)

    def chance(self, recipe: Switches) -> float:
        """Returns the chance that this recipe runs and keeps its numbers, by what failures have taught."""
        if self.rules_out(recipe):
            return 0.0
        whole = self._with(recipe)
        chance, counted = 1.0, set[Switches]()
        held = [{part: blame for part, blame in blames.items() if part <= whole} for blames in self._blames]
        # One part is to blame for each failure, so shares of the blame add up. A part that is accused twice counts once.
        for blames in sorted(held, key=lambda blames: -sum(blames.values())):
            chance *= 1 - min(sum(blame for part, blame in blames.items() if part not in counted), 1.0)
            counted |= blames.keys()
        return chance

    def novelty(self, recipe: Switches) -> float:
        """Returns the chance that no switch breaks that nobody has seen running. Switches of one name stand for each other."""
        names = {name.partition(":")[0] for part in self._ran for name in part}
        return (1 - HANGS) ** sum(switch.partition(":")[0] not in names for switch in recipe)

    def _lineage(self, switch: str) -> list[str]:
        """Returns the switch, what it is a variant of, what that is one of, and so on."""
        names = [switch]
        while names[-1] in self._kin:
            names.append(self._kin[names[-1]])
        return names

    def _with(self, switches: Iterable[str]) -> Switches:
        return frozenset(name for switch in switches for name in self._lineage(switch))

    def _parts(self, recipe: Iterable[str]) -> list[Switches]:
        """Returns the parts that may be to blame: a switch or all variants of it, alone or beside another one."""
        lineages = [self._lineage(switch) for switch in sorted(recipe)]
        alone = [frozenset({name}) for names in lineages for name in names]
        return alone + [frozenset(pair) for one, other in combinations(lineages, 2) for pair in product(one, other)]

    def _weight(self, part: Switches, times: int) -> float:
        shared = sum(name in self._kin.values() for name in part)
        return math.pow(BLAME, 3 * (min(times, 12) - 1) - (len(part) - 1 + shared))
