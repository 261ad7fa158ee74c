"""Which recipe next? The one that promises most improvement for its seconds, until none promises enough."""

from __future__ import annotations

import math

import numpy as np

from redline.analyze.tune.estimates import quantizing_of
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.blame import Blame
from redline.search.tune.costs import Costs
from redline.search.tune.finalists import ablation_s, race_s
from redline.search.tune.plan import Candidate, first_of
from redline.search.tune.proof import prove_fastest
from redline.search.tune.space import BASELINE, Steps
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import Tuner

WORTH_A_TRIAL = 0.0025
"""Expected improvement, as a share of the fastest time so far."""
USUAL_SHARE = 0.01
"""Of the budget: a trial that takes more of it must promise more."""
PROMISING = 0.02
"""Who promises this much may have the seconds that were meant for telling what each step brings."""
SLOW_SHARE = 0.25
"""A step that takes minutes to prepare is tried only when it takes no more than this share of what is left."""
LOOKED_AT = 300
"""Of those that promise most, so many are weighed against their cost."""


def explore(tuner: Tuner) -> None:
    """Try the baseline, the person's own recipes, then whatever promises most."""
    beliefs = Beliefs(tuner.space, on_cpu=tuner.on_cpu, host_is_seen=tuner.asked.objective == "throughput")
    tuner.observer.planned(tuner.tune, len(beliefs.recipes), tuner.budget_s)
    with Trials(tuner) as trials:
        for steps, why in _firsts(tuner):
            _attempt(tuner, trials, steps, why)
        while tuner.baseline() is not None:
            found, too_dear = _candidates(tuner, beliefs)
            if not found:
                _note_untried(tuner, too_dear)
                break
            chosen = first_of(found)
            _attempt(tuner, trials, chosen.steps, f"may bring {chosen.gain:.1%}")


def _note_untried(tuner: Tuner, too_dear: list[Candidate]) -> None:
    if not too_dear:
        return
    is_first = tuner.tried() == {BASELINE}
    untried = "any other recipe" if is_first else "all recipes that may be faster"
    tuner.ran_short(f"the budget ended before {untried} could be tried: give it more")


def _candidates(tuner: Tuner, beliefs: Beliefs) -> tuple[list[Candidate], list[Candidate]]:
    """Those that are worth their seconds and can be had with what is left; and those for which too little is left.

    Who takes minutes to prepare is not for every budget, and so not missed; unless nothing else was tried.
    """
    seen, tried, costs = tuner.seen(), tuner.tried(), Costs(tuner)
    gains, blame = beliefs.promises(seen, tuner.fastest_log_s()), Blame(seen, tuner.broken())
    room_s = tuner.left_s - race_s(tuner, costs)
    spare_s = room_s - ablation_s(tuner, costs)
    found: list[Candidate] = []
    too_dear: list[Candidate] = []
    is_first, looked_at = tried <= {BASELINE}, 0
    for place in np.argsort(-gains, kind="stable"):
        steps = beliefs.recipes[place]
        if gains[place] < WORTH_A_TRIAL or looked_at == LOOKED_AT:
            break
        gain = 0.0 if is_done_with(steps, tried, tuner) else float(gains[place]) * blame.chance(steps)
        if gain < WORTH_A_TRIAL:
            continue
        looked_at += 1
        cost_s = costs.expected_s(steps)
        own_s = room_s if gain >= PROMISING else spare_s
        is_slow = any(tuner.space.by_step[step].is_slow_to_prepare for step in steps)
        own_s *= SLOW_SHARE if is_slow else 1.0
        is_worth_it = gain >= WORTH_A_TRIAL * math.sqrt(max(cost_s / (USUAL_SHARE * tuner.budget_s), 1.0))
        if is_worth_it and cost_s <= own_s:
            found.append(Candidate(steps, gain, cost_s, own_s))
        elif is_first or (is_worth_it and not is_slow):
            too_dear.append(Candidate(steps, gain, cost_s, own_s))
    return found, too_dear


def is_done_with(steps: Steps, tried: set[Steps], tuner: Tuner) -> bool:
    """Tried, or only to be shown, and its quantizing steps were shown already."""
    if steps in tried:
        return True
    quantizing = quantizing_of(steps, tuner.tune)
    return tuner.is_only_shown(steps) and all(any(step in other for other in tried) for step in quantizing)


def _firsts(tuner: Tuner) -> list[tuple[Steps, str]]:
    """After a resume the fastest so far is opened again, to be measured against."""
    tried, leader = tuner.tried(), tuner.leader()
    firsts = [(BASELINE, "what all are set against")] if BASELINE not in tried else []
    if leader is not None:
        firsts.append((tuner.space.steps_of(leader.recipe), "the fastest so far, opened again"))
    seeds = [tuner.space.checked(seed) for seed in tuner.asked.seeds]
    return firsts + [(seed, "asked for") for seed in dict.fromkeys(seeds) if seed not in tried and seed != BASELINE]


def _attempt(tuner: Tuner, trials: Trials, steps: Steps, why: str) -> None:
    tuner.observer.attempting(tuner.space.text(steps), len(tuner.tune.trials) + 1, why)
    trials.attempt(steps)
    prove_fastest(tuner)
