"""What a trial will take, by what those like it took: a budget is kept by asking before, not by stopping halfway."""

from __future__ import annotations

from redline.search.tune.rules import prepare_s
from redline.search.tune.space import Steps
from redline.search.tune.tuner import Tuner

FIRST_TRIAL_S = 4.0
TIMED_S = 2.0
SLOW_SHARE = 0.25
"""A step that takes minutes to prepare is tried only when it takes no more than this share of what is left."""
FINALISTS = 4


def trial_costs(tuner: Tuner) -> dict[Steps, float]:
    """Seconds that each trial so far took."""
    return {tuner.space.steps_of(trial.recipe): trial.cost_s for trial in tuner.tune.trials}


def expected_cost(steps: Steps, tuner: Tuner, known: dict[Steps, float]) -> float:
    """That of the most similar trial, and what steps take to prepare that no trial has had yet."""
    met = frozenset(step for recipe in known for step in recipe)
    fresh_s = sum(prepare_s(tuner.space.by_step[step]) for step in steps - met)
    if not known:
        return FIRST_TRIAL_S + fresh_s
    slow = {step for step in steps if prepare_s(tuner.space.by_step[step]) > 0}

    def distance(other: Steps) -> tuple[int, int]:
        # Who compiles is like who compiles.
        return len(slow ^ {step for step in other if prepare_s(tuner.space.by_step[step]) > 0}), len(steps ^ other)

    nearest = min(distance(other) for other in known)
    alike = [seconds for other, seconds in known.items() if distance(other) == nearest]
    return sum(alike) / len(alike) + fresh_s


def is_affordable(steps: Steps, cost_s: float, tuner: Tuner, left_s: float) -> bool:
    if any(tuner.space.by_step[step].is_slow_to_prepare for step in steps):
        return cost_s <= SLOW_SHARE * left_s
    return cost_s <= left_s


def reserve_s(tuner: Tuner) -> float:
    """What the last race and the ablation will want, with caches that are warm by then."""
    known = tuner.seen()
    if not known:
        return 0.0
    best = sorted(known.values(), key=lambda each: each.log_s)[:FINALISTS]
    heat_s = sum(warm_cost(each.cost_s) for each in best)
    steps = len(tuner.space.steps_of(best[0].recipe))
    return min(heat_s * tuner.asked.replicates + warm_cost(best[0].cost_s) * steps, tuner.budget_s / 2)


def warm_cost(cost_s: float) -> float:
    """Opening it again: what it took beyond a plain trial was mostly compiling, and that is in the cache now."""
    return min(cost_s, FIRST_TRIAL_S + 0.25 * cost_s)
