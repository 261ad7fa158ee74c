"""Which recipe is prepared next: what is safe to try first, then what promises most for its seconds."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from redline.search.tune.beliefs import Beliefs, Floats
from redline.search.tune.costs import Candidate, Costs, first_of
from redline.search.tune.estimates import Estimate
from redline.search.tune.final_runs import twin_specs
from redline.search.tune.flight import Flight
from redline.search.tune.opening import PROMISING, is_done_with, next_safe, safe_now, safe_to_race
from redline.search.tune.reserve import (
    RACE_MARGIN,
    ablation_s,
    fewest_race_s,
    fewest_replicates,
    last_race_s,
    leaders_last_race_s,
    race_s,
)
from redline.search.tune.safe import is_slow_for_its_gain, safe_recipes
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import Tuner

WORTH_A_TRIAL = 0.0025
"""Expected improvement, as a share of the fastest time so far."""
USUAL_SHARE = 0.01
"""Of the budget: a trial that takes more of it must promise more."""
LITTLE = 0.02
"""Of what is left of the budget: a compile that takes no more need not wait for the first of its kind."""
LARGE = 0.2
"""Who promises this much may have all but the seconds of its shortest race: a wider interval is the lesser loss."""
SLOW_SHARE = 0.25
"""A switch that takes minutes to prepare is tried only when it takes no more than this share of what is left."""
STAKE = 0.25
"""Of what may still be spent on failures: so much may be lost, on average, on a recipe that holds suspects."""
QUICK_SHARE, QUICK_RISK, NEXT_TO_NOTHING = 0.05, 0.01, 0.0025
"""Of the budget: what breaks sooner than the first may lose the second in any case, and anything else the third."""
LIKELY = 0.25
"""The chance that a recipe will be ready in time for its race, down to which it is waited for."""
LIKELY_ALONE = 0.6
"""The same for one that will only be timed, as nothing can be raced."""
LIKELY_GAIN = 0.05
"""While nothing that compiles was timed, one that promises more than this is waited for with as much less of a chance."""
LEAST_LIKELY = 0.1
"""The same, whatever it may bring: a compile that is less likely to end than this is taken to hang."""
FAR_BEHIND = 0.5
"""Of the logarithm of the time: what is expected to be this much slower than the fastest is neither begun nor waited for."""
UNLIKELY_S = 90.0
"""Unless it promises as much as a trial of so many seconds must: beliefs about what was never tried may be wrong."""
WORTH_A_DELAY = 2.0
"""Times what is lost, on average, when what is being compiled is ready later: promises of recipes never tried are often too high."""
NOTICED_S = 0.6
"""That a wait is over is noticed so much late: on an H200 6.42 s were lost where 6 were allowed and 0.2 were kept for this."""
SURE_TO_BE_READY = 0.95
"""A recipe that is this likely to be ready in time is counted on."""
LOOKED_AT = 300
"""How many of the most promising recipes are weighed against their cost."""


def next_recipe(tuner: Tuner, beliefs: Beliefs, trials: Trials) -> tuple[Candidate | None, list[Candidate]]:
    """The recipe to prepare next, if any; and those that would be worth it, had they the time."""
    safe = next_safe(tuner, trials.in_flight)
    if safe is not None:
        return safe, []
    costs, in_flight = Costs(tuner), trials.in_flight
    awaited = _awaited(tuner, beliefs, trials, costs)

    unproven, unsettled = _unproven(tuner), costs.unsettled
    on_trial = frozenset(switch for flight in in_flight for switch in unproven(flight) | (flight & unsettled))

    def may_start(switches: Switches) -> bool:
        """A switch that nobody has seen running is in one recipe at a time: what breaks with it would break them all.

        So is one that may take long in every process: all of them would be late. Compilers use several processors each; and
        the first of its kind shows whether that works, and what it takes.
        """
        if on_trial & (unproven(switches) | (switches & unsettled)):
            return False
        if not awaited or not costs.compiles(switches):
            return True
        if len(awaited) >= max(tuner.jobs // 2, 1):
            return False
        is_dear = costs.expected_s(switches) > LITTLE * tuner.left_s
        return not any(
            costs.is_same_program(switches, other) or (is_dear and costs.is_first_of_kind(other, switches))
            for other in in_flight
        )

    found, too_dear = _candidates(tuner, beliefs, in_flight, _promises(tuner, beliefs, in_flight, awaited), may_start)
    found = [
        each
        for each in found
        if each.gain > WORTH_A_DELAY * sum(other.lost_by(costs.delay_s(each)) for other in awaited)
    ]
    if not found and not in_flight:
        return _only_timed(tuner, costs), too_dear
    return (first_of(found) if found else None), too_dear


def _only_timed(tuner: Tuner, costs: Costs) -> Candidate | None:
    """Where there is no time for any race, a safe recipe to be timed beside the baseline: its ratio has no interval."""
    if tuner.tried() != {BASELINE} or safe_to_race(tuner) is not None:
        return None
    for switches in safe_now(tuner, costs, ()):
        cost_s, chance = costs.expected_s(switches), costs.ready_chance(switches, 0, 0.0, tuner.left_s)
        if cost_s <= tuner.left_s and (not costs.compiles(switches) or chance >= LIKELY_ALONE):
            return Candidate(switches, PROMISING, cost_s, tuner.left_s)
    return None


def _unproven(tuner: Tuner) -> Callable[[Switches], Switches]:
    """Of a recipe, the switches that no sound recipe has held yet and that are not safe to try; those of one name stand for each other."""
    names = tuner.space.variants
    proven = {switch for recipe in (*tuner.seen(), *safe_recipes(tuner).in_order()) for switch in recipe}
    shared = {names.get(switch) for switch in proven}

    def unproven(switches: Switches) -> Switches:
        open_ones = (switch for switch in switches if switch not in proven and names.get(switch, switch) not in shared)
        return frozenset(names.get(switch, switch) for switch in open_ones)

    return unproven


def kept_s(tuner: Tuner, beliefs: Beliefs, trials: Trials) -> float:
    """When no more than this is left of the budget, what is still being prepared is given up.

    It would not be raced any more, or it is unlikely to be ready in time for what it may bring, or the race of the fastest
    needs the rest.
    """
    costs, others = Costs(tuner), len(trials.flights) - 1
    # With nothing else to race, a ratio without an interval is better than none.
    is_only_hope = tuner.tried() == {BASELINE}
    fastest, expected = tuner.fastest_log_s(), beliefs.expected(tuner.timed())
    is_first = not any(map(costs.compiles, tuner.seen()))
    last_s = [last_race_s(tuner, costs, switches) for switches in trials.in_flight]
    race_s = max(RACE_MARGIN * leaders_last_race_s(tuner, costs), min(last_s, default=0.0)) if not is_only_hope else 0.0

    def patience_s(flight: Flight) -> float:
        """Seconds for which it is waited: while it is likely to be ready in time, and within what may be spent on failures."""
        if flight.is_compiled or flight.switches == BASELINE:
            return math.inf
        may_fail_s, taken_s = tuner.allowance_s - trials.idle_s - NOTICED_S, flight.taken_s(tuner.clock())
        beside = max(others, flight.others(tuner.clock()))
        due_s = costs.overdue_s(flight.switches, beside) - taken_s
        if not costs.compiles(flight.switches):
            return max(due_s, may_fail_s)
        own_s = last_race_s(tuner, costs, flight.switches) if not is_only_hope else 0.0
        within_s = tuner.left_s - max(race_s, own_s)
        row = beliefs.index.get(flight.switches) if is_first else None
        gain = max(fastest - float(expected[row]), LIKELY_GAIN) if row is not None else LIKELY_GAIN
        chance = max(LIKELY * LIKELY_GAIN / gain, LEAST_LIKELY)
        likely_s = costs.patience_s(flight.switches, beside, taken_s, within_s, chance)
        return max(min(likely_s, due_s), may_fail_s)

    return max(race_s, tuner.left_s - max(map(patience_s, trials.flights), default=math.inf))


def without_prospect(tuner: Tuner, beliefs: Beliefs, trials: Trials) -> list[Flight]:
    """What is being prepared and would not be begun any more: it is expected to be far slower than the fastest by now."""
    if not trials.flights:
        return []
    hopeless = _hopeless(tuner, beliefs, beliefs.promises(tuner.timed(), tuner.fastest_log_s()))
    rows = {flight.switches: beliefs.index.get(flight.switches) for flight in trials.flights}
    late = {switches for switches, row in rows.items() if row is not None and hopeless[row]}
    return [each for each in trials.flights if each.switches in late - {BASELINE}]


def _hopeless(tuner: Tuner, beliefs: Beliefs, gains: Floats) -> NDArray[np.bool_]:
    """Recipes that are expected to be far behind, and could hardly surprise."""
    far_behind = beliefs.expected(tuner.timed()) > tuner.fastest_log_s() + FAR_BEHIND
    return far_behind & (gains < _least_gain(tuner, UNLIKELY_S))


def _least_gain(tuner: Tuner, cost_s: float) -> float:
    """What a trial must promise: more, the larger its part of the budget."""
    return WORTH_A_TRIAL * math.sqrt(max(cost_s / (USUAL_SHARE * tuner.budget_s), 1.0))


@dataclass(frozen=True)
class Awaited:
    """A recipe that is being compiled."""

    switches: Switches
    gain: float
    """What it is expected to bring, as a share of the fastest time so far."""
    ready: Callable[[float], float]
    """The chance that it is ready in time for its race, after a delay of so many seconds."""

    def lost_by(self, delay_s: float) -> float:
        """What a delay costs, on average."""
        return self.gain * (self.ready(0.0) - self.ready(delay_s))


def _awaited(tuner: Tuner, beliefs: Beliefs, trials: Trials, costs: Costs) -> list[Awaited]:
    """What is being compiled: one more that is timed before it, and prepared beside it, delays it."""
    compiling = [flight for flight in trials.flights if costs.compiles(flight.switches)]
    if not compiling:
        return []
    others = len(trials.in_flight) - 1
    expected, fastest = beliefs.expected(tuner.timed()), tuner.fastest_log_s()
    timing_s = 2 * costs.timed_s * others

    def awaited(flight: Flight) -> Awaited:
        switches, taken_s = flight.switches, flight.taken_s(tuner.clock())
        beside = max(others, flight.others(tuner.clock()))
        room_s = tuner.left_s - timing_s - fewest_race_s(tuner, costs, switches)
        row = beliefs.index.get(switches)
        return Awaited(
            switches,
            max(fastest - float(expected[row]), WORTH_A_TRIAL) if row is not None else WORTH_A_TRIAL,
            lambda delay_s: costs.ready_chance(switches, beside, taken_s, room_s - delay_s),
        )

    return [awaited(flight) for flight in compiling]


def prepare_race_beside(tuner: Tuner, trials: Trials) -> None:
    """While a recipe with twins compiles, prepare all else that a race needs: of that one, or of the fastest so far.

    Then it can be waited for nearly to the end: whichever is raced, its processes are only to be timed.
    """
    leader, costs = tuner.leader(), Costs(tuner)
    if tuner.lent is None or tuner.lent not in trials.in_flight or leader is None:
        return
    leading = tuner.space.switches_of(leader.recipe)
    is_settled = all(map(costs.compiles, trials.in_flight))  # no quick one may overtake it soon
    counts = {BASELINE: tuner.twins_of(tuner.lent)}
    if is_settled:
        counts.setdefault(leading, fewest_replicates(tuner))
    for switches, count in counts.items():
        missing = count - tuner.twins_of(switches)
        if missing > 0 and trials.has_room_for_twins(missing):
            trials.start_twins(twin_specs(tuner, switches, count=missing))


def _candidates(
    tuner: Tuner, beliefs: Beliefs, in_flight: list[Switches], gains: Floats, may_start: Callable[[Switches], bool]
) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are worth their seconds and can be had with what is left; and those for which too little is left.

    Who takes minutes to prepare is not for every budget, and so not missed; unless nothing else was tried.
    """
    tried, costs, lessons = {*tuner.tried(), *in_flight}, Costs(tuner), tuner.lessons()
    room_s = tuner.left_s - race_s(tuner, costs)
    spare_s = room_s - ablation_s(tuner, costs)
    leaders_race_s = RACE_MARGIN * fewest_race_s(tuner, costs)
    found: list[Candidate] = []
    too_dear: list[Candidate] = []
    is_first = tried <= {BASELINE}
    for switches, gain, chance in _most_promising(tuner, beliefs, tried, gains, may_start):
        cost_s = costs.beside_s(switches, len(in_flight))
        if not _may_risk(tuner, chance * lessons.chance_of_new_pairs(switches), costs.failing_s(switches)):
            continue
        own_s = tuner.left_s if gain >= LARGE else room_s if gain >= PROMISING else spare_s
        is_slow = any(is_slow_for_its_gain(tuner.space.by_switch[switch]) for switch in switches)
        own_s *= SLOW_SHARE if is_slow else 1.0
        caution = costs.caution(switches) if any(map(costs.compiles, (*tried, *in_flight))) else 1.0
        needed_s = caution * cost_s + max(fewest_race_s(tuner, costs, switches), leaders_race_s)
        is_worth_it = gain >= _least_gain(tuner, cost_s)
        fits = cost_s <= own_s and needed_s <= tuner.left_s
        if is_worth_it and fits and switches not in tuner.given_up:
            found.append(Candidate(switches, gain, cost_s, own_s))
        elif is_first or (is_worth_it and not is_slow):
            too_dear.append(Candidate(switches, gain, caution * cost_s, own_s))
    return found, too_dear


