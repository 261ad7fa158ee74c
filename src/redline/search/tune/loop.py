"""The search as a sentence: try recipes, race the last few, take the winner apart, choose its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import msgspec

from redline.model.errors import UsageError
from redline.model.identity import device_key
from redline.model.note import Note, note
from redline.model.protocol import Ask, AskMetric, FailureReply, MetricAnswer
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.choose import Choice, OnItsWay, next_recipe, quick_to_race
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import EXACTLY, metric_of, quantizing_of, rejection
from redline.search.tune.race import batch_share_s, finalists, race, take_apart
from redline.search.tune.record import Earlier, Metric, TuneRecord, Untried, differences
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.standings import Records, Standings, conclusive
from redline.search.tune.state import Search
from redline.search.tune.trials import Trials

HOST_SEEN = ("throughput", "tpot")
"""Objectives for which the time to issue a step is known."""


def run_search(search: Search) -> None:
    """Runs until the search is done, the budget ends or Ctrl-C is pressed; what is known then is kept, and the state says which it was."""
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
    """Tries the baseline, then the user's own recipes, then whatever brings most per second and still ends in time."""
    with search.spending("other"):
        beliefs = Beliefs(search.space, on_cpu=search.on_cpu, host_is_seen=search.asked.objective in HOST_SEEN)
    search.observer.tune_planned(search.tune.name, len(beliefs.recipes), search.budget_s, search.elapsed_s)
    if search.tune.untried:  # this look around tells it anew
        search.is_short = False
        search.keep(untried=(), notes=_without(search.tune.notes, "untried"))
    too_dear: list[Choice] = []
    # A plain step is known to run where the facts were seen, so that others may be begun beside the baseline.
    is_known_to_run = search.tune.facts is not None and search.asked.check is None and not search.asked.seeds
    with Trials(search) as trials:
        for switches, why in _firsts(search, beliefs):
            if trials.is_open and switches in search.seen() and why != "asked for":
                continue
            trials.start(switches, why)
            if switches == BASELINE and is_known_to_run:
                too_dear = _start_all(search, beliefs, trials)
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


def race_the_last(search: Search) -> None:
    """Runs the user's check on all that go to the last race, and holds it."""
    search.kept_back_s = batch_share_s(search)
    with search.spending("other"):
        prove_finalists(search)
    if search.leader() or search.guess:
        search.observer.stage("racing the last few")
    with search.spending("race"):
        race(search)
        search.drop_held()


# An earlier search of the same workload leaves hints; nothing is left out or recommended for them.


def with_hints(
    record: TuneRecord, searches: Iterable[TuneRecord], records_of: Callable[[TuneRecord], Records], space: Space
) -> TuneRecord:
    """The new search with what is known of this device and from the last search of this name that asked the same.

    `searches`: all that are kept, the newest first; `records_of` loads the records of one.
    """
    device = record.tune.spec.device
    for other in searches:
        if record.compile_scale is None and other.compile_scale is not None and other.tune.spec.device == device:
            record = msgspec.structs.replace(record, machine=other.machine, compile_scale=other.compile_scale)
        if other.name == record.name and not differences(other.tune, record.tune):
            record = _begun_with(record, other, records_of(other), space)
    return record


def _begun_with(record: TuneRecord, before: TuneRecord, records: Records, space: Space) -> TuneRecord:
    estimate = Standings(before, records).trials.get("baseline")
    first = records[estimate.record_id].prepared if estimate is not None else None
    if first is None:
        return record
    winner = conclusive(before, records)[1]
    is_there = winner is not None and bool(space.known(winner))
    lessons = (lesson for lesson in before.lessons if lesson.scope != "recipe" and lesson.reason.about not in EXACTLY)
    earlier = Earlier(
        at=before.created_at,
        winner=winner if is_there else None,
        model_hash=first.workload.model_hash,
        device=device_key(first.environment),
        doubted=tuple(lesson.switches for lesson in lessons if lesson.reason.code != "no-signal"),
    )
    best = f"its best, {winner}, comes first" if is_there else "it found nothing faster"
    doubts = f"; {', '.join('+'.join(part) for part in earlier.doubted)} broke then" if earlier.doubted else ""
    said = note("earlier", f"begins with what the search of {earlier.when} knew: {best}{doubts}")
    return msgspec.structs.replace(record, earlier=earlier, notes=(*record.notes, said))


def _won_before(search: Search) -> Iterator[tuple[Switches, str]]:
    """Yields the winner of the search before, where it may still be in time."""
    earlier, costs = search.tune.earlier, Costs(search)
    switches = search.space.known(earlier.winner) if earlier is not None and earlier.winner else None
    if switches and costs.ready_chance(switches, search.left_s - costs.race_s(switches)) > 0:
        yield switches, "it won before"


