"""This module says how long recipes take to prepare, from what is known of each switch's class and what this search has seen.

A recipe takes what a plain one takes, and what its compiler takes: seconds to begin with and seconds for each operator of a step. How
far this machine is from that is learned from what was compiled here, in this search or an earlier one. Nobody knows exactly, so
every answer is a chance: the logarithm of the seconds is normal, and a few compiles never end.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cache
from statistics import NormalDist, median

from redline.model.protocol import SwitchChoice
from redline.model.spec import Task
from redline.model.work import Facts
from redline.search.tune.space import BASELINE, BY_BLOCK, Space, Switches
from redline.search.tune.state import Search

COMPILE_START_S, COMPILE_OPERATOR_S = 5.0, 0.035
"""On a GPU: to begin with, and for each operator. ConvNeXt-Tiny's 137 took an H200 19 s, Swin-V2's 737 took 27 s. A training step takes a
third more; a CPU, where each kernel goes through a C++ compiler, three times as much for each."""
UNKNOWN_COMPILE_S = 25.0
"""For a model of which nothing is known: half of what was compiled on an H200 took 19 to 30 s."""
SLOW_FACTOR = 6.0
"""A compiler that tries many forms of each kernel takes this many times as long as one that does not."""
WARM_SHARE = 0.25
"""Finding a program in the cache takes this share of compiling it: it is read, and what was made is loaded."""
TUNED_CONVOLUTION_S = 0.17
"""A library tries its kernels for one kind of convolution in this time: the 15 of a U-Net took an H200 two seconds and a half."""
CONTENTION = 0.1
"""Each worker that prepares slows down the others by this share."""
UNKNOWN_SD, KNOWN_SD = 0.55, 0.3
"""How far the logarithm of the seconds spreads: before anything like it was timed nine in ten take less than twice what is expected, then 1.5 times."""
HANGS = 0.03
"""The chance that preparing a recipe with a switch that nobody has seen running never ends."""


def compile_s(facts: Facts | None, *, on_cpu: bool, task: Task, by_block: bool = False) -> float:
    """Returns how long compiling the model may take, by how many operators its step was seen to run; `by_block` compiles each kind of repeated block once."""
    operators, blocks = (facts.launches, facts.blocks) if facts is not None else (0, None)
    share = 1.0 if not by_block else blocks.kinds / blocks.count if blocks is not None and blocks.kinds else 0.4
    if not operators:
        return share * UNKNOWN_COMPILE_S
    each_s = COMPILE_OPERATOR_S * (3.0 if on_cpu else 1.0)
    return (4 / 3 if task == "train" else 1.0) * (COMPILE_START_S + each_s * operators * min(share, 1.0))


class Costs:
    """Knows what trials took so far, and expects what other recipes will take by that."""

    def __init__(self, search: Search) -> None:
        space, tune = search.space, search.tune
        self._space, self._facts, self._on_cpu = space, tune.facts, search.on_cpu
        self._search = search
        self.timed_s = 3.0 if search.on_cpu else 1.0
        """Timing one recipe in one replicate takes so long."""
        self._compiled = {self.program(search.recipe_of(each)) for each in search.records.values() if each.prepared}
        plain: list[float] = []
        cold: list[tuple[Switches, float]] = []
        warm: list[float] = []
        met: set[Switches] = set()
        for trial in tune.trials:
            switches, record = space.switches_of(trial.recipe), search.records.get(trial.record_id)
            if record is None or record.prepared is None:
                continue
            if not self.compiles(switches):
                plain.append(max(trial.cost_s - self._first_use_s(switches), self.timed_s))
            elif self.program(switches) not in met:
                cold.append((switches, trial.cost_s))
            else:
                warm.append(trial.cost_s)
            met.add(self.program(switches))
        self.plain_s = median(plain) if plain else 4.0
        """Preparing, checking and timing a recipe with nothing to compile takes so long; four seconds where none was tried yet."""
        self._warm_s = median(warm) if warm else None
        ratios = {
            switches: max(seconds - self.plain_s, 0.1) / self._expected_compile_s(switches)
            for switches, seconds in cold
        }
        self._ratios: dict[str, list[float]] = {}
        for switches, ratio in ratios.items():
            self._ratios.setdefault(self._kind(switches), []).append(ratio)
        self.learned_scale = median(ratios.values()) if ratios else tune.compile_scale
        """Compiling takes so many times what is expected of it here; None where it is not known."""
        self.scale = self.learned_scale or 1.0
        for late in tune.given_up:  # it takes longer than that
            switches = space.switches_of(late.recipe)
            if self.compiles(switches) and self._kind(switches) not in self._ratios:
                least = 2 * late.seconds / self._expected_compile_s(switches)
                self._ratios[self._kind(switches)] = [max(least, self.scale)]
        self._seconds, self._spread = cache(self._seconds_anew), cache(self._sd)

    def compiles(self, switches: Switches) -> bool:
        return bool(self._slow(switches))

    def program(self, switches: Switches) -> Switches:
        """Returns the switches that decide which kernels are compiled: recipes that share them find their kernels in the cache."""
        return frozenset(switch for switch in switches if not self._space.by_switch[switch].leaves_program)

    def is_cached(self, switches: Switches) -> bool:
        return self.program(switches) in self._compiled

    def is_slow_for_its_gain(self, switches: Switches) -> bool:
        return any(choice.is_slow_to_prepare and choice.prepare_s is None for choice in self._slow(switches))

    def is_first_of_kind(self, one: Switches, other: Switches) -> bool:
        """Whether both are compiled in the same way, of which it was not seen yet whether it works and what it takes here."""
        return self._kind(one) == self._kind(other) and self._kind(one) not in self._ratios

    def ready_chance(self, switches: Switches, within_s: float, taken_s: float = 0.0, beside: float = 0.0) -> float:
        """Returns the chance that it is prepared and timed within so many seconds more, after it has taken so many beside others."""
        hangs = HANGS if self.compiles(switches) and not self.is_cached(switches) else HANGS / 3
        usual = NormalDist(math.log(self.seconds(switches) * (1 + CONTENTION * beside)), self._spread(switches))

        def done_by(seconds: float) -> float:
            return (1 - hangs) * usual.cdf(math.log(max(seconds, 1e-3)))

        before = done_by(taken_s) if taken_s else 0.0
        return max(done_by(taken_s + within_s) - before, 0.0) / (1 - before) if within_s > 0 else 0.0

    def replicates_s(self, racers: Sequence[Switches], count: int) -> float:
        """Returns what racing these takes in so many replicates of fresh processes, all prepared at the same time or one after the other."""
        search = self._search
        one_by_one_s = count * sum(map(self.reopen_s, racers))
        missing = {racer: max(count - search.held_of(racer), 0) for racer in racers}
        preparing = sum(missing.values())
        if search.on_cpu or preparing > search.jobs or not search.has_memory_for(count * len(racers)):
            return one_by_one_s
        slowest_s = max((self.reopen_s(racer) - self.timed_s for racer in racers if missing[racer]), default=0.0)
        at_once_s = slowest_s * (1 + CONTENTION * max(preparing - 1, 0)) + 1.3 * self.timed_s * count * len(racers)
        return min(one_by_one_s, at_once_s) if not any(map(search.held_of, racers)) else at_once_s

    def race_s(self, switches: Switches, *, is_held: bool = False) -> float:
        """Returns what the shortest last race takes that gives an interval: two replicates of the baseline and this one. `is_held`: of the
        processes for it only the baseline's still have to be prepared."""
        if switches == BASELINE:
            return 0.0
        count = self._search.fewest
        if is_held:
            return self.reopen_s(BASELINE) + 1.3 * self.timed_s * 2 * count
        return self.replicates_s([BASELINE, switches], count)

    def _slow(self, switches: Switches) -> list[SwitchChoice]:
        chosen = (self._space.by_switch[switch] for switch in switches)
        return [each for each in chosen if each.family in ("compiler", "runtime") or each.is_slow_to_prepare]

    def _kind(self, switches: Switches) -> str:
        """Returns how a recipe is compiled; all modes of compiling the whole model are alike."""
        choice = self._slow(switches)[0]
        is_usual = choice.family == "compiler" and choice.switch != BY_BLOCK and not choice.is_slow_to_prepare
        return "compile" if is_usual else choice.switch

    def _expected_compile_s(self, switches: Switches) -> float:
        seconds, task = 0.0, self._space.task
        for choice in self._slow(switches):
            own_s = compile_s(self._facts, on_cpu=self._on_cpu, task=task, by_block=choice.switch == BY_BLOCK)
            own_s *= SLOW_FACTOR if choice.is_slow_to_prepare else 1.0
            seconds += choice.prepare_s if choice.prepare_s is not None else own_s
        return seconds

    def seconds(self, switches: Switches) -> float:
        """Returns what it takes to open this recipe, now for the first time or again, to check it and to time it."""
        return self._seconds(switches, is_warm=self.is_cached(switches))

    def reopen_s(self, switches: Switches) -> float:
        """Returns what it takes to open a recipe again once its program has been compiled."""
        return self._seconds(switches, is_warm=True)

    def anew_s(self, switches: Switches) -> float:
        """Returns what it takes at a batch it was never opened at, where everything is compiled again."""
        return self._seconds(switches, is_warm=False)

    def _seconds_anew(self, switches: Switches, *, is_warm: bool) -> float:
        plain_s = self.plain_s + self._first_use_s(switches)
        if not self.compiles(switches):
            return plain_s
        if is_warm and self._warm_s is not None:
            return self._warm_s
        share = WARM_SHARE if is_warm else 1.0
        return plain_s + share * self._scale_of(switches) * self._expected_compile_s(switches)

    def _scale_of(self, switches: Switches) -> float:
        """Returns how many times the expected time compiling takes here, by recipes that are compiled in the same way, or by all."""
        own = self._ratios.get(self._kind(switches))
        return median(own) if own else self.scale

    def _first_use_s(self, switches: Switches) -> float:
        """Returns what a library takes that tries its kernels, for each kind of convolution and thrice in training."""
        tunes = any(self._space.by_switch[switch].family == "autotune" for switch in switches)
        layer = self._facts.layers.get("convolution") if self._facts is not None and tunes else None
        if layer is None:
            return 0.0
        return (layer.kinds or layer.calls) * TUNED_CONVOLUTION_S * (2.4 if self._space.task == "train" else 1.0)

    def _sd(self, switches: Switches) -> float:
        is_known = self.is_cached(switches) or not self.compiles(switches) or self._kind(switches) in self._ratios
        return KNOWN_SD if is_known else UNKNOWN_SD


def unproven_of(switches: Switches, timed: Collection[Switches], space: Space) -> list[str]:
    """Returns the switches of a recipe that no sound recipe has held yet; those of one name stand for each other."""
    names = {switch.partition(":")[0] for recipe in timed for switch in recipe}
    return [switch for switch in switches if switch.partition(":")[0] not in names]
