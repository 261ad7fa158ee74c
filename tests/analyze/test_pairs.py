"""What replicates say about a pair: an interval that knows of processes, and a verdict by the band."""

from __future__ import annotations

import math

import numpy as np
import pytest

from redline.analyze.pairs import (
    log_ratio,
    pair_of,
    pairs_of,
    process_spread,
    verdict_of,
)
from redline.model.record import Block, Failure, RunRecord
from redline.model.spec import Recipe, RunSpec, WorkloadSpec


def record(recipe: str, times: list[float], group: str | None = "g", **changes: object) -> RunRecord:
    blocks = tuple(
        Block(kind="throughput", clock="host", samples=(seconds,), round=number) for number, seconds in enumerate(times)
    )
    spec = RunSpec(workload=WorkloadSpec(model="m"), recipe=Recipe.parse(recipe))
    return RunRecord(id=f"{recipe}{group}", spec=spec, group=group, blocks=blocks, **changes)  # type: ignore[arg-type]


def replicate(number: int, **times: list[float]) -> list[RunRecord]:
    return [record(name.replace("_", "-"), values, f"g{number}") for name, values in times.items()]


class TestVerdict:
    @pytest.mark.parametrize(
        ("low", "high", "verdict"),
        [
            (1.04, 1.2, "faster"),
            (0.8, 0.96, "slower"),
            (0.99, 1.01, "same"),
            (1.001, 1.02, "same"),  # a difference, but none worth having
            (0.99, 1.05, "inconclusive"),
            (1.02, 1.2, "inconclusive"),
            (1.03, 1.2, "inconclusive"),  # exactly at the band is not beyond it
            (1.0301, 1.5, "faster"),
            (0.8, 1 / 1.03, "inconclusive"),
            (0.5, 0.97, "slower"),
            (1 / 1.03, 1.03, "same"),
            (1 / 1.03, 1.0301, "inconclusive"),
            (0.97, 1.03, "inconclusive"),
        ],
    )
    def test_is_by_the_band(self, low: float, high: float, verdict: str) -> None:
        assert verdict_of(low, high) == verdict


class TestPairs:
    def test_ratio_is_time_of_the_first_over_time_of_the_second(self) -> None:
        replicates = [replicate(n, baseline=[2.0, 2.2, 2.1], fp16=[1.0, 1.1, 1.05]) for n in range(3)]
        (pair,) = pairs_of(replicates)
        assert (pair.a, pair.b, pair.verdict, pair.replicates) == ("baseline", "fp16", "faster", 3)
        assert pair.ratio == pytest.approx(2.0)

    def test_a_single_replicate_has_no_interval(self) -> None:
        pair = pair_of([replicate(0, baseline=[2.0] * 9, fp16=[1.0] * 9)], "baseline", "fp16")
        assert (pair.low, pair.high, pair.verdict) == (None, None, "inconclusive")

    def test_processes_that_disagree_widen_it_however_steady_each_is(self) -> None:
        steady = [
            replicate(n, baseline=[2.0] * 50, fp16=[2.0 * factor] * 50) for n, factor in enumerate((0.96, 1.0, 1.04))
        ]
        pair = pairs_of(steady)[0]
        assert pair.high - pair.low > 0.1

    def test_recipes_that_followed_each_other_are_set_against_each_other_replicate_by_replicate(self) -> None:
        replicates = [[record("baseline", [2.0, 2.0], None), record("fp16", [1.0, 1.0], None)] for _ in range(2)]
        assert pairs_of(replicates)[0].ratio == pytest.approx(2.0)

    def test_a_recipe_that_broke_is_in_no_pair(self) -> None:
        broken = record("fp16", [], failure=Failure(stage="build", kind="oom", message="no room"))
        assert pairs_of([[record("baseline", [1.0] * 6), broken, record("tf32", [1.0] * 6)]])[0].b == "tf32"


class TestSpread:
    def test_is_what_neither_recipe_nor_replicate_explains(self) -> None:
        rng = np.random.default_rng(0)
        names = ("baseline", "fp16", "tf32", "compile")
        speeds = dict(zip(names, (1.0, 0.5, 0.7, 0.6), strict=True))
        found = []
        for _ in range(200):
            replicates = []
            for n in range(3):
                warm = math.exp(rng.normal(0, 0.1))
                times = {name: [speeds[name] * warm * math.exp(rng.normal(0, 0.02))] * 6 for name in names}
                replicates.append(replicate(n, **times))
            spread = process_spread(replicates)
            assert spread[1] == 6
            found.append(spread[0])
        assert math.sqrt(np.mean(found)) == pytest.approx(0.02, rel=0.1)


class TestLogs:
    def test_of_records_that_followed_each_other(self) -> None:
        first, other = record("baseline", [2.0, 4.0], None), record("fp16", [1.0, 1.0, 1.0], None)
        found = log_ratio(first, other)
        assert (found.mean, found.rounds) == (pytest.approx(1.5 * math.log(2)), 2)
        assert found.error == pytest.approx(math.log(2) / 2)  # the spread of two values half their distance apart
        single = log_ratio(record("baseline", [2.0], None), record("fp16", [1.0], None))
        assert single.error == 0.0
        assert log_ratio(first, record("fp16", [], None)) is None
