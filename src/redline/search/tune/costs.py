"""What a trial will take, by what those like it took: a budget is kept by asking before, not by stopping halfway."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist, median

from redline.model.questions import SwitchChoice
from redline.model.spec import Task
from redline.model.work import Facts
from redline.search.tune.space import BY_BLOCK, Switches
from redline.search.tune.tuner import Tuner

COLD_COMPILE_S = 25.0
"""For a compiler to compile a model, where nothing is known about the model."""
COMPILE_START_S = 5.0
COMPILE_OPERATOR_S = 0.035
"""On a GPU: to begin with, and for each operator of a step. ConvNeXt-Tiny's 137 took an H200 19 s, Swin-V2's 737 took 27 s."""
COMPILE_TRAINED_OPERATOR_S = 0.045
"""The same for a training step. ResNet-50 took an H200 21 to 26 s; RegNet-Y-400MF, with 874 operators, more than 60 s."""
COMPILE_ON_CPU_START_S = 8.0
COMPILE_ON_CPU_OPERATOR_S = 0.1
"""The same on a CPU, where each kernel goes through a C++ compiler."""
LONGEST_COMPILE_S = 120.0
BY_BLOCK_SHARE = 0.4
"""Of that, where only one of the blocks that repeat is compiled, and nothing is known about them."""
COMPILE_BLOCK_S = 3.0
"""For each kind of block, besides its operators: RegNet-Y's seven kinds took an H200 more than 39 s in training."""
CACHED_BLOCK_S = 0.4
"""To trace a kind of block that another process has compiled, and to load it: 0.15 to 0.3 s on a CPU of two cores."""
BY_BLOCK_SAVES = 0.6
"""Of what compiling the whole model takes: with more than this, block by block is no way around it."""
LONG_COMPILE_SHARE = 0.5
"""Of the budget: a model that is expected to take more will hardly be compiled in time for its race."""
SLOW_PREPARE_S = 150.0
FIRST_TRIAL_S = 4.0
WARM_SHARE = 0.25
"""Of what compiling took, when it is found in the cache: reading it, and loading what was made."""
REPLICATE_SHARE = 0.6
"""Of what a trial took without compiling: a replicate computes no fp32 reference and counts no work."""
ALIKE = 3
"""How many of the most similar trials are used to predict a recipe's cost."""

CONTENTION = 0.1
"""By so much each worker that prepares slows down the others."""
UNKNOWN_COMPILE = 2.0
"""What compiling may take over what is expected of it, before any was timed: nine in ten take less."""
KNOWN_COMPILE = 1.5
"""The same once others like it were timed."""
FAR_OFF, FAR_OFF_FACTOR, FAR_OFF_SPREAD = 0.07, 3.0, 0.6
"""The chance that what is expected of compiling is far too little for this model and this machine; what it takes then over what is
expected, and how far the logarithm of that may lie off."""
ENDLESS = 0.03
"""The chance that compiling takes longer than anybody waits for."""
EXACT_S = 0.1
"""How exactly it is computed how long to wait for a compile."""
LONG_FIRST_USE = 1.5
"""Times what a plain trial takes."""
OVERDUE = 2.0
"""What preparing a recipe may take over what others like it took, before something in it is suspected to hang."""
FIRST_USE_S = 15.0
"""What the first use of a switch may take beyond that: a library that tries its kernels took 10 s on an H200."""
LONGER = 2.0
"""What preparing a recipe will take over what it had taken when it was given up."""
TIMED_S, TIMED_ON_CPU_S = 1.0, 3.0
"""To time one recipe in one replicate."""

Kind = frozenset[tuple[str, float]]
"""How a recipe is prepared: who compiles is like who compiles, whatever the mode, unless that one takes minutes, or compiles
only a block."""


def compile_s(facts: Facts | None, *, on_cpu: bool, task: Task = "infer") -> float:
    """What compiling the model may take, by how many operators its step was seen to run."""
    if facts is None or not facts.launches:
        return COLD_COMPILE_S
    start_s = COMPILE_ON_CPU_START_S if on_cpu else COMPILE_START_S
    return min(start_s + _operator_s(on_cpu, task) * facts.launches, LONGEST_COMPILE_S)


