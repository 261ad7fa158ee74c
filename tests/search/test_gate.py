"""The gate against machines whose truth is known: what it catches, when it is silent, when it stops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from gate_trials import BASELINE, CANDIDATE, interleaved, landscape, stored

from redline.analyze.gate import FEWEST_PROCESSES, MOST_PROCESSES, Judged, judge
from redline.analyze.pairs import logs_of, racer_names
from redline.analyze.statistics import PairedLog
from redline.model.record import Failure
from redline.search.gate import GateRun
from redline.search.observer import NoJournal, Observer
from redline.testing.fake import FakeDoor

RUNS = 8
MACHINES = ["quiet", "noisy", "drifting", "two modes", "outliers"]


@pytest.mark.parametrize("at_once", [False, True])
def test_every_other_process_being_slower_is_no_change(at_once: bool) -> None:
    """Each replicate opens its two processes in the reverse order of the one before."""
    door = FakeDoor(landscape("alternating", 0.0, seed=0))
    race = GateRun(door, NoJournal(), Observer(), threshold=0.03, budget_s=1.0, clock=lambda: door.clock_s)._race
    if at_once:
        race.run_replicates_at_once([[BASELINE, CANDIDATE]] * 4)
    else:
        for _ in range(4):
            race.run_replicate([BASELINE, CANDIDATE])
    first, other = racer_names([BASELINE, CANDIDATE])
    signs = [log.mean > 0 for log in logs_of(race.replicates, first, other)]
    assert signs[0] != signs[1]
    assert signs[2] != signs[3]


def verdict(run: GateRun) -> str:
    assert run.judged is not None
    return run.judged.verdict


@pytest.mark.parametrize("machine", MACHINES)
def test_a_slowdown_of_five_percent_is_caught_and_none_is_not_told(machine: str) -> None:
    """`benchmarks/gate_trials.py` counts more of them; with so few, one false alarm is luck and three are not."""
    caught = [verdict(interleaved(machine, 0.05, seed)) for seed in range(RUNS)]
    silent = [verdict(interleaved(machine, 0.0, 100 + seed)) for seed in range(RUNS)]
    assert caught.count("slower") >= RUNS - 1
    assert silent.count("slower") <= 1


def test_two_percent_are_caught_where_the_spread_allows() -> None:
    assert [verdict(interleaved("quiet", 0.02, seed)) for seed in range(RUNS)].count("slower") >= 0.8 * RUNS


@pytest.mark.parametrize("machine", ["quiet", "noisy", "two modes", "outliers"])
def test_stored_records_do_as_baseline(machine: str) -> None:
    caught = [verdict(stored(machine, 0.05, seed)) for seed in range(RUNS)]
    silent = [verdict(stored(machine, 0.0, 100 + seed)) for seed in range(RUNS)]
    assert caught.count("slower") >= RUNS - 1
    assert silent.count("slower") <= 1


def test_a_machine_that_drifts_is_not_told_apart_from_a_slowdown_by_stored_records() -> None:
    assert [verdict(stored("drifting", 0.0, seed)) for seed in range(RUNS)].count("slower") <= 3


def test_no_verdict_comes_from_fewer_than_five_processes() -> None:
    run = interleaved("quiet", 0.5, 0)
    assert (verdict(run), len(run.candidate)) == ("slower", FEWEST_PROCESSES)


def test_it_goes_on_until_it_is_decided_or_too_many() -> None:
    door = FakeDoor(landscape("quiet", 0.0, 0))
    run = GateRun(door, NoJournal(), Observer(), threshold=0.0005, budget_s=1e9, clock=lambda: door.clock_s)
    run.interleaved(BASELINE, CANDIDATE)
    assert (verdict(run), len(run.candidate), run.out_of_time) == ("inconclusive", MOST_PROCESSES, False)


def test_the_budget_ends_it_but_not_before_a_verdict_is_possible() -> None:
    door = FakeDoor(landscape("quiet", 0.0, 0))
    run = GateRun(door, NoJournal(), Observer(), threshold=0.0005, budget_s=1.0, clock=lambda: door.clock_s)
    run.interleaved(BASELINE, CANDIDATE)
    assert (verdict(run), len(run.candidate), run.out_of_time) == ("inconclusive", FEWEST_PROCESSES, True)


@pytest.mark.parametrize(("budget_s", "beside_others"), [(30.0, True), (3600.0, False)])
def test_processes_of_a_gpu_are_prepared_side_by_side_only_where_time_is_short(
    budget_s: float, beside_others: bool
) -> None:
    door = FakeDoor(landscape("quiet", 0.05, 0))
    run = GateRun(door, NoJournal(), Observer(), threshold=0.03, budget_s=budget_s, clock=lambda: door.clock_s)
    run.interleaved(BASELINE, CANDIDATE)
    prepared = [record.prepared for record in (*run.baseline, *run.candidate)]
    assert (verdict(run), len(run.candidate)) == ("slower", FEWEST_PROCESSES)
    assert {each.cold_start.contended for each in prepared if each} == {beside_others}


def pairs(*means: float) -> list[PairedLog]:
    return [PairedLog(mean=mean, error=0.001, rounds=5) for mean in means]


def test_few_processes_that_scatter_widely_say_nothing_yet() -> None:
    """Five pairs of which four happen to have drawn the slow mode on the same side."""
    lucky = (-0.04, -0.041, -0.039, -0.04, 0.0)
    assert [judged(lucky).verdict, judged((*lucky[:4], -0.038)).verdict] == ["inconclusive", "slower"]
    assert judged(lucky * 3).verdict == "slower"


def test_processes_are_not_called_the_same_where_the_estimate_is_nearer_to_the_threshold() -> None:
    """An interval inside the threshold that does not exclude "no change"."""
    unsure = (*(-0.028,) * 9, *(0.002,) * 3)
    assert judged(unsure).verdict == "inconclusive"
    assert judged((-0.002, 0.002) * 5).verdict == "same"


def judged(means: Sequence[float]) -> Judged:
    found = judge(pairs(*means), 0.03)
    assert found is not None
    return found


def test_a_side_that_breaks_ends_it_at_once() -> None:
    broken = Failure(stage="build", kind="crash", message="gone")
    truth = replace(landscape("quiet", 0.0, 0), failure=lambda spec: None if spec.launch.folder else broken)
    run = GateRun(FakeDoor(truth), NoJournal(), Observer(), threshold=0.03, budget_s=100.0)
    run.interleaved(BASELINE, CANDIDATE)
    assert run.broken in run.candidate
    assert len(run.candidate) == 1
