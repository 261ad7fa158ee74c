"""Which recipe is prepared next: what is safe to try first, then what promises most for its seconds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redline.protocol import SwitchChoice
from redline.search.tune.costs import Candidate, Costs, first_of
from redline.search.tune.finals import ablation_s, fewest_race_s, race_s
from redline.search.tune.lessons import quantizing_of
from redline.search.tune.model import Beliefs, Estimate
from redline.search.tune.space import BASELINE, BY_BLOCK, Expectation, Space, Switches, expectation
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import Tuner

WORTH_A_TRIAL = 0.0025
"""Expected improvement, as a share of the fastest time so far."""
USUAL_SHARE = 0.01
"""Of the budget: a trial that takes more of it must promise more."""
PROMISING = 0.02
"""Who promises this much may have the seconds that were meant for telling what each switch brings."""
SLOW_SHARE = 0.25
"""A switch that takes minutes to prepare is tried only when it takes no more than this share of what is left."""
SAFE_CHANCE = 0.9
"""A recipe that is less likely to run must fit into what may be spent on failures."""
RISK_SHARE = 0.01
"""Of the budget: so much may be lost, on average, on a recipe that holds suspects when that is used up."""
LOOKED_AT = 300
"""How many of the most promising recipes are weighed against their cost."""


def next_recipe(tuner: Tuner, beliefs: Beliefs, trials: Trials) -> tuple[Candidate | None, list[Candidate]]:
    """The recipe to prepare next, if any; and those that would be worth it, had they the time."""
    safe = next_safe(tuner, trials.in_flight)
    if safe is not None:
        return safe, []
    found, too_dear = _candidates(tuner, beliefs, trials.in_flight)
    costs, in_flight = Costs(tuner), trials.in_flight
    if sum(map(costs.compiles, in_flight)) >= max(tuner.jobs // 2, 1):
        found = [each for each in found if not costs.compiles(each.switches)]  # compilers use several processors each
    found = [each for each in found if not any(costs.is_same_program(each.switches, other) for other in in_flight)]
    if not found or not _can_wait(tuner, trials, costs):
        return None, too_dear
    return first_of(found), too_dear


def next_safe(tuner: Tuner, in_flight: Sequence[Switches]) -> Candidate | None:
    """Of what is safe to try, the first that was not and fits. Where several are prepared at once, the slowest is first."""
    costs = Costs(tuner)
    recipes = _safe(tuner, costs, in_flight)
    if tuner.jobs > 1:
        recipes.sort(key=lambda each: -costs.expected_s(each))
    for switches in recipes:
        cost_s = costs.beside_s(switches, len(in_flight))
        if cost_s + fewest_race_s(tuner, costs, switches) <= tuner.left_s:
            return Candidate(switches, PROMISING, cost_s, tuner.left_s)
    return None


def safe_to_race(tuner: Tuner) -> Switches | None:
    """Where there was no time to try anything: what is safe and can be raced at once, without a trial before."""
    costs = Costs(tuner)
    if tuner.tried() != {BASELINE}:
        return None
    fitting = (each for each in _safe(tuner, costs, ()) if fewest_race_s(tuner, costs, each) <= tuner.left_s)
    return next((each for each in fitting if not costs.compiles(each)), None)


def _safe(tuner: Tuner, costs: Costs, in_flight: Sequence[Switches]) -> list[Switches]:
    """What is safe to try and was not, the quickest to prepare first."""
    lessons, tried = tuner.lessons(), {*tuner.tried(), *in_flight, *tuner.given_up}
    safe = SafeRecipes(tuner.space, tuner.on_cpu, _host_share(tuner), lambda each: lessons.chance(each) == 1.0)
    has_compiled = any(map(costs.compiles, tuner.seen()))
    return [
        each
        for each in safe.in_order()
        if each not in tried
        and safe.may_run(each)
        and not is_done_with(each, tried, tuner)
        and not (has_compiled and BY_BLOCK in each)  # block by block stands in for what takes too long
        and not any(costs.is_same_program(each, other) for other in in_flight)  # it will be in the cache
    ]


def _host_share(tuner: Tuner) -> float | None:
    """The time to issue a step of the baseline over the time of the step: as it was timed, or as the facts say."""
    baseline, facts = tuner.baseline(), tuner.tune.facts
    if baseline is not None:
        return math.exp(baseline.host_log_s - baseline.log_s) if baseline.host_log_s is not None else None
    if facts is None or not facts.step_s or facts.host_s is None or facts.synchronises:
        return None
    return facts.host_s / facts.step_s


def _can_wait(tuner: Tuner, trials: Trials, costs: Costs) -> bool:
    """Whether what is being compiled may be ready later and still have its race: one more is prepared and timed before it."""
    others = len(trials.in_flight)
    for switches, taken_s in trials.under_way():
        if costs.compiles(switches):
            missing_s = costs.caution(switches) * costs.beside_s(switches, others) - taken_s
            # One that takes far longer than expected may take as long again: nobody waits for it.
            if missing_s >= 0 and missing_s + fewest_race_s(tuner, costs, switches) > tuner.left_s:
                return False
    return True


def _candidates(tuner: Tuner, beliefs: Beliefs, in_flight: list[Switches]) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are worth their seconds and can be had with what is left; and those for which too little is left.

    Who takes minutes to prepare is not for every budget, and so not missed; unless nothing else was tried. What is being
    prepared is taken to turn out as it is expected to.
    """
    seen, tried, costs, lessons = tuner.seen(), {*tuner.tried(), *in_flight}, Costs(tuner), tuner.lessons()
    fastest = tuner.fastest_log_s()
    if in_flight:
        seen = {**_imagined(beliefs, seen, in_flight), **seen}
        fastest = min([fastest, *(seen[each].log_s for each in in_flight if each in seen)])
    gains = beliefs.promises(seen, fastest)
    room_s = tuner.left_s - race_s(tuner, costs)
    spare_s = room_s - ablation_s(tuner, costs)
    found: list[Candidate] = []
    too_dear: list[Candidate] = []
    is_first, looked_at = tried <= {BASELINE}, 0
    for index in np.argsort(-gains, kind="stable"):
        switches = beliefs.recipes[index]
        if gains[index] < WORTH_A_TRIAL or looked_at == LOOKED_AT:
            break
        chance = 0.0 if is_done_with(switches, tried, tuner) else lessons.chance(switches)
        gain = float(gains[index]) * chance
        if gain < WORTH_A_TRIAL:
            continue
        looked_at += 1
        cost_s = costs.beside_s(switches, len(in_flight))
        if not _may_risk(tuner, chance, max(cost_s, costs.longest_failed_s)):
            continue
        own_s = room_s if gain >= PROMISING else spare_s
        is_slow = any(is_slow_for_its_gain(tuner.space.by_switch[switch]) for switch in switches)
        own_s *= SLOW_SHARE if is_slow else 1.0
        caution = costs.caution(switches) if any(map(costs.compiles, in_flight)) else 1.0
        needed_s = caution * cost_s + fewest_race_s(tuner, costs, switches)
        is_worth_it = gain >= WORTH_A_TRIAL * math.sqrt(max(cost_s / (USUAL_SHARE * tuner.budget_s), 1.0))
        fits = cost_s <= own_s and needed_s <= tuner.left_s
        if is_worth_it and fits and switches not in tuner.given_up:
            found.append(Candidate(switches, gain, cost_s, own_s))
        elif is_first or (is_worth_it and not is_slow):
            too_dear.append(Candidate(switches, gain, cost_s, own_s))
    return found, too_dear


