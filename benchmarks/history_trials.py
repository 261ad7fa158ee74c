"""How often a step in a history is told, and how often one is told that is not there, for series whose truth is known.

    python benchmarks/history_trials.py [--runs 200] [--series NAME …] [--points 60]

The rows are kinds of noise; the columns are steps in the middle of the series. A cell is the share of runs in which a change was told near
the step (in the column "none": in which any change was told, a false alarm). Below them are shapes with two steps, where both must be
told, and no third.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from redline.analyze.history import trend_of

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Floats]
SLACK = 3
"""Records that a change may be told too early or too late."""
DAY_S = 86400.0


def correlated(rho: float) -> Noise:
    """Each record follows the one before it."""

    def make(chance: np.random.Generator, count: int) -> Floats:
        found = chance.normal(0, 0.005, count)
        for index in range(1, count):
            found[index] = rho * found[index - 1] + np.sqrt(1 - rho**2) * found[index]
        return found

    return make


def outliers(first: float, then: float) -> Noise:
    """Some records are 20 % slower; how many changes half way."""

    def make(chance: np.random.Generator, count: int) -> Floats:
        share = np.where(np.arange(count) < count // 2, first, then)
        return chance.normal(0, 0.005, count) + np.where(chance.random(count) < share, np.log(1.2), 0.0)

    return make


def growing(chance: np.random.Generator, count: int) -> Floats:
    return chance.normal(0, 1, count) * np.where(np.arange(count) < count // 2, 0.003, 0.01)


NOISES: dict[str, Noise] = {
    "0.5 %": lambda chance, count: chance.normal(0, 0.005, count),
    "1 %": lambda chance, count: chance.normal(0, 0.01, count),
    "heavy tails": lambda chance, count: 0.005 * chance.standard_t(2.5, count),
    "skewed": lambda chance, count: 0.007 * (chance.exponential(1, count) - 1),
    "two modes": lambda chance, count: chance.normal(0, 0.004, count) + np.where(chance.random(count) < 0.5, 0.02, 0.0),
    "correlated 0.3": correlated(0.3),
    "correlated 0.6": correlated(0.6),
    "outliers 5 %": outliers(0.05, 0.05),
    "outliers 2 → 15 %": outliers(0.02, 0.15),
    "spread grows": growing,
    "drift 4 %": lambda chance, count: chance.normal(0, 0.005, count) + np.linspace(0, 0.04, count),
    "waves": lambda chance, count: chance.normal(0, 0.005, count) + 0.005 * np.sin(np.arange(count) / 4),
    "rounded clock": lambda chance, count: np.round(chance.normal(0, 0.005, count), 2),
}
TWO_STEPS: dict[str, tuple[float, float, float]] = {
    "taken back": (0.35, 0.65, -0.05),
    "taken back soon": (0.45, 0.6, -0.05),
    "another step": (0.35, 0.65, 0.05),
    "another soon": (0.45, 0.6, 0.05),
}
"""Where the first step of 5 % and the second are, as shares of the series, and the second."""


def changes(logs: Floats, moments: Sequence[float] | None = None) -> list[int]:
    return [each.index for each in trend_of(np.exp(logs).tolist(), moments).changes]


def are_told(found: Sequence[int], steps: Sequence[int]) -> bool:
    return all(any(abs(index - step) <= SLACK for index in found) for step in steps)


def share(noise: Noise, step: float, points: int, runs: int) -> float:
    told = 0
    for seed in range(runs):
        chance = np.random.default_rng([seed, points])
        logs, at = noise(chance, points), points // 2
        logs = logs + np.where(np.arange(points) >= at, np.log1p(step), 0.0)
        # One record a day, as CI makes them, two of them at the same moment.
        moments = [DAY_S * (index - (index == 7)) for index in range(points)]
        found = changes(logs, moments)
        told += are_told(found, [at]) if step else bool(found)
    return told / runs


def both(first: float, second: float, size: float, points: int, runs: int) -> float:
    told = 0
    for seed in range(runs):
        chance, steps = np.random.default_rng([seed, 7]), [round(first * points), round(second * points)]
        logs = chance.normal(0, 0.005, points)
        for at, height in zip(steps, (0.05, size), strict=True):
            logs += np.where(np.arange(points) >= at, np.log1p(height), 0.0)
        found = changes(logs)
        told += are_told(found, steps) and len(found) == 2
    return told / runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--points", type=int, default=60)
    parser.add_argument("--series", action="append", choices=[*NOISES], help="only these")
    arguments = parser.parse_args()
    steps = (0.0, 0.02, 0.05, -0.05)
    print(f"{arguments.points} records, {arguments.runs} runs each")
    print(f"{'':<20}" + "".join(f"{'none' if not step else f'{step:+.0%}':>9}" for step in steps))
    for name in arguments.series or NOISES:
        cells = [share(NOISES[name], step, arguments.points, arguments.runs) for step in steps]
        print(f"{name:<20}" + "".join(f"{cell:>9.1%}" for cell in cells), flush=True)
    for name, (first, second, size) in () if arguments.series else TWO_STEPS.items():
        print(f"{name:<20}{both(first, second, size, arguments.points, arguments.runs):>9.1%}", flush=True)


if __name__ == "__main__":
    main()