def by_block_s(facts: Facts | None, *, on_cpu: bool, task: Task = "infer", workers: int = 1) -> float:
    """What compiling its blocks may take: each kind by itself, and what is alike only once; shared among so many workers."""
    whole_s, blocks = compile_s(facts, on_cpu=on_cpu, task=task), facts.blocks if facts is not None else None
    if on_cpu or facts is None or blocks is None or not blocks.kinds:
        return BY_BLOCK_SHARE * whole_s
    own = math.ceil(blocks.kinds / workers)
    each_s = COMPILE_BLOCK_S + _operator_s(on_cpu, task) * facts.launches / blocks.count
    return own * each_s + (blocks.kinds - own) * CACHED_BLOCK_S


def most_helpers(tuner: Tuner) -> int:
    """How many workers may help to compile block by block: one for each further kind of block, on processors that would idle.

    None where compiling the whole model leaves time enough: helpers would slow that down. Nor for a CPU, which a C++ compiler
    keeps busy already.
    """
    facts = tuner.tune.facts
    kinds = facts.blocks.kinds if facts is not None and facts.blocks is not None else None
    whole_s = compile_s(facts, on_cpu=tuner.on_cpu, task=tuner.space.task)
    if tuner.on_cpu or whole_s <= LONG_COMPILE_SHARE * tuner.budget_s:
        return 0
    return min(max((kinds or 1) - 1, 0), tuner.jobs // 2)


def _operator_s(on_cpu: bool, task: Task) -> float:
    if on_cpu:
        return COMPILE_ON_CPU_OPERATOR_S
    return COMPILE_TRAINED_OPERATOR_S if task == "train" else COMPILE_OPERATOR_S


def prepare_s(
    choice: SwitchChoice, cold_s: float = COLD_COMPILE_S, blocks_s: float = BY_BLOCK_SHARE * COLD_COMPILE_S
) -> float:
    """Seconds it may add to a first trial, where nothing is known yet; `cold_s` is what compiling takes, `blocks_s` block by block."""
    if choice.prepare_s is not None:
        return choice.prepare_s
    if choice.is_slow_to_prepare:
        return SLOW_PREPARE_S
    if choice.family not in ("compiler", "runtime"):
        return 0.0
    return blocks_s if choice.switch == BY_BLOCK else cold_s


class Costs:
    """What trials took so far, and what other recipes will take by that.

    Some things are paid once and must not be charged to whoever comes later: the first use of a switch, whose kernels and
    libraries come from disk, and the first compilation of a program, which is in a cache then. What a trial took that
    broke before its end says nothing.
    """

    def __init__(self, tuner: Tuner) -> None:
        self._choices = tuner.space.by_switch
        self._slow = {
            switch: (choice.family, prepare_s(choice))
            for switch, choice in self._choices.items()
            if prepare_s(choice) > 0
        }
        """Switches that take time to prepare."""
        # A search asks for hundreds of recipes after every trial; none of these answers changes once this is made.
        self._kind, self._program = cache(self._found_kind), cache(self._found_program)
        self._plain_s, self._warm_s, self._cold_s = (
            cache(each) for each in (self._found_plain_s, self._found_warm_s, self._found_cold_s)
        )
        self.timed_s = TIMED_ON_CPU_S if tuner.on_cpu else TIMED_S
        facts = tuner.tune.facts
        self._compile_s = compile_s(facts, on_cpu=tuner.on_cpu, task=tuner.space.task)
        self._helpers = most_helpers(tuner)
        self._by_block_s = by_block_s(facts, on_cpu=tuner.on_cpu, task=tuner.space.task, workers=1 + self._helpers)
        self._known: dict[Switches, float] = {}
        self._paid_first: set[Switches] = set()
        """Those that were the first with one of their switches."""
        self._cold: set[Switches] = set()
        """Those that were the first to have their program compiled."""
        self._compiled: set[Switches] = set()
        self._failed_s: dict[Kind, float] = {}
        """By how it is prepared: the most that a recipe took which then broke, or was given up."""
        self._not_within_s: dict[Kind, float] = {}
        """By how it is prepared: what was given up had taken so many seconds."""
        earlier = tuner.tune.earlier
        self._earlier_s = earlier.prepare_s if earlier is not None else {}
        for late in (*tuner.tune.given_up, *(earlier.given_up if earlier is not None else ())):
            kind = self._kind(tuner.space.switches_of(late.recipe))
            self._not_within_s[kind] = max(late.seconds, self._not_within_s.get(kind, 0.0))
        self._met = met = set[str]()
        # What a probe has compiled is in the cache: a trial that found it there says nothing of what compiling takes.
        probed = [tuner.space.switches_of(probe.recipe) for probe in tuner.tune.probes if probe.runs]
        unsure = {self._program(switches) for switches in probed if self._kind(switches)}
        for trial in tuner.tune.trials:
            switches = tuner.space.switches_of(trial.recipe)
            program, record = self._program(switches), tuner.records.get(trial.record_id)
            if switches in tuner.timed() and switches not in self._known and program not in unsure:
                self._known[switches] = trial.cost_s
                self._paid_first |= {switches} if switches - met else set()
                self._cold |= {switches} if program not in self._compiled else set()
                met |= switches
            if switches not in tuner.timed():
                self._note_failed(switches, trial.cost_s)
            if record is not None and record.prepared is not None:
                self._compiled.add(program)
            elif self._kind(switches):
                unsure.add(program)  # it broke before or after it was compiled: nobody knows what is in the cache
        for switches, seconds in tuner.overdue.items():
            self._note_failed(switches, seconds)
        recipes = {str(record.spec.recipe) for record in tuner.records.values() if record.prepared is not None}
        self._compiled |= {self._program(tuner.space.switches_of(recipe)) for recipe in recipes}
        self._known_by_kind: dict[Kind, list[Switches]] = {}
        for switches in self._known:
            self._known_by_kind.setdefault(self._kind(switches), []).append(switches)

    def expected_s(self, switches: Switches) -> float:
        """To open this recipe, now for the first time or again, to check it and to time it."""
        is_warm = self._program(switches) in self._compiled
        return self._warm_s(switches) if is_warm or not self._kind(switches) else self._cold_s(switches)

    def failing_s(self, switches: Switches) -> float:
        """What it takes if it breaks: as long as others like it that broke, else as long as if it ran.

        What broke and was quicker to prepare may be in it too.
        """
        kind = self._kind(switches)
        quicker = [seconds for other, seconds in self._failed_s.items() if other < kind]
        return max(self._failed_s.get(kind) or self.expected_s(switches), *quicker, 0.0)

    def _note_failed(self, switches: Switches, seconds: float) -> None:
        kind = self._kind(switches)
        self._failed_s[kind] = max(seconds, self._failed_s.get(kind, 0.0))

    def is_overdue(self, switches: Switches, others: float, taken_s: float) -> bool:
        """Whether it has taken far longer than others like it: something in it may hang."""
        return taken_s > self._due_s(switches, others)

    def overdue_s(self, switches: Switches, others: float) -> float:
        """How long to wait at most for what may hang; infinite where nobody knows what it should take."""
        is_first_use = not self._kind(switches) and bool(switches - self._met)
        return self._due_s(switches, others) + (FIRST_USE_S if is_first_use else 0.0)

    def _due_s(self, switches: Switches, others: float) -> float:
        """By the longest of those like it: what is expected of it may be wrong, and then all others like it would be given up."""
        alike = self._alike(switches)
        if not alike:
            return math.inf
        is_warm = self._program(switches) in self._compiled
        same = [other for other in alike if not self._kind(switches) or (other not in self._cold) == is_warm]
        longest_s = max((self._known[other] for other in same), default=0.0)
        return OVERDUE * max(longest_s, self.expected_s(switches)) * (1 + CONTENTION * others)

    def beside_s(self, switches: Switches, others: int) -> float:
        """The same while others are prepared: they slow it down, and it stands still while they are timed."""
        return self.expected_s(switches) * (1 + CONTENTION * others) + 2 * self.timed_s * others

    def delay_s(self, candidate: Candidate) -> float:
        """By how much trying one more, with those that help it, delays what is being prepared beside it."""
        workers = 1 + (self._helpers if BY_BLOCK in candidate.switches else 0)
        return workers * CONTENTION * candidate.cost_s + 2 * self.timed_s

    def compiles(self, switches: Switches) -> bool:
        return bool(self._kind(switches))

    @property
    def is_quicker_by_block(self) -> bool:
        """Whether compiling block by block takes so much less that it can stand in for compiling the model."""
        return self._by_block_s <= BY_BLOCK_SAVES * self._compile_s

    @property
    def unsettled(self) -> Switches:
        """Switches whose first use took long: nobody knows yet how much of that the next recipe with them pays again."""
        long = {
            recipe
            for recipe in self._paid_first
            if not self._kind(recipe) and self._known[recipe] > LONG_FIRST_USE * self._plain_s(recipe)
        }
        met_elsewhere = {switch for recipe in self._known if recipe not in long for switch in recipe}
        return frozenset(switch for recipe in long for switch in recipe - met_elsewhere)

    def caution(self, switches: Switches) -> float:
        """By how much more a recipe may take than is expected, beside another that compiles or after others like it."""
        if not self.compiles(switches):
            return 1.0
        return math.sqrt(KNOWN_COMPILE) if self._alike(switches) else UNKNOWN_COMPILE

    def ready_chance(self, switches: Switches, others: float, taken_s: float, within_s: float) -> float:
        """That it is prepared within so many seconds more, after it has taken so many."""
        before, after = (self._done_by(switches, others, each) for each in (taken_s, taken_s + max(within_s, 0.0)))
        return (after - before) / max(1 - before, 1e-6)

    def patience_s(self, switches: Switches, others: float, taken_s: float, within_s: float, chance: float) -> float:
        """How many seconds more to wait for it: as long as it is at least so likely to be ready within those that are left."""
        by_then = (self._done_by(switches, others, taken_s + within_s) - chance) / (1 - chance)
        low_s, high_s = taken_s, taken_s + max(within_s, 0.0)
        if self._done_by(switches, others, low_s) >= by_then:
            return 0.0
        while high_s - low_s > EXACT_S:
            middle_s = (low_s + high_s) / 2
            is_before = self._done_by(switches, others, middle_s) < by_then
            low_s, high_s = (middle_s, high_s) if is_before else (low_s, middle_s)
        return low_s - taken_s

    def _done_by(self, switches: Switches, others: float, seconds: float) -> float:
        """The chance that preparing takes no longer than this; where others were prepared in the same way, it ends for certain."""
        is_known, log_s = bool(self._alike(switches)), math.log(max(seconds, 1e-3))
        most = KNOWN_COMPILE if is_known else UNKNOWN_COMPILE
        middle = math.log(self.expected_s(switches) * (1 + CONTENTION * others))
        usual = NormalDist(middle, math.log(most) / NormalDist().inv_cdf(0.9)).cdf(log_s)
        if is_known:
            return usual
        far_off = NormalDist(middle + math.log(FAR_OFF_FACTOR), FAR_OFF_SPREAD).cdf(log_s)
        return (1 - FAR_OFF - ENDLESS) * usual + FAR_OFF * far_off

    def is_same_program(self, one: Switches, other: Switches) -> bool:
        """Both are compiled, and what one leaves in the cache the other finds there."""
        return self.compiles(one) and self._program(one) == self._program(other)

    def is_first_of_kind(self, one: Switches, other: Switches) -> bool:
        """The one is compiled as the other would be, and nothing that is compiled so has been timed yet."""
        return self.compiles(one) and self._kind(one) == self._kind(other) and not self._alike(one)

    def again_s(self, switches: Switches) -> float:
        """Seconds to open this recipe again once it has been tried."""
        return self._warm_s(switches)

    def reopen_s(self, switches: Switches) -> float:
        """To open it for one more replicate of a race."""
        plain_s = self._plain_s(switches)
        return REPLICATE_SHARE * plain_s + max(self._warm_s(switches) - plain_s, 0.0)

    def anew_s(self, switches: Switches) -> float:
        """At a batch it was never opened at: whatever it compiles is compiled again."""
        return self._cold_s(switches) if self._kind(switches) else self._plain_s(switches)

    def _found_warm_s(self, switches: Switches) -> float:
        """To open it once its program has been compiled."""
        warm = [other for other in self._alike(switches) if other not in self._cold]
        if not self._kind(switches):
            return self._plain_s(switches)
        if warm:
            return self._middle(switches, warm)
        plain_s = self._plain_s(switches)
        # What helpers compiled is read by every process that opens it again.
        share = min(WARM_SHARE * (1 + self._helpers), 1.0) if BY_BLOCK in switches else WARM_SHARE
        return plain_s + share * max(self._cold_s(switches) - plain_s, 0.0)

    def _found_cold_s(self, switches: Switches) -> float:
        """By others that had to compile; else a plain trial, and what experience says about compiling."""
        cold = [other for other in self._alike(switches) if other in self._cold]
        own = [other for other in cold if self._program(other) == self._program(switches)]
        if cold:
            return self._known[own[0]] if own else self._middle(switches, cold)
        expected_s = self._plain_s(switches) + sum(self._prepare_s(switch) for switch in switches)
        return max(expected_s, LONGER * self._not_within_s.get(self._kind(switches), 0.0))

    def _prepare_s(self, switch: str) -> float:
        """As the search before this one saw it; else by what is known of the switch and the model."""
        if switch in self._earlier_s:
            return self._earlier_s[switch]
        return prepare_s(self._choices[switch], self._compile_s, self._by_block_s)

    def _found_plain_s(self, switches: Switches) -> float:
        """With nothing to compile."""
        plain = self._known_by_kind.get(frozenset())
        return self._middle(switches, plain) if plain else FIRST_TRIAL_S

    def _alike(self, switches: Switches) -> list[Switches]:
        return self._known_by_kind.get(self._kind(switches), [])

    def _middle(self, switches: Switches, others: Sequence[Switches]) -> float:
        """The median of the nearest that paid for no first use; where all did, the cheapest."""
        settled = [other for other in others if other not in self._paid_first]
        if not settled:
            return min(self._known[other] for other in others)
        nearest = sorted(settled, key=lambda other: len(switches ^ other))[:ALIKE]
        return median(self._known[other] for other in nearest)

    def _found_kind(self, switches: Switches) -> Kind:
        return frozenset(self._slow[switch] for switch in switches if switch in self._slow)

    def _found_program(self, switches: Switches) -> Switches:
        return frozenset(switch for switch in switches if not self._choices[switch].leaves_program)


FAR_BETTER = 2.0
"""By so much more a recipe must promise than the one that would leave no time for it."""


@dataclass(frozen=True)
class Candidate:
    """A recipe that is worth its seconds and fits into what is left."""

    switches: Switches
    gain: float
    """The improvement it promises, as a share of the fastest time so far."""
    cost_s: float
    room_s: float
    """What may be spent until it is done: all but what the end of the search needs."""

    def fits_after(self, other: Candidate) -> bool:
        return other.cost_s + self.cost_s <= self.room_s


def first_of(candidates: Sequence[Candidate]) -> Candidate:
    """Most improvement per second; but the most promising of all, where that one would leave no time for it."""
    usual = max(candidates, key=lambda each: each.gain / each.cost_s)
    crowded_out = [each for each in candidates if each.gain >= FAR_BETTER * usual.gain and not each.fits_after(usual)]
    return max(crowded_out, key=lambda each: each.gain, default=usual)
