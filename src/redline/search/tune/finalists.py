"""Who goes to the last race, and what must be kept of the budget for it and for what comes after it."""

from __future__ import annotations

import math

from redline.search.tune.beliefs import PROCESS_SD
from redline.search.tune.costs import Costs
from redline.search.tune.space import BASELINE, Steps
from redline.search.tune.tuner import Tuner

FINALISTS = 4
NEAR = 0.03
"""Within this of the fastest, a recipe goes to the last race, and doubt about both is added to it."""
RACE_SHARE = 0.5
ABLATION_SHARE = 0.25
"""Of the budget, at most, for each: whoever gives minutes wants recipes tried in them too."""


def choose_finalists(tuner: Tuner) -> list[Steps]:
    """Those that could be the fastest for all that is known, the fastest first."""
    known = sorted((each for each in tuner.seen().values() if tuner.may_win(each)), key=lambda each: each.log_s)
    if not known:
        return []
    best = known[0]

    def doubt(error: float) -> float:
        return 2 * math.sqrt(error**2 + best.error**2 + 2 * PROCESS_SD**2)

    near = [each for each in known if each.log_s <= best.log_s + min(NEAR, doubt(each.error)) + 1e-12]
    return [tuner.space.steps_of(each.recipe) for each in near[:FINALISTS]]


def race_s(tuner: Tuner, costs: Costs) -> float:
    """For the last race, were it held now. Without it there is no interval, so that nothing else may take this."""
    heat_s = sum(map(costs.expected_s, {BASELINE, *choose_finalists(tuner)}))
    return min(tuner.asked.replicates * heat_s, RACE_SHARE * tuner.budget_s)


def ablation_s(tuner: Tuner, costs: Costs) -> float:
    """To tell what each step of the fastest brings: good to have, also in part."""
    leader = tuner.leader()
    if leader is None:
        return 0.0
    steps = tuner.space.steps_of(leader.recipe)
    racers = [steps, *(without for _, without in tuner.space.less_one(steps))]
    return min(sum(map(costs.expected_s, racers)), ABLATION_SHARE * tuner.budget_s)
