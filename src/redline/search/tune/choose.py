"""Which recipe is started next. One rule:

    Start the recipe with the highest expected gain per second whose expected end, with its spread, plus the last race still fits
    before the deadline.

The gain is what `beliefs.py` promises beyond all that is there or on its way, times the chance that the recipe runs (`lessons.py`), times
the chance that it is ready in time (`costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from redline.model.protocol import AFTER_COMPILING
from redline.search.group import Pending
from redline.search.tune.beliefs import Beliefs, Floats
from redline.search.tune.costs import CONTENTION, HANGS, Costs, unproven_of
from redline.search.tune.lessons import quantizing_of
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.standings import Estimate
from redline.search.tune.state import FAILED_SHARE, Search

LEAST_GAIN = 0.0025
"""A trial must promise this share of the fastest time for each half percent of the budget that it takes, and never less."""
LIKELY = 0.3
"""A recipe is begun only if it is so likely to be ready in time for its race."""
LOOKED_AT = 100
"""How many of the most promising recipes are weighed against their cost, of those that compile and of those that do not."""


@dataclass
class OnItsWay:
    """A recipe whose worker prepares, or is about to."""

    switches: Switches
    gain: float = math.inf
    """The improvement that it promised when it was begun."""
    pending: Pending | None = None
    is_held: bool = False
    """A second process of it is prepared too, for the last race."""
    taken_s: float = 0.0
    """It has been prepared for so long, less what it stood still while others were timed."""
    shared_s: float = 0.0
    """Seconds of others that were prepared meanwhile, added up."""
    waited_s: float = 0.0
    """The search did nothing but wait for so long until it was prepared."""

    @property
    def beside(self) -> float:
        """How many others were prepared beside it, on average."""
        return self.shared_s / max(self.taken_s, 1e-6)

    @property
    def is_compiled(self) -> bool:
        """Its compiler is done: the rest takes no longer than with any other recipe."""
        return self.pending is not None and self.pending.stage in AFTER_COMPILING


@dataclass(frozen=True)
class Choice:
    """A recipe that is worth its seconds."""

    switches: Switches
    gain: float
    """The improvement that it promises, as a share of the fastest time so far."""
    cost_s: float
    ready: float
    """The chance that it is ready in time for its race."""

    @property
    def rate(self) -> float:
        return self.gain * self.ready / self.cost_s


def next_recipe(search: Search, beliefs: Beliefs, on_its_way: Sequence[OnItsWay]) -> tuple[Choice | None, list[Choice]]:
    """The recipe to prepare next, if any; and those that would be worth it, had they the time."""
    costs, known = Costs(search), known_times(search)
    if not known:
        return None, []
    awaited = [each for each in on_its_way if costs.compiles(each.switches)]
    ready = {each.switches: ready_chance(search, costs, each) for each in awaited}
    others = [each.switches for each in on_its_way]
    programs = {costs.program(each.switches) for each in awaited}
    fitting, too_dear, half = [], [], max(search.jobs // 2, 1)
    is_full = {True: len(awaited) >= half, False: len(on_its_way) - len(awaited) >= half}
    fastest = search.fastest_log_s() if search.seen() else known[BASELINE].log_s
    gains = _promises(beliefs, known, fastest, others, ready)
    for switches, gain in _most_promising(search, beliefs, costs, gains, others):
        compiles = costs.compiles(switches)
        if is_full[compiles]:
            continue  # half of the workers are for what compiles, which takes longest, and half for what is quick
        if compiles and (
            costs.program(switches) in programs  # it will be in the cache
            or any(costs.is_first_of_kind(switches, each.switches) for each in awaited)
        ):
            continue
        cost_s = costs.seconds(switches) * (1 + CONTENTION * len(others))
        within_s = search.left_s - max(costs.race_s(switches), costs.race_s(search.leader() or BASELINE))
        chance = costs.ready_chance(switches, within_s, beside=len(others))
        choice = Choice(switches, gain, cost_s, chance)
        # A compile keeps one of several workers busy. Whether one that takes minutes is worth it, nobody has said.
        if gain < least_gain(
            search, cost_s / half if compiles and not costs.is_slow_for_its_gain(switches) else cost_s
        ):
            continue
        # A compiler that tries many forms of each kernel may lose much of what failures may take.
        is_gamble = costs.is_slow_for_its_gain(switches) and (1 - chance) * cost_s > search.allowance_s / 2
        if chance < LIKELY or is_gamble:
            too_dear.append(choice)
        else:
            fitting.append(choice)
    first = max(fitting, key=lambda choice: choice.rate, default=None)
    if first is None and not on_its_way and search.tried() == {BASELINE}:
        first = _only_timed(search, costs, too_dear)
    return first, too_dear


def quick_to_race(search: Search, costs: Costs, too_dear: Sequence[Choice]) -> Switches | None:
    """Returns the most promising recipe that can be raced at once, where there is no time for any trial."""
    quick = [
        each for each in too_dear if not costs.compiles(each.switches) and costs.race_s(each.switches) <= search.left_s
    ]
    return max(quick, key=lambda choice: choice.gain).switches if quick and search.tried() == {BASELINE} else None


def _only_timed(search: Search, costs: Costs, too_dear: Sequence[Choice]) -> Choice | None:
    """Returns a recipe to be timed beside the baseline where there is no time for any race; its ratio will have no interval."""
    if quick_to_race(search, costs, too_dear) is not None:
        return None
    likely = [each for each in too_dear if costs.ready_chance(each.switches, search.left_s) > 0.5]
    return max(likely, key=lambda choice: choice.gain, default=None)


def known_times(search: Search) -> dict[Switches, Estimate]:
    """Returns all recipes that were timed; before the baseline was, what the facts say of it stands in."""
    facts, timed = search.tune.facts, search.timed()
    if timed or facts is None or not facts.step_s:
        return timed
    host_s = None if facts.synchronises else facts.host_s
    return {
        BASELINE: Estimate(
            recipe="baseline",
            record_id="",
            log_s=math.log(facts.step_s),
            error=0.05,
            host_log_s=math.log(host_s) if host_s else None,
        )
    }


def least_gain(search: Search, cost_s: float) -> float:
    """Returns what a trial must promise, which grows with its part of the budget."""
    return LEAST_GAIN * max(200 * cost_s / search.budget_s, 1.0)


def ready_chance(search: Search, costs: Costs, flight: OnItsWay, delay_s: float = 0.0) -> float:
    """Returns the chance that a recipe that is being prepared is ready in time for its race."""
    race_s = costs.race_s(flight.switches, is_held=flight.is_held)
    return costs.ready_chance(flight.switches, search.left_s - delay_s - race_s, flight.taken_s, flight.beside)


def _most_promising(
    search: Search, beliefs: Beliefs, costs: Costs, gains: Floats, others: Sequence[Switches]
) -> list[tuple[Switches, float]]:
    """Returns recipes with what they bring on average, the most promising first; one that is likely to break counts for less."""
    lessons, timed = search.lessons(), search.timed().keys()
    done = {*search.tried(), *others, *search.given_up}
    at_risk_s = max(search.allowance_s, 0.1 * FAILED_SHARE * search.budget_s) / 2
    found: list[tuple[Switches, float]] = []
    left = {True: LOOKED_AT, False: LOOKED_AT}
    for index in map(int, np.argsort(-gains, kind="stable")):
        switches = beliefs.recipes[index]
        if gains[index] < LEAST_GAIN or not any(left.values()):
            break
        compiles = costs.compiles(switches)
        if switches in done or not left[compiles] or _is_shown_already(search, switches):
            continue
        known = lessons.chance(switches)
        if (1 - known) * costs.seconds(switches) > at_risk_s:
            continue
        chance = known * (1 - HANGS) ** len(unproven_of(switches, timed, search.space))
        if gains[index] * chance >= LEAST_GAIN:
            found.append((switches, float(gains[index]) * chance))
            left[compiles] -= 1
    return found


def _is_shown_already(search: Search, switches: Switches) -> bool:
    """Only to be shown, and its quantizing switches were shown already."""
    if not search.is_only_shown(switches):
        return False
    return all(any(switch in other for other in search.tried()) for switch in quantizing_of(switches, search.tune))


def _promises(
    beliefs: Beliefs,
    known: dict[Switches, Estimate],
    fastest: float,
    others: Sequence[Switches],
    ready: Mapping[Switches, float],
) -> Floats:
    """Returns what each recipe is expected to bring beyond all that will be there by then.

    What is being prepared is taken to turn out as expected; what is being compiled, by the chance that it is ready in time.
    """

    def beyond(there: Sequence[Switches]) -> Floats:
        expected = beliefs.expected(known)
        imagined = {
            switches: Estimate(recipe="", record_id="", log_s=float(expected[beliefs.index[switches]]), error=0.0)
            for switches in there
            if switches in beliefs.index
        }
        return beliefs.promises(imagined | known, min([fastest, *(each.log_s for each in imagined.values())]))

    chance = min(ready.values(), default=1.0)
    with_all = beyond(others)
    if chance > 0.95:
        return with_all
    return chance * with_all + (1 - chance) * beyond([switches for switches in others if switches not in ready])
