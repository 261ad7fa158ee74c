"""This module has the main path of a search: it tries recipes, races the last few, and takes the winner apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from redline.model.errors import UsageError
from redline.model.identity import device_key
from redline.model.note import Note, note
from redline.model.protocol import Ask, AskMetric, FailureReply, MetricAnswer
from redline.search.tune.beliefs import Beliefs
from redline.search.tune.choose import Candidate, next_recipe
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import metric_of, quantizing_of, rejection
from redline.search.tune.race import finalists, race, take_apart
from redline.search.tune.record import Metric, TuneRecord
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.state import Search
from redline.search.tune.trials import Trials

HOST_SEEN = ("throughput", "tpot")
"""For these objectives the time to issue a step is known."""


def run_search(search: Search) -> None:
    """Runs until the search is done, the budget ends or Ctrl-C is pressed. What is known then is kept, and the state says which it was."""
    if search.tune.state == "done":
        return
    try:
        check_model_as_it_is(search)
        while True:
            search.observer.stage("trying recipes")
            explore(search)
            if search.baseline() is None:
                search.keep(state="done", notes=(*search.tune.notes, _why_nothing(search)))
                return
            known = len(search.tune.lessons)
            race_the_last(search)
            if known == len(search.tune.lessons):
                break  # else recipes fell in the race, and have taught what else to try
        _note_a_short_race(search)
        take_apart(search)
        search.charge("ablation")
        prove(
            search, lambda: [search.standings.winner() or "baseline"]
        )  # the winner may have been simplified since the race
        search.charge("other")
        search.keep(state="out-of-budget" if search.is_short else "done")
    except KeyboardInterrupt:
        search.charge("other")
        search.keep(state="interrupted")
    finally:
        search.drop_held()


def explore(search: Search) -> None:
    """Tries the baseline, then the user's own recipes, and then whatever is expected to bring most per second and still ends in time."""
    beliefs = Beliefs(search.space, on_cpu=search.on_cpu, host_is_seen=search.asked.objective in HOST_SEEN)
    search.charge("other")
    search.observer.tune_planned(search.tune.name, len(beliefs.recipes), search.budget_s, search.elapsed_s)
    search.is_short = False  # this look around tells it anew
    search.keep(notes=tuple(each for each in search.tune.notes if each.code != "untried"))
    too_dear: list[Candidate] = []
    # A plain step is known to run where the facts were seen, so that others may be begun beside the baseline.
    is_known_to_run = search.tune.facts is not None and search.asked.check is None and not search.asked.seeds
    with Trials(search) as trials:
        for switches, why in _firsts(search, beliefs):
            is_needless = search.lessons.rules_out(switches) or (trials.is_open and switches in search.seen)
            if is_needless and why != "asked for":
                continue
            trials.start(Candidate(switches), why)
            if switches == BASELINE and is_known_to_run:
                too_dear = _start_all(search, beliefs, trials)
            trials.finish(switches)
            if switches == BASELINE and search.tune.machine not in ("", _machine(search)):
                search.keep(compile_scale=None)  # the device or its software is another
            prove_fastest(search)
            if _cannot_compare(search):
                return
        while search.baseline() is not None:
            too_dear = _start_all(search, beliefs, trials)
            if not trials.flights:
                break
            trials.finish_one()
            prove_fastest(search)
            if _cannot_compare(search):
                return
    if search.baseline() is not None:
        search.charge("other")
        search.keep(machine=_machine(search), compile_scale=Costs(search).learned_scale)
        _keep_untried(search, too_dear)


def _start_all(search: Search, beliefs: Beliefs, trials: Trials) -> list[Candidate]:
    """Starts what is worth it, as long as there is room; returns what would be worth it if there were time for it."""
    planned, too_dear = list[Candidate](), list[Candidate]()
    while trials.has_room(len(planned) + 1):
        choice, too_dear = next_recipe(search, beliefs, [*trials.flights, *planned])
        if choice is None:
            break
        planned.append(choice)
    for choice in sorted(planned, key=lambda choice: -choice.cost_s):  # what takes longest begins first
        trials.start(choice, "it promises most per second")
    if not trials.flights and search.tried() == {BASELINE}:
        # To have timed one recipe once is better than to have timed none, and its race may just fit.
        likely = [each for each in too_dear if Costs(search).ready_chance(each.switches, search.left_s) > 0.5]
        for choice in sorted(likely, key=lambda choice: -choice.rate)[:1]:
            trials.start(Candidate(choice.switches), "there is no time for its race")
    return too_dear


def _firsts(search: Search, beliefs: Beliefs) -> Iterator[tuple[Switches, str]]:
    """Yields the recipes that are tried first, each with the reason.

    After a resume or a race the fastest so far is opened again, so that others can be interleaved with it, if there is anything to
    try. If it breaks now, the next fastest takes its place.
    """
    tried = search.tried()
    seeds = dict.fromkeys(search.space.checked(seed) for seed in search.asked.seeds)
    asked_for = [(seed, "asked for") for seed in seeds if seed not in tried and seed != BASELINE]
    if BASELINE not in tried:
        yield BASELINE, "all others are set against it"
    elif asked_for or next_recipe(search, beliefs, ())[0] is not None:
        for switches in search.ranked()[:3]:
            yield switches, "the fastest so far, opened again"
    yield from asked_for


