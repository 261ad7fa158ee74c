"""Replicates of the last race: fresh processes, one after the other or prepared at the same time, and what they take."""

from __future__ import annotations

from collections.abc import Sequence

from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.search.decide import FEWEST_REPLICATES, Race
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import rejection
from redline.search.tune.reserve import RACE_MARGIN, affordable, at_most_s, at_once_s, planned_replicates, together_s
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import FULL_LOSS_PATH, Tuner, final_measure
from redline.search.tune.winner import met_last, replicates_of

LEAST_SCALE = 0.5
"""Of what is expected: replicates that took less may take more again."""
SURE_MARGIN = 0.9
"""Of what is left, for more replicates than give an interval."""
NOTICED_S = 1.0
"""By so much earlier than the budget ends a worker may be told that its time is over."""
GRACE = 0.1
"""Of the budget: by so much the replicate may exceed it without which the winner would have no interval."""


def race_replicate_s(tuner: Tuner, racers: Sequence[Switches]) -> float:
    """What a replicate of these takes: opening them again, and timing each for its share at most."""
    timed_s = final_measure(on_cpu=tuner.on_cpu, checks=False).max_seconds / tuner.asked.replicates
    costs = Costs(tuner)
    one_by_one_s = sum(costs.expected_s(each) + timed_s for each in racers)
    return min(one_by_one_s, together_s(tuner, costs, racers) + timed_s * len(racers))


def final_spec(
    tuner: Tuner, switches: Switches, *, first: bool, hurried: bool = False, batch: int | None = None
) -> RunSpec:
    """Numbers are checked once more, over the full path of losses, in the first replicate."""
    return tuner.spec_of(switches, final_measure(on_cpu=tuner.on_cpu, checks=first, hurried=hurried), batch)


def twin_specs(tuner: Tuner, switches: Switches, *, count: int) -> list[RunSpec]:
    """Processes of a recipe in the shortest race that gives an interval.

    The trial checks the numbers; in training the path of losses is longer here.
    """
    is_checked = tuner.asked.spec.workload.task == "train" and switches != BASELINE
    return [final_spec(tuner, switches, first=is_checked and number == 0, hurried=True) for number in range(count)]


def race_of(tuner: Tuner) -> Race:
    planned = tuner.asked.replicates
    return Race(
        tuner.door,
        tuner.journal,
        tuner.observer,
        tuner.order,
        only=tuner.only,
        planned=planned,
        left_s=lambda: tuner.left_s,
    )


def times_raced(tuner: Tuner, racers: Sequence[Switches]) -> int:
    """In how many replicates the first of them, beside the baseline, was timed; those before it fell do not count."""
    first = next((tuner.space.text(each) for each in racers if each != BASELINE), None)
    return sum(first in met_last([replicate]) for replicate in replicates_of(tuner.tune.finals, tuner.records))


def run_final(tuner: Tuner, race: Race, racers: Sequence[Switches]) -> bool:
    """Run and keep one more replicate; False where the budget is too short. The one that gives an interval may exceed it a little."""
    gives_interval = times_raced(tuner, racers) == FEWEST_REPLICATES - 1 and len(racers) == 2
    grace_s = GRACE * tuner.budget_s if gives_interval else 0.0
    # Where processors and memory allow, its processes are prepared at the same time: they stand beside each other in any case.
    is_at_once = together_s(tuner, Costs(tuner), racers) <= tuner.left_s + grace_s
    if not is_at_once and len(affordable(tuner, racers, grace_s)) < len(racers):
        return False
    run = run_replicate_at_once if is_at_once else run_replicate
    records = run(tuner, race, racers, len(tuner.tune.finals), tuner.asked.replicates)
    _keep_finals(tuner, race, [records])
    return True


