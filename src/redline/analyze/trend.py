"""A benchmark over time: at which record did it change, by how much, and how sure is that?

A *change* is abrupt: the records right before and right after it differ by most of the difference between the stretches
on both sides. What changes little by little is *drift*, and is reported as such. A change is looked for by the split that
explains most; whether that is more than chance is tested on the same records in random orders. That assumes nothing about
how they are distributed: two modes of processes, or outliers, then count as chance too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import fmean, median, variance

import numpy as np
from numpy.typing import NDArray

from redline.analyze.gate import without_outliers
from redline.analyze.statistics import student_t
from redline.spec import Frozen

FEWEST_A_SIDE = 5
"""Records before and after a change: with fewer, one session may be the cause."""
SHUFFLES = 399
HOPELESS = 9.0
"""A square of Student's t that the best of many splits exceeds by chance: not worth the shuffles."""
REACH = 3
"""Neighbours on each side that a single record is set against."""
CHANCE = 0.005
"""Of a split as good as this in records without any change."""
SMALLEST_CHANGE = 0.01
"""Of the time: smaller ones do not matter, however sure."""
ABRUPT = 0.6
"""Share of a change that its nearest records must show."""
NEAR = 10
STANDS_OUT = 2.5
"""This many times the usual difference between neighbouring records."""
MOST_POINTS = 5000
"""How many of the latest records of a series are analysed."""
DRIFT_CONFIDENCE = 0.99

Floats = NDArray[np.float64]


class Change(Frozen):
    """An abrupt one. `ratio` is time before over time after: below 1 it got slower."""

    index: int
    """Of the first record after it."""
    ratio: float
    low: float
    high: float


class Drift(Frozen):
    """Little by little, from the first record to the last. `ratio` as in a change."""

    ratio: float
    low: float
    high: float


class Trend(Frozen):
    changes: tuple[Change, ...] = ()
    drift: Drift | None = None


def trend_of(seconds: Sequence[float], *, seed: int = 0) -> Trend:
    """Changes and drift of times in the order in which they were measured."""
    start = max(0, len(seconds) - MOST_POINTS)
    logs = np.log(np.asarray(seconds[start:], dtype=np.float64))
    random = np.random.default_rng(seed)
    splits = sorted(_splits(logs, 0, random))
    bounds = [0, *splits, logs.size]
    changes = []
    for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        low, middle, high = _apart(logs[before:at], logs[at:after])
        if abs(middle) >= SMALLEST_CHANGE:
            changes.append(Change(index=start + at, ratio=math.exp(middle), low=math.exp(low), high=math.exp(high)))
    return Trend(changes=tuple(changes), drift=_drift(logs, bounds))


def _splits(logs: Floats, offset: int, random: np.random.Generator) -> list[int]:
    """Where the stretch falls apart, and where its parts do."""
    if logs.size < 2 * FEWEST_A_SIDE:
        return []
    clean = _settled(logs)
    at, best = _best_split(clean)
    if best * (clean.size - 2) < HOPELESS:
        return []
    shuffled = random.permuted(np.tile(clean, (SHUFFLES, 1)), axis=1)
    by_chance = np.count_nonzero(_scores(shuffled).max(axis=1) >= best)
    if by_chance > CHANCE * SHUFFLES or not _is_abrupt(clean, at):
        return []
    return [
        offset + at,
        *_splits(logs[:at], offset, random),
        *_splits(logs[at:], offset + at, random),
    ]


