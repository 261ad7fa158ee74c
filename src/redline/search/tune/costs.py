"""This module says how long recipes take to prepare, from what is known of each switch's class and what this search has seen.

A recipe takes what a plain one takes, and what its compiler takes, which grows with the root of the operators of a step. How
far this machine is from that is learned from what was compiled here, in this search or an earlier one. Nobody knows exactly, so
every answer is a chance: the logarithm of the seconds is normal, and a few compiles never end.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from statistics import NormalDist, median

from redline.model.protocol import SwitchChoice
from redline.model.work import Facts
from redline.search.tune.lessons import HANGS
from redline.search.tune.space import BASELINE, BY_BLOCK, Switches
from redline.search.tune.state import Search

COMPILE_S = 1.2
"""Compiling takes this many seconds times the root of the number of a step's operators. It was measured on an H200: 17 compiles of models
with 52 to 612 operators, for inference and for training, took 0.7 to 1.7, and 1.15 on average. A CPU, where each kernel goes through a
C++ compiler, is taken to need twice as long."""
SLOW_FACTOR = 6.0
"""A compiler that tries many forms of each kernel takes this many times as long as one that does not."""
WARM_SHARE = 0.25
"""Finding a program in the cache takes this share of compiling it: it is read, and what was made is loaded."""
CONTENTION = 0.1
"""Each worker that prepares is taken to slow down the others by this share."""
SPREAD = 0.5
"""The logarithm of the seconds has this standard deviation if nothing like it was timed yet: nine in ten take less than twice what is
expected. Each compile that was timed counts as much as that expectation."""


def compile_s(facts: Facts | None, *, on_cpu: bool, by_block: bool = False) -> float:
    """Returns how long compiling the model may take, by how many operators its step was seen to run.

    `by_block` compiles each kind of repeated block only once.
    """
    operators, blocks = (facts.launches, facts.blocks) if facts is not None else (0, None)
    share = 1.0 if not by_block else blocks.kinds / blocks.count if blocks is not None and blocks.kinds else 0.4
    seconds = COMPILE_S * math.sqrt(operators or 500)  # half of what was compiled on an H200 took 19 to 30 s
    return seconds * math.sqrt(min(share, 1.0)) * (2.0 if on_cpu else 1.0)


class Costs:
    """This class knows what trials took so far, and by that expects what other recipes will take."""

    def __init__(self, search: Search) -> None:
        self._search, self._space = search, search.space
        tune, on_cpu = search.tune, search.on_cpu
        self.timed_s = 3.0 if on_cpu else 1.0
        """Timing one recipe in one replicate takes so long."""
        self._compiled = {self.program(search.recipe_of(each)) for each in search.records.values() if each.prepared}
        took: dict[str, dict[Switches, list[float]]] = defaultdict(lambda: defaultdict(list))
        for trial in tune.trials:
            switches, record = search.space.switches_of(trial.recipe), search.records.get(trial.record_id)
            if record is not None and record.prepared is not None:
                took[self._kind(switches)][self.program(switches)].append(trial.cost_s)
        plain = [seconds for each in took.pop("", {}).values() for seconds in each]
        self.plain_s = median(plain) if plain else 4.0
        """Preparing, checking and timing a recipe with nothing to compile takes so long; four seconds where none was tried yet."""
        warm = [seconds for kind in took.values() for first, *again in kind.values() for seconds in again]
        self._warm_s = median(warm) if warm else None
        self._ratios = {
            kind: [
                max(first - self.plain_s, 0.1) / self._expected_compile_s(each) for each, (first, *_) in cold.items()
            ]
            for kind, cold in took.items()
        }
        ratios = [ratio for kind in self._ratios.values() for ratio in kind]
        self.learned_scale = median(ratios) if ratios else tune.compile_scale
        """Compiling takes so many times what is expected of it here; None where it is not known."""
        for late in tune.given_up:  # it takes longer than it had taken when it was given up
            switches = search.space.switches_of(late.recipe)
            if self.compiles(switches):
                least = max(2 * late.seconds / self._expected_compile_s(switches), self.learned_scale or 1.0)
                self._ratios.setdefault(self._kind(switches), [least])
        self._seconds = cache(self._seconds_anew)

    def compiles(self, switches: Switches) -> bool:
        return bool(self._kind(switches))

    def program(self, switches: Switches) -> Switches:
        """Returns the switches that decide which kernels are compiled: recipes that share them find their kernels in the cache."""
        return frozenset(switch for switch in switches if not self._space.by_switch[switch].leaves_program)

    def is_cached(self, switches: Switches) -> bool:
        return self.program(switches) in self._compiled

    def is_slow_for_its_gain(self, switches: Switches) -> bool:
        """Returns whether the compiler tries many forms of each kernel, and nobody has said that this is worth the time."""
        return any(choice.is_slow_to_prepare and choice.prepare_s is None for choice in self._slow(switches))

    def is_first_of_kind(self, one: Switches, other: Switches) -> bool:
        """Returns whether both are compiled in the same way, if it was not seen yet whether that way works and what it takes here."""
        return self._kind(one) == self._kind(other) and self._kind(one) not in self._ratios

    def ready_chance(self, switches: Switches, within_s: float, taken_s: float = 0.0, beside: float = 0.0) -> float:
        """Returns the chance that it is prepared and timed within so many seconds more, after it has taken so many beside others."""
        known = self._ratios.get(self._kind(switches), ()) if self.compiles(switches) else [1.0, 1.0]
        usual = NormalDist(
            math.log(self.seconds(switches) * (1 + CONTENTION * beside)), SPREAD / math.sqrt(1 + len(known))
        )

        def done_by(seconds: float) -> float:
            return (1 - HANGS) * usual.cdf(math.log(max(seconds, 1e-3)))

        before = done_by(taken_s) if taken_s else 0.0
        return max(done_by(taken_s + within_s) - before, 0.0) / (1 - before) if within_s > 0 else 0.0

    # A race

    def one_by_one_s(self, racers: Sequence[Switches], count: int = 1) -> float:
        """Returns what this many replicates take if their processes are prepared one after the other."""
        return count * sum(map(self.reopen_s, racers))

    def replicates_s(self, racers: Sequence[Switches], count: int, *, are_held: bool = False) -> float:
        """Returns what racing these takes in this many replicates of fresh processes, prepared all at once or one after the other.

        `are_held` says that all processes but the baseline's were prepared before.
        """
        search, one_by_one_s = self._search, self.one_by_one_s(racers, count)
        held = {racer: count if are_held and racer != BASELINE else search.held_of(racer) for racer in racers}
        preparing = sum(max(count - there, 0) for there in held.values())
        if search.on_cpu or preparing > search.jobs or not search.has_memory_for(count * len(racers)):
            return one_by_one_s
        # Processes that compile beside a trial are ready a little later than the trial is.
        late_s = [CONTENTION * there * self.seconds(racer) for racer, there in held.items()]
        missing_s = [self.reopen_s(racer) - self.timed_s for racer, there in held.items() if there < count]
        slowest_s = max(late_s + missing_s)
        at_once_s = slowest_s * (1 + CONTENTION * max(preparing - 1, 0)) + 1.3 * self.timed_s * count * len(racers)
        return min(one_by_one_s, at_once_s)

    def race_s(self, switches: Switches, *, is_held: bool = False) -> float:
        """Returns what the shortest last race takes that gives an interval: two replicates of the baseline and this one."""
        racers = [BASELINE, switches]
        return self.replicates_s(racers, self._search.fewest, are_held=is_held) if switches != BASELINE else 0.0

    # One recipe

    def seconds(self, switches: Switches) -> float:
        """Returns what it takes to open this recipe, now for the first time or again, to check it and to time it."""
        return self._seconds(switches, is_warm=self.is_cached(switches))

    def reopen_s(self, switches: Switches) -> float:
        """Returns what it takes to open a recipe again once its program has been compiled."""
        return self._seconds(switches, is_warm=True)

    def _seconds_anew(self, switches: Switches, *, is_warm: bool) -> float:
        # A library that tries its kernels takes about as long again as all else of a plain recipe.
        plain_s = self.plain_s * (1 + any(self._space.by_switch[switch].family == "autotune" for switch in switches))
        if not self.compiles(switches):
            return plain_s
        if is_warm and self._warm_s is not None:
            return self._warm_s
        known = self._ratios.get(self._kind(switches))
        scale = median(known) if known else self.learned_scale or 1.0
        return plain_s + (WARM_SHARE if is_warm else 1.0) * scale * self._expected_compile_s(switches)

    def _slow(self, switches: Switches) -> list[SwitchChoice]:
        chosen = (self._space.by_switch[switch] for switch in switches)
        return [each for each in chosen if each.family in ("compiler", "runtime") or each.is_slow_to_prepare]

    def _kind(self, switches: Switches) -> str:
        """Returns how a recipe is compiled; all modes of compiling the whole model are alike. Empty: nothing is compiled."""
        for choice in self._slow(switches):
            is_usual = choice.family == "compiler" and choice.switch != BY_BLOCK and not choice.is_slow_to_prepare
            return "compile" if is_usual else choice.switch
        return ""

    def _expected_compile_s(self, switches: Switches) -> float:
        facts, on_cpu = self._search.tune.facts, self._search.on_cpu
        return sum(
            choice.prepare_s
            or (SLOW_FACTOR if choice.is_slow_to_prepare else 1.0)
            * compile_s(facts, on_cpu=on_cpu, by_block=choice.switch == BY_BLOCK)
            for choice in self._slow(switches)
        )