def is_slow_for_its_gain(choice: SwitchChoice) -> bool:
    """Takes minutes, and nobody has said how many of them it is worth for this task."""
    return choice.is_slow_to_prepare and choice.prepare_s is None


def _may_risk(tuner: Tuner, chance: float, cost_s: float) -> bool:
    """Whether a recipe that holds suspects may be tried: within what may be spent on failures, or for next to nothing."""
    is_cheap = (1 - chance) * cost_s <= RISK_SHARE * tuner.budget_s
    return chance >= SAFE_CHANCE or cost_s <= tuner.allowance_s or is_cheap


def _imagined(beliefs: Beliefs, seen: dict[Switches, Estimate], in_flight: list[Switches]) -> dict[Switches, Estimate]:
    """What is being prepared, as if it had been timed and had taken what is expected of it."""
    expected = beliefs.expected(seen)
    return {
        switches: Estimate(
            recipe="",
            record_id="",
            log_s=float(expected[beliefs.index[switches]]),
            error=0.0,
            host_log_s=None,
            is_host_bound=False,
            cost_s=0.0,
        )
        for switches in in_flight
        if switches in beliefs.index
    }


def is_done_with(switches: Switches, tried: set[Switches], tuner: Tuner) -> bool:
    """Tried, or only to be shown, and its quantizing switches were shown already."""
    if switches in tried:
        return True
    quantizing = quantizing_of(switches, tuner.tune)
    return tuner.is_only_shown(switches) and all(any(switch in other for other in tried) for switch in quantizing)