def _settled(logs: Floats) -> Floats:
    """With single outliers drawn to their neighbours: what lasts for one record is no change.

    An outlier lies apart from those before it and from those after it; at a change a record is like one of the two.
    """
    scatter = 1.4826 * median(np.abs(np.diff(logs)).tolist()) / math.sqrt(2)
    padded, count = np.pad(logs, REACH, mode="edge"), logs.size
    # Sorted for the middle one: numpy's median loads a part of numpy that is used for nothing else here.
    before, after = (
        np.sort([padded[offset : offset + count] for offset in range(start, start + REACH)], axis=0)[REACH // 2]
        for start in (0, REACH + 1)
    )
    nearer = np.where(np.abs(logs - before) < np.abs(logs - after), before, after)
    return np.where(np.abs(logs - nearer) > max(5 * scatter, 0.01), nearer, logs)


def _scores(rows: Floats) -> Floats:
    """Of each possible split of each row: the sum of squares that it explains, over what is left."""
    count = rows.shape[1]
    sizes = np.arange(FEWEST_A_SIDE, count - FEWEST_A_SIDE + 1)
    sums = np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1)[:, sizes - 1]
    whole = np.square(rows - rows.mean(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
    explained = sums**2 * count / (sizes * (count - sizes))
    left: Floats = explained / np.maximum(whole - explained, 1e-12)
    return left


def _best_split(logs: Floats) -> tuple[int, float]:
    scores = _scores(logs[None, :])[0]
    index = int(scores.argmax())
    return FEWEST_A_SIDE + index, float(scores[index])


def _is_abrupt(logs: Floats, at: int) -> bool:
    """Whether its neighbours are as far apart as all on both sides, and rather a change than a slope or a walk."""
    whole, nearest = float(logs[at:].mean() - logs[:at].mean()), _jump(logs, at)
    if whole * nearest <= 0 or abs(nearest) < ABRUPT * abs(whole):
        return False
    elsewhere = [abs(_jump(logs, index)) for index in range(NEAR, logs.size - NEAR) if abs(index - at) >= NEAR]
    if elsewhere and abs(nearest) < STANDS_OUT * median(elsewhere):
        return False  # the pace changes as much elsewhere
    times, level = np.arange(logs.size) - (logs.size - 1) / 2, logs - logs.mean()
    sloped = level - times * float((times * level).sum()) / float(np.square(times).sum())
    stepped = np.concatenate((logs[:at] - logs[:at].mean(), logs[at:] - logs[at:].mean()))
    return float(np.square(stepped).sum()) < float(np.square(sloped).sum())


def _jump(logs: Floats, at: int) -> float:
    return float(logs[at : at + NEAR].mean() - logs[max(0, at - NEAR) : at].mean())


def _apart(before: Floats, after: Floats) -> tuple[float, float, float]:
    """Low, middle and high of the logarithm of time before over time after; Welch's interval without outliers."""
    sides = [without_outliers(side.tolist()) for side in (before, after)]
    errors = [variance(side) / len(side) for side in sides]
    degrees = min(len(side) for side in sides) - 1
    if sum(errors) > 0:
        shares = sum(each**2 / (len(side) - 1) for each, side in zip(errors, sides, strict=True))
        degrees = max(degrees, math.floor(sum(errors) ** 2 / shares))
    middle = fmean(sides[0]) - fmean(sides[1])
    half = student_t(degrees) * math.sqrt(sum(errors))
    return middle - half, middle, middle + half


def _drift(logs: Floats, bounds: Sequence[int]) -> Drift | None:
    """The slope that is left when the changes are taken out: by medians of pairs, reported where it is certain and matters."""
    if logs.size < 4 * FEWEST_A_SIDE:
        return None
    level = np.concatenate([logs[a:b] - logs[a:b].mean() for a, b in itertools.pairwise(bounds)])
    times = np.concatenate([np.arange(b - a) - (b - a - 1) / 2 for a, b in itertools.pairwise(bounds)])
    clean = _settled(level)
    spread = float(np.square(times).sum())
    slope = float((times * clean).sum()) / spread
    left = clean - slope * times
    degrees = clean.size - len(bounds)
    # What follows itself says less: the error is that of the batches' means.
    inflation = max(1.0, _inflation(left))
    error = math.sqrt(float(np.square(left).sum()) / degrees / spread * inflation)
    half = student_t(degrees, DRIFT_CONFIDENCE) * error
    whole = slope * (logs.size - 1)
    if abs(slope) <= half or abs(whole) < SMALLEST_CHANGE:
        return None
    reach = half * (logs.size - 1)
    return Drift(ratio=math.exp(-whole), low=math.exp(-whole - reach), high=math.exp(-whole + reach))


def _inflation(left: Floats) -> float:
    """By how much the correlation of neighbours inflates a variance."""
    energy = float(np.square(left).sum())
    correlation = float((left[1:] * left[:-1]).sum()) / energy if energy > 0 else 0.0
    correlation = min(max(correlation, 0.0), 0.95)
    return (1 + correlation) / (1 - correlation)


SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(seconds: Sequence[float], width: int = 24) -> str:
    """The speed over time, higher is faster: medians of equally many records each."""
    if not seconds:
        return ""
    count = min(width, len(seconds))
    edges = [round(index * len(seconds) / count) for index in range(count + 1)]
    speeds = [1 / median(seconds[a:b]) for a, b in itertools.pairwise(edges)]
    low, high = min(speeds), max(speeds)
    if high / low < 1 + SMALLEST_CHANGE:
        return SPARKS[len(SPARKS) // 2] * count
    return "".join(SPARKS[min(int((each - low) / (high - low) * len(SPARKS)), len(SPARKS) - 1)] for each in speeds)
