"""After the race: what each switch of the winner brings, its batch, and the user's own check."""

from __future__ import annotations

from redline.analyze.batch import BatchSummary, SloTargets
from redline.model.errors import UsageError
from redline.model.note import Note, note
from redline.model.protocol import Ask, AskMetric, FailureReply, MetricAnswer
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec
from redline.search.batch import search_batch
from redline.search.decide import Race
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import metric_of, quantizing_of
from redline.search.tune.race import FEWEST, final_spec, finalists, is_settled, race, raced, run_replicates
from redline.search.tune.record import BatchChoice, Metric
from redline.search.tune.result import (
    NEAR_ENOUGH,
    complexity,
    gains_of,
    met_last,
    pair_with,
    recommended,
    replicates_of,
    winner_of,
)
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.state import Search

ABLATION_SHARE = 0.25
"""Of the budget, and three quarters of what is left: what each switch brings is good to know, and worth no exceeded budget."""
BATCH_SHARE = 0.35
"""Of the budget, for the batch and the race there, where the batch is asked for."""
ENOUGH = 0.97
"""Of the highest throughput: the smallest batch that has it is the one to take."""


# What each switch brings


def ablate(search: Search) -> None:
    """Race the winner against itself without one switch each, the cheapest first, as many as the time allows."""
    chosen = winner_of(search.tune, search.records)
    if chosen in (None, "baseline"):
        return
    started_s = search.elapsed_s
    runner = Race(
        search.door, search.journal, search.observer, search.order, only=search.only, left_s=lambda: search.left_s
    )
    while chosen is not None:
        costs = Costs(search)
        room_s = min(0.75 * search.left_s, ABLATION_SHARE * search.budget_s - (search.elapsed_s - started_s))
        racers = [search.space.switches_of(chosen)]
        for switches in sorted(_unsettled(search, chosen), key=costs.seconds):
            once_s = costs.replicates_s([*racers, switches], 1)
            cold_s = sum(costs.seconds(each) - costs.reopen_s(each) for each in (*racers, switches))
            if once_s + cold_s > room_s:
                break
            racers.append(switches)
        if len(racers) < 2 or not run_replicates(search, runner, racers, "ablations"):
            return


def _unsettled(search: Search, chosen: str) -> list[Switches]:
    """The winner without one switch each, where that may run, is not settled and was not asked twice."""
    lessons, finals = search.lessons(), raced(search)
    ablations = replicates_of(search.tune.ablations, search.records)
    found = []
    for _, without in search.space.less_one(search.space.switches_of(chosen)):
        name = search.space.text(without)
        asked = sum({chosen, name} <= {str(record.spec.recipe) for record in replicate} for replicate in ablations)
        broke = any(
            record.failure is not None for each in ablations for record in each if str(record.spec.recipe) == name
        )
        pair = pair_with([*finals, *ablations], name, chosen, search.asked.kind)
        is_open = asked < FEWEST and not (pair is not None and is_settled(pair.low, pair.high))
        if is_open and not broke and not lessons.rules_out(without) and without not in _rejected(search):
            found.append(without)
    return found


def _rejected(search: Search) -> set[Switches]:
    return {search.space.switches_of(trial.recipe) for trial in search.tune.trials} - search.seen().keys()


def untold_switches(search: Search) -> list[str]:
    """Switches of the winner that there was no time to leave out once; several where they go together."""
    chosen = winner_of(search.tune, search.records)
    if chosen is None:
        return []
    known = {gain.switch for gain in gains_of(chosen, search.tune, search.records)}
    records = [
        record for ids in search.tune.ablations for each in ids if (record := search.records.get(each)) is not None
    ]
    asked = {str(record.spec.recipe) for record in records} | set(map(search.space.text, _rejected(search)))
    less_one = search.space.less_one(search.space.switches_of(chosen))
    return [switch for switch, rest in less_one if switch not in known and search.space.text(rest) not in asked]


