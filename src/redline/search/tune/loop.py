"""The search as a sentence: try recipes, race the last few, take the winner apart, choose its batch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator

import msgspec

from redline.model.identity import device_key
from redline.model.note import Note, note
from redline.model.record import Prepared
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.choose import Choice, OnItsWay, next_recipe, quick_to_race
from redline.search.tune.costs import Costs
from redline.search.tune.finish import (
    batch_share_s,
    check_model_as_it_is,
    prove_fastest,
    prove_winner,
    race_the_last,
    take_apart,
)
from redline.search.tune.lessons import EXACTLY, rejection
from redline.search.tune.record import Earlier, TuneRecord, TuneSpec, Untried, differences
from redline.search.tune.result import recommended, winner_of
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.state import Records, Search
from redline.search.tune.trials import Trials

HOST_SEEN = ("throughput", "tpot")
"""Objectives for which the time to issue a step is known."""


def run_search(search: Search) -> None:
    """To the end, of the budget at the latest, or to Ctrl-C: what is known then is kept, and the state says which."""
    if search.tune.state == "done":
        return
    try:
        check_model_as_it_is(search)
        search.kept_back_s = batch_share_s(search)
        search.observer.stage("trying recipes")
        explore(search)
        if search.baseline() is None:
            search.keep(state="done", notes=(*search.tune.notes, _why_nothing(search)))
            return
        known = -1
        while known < len(search.tune.lessons):  # recipes that fell in the race teach what else to try
            known = len(search.tune.lessons)
            race_the_last(search)
            if known < len(search.tune.lessons):
                search.observer.stage("trying other recipes")
                explore(search)
        _note_a_short_race(search)
        take_apart(search)
        prove_winner(search)
        search.charge("other")
        search.keep(state="out-of-budget" if search.is_short else "done")
    except KeyboardInterrupt:
        search.charge("other")
        search.keep(state="interrupted")
    finally:
        search.drop_held()


def explore(search: Search) -> None:
    """Try the baseline, the person's own recipes, then whatever brings most per second and still ends in time."""
    with search.spending("other"):
        beliefs = Beliefs(search.space, on_cpu=search.on_cpu, host_is_seen=search.asked.objective in HOST_SEEN)
    search.observer.tune_planned(search.tune.name, len(beliefs.recipes), search.budget_s, search.elapsed_s)
    if search.tune.untried:  # this look around tells it anew
        search.is_short = False
        search.keep(untried=(), notes=_without(search.tune.notes, "untried"))
    too_dear: list[Choice] = []
    with Trials(search) as trials:
        for switches, why in _firsts(search, beliefs):
            if trials.is_open and switches in search.seen() and why != "asked for":
                continue
            trials.start(switches, why)
            if (
                switches == BASELINE
                and search.tune.facts is not None
                and search.asked.check is None
                and not search.asked.seeds
            ):
                too_dear = _start_all(search, beliefs, trials)  # beside the baseline: a plain step is known to run
            trials.finish(switches)
            _compare_with_earlier(search)
            prove_fastest(search)
            if _cannot_compare(search):
                return
        while search.baseline() is not None:
            too_dear = _start_all(search, beliefs, trials)
            if not trials.in_flight:
                break
            trials.prepare_race()
            trials.finish_one()
            prove_fastest(search)
            if _cannot_compare(search):
                return
    if search.baseline() is not None:
        search.keep(machine=_machine(search), compile_scale=Costs(search).learned_scale)
        search.guess = quick_to_race(search, Costs(search), too_dear)
        _keep_untried(search, too_dear)


def _start_all(search: Search, beliefs: Beliefs, trials: Trials) -> list[Choice]:
    """Start what is worth it, as long as there is room; returns what would be worth it, had it the time."""
    planned, too_dear = list[Choice](), list[Choice]()
    while trials.has_room(len(planned) + 1):
        on_its_way = [*trials.in_flight, *(OnItsWay(choice.switches) for choice in planned)]
        choice, too_dear = next_recipe(search, beliefs, on_its_way)
        if choice is None:
            break
        planned.append(choice)
    for choice in sorted(planned, key=lambda choice: -choice.cost_s):  # what takes longest begins first
        trials.start(choice.switches, f"may bring {choice.gain:.1%}", choice.gain)
    return too_dear