GRAPH_MARGIN = 0.7
"""A graph is tried as soon as the host is expected to need this share of the time that the device needs."""


@dataclass(frozen=True)
class SafeRecipes:
    """What a careful hand tries first: of each family the switch of which experience expects most."""

    space: Space
    on_cpu: bool
    host_share: float | None
    """The time to issue a step of the baseline over the time of the step; None where it is not known."""
    may_run: Callable[[Switches], bool] = lambda _: True
    """Nothing that was learned speaks against it."""

    def in_order(self) -> list[Switches]:
        """Half precision, the layout and, in training, the optimizer; the same recorded as a graph where the host would be in the way of it; the same
        through a compiler, the whole model and block by block."""
        plain = self._best("precision") | self._best("layout") | self._best("optimizer")
        graphed = [plain | self._graph] if self._may_be_host_bound(plain) else []
        whole = self._first_that_may_run(self._compiled(plain, self._compilers(by_block=False)))
        by_block = self._first_that_may_run(self._compiled(plain, self._compilers(by_block=True)))
        completed = [self.space.completed(each) for each in (plain, *graphed, whole, by_block)]
        return [each for each in dict.fromkeys(completed) if each and self.space.is_valid(each)]

    def _compiled(self, plain: Switches, compilers: Sequence[SwitchChoice]) -> Iterator[Switches]:
        """With a graph where the host may be in the way, in one or the other form; and without."""
        if not compilers:
            return
        on_device = min(compilers, key=lambda each: self._expected(each).device)
        with_host = min(compilers, key=lambda each: self._expected(each).device + self._expected(each).host)
        if self._graph and self._may_be_host_bound(plain | {on_device.switch}):
            yield plain | {on_device.switch} | self._graph
            yield plain | {with_host.switch}
        yield plain | {on_device.switch}

    def _first_that_may_run(self, recipes: Iterable[Switches]) -> Switches:
        completed = map(self.space.completed, recipes)
        return next((each for each in completed if self.space.is_valid(each) and self.may_run(each)), BASELINE)

    def _compilers(self, *, by_block: bool) -> list[SwitchChoice]:
        compilers = [each for each in self._usable(self.space.choices) if each.capabilities.compiles]
        return [each for each in compilers if (each.switch == BY_BLOCK) == by_block and self._expected(each).device < 0]

    @cached_property
    def _graph(self) -> Switches:
        recording = [each for each in self._usable(self.space.choices) if each.relieves == "host"]
        chosen = min(recording, key=lambda each: self._expected(each).device + self._expected(each).host, default=None)
        return frozenset({chosen.switch}) if chosen is not None else BASELINE

    def _best(self, family: str) -> Switches:
        usable = [each for each in self._usable(self.space.families.get(family, ())) if self._expected(each).device < 0]
        chosen = min(usable, key=lambda each: self._expected(each).device, default=None)
        return frozenset({chosen.switch}) if chosen is not None else BASELINE

    def _may_be_host_bound(self, switches: Switches) -> bool:
        """Whether the host is expected to need nearly as long as the device, or longer."""
        if self.on_cpu or self.host_share is None:
            return False
        expected = [self._expected(self.space.by_switch[switch]) for switch in switches]
        host = math.log(max(self.host_share, 1e-6)) + sum(each.host for each in expected)
        return host > math.log(GRAPH_MARGIN) + sum(each.device for each in expected)

    def _expected(self, choice: SwitchChoice) -> Expectation:
        return expectation(choice, on_cpu=self.on_cpu, task=self.space.task)

    def _usable(self, choices: Iterable[SwitchChoice]) -> list[SwitchChoice]:
        quick = (each for each in choices if not each.is_slow_to_prepare and not each.capabilities.quantizes)
        return [each for each in quick if self.may_run(frozenset({each.switch}))]
