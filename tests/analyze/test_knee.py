"""The saturation curve against a known one, and a ceiling of a percentile that holds as often as it says."""

from __future__ import annotations

import math

import numpy as np
import pytest

from redline.analyze.batch import saturation
from redline.analyze.statistics import autocorrelation_time, percentile_ceiling


def points(fixed_s: float, item_s: float, batches: tuple[int, ...], noise: float = 0.0) -> list[tuple[int, float]]:
    random = np.random.default_rng(1)
    return [(batch, (fixed_s + item_s * batch) * math.exp(noise * random.standard_normal())) for batch in batches]


class TestSaturation:
    def test_is_found_again(self) -> None:
        curve = saturation(points(0.004, 2e-4, (1, 8, 64, 300)))
        assert (curve.fixed_s, curve.per_item_s) == pytest.approx((0.004, 2e-4))
        assert curve.knee() == pytest.approx(180)
        assert curve.knee(0.5) == pytest.approx(20)
        assert curve.limit_per_s == pytest.approx(5000)
        assert curve.misfit < 1e-9

    def test_noise_moves_it_little(self) -> None:
        curve = saturation(points(0.004, 2e-4, (1, 8, 20, 64, 300), noise=0.01))
        assert curve.knee() == pytest.approx(180, rel=0.1)

    def test_small_batches_that_follow_another_law_are_left_out(self) -> None:
        """ResNet-50 in fp16 with graphs on an H200: a line through all five puts the limit 8 % over what 256 nears."""
        measured = {1: 0.867e-3, 4: 0.968e-3, 16: 1.481e-3, 64: 4.149e-3, 256: 15.183e-3}
        curve = saturation(list(measured.items()))
        assert curve.limit_per_s == pytest.approx(192 / (measured[256] - measured[64]), rel=0.02)
        assert curve.misfit < 0.05
        assert 64 < curve.knee() < 100

    def test_the_host_moves_the_knee_outwards_only(self) -> None:
        curve = saturation(points(0.004, 2e-4, (1, 8, 64, 300)))
        assert curve.knee(host_s=0.010) == pytest.approx(180)
        assert curve.knee(host_s=0.080) == pytest.approx(360)

    def test_no_fixed_part_means_a_knee_at_one(self) -> None:
        curve = saturation([(1, 0.9e-3), (10, 10e-3)])
        assert curve.fixed_s == 0
        assert curve.knee() == 1


class TestPercentileCeiling:
    @pytest.mark.parametrize(
        ("count", "q", "deviations"),
        [(60, 0.95, 1.6449), (130, 0.95, 1.6449), (400, 0.95, 1.6449), (130, 0.9, 1.2816), (130, 0.5, 0.0)],
    )
    def test_holds_as_often_as_it_says(self, count: int, q: float, deviations: float) -> None:
        random = np.random.default_rng(count)
        truth = math.exp(0.1 * deviations)
        ceilings = [percentile_ceiling([random.lognormal(0, 0.1, count)], q) for _ in range(1000)]
        too_low = sum(ceiling < truth for ceiling in ceilings if ceiling is not None)
        assert too_low <= 0.05 * len(ceilings) + 15

    def test_needs_fifty_nine_samples_for_p95(self) -> None:
        samples = [float(number) for number in np.random.default_rng(0).permutation(58)]
        assert percentile_ceiling([samples], 0.95) is None
        assert percentile_ceiling([[*samples, 58.0]], 0.95) is not None
        assert percentile_ceiling([], 0.95) is None

    def test_hiccups_that_come_in_rows_count_for_fewer(self) -> None:
        """A neighbour that slows a tenth of the time, in stretches: few stretches were seen, however many samples."""
        random = np.random.default_rng(0)
        slow = np.repeat(random.random(40) < 0.1, 25)
        samples = np.where(slow, 2.0, 1.0) * random.lognormal(0, 0.01, 1000)
        assert autocorrelation_time(samples, 0.95) > 5
        in_rows = percentile_ceiling([samples.tolist()], 0.95)
        shuffled = percentile_ceiling([random.permutation(samples).tolist()], 0.95)
        assert in_rows > shuffled
