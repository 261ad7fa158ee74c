"""What a search begins with: what is safe to try, in the order in which it fits, and what is prepared beside it for its race."""

from __future__ import annotations

from collections.abc import Sequence

from redline.model.spec import RunSpec
from redline.search.tune.costs import Candidate, Costs, most_helpers
from redline.search.tune.earlier import leading_then
from redline.search.tune.final_runs import twin_specs
from redline.search.tune.lessons import quantizing_of
from redline.search.tune.reserve import ENOUGH_REPLICATES, fewest_race_s, fewest_replicates, last_race_s
from redline.search.tune.safe import safe_recipes
from redline.search.tune.space import BASELINE, BY_BLOCK, Switches
from redline.search.tune.tuner import Tuner

PROMISING = 0.02
"""Who promises this much may have the seconds that were meant for telling what each switch brings."""
LIKELY_TO_START = 0.4
"""The chance that a recipe will be ready in time for its race, down to which it is begun though it is not expected to fit."""
MAY_TAKE = 3.0
"""What compiling may take over what is expected of it: where a race after that would not fit, it is prepared beside the trial."""


def next_safe(tuner: Tuner, in_flight: Sequence[Switches]) -> Candidate | None:
    """Of what is safe to try, the first that was not and fits. Where several are prepared at once, the slowest is first."""
    costs = Costs(tuner)
    recipes = safe_now(tuner, costs, in_flight)
    if tuner.jobs > 1:
        recipes.sort(key=lambda each: -costs.expected_s(each))
    for switches in recipes:
        cost_s = costs.beside_s(switches, len(in_flight))
        fits = cost_s + fewest_race_s(tuner, costs, switches) <= tuner.left_s
        if fits or _may_be_ready(tuner, costs, switches, len(in_flight)):
            return Candidate(switches, PROMISING, cost_s, tuner.left_s)
    return None


def _may_be_ready(tuner: Tuner, costs: Costs, switches: Switches, others: int) -> bool:
    """Whether it is likely enough to be compiled in time for a short race: what compiling takes is not known exactly."""
    has_twins = bool(twins_for(tuner, switches, others))
    room_s = tuner.left_s - last_race_s(tuner, costs, switches, has_twins=has_twins)
    return costs.compiles(switches) and costs.ready_chance(switches, others, 0.0, room_s) >= LIKELY_TO_START


def twins_for(tuner: Tuner, switches: Switches, others: int) -> list[RunSpec]:
    """What else to prepare beside the trial of a recipe that compiles, so that it can be raced as soon as it was timed.

    Where there may be no time to open it again afterwards: what is compiled is in a cache then, and still takes a third or
    half as long. Only on a GPU, as on a CPU they would compute where it compiles.
    """
    costs = Costs(tuner)
    is_known = any(map(costs.compiles, tuner.seen()))
    if tuner.on_cpu or is_known or tuner.twins or not costs.compiles(switches):
        return []
    needed_s = MAY_TAKE * costs.beside_s(switches, others) + fewest_race_s(tuner, costs, switches)
    if needed_s <= tuner.left_s:
        return []
    # Workers that would help to compile its blocks may as well stay for the race.
    is_helped = BY_BLOCK in switches and most_helpers(tuner) >= ENOUGH_REPLICATES - 1
    counts = [min(ENOUGH_REPLICATES, tuner.asked.replicates)] * is_helped + [fewest_replicates(tuner)]
    for count in counts:
        workers = others + count  # what is on trial is the first of them
        if workers <= tuner.jobs and tuner.has_memory_for(workers):
            return twin_specs(tuner, switches, count=count - 1)
    return []


def safe_to_race(tuner: Tuner) -> Switches | None:
    """Where there was no time to try anything: what is safe and can be raced at once, without a trial before."""
    costs = Costs(tuner)
    if tuner.tried() != {BASELINE} or tuner.silent_reference() is not None:
        return None
    fitting = (each for each in safe_now(tuner, costs, ()) if fewest_race_s(tuner, costs, each) <= tuner.left_s)
    return next((each for each in fitting if not costs.compiles(each)), None)


def safe_now(tuner: Tuner, costs: Costs, in_flight: Sequence[Switches]) -> list[Switches]:
    """What is safe to try and was not: what won in the search before this one, then the quickest to prepare first."""
    tried, safe = {*tuner.tried(), *in_flight, *tuner.given_up}, safe_recipes(tuner)
    led_before = leading_then(tuner)
    # Block by block stands in for what takes too long.
    is_needed_by_block = costs.is_quicker_by_block and not any(map(costs.compiles, tuner.seen()))
    return [
        each
        for each in dict.fromkeys((*led_before, *safe.in_order()))
        if each not in tried
        and safe.may_run(each)
        and not tuner.is_slow_without_compiler(each)
        and not is_done_with(each, tried, tuner)
        and (is_needed_by_block or BY_BLOCK not in each or each in led_before)
        and not any(costs.is_same_program(each, other) for other in in_flight)  # it will be in the cache
        # What a compiled recipe does without one of its switches is for beliefs to say, not worth the first seconds.
        and not (costs.compiles(each) and any(each < other for other in tuner.seen()))
    ]


def is_done_with(switches: Switches, tried: set[Switches], tuner: Tuner) -> bool:
    """Tried, or only to be shown, and its quantizing switches were shown already."""
    if switches in tried:
        return True
    quantizing = quantizing_of(switches, tuner.tune)
    return tuner.is_only_shown(switches) and all(any(switch in other for other in tried) for switch in quantizing)
