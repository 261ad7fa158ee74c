"""Why a recipe may not be recommended, and what that teaches: which part of it broke, and what is never tried again.

The bench often names the switch that broke, and says whether it breaks in any recipe. Where it does not, the part is found by
leaving out halves: a worker that only prepares says whether the rest runs. What is still open then is a matter of odds: switches
that were in broken recipes and in no sound one are suspects, and a recipe that holds them must be worth the risk.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from statistics import median

from redline.analyze.blocks import latency_blocks
from redline.analyze.statistics import percentile
from redline.model.note import Note, note
from redline.model.record import FailureScope, Numerics, RunRecord
from redline.model.units import format_seconds
from redline.search.tune.record import LARGEST_TOLERANCE, NUMERICS_FACTOR, Lesson, Metric, Tolerance, TuneRecord
from redline.search.tune.space import Switches

CHECK_LOSS = 0.01
"""Share of the baseline's metric that a recipe may lose."""
EXACTLY = ("oom", "timeout")
"""Kinds of failure that another switch may cure: only the recipe itself is ruled out."""


def rejection(record: RunRecord, tune: TuneRecord) -> Note | None:
    """Why this recipe must not be recommended; None where it may be."""
    if record.failure is not None:
        return note("failed", f"{record.failure.kind}: {record.failure.told}", about=record.failure.kind)
    if record.prepared is not None and not accepts(record.prepared.numerics, tune.tune.tolerance):
        found = numerics_reason(record.prepared.numerics, tune.tune.tolerance)
        return note(found.code, f"numerics: {found}", about="numerics")
    return too_late(record, tune.tune.slo_p95_s)


def overruled_by(switches: Collection[str], lessons: Iterable[Lesson]) -> Lesson | None:
    """What speaks against a recipe though its trial went well."""
    recipe, overruling = frozenset(switches), (each for each in lessons if each.overrules_trials)
    return next((each for each in overruling if _is_in(frozenset(each.switches), recipe, is_exact(each))), None)


def is_exact(lesson: Lesson) -> bool:
    """Whether only the very recipe is ruled out."""
    return lesson.reason.about in EXACTLY


def _is_in(part: Switches, recipe: Switches, exactly: bool) -> bool:
    return recipe == part if exactly else part <= recipe


def accepts(numerics: Numerics, tolerance: Tolerance) -> bool:
    limit = limit_of(numerics, tolerance)
    if limit is None or not numerics.is_compared:
        return not numerics.is_wrong
    sound = numerics.finite and not numerics.degenerate
    return sound and numerics.rel_l2 is not None and numerics.rel_l2 <= limit


def limit_of(numerics: Numerics, tolerance: Tolerance) -> float | None:
    """The largest relative error that passes; None: as the bench judged."""
    if tolerance.absolute is not None:
        return min(tolerance.absolute, LARGEST_TOLERANCE)
    if tolerance.factor is not None and numerics.tolerance is not None:
        return min(numerics.tolerance * tolerance.factor / NUMERICS_FACTOR, LARGEST_TOLERANCE)
    return None


def numerics_reason(numerics: Numerics, tolerance: Tolerance) -> Note:
    limit = limit_of(numerics, tolerance)
    if (
        limit is None
        or not numerics.is_compared
        or not numerics.finite
        or numerics.degenerate
        or numerics.rel_l2 is None
    ):
        return numerics.reason or note("above-tolerance", "the outputs are too far from strict fp32")
    text = f"the tolerance {limit:.2g} that was asked for"
    if numerics.rel_l2 <= limit:
        return note("within-tolerance", f"error {numerics.rel_l2:.2g} is within {text}")
    return note("above-tolerance", f"error {numerics.rel_l2:.2g} is above {text}")


def too_late(record: RunRecord, slo_p95_s: float | None) -> Note | None:
    """Why it misses the latency target; with too few samples for a p95, the median must miss it."""
    if slo_p95_s is None or not record.blocks:
        return None
    samples = [sample for block in latency_blocks(record) for sample in block.samples]
    if not samples:
        return None
    p95_s = percentile(samples, 0.95)
    told = p95_s if p95_s is not None else median(samples)
    if told <= slo_p95_s:
        return None
    figure = "p95" if p95_s is not None else "p50"
    text = f"latency: {figure} {format_seconds(told)} is over the target {format_seconds(slo_p95_s)}"
    return note("too-late", text, about="latency")


