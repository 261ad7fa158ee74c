"""Replicates in fresh processes: the last race, what each switch of its winner brings, and the batch for it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from redline.analyze.batch import BatchSummary
from redline.analyze.pairs import TIME_BAND, Pair
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec, RunSpec
from redline.search.batch import search_batch
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import lesson_of, rejection
from redline.search.tune.record import BatchChoice
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.standings import NEAR_ENOUGH, conclusive, met_in, pair_with, replicates_of
from redline.search.tune.state import Search, final_measure
from redline.search.tune.summary import gains_of

Purpose = Literal["finals", "ablations", "batch_replicates"]

FINALISTS = 4
USUAL_MOST = 5
"""After so many replicates two recipes that cannot be told apart are taken for equal."""
WIDE = 1.1
"""While the upper end of an interval is more than so many times its lower end and time is left, the race goes on."""
WORTH_A_LITTLE_MORE = 0.8
"""The first interval is begun with this share of the time that it is expected to take: without it there is no winner."""
ABLATION_SHARE = 0.25
"""This share of the budget at most tells what each switch brings, which is good to know and not needed for the answer."""
BATCH_SHARE = 0.35
"""This share of the budget is kept for the batch and the race there, where the batch is asked for."""
ENOUGH = 0.97
"""The smallest batch with this share of the highest throughput is the one to take."""


# The last race


def race(search: Search) -> None:
    """Run replicates until the first is told apart from all others, or the time is over. Who falls behind or breaks is out."""
    leader, standings = search.leader(), search.standings()
    if standings.met and leader is not None and not standings.times_met(search.space.text(leader)):
        # An earlier session raced without it, and a recipe cannot win a race it was not in.
        search.keep(finals=(), ablations=(), batch_replicates=())
    begun = len(search.tune.lessons)
    while len(search.tune.lessons) == begun:  # else others may be tried before those behind it have their turn
        racers = _with_time(search, finalists(search))
        if len(racers) < 2 or _is_decided(search, racers):
            return
        count = _count(search, racers)
        if not count or not run_replicates(search, racers, "finals", count):
            return
        _learn(search)


def finalists(search: Search) -> list[Switches]:
    """Returns the recipes that could be the fastest for all that is known of processes of one recipe, the fastest first.

    A trial is one process. How far processes lie apart is believed as usual at first, and as the race has shown it then, so that one whose
    trial may have been unlucky joins late; unless nothing is surely faster than the baseline: the best of many that are not would
    sooner or later seem to be.
    """
    standings, ranked = search.standings(), search.ranked()
    if search.guess is not None and ranked == [BASELINE]:
        return [search.guess]
    stand = {name: standings.of(name) for name in map(search.space.text, ranked)}
    met = [name for name in stand if name in standings.met]
    first = max((stand[name] for name in met), key=lambda each: each.log_gain, default=None)
    if first is not None and first.low is not None and first.verdict != "faster":
        stand = {name: stand[name] for name in met}
    names = sorted(stand, key=lambda name: -stand[name].log_gain)
    best = stand[names[0]] if names else None
    able = [
        name
        for name in names
        if best and best.log_gain - stand[name].log_gain <= 2 * math.hypot(stand[name].sd, best.sd)
    ]
    return [search.space.switches_of(name) for name in able[:FINALISTS]]


def _with_time(search: Search, able: list[Switches]) -> list[Switches]:
    """Returns the baseline and as many finalists as there is time for, as an interval of the fastest is worth more than rivals.

    Where even the fastest takes too long, it is the next whose race fits, if that is faster than the baseline.
    """
    costs, done = Costs(search), len(search.tune.finals)
    rivals = [switches for switches in able if switches != BASELINE]
    missing = max(search.asked.replicates - done, 1)
    while len(rivals) > 1 and costs.replicates_s([BASELINE, *rivals], missing) > 0.75 * search.left_s:
        rivals.pop()
    is_first = bool(rivals) and not done and rivals[0] != search.guess
    if is_first and WORTH_A_LITTLE_MORE * costs.race_s(rivals[0]) > search.left_s:
        seen = search.seen()
        faster = [each for each in search.ranked() if seen[each].log_s < seen[BASELINE].log_s]
        rivals = [each for each in faster if costs.race_s(each) <= search.left_s][:1]
    return [BASELINE, *rivals]


def _is_decided(search: Search, racers: Sequence[Switches]) -> bool:
    """Whether there are enough replicates for the interval, and the first is told apart from the others or too close to matter."""
    standings, usual = search.standings(), search.asked.replicates
    first, *others = [search.space.text(switches) for switches in racers[1:]]
    if min(map(standings.times_met, (first, *others))) < usual:
        return False
    gain, times = standings.of(first), standings.times_met(first)
    if gain.verdict == "inconclusive" and gain.ratio > 1 + TIME_BAND:
        return times >= max(USUAL_MOST + 3, usual)
    are_told_apart = all(_is_settled(standings.pair(first, other)) for other in others)
    is_narrow = gain.low is not None and gain.high is not None and gain.high <= WIDE * gain.low
    return (are_told_apart and is_narrow) or times >= max(USUAL_MOST, usual)


def _is_settled(pair: Pair | None) -> bool:
    """Whether two recipes are told apart, or so close that it does not matter which is taken."""
    if pair is None or pair.low is None or pair.high is None:
        return False
    return pair.high < 1 or pair.low > 1 or pair.high - pair.low <= 4 * NEAR_ENOUGH


def _count(search: Search, racers: Sequence[Switches]) -> int:
    """Returns how many replicates to prepare at the same time: one, or several where there is no time for one after the other.

    None fits where it is 0.
    """
    costs, done = Costs(search), len(search.tune.finals)
    missing, fewest = max(search.asked.replicates - done, 1), max(search.fewest - done, 1)
    count = 1
    if search.held or (missing * costs.replicates_s(racers, 1) > search.left_s and not search.on_cpu):
        counts = range(missing, fewest, -1)
        count = next((each for each in counts if costs.replicates_s(racers, each) <= 0.9 * search.left_s), fewest)
    share = WORTH_A_LITTLE_MORE if done + count <= search.fewest else 1.0
    return count if share * costs.replicates_s(racers, count) <= search.left_s else 0


def run_replicates(
    search: Search, racers: Sequence[Switches], purpose: Purpose, count: int = 1, batch: int | None = None
) -> bool:
    """Run and keep so many more replicates, prepared at the same time; False where the budget ended before any was ready."""
    costs, done = Costs(search), len(getattr(search.tune, purpose))
    names = [search.space.text(switches) for switches in racers]
    search.observer.replicate(done + 1, max(search.asked.replicates, done + count), names)
    one_by_one_s = sum(map(costs.reopen_s, racers))
    hurried = search.asked.replicates * one_by_one_s > search.left_s
    checked = {*racers} if batch is not None else search.checked_long() | {BASELINE}

    def specs(checks: bool) -> list[RunSpec]:
        looks = [checks and switches not in checked for switches in racers]
        measures = [final_measure(on_cpu=search.on_cpu, checks=each, hurried=hurried) for each in looks]
        return [search.spec_of(*each, batch) for each in zip(racers, measures, strict=True)]

    begun = [pending for pending in search.held if search.recipe_of(pending.record) in racers]
    search.held = [pending for pending in search.held if pending not in begun]
    if begun or count > 1 or costs.replicates_s(racers, 1) < one_by_one_s:
        planned = [specs(True), *[specs(False)] * (count - 1)]
        replicates = search.runner.run_replicates_at_once(planned, begun=begun)
    else:
        replicates = [search.runner.run_replicate(specs(True))]
    search.records.update((record.id, record) for replicate in replicates for record in replicate)
    # One in which a recipe was not ready before the budget ended says nothing about it.
    kept = [each for each in replicates if search.left_s > 1.0 or not any(map(_was_late, each))]
    ids = tuple(tuple(record.id for record in replicate) for replicate in kept)
    search.keep(**{purpose: (*getattr(search.tune, purpose), *ids)})
    return bool(kept)


def _was_late(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind == "timeout"


def _learn(search: Search) -> None:
    """Rules out what broke or lost its numbers in the last race. What was not ready in time may be so with a larger budget."""
    known = {lesson.recipe for lesson in search.tune.lessons if lesson.overrules_trials}
    for record in (record for replicate in search.standings().replicates for record in replicate):
        switches = search.recipe_of(record)
        text = search.space.text(switches)
        if switches == BASELINE or text in known or rejection(record, search.tune) is None or _was_late(record):
            continue
        lesson = lesson_of(switches, text, record, search.tune, raced=True)
        if lesson is not None:
            search.learn(lesson)


# What each switch brings


def take_apart(search: Search) -> None:
    """Measures what each switch of the winner brings, and looks for its batch."""
    winner = search.standings().winner()
    if winner is None:
        return
    if winner != "baseline":
        search.observer.stage("what each switch brings")
    with search.spending("ablation"):
        _ablate(search)
        _simplify(search)
    search.kept_back_s = 0.0
    with search.spending("batch"):
        _choose_batch(search)
    with search.spending("ablation"):
        _ablate(search)  # with what was kept back for the batch and not needed
        if switches := _not_left_out(search):
            text = f"the budget ended before the gain of these was measured: {', '.join(switches)}; raise --budget"
            search.ran_short(note("gains-unknown", text))


def _ablate(search: Search) -> None:
    """Races the winner against itself without one switch each, the cheapest first, as many as the time allows."""
    started_s, chosen = search.elapsed_s, search.standings().winner()
    while chosen not in (None, "baseline"):
        costs = Costs(search)
        room_s = min(0.75 * search.left_s, ABLATION_SHARE * search.budget_s - (search.elapsed_s - started_s))
        racers = [search.space.switches_of(chosen)]
        for switches in sorted(_unsettled(search, chosen), key=costs.seconds):
            cold_s = sum(costs.seconds(each) - costs.reopen_s(each) for each in (*racers, switches))
            if costs.replicates_s([*racers, switches], 1) + cold_s > room_s:
                break
            racers.append(switches)
        if len(racers) < 2 or not run_replicates(search, racers, "ablations"):
            return


def _unsettled(search: Search, chosen: str) -> list[Switches]:
    """Returns the winner without one switch each, where that may run, is not settled and was not measured twice."""
    lessons, unsound = search.lessons(), _rejected_on_trial(search)
    ablations = replicates_of(search.tune.ablations, search.records)
    found = []
    for _, without in search.space.less_one(search.space.switches_of(chosen)):
        name = search.space.text(without)
        own = [record for each in ablations for record in each if str(record.spec.recipe) == name]
        pair = pair_with([*search.standings().replicates, *ablations], name, chosen, search.asked.kind)
        is_open = len(own) < 2 and all(record.failure is None for record in own) and not _is_settled(pair)
        if is_open and not lessons.rules_out(without) and without not in unsound:
            found.append(without)
    return found


def _rejected_on_trial(search: Search) -> set[Switches]:
    return {search.space.switches_of(trial.recipe) for trial in search.tune.trials} - search.seen().keys()


def _not_left_out(search: Search) -> list[str]:
    """Returns the switches of the winner that there was no time to leave out; several are joined where they go together."""
    chosen = search.standings().winner() or "baseline"
    known = {gain.switch for gain in gains_of(chosen, search.tune, search.records)}
    ablations = replicates_of(search.tune.ablations, search.records)
    asked = {search.recipe_of(record) for each in ablations for record in each} | _rejected_on_trial(search)
    less_one = search.space.less_one(search.space.switches_of(chosen))
    return [switch for switch, rest in less_one if switch not in known and rest not in asked]


def _simplify(search: Search) -> None:
    """Switches that bring nothing go, where the recipe without all of them is as fast in replicates of its own."""
    chosen = search.standings().winner() or "baseline"
    gains = gains_of(chosen, search.tune, search.records)
    useless = {switch for gain in gains if gain.gain <= 1 + NEAR_ENOUGH for switch in gain.switch.split("+")}
    switches = search.space.switches_of(chosen)
    racers = list(dict.fromkeys([BASELINE, switches, switches - useless]))
    names = set(map(search.space.text, racers))
    together = sum(names <= set(met_in(replicate)) for replicate in search.standings().replicates)
    is_sound = search.space.is_valid(switches - useless) and not search.lessons().rules_out(switches - useless)
    if not useless or not is_sound or together >= search.asked.replicates:
        return  # what was raced already has shown that it is slower
    if Costs(search).replicates_s(racers, search.fewest) > search.left_s:
        return  # with fewer it would have no interval
    for _ in range(search.asked.replicates):
        if not run_replicates(search, racers, "finals"):
            break
    if search.standings().winner() != chosen:
        search.keep(ablations=())
        _ablate(search)


# The batch


def batch_share_s(search: Search) -> float:
    """Returns what is kept back of the budget for the batch and the race there; nothing where it would not be enough."""
    leader, share_s = search.leader(), BATCH_SHARE * search.budget_s
    return share_s if search.asked.tunes_batch and share_s >= _batch_search_s(search, leader or BASELINE) else 0.0


def _batch_search_s(search: Search, switches: Switches) -> float:
    """A search takes about five trials, each in a process that compiles again, and never less than twenty seconds."""
    return max(20.0, 5 * Costs(search).anew_s(switches))


def _choose_batch(search: Search) -> None:
    """Searches the batch for the winner and a recipe with another need for memory; the one with the higher throughput is raced there."""
    if not search.asked.tunes_batch:
        return
    for switches in _best_two(search):
        recipe, known = search.space.text(switches), {choice.recipe for choice in search.tune.batches}
        if recipe in known:
            continue
        race_s = Costs(search).replicates_s([BASELINE, switches], search.asked.replicates) if known else 0.0
        if search.left_s < _batch_search_s(search, switches) + race_s:
            text = f"no time left to search for the best batch of {recipe}"
            search.ran_short(note("batch-not-searched", text, about=recipe))
            break
        search.observer.stage(f"the batch for {recipe}")
        spec = search.spec_of(switches, MeasureSpec.for_effort("quick"))
        slo_p95_s = search.asked.slo_p95_s
        chosen = _best_batch(search_batch(spec, search.door, search.journal, search.observer, slo_p95_s=slo_p95_s))
        if chosen is not None:
            search.keep(batches=(*search.tune.batches, chosen))
    if search.tune.batches:
        best = max(search.tune.batches, key=lambda choice: choice.throughput_per_s)
        told = _race_at(search, best)
        search.tell(*([told] if told is not None else []))


def _best_two(search: Search) -> list[Switches]:
    """The winner, and it with what spares memory, which may fit a larger batch; or another recipe, if possible no twin with one more switch."""
    winner = search.standings().winner()
    if winner is None:
        return []
    own = sparing = search.space.switches_of(winner)
    for choice in search.space.choices:
        if choice.relieves == "memory" and search.space.is_valid(sparing | {choice.switch}):
            sparing |= {choice.switch}
    others = sorted((each for each in search.ranked() if each != own), key=lambda each: len(each ^ own) < 2)
    return [own, *([sparing] if sparing != own else others)[:1]]


def _best_batch(found: BatchSummary) -> BatchChoice | None:
    """Returns what the finder says under a latency target, and else the smallest batch that is as good as any."""
    rates = {trial.batch: trial.throughput_per_s for trial in found.trials if trial.fits and trial.throughput_per_s}
    known = {batch: rate for batch, rate in rates.items() if rate is not None}
    least = ENOUGH * max(known.values(), default=0.0)
    best = min((batch for batch in known if known[batch] >= least), default=None)
    batch = found.slo_batch if found.slo_p95_s is not None else best
    return BatchChoice(recipe=found.row.recipe, batch=batch, throughput_per_s=known[batch]) if batch in known else None


def _race_at(search: Search, choice: BatchChoice) -> Note | None:
    """Race at the batch that was found, so that the ratio that is told is one at the batch that is told; returns what to say of it."""
    winner = search.standings().winner()
    racers = [BASELINE, *(search.space.switches_of(name) for name in dict.fromkeys((choice.recipe, winner)) if name)]
    racers = list(dict.fromkeys(racers))
    before = replicates_of(search.tune.batch_replicates, search.records)
    met = {(str(record.spec.recipe), record.spec.workload.batch) for each in before for record in each}
    if before and not met.issuperset((search.space.text(each), choice.batch) for each in racers):
        search.keep(batch_replicates=())
    while (done := len(search.tune.batch_replicates)) < search.asked.replicates:
        costs = Costs(search)
        first_s = sum(costs.anew_s(each) - costs.reopen_s(each) for each in racers) if not done else 0.0
        fewest = 1 if done else search.fewest  # one alone gives no interval
        is_late = search.left_s < fewest * costs.replicates_s(racers, 1) + first_s
        if is_late or not run_replicates(search, racers, "batch_replicates", batch=choice.batch):
            search.is_short = True
            if not done:
                seen = f"{choice.recipe} is best at batch {choice.batch}, each recipe measured by itself"
                return note("batch-not-raced", f"{seen}; the budget ended before they were compared there")
            had = f"its {search.asked.replicates} replicates (it had {done})"
            text = f"the budget ended before the comparison at batch {choice.batch} had {had}: raise --budget"
            return note("short-race", text)
        last = replicates_of(search.tune.batch_replicates, search.records)[-1]
        broken = {str(record.spec.recipe): record for record in last if record.failure is not None}
        for name in broken.keys() & {"baseline", choice.recipe}:
            failure = broken[name].failure
            why = f"{name} fails there ({failure.kind if failure else ''})"
            search.keep(batch_replicates=search.tune.batch_replicates[:-1])
            return note(
                "batch-not-raced",
                f"no ratio at batch {choice.batch}: {why}; the ratio shown is the one at the first batch",
            )
        racers = [each for each in racers if search.space.text(each) not in broken]
    there = conclusive(search.tune, search.records)[1]
    if winner is None or there == winner:
        return None
    text = f"{winner} won at the first batch, but not at batch {choice.batch}: {there} is as fast there, or faster"
    return note("other-winner", text)
