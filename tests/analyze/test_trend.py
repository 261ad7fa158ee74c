"""Steps are found where they are, and neither noise nor drift is called one."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from redline.analyze.trend import Trend, sparkline, trend_of

POINTS, AT, RUNS = 60, 33, 20


def logs(machine: str, seed: int) -> NDArray[np.float64]:
    random = np.random.default_rng(seed)
    values = random.normal(0, 0.003 if machine in ("quiet", "slope") else 0.01, POINTS)
    if machine == "two modes":
        values += 0.04 * (random.random(POINTS) < 0.4)
    if machine == "outliers":
        values += random.exponential(0.3, POINTS) * (random.random(POINTS) < 0.08)
    if machine == "slope":
        values += np.linspace(0, 0.08, POINTS)
    return values


def found(machine: str, slowdown: float, seed: int) -> Trend:
    values = logs(machine, seed)
    values[AT:] += math.log1p(slowdown)
    return trend_of((0.01 * np.exp(values)).tolist())


def is_near(trend: Trend) -> bool:
    return any(abs(change.index - AT) <= 4 and change.ratio < 1 for change in trend.changes)


@pytest.mark.parametrize("machine", ["quiet", "noisy", "two modes", "outliers"])
def test_five_percent_are_caught_and_none_is_not_told(machine: str) -> None:
    assert sum(is_near(found(machine, 0.05, seed)) for seed in range(RUNS)) >= 0.9 * RUNS
    assert sum(bool(found(machine, 0.0, 50 + seed).changes) for seed in range(RUNS)) <= 1


@pytest.mark.parametrize("machine", ["quiet", "noisy"])
def test_two_percent_are_caught_where_the_spread_allows(machine: str) -> None:
    assert sum(is_near(found(machine, 0.02, seed)) for seed in range(RUNS)) >= 0.8 * RUNS


def test_drift_is_told_from_a_step() -> None:
    trends = [found("slope", 0.0, seed) for seed in range(RUNS)]
    assert sum(bool(trend.changes) for trend in trends) <= 1
    assert all(trend.drift is not None and trend.drift.high < 1 for trend in trends)
    assert all(found("quiet", 0.05, seed).drift is None for seed in range(5))


def test_the_interval_covers_the_truth() -> None:
    covered = 0
    for seed in range(RUNS):
        (change,) = found("quiet", 0.05, seed).changes
        covered += change.low <= 1 / 1.05 <= change.high
    assert covered >= 0.85 * RUNS


def test_two_steps_are_both_found() -> None:
    values = logs("quiet", 1)
    values[20:] += 0.05
    values[40:] -= 0.08
    first, second = trend_of(np.exp(values).tolist()).changes
    assert (first.ratio < 1 < second.ratio, abs(first.index - 20) <= 1, abs(second.index - 40) <= 1) == (True,) * 3


@pytest.mark.parametrize("count", [0, 1, 2, 9, 10])
def test_few_records_say_nothing(count: int) -> None:
    assert trend_of([0.01] * count) == Trend()


def test_a_sparkline_rises_with_the_speed() -> None:
    assert sparkline([0.02, 0.02, 0.01, 0.01]) == "▁▁██"
    assert sparkline([0.01] * 3) == "▅▅▅"
    assert len(sparkline([0.01, 0.02] * 500)) == 24