def _most_promising(
    tuner: Tuner, beliefs: Beliefs, tried: set[Switches], gains: Floats, may_start: Callable[[Switches], bool]
) -> list[tuple[Switches, float, float]]:
    """Recipes with what they bring on average, and the chance that they run; the most promising first.

    What is likely to break must not take the places of others, whatever it would bring if it ran.
    """
    lessons, found, least = tuner.lessons(), list[tuple[float, int, float]](), list[float]()
    hopeless = _hopeless(tuner, beliefs, gains)
    for index in map(int, np.argsort(-gains, kind="stable")):
        if gains[index] < (least[0] if len(least) == LOOKED_AT else WORTH_A_TRIAL):
            break  # a chance makes none of the others better
        switches = beliefs.recipes[index]
        if hopeless[index] or not may_start(switches) or is_done_with(switches, tried, tuner):
            continue
        chance = lessons.chance(switches)
        gain = float(gains[index]) * chance
        if gain < WORTH_A_TRIAL:
            continue
        found.append((-gain, index, chance))
        (heapq.heappush if len(least) < LOOKED_AT else heapq.heappushpop)(least, gain)
    return [(beliefs.recipes[index], -loss, chance) for loss, index, chance in sorted(found)[:LOOKED_AT]]


def _promises(tuner: Tuner, beliefs: Beliefs, in_flight: list[Switches], awaited: list[Awaited]) -> Floats:
    """What each recipe is expected to bring beyond what is there by then.

    What is being prepared is taken to turn out as expected; what is being compiled, by the chance that it is ready in time.
    """

    def beyond(there: Sequence[Switches]) -> Floats:
        timed, fastest = tuner.timed(), tuner.fastest_log_s()
        if there:
            timed = {**_imagined(beliefs, timed, there), **timed}
            fastest = min([fastest, *(timed[each].log_s for each in there if each in timed)])
        return beliefs.promises(timed, fastest)

    chance = max((each.ready(0.0) for each in awaited), default=1.0)
    with_all = beyond(in_flight)
    if chance > SURE_TO_BE_READY:
        return with_all
    without = beyond([each for each in in_flight if all(each != other.switches for other in awaited)])
    return chance * with_all + (1 - chance) * without


def _may_risk(tuner: Tuner, chance: float, failing_s: float) -> bool:
    """Whether what a recipe loses on average, should it break after so many seconds, may still be spent on failures."""
    in_any_case = QUICK_RISK if failing_s <= QUICK_SHARE * tuner.budget_s else NEXT_TO_NOTHING
    return (1 - chance) * failing_s <= max(STAKE * tuner.allowance_s, in_any_case * tuner.budget_s)


def _imagined(
    beliefs: Beliefs, timed: dict[Switches, Estimate], in_flight: Sequence[Switches]
) -> dict[Switches, Estimate]:
    """What is being prepared, as if it had been timed and had taken what is expected of it."""
    expected = beliefs.expected(timed)
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
