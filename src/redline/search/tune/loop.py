"""The search as a sentence: explore, race the last few, take the winner apart, choose its batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import msgspec

from redline.model.note import Note, note
from redline.search.tune.ablation import ablate, simplify, untold_switches
from redline.search.tune.batches import batch_share_s, choose_batch
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.checks import check_model_as_it_is, prove, prove_fastest, prove_winner
from redline.search.tune.costs import Candidate, Costs
from redline.search.tune.earlier import forget_another_model
from redline.search.tune.finals import begin_anew_for_a_newcomer, decide, narrow
from redline.search.tune.lessons import rejection
from redline.search.tune.opening import next_safe, safe_to_race, twins_for
from redline.search.tune.planner import kept_s, next_recipe, prepare_race_beside, without_prospect
from redline.search.tune.record import Untried
from redline.search.tune.reserve import fewest_race_s, race_s
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.trials import Trials
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import winner_of

HOST_SEEN = ("throughput", "tpot")
"""Objectives for which the time to issue a step is known."""
NO_ENERGY = note(
    "no-energy", "the energy of this device cannot be read (NVML, amdsmi or RAPL), so recipes cannot be compared by it"
)
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
            tuner.keep(state="done", notes=(*tuner.tune.notes, _why_nothing(tuner)))
            return
        race(tuner)
        _drop_what_the_race_ruled_out(tuner)
        _note_a_short_race(tuner)
        _take_apart(tuner)
        prove_winner(tuner)
        tuner.charge("other")
        tuner.keep(state="out-of-budget" if tuner.is_short else "done")
    except KeyboardInterrupt:
        tuner.charge("other")
        tuner.keep(state="interrupted")
    finally:
        tuner.drop_twins()


def _why_nothing(tuner: Tuner) -> Note:
    """Why the baseline has no time: its energy is not told, it was not ready before the budget ended, or it broke."""
    if tuner.asked.objective == "energy" and any(record.blocks for record in tuner.records.values()):
        return NO_ENERGY
    failures = [record.failure for record in tuner.records.values() if record.failure is not None]
    if failures and all(each.kind == "timeout" for each in failures):
        told = f"the baseline was not ready within the budget of {tuner.budget_s:.0f} s: raise --budget"
        return note("baseline-too-slow", told)
    reasons = [rejection(record, tuner.tune) for record in tuner.records.values()]
    if any(why is not None and why.code == "not-finite" for why in reasons):
        what = "loss" if tuner.asked.spec.workload.task == "train" else "output"
        return note(
            "not-finite", f"the {what} of the baseline itself is not finite, so nothing can be compared with it"
        )
    return NOTHING_RUNS


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


def race(tuner: Tuner) -> None:
    """The last race. Where the recipe falls in it that led before, others are tried with what that taught, and raced too."""
    begin_anew_for_a_newcomer(tuner)
    while True:
        tuner.kept_back_s = batch_share_s(tuner)
        with tuner.spending("other"):
            prove(tuner)
        tuner.observer.stage("racing the last few")
        leader = tuner.leader()
        with tuner.spending("race"):
            decide(tuner, safe_to_race(tuner))
            tuner.drop_twins()
        if leader is None or leader.recipe not in tuner.fallen():
            break
        tuner.observer.stage("trying other recipes")
        explore(tuner)
    with tuner.spending("race"):
        narrow(tuner)


def explore(tuner: Tuner) -> None:
    """Try the baseline, the person's own recipes, what is safe to try, then whatever promises most."""
    with tuner.spending("other"):
        beliefs = Beliefs(tuner.space, on_cpu=tuner.on_cpu, host_is_seen=tuner.asked.objective in HOST_SEEN)
    tuner.observer.tune_planned(tuner.tune.name, len(beliefs.recipes), tuner.budget_s, tuner.elapsed_s)
    _forget_untried(tuner)
    with Trials(tuner) as trials:
        for switches, why in _firsts(tuner, beliefs, trials):
            trials.start(switches, why)
            if switches == BASELINE:
                _start_beside(tuner, trials)
            trials.finish(switches)
            forget_another_model(tuner)
            prove_fastest(tuner)
            if _cannot_compare(tuner):
                return
        too_dear: list[Candidate] = []
        while tuner.baseline() is not None:
            while trials.has_room():
                chosen, too_dear = next_recipe(tuner, beliefs, trials)
                if chosen is None:
                    break
                _start(tuner, trials, chosen.switches, f"may bring {chosen.gain:.1%}")
            if not trials.in_flight:
                break
            prepare_race_beside(tuner, trials)
            trials.finish_one(keep_s=lambda: kept_s(tuner, beliefs, trials))
            prove_fastest(tuner)
            if _cannot_compare(tuner):
                return
            for flight in without_prospect(tuner, beliefs, trials):
                trials.cancel(flight, "given up: others turned out far faster")
    if tuner.baseline() is not None:
        _keep_untried(tuner, too_dear)


