"""A search over a space of recipes whose truth is known, in simulated seconds: for tests and benchmarks of the search."""

from __future__ import annotations

import random

from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.work import Facts
from redline.search.observer import NoJournal, Observer
from redline.search.tune.loop import run_search
from redline.search.tune.record import TuneRecord, TuneSpec
from redline.search.tune.space import Space, space_for
from redline.search.tune.state import Search
from redline.search.tune.summary import summary_of
from redline.testing.fake import FakeDoor
from worlds.recipes import RecipeTruth


class NoKeeper:
    """Keeps nothing."""

    def save(self, record: TuneRecord) -> None: ...


def simulated_spec(truth: RecipeTruth) -> RunSpec:
    workload = WorkloadSpec(model="simulated", task=truth.task, batch=32)
    return RunSpec(workload=workload, device="cpu" if truth.on_cpu else "cuda:0")


def simulated_space(truth: RecipeTruth) -> Space:
    return space_for(TuneSpec(spec=simulated_spec(truth)), truth.choices)[0]


def simulated_facts(truth: RecipeTruth, launches: int = 180) -> Facts:
    """What a probe of a small model on a large card would tell."""
    return Facts(
        launches=launches, step_s=truth.device_s, host_s=truth.host_s, peak_bytes=2 * 2**30, limit_bytes=140 * 2**30
    )


def tune_simulated(
    truth: RecipeTruth, seed: int, budget_s: float, jobs: int = 1, facts: Facts | None = None, before_s: float = 0.0
) -> Search:
    """The search when it has ended. `before_s`: spent on starting up and on the facts."""
    door = FakeDoor(truth.landscape(random.Random(seed)))
    truth.clock = lambda: door.clock_s
    search = Search(
        tune=TuneRecord(name="simulated", tune=TuneSpec(spec=simulated_spec(truth)), facts=facts),
        space=simulated_space(truth),
        door=door,
        journal=NoJournal(),
        keeper=NoKeeper(),
        observer=Observer(),
        clock=lambda: door.clock_s,
        budget_s=budget_s,
        order=random.Random(seed),
        jobs=jobs,
        before_s=before_s,
    )
    run_search(search)
    return search


def loss_of(search: Search, truth: RecipeTruth) -> float:
    """How much slower than the true best its answer really is; without a winner that is the baseline.

    A winner that gives wrong numbers is a bug.
    """
    winner = summary_of(search.tune, search.records).winner
    chosen = search.space.switches_of(winner.recipe if winner is not None else "baseline")
    assert truth.is_usable(chosen), winner
    best_s = min(truth.step_s(switches) for switches in search.space.recipes if truth.is_usable(switches))
    return truth.step_s(chosen) / best_s - 1