def _firsts(search: Search, beliefs: Beliefs) -> Iterator[tuple[Switches, str]]:
    """After a resume or a race the fastest so far is opened again to be measured against, if there is anything to try.

    One that breaks now leaves that to the next fastest.
    """
    tried = search.tried()
    seeds = dict.fromkeys(search.space.checked(seed) for seed in search.asked.seeds)
    asked_for = [(seed, "asked for") for seed in seeds if seed not in tried and seed != BASELINE]
    if BASELINE not in tried:
        yield BASELINE, "all others are set against it"
        asked_for += _won_before(search)
    elif asked_for or next_recipe(search, beliefs, ())[0] is not None:
        for switches in search.ranked()[:3]:
            yield switches, "the fastest so far, opened again"
    yield from asked_for


def _cannot_compare(search: Search) -> bool:
    """Whether every recipe would be rejected because the baseline's own outputs or losses say nothing; a note says why."""
    prepared = (record.prepared for record in search.records.values() if record.prepared is not None)
    reasons = (each.numerics.reason for each in prepared if each.numerics.reason is not None)
    unlike_itself = next((reason for reason in reasons if reason.code == "not-repeatable"), None)
    if unlike_itself is not None:
        text = f"no recipe can be compared with strict fp32 on this model: {unlike_itself}"
        search.tell(note("not-repeatable", text))
        return True
    numerics = search.silent_reference()
    if numerics is None:
        return False
    what, remedy = "its output does not depend on the input", "inputs that make a difference"
    if search.asked.spec.workload.task == "train":
        what, remedy = f"its loss stands still over {numerics.steps} steps", "a loss and targets that it can learn"
    text = f"no recipe can be compared with strict fp32 on this model, as {what}: give {remedy}"
    search.tell(note("no-signal", text))
    return True


def _why_nothing(search: Search) -> Note:
    """Why the baseline has no time: its energy is not told, it was not ready before the budget ended, or it broke."""
    records = search.records.values()
    if search.asked.objective == "energy" and any(record.blocks for record in records):
        why = "the energy of this device cannot be read (NVML, amdsmi or RAPL), so recipes cannot be compared by it"
        return note("no-energy", why)
    failures = [record.failure for record in records if record.failure is not None]
    if failures and all(failure.kind == "timeout" for failure in failures):
        why = f"the baseline was not ready within the budget of {search.budget_s:.0f} s: raise --budget"
        return note("baseline-too-slow", why)
    reasons = [rejection(record, search.tune) for record in records]
    if any(why is not None and why.code == "not-finite" for why in reasons):
        what = "loss" if search.asked.spec.workload.task == "train" else "output"
        why = f"the {what} of the baseline itself is not finite, so nothing can be compared with it"
        return note("not-finite", why)
    return note("nothing-runs", "nothing could be timed: the baseline itself does not run here")


def _note_a_short_race(search: Search) -> None:
    replicates, planned = len(search.tune.finals), search.asked.replicates
    if replicates < planned and winner_of(search.tune, search.records) not in (None, "baseline"):
        had = f"its {planned} replicates (it had {replicates})"
        search.ran_short(note("short-race", f"the budget ended before the final comparison had {had}: raise --budget"))


# What was left untried


def _keep_untried(search: Search, too_dear: list[Choice]) -> None:
    """The five most promising for which there was no time, each with a budget that would have held it, in half minutes."""
    search.charge("other")
    costs, leader = Costs(search), search.leader() or BASELINE
    reserved_s = min(costs.race_s(leader), max(search.left_s, 0.0))
    search.keep(spent=msgspec.structs.replace(search.tune.spent, reserved=reserved_s))
    untried = []
    for choice in sorted(too_dear, key=lambda choice: -choice.gain)[:5]:
        needed_s = search.elapsed_s + choice.cost_s + costs.race_s(choice.switches)
        budget_s = 30.0 * math.ceil(max(needed_s, search.budget_s + 1) / 30.0)
        text = search.space.text(choice.switches)
        untried.append(Untried(recipe=text, gain=choice.gain, cost_s=choice.cost_s, budget_s=budget_s))
    search.keep(untried=tuple(untried))
    if untried:
        first = untried[0]
        what = "any other recipe" if search.tried() == {BASELINE} else "all recipes that may be faster"
        takes = f"{first.recipe} takes about {first.cost_s:.0f} s"
        race = f"the final comparison {costs.race_s(search.space.switches_of(first.recipe)):.0f} s"
        left, enough = f"{max(search.left_s, 0.0):.0f} s are left", f"--budget {first.budget_s:.0f}s would hold it"
        search.ran_short(note("untried", f"no time to try {what}: {takes}, and {race}; {left}; {enough}"))


