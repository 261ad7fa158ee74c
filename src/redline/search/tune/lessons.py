"""What failures teach: which part of a recipe broke it, and which recipes are never tried for it.

The bench often names the switch that broke, and says whether it breaks in any recipe. Where it does not, the part is found by
leaving out halves: a worker that only prepares says whether the rest runs. What is still open then is a matter of odds: switches
that were in broken recipes and in no sound one are suspects, and a recipe that holds them must be worth the risk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations

from redline.record import FailureScope
from redline.search.tune.record import Lesson
from redline.search.tune.space import Switches

PAIR_WEIGHT = 0.3
"""Of a pair being to blame, against one switch by itself."""
SIBLING_WEIGHT = 0.3
"""Of all variants of a switch (`sdpa:flash`, `sdpa:math`) being to blame alike."""
THERE_AGAIN = 20.0
"""By so much each further broken recipe speaks against those that were in it too."""
MOST_TOLD = 12
"""More breakages than this say nothing new."""
EXACTLY = ("oom", "timeout")
"""Kinds of failure that another switch may cure: only the recipe itself is ruled out."""

Probe = Callable[[Switches], bool | None]
"""Whether a recipe runs and keeps its numerics; None: not known, and too dear to find out."""


class Lessons:
    """What is ruled out, and what is suspected."""

    def __init__(
        self, lessons: Iterable[Lesson], sound: Iterable[Switches], suspects: Iterable[tuple[Switches, Switches]] = ()
    ) -> None:
        """`suspects`: recipes that broke, each with the switches that the bench suspects (none: all of them)."""
        self._ruled_out = [(frozenset(each.switches), each.code in EXACTLY) for each in lessons]
        cleared = {part for recipe in sound for part in _parts(recipe)}
        accused = [
            [part for part in _parts(recipe) if part not in cleared and (not named or part & _with_variants(named))]
            for recipe, named in suspects
            if not self._is_explained(recipe)
        ]
        present = Counter(part for parts in accused for part in parts)
        self._guilt: dict[Switches, float] = {}
        for parts in accused:
            weights = {part: _weight(part, present[part]) for part in parts}
            whole = sum(weights.values())
            for part, weight in weights.items():
                self._guilt[part] = max(self._guilt.get(part, 0.0), weight / whole)

    def rules_out(self, recipe: Switches) -> bool:
        return any(recipe == part if exactly else part <= recipe for part, exactly in self._ruled_out)

    def chance(self, recipe: Switches) -> float:
        """That this recipe runs and keeps its numerics."""
        if self.rules_out(recipe):
            return 0.0
        chance, parts = 1.0, recipe | _variants(recipe)
        for part, guilt in self._guilt.items():
            if part <= parts:
                chance *= 1 - guilt
        return chance

    def _is_explained(self, recipe: Switches) -> bool:
        """A smaller part of it is known to break: the rest of the recipe is under no suspicion for it."""
        return any(part < recipe for part, exactly in self._ruled_out if not exactly)


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


def _parts(recipe: Switches) -> list[Switches]:
    """What may be to blame: a switch, a pair of them, or all variants of a switch."""
    switches = sorted(recipe)
    singles_and_pairs = [frozenset(part) for size in (1, 2) for part in combinations(switches, size)]
    return singles_and_pairs + [frozenset({variant}) for variant in sorted(_variants(recipe))]


def _variants(recipe: Iterable[str]) -> Switches:
    """`sdpa:*` for `sdpa:flash`."""
    return frozenset(f"{switch.partition(':')[0]}:*" for switch in recipe)


def _with_variants(switches: Switches) -> Switches:
    return switches | _variants(switches)


def _weight(part: Switches, times: int) -> float:
    is_variant = any(switch.endswith(":*") for switch in part)
    own = SIBLING_WEIGHT if is_variant else 1.0 if len(part) == 1 else PAIR_WEIGHT
    return own * THERE_AGAIN ** (min(times, MOST_TOLD) - 1)
