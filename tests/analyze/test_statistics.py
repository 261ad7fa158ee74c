"""Each claim of the statistics is held against series whose truth is known, and each naive rival is shown to fail it."""

from __future__ import annotations

import math
from itertools import chain

import numpy as np
import pytest

from redline.analyze.pairs import ratio_of
from redline.analyze.statistics import (
    Ratio,
    autocorrelation_time,
    fewest_for_percentile,
    median_interval,
    paired_log,
    percentile,
    student_t,
)

SERIES = 600


def correlated(random: np.random.Generator, rho: float, count: int, series: int = SERIES) -> np.ndarray:
    """AR(1) series of unit variance, one per row."""
    noise = random.standard_normal((series, count))
    values = np.empty_like(noise)
    values[:, 0] = noise[:, 0]
    for at in range(1, count):
        values[:, at] = rho * values[:, at - 1] + math.sqrt(1 - rho**2) * noise[:, at]
    return values


def coverage(series: np.ndarray, blocks: int, truth: float) -> float:
    intervals = [median_interval(row.reshape(blocks, -1).tolist()) for row in series]
    assert all(interval is not None for interval in intervals)
    return float(np.mean([interval.low <= truth <= interval.high for interval in intervals]))


class TestMedianInterval:
    @pytest.mark.parametrize(("count", "blocks"), [(30, 3), (120, 6), (400, 8)])
    def test_covers_the_median_of_independent_lognormal_times(self, count: int, blocks: int) -> None:
        random = np.random.default_rng(1)
        times = 0.004 * np.exp(0.05 * random.standard_normal((SERIES, count)))
        assert coverage(times, blocks, 0.004) >= 0.93

    @pytest.mark.parametrize(("count", "blocks"), [(120, 4), (200, 8), (400, 20)])
    def test_covers_the_median_of_correlated_times(self, count: int, blocks: int) -> None:
        times = np.exp(0.05 * correlated(np.random.default_rng(3), 0.7, count))
        assert coverage(times, blocks, 1.0) >= 0.93

    def test_the_same_correlated_times_taken_for_independent_would_not(self) -> None:
        """Shuffling hides the correlation from the estimate while the median stays where it was."""
        random = np.random.default_rng(3)
        times = np.exp(0.05 * correlated(random, 0.7, 200))
        assert coverage(times, 1, 1.0) >= 0.93
        assert coverage(random.permuted(times, axis=1), 1, 1.0) < 0.8

    def test_block_offsets_widen_it(self) -> None:
        """Steps that agree inside a block and differ between blocks know only as much as there are blocks."""
        random = np.random.default_rng(4)
        offsets = np.repeat(0.03 * random.standard_normal((SERIES, 12)), 25, axis=1)
        times = np.exp(offsets + 0.001 * random.standard_normal((SERIES, 300)))
        assert coverage(times, 12, 1.0) >= 0.93

    def test_block_medians_see_what_a_rhythm_hides(self) -> None:
        """Steps in a cycle of three look nearly independent, yet the blocks sit apart: their medians count."""
        blocks = [
            [middle - 0.2, middle, middle + 0.2] * 8 for middle in (1.00, 1.01, 1.02, 1.03, 1.04, 1.05, 1.06, 1.07)
        ]
        apart, pooled = median_interval(blocks), median_interval([list(chain.from_iterable(blocks))])
        assert (apart.low, apart.high) == (1.00, 1.07)
        assert apart.low < pooled.low < pooled.high < apart.high

    @pytest.mark.parametrize("count", [400, 5000])
    def test_is_not_much_wider_than_needed(self, count: int) -> None:
        """Independent normal noise: the half width is near 1.96 * 1.2533 * sigma / sqrt(n)."""
        random = np.random.default_rng(5)
        intervals = [median_interval([(1 + 0.05 * random.standard_normal(count)).tolist()]) for _ in range(200)]
        ideal = 1.96 * 1.2533 * 0.05 / math.sqrt(count)
        assert ideal * 0.9 < float(np.mean([interval.half_width for interval in intervals])) < ideal * 1.25

    def test_ranks_are_the_binomial_ones(self) -> None:
        """Ten samples: the second and the ninth bracket the median in 97.9 % of cases, the third and eighth in 89 %."""
        interval = median_interval([[1.0, 10.0, 2.0, 9.0, 3.0, 8.0, 4.0, 7.0, 5.0, 6.0]])
        assert (interval.low, interval.median, interval.high) == (2.0, 5.5, 9.0)
        assert interval.half_width == pytest.approx(3.5 / 5.5)

    def test_needs_six_samples(self) -> None:
        assert median_interval([[1.0, 2.0], [3.0, 4.0, 5.0]]) is None
        assert median_interval([]) is None
        interval = median_interval([[1.0, 2.0, 6.0], [], [3.0, 4.0, 5.0]])
        assert (interval.low, interval.high) == (1.0, 6.0)