def _without(notes: Iterable[Note], code: str) -> tuple[Note, ...]:
    return tuple(each for each in notes if not each.code.startswith(code))


# What an earlier search of the same workload leaves a new one: hints, by which nothing is left out or recommended


def begun_with(
    record: TuneRecord, before: TuneRecord | None, records: Records, asked: TuneSpec, space: Space
) -> TuneRecord:
    """The new search with what the last one under its name knows: its winner is tried first, what broke is tried late."""
    first = _first_prepared(before, records, space) if before is not None else None
    if before is None or first is None or differences(before.tune, asked):
        return record
    winner = recommended(before, records)
    is_there = winner is not None and _switches(space, winner)
    lessons = (lesson for lesson in before.lessons if lesson.scope != "recipe" and lesson.reason.about not in EXACTLY)
    earlier = Earlier(
        at=before.created_at,
        winner=winner if is_there else None,
        model_hash=first.workload.model_hash,
        device=device_key(first.environment),
        doubted=tuple(lesson.switches for lesson in lessons if lesson.reason.code != "no-signal"),
    )
    found = f"its best, {winner}, comes first" if is_there else "it found nothing faster"
    doubts = f"; {', '.join('+'.join(part) for part in earlier.doubted)} broke then" if earlier.doubted else ""
    told = note("earlier", f"begins with what the search of {_when(earlier)} knew: {found}{doubts}")
    return msgspec.structs.replace(record, earlier=earlier, notes=(*record.notes, told))


def with_machine(record: TuneRecord, searches: Iterable[TuneRecord]) -> TuneRecord:
    """The new search with what the latest one on this device learned of how long compiling takes here."""
    if record.compile_scale is not None:
        return record
    device = record.tune.spec.device
    known = (each for each in searches if each.compile_scale is not None and each.tune.spec.device == device)
    last = next(known, None)
    if last is None:
        return record
    return msgspec.structs.replace(record, machine=last.machine, compile_scale=last.compile_scale)


def _won_before(search: Search) -> Iterator[tuple[Switches, str]]:
    """The winner of the search before, where it may still be in time."""
    earlier, costs = search.tune.earlier, Costs(search)
    switches = _switches(search.space, earlier.winner) if earlier is not None and earlier.winner else BASELINE
    if switches != BASELINE and costs.ready_chance(switches, search.left_s - costs.race_s(switches)) > 0:
        yield switches, "it won before"


def _compare_with_earlier(search: Search) -> None:
    """Drop what is known from before where the baseline shows that the model or the device is another now."""
    earlier, first = search.tune.earlier, _first_prepared(search.tune, search.records, search.space)
    if search.tune.machine not in ("", _machine(search)):
        search.keep(compile_scale=None)
    if earlier is None or first is None:
        return
    is_same_model = earlier.model_hash == first.workload.model_hash
    if is_same_model and earlier.device == device_key(first.environment):
        return
    what = "device or its software" if is_same_model else "model"
    text = f"the {what} is another than in the search of {_when(earlier)}: nothing is taken from it"
    search.keep(earlier=None, notes=(*_without(search.tune.notes, "earlier"), note("earlier-unlike", text)))


def _first_prepared(tune: TuneRecord, records: Records, space: Space) -> Prepared | None:
    """What preparing the baseline told."""
    trial = next((trial for trial in tune.trials if trial.recipe == space.text(BASELINE)), None)
    record = records.get(trial.record_id) if trial is not None else None
    return record.prepared if record is not None else None


def _switches(space: Space, recipe: str) -> Switches:
    """Those of a recipe; none where it cannot be had any more."""
    words = frozenset(recipe.split("+")) - {space.text(BASELINE)}
    return words if words <= space.by_switch.keys() and space.is_valid(words) else BASELINE


def _when(earlier: Earlier) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier.at))


def _machine(search: Search) -> str:
    first = _first_prepared(search.tune, search.records, search.space)
    return device_key(first.environment) if first is not None else ""