def simplify(search: Search) -> None:
    """Switches that bring nothing go, where the recipe without all of them is as fast in replicates of its own."""
    chosen = winner_of(search.tune, search.records)
    gains = gains_of(chosen, search.tune, search.records)
    useless = {switch for gain in gains if gain.gain <= 1 + NEAR_ENOUGH for switch in gain.switch.split("+")}
    if chosen is None or not useless:
        return
    switches = search.space.switches_of(chosen)
    simpler, costs = switches - useless, Costs(search)
    racers = list(dict.fromkeys([BASELINE, switches, simpler]))
    names = {search.space.text(racer) for racer in racers}
    together = sum(names <= set(met_last([replicate])) for replicate in raced(search))
    is_sound = search.space.is_valid(simpler) and not search.lessons().rules_out(simpler)
    if not is_sound or together >= search.asked.replicates:
        return  # what was raced already has shown that it is slower
    if costs.replicates_s(racers, FEWEST) > search.left_s:
        return  # with fewer it would have no interval
    runner = Race(
        search.door, search.journal, search.observer, search.order, only=search.only, left_s=lambda: search.left_s
    )
    for _ in range(search.asked.replicates):
        if not run_replicates(search, runner, racers, "finals"):
            break
    if winner_of(search.tune, search.records) != chosen:
        search.keep(ablations=())
        ablate(search)


# The batch


def batch_share_s(search: Search) -> float:
    """What is kept back of the budget for the batch and the race there; nothing where it would not be enough."""
    leader, share_s = search.leader(), BATCH_SHARE * search.budget_s
    return share_s if search.asked.tunes_batch and share_s >= _batch_search_s(search, leader or BASELINE) else 0.0


def _batch_search_s(search: Search, switches: Switches) -> float:
    """A search takes about five trials, each in a process that compiles again, and never less than twenty seconds."""
    return max(20.0, 5 * Costs(search).anew_s(switches))


def choose_batch(search: Search) -> None:
    """Search the batch for the winner and the runner-up; the one with the higher throughput there is raced there."""
    if not search.asked.tunes_batch:
        return
    for recipe in _best_two(search):
        known = {choice.recipe for choice in search.tune.batches}
        if recipe in known:
            continue
        switches = search.space.switches_of(recipe)
        race_s = Costs(search).replicates_s([BASELINE, switches], search.asked.replicates) if known else 0.0
        if search.left_s < _batch_search_s(search, switches) + race_s:
            search.ran_short(
                note("batch-not-searched", f"no time left to search for the best batch of {recipe}", about=recipe)
            )
            break
        search.observer.stage(f"the batch for {recipe}")
        spec = search.spec_of(switches, MeasureSpec.for_effort("quick"))
        slo = SloTargets(p95_s=search.asked.slo_p95_s)
        chosen = best_batch(search_batch(spec, search.door, search.journal, search.observer, slo=slo))
        if chosen is not None:
            search.keep(batches=(*search.tune.batches, chosen))
    if search.tune.batches:
        _race_at_batch(search)


def best_batch(found: BatchSummary) -> BatchChoice | None:
    """Under a latency target what the finder says; else the smallest batch that is as good as any."""
    rates = {trial.batch: trial.throughput_per_s for trial in found.trials if trial.fits and trial.throughput_per_s}
    known = {batch: rate for batch, rate in rates.items() if rate is not None}
    if not known:
        return None
    least = ENOUGH * max(known.values())
    batch = found.slo_batch if found.slo.p95_s is not None else min(each for each in known if known[each] >= least)
    rate = known.get(batch) if batch is not None else None
    return (
        None
        if batch is None or rate is None
        else BatchChoice(recipe=found.row.recipe, batch=batch, throughput_per_s=rate)
    )


def _race_at_batch(search: Search) -> None:
    """The ratio that is told is one at the batch that is told."""
    chosen = max(search.tune.batches, key=lambda choice: choice.throughput_per_s)
    names = [chosen.recipe, winner_of(search.tune, search.records)]
    racers = list(dict.fromkeys([BASELINE, *(search.space.switches_of(name) for name in names if name is not None)]))
    before = replicates_of(search.tune.batch_replicates, search.records)
    met = {str(record.spec.recipe) for replicate in before[:1] for record in replicate}
    is_other = any(record.spec.workload.batch != chosen.batch for replicate in before for record in replicate)
    if before and (is_other or not met.issuperset(map(search.space.text, racers))):
        search.keep(batch_replicates=())
    runner = Race(search.door, search.journal, search.observer, search.order, only=search.only)
    for number in range(len(search.tune.batch_replicates), search.asked.replicates):
        costs = Costs(search)
        again_s = costs.replicates_s(racers, 1)
        first_s = sum(costs.anew_s(each) - costs.reopen_s(each) for each in racers) if number == 0 else 0.0
        fewest = min(FEWEST, search.asked.replicates) if number == 0 else 1  # one alone gives no interval
        if search.left_s < fewest * again_s + first_s:
            search.is_short = True
            if number:
                text = f"the budget ended before the comparison at batch {chosen.batch} had its {search.asked.replicates} replicates"
                search.ran_short(note("short-race", f"{text} (it had {number}): raise --budget"))
            return
        search.observer.replicate(number + 1, search.asked.replicates, [search.space.text(each) for each in racers])
        records = runner.run_replicate([final_spec(search, each, checks=False, batch=chosen.batch) for each in racers])
        search.records.update((record.id, record) for record in records)
        broken = {str(record.spec.recipe): record for record in records if record.failure is not None}
        if broken.keys() & {"baseline", chosen.recipe}:
            search.tell(_why_no_ratio(next(iter(broken.values())), chosen.batch))
            return
        racers = [each for each in racers if search.space.text(each) not in broken]
        search.keep(batch_replicates=(*search.tune.batch_replicates, tuple(record.id for record in records)))