def race_the_last(search: Search) -> None:
    """Runs the user's check on all recipes that go to the last race, and then runs that race."""
    prove(search, lambda: list(map(search.space.text, finalists(search))))
    search.charge("other")
    if search.leader():
        search.observer.stage("racing the last few")
    race(search)
    search.drop_held()
    search.charge("race")


def with_hints(record: TuneRecord, searches: Iterable[TuneRecord]) -> TuneRecord:
    """Returns the new search with what an earlier one has learned of this device: how long compiling takes."""
    device = record.tune.spec.device
    known = (each for each in searches if each.compile_scale is not None and each.tune.spec.device == device)
    for other in known:
        return msgspec.structs.replace(record, machine=other.machine, compile_scale=other.compile_scale)
    return record


def _machine(search: Search) -> str:
    """Returns the key of the device and its software, as preparing the baseline has shown them."""
    baseline = search.baseline()
    prepared = search.records[baseline.record_id].prepared if baseline is not None else None
    return device_key(prepared.environment) if prepared is not None else ""


# The user's own check


def check_model_as_it_is(search: Search) -> None:
    """Runs the check on the baseline before anything is measured, because a check that cannot be run is an error."""
    _run_check(search, BASELINE)
    metric = metric_of("baseline", search.tune)
    if metric is not None and metric.failure is not None:
        raise UsageError(f"your check {search.asked.check} cannot be run on the model as it is: {metric.failure}")


def prove_fastest(search: Search) -> None:
    """Runs the check on the fastest if it is quantized: a search that goes on should not go by a recipe that may not win."""
    fastest = min(search.seen, key=lambda switches: search.seen[switches].log_s, default=BASELINE)
    if quantizing_of(fastest, search.tune) and not search.is_only_shown(fastest):
        _run_check(search, fastest)


def prove(search: Search, to_be_proven: Callable[[], Sequence[str]]) -> None:
    """Runs the check on all of these one by one, even over budget. Each that fails it makes room for another."""
    while search.asked.check is not None:
        unchecked = [recipe for recipe in to_be_proven() if metric_of(recipe, search.tune) is None]
        if not unchecked:
            return
        _run_check(search, search.space.switches_of(unchecked[0]))


def _run_check(search: Search, switches: Switches) -> None:
    """Runs the check on a recipe, unless it has been run on it before."""
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


# These notes say how the search has ended.


def _cannot_compare(search: Search) -> bool:
    """Returns whether every recipe would be rejected because the baseline's own outputs or losses say nothing. A note says why."""
    numerics = {key: record.prepared.numerics for key, record in search.records.items() if record.prepared is not None}
    reasons = (each.reason for each in numerics.values() if each.reason is not None)
    told = next((reason for reason in reasons if reason.code == "not-repeatable"), None)
    baseline = search.baseline()
    if told is None and baseline is not None and numerics[baseline.record_id].degenerate:
        told = note("no-signal", "its output does not depend on the input: give inputs that make a difference")
        if search.asked.spec.workload.task == "train":
            still = f"its loss stands still over {numerics[baseline.record_id].steps} steps"
            told = note("no-signal", f"{still}: give a loss and targets that it can learn")
    if told is not None:
        search.tell(note(told.code, f"no recipe can be compared with strict fp32 on this model, as {told}"))
    return told is not None


def _why_nothing(search: Search) -> Note:
    """Returns why the baseline has no time: its energy cannot be read, it was not ready before the budget ended, or it broke."""
    records = search.records.values()
    if search.asked.objective == "energy" and any(record.blocks for record in records):
        why = "the energy of this device cannot be read (NVML, amdsmi or RAPL), so recipes cannot be compared by it"
        return note("no-energy", why)
    failures = [record.failure for record in records if record.failure is not None]
    if failures and all(failure.kind == "timeout" for failure in failures):
        why = f"the baseline was not ready within the budget of {search.budget_s:.0f} s: raise --budget"
        return note("baseline-too-slow", why)
    reasons = (rejection(record, search.tune) for record in records)
    if any(reason is not None and reason.code == "not-finite" for reason in reasons):
        return note("not-finite", "the baseline's own output or loss is not finite, so nothing can be compared with it")
    return note("nothing-runs", "nothing could be timed: the baseline itself does not run here")


def _note_a_short_race(search: Search) -> None:
    replicates, planned = len(search.tune.finals), search.asked.replicates
    if replicates < planned and search.standings.winner() not in (None, "baseline"):
        had = f"its {planned} replicates (it had {replicates})"
        text = f"the budget ended before the final comparison had {had}: raise --budget"
        search.tell(note("short-race", text), is_short=True)


def _keep_untried(search: Search, too_dear: list[Candidate]) -> None:
    """Tells the most promising recipe for which there was no time, and a budget that would have held it, in half minutes."""
    if too_dear:
        costs, first = Costs(search), max(too_dear, key=lambda choice: choice.gain)
        race_s, recipe = costs.race_s(first.switches), search.space.text(first.switches)
        needed_s = search.elapsed_s + first.cost_s + race_s
        enough_s = 30 * math.ceil(max(needed_s, search.budget_s + 1) / 30)
        takes = f"{recipe} may be {math.exp(first.gain):.2g}× as fast, takes about {first.cost_s:.0f} s, and the final comparison {race_s:.0f} s"
        left = f"{max(search.left_s, 0.0):.0f} s are left; --budget {enough_s}s would hold it"
        search.tell(note("untried", f"no time to try all recipes that may be faster: {takes}; {left}"), is_short=True)
