"""The steady state is found where it is, on series whose truth is known and in time that is made up."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from statistics import median

import msgspec
import pytest

from redline.bench.measure.blocks import CPU_MEDIAN_AGREEMENT, MEDIAN_AGREEMENT, reach_steady_state, windows_agree
from redline.model.record import Warmup
from redline.model.spec import MeasureSpec

SPEC = MeasureSpec()
WINDOW = SPEC.warmup_window
TICK = 2.0**-10
"""About a millisecond, in steps that add up without rounding."""


class Bench:
    """Plays a series of step times on a clock of its own, and compiles where it is told to."""

    def __init__(self, step_times: Iterable[float], compiles_at: Collection[int] = ()) -> None:
        self._times: Iterator[float] = iter(step_times)
        self._compiles_at = compiles_at
        self.now_s = 1000.0
        self.steps = 0
        self.compiled = 7
        self.told: list[str] = []

    def step(self) -> None:
        self.now_s += next(self._times)
        self.steps += 1
        self.compiled += self.steps in self._compiles_at

    def warm_up(self, spec: MeasureSpec = SPEC, *, is_accelerator: bool = True) -> Warmup:
        return reach_steady_state(
            self.step,
            spec,
            compilations=lambda: self.compiled,
            is_accelerator=is_accelerator,
            tell=self.told.append,
            clock=lambda: self.now_s,
        )


def steady_noise(step_s: float, sigma: float, seed: int) -> Iterator[float]:
    chance = random.Random(seed)
    while True:
        yield step_s * math.exp(chance.gauss(0.0, sigma))


def decaying(step_s: float, excess: float, steps: float) -> Iterator[float]:
    """Starts at 1 + excess times its end, and comes nearer by a factor of e every so many steps."""
    return (step_s * (1 + excess * math.exp(-number / steps)) for number in itertools.count())


def ramp(start_s: float, end_s: float, steps: int) -> Iterator[float]:
    """A straight line from start to end, and level from there on."""
    return (end_s + (start_s - end_s) * max(0.0, 1 - number / steps) for number in itertools.count())


class TestASteadySeries:
    def test_settles_as_soon_as_two_windows_are_full(self) -> None:
        warmup = Bench(itertools.repeat(0.25)).warm_up()
        assert warmup.steady
        assert warmup.reason.code == "steady"
        assert len(warmup.samples) == 2 * WINDOW
        assert warmup.seconds == 2 * WINDOW * 0.25

    @pytest.mark.parametrize("sigma", [0.001, 0.003, 0.01])
    def test_settles_soon_whatever_its_noise_of_a_percent(self, sigma: float) -> None:
        lengths = []
        for seed in range(100):
            warmup = Bench(steady_noise(0.05, sigma, seed)).warm_up()
            assert warmup.steady
            lengths.append(len(warmup.samples))
        assert median(lengths) <= 3 * WINDOW
        assert max(lengths) <= 10 * WINDOW

    def test_settles_on_a_shared_cpu_with_its_noise(self) -> None:
        for seed in range(100):
            warmup = Bench(steady_noise(0.05, 0.05, seed)).warm_up(is_accelerator=False)
            assert warmup.steady
            assert len(warmup.samples) <= 10 * WINDOW

    def test_is_not_put_off_by_a_single_hiccup(self) -> None:
        hiccup = (2.5 if number == 15 else 0.25 for number in itertools.count())
        assert len(Bench(hiccup).warm_up().samples) == 2 * WINDOW

    def test_keeps_every_sample_it_took(self) -> None:
        times = [0.25 + TICK * number for number in range(4)] + [0.25] * 100
        bench = Bench(times)
        warmup = bench.warm_up()
        assert list(warmup.samples) == times[: bench.steps]
        assert warmup.seconds == sum(warmup.samples)

    def test_tells_how_far_it_is_at_every_step(self) -> None:
        bench = Bench(itertools.repeat(0.25))
        bench.warm_up()
        assert bench.told == [f"{number} steps, {0.25 * number:.0f} s" for number in range(5, 2 * WINDOW + 1, 5)]


class TestADriftingSeries:
    @pytest.mark.parametrize("is_accelerator", [True, False])
    @pytest.mark.parametrize("excess", [0.3, 1.0, 20.0])
    @pytest.mark.parametrize("steps", [2, 5, 20])
    def test_that_decays_is_waited_for_until_little_is_left(
        self, steps: int, excess: float, is_accelerator: bool
    ) -> None:
        warmup = Bench(decaying(0.1, excess, steps)).warm_up(is_accelerator=is_accelerator)
        assert warmup.steady
        left = median(warmup.samples[-WINDOW:]) / 0.1 - 1
        assert left <= 2 * (MEDIAN_AGREEMENT if is_accelerator else CPU_MEDIAN_AGREEMENT)

    @pytest.mark.parametrize("is_accelerator", [True, False])
    @pytest.mark.parametrize(("start_s", "end_s"), [(0.3, 0.1), (0.1, 0.3)])
    def test_on_a_straight_line_is_waited_for_to_its_end(
        self, start_s: float, end_s: float, is_accelerator: bool
    ) -> None:
        steps = 60
        warmup = Bench(ramp(start_s, end_s, steps)).warm_up(is_accelerator=is_accelerator)
        assert warmup.steady
        assert steps < len(warmup.samples) <= steps + 2 * WINDOW
        assert median(warmup.samples[-WINDOW:]) == pytest.approx(end_s, rel=0.05)

    def test_with_noise_on_top_is_waited_for_as_well(self) -> None:
        early = 0
        for seed in range(100):
            noise = steady_noise(1.0, 0.003, seed)
            warmup = Bench(map(lambda a, b: a * b, decaying(0.1, 1.0, 20), noise)).warm_up()
            early += median(warmup.samples[-WINDOW:]) > 0.1 * 1.04
        assert early == 0

    def test_is_waited_for_where_only_its_spread_still_changes(self) -> None:
        """The same middle, wider and wider: something is still going on."""

        def widening() -> Iterator[float]:
            for number in itertools.count():
                yield 1.0 + (-1) ** number * min(0.05 * 1.1**number, 0.8)

        warmup = Bench(widening()).warm_up(msgspec.structs.replace(SPEC, warmup_max_seconds=1000.0))
        level_after = math.ceil(math.log(0.8 / 0.05, 1.1))
        assert warmup.steady
        assert len(warmup.samples) > level_after


class TestARecompilation:
    def test_starts_the_wait_anew(self) -> None:
        warmup = Bench(itertools.repeat(0.25), compiles_at={15}).warm_up()
        assert warmup.steady
        assert len(warmup.samples) == 15 + 2 * WINDOW

    def test_in_the_very_step_that_would_have_settled_it_counts(self) -> None:
        warmup = Bench(itertools.repeat(0.25), compiles_at={2 * WINDOW}).warm_up()
        assert len(warmup.samples) == 4 * WINDOW

    def test_is_counted_from_the_last(self) -> None:
        assert len(Bench(itertools.repeat(0.25), compiles_at={3, 4, 30}).warm_up().samples) == 4 + 2 * WINDOW
        assert len(Bench(itertools.repeat(0.25), compiles_at={3, 4, 19}).warm_up().samples) == 19 + 2 * WINDOW

    def test_of_before_does_not_matter(self) -> None:
        bench = Bench(itertools.repeat(0.25))
        bench.compiled = 99
        assert len(bench.warm_up().samples) == 2 * WINDOW

    def test_again_and_again_never_settles(self) -> None:
        warmup = Bench(itertools.repeat(0.25), compiles_at=range(1, 10_000, WINDOW)).warm_up()
        assert not warmup.steady


class TestTheCap:
    def endless(self, rate: float = 0.02) -> Iterator[float]:
        return (0.1 * (1 + rate) ** number for number in itertools.count())

    def test_ends_a_drift_that_does_not_end_and_says_so(self) -> None:
        spec = msgspec.structs.replace(SPEC, warmup_max_seconds=30.0)
        warmup = Bench(self.endless()).warm_up(spec)
        assert not warmup.steady
        assert str(warmup.reason) == "no two windows of steps agreed within 30 s of warm-up"
        assert warmup.seconds >= 30.0
        assert warmup.seconds - warmup.samples[-1] < 30.0
        assert sum(warmup.samples) == pytest.approx(warmup.seconds)

    def test_ends_a_step_too_long_to_be_looked_at_twenty_times(self) -> None:
        warmup = Bench(itertools.repeat(25.0)).warm_up()
        assert not warmup.steady
        assert len(warmup.samples) == 3

    def test_lets_at_least_one_step_happen(self) -> None:
        warmup = Bench(itertools.repeat(100.0)).warm_up()
        assert warmup.samples == (100.0,)

    def test_does_not_hide_that_it_settled_in_the_last_moment(self) -> None:
        spec = msgspec.structs.replace(SPEC, warmup_max_seconds=2 * WINDOW * 0.25)
        assert Bench(itertools.repeat(0.25)).warm_up(spec).steady


class TestTheLeast:
    def test_seconds_are_waited_for_however_many_steps_that_are(self) -> None:
        warmup = Bench(itertools.repeat(TICK)).warm_up()
        assert warmup.steady
        assert warmup.seconds == SPEC.warmup_min_seconds
        assert len(warmup.samples) == 1024

    def test_steps_are_waited_for_however_long_they_take(self) -> None:
        spec = msgspec.structs.replace(SPEC, warmup_min_steps=50)
        assert len(Bench(itertools.repeat(1.0)).warm_up(spec).samples) == 50

    def test_is_looked_at_only_after_both(self) -> None:
        """The start may look steady before the first real work begins."""
        settled_early = itertools.chain([TICK] * 500, decaying(TICK, 2.0, 100))
        warmup = Bench(settled_early).warm_up()
        assert len(warmup.samples) > 500


class TestTolerance:
    @staticmethod
    def windows(median_apart: float) -> Callable[[float, float], bool]:
        samples = [1.0] * WINDOW + [1.0 + median_apart] * WINDOW
        return lambda median_share, quartile_share: windows_agree(samples, WINDOW, median_share, quartile_share)

    @pytest.mark.parametrize(
        ("apart", "on_accelerator", "on_cpu"),
        [(0.005, True, True), (0.03, False, True), (-0.03, False, True), (0.08, False, False)],
    )
    def test_of_a_cpu_is_wider_than_that_of_an_accelerator(
        self, apart: float, on_accelerator: bool, on_cpu: bool
    ) -> None:
        """A staircase: each window sits so much above the one before, so that no later pair agrees either."""
        for is_accelerator, settles in ((True, on_accelerator), (False, on_cpu)):
            stairs = (0.1 * (1 + apart) ** (number / WINDOW) for number in itertools.count())
            spec = msgspec.structs.replace(SPEC, warmup_max_seconds=5.0)
            assert Bench(stairs).warm_up(spec, is_accelerator=is_accelerator).steady == settles

    def test_is_for_medians_and_quartiles_apart(self) -> None:
        assert self.windows(0.009)(0.01, 0.05)
        assert not self.windows(0.02)(0.01, 0.05)
        assert not self.windows(0.02)(0.05, 0.01)
        assert self.windows(0.02)(0.05, 0.05)

    def test_sees_a_window_that_grew_wide_around_the_same_middle(self) -> None:
        narrow, wide = [1.0] * 10, [0.8, 0.8, 0.8, 0.8, 1.0, 1.0, 1.2, 1.2, 1.2, 1.2]
        assert median(narrow) == median(wide)
        assert not windows_agree(narrow + wide, 10, 0.01, 0.05)
        assert windows_agree(wide + wide, 10, 0.01, 0.05)

    def test_looks_at_the_last_two_windows_only(self) -> None:
        assert windows_agree([9.0] * 5 + [1.0] * 20, 10, 0.01, 0.05)

    def test_is_not_applied_to_half_a_window(self) -> None:
        assert not windows_agree([1.0] * 19, 10, 0.01, 0.05)
        assert windows_agree([1.0] * 20, 10, 0.01, 0.05)


class TestShortSteps:
    """Ten steps of a tenth of a millisecond say nothing about a drift of seconds: windows have a least length too."""

    @pytest.mark.parametrize("decay_s", [2.0, 5.0])
    def test_do_not_hide_a_slow_drift(self, decay_s: float) -> None:
        step_s, excess = 1e-4, 0.2
        bench = Bench(step_s * (1 + excess * math.exp(-number * step_s / decay_s)) for number in itertools.count())
        warmup = bench.warm_up()
        assert warmup.steady
        left = warmup.samples[-1] / step_s - 1
        assert left < 0.12