def _compare_with_earlier(search: Search) -> None:
    """Drop what is known from before where the baseline shows that the model or the device is another now."""
    earlier, machine = search.tune.earlier, _machine(search)
    if search.tune.machine not in ("", machine):
        search.keep(compile_scale=None)
    baseline = search.baseline()
    prepared = search.records[baseline.record_id].prepared if baseline is not None else None
    if earlier is None or prepared is None:
        return
    is_same_model = earlier.model_hash == prepared.workload.model_hash
    if not is_same_model or earlier.device != machine:
        what = "device or its software" if is_same_model else "model"
        text = f"the {what} is another than in the search of {earlier.when}: nothing is taken from it"
        search.keep(earlier=None, notes=(*_without(search.tune.notes, "earlier"), note("earlier-unlike", text)))


def _machine(search: Search) -> str:
    """The device and its software, as preparing the baseline has shown them."""
    baseline = search.baseline()
    prepared = search.records[baseline.record_id].prepared if baseline is not None else None
    return device_key(prepared.environment) if prepared is not None else ""


# The user's own check


def check_model_as_it_is(search: Search) -> None:
    """Run the check on the baseline before anything is measured: a check that cannot be run is an error."""
    _run_check(search, BASELINE)
    metric = metric_of("baseline", search.tune)
    if metric is not None and metric.failure is not None:
        raise UsageError(f"your check {search.asked.check} cannot be run on the model as it is: {metric.failure}")


def prove_fastest(search: Search) -> None:
    """While the search goes on: it should not go by a quantized recipe that may not win."""
    known = search.seen()
    fastest = min(known, key=lambda switches: known[switches].log_s, default=BASELINE)
    if quantizing_of(fastest, search.tune) and not search.is_only_shown(fastest):
        _run_check(search, fastest)


def prove_finalists(search: Search) -> None:
    """Runs the check on every recipe that goes to the last race; each that fails it makes room for another."""
    while search.asked.check is not None:
        prove_fastest(search)
        racers = finalists(search)
        unchecked = [each for each in racers if metric_of(search.space.text(each), search.tune) is None]
        if not unchecked:
            return
        _run_check(search, unchecked[0])


def prove_winner(search: Search) -> None:
    """Run the check on what will be recommended, which may have been simplified since the last race; even over budget."""
    while search.asked.check is not None and (chosen := conclusive(search.tune, search.records)[1]) is not None:
        if metric_of(chosen, search.tune) is not None:
            return
        _run_check(search, search.space.switches_of(chosen))


def _run_check(search: Search, switches: Switches) -> None:
    """Once for each recipe."""
    recipe, check = search.space.text(switches), search.asked.check
    if check is None or metric_of(recipe, search.tune) is not None:
        return
    search.observer.stage(f"your check on {recipe}" if switches else "your check on the model as it is")
    known = metric_of("baseline", search.tune)
    spec, session = search.trial_spec(switches), search.door.open()
    try:
        reply = session.ask(Ask(question=AskMetric(spec=spec, check=check, baseline=known.value if known else None)))
    except BaseException:
        session.kill()  # closing would wait for a check that nobody wants any more
        raise
    session.close()
    if isinstance(reply, MetricAnswer):
        metric = Metric(recipe=recipe, value=reply.value, baseline=reply.baseline)
    else:
        why = reply.failure.told if isinstance(reply, FailureReply) else f"the bench answered {type(reply).__name__}"
        metric = Metric(recipe=recipe, value=None, baseline=None, failure=why)
    search.keep(metrics=(*search.tune.metrics, metric))


# Notes that say how the search ended


def _cannot_compare(search: Search) -> bool:
    """Returns whether every recipe would be rejected because the baseline's own outputs or losses say nothing; a note says why."""
    prepared = (record.prepared for record in search.records.values() if record.prepared is not None)
    reasons = (each.numerics.reason for each in prepared if each.numerics.reason is not None)
    unlike_itself = next((reason for reason in reasons if reason.code == "not-repeatable"), None)
    cannot = "no recipe can be compared with strict fp32 on this model"
    if unlike_itself is not None:
        search.tell(note("not-repeatable", f"{cannot}: {unlike_itself}"))
        return True
    baseline = search.baseline()
    first = search.records[baseline.record_id].prepared if baseline is not None else None
    if first is None or not first.numerics.degenerate:
        return False
    what, remedy = "its output does not depend on the input", "inputs that make a difference"
    if search.asked.spec.workload.task == "train":
        what, remedy = (
            f"its loss stands still over {first.numerics.steps} steps",
            "a loss and targets that it can learn",
        )
    search.tell(note("no-signal", f"{cannot}, as {what}: give {remedy}"))
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
    if replicates < planned and search.standings().winner() not in (None, "baseline"):
        had = f"its {planned} replicates (it had {replicates})"
        search.ran_short(note("short-race", f"the budget ended before the final comparison had {had}: raise --budget"))


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
        race_s = costs.race_s(search.space.switches_of(first.recipe))
        left, enough = f"{max(search.left_s, 0.0):.0f} s are left", f"--budget {first.budget_s:.0f}s would hold it"
        text = f"no time to try {what}: {takes}, and the final comparison {race_s:.0f} s; {left}; {enough}"
        search.ran_short(note("untried", text))


def _without(notes: tuple[Note, ...], code: str) -> tuple[Note, ...]:
    return tuple(each for each in notes if not each.code.startswith(code))
