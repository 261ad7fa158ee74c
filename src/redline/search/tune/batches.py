"""The batch for the best two recipes, and the winner set against the baseline there."""

from __future__ import annotations

from redline.analyze.batch import BatchFinding
from redline.analyze.tune.finding import complexity, heats_of, winner_of
from redline.analyze.tune.record import BatchChoice
from redline.record import RunRecord
from redline.search.batch import find_batch
from redline.search.race import Race
from redline.search.tune.finals import final_spec
from redline.search.tune.space import BASELINE
from redline.search.tune.tuner import Tuner
from redline.spec import MeasureSpec

BEST = 2
ENOUGH = 0.97
"""Of the highest throughput: the smallest batch that has it is the one to take."""
SEARCH_S = 20.0
"""With less than this left, no batch is searched for."""


def choose_batch(tuner: Tuner) -> None:
    """Search the batch for the winner and for its runner-up; whoever moves more items there wins."""
    if not tuner.asked.tunes_batch:
        return
    for recipe in _best_two(tuner):
        known = {choice.recipe for choice in tuner.tune.batches}
        if recipe in known:
            continue
        if tuner.left_s < SEARCH_S:
            tuner.keep(notes=(*tuner.tune.notes, f"no time left to search the batch for {recipe}"))
            return
        tuner.observer.stage(f"the batch for {recipe}")
        steps = tuner.space.steps_of(recipe)
        spec = tuner.spec_of(steps, MeasureSpec.for_effort("quick"))
        found = find_batch(spec, tuner.door, tuner.journal, tuner.observer, slo_p95_s=tuner.asked.slo_p95_s)
        chosen = best_batch(found)
        if chosen is not None:
            tuner.keep(batches=(*tuner.tune.batches, chosen))
    race_at_batch(tuner)


def best_batch(found: BatchFinding) -> BatchChoice | None:
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
    chosen = max(tuner.tune.batches, key=lambda choice: choice.throughput_per_s)
    racers = list(dict.fromkeys([BASELINE, tuner.space.steps_of(chosen.recipe)]))
    race = Race(tuner.door, tuner.journal, tuner.observer, tuner.order, only=tuner.only)
    race.heats = heats_of(tuner.tune.batch_heats, tuner.records)
    for number in range(len(race.heats), tuner.asked.replicates):
        if tuner.left_s < SEARCH_S:
            return
        tuner.observer.heat(number + 1, tuner.asked.replicates, [tuner.space.text(each) for each in racers])
        records = race.run_heat([final_spec(tuner, each, first=False, batch=chosen.batch) for each in racers])
        tuner.records.update((record.id, record) for record in records)
        if any(record.failure is not None for record in records):
            tuner.keep(notes=(*tuner.tune.notes, _why_no_ratio(records, chosen.batch)))
            return
        tuner.keep(batch_heats=(*tuner.tune.batch_heats, tuple(record.id for record in records)))


def _why_no_ratio(records: list[RunRecord], batch: int) -> str:
    broken = next(record for record in records if record.failure is not None)
    assert broken.failure is not None
    return f"no ratio at batch {batch}: {broken.spec.recipe} fails there ({broken.failure.kind}); it is that at the first batch"


def _best_two(tuner: Tuner) -> list[str]:
    winner = winner_of(tuner.tune, tuner.records)
    if winner is None:
        return []
    known = sorted((each for each in tuner.seen().values() if tuner.may_win(each)), key=lambda each: each.log_s)
    others = [each.recipe for each in known if each.recipe != winner]
    # Another memory appetite may fit a larger batch; a twin with one more step will not.
    others.sort(
        key=lambda recipe: (len(set(recipe.split("+")) ^ set(winner.split("+"))) < 2, complexity(recipe) == (0, 0))
    )
    return [winner, *others[: BEST - 1]]
