"""What the end of a search needs: who goes into the last race, and the seconds to keep for it and for what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from redline.search.decide import FEWEST_REPLICATES
from redline.search.tune.costs import CONTENTION, Costs
from redline.search.tune.estimates import PROCESS_SD
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import Tuner

RACE_MARGIN = 1.25
"""What a replicate may take over what trials of its recipes took: it is timed for longer."""
RACE_TIMED = 1.3
"""To time a process of a race, over what timing a trial takes: it is timed alone before it takes turns."""
FINALISTS = 4
NEAR = 0.03
"""Within this of the fastest, a recipe goes to the last race, and doubt about both is added to it."""
FINALISTS_RACE_SHARE = 0.5
QUICK_RACE_SHARE = 0.25
"""Of the budget: where a race takes more, only as much is kept for it as the fastest and the baseline need."""
ENOUGH_REPLICATES = 3
"""Student's factor is 13 with two replicates and 4 with three."""
UNSTEADY_REPLICATES = 5
"""Where the host sets the pace: two processes of a detector on an H200 lay 48 % apart, and two replicates decided nothing."""
ENOUGH_SHARE = 0.3
"""Of the budget, for these."""
CACHED = 0.6
"""Of what preparing took when it was compiled: opening it again may take as much."""
ABLATION_SHARE = 0.25
"""The largest share of the budget for each: a long budget should also go into trying recipes."""


def choose_finalists(tuner: Tuner) -> list[Switches]:
    """Those that could be the fastest for all that is known, the fastest first."""
    known = sorted((each for each in tuner.seen().values() if tuner.may_win(each)), key=lambda each: each.log_s)
    if not known:
        return []
    best = known[0]

    def doubt(error: float) -> float:
        return 2 * math.sqrt(error**2 + best.error**2 + 2 * PROCESS_SD**2)

    near = [each for each in known if each.log_s <= best.log_s + min(NEAR, doubt(each.error)) + 1e-12]
    return [tuner.space.switches_of(each.recipe) for each in near[:FINALISTS]]


def race_s(tuner: Tuner, costs: Costs) -> float:
    """For the last race, were it held now. Without it there is no interval, so that nothing else may take this."""
    racers = list({BASELINE, *choose_finalists(tuner)})
    replicate_s = min(sum(map(costs.expected_s, racers)), together_s(tuner, costs, racers))
    quick_s = max(RACE_MARGIN * fewest_race_s(tuner, costs), QUICK_RACE_SHARE * tuner.budget_s)
    most = UNSTEADY_REPLICATES if _waits_for_the_host(tuner) else tuner.asked.replicates
    return min(max(most, tuner.asked.replicates) * replicate_s, quick_s, FINALISTS_RACE_SHARE * tuner.budget_s)


def fewest_race_s(tuner: Tuner, costs: Costs, candidate: Switches | None = None) -> float:
    """For as many replicates as are planned at least, of the baseline and the fastest; or of one that may become it."""
    racers = [BASELINE, _leading(tuner) if candidate is None else candidate]
    if racers[1] == BASELINE:
        return 0.0
    return _least_s(tuner, costs, racers, planned_replicates(tuner, costs, racers))


def last_race_s(tuner: Tuner, costs: Costs, candidate: Switches, *, has_twins: bool = False) -> float:
    """For the fewest replicates that give an interval at all: with less than this left, there is no point in timing it.

    `has_twins`: were its processes for them prepared beside its trial.
    """
    count = fewest_replicates(tuner)
    if has_twins:
        return at_once_s(tuner, costs, [BASELINE, candidate], count, opened=[BASELINE])
    return _least_s(tuner, costs, [BASELINE, candidate], count)


def leaders_last_race_s(tuner: Tuner, costs: Costs) -> float:
    """The same for the fastest so far; nothing where that is the baseline."""
    leading = _leading(tuner)
    return last_race_s(tuner, costs, leading) if leading != BASELINE else 0.0


def fewest_replicates(tuner: Tuner) -> int:
    return min(FEWEST_REPLICATES, tuner.asked.replicates)


def planned_replicates(tuner: Tuner, costs: Costs, racers: Sequence[Switches]) -> int:
    """Three, or as many as were asked for, and more where processes of one recipe lie apart; but two, of which the interval is
    wide, where those take too much of the budget."""
    most = min(ENOUGH_REPLICATES, tuner.asked.replicates)
    most = max(most, UNSTEADY_REPLICATES) if _waits_for_the_host(tuner) else most
    fewest = fewest_replicates(tuner)
    counts = range(most, fewest, -1)
    room_s = ENOUGH_SHARE * tuner.budget_s
    return next((count for count in counts if _least_s(tuner, costs, racers, count) <= room_s), fewest)


