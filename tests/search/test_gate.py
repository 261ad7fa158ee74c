"""The gate against machines whose truth is known: what it catches, when it is silent, when it stops."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gate_trials import BASELINE, CANDIDATE, interleaved, landscape, stored

from redline.analyze.gate import FEWEST_PROCESSES
from redline.record import Failure
from redline.search.gate import MOST_PROCESSES, GateRun
from redline.search.observer import NoJournal, Observer
from redline.testing.fake import FakeDoor

RUNS = 12
MACHINES = ["quiet", "noisy", "drifting", "two modes", "outliers"]


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


def test_a_side_that_breaks_ends_it_at_once() -> None:
    broken = Failure(stage="build", kind="crash", message="gone")
    truth = replace(landscape("quiet", 0.0, 0), failure=lambda spec: None if spec.launch.folder else broken)
    run = GateRun(FakeDoor(truth), NoJournal(), Observer(), threshold=0.03, budget_s=100.0)
    run.interleaved(BASELINE, CANDIDATE)
    assert run.broken in run.candidate
    assert len(run.candidate) == 1
