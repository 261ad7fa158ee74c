"""The search as a sentence: explore, race the last few, take the winner apart, choose its batch."""

from __future__ import annotations

import math

import numpy as np

from redline.note import note
from redline.search.tune.batches import batch_share_s, choose_batch
from redline.search.tune.checks import check_model_as_it_is, prove, prove_fastest, prove_winner
from redline.search.tune.costs import Candidate, Costs, first_of
from redline.search.tune.estimates import quantizing_of
from redline.search.tune.finals import ablate, ablation_s, decide, race_s, simplify, untold_steps
from redline.search.tune.model import Beliefs, Blame
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.trials import Trials, Tuner
from redline.search.tune.winner import winner_of

NOTHING_RUNS = note("nothing-runs", "nothing could be timed: the baseline itself does not run here")


def search(tuner: Tuner) -> None:
    """To the end, of the budget at the latest, or to Ctrl-C: what is known then is kept, and the state says which."""
    if tuner.tune.state == "done":
        return
    try:
        check_model_as_it_is(tuner)
        tuner.kept_back_s = batch_share_s(tuner)
        tuner.observer.stage("trying recipes")
        explore(tuner)
        if tuner.baseline() is None:
            tuner.keep(state="done", notes=(*tuner.tune.notes, NOTHING_RUNS))
            return
        tuner.kept_back_s = batch_share_s(tuner)
        prove(tuner)
        tuner.observer.stage("racing the last few")
        decide(tuner)
        _note_a_short_race(tuner)
        if winner_of(tuner.tune, tuner.records) is not None:
            tuner.observer.stage("what each switch brings")
            ablate(tuner)
            simplify(tuner)
            tuner.kept_back_s = 0.0
            choose_batch(tuner)
            ablate(tuner)  # with what was kept back for the batch and not needed
            _note_untold_steps(tuner)
            prove_winner(tuner)
        tuner.keep(state="out-of-budget" if tuner.is_short else "done")
    except KeyboardInterrupt:
        tuner.keep(state="interrupted")


def _note_a_short_race(tuner: Tuner) -> None:
    replicates, planned = len(tuner.tune.finals), tuner.asked.replicates
    if replicates < planned and winner_of(tuner.tune, tuner.records) not in (None, "baseline"):
        had = f"its {planned} replicates (it had {replicates})"
        tuner.ran_short(note("short-race", f"the budget ended before the final comparison had {had}: raise --budget"))


def _note_untold_steps(tuner: Tuner) -> None:
    switches = untold_steps(tuner)
    if switches:
        text = f"the budget ended before the gain of these was measured: {', '.join(switches)}; raise --budget"
        tuner.ran_short(note("gains-unknown", text))


WORTH_A_TRIAL = 0.0025
"""Expected improvement, as a share of the fastest time so far."""
USUAL_SHARE = 0.01
"""Of the budget: a trial that takes more of it must promise more."""
PROMISING = 0.02
"""Who promises this much may have the seconds that were meant for telling what each switch brings."""
SLOW_SHARE = 0.25
"""A switch that takes minutes to prepare is tried only when it takes no more than this share of what is left."""
LOOKED_AT = 300
"""Of those that promise most, so many are weighed against their cost."""


def explore(tuner: Tuner) -> None:
    """Try the baseline, the person's own recipes, then whatever promises most."""
    beliefs = Beliefs(tuner.space, on_cpu=tuner.on_cpu, host_is_seen=tuner.asked.objective == "throughput")
    tuner.observer.tune_planned(tuner.tune.name, len(beliefs.recipes), tuner.budget_s)
    with Trials(tuner) as trials:
        for switches, why in _firsts(tuner):
            _attempt(tuner, trials, switches, why)
        while tuner.baseline() is not None:
            found, too_dear = _candidates(tuner, beliefs)
            if not found:
                _note_untried(tuner, too_dear)
                break
            chosen = first_of(found)
            _attempt(tuner, trials, chosen.switches, f"may bring {chosen.gain:.1%}")


def _note_untried(tuner: Tuner, too_dear: list[Candidate]) -> None:
    if not too_dear:
        return
    is_first = tuner.tried() == {BASELINE}
    untried = "any other recipe" if is_first else "all recipes that may be faster"
    tuner.ran_short(note("untried", f"the budget ended before {untried} could be tried: raise --budget"))


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
        switches = beliefs.recipes[place]
        if gains[place] < WORTH_A_TRIAL or looked_at == LOOKED_AT:
            break
        gain = 0.0 if is_done_with(switches, tried, tuner) else float(gains[place]) * blame.chance(switches)
        if gain < WORTH_A_TRIAL:
            continue
        looked_at += 1
        cost_s = costs.expected_s(switches)
        own_s = room_s if gain >= PROMISING else spare_s
        is_slow = any(tuner.space.by_step[switch].is_slow_to_prepare for switch in switches)
        own_s *= SLOW_SHARE if is_slow else 1.0
        is_worth_it = gain >= WORTH_A_TRIAL * math.sqrt(max(cost_s / (USUAL_SHARE * tuner.budget_s), 1.0))
        if is_worth_it and cost_s <= own_s:
            found.append(Candidate(switches, gain, cost_s, own_s))
        elif is_first or (is_worth_it and not is_slow):
            too_dear.append(Candidate(switches, gain, cost_s, own_s))
    return found, too_dear


def is_done_with(switches: Switches, tried: set[Switches], tuner: Tuner) -> bool:
    """Tried, or only to be shown, and its quantizing switches were shown already."""
    if switches in tried:
        return True
    quantizing = quantizing_of(switches, tuner.tune)
    return tuner.is_only_shown(switches) and all(any(switch in other for other in tried) for switch in quantizing)


def _firsts(tuner: Tuner) -> list[tuple[Switches, str]]:
    """After a resume the fastest so far is opened again, to be measured against."""
    tried, leader = tuner.tried(), tuner.leader()
    firsts = [(BASELINE, "what all are set against")] if BASELINE not in tried else []
    if leader is not None:
        firsts.append((tuner.space.switches_of(leader.recipe), "the fastest so far, opened again"))
    seeds = [tuner.space.checked(seed) for seed in tuner.asked.seeds]
    return firsts + [(seed, "asked for") for seed in dict.fromkeys(seeds) if seed not in tried and seed != BASELINE]


def _attempt(tuner: Tuner, trials: Trials, switches: Switches, why: str) -> None:
    tuner.observer.attempting(tuner.space.text(switches), len(tuner.tune.trials) + 1, why)
    trials.attempt(switches)
    prove_fastest(tuner)
