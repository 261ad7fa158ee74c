"""The search as a sentence: explore, race the last few, take the winner apart, choose its batch."""

from __future__ import annotations

import math

import msgspec
import numpy as np

from redline.note import note
from redline.search.tune.batches import batch_share_s, choose_batch
from redline.search.tune.checks import check_model_as_it_is, prove, prove_fastest, prove_winner
from redline.search.tune.costs import Candidate, Costs, first_of
from redline.search.tune.finals import (
    ablate,
    ablation_s,
    decide,
    fewest_race_s,
    race_s,
    simplify,
    untold_switches,
)
from redline.search.tune.lessons import quantizing_of
from redline.search.tune.model import Beliefs, Estimate
from redline.search.tune.record import Untried
from redline.search.tune.space import BASELINE, Switches, safe_recipes
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import Tuner
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
        with tuner.spending("other"):
            prove(tuner)
        tuner.observer.stage("racing the last few")
        with tuner.spending("race"):
            decide(tuner)
        _note_a_short_race(tuner)
        _take_apart(tuner)
        prove_winner(tuner)
        tuner.charge("other")
        tuner.keep(state="out-of-budget" if tuner.is_short else "done")
    except KeyboardInterrupt:
        tuner.charge("other")
        tuner.keep(state="interrupted")


def _take_apart(tuner: Tuner) -> None:
    """What each switch of the winner brings, and the batch for it."""
    if winner_of(tuner.tune, tuner.records) is None:
        return
    tuner.observer.stage("what each switch brings")
    with tuner.spending("ablation"):
        ablate(tuner)
        simplify(tuner)
    tuner.kept_back_s = 0.0
    with tuner.spending("batch"):
        choose_batch(tuner)
    with tuner.spending("ablation"):
        ablate(tuner)  # with what was kept back for the batch and not needed
    switches = untold_switches(tuner)
    if switches:
        text = f"the budget ended before the gain of these was measured: {', '.join(switches)}; raise --budget"
        tuner.ran_short(note("gains-unknown", text))


def _note_a_short_race(tuner: Tuner) -> None:
    replicates, planned = len(tuner.tune.finals), tuner.asked.replicates
    if replicates < planned and winner_of(tuner.tune, tuner.records) not in (None, "baseline"):
        had = f"its {planned} replicates (it had {replicates})"
        tuner.ran_short(note("short-race", f"the budget ended before the final comparison had {had}: raise --budget"))


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
"""Of those that promise most, so many are weighed against their cost."""
NAMED = 5
"""Recipes that were not tried for want of time: so many are kept."""


def explore(tuner: Tuner) -> None:
    """Try the baseline, the person's own recipes, what is safe to try, then whatever promises most."""
    with tuner.spending("other"):
        beliefs = Beliefs(tuner.space, on_cpu=tuner.on_cpu, host_is_seen=tuner.asked.objective == "throughput")
    tuner.observer.tune_planned(tuner.tune.name, len(beliefs.recipes), tuner.budget_s)
    with Trials(tuner) as trials:
        for switches, why in _firsts(tuner):
            trials.attempt(switches, why)
            prove_fastest(tuner)
        too_dear: list[Candidate] = []
        while tuner.baseline() is not None:
            while trials.has_room():
                chosen, too_dear = _next(tuner, beliefs, trials.in_flight)
                if chosen is None:
                    break
                trials.start(chosen.switches, f"may bring {chosen.gain:.1%}")
            if not trials.in_flight:
                break
            trials.finish_one(keep_s=fewest_race_s(tuner, Costs(tuner)))
            prove_fastest(tuner)
    if tuner.baseline() is not None:
        _keep_untried(tuner, too_dear)


def _keep_untried(tuner: Tuner, too_dear: list[Candidate]) -> None:
    tuner.charge("other")
    reserved_s = min(race_s(tuner, Costs(tuner)), max(tuner.left_s, 0.0))
    spent = msgspec.structs.replace(tuner.tune.spent, reserved=reserved_s)
    best = sorted(too_dear, key=lambda each: -each.gain)[:NAMED]
    untried = [Untried(recipe=tuner.space.text(each.switches), gain=each.gain, cost_s=each.cost_s) for each in best]
    tuner.keep(spent=spent, untried=tuple(untried))
    if too_dear:
        what = "any other recipe" if tuner.tried() == {BASELINE} else "all recipes that may be faster"
        left = f"{max(tuner.left_s, 0.0):.0f} s are left, {reserved_s:.0f} s of them for the final comparison"
        first = f"{untried[0].recipe} takes about {untried[0].cost_s:.0f} s"
        tuner.ran_short(note("untried", f"no time to try {what}: {first}; {left}; raise --budget"))


def _next(tuner: Tuner, beliefs: Beliefs, in_flight: list[Switches]) -> tuple[Candidate | None, list[Candidate]]:
    """The recipe to prepare next, if any; and those that would be worth it, had they the time."""
    safe = _next_safe(tuner, in_flight)
    if safe is not None:
        return safe, []
    found, too_dear = _candidates(tuner, beliefs, in_flight)
    return (first_of(found) if found else None), too_dear


def _next_safe(tuner: Tuner, in_flight: list[Switches]) -> Candidate | None:
    """Of what is safe to try, the first that was not and fits."""
    baseline = tuner.baseline()
    host_log_s = baseline.host_log_s if baseline is not None else None
    share = math.exp(host_log_s - baseline.log_s) if baseline is not None and host_log_s is not None else None
    costs, lessons, tried = Costs(tuner), tuner.lessons(), {*tuner.tried(), *in_flight, *tuner.given_up}
    for switches in safe_recipes(tuner.space, on_cpu=tuner.on_cpu, host_share=share):
        if switches in tried or lessons.chance(switches) < 1.0 or is_done_with(switches, tried, tuner):
            continue
        cost_s = costs.expected_s(switches)
        if cost_s + fewest_race_s(tuner, costs, switches) <= tuner.left_s:
            return Candidate(switches, PROMISING, cost_s, tuner.left_s)
    return None


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
        cost_s = costs.expected_s(switches)
        if not _may_risk(tuner, chance, max(cost_s, costs.longest_failed_s)):
            continue
        own_s = room_s if gain >= PROMISING else spare_s
        is_slow = any(tuner.space.by_switch[switch].is_slow_to_prepare for switch in switches)
        own_s *= SLOW_SHARE if is_slow else 1.0
        is_worth_it = gain >= WORTH_A_TRIAL * math.sqrt(max(cost_s / (USUAL_SHARE * tuner.budget_s), 1.0))
        if is_worth_it and cost_s <= own_s and switches not in tuner.given_up:
            found.append(Candidate(switches, gain, cost_s, own_s))
        elif is_first or (is_worth_it and not is_slow):
            too_dear.append(Candidate(switches, gain, cost_s, own_s))
    return found, too_dear


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


def _firsts(tuner: Tuner) -> list[tuple[Switches, str]]:
    """After a resume the fastest so far is opened again, to be measured against."""
    tried, leader = tuner.tried(), tuner.leader()
    firsts = [(BASELINE, "what all are set against")] if BASELINE not in tried else []
    if leader is not None:
        firsts.append((tuner.space.switches_of(leader.recipe), "the fastest so far, opened again"))
    seeds = [tuner.space.checked(seed) for seed in tuner.asked.seeds]
    return firsts + [(seed, "asked for") for seed in dict.fromkeys(seeds) if seed not in tried and seed != BASELINE]