def _waits_for_the_host(tuner: Tuner) -> bool:
    """Whether the host sets the pace of the fastest, or of any step: its processors are less alike than steps of a device."""
    leader, facts = tuner.leader(), tuner.tune.facts
    is_awaited = facts is not None and bool(facts.synchronises)
    return not tuner.on_cpu and (is_awaited or (leader is not None and leader.is_host_bound))


def _leading(tuner: Tuner) -> Switches:
    leader = tuner.leader()
    return tuner.space.switches_of(leader.recipe) if leader is not None else BASELINE


def _least_s(tuner: Tuner, costs: Costs, racers: Sequence[Switches], replicates: int) -> float:
    """One replicate after the other, or all at once, whatever takes less."""
    together_s = at_once_s(tuner, costs, racers, replicates)
    if math.isinf(together_s):
        return RACE_MARGIN * replicates * sum(map(costs.reopen_s, racers))
    return min(replicates * sum(map(costs.again_s, racers)), together_s)


def at_once_s(
    tuner: Tuner,
    costs: Costs,
    racers: Sequence[Switches],
    replicates: int,
    opened: Sequence[Switches] | None = None,
    *,
    is_cautious: bool = False,
) -> float:
    """Seconds that this many replicates take when prepared at the same time; infinite where that is impossible.

    `opened`: those that still have to be; None: those of which there are too few twins. `is_cautious`: what was compiled may
    take long to be opened again.
    """
    workers = len(racers) * replicates
    missing = [
        replicates - tuner.twins_of(each) if opened is None else replicates * (each in opened) for each in racers
    ]
    preparing = sum(max(count, 0) for count in missing)
    if preparing > tuner.jobs or not tuner.has_memory_for(workers):
        return math.inf
    least = CACHED if is_cautious else 0.0
    still = [
        max(costs.reopen_s(each), least * costs.anew_s(each))
        for each, count in zip(racers, missing, strict=True)
        if count > 0
    ]
    return _beside_each_other_s(costs, still, preparing, workers)


def together_s(tuner: Tuner, costs: Costs, racers: Sequence[Switches]) -> float:
    """Seconds that one replicate takes when all of it is prepared at the same time, some of it for the first time; infinite
    where that is impossible."""
    count = len(racers)
    if tuner.on_cpu or count > tuner.jobs or not tuner.has_memory_for(count):
        return math.inf
    return _beside_each_other_s(costs, [costs.expected_s(each) for each in racers], count, count)


def _beside_each_other_s(costs: Costs, each_s: Sequence[float], preparing: int, workers: int) -> float:
    return max(each_s, default=0.0) * (1 + CONTENTION * (preparing - 1)) + workers * RACE_TIMED * costs.timed_s


def at_most_s(costs: Costs, switches: Switches) -> float:
    """To open it once more, should what was compiled take long to be found in the cache."""
    return max(costs.expected_s(switches), CACHED * costs.anew_s(switches))


def may_be_late(tuner: Tuner, racers: Sequence[Switches]) -> bool:
    """Whether one more replicate may end after the budget, if what was compiled takes long to be opened again."""
    return sum(map(partial(at_most_s, Costs(tuner)), racers)) > tuner.left_s


def ablation_s(tuner: Tuner, costs: Costs) -> float:
    """To tell what each switch of the fastest brings: good to have, also in part."""
    leader = tuner.leader()
    if leader is None:
        return 0.0
    switches = tuner.space.switches_of(leader.recipe)
    racers = [switches, *(without for _, without in tuner.space.less_one(switches))]
    return min(sum(map(costs.expected_s, racers)), ABLATION_SHARE * tuner.budget_s)


def affordable(tuner: Tuner, racers: Sequence[Switches], grace_s: float = 0.0) -> list[Switches]:
    """As many of them, from the first on, as the budget still holds."""
    costs, left_s, found = Costs(tuner), tuner.left_s + grace_s, []
    for switches in racers:
        left_s -= costs.expected_s(switches) * tuner.replicate_scale
        if left_s < 0:
            break
        found.append(switches)
    return found