def run_finals_at_once(tuner: Tuner, race: Race, racers: Sequence[Switches]) -> bool:
    """All replicates of the race prepared at the same time, where there is no time for one after the other.

    As many as can be had, and not fewer than give an interval; False where they cannot be had, or need not be.
    """
    done, costs = times_raced(tuner, racers), Costs(tuner)
    planned = max(tuner.asked.replicates, planned_replicates(tuner, costs, racers))
    missing, fewest = planned - done, max(FEWEST_REPLICATES - done, 1)
    one_by_one_s = missing * tuner.replicate_scale * sum(at_most_s(costs, each) for each in racers)
    if RACE_MARGIN * one_by_one_s <= tuner.left_s and not any(map(tuner.twins_of, racers)):
        return False
    for count in range(missing, fewest - 1, -1):
        is_least = done + count == FEWEST_REPLICATES
        needed_s = at_once_s(tuner, costs, racers, count, is_cautious=not is_least)
        if needed_s <= (RACE_MARGIN if is_least else SURE_MARGIN) * tuner.left_s:
            names = [tuner.space.text(each) for each in racers]
            tuner.observer.replicate(len(tuner.tune.finals) + 1, tuner.asked.replicates, names)
            first, later = _final_specs(tuner, racers), _final_specs(tuner, racers, are_checked=True)
            begun = [each for each in tuner.twins if tuner.recipe_of(each.record) in racers]
            tuner.twins = [each for each in tuner.twins if each not in begun]
            replicates = race.run_replicates_at_once([first, *[later] * (count - 1)], begun=begun)
            tuner.records.update((record.id, record) for replicate in replicates for record in replicate)
            _keep_finals(tuner, race, replicates)
            return True
    return False


def _keep_finals(tuner: Tuner, race: Race, replicates: Sequence[Sequence[RunRecord]]) -> None:
    """Those in which a recipe was not ready before the budget ended say nothing about it, and are not kept."""
    is_over = tuner.left_s <= NOTICED_S
    whole = [each for each in replicates if not (is_over and any(map(_was_late, each)))]
    tuner.keep(finals=(*tuner.tune.finals, *(tuple(record.id for record in each) for each in whole)))
    tuner.observer.standing(race.pairs)


def _was_late(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind == "timeout"


def _final_specs(tuner: Tuner, racers: Sequence[Switches], *, are_checked: bool = False) -> list[RunSpec]:
    """In a hurry the check of the trial is enough for inference; in training the path of losses is longer here.

    The baseline is what the others are checked against. `are_checked`: another replicate looks at the numbers.
    """
    is_hurried = tuner.asked.replicates * sum(map(Costs(tuner).expected_s, racers)) > tuner.left_s
    is_enough = is_hurried and tuner.asked.spec.workload.task == "infer"
    checked = (record for record in tuner.records.values() if is_checked(record, by_trial=is_enough))
    known = {str(record.spec.recipe) for record in checked if rejection(record, tuner.tune) is None}

    def is_first(switches: Switches) -> bool:
        return not are_checked and switches != BASELINE and tuner.space.text(switches) not in known

    return [final_spec(tuner, each, first=is_first(each), hurried=is_hurried) for each in racers]


def run_replicate(tuner: Tuner, race: Race, racers: Sequence[Switches], number: int, planned: int) -> list[RunRecord]:
    tuner.observer.replicate(number + 1, planned, [tuner.space.text(each) for each in racers])
    specs = _final_specs(tuner, racers)
    expected_s, started_s = sum(map(Costs(tuner).expected_s, racers)), tuner.clock()
    records = race.run_replicate(specs)
    tuner.replicate_scale = max(LEAST_SCALE, (tuner.clock() - started_s) / expected_s)
    tuner.records.update((record.id, record) for record in records)
    return records


def run_replicate_at_once(
    tuner: Tuner, race: Race, racers: Sequence[Switches], number: int, planned: int
) -> list[RunRecord]:
    """A replicate whose processes are prepared at the same time. How long it takes says nothing of one after the other."""
    tuner.observer.replicate(number + 1, planned, [tuner.space.text(each) for each in racers])
    (records,) = race.run_replicates_at_once([_final_specs(tuner, racers)])
    tuner.records.update((record.id, record) for record in records)
    return records


def is_checked(record: RunRecord, *, by_trial: bool) -> bool:
    """Its numbers were looked at over the full path, or as a trial looks at them."""
    measure = record.spec.measure
    is_full = by_trial or measure.loss_path_steps >= FULL_LOSS_PATH
    return record.prepared is not None and measure.check_numerics and is_full
