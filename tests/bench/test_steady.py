"""The steady state is found where it is, on series whose truth is known and in time that is made up."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from statistics import median
from typing import Any

import msgspec
import pytest

from redline.bench.measure.blocks import CPU_MEDIAN_AGREEMENT, MEDIAN_AGREEMENT, reach_steady_state
from redline.model.record import Warmup
from redline.model.spec import MeasureSpec

SPEC = MeasureSpec()
WINDOW = SPEC.warmup_window
TICK = 2.0**-10
"""About a millisecond, in steps that add up without rounding."""


class Bench:
    """Plays a series of step times on a clock of its own, and compiles at the steps that are named."""

    def __init__(self, step_times: Iterable[float], compiles_at: Collection[int] = ()) -> None:
        self._times: Iterator[float] = iter(step_times)
        self._compiles_at = compiles_at
        self.now_s = 1000.0
        self.steps, self.compiled = 0, 99
        self.told: list[str] = []

    def step(self) -> None:
        self.now_s += next(self._times)
        self.steps += 1
        self.compiled += self.steps in self._compiles_at

    def warm_up(self, *, is_accelerator: bool = True, **changes: Any) -> Warmup:
        return reach_steady_state(
            self.step,
            msgspec.structs.replace(SPEC, **changes),
            compilations=lambda: self.compiled,
            is_accelerator=is_accelerator,
            tell=self.told.append,
            clock=lambda: self.now_s,
        )


def level(step_s: float = 0.25) -> Iterator[float]:
    return itertools.repeat(step_s)


def noisy(step_s: float, sigma: float, seed: int) -> Iterator[float]:
    chance = random.Random(seed)
    while True:
        yield step_s * math.exp(chance.gauss(0.0, sigma))


def decaying(step_s: float, excess: float, steps: float) -> Iterator[float]:
    """Starts at 1 + excess times its end, and comes nearer by a factor of e after this many steps."""
    return (step_s * (1 + excess * math.exp(-number / steps)) for number in itertools.count())


def ramp(start_s: float, end_s: float, steps: int) -> Iterator[float]:
    """A straight line from start to end, and level from there on."""
    return (end_s + (start_s - end_s) * max(0.0, 1 - number / steps) for number in itertools.count())


def rising(rate: float, step_s: float = 0.1) -> Iterator[float]:
    return (step_s * (1 + rate) ** number for number in itertools.count())


@pytest.mark.parametrize(
    ("series", "compiles_at", "changes", "steps"),
    [
        (level(), (), {}, 2 * WINDOW),
        ((2.5 if number == 15 else 0.25 for number in itertools.count()), (), {}, 2 * WINDOW),  # a single hiccup
        (level(TICK), (), {}, 1024),  # the least seconds are waited for
        (level(1.0), (), {"warmup_min_steps": 50}, 50),
        (level(), {15}, {}, 15 + 2 * WINDOW),  # a compilation starts the wait anew,
        (level(), {2 * WINDOW}, {}, 4 * WINDOW),  # also in the very step that would have settled it,
        (level(), {3, 4, 19}, {}, 19 + 2 * WINDOW),  # and the last one counts,
        (level(), {3, 4, 30}, {}, 4 + 2 * WINDOW),  # if it comes in time
        (level(), (), {"warmup_max_seconds": 2 * WINDOW * 0.25}, 2 * WINDOW),  # settled in the last moment
    ],
)
def test_a_steady_series_settles_after_this_many_steps(
    series: Iterator[float], compiles_at: Collection[int], changes: dict[str, Any], steps: int
) -> None:
    bench = Bench(series, compiles_at)
    warmup = bench.warm_up(**changes)
    assert warmup.steady
    assert warmup.reason.code == "steady"
    assert len(warmup.samples) == bench.steps == steps
    assert warmup.seconds == pytest.approx(sum(warmup.samples))


@pytest.mark.parametrize(
    ("series", "compiles_at", "steps"),
    [
        (rising(0.02), (), None),
        (level(), range(1, 10_000, WINDOW), None),
        (level(25.0), (), 3),
        (level(100.0), (), 1),
    ],
)
def test_the_cap_ends_a_drift_that_does_not_end_and_says_so(
    series: Iterator[float], compiles_at: Collection[int], steps: int | None
) -> None:
    warmup = Bench(series, compiles_at).warm_up()
    assert not warmup.steady
    assert str(warmup.reason) == "no two windows of steps agreed within 60 s of warm-up"
    assert warmup.seconds - warmup.samples[-1] < 60.0 <= warmup.seconds
    assert steps is None or len(warmup.samples) == steps


@pytest.mark.parametrize(("sigma", "is_accelerator"), [(0.001, True), (0.003, True), (0.01, True), (0.05, False)])
def test_noise_does_not_keep_a_series_from_settling(sigma: float, is_accelerator: bool) -> None:
    lengths = []
    for seed in range(100):
        warmup = Bench(noisy(0.05, sigma, seed)).warm_up(is_accelerator=is_accelerator)
        assert warmup.steady
        lengths.append(len(warmup.samples))
    assert median(lengths) <= 3 * WINDOW
    assert max(lengths) <= 10 * WINDOW


@pytest.mark.parametrize("is_accelerator", [True, False])
@pytest.mark.parametrize(
    "series",
    [*(lambda e=e, s=s: decaying(0.1, e, s) for e in (0.3, 1.0, 20.0) for s in (2, 5, 20)), lambda: ramp(0.3, 0.1, 60), lambda: ramp(0.03, 0.1, 60)],
)  # fmt: skip
def test_a_drift_is_waited_for_until_little_is_left(
    series: Callable[[], Iterator[float]], is_accelerator: bool
) -> None:
    warmup = Bench(series()).warm_up(is_accelerator=is_accelerator)
    assert warmup.steady
    left = median(warmup.samples[-WINDOW:]) / 0.1 - 1
    assert abs(left) <= 2 * (MEDIAN_AGREEMENT if is_accelerator else CPU_MEDIAN_AGREEMENT)


def test_a_drift_under_noise_is_waited_for_as_well() -> None:
    for seed in range(100):
        series = map(lambda a, b: a * b, decaying(0.1, 1.0, 20), noisy(1.0, 0.003, seed))
        assert median(Bench(series).warm_up().samples[-WINDOW:]) <= 0.1 * 1.04


def test_a_start_that_looks_steady_does_not_end_the_wait() -> None:
    """The first real work begins later."""
    assert len(Bench(itertools.chain([TICK] * 500, decaying(TICK, 2.0, 100))).warm_up().samples) > 500


def test_a_spread_that_still_grows_around_the_same_middle_is_waited_for() -> None:
    widening = (1.0 + (-1) ** number * min(0.05 * 1.1**number, 0.8) for number in itertools.count())
    warmup = Bench(widening).warm_up(warmup_max_seconds=1000.0)
    assert warmup.steady
    assert len(warmup.samples) > math.ceil(math.log(0.8 / 0.05, 1.1))


@pytest.mark.parametrize("decay_s", [2.0, 5.0])
def test_short_steps_do_not_hide_a_slow_drift(decay_s: float) -> None:
    """Ten steps of a tenth of a millisecond say nothing about a drift of seconds: windows have a least length too."""
    warmup = Bench(decaying(1e-4, 0.2, decay_s / 1e-4)).warm_up()
    assert warmup.steady
    assert warmup.samples[-1] / 1e-4 - 1 < 0.12


def test_it_tells_once_a_second_how_far_it_is() -> None:
    bench = Bench(level())
    bench.warm_up()
    assert bench.told == [f"{number} steps, {0.25 * number:.0f} s" for number in range(5, 2 * WINDOW + 1, 5)]


@pytest.mark.parametrize(
    ("apart", "on_accelerator", "on_cpu"),
    [(0.005, True, True), (0.03, False, True), (-0.03, False, True), (0.08, False, False)],
)
def test_the_tolerance_of_a_cpu_is_wider_than_that_of_an_accelerator(
    apart: float, on_accelerator: bool, on_cpu: bool
) -> None:
    """A staircase: each window sits this much above the one before, so that no later pair agrees either."""
    for is_accelerator, settles in ((True, on_accelerator), (False, on_cpu)):
        stairs = rising((1 + apart) ** (1 / WINDOW) - 1)
        assert Bench(stairs).warm_up(is_accelerator=is_accelerator, warmup_max_seconds=5.0).steady == settles
