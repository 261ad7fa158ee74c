"""This module decides which recipe is started next. There is one rule:

    Start the recipe with the highest expected gain per second whose expected end, with its spread, plus the last race still fits
    before the deadline.

The gain is what `beliefs.py` promises beyond all that is there or on its way, times the chance that the recipe runs (`lessons.py`), times
the chance that it is ready in time (`costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from redline.model.protocol import AFTER_COMPILING
from redline.search.group import Pending
from redline.search.tune.beliefs import Beliefs, Floats
from redline.search.tune.costs import CONTENTION, Costs
from redline.search.tune.lessons import quantizing_of
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.standings import NEAR_ENOUGH, Estimate
from redline.search.tune.state import FAILED_SHARE, Search

LIKELY = 0.3
"""A recipe is begun only if it is at least this likely to be ready in time for its race."""


@dataclass
class Candidate:
    """A candidate is a recipe that is worth its seconds, or whose worker prepares it already."""

    switches: Switches
    gain: float = math.inf
    """It promises an improvement that is this share of the fastest time so far."""
    cost_s: float = math.inf
    ready: float = 1.0
    """This is the chance that it is ready in time for its race."""
    pending: Pending | None = None
    taken_s: float = 0.0
    """It has been prepared for this long, less the time it stood still while others were timed, and less what others slowed it down."""

    @property
    def rate(self) -> float:
        return self.gain * self.ready / self.cost_s

    @property
    def is_compiled(self) -> bool:
        """It is True if the compiler is done: the rest takes no longer than with any other recipe."""
        return self.pending is not None and self.pending.stage in AFTER_COMPILING


def next_recipe(
    search: Search, beliefs: Beliefs, on_its_way: Sequence[Candidate]
) -> tuple[Candidate | None, list[Candidate]]:
    """Returns the recipe to prepare next, if there is one; and those that would be worth it if there were time for them."""
    costs, known = Costs(search), known_times(search)
    first, too_dear = None, list[Candidate]()
    if not known:
        return first, too_dear
    others, slower = [each.switches for each in on_its_way], 1 + CONTENTION * len(on_its_way)
    compiling = [each for each in on_its_way if costs.compiles(each.switches)]
    awaited = {each.switches: ready_chance(search, costs, each, len(others) - 1) for each in compiling}
    race_s = costs.race_s(search.leader() or BASELINE)
    half = max(search.jobs // 2, 1)
    is_full = {True: len(awaited) >= half, False: len(others) - len(awaited) >= half}
    gains = _promises(search, beliefs, known, others, awaited)
    for switches, promise, chance in _promising(search, beliefs, costs, gains, others):
        if first is not None and promise / costs.plain_s < first.rate:
            break  # nothing that promises less can have a higher rate
        gain = promise * chance
        compiles, is_slow = costs.compiles(switches), costs.is_slow_for_its_gain(switches)
        if is_full[compiles] or (compiles and any(_should_wait(costs, switches, each) for each in awaited)):
            continue  # half of the workers are for what compiles, which takes longest, and half for what is quick
        cost_s = costs.seconds(switches) * slower
        # A compile keeps only one of several workers busy, so it costs a part of its time. One that takes minutes is charged all of it,
        # because nobody has said that it is worth it.
        if gain < least_gain(search, cost_s / half if compiles and not is_slow else cost_s):
            continue
        within_s = search.left_s - max(costs.race_s(switches), race_s)
        choice = Candidate(switches, gain, cost_s, costs.ready_chance(switches, within_s / slower))
        # A compiler that tries many forms of each kernel may lose much of what failures may take.
        is_gamble = is_slow and (1 - choice.ready) * cost_s > search.allowance_s / 2
        if choice.ready < LIKELY or is_gamble:
            too_dear.append(choice)
        elif first is None or choice.rate > first.rate:
            first = choice
    return first, too_dear


def _should_wait(costs: Costs, switches: Switches, awaited: Switches) -> bool:
    """Returns whether another compile comes first.

    One of the same program will leave it in the cache; one of the same kind will show whether that kind works.
    """
    return costs.program(switches) == costs.program(awaited) or costs.is_first_of_kind(switches, awaited)


def known_times(search: Search) -> dict[Switches, Estimate]:
    """Returns all recipes that were timed. Before any was, what the facts say of the baseline stands in for it."""
    facts = search.tune.facts
    if search.timed or facts is None or not facts.step_s:
        return search.timed
    host_log_s = math.log(facts.host_s) if facts.host_s and not facts.synchronises else None
    seen = Estimate(recipe="baseline", record_id="", log_s=math.log(facts.step_s), error=0.05, host_log_s=host_log_s)
    return {BASELINE: seen}


def least_gain(search: Search, cost_s: float) -> float:
    """Returns what a trial must promise: what matters at all, and as much for each percent of the budget that it takes."""
    return NEAR_ENOUGH * max(100 * cost_s / search.budget_s, 0.5)


def ready_chance(search: Search, costs: Costs, flight: Candidate, beside: int = 0) -> float:
    """Returns the chance that a recipe that is being prepared beside others is ready in time for its race."""
    race_s = costs.race_s(flight.switches, is_held=search.held_of(flight.switches) > 0)
    return costs.ready_chance(
        flight.switches, (search.left_s - race_s) / (1 + CONTENTION * beside), taken_s=flight.taken_s
    )


def _promising(
    search: Search, beliefs: Beliefs, costs: Costs, gains: Floats, others: Sequence[Switches]
) -> Iterator[tuple[Switches, float, float]]:
    """Yields recipes, the most promising first. Each has with it what it promises and the chance that it runs."""
    done = {*search.tried(), *others, *search.given_up}
    at_risk_s = max(search.allowance_s, 0.1 * FAILED_SHARE * search.budget_s) / 2
    for index in np.argsort(-gains, kind="stable"):
        switches = beliefs.recipes[index]
        if gains[index] < NEAR_ENOUGH / 2:
            return
        if switches in done or _is_shown_already(search, switches):
            continue
        chance = search.lessons.chance(switches)
        if (1 - chance) * costs.seconds(switches) <= at_risk_s:
            yield switches, float(gains[index]), chance * search.lessons.novelty(switches)


def _is_shown_already(search: Search, switches: Switches) -> bool:
    """Returns whether a recipe is only to be shown, and each of its quantizing switches was shown already."""
    if not search.is_only_shown(switches):
        return False
    return all(any(switch in other for other in search.tried()) for switch in quantizing_of(switches, search.tune))


def _promises(
    search: Search,
    beliefs: Beliefs,
    known: dict[Switches, Estimate],
    others: Sequence[Switches],
    ready: Mapping[Switches, float],
) -> Floats:
    """Returns what each recipe is expected to bring beyond all that will be there by then.

    What is being prepared is taken to turn out as expected; what is being compiled, by the chance that it is ready in time.
    """
    able = [each.log_s for switches, each in (search.seen or known).items() if not search.is_only_shown(switches)]
    expected = beliefs.expected(known)

    def beyond(there: Sequence[Switches]) -> Floats:
        imagined = {
            switches: Estimate(recipe="", record_id="", log_s=float(expected[beliefs.index[switches]]), error=0.0)
            for switches in there
            if switches in beliefs.index
        }
        return beliefs.promises(imagined | known, min(*able, math.inf, *(each.log_s for each in imagined.values())))

    chance = min(ready.values(), default=1.0)
    return chance * beyond(others) + (1 - chance) * beyond([switches for switches in others if switches not in ready])
