"""The batch for the best two recipes, and the winner set against the baseline there."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.batch import BatchSummary, SloTargets
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec
from redline.search.batch import search_batch
from redline.search.decide import FEWEST_REPLICATES, Race
from redline.search.tune.costs import Costs
from redline.search.tune.final_runs import final_spec, race_replicate_s
from redline.search.tune.record import BatchChoice
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import complexity, replicates_of, winner_of

BEST = 2
ENOUGH = 0.97
"""Of the highest throughput: the smallest batch that has it is the one to take."""
BATCH_SHARE = 0.35
"""Of the budget, for the batch and the race there, where the batch is asked for."""
SEARCH_S = 20.0
"""With less than this left, no batch is searched for."""
USUAL_TRIALS = 5
"""How many trials a batch search takes, each in a process that compiles again."""


def batch_share_s(tuner: Tuner) -> float:
    """What is kept back of the budget for the batch and the race there; nothing where it would not be enough."""
    leader, share_s = tuner.leader(), BATCH_SHARE * tuner.budget_s
    needed_s = _search_s(tuner, leader.recipe) if leader is not None else SEARCH_S
    return share_s if tuner.asked.tunes_batch and share_s >= needed_s else 0.0


def choose_batch(tuner: Tuner) -> None:
    """Search the batch for the winner and the runner-up; the one with the higher throughput there wins."""
    if not tuner.asked.tunes_batch:
        return
    for recipe in _best_two(tuner):
        known = {choice.recipe for choice in tuner.tune.batches}
        if recipe in known:
            continue
        # A race of the one is worth more than the batch of the other.
        race_s = tuner.asked.replicates * race_replicate_s(tuner, _racers(tuner)) if known else 0.0
        if tuner.left_s < _search_s(tuner, recipe) + race_s:
            text = f"no time left to search for the best batch of {recipe}"
            tuner.ran_short(note("batch-not-searched", text, about=recipe))
            break
        _search_batch(tuner, recipe)
    race_at_batch(tuner)


def _search_s(tuner: Tuner, recipe: str) -> float:
    return max(SEARCH_S, USUAL_TRIALS * Costs(tuner).anew_s(tuner.space.switches_of(recipe)))


def _replicate_s(tuner: Tuner, racers: Sequence[Switches]) -> float:
    """The first one at the new batch; later ones find what was compiled for it."""
    costs = Costs(tuner)
    again_s = sum(costs.anew_s(each) - costs.expected_s(each) for each in racers)
    return race_replicate_s(tuner, racers) + (0.0 if tuner.tune.batch_replicates else again_s)


def _search_batch(tuner: Tuner, recipe: str) -> None:
    tuner.observer.stage(f"the batch for {recipe}")
    spec = tuner.spec_of(tuner.space.switches_of(recipe), MeasureSpec.for_effort("quick"))
    found = search_batch(spec, tuner.door, tuner.journal, tuner.observer, slo=SloTargets(p95_s=tuner.asked.slo_p95_s))
    chosen = best_batch(found)
    if chosen is not None:
        tuner.keep(batches=(*tuner.tune.batches, chosen))


def best_batch(found: BatchSummary) -> BatchChoice | None:
    """Under a latency target what the finder says; else the smallest batch that is as good as any."""
    rates = {trial.batch: trial.throughput_per_s for trial in found.trials if trial.fits and trial.throughput_per_s}
    if not rates:
        return None
    if found.slo_p95_s is not None:
        batch = found.slo_batch
    else:
        best = max(rate for rate in rates.values() if rate is not None)
        batch = min(batch for batch, rate in rates.items() if rate is not None and rate >= ENOUGH * best)
    rate = rates.get(batch) if batch is not None else None
    return (
        None if batch is None or rate is None else BatchChoice(recipe=found.recipe, batch=batch, throughput_per_s=rate)
    )


def race_at_batch(tuner: Tuner) -> None:
    """The ratio that is told is one at the batch that is told."""
    if not tuner.tune.batches:
        return
    chosen, racers = _chosen(tuner), _racers(tuner)
    race = Race(tuner.door, tuner.journal, tuner.observer, tuner.order, only=tuner.only)
    race.replicates = _replicates_at(tuner, chosen.batch, racers)
    for number in range(len(race.replicates), tuner.asked.replicates):
        fewest = min(FEWEST_REPLICATES, tuner.asked.replicates) if number == 0 else 1  # one alone gives no interval
        if tuner.left_s < fewest * _replicate_s(tuner, racers):
            _note_a_short_race(tuner, chosen.batch, number)
            return
        tuner.observer.replicate(number + 1, tuner.asked.replicates, [tuner.space.text(each) for each in racers])
        records = race.run_replicate([final_spec(tuner, each, first=False, batch=chosen.batch) for each in racers])
        tuner.records.update((record.id, record) for record in records)
        broken = {str(record.spec.recipe) for record in records if record.failure is not None}
        if broken & {tuner.space.text(BASELINE), chosen.recipe}:
            tuner.keep(notes=(*tuner.tune.notes, _why_no_ratio(records, chosen.batch)))
            return
        racers = [each for each in racers if tuner.space.text(each) not in broken]
        tuner.keep(batch_replicates=(*tuner.tune.batch_replicates, tuple(record.id for record in records)))


def _note_a_short_race(tuner: Tuner, batch: int, replicates: int) -> None:
    """A race that was not held at all is told of elsewhere, with what the search for the batch saw."""
    tuner.is_short = True
    if replicates:
        had = f"its {tuner.asked.replicates} replicates (it had {replicates})"
        text = f"the budget ended before the comparison at batch {batch} had {had}: raise --budget"
        tuner.ran_short(note("short-race", text))


def _chosen(tuner: Tuner) -> BatchChoice:
    return max(tuner.tune.batches, key=lambda choice: choice.throughput_per_s)


def _racers(tuner: Tuner) -> list[Switches]:
    """The baseline, who moves most at its batch, and who won at the first one: it may be the faster here too."""
    names = [_chosen(tuner).recipe, winner_of(tuner.tune, tuner.records)]
    return list(dict.fromkeys([BASELINE, *(tuner.space.switches_of(name) for name in names if name is not None)]))


def _replicates_at(tuner: Tuner, batch: int, racers: Sequence[Switches]) -> list[list[RunRecord]]:
    """Those of an earlier session, unless they were at another batch or of others."""
    replicates = replicates_of(tuner.tune.batch_replicates, tuner.records)
    names = {str(record.spec.recipe) for replicate in replicates[:1] for record in replicate}
    is_other = any(record.spec.workload.batch != batch for replicate in replicates for record in replicate)
    if replicates and (is_other or not names.issuperset(map(tuner.space.text, racers))):
        tuner.keep(batch_replicates=())
        return []
    return replicates


def _why_no_ratio(records: list[RunRecord], batch: int) -> Note:
    broken = next(record for record in records if record.failure is not None)
    assert broken.failure is not None
    why = f"{broken.spec.recipe} fails there ({broken.failure.kind})"
    return note("batch-not-raced", f"no ratio at batch {batch}: {why}; the ratio shown is the one at the first batch")


def _best_two(tuner: Tuner) -> list[str]:
    winner = winner_of(tuner.tune, tuner.records)
    if winner is None:
        return []
    known = sorted((each for each in tuner.seen().values() if tuner.may_win(each)), key=lambda each: each.log_s)
    others = [each.recipe for each in known if each.recipe != winner]
    # Another memory appetite may fit a larger batch; a twin with one more switch will not.
    others.sort(
        key=lambda recipe: (
            len(set(recipe.split("+")) ^ set(winner.split("+"))) < 2,
            complexity(recipe, tuner.records) == (0, 0),
        )
    )
    return [winner, *[recipe for recipe in (_sparing(tuner, winner), *others) if recipe is not None][: BEST - 1]]


def _sparing(tuner: Tuner, winner: str) -> str | None:
    """The winner with what spares memory, which fits the largest batch of all; None where nothing more can be spared."""
    switches = tuner.space.switches_of(winner)
    for choice in tuner.space.choices:
        if choice.relieves == "memory" and tuner.space.is_valid(switches | {choice.switch}):
            switches |= {choice.switch}
    text = tuner.space.text(switches)
    return text if text != winner else None