def _why_no_ratio(broken: RunRecord, batch: int) -> Note:
    assert broken.failure is not None
    why = f"{broken.spec.recipe} fails there ({broken.failure.kind})"
    return note("batch-not-raced", f"no ratio at batch {batch}: {why}; the ratio shown is the one at the first batch")


def _best_two(search: Search) -> list[str]:
    """The winner, and one with another memory appetite, which may fit a larger batch: with what spares memory, or another recipe.

    A twin with one more switch will not.
    """
    winner = winner_of(search.tune, search.records)
    if winner is None:
        return []
    own = search.space.switches_of(winner)
    for choice in search.space.choices:
        if choice.relieves == "memory" and search.space.is_valid(own | {choice.switch}):
            own |= {choice.switch}
    others = [search.space.text(switches) for switches in search.ranked()]
    others = [other for other in others if other != winner]
    words = set(winner.split("+"))
    others.sort(key=lambda other: (len(set(other.split("+")) ^ words) < 2, complexity(other, search.records) == (0, 0)))
    sparing = search.space.text(own)
    return [winner, *([sparing] if sparing != winner else others)[:1]]


# The user's own check


def check_model_as_it_is(search: Search) -> None:
    """Run the check on the baseline before anything is measured: a check that cannot be run is an error."""
    if search.asked.check is None or metric_of("baseline", search.tune) is not None:
        return
    _run_check(search, BASELINE)
    metric = metric_of("baseline", search.tune)
    assert metric is not None
    if metric.failure is not None:
        raise UsageError(f"your check {search.asked.check} cannot be run on the model as it is: {metric.failure}")


def prove_fastest(search: Search) -> None:
    """While the search goes on: it should not go by a quantized recipe that may not win."""
    known = search.seen()
    if search.asked.check is None or not known:
        return
    fastest = min(known, key=lambda switches: known[switches].log_s)
    if quantizing_of(fastest, search.tune) and not search.is_only_shown(fastest):
        _run_check(search, fastest)


def prove_finalists(search: Search) -> None:
    """Run the check on every recipe that goes to the last race; each that falls makes room for another."""
    if search.asked.check is None:
        return
    prove_fastest(search)
    while unchecked := [each for each in finalists(search) if metric_of(search.space.text(each), search.tune) is None]:
        _run_check(search, unchecked[0])
        prove_fastest(search)


def prove_winner(search: Search) -> None:
    """Run the check on what will be recommended, which may have been simplified since the last race; even over budget."""
    while search.asked.check is not None and (chosen := recommended(search.tune, search.records)) is not None:
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


def take_apart(search: Search) -> None:
    """What each switch of the winner brings, and the batch for it."""
    if winner_of(search.tune, search.records) is None:
        return
    search.observer.stage("what each switch brings")
    with search.spending("ablation"):
        ablate(search)
        simplify(search)
    search.kept_back_s = 0.0
    with search.spending("batch"):
        choose_batch(search)
    with search.spending("ablation"):
        ablate(search)  # with what was kept back for the batch and not needed
    if switches := untold_switches(search):
        text = f"the budget ended before the gain of these was measured: {', '.join(switches)}; raise --budget"
        search.ran_short(note("gains-unknown", text))


def race_the_last(search: Search) -> None:
    """The race, with the user's check on all that go there."""
    search.kept_back_s = batch_share_s(search)
    with search.spending("other"):
        prove_finalists(search)
    search.observer.stage("racing the last few")
    with search.spending("race"):
        race(search)
        search.drop_held()