def _cannot_compare(tuner: Tuner) -> bool:
    """Whether every recipe would be rejected because the baseline's own outputs or losses say nothing; a note says why."""
    prepared = (record.prepared for record in tuner.records.values() if record.prepared is not None)
    reasons = (each.numerics.reason for each in prepared if each.numerics.reason is not None)
    unlike_itself = next((reason for reason in reasons if reason.code == "not-repeatable"), None)
    if unlike_itself is not None:
        text = f"no recipe can be compared with strict fp32 on this model: {unlike_itself}"
        tuner.keep(notes=(*tuner.tune.notes, note("not-repeatable", text)))
        return True
    numerics = tuner.silent_reference()
    if numerics is None:
        return False
    what, remedy = "its output does not depend on the input", "inputs that make a difference"
    if tuner.asked.spec.workload.task == "train":
        what, remedy = f"its loss stands still over {numerics.steps} steps", "a loss and targets that it can learn"
    text = f"no recipe can be compared with strict fp32 on this model, as {what}: give {remedy}"
    tuner.keep(notes=(*tuner.tune.notes, note("no-signal", text)))
    return True


def _start_beside(tuner: Tuner, trials: Trials) -> None:
    """While the baseline is prepared, what is safe to try is prepared too, if a plain step is known to run."""
    while tuner.tune.facts is not None and trials.has_room():
        safe = next_safe(tuner, trials.in_flight)
        if safe is None:
            break
        _start(tuner, trials, safe.switches, "safe to try")


def _start(tuner: Tuner, trials: Trials, switches: Switches, why: str) -> None:
    twins = twins_for(tuner, switches, len(trials.in_flight))
    trials.start(switches, why, twins)


BUDGET_STEP_S = 30.0
NAMED = 5
"""How many recipes that were not tried for lack of time are kept."""


def _keep_untried(tuner: Tuner, too_dear: list[Candidate]) -> None:
    tuner.charge("other")
    reserved_s = min(race_s(tuner, Costs(tuner)), max(tuner.left_s, 0.0))
    spent = msgspec.structs.replace(tuner.tune.spent, reserved=reserved_s)
    best = sorted(too_dear, key=lambda each: -each.gain)[:NAMED]
    untried = [_untried(tuner, each) for each in best]
    tuner.keep(spent=spent, untried=tuple(untried))
    if too_dear:
        is_nothing_else = tuner.tried() == {BASELINE} and safe_to_race(tuner) is None
        what = "any other recipe" if is_nothing_else else "all recipes that may be faster"
        _tell_untried(tuner, untried[0], what)


def _tell_untried(tuner: Tuner, first: Untried, what: str) -> None:
    least_s = fewest_race_s(tuner, Costs(tuner), tuner.space.switches_of(first.recipe))
    own_race_s = max(least_s, tuner.tune.spent.reserved)
    told = f"{first.recipe} takes about {first.cost_s:.0f} s, and the final comparison {own_race_s:.0f} s"
    left, enough = f"{max(tuner.left_s, 0.0):.0f} s are left", f"--budget {first.budget_s:.0f}s would hold it"
    tuner.ran_short(note("untried", f"no time to try {what}: {told}; {left}; {enough}"))


def _forget_untried(tuner: Tuner) -> None:
    """What an earlier look around left untried; this one tells it anew."""
    if tuner.tune.untried:
        tuner.is_short = False
        tuner.keep(untried=(), notes=_without_untried(tuner.tune.notes))


def _without_untried(notes: Iterable[Note]) -> tuple[Note, ...]:
    return tuple(each for each in notes if each.code != "untried")


def _drop_what_the_race_ruled_out(tuner: Tuner) -> None:
    """Untried recipes that hold what failed in the race: a larger budget would not make them run."""
    lessons = tuner.lessons()
    kept = tuple(each for each in tuner.tune.untried if not lessons.rules_out(tuner.space.switches_of(each.recipe)))
    if kept != tuner.tune.untried:
        tuner.keep(untried=kept, notes=_without_untried(tuner.tune.notes))
        if kept:
            _tell_untried(tuner, kept[0], "all recipes that may be faster")


def _untried(tuner: Tuner, candidate: Candidate) -> Untried:
    """With the budget that the same search would have needed for this one too, in half minutes."""
    needed_s = tuner.elapsed_s + candidate.cost_s + fewest_race_s(tuner, Costs(tuner), candidate.switches)
    budget_s = BUDGET_STEP_S * math.ceil(max(needed_s, tuner.budget_s + 1) / BUDGET_STEP_S)
    text = tuner.space.text(candidate.switches)
    return Untried(recipe=text, gain=candidate.gain, cost_s=candidate.cost_s, budget_s=budget_s)


def _firsts(tuner: Tuner, beliefs: Beliefs, trials: Trials) -> Iterator[tuple[Switches, str]]:
    """After a resume or a race the fastest so far is opened again to be measured against, if there is anything to try.

    One that breaks now leaves that to the next fastest.
    """
    tried, opened = tuner.tried(), set[str]()
    seeds = dict.fromkeys(tuner.space.checked(seed) for seed in tuner.asked.seeds)
    asked_for = [(seed, "asked for") for seed in seeds if seed not in tried and seed != BASELINE]
    if BASELINE not in tried:
        yield BASELINE, "what all are set against"
    elif asked_for or next_recipe(tuner, beliefs, trials)[0] is not None:
        while not trials.is_open and (leader := tuner.leader()) is not None and leader.recipe not in opened:
            opened.add(leader.recipe)
            yield tuner.space.switches_of(leader.recipe), "the fastest so far, opened again"
    yield from asked_for