class TestAutocorrelationTime:
    def test_is_near_one_for_independent_samples(self) -> None:
        times = [autocorrelation_time(row) for row in np.random.default_rng(7).standard_normal((100, 500))]
        assert 1.0 <= float(np.mean(times)) < 1.25

    def test_is_near_the_truth_for_correlated_ones(self) -> None:
        """The signs of an AR(1) correlate as 2/pi * asin(rho^k)."""
        truth = 1 + 2 * sum(2 / math.pi * math.asin(0.7**lag) for lag in range(1, 60))
        times = [autocorrelation_time(row) for row in correlated(np.random.default_rng(8), 0.7, 2000, 100)]
        assert float(np.mean(times)) == pytest.approx(truth, rel=0.1)


class TestPercentile:
    @pytest.mark.parametrize(("q", "fewest"), [(0.90, 64), (0.95, 130), (0.99, 662), (0.5, 1), (0.10, 64), (0.01, 662)])
    def test_is_told_only_with_enough_samples(self, q: float, fewest: int) -> None:
        assert fewest_for_percentile(q) == fewest
        assert percentile([1.0] * (fewest - 1), q) is None
        assert percentile([1.0] * fewest, q) == 1.0

    def test_the_second_largest_sample_is_a_bound_just_when_the_gate_opens(self) -> None:
        random = np.random.default_rng(9)
        missed = [np.sort(random.random(130))[-2] < 0.95 for _ in range(20_000)]
        assert 0.005 < float(np.mean(missed)) <= 0.0125


def interleaved(random: np.random.Generator, rounds: int, slowdown: float = 0.0, *, randomise: bool = True) -> tuple:
    """Two sessions in turns on one machine that drifts and whose noise is correlated over the blocks."""
    slots = 0.01 * np.cumsum(random.standard_normal(2 * rounds)) + 0.01 * correlated(random, 0.6, 2 * rounds, 1)[0]
    first, other = {}, {}
    for number in range(rounds):
        swapped = bool(random.integers(2)) if randomise else False
        pair = slots[2 * number : 2 * number + 2]
        first[number] = math.exp(pair[int(swapped)])
        other[number] = math.exp(pair[int(not swapped)] + slowdown)
    return first, other


def paired_ratio(first: dict, other: dict) -> Ratio | None:
    return ratio_of(paired_log(first, other))


def alarms(seed: int, rounds: int, slowdown: float = 0.0) -> float:
    """How often the interval excludes 'no difference'."""
    random = np.random.default_rng(seed)
    ratios = [paired_ratio(*interleaved(random, rounds, slowdown)) for _ in range(1500)]
    return float(np.mean([not ratio.low <= 1 <= ratio.high for ratio in ratios]))


class TestPairedRatio:
    @pytest.mark.parametrize("rounds", [5, 8, 20])
    def test_false_alarms_stay_near_five_percent(self, rounds: int) -> None:
        assert 0.02 <= alarms(10, rounds) <= 0.08

    def test_finds_a_true_five_percent(self) -> None:
        assert alarms(11, 8, slowdown=math.log(1.05)) > 0.9

    def test_correlated_ratios_are_widened(self) -> None:
        """With a correlation that pairing did not remove: taken for independent it alarms in over 20 %."""
        random = np.random.default_rng(13)
        count, series = 40, correlated(random, 0.5, 40, 1000)
        ones = dict.fromkeys(range(count), 1.0)
        ratios = [paired_ratio(dict(enumerate(np.exp(row))), ones) for row in series]
        naive = np.abs(series.mean(axis=1)) > student_t(count - 1) * series.std(axis=1, ddof=1) / math.sqrt(count)
        assert float(np.mean(naive)) > 0.2
        assert float(np.mean([not ratio.low <= 1 <= ratio.high for ratio in ratios])) < 0.1

    def test_interval_by_hand(self) -> None:
        """Log-ratios -2, 1, 0, -1, 2 (in hundredths): mean 0, deviation 1.5811, t(4) = 2.7764."""
        first = {number: math.exp(value / 100) for number, value in enumerate((-2, 1, 0, -1, 2))}
        ratio = paired_ratio(first, dict.fromkeys(range(5), 1.0))
        half = 2.7764 * 0.015811 / math.sqrt(5)
        assert math.log(ratio.high) == pytest.approx(half, rel=1e-3)
        assert math.log(ratio.low) == pytest.approx(-half, rel=1e-3)

    def test_only_common_rounds_count_and_five_are_needed(self) -> None:
        first = dict.fromkeys(range(9), 1.0)
        assert paired_ratio(first, dict.fromkeys(range(5, 20), 1.0)) is None
        common = paired_ratio(first, dict.fromkeys(range(4, 20), 1.0))
        assert common.rounds == 5


class TestStudent:
    @pytest.mark.parametrize(
        ("degrees", "confidence", "quantile"),
        [
            (1, 0.95, 12.7062),
            (2, 0.95, 4.3027),
            (3, 0.95, 3.1824),
            (4, 0.95, 2.7764),
            (7, 0.95, 2.3646),
            (30, 0.95, 2.0423),
            (120, 0.95, 1.9799),
            (5, 0.99, 4.0321),
            (8, 0.90, 1.8595),
        ],
    )
    def test_agrees_with_the_printed_tables(self, degrees: int, confidence: float, quantile: float) -> None:
        assert student_t(degrees, confidence) == pytest.approx(quantile, abs=1e-4)