def quantizing_of(switches: Iterable[str], tune: TuneRecord) -> set[str]:
    """Those that change the weights themselves: a switch is what its name says, whatever its options."""
    if not tune.quantizing:  # as in most searches, which ask thousands of times
        return set()
    names = {switch.partition(":")[0] for switch in tune.quantizing}
    return {switch for switch in switches if switch.partition(":")[0] in names}


def metric_of(recipe: str, tune: TuneRecord) -> Metric | None:
    """What the user's check said about a recipe; None where it was not run on it."""
    return next((metric for metric in tune.metrics if metric.recipe == recipe), None)


def unproven(recipe: str, tune: TuneRecord) -> Note | None:
    """Why a recipe must not be recommended, however fast it is: the user's check says so, or it is quantized without one.

    None for what the check approves, and for what is not quantized and not checked yet.
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


PAIR_WEIGHT = 0.3
"""Of a pair being to blame, against one switch by itself."""
SIBLING_WEIGHT = 0.5
"""Of all variants of a switch (`sdpa:flash`, `sdpa:math`) being to blame alike; not where one of them has no options (`compile`): the
others do what it does and more."""
PLAIN_WEIGHT = 0.1
"""Of that one being to blame, and not the others."""
ASSUMED_SOUND = 4.0
"""A compiler that broke with one switch breaks with a new one as often as with those before; so many more count as sound."""
THERE_AGAIN = 20.0
"""By so much each further broken recipe speaks against those that were in it too."""
DOUBT = 0.5
"""The chance that a switch breaks of which the facts about the model make that likely."""
MOST_TOLD = 12
"""More breakages than this say nothing new."""
Probe = Callable[[Switches], bool | None]
"""Whether a recipe runs and keeps its numerics; None: not known, and too dear to find out."""


class Lessons:
    """What is ruled out, and what is suspected."""

    def __init__(
        self,
        lessons: Iterable[Lesson],
        sound: Iterable[Switches],
        suspects: Iterable[tuple[Switches, Switches]] = (),
        variants: Mapping[str, str] | None = None,
        doubted: Iterable[Switches] = (),
        compilers: Iterable[str] = (),
    ) -> None:
        """`suspects`: recipes that broke, each with the switches that the bench suspects (none: all of them).

        `variants`: by switch, what it is a variant of or shares with its siblings (`sdpa:*` for `sdpa:flash`): they often break
        alike. Those may be variants of something else.
        `doubted`: parts that often do not run on a model like this one, or did not in an earlier search.
        `compilers`: switches that read all of the model, and what other switches made of it.
        """
        self._variants = variants or {}
        plain = {shared: switch for switch, shared in self._variants.items() if shared == f"{switch}:*"}
        self._weights = dict.fromkeys(set(self._variants.values()) - plain.keys(), SIBLING_WEIGHT)
        self._weights |= dict.fromkeys(plain.values(), PLAIN_WEIGHT)
        self._ruled_out = [(frozenset(each.switches), is_exact(each)) for each in lessons]
        cleared = {part for recipe in sound for part in self._parts(recipe)}
        broken = dict.fromkeys((self._smallest_broken(recipe), named) for recipe, named in suspects)
        accused = [
            [part for part in self._parts(recipe) if part not in cleared and (not named or part & self._with(named))]
            or [recipe]  # all of its parts run elsewhere: the whole is to blame
            for recipe, named in broken
        ]
        present = Counter(part for parts in accused for part in parts)
        self._accusations = [{part: DOUBT} for part in doubted if part not in cleared]
        """For each failure, the parts that may explain it, each with its share of the blame."""
        for parts in accused:
            weights = {part: self._weight(part, present[part]) for part in parts}
            whole = sum(weights.values())
            self._accusations.append({part: weight / whole for part, weight in weights.items()})
        self._met = cleared | {part for each in self._accusations for part in each}
        self._break_rates = self._rates(self._with(compilers), cleared)
        """By compiler, how often it broke with another switch, where it ever did."""

    def rules_out(self, recipe: Switches) -> bool:
        return any(_is_in(part, recipe, exactly) for part, exactly in self._ruled_out)

    def chance(self, recipe: Switches) -> float:
        """That this recipe runs and keeps its numerics."""
        if self.rules_out(recipe):
            return 0.0
        whole = self._with(recipe)
        held = [{part: blame for part, blame in each.items() if part <= whole} for each in self._accusations]
        chance, counted = 1.0, set[Switches]()
        # One part is to blame for a failure, so that the blame adds up; a part that is accused twice counts once.
        for blames in sorted(held, key=lambda each: -sum(each.values())):
            chance *= 1 - min(sum(blame for part, blame in blames.items() if part not in counted), 1.0)
            counted |= blames.keys()
        return chance

    def chance_of_new_pairs(self, recipe: Switches) -> float:
        """That a compiler which broke with some switches accepts those that it was never seen with: it reads all of them."""
        chance = 1.0
        for switch in recipe:
            name = max(self._lineage(switch), key=lambda name: self._break_rates.get(name, 0.0))
            new = [other for other in recipe - {switch} if frozenset({name, other}) not in self._met]
            chance *= (1 - self._break_rates.get(name, 0.0)) ** len(new)
        return chance

    def _rates(self, compilers: Switches, cleared: Iterable[Switches]) -> dict[str, float]:
        sound = Counter(name for part in cleared if len(part) == 2 for name in part & compilers)
        blamed = defaultdict[str, float](float)
        for part, blame in (each for blames in self._accusations for each in blames.items() if len(each[0]) == 2):
            for name in part & compilers:
                blamed[name] += blame
        return {name: blame / (ASSUMED_SOUND + sound[name]) for name, blame in blamed.items()}

    def _smallest_broken(self, recipe: Switches) -> Switches:
        """The smallest part of a recipe that is known to break, which explains its failure; else the recipe itself."""
        known = [part for part, exactly in self._ruled_out if part <= recipe and not exactly]
        return min(known, key=len, default=recipe)

    def _with(self, switches: Iterable[str]) -> Switches:
        return frozenset(name for switch in switches for name in self._lineage(switch))

    def _lineage(self, switch: str) -> list[str]:
        """The switch, what it is a variant of, what that is one of, and so on."""
        names = [switch]
        while names[-1] in self._variants:
            names.append(self._variants[names[-1]])
        return names

    def _parts(self, recipe: Switches) -> list[Switches]:
        """What may be to blame: a switch or all variants of it, alone or beside another one."""
        lineages = [self._lineage(switch) for switch in sorted(recipe)]
        alone = [frozenset({name}) for names in lineages for name in names]
        pairs = [frozenset(pair) for one, other in combinations(lineages, 2) for pair in product(one, other)]
        return [*alone, *pairs]

    def _weight(self, part: Switches, times: int) -> float:
        own = math.prod(self._weights.get(name, 1.0) for name in part)
        return own * (PAIR_WEIGHT if len(part) == 2 else 1.0) * THERE_AGAIN ** (min(times, MOST_TOLD) - 1)


def find_cause(broken: Switches, runs: Probe, order: Sequence[str]) -> Switches:
    """The smallest part of a broken recipe that was seen to break; the recipe itself where nothing smaller was.

    Adding switches in this order, halving finds the first with which it breaks: that one is needed for it. It stays in,
    and the same again finds the next one, until those that are needed break by themselves. Put last what is suspected or
    takes long to prepare: what stands before it is tried without it.
    """
    cause, needed = broken, list[str]()
    while True:
        rest = [switch for switch in order if switch in cause and switch not in needed]
        if needed:
            alone = runs(frozenset(needed))
            if alone is None:
                return cause
            if not alone:
                return frozenset(needed)
        if not rest:
            return cause
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            part = frozenset([*needed, *rest[:middle]])
            answer = runs(part)
            if answer is None:
                return cause
            low, high = (middle, high) if answer else (low, middle)
            cause = cause if answer else part
        needed.append(rest[high - 1])
        if high == 1:
            return cause


def scope_of(part: Switches) -> FailureScope:
    """What is ruled out when this part breaks."""
    return "switch" if len(part) == 1 else "pair" if len(part) == 2 else "recipe"
