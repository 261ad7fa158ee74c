"""The largest batch on simulated memory curves, whose truth is known."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from worlds.memory import CURVES, MemoryOf, curve, largest_batch

from redline.model.spec import RunSpec, WorkloadSpec
from redline.search.batch import Bounds, Room, Tried, bounds, next_batch

CAPACITY = 16 * 2**30


def spec_of(batch: int) -> RunSpec:
    return RunSpec(workload=WorkloadSpec(model="m", batch=batch))


def search(memory: MemoryOf, capacity: int = CAPACITY, limit: int = 30, **options: int) -> list[Tried]:
    tried: list[Tried] = []
    resident = memory(spec_of(8)).resident
    room = Room(capacity_bytes=capacity, resident_bytes=resident)
    while len(tried) < limit and (batch := next_batch(tried, room, **options)) is not None:
        assert batch not in [trial.batch for trial in tried], "the same batch twice"
        needed = memory(spec_of(batch)).needed
        tried.append(Tried(batch=batch, needed_bytes=needed if needed <= capacity else None))
    return tried


def found(tried: list[Tried]) -> int:
    return max((trial.batch for trial in tried if trial.needed_bytes is not None), default=0)


def ooms(tried: list[Tried]) -> int:
    return sum(trial.needed_bytes is None for trial in tried)


@pytest.mark.parametrize("kind", CURVES)
def test_the_largest_is_found_in_few_trials_and_hardly_an_oom(kind: str) -> None:
    chance = Random(11)
    count = 12 if kind == "caching allocator" else 150
    shares, trials, failures = [], [], []
    for _ in range(count):
        memory = CURVES[kind](chance, CAPACITY)
        truth = largest_batch(memory, spec_of, CAPACITY)
        if truth:
            tried = search(memory)
            shares.append((found(tried) + (1 if truth < 34 else 0)) / truth)
            trials.append(len(tried))
            failures.append(ooms(tried))
    assert len(shares) > 0.8 * count
    assert min(shares) >= 0.97
    assert sum(trials) / len(trials) <= 6
    assert sum(number <= 8 for number in trials) >= 0.95 * len(trials)
    assert sum(number <= 1 for number in failures) >= 0.95 * len(failures)


def test_a_plain_model_takes_four_trials_and_no_oom() -> None:
    tried = search(curve(lambda batch: 3e8 + 43.5 * 2**20 * batch, resident=2e8))
    assert ooms(tried) == 0
    assert len(tried) <= 4
    assert found(tried) >= 0.98 * 370


def test_where_nothing_fits_it_says_so_after_going_down_to_one() -> None:
    tried = search(curve(lambda batch: 2 * CAPACITY))
    assert [trial.batch for trial in tried] == [8, 2, 1]
    assert found(tried) == 0


def test_without_a_capacity_only_trying_tells() -> None:
    def try_all(fits: Callable[[int], bool]) -> list[Tried]:
        tried: list[Tried] = []
        while (batch := next_batch(tried, Room(capacity_bytes=None))) is not None:
            tried.append(Tried(batch=batch, needed_bytes=batch if fits(batch) else None))
        return tried

    tried = try_all(lambda batch: batch <= 300)
    assert 300 / 1.02 <= found(tried) <= 300
    assert ooms(tried) <= 6


def test_a_figure_above_the_capacity_of_what_ran_is_not_believed() -> None:
    room = Room(capacity_bytes=1000, resident_bytes=900)
    tried = [Tried(batch=8, needed_bytes=1010), Tried(batch=9, needed_bytes=1020)]
    assert bounds(tried, room) == Bounds(fits=9, upper=math.inf)
    assert not bounds(tried, room).settled
    batch = next_batch(tried, room)
    assert batch > 9


def test_bounds_tell_how_much_is_known() -> None:
    room = Room(capacity_bytes=1000)
    assert bounds([], room) == Bounds(fits=None, upper=math.inf)
    one = [Tried(batch=8, needed_bytes=100)]
    assert bounds(one, room) == Bounds(fits=8, upper=math.inf)
    two = [*one, Tried(batch=40, needed_bytes=500)]
    assert bounds(two, room) == Bounds(fits=40, upper=80.0)
    assert bounds([*two, Tried(batch=60, needed_bytes=None)], room).upper == 60
    assert not bounds(two, room).settled
    assert bounds([*two, Tried(batch=41, needed_bytes=None)], room).settled
