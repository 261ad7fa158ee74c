"""A benchmark over time: at which record did it change, by how much, and how sure is that?

A *change* is abrupt: the records right before and right after it differ by most of the difference between the stretches
on both sides. What changes little by little is *drift*, and is reported as such. A change is looked for by the split that
explains most; whether that is more than chance is tested on the same records in random orders. That assumes nothing about
how they are distributed: two modes of processes, or outliers, then count as chance too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from statistics import fmean, median, variance

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.analyze.gate import FAR_OUT, NEW_SESSION_S, without_outliers
from redline.analyze.statistics import student_t
from redline.model.fields import Frozen

FEWEST_A_SIDE = 5
"""Records before and after a change: with fewer, one session may be the cause."""
SHUFFLES = 399
HOPELESS = 9.0
"""A square of Student's t that the best of many splits exceeds by chance: not worth the shuffles."""
HOPELESS_OF_TWO = 15.0
"""The same of intervals, of which there are many more."""
REACH = 3
"""Neighbours on each side that a single record is set against."""
CHANCE = 0.005
"""The chance of a split as good as this in records without any change."""
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
SLOPE_CONFIDENCE = 0.999
"""The confidence required of a slope that changes are seen against."""
BESIDE_SLOPE = 5.0
SURE = 0.999
"""That the stretches on both sides of a change differ: the best of many splits is always better than most."""
MOST_EDGES = 60
PARTS = 4
FEWEST_FOR_OUTLIERS = 24

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


def trend_of(seconds: Sequence[float], moments: Sequence[float] | None = None, *, seed: int = 0) -> Trend:
    """Changes and drift of times in the order in which they were measured.

    With the moments of measuring, records of one session count together: a session has clocks and neighbours of its
    own, and what differs between sessions is no change of the code.
    """
    start = max(0, len(seconds) - MOST_POINTS)
    logs = np.log(np.asarray(seconds[start:], dtype=np.float64))
    starts = _session_starts(None if moments is None else np.asarray(moments[start:], dtype=np.float64), logs.size)
    if len(starts) < logs.size:
        return _of_sessions(logs, starts, start, seed)
    bounds = _bounds(logs, np.random.default_rng(seed))
    return Trend(changes=tuple(_changes(logs, bounds, start)), drift=_drift(logs, bounds))


def _session_starts(moments: Floats | None, count: int) -> list[int]:
    """The first record of each session."""
    if moments is None or not count:
        return list(range(count))
    return [0, *(np.flatnonzero(np.diff(moments) > NEW_SESSION_S) + 1).tolist()]


def _of_sessions(logs: Floats, starts: Sequence[int], start: int, seed: int) -> Trend:
    """With few sessions: changes inside of one, and those that are larger than sessions differ by."""
    random, edges = np.random.default_rng(seed), [*starts, logs.size]
    if len(starts) >= 2 * FEWEST_A_SIDE:
        means = np.array([median(logs[a:b].tolist()) for a, b in itertools.pairwise(edges)])
        bounds = _bounds(means, random)
        changes = [
            msgspec.structs.replace(each, index=start + starts[each.index]) for each in _changes(means, bounds, 0)
        ]
        return Trend(changes=tuple(changes), drift=_drift(means, bounds))
    bounds = _bounds(logs, random)
    between = [bound for bound in bounds[1:-1] if any(abs(bound - each) <= 1 for each in starts)]
    small = {each for each in between if abs(_jump(logs, each)) < FAR_OUT}
    bounds = [bound for bound in bounds if bound not in small]
    return Trend(changes=tuple(_changes(logs, bounds, start)), drift=_drift(logs, bounds) if len(starts) == 1 else None)


def _changes(logs: Floats, bounds: Sequence[int], start: int) -> Iterator[Change]:
    for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        low, middle, high = _apart(logs[before:at], logs[at:after])
        if abs(middle) >= SMALLEST_CHANGE:
            yield Change(index=start + at, ratio=math.exp(middle), low=math.exp(low), high=math.exp(high))


def _bounds(logs: Floats, random: np.random.Generator) -> list[int]:
    """Where stretches of one level begin, and the end: first what splits better than chance, less what is no abrupt change."""
    bounds = [0, *sorted(_splits(logs, 0, random)), logs.size]
    clean = _settled(logs[None, :])[0]
    for index in range(1, len(bounds) - 1):
        before, after = bounds[index - 1], bounds[index + 1]
        bounds[index] = before + _best_split(clean[before:after])[0]
    while len(bounds) > 2:
        level, slope_error = _without_slope(clean, bounds)
        strengths = {each: _strength(level, bounds, each, slope_error) for each in range(1, len(bounds) - 1)}
        doubtful = [
            each
            for each, strength in strengths.items()
            if strength < _needed(bounds, each, slope_error) or not _is_placed(level, bounds, each)
        ]
        if not doubtful:
            break
        del bounds[min(doubtful, key=lambda each: strengths[each])]
    return [0, logs.size] if len(bounds) > 3 and _is_rather_a_line(clean, bounds) else bounds


def _is_rather_a_line(logs: Floats, bounds: Sequence[int]) -> bool:
    """Whether one straight line explains as much as several levels, for what they cost: drift can be cut into a staircase.

    By Schwarz's criterion; a level counts for where it begins and its height, and levels may have a slope in common.
    """
    parts = [_drawn_in(logs[a:b]) for a, b in itertools.pairwise(bounds)]
    drawn, level = np.concatenate(parts), np.concatenate([part - part.mean() for part in parts])
    times = np.concatenate([np.arange(part.size) - (part.size - 1) / 2 for part in parts])
    whole = np.arange(drawn.size) - (drawn.size - 1) / 2
    left = [
        np.square(values - at * float((at * values).sum()) / float(np.square(at).sum())).sum()
        for values, at in ((drawn - drawn.mean(), whole), (level, times))
    ]
    return drawn.size * math.log(max(left[0], 1e-12) / max(left[1], 1e-12)) < 2 * (len(parts) - 1) * math.log(
        drawn.size
    )


def _splits(logs: Floats, offset: int, random: np.random.Generator) -> list[int]:
    """Where the stretch falls apart, and where its parts do, more clearly than by chance."""
    if logs.size < 2 * FEWEST_A_SIDE:
        return []
    clean = _settled(logs[None, :])[0]
    at, best = _best_split(clean)
    (first, end), best_of_two = _best_interval(clean)
    if best * (logs.size - 2) < HOPELESS and best_of_two * (logs.size - 2) < HOPELESS_OF_TWO:
        return []
    shuffled = _settled(random.permuted(np.tile(logs, (SHUFFLES, 1)), axis=1))
    if np.count_nonzero(_split_scores(shuffled).max(axis=1) >= best) <= CHANCE * SHUFFLES:
        edges = [0, at, logs.size]
    elif np.count_nonzero(_interval_scores(shuffled)[1].max(axis=1) >= best_of_two) <= CHANCE * SHUFFLES:
        edges = [0, *(edge for edge in (first, end) if 0 < edge < logs.size), logs.size]
    else:
        return []
    inner = [split for a, b in itertools.pairwise(edges) for split in _splits(logs[a:b], offset + a, random)]
    return [*(offset + edge for edge in edges[1:-1]), *inner]


def _without_slope(logs: Floats, bounds: Sequence[int]) -> tuple[Floats, float]:
    """Less the slope that all stretches share, where there surely is one, and its standard error: that much is drift."""
    slope, error, degrees = _slope(logs, bounds)
    if abs(slope) <= student_t(degrees, SLOPE_CONFIDENCE) * error:
        return logs, 0.0
    return logs - slope * np.arange(logs.size), error


def _strength(logs: Floats, bounds: Sequence[int], index: int, slope_error: float) -> float:
    """How far apart the stretches on both sides are, in standard errors: Welch's t, less for what follows itself."""
    before, at, after = bounds[index - 1 : index + 2]
    sides = [np.asarray(without_outliers(side.tolist())) for side in (logs[before:at], logs[at:after])]
    left = np.concatenate([side - side.mean() for side in sides])
    error = sum(float(side.var(ddof=1)) / side.size for side in sides) * max(1.0, _inflation(left))
    error += (slope_error * (after - before) / 2) ** 2
    return abs(float(sides[1].mean() - sides[0].mean())) / max(math.sqrt(error), 1e-9)


def _needed(bounds: Sequence[int], index: int, slope_error: float) -> float:
    """The strength that a change must have; more beside a slope, which splits that were chosen to fit make too small."""
    before, at, after = bounds[index - 1 : index + 2]
    needed = student_t(min(at - before, after - at) - 1, SURE)
    return max(needed, BESIDE_SLOPE) if slope_error else needed


def _is_placed(logs: Floats, bounds: Sequence[int], index: int) -> bool:
    """Whether it is abrupt and has enough records on both sides: one among the last few is told when there are more."""
    before, at, after = bounds[index - 1 : index + 2]
    sides = np.concatenate([_drawn_in(logs[before:at]), _drawn_in(logs[at:after])])
    found = REACH + int(_scores(sides[None, :], fewest=REACH)[0].argmax())
    return FEWEST_A_SIDE <= found <= after - before - FEWEST_A_SIDE and _is_abrupt(sides, at - before)


def _drawn_in(side: Floats) -> Floats:
    """With the middle in the place of outliers, where they are few: several in a row would look like a slope or a step."""
    kept = without_outliers(side.tolist())
    if len(kept) == side.size:
        return side
    return np.where(np.isin(side, kept), side, median(kept))


def _settled(rows: Floats) -> Floats:
    """With single outliers drawn to their neighbours: what lasts for one record is no change.

    An outlier lies apart from those before it and from those after it; at a change a record is like one of the two.
    Of few records one cannot say which are outliers.
    """
    if rows.shape[1] < FEWEST_FOR_OUTLIERS:
        return rows
    padded, count = np.pad(rows, ((0, 0), (REACH, REACH)), mode="edge"), rows.shape[1]
    # Sorted for the middle one: numpy's median loads a part of numpy that is used for nothing else here.
    before, after = (
        np.sort([padded[:, offset : offset + count] for offset in range(start, start + REACH)], axis=0)[REACH // 2]
        for start in (0, REACH + 1)
    )
    # The first and the last few have neighbours on one side only.
    before[:, :REACH], after[:, -REACH:] = after[:, :REACH], before[:, -REACH:].copy()
    nearer = np.where(np.abs(rows - before) < np.abs(rows - after), before, after)
    settled: Floats = np.where(np.abs(rows - nearer) > np.maximum(5 * _scatter(rows), 0.01), nearer, rows)
    return settled


def _scatter(rows: Floats) -> Floats:
    """What neighbours differ by, in each part of the rows: it may change."""
    steps = np.abs(np.diff(rows, axis=1, append=rows[:, -1:]))
    parts = np.array_split(steps, max(1, min(PARTS, rows.shape[1] // (2 * FEWEST_A_SIDE))), axis=1)
    middles = [np.sort(part, axis=1)[:, part.shape[1] // 2, None].repeat(part.shape[1], axis=1) for part in parts]
    found: Floats = 1.4826 / math.sqrt(2) * np.concatenate(middles, axis=1)
    return found


def _scores(rows: Floats, fewest: int = FEWEST_A_SIDE) -> Floats:
    """For each possible split of each row: the sum of squares that it explains, over what is left."""
    count = rows.shape[1]
    sizes = np.arange(fewest, count - fewest + 1)
    sums = np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1)[:, sizes - 1]
    whole = np.square(rows - rows.mean(axis=1, keepdims=True)).sum(axis=1, keepdims=True)
    explained = sums**2 * count / (sizes * (count - sizes))
    left: Floats = explained / np.maximum(whole - explained, 1e-12)
    return left


def _best_split(logs: Floats) -> tuple[int, float]:
    scores = _split_scores(logs[None, :])[0]
    index = int(scores.argmax())
    return FEWEST_A_SIDE + index, float(scores[index])


def _split_scores(rows: Floats) -> Floats:
    """Of each possible split of each row, all rows being the same records in other orders.

    Where there are too few to settle outliers, and some lie far out, by distances instead of squares: to the distances
    from the medians an outlier adds about the same wherever the split is, so that it does not hide a change.
    """
    furthest = float(np.abs(rows[0] - median(rows[0].tolist())).max())
    if rows.shape[1] >= FEWEST_FOR_OUTLIERS or furthest <= FAR_OUT:
        return _scores(rows)
    sizes = range(FEWEST_A_SIDE, rows.shape[1] - FEWEST_A_SIDE + 1)
    left = np.stack([_distances(rows[:, :size]) + _distances(rows[:, size:]) for size in sizes], axis=1)
    # Squared, they are on the scale of the squares: a normal spread makes both about the same.
    scores: Floats = np.square(_distances(rows)[:, None] / np.maximum(left, 1e-6)) - 1
    return scores


def _distances(rows: Floats) -> Floats:
    """Of each row, the sum of the distances from its median."""
    ordered, half = np.sort(rows, axis=1), rows.shape[1] // 2
    found: Floats = ordered[:, -half:].sum(axis=1) - ordered[:, :half].sum(axis=1)
    return found


def _interval_scores(rows: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Intervals that may be apart from what is before and after them, and their scores: slower, and mended later.

    Of long rows, intervals between some of the records: where exactly they begin is found afterwards.
    """
    count = rows.shape[1]
    edges = np.unique(np.linspace(0, count, min(count, MOST_EDGES) + 1).astype(np.int64))
    firsts, ends = np.triu_indices(edges.size, 1)
    inside = edges[ends] - edges[firsts]
    # Beyond an end is nothing or enough records to be a stretch of its own.
    beyond = [(each == 0) | (each >= FEWEST_A_SIDE) for each in (edges[firsts], count - edges[ends])]
    fits = (inside >= FEWEST_A_SIDE) & (count - inside >= FEWEST_A_SIDE) & beyond[0] & beyond[1]
    pairs, inside = np.stack((edges[firsts], edges[ends]), axis=1)[fits], inside[fits]
    centred = rows - rows.mean(axis=1, keepdims=True)
    sums = np.pad(np.cumsum(centred, axis=1), ((0, 0), (1, 0)))
    explained = (sums[:, pairs[:, 1]] - sums[:, pairs[:, 0]]) ** 2 * count / (inside * (count - inside))
    whole = np.square(centred).sum(axis=1, keepdims=True)
    return pairs, explained / np.maximum(whole - explained, 1e-12)


def _best_interval(logs: Floats) -> tuple[tuple[int, int], float]:
    pairs, scores = _interval_scores(logs[None, :])
    index = int(scores[0].argmax())
    return (int(pairs[index, 0]), int(pairs[index, 1])), float(scores[0, index])


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
    slope, error, degrees = _slope(logs, bounds)
    half = student_t(degrees, DRIFT_CONFIDENCE) * error
    whole = slope * (logs.size - 1)
    if abs(slope) <= half or abs(whole) < SMALLEST_CHANGE:
        return None
    reach = half * (logs.size - 1)
    return Drift(ratio=math.exp(-whole), low=math.exp(-whole - reach), high=math.exp(-whole + reach))


def _slope(logs: Floats, bounds: Sequence[int]) -> tuple[float, float, int]:
    """Per record, within the stretches between the bounds; its standard error and the degrees of freedom."""
    level = np.concatenate([logs[a:b] - logs[a:b].mean() for a, b in itertools.pairwise(bounds)])
    times = np.concatenate([np.arange(b - a) - (b - a - 1) / 2 for a, b in itertools.pairwise(bounds)])
    clean = _settled(level[None, :])[0]
    spread = float(np.square(times).sum())
    slope = float((times * clean).sum()) / spread
    left = clean - slope * times
    degrees = clean.size - len(bounds)
    # What follows itself says less: the error is that of the batches' means.
    inflation = max(1.0, _inflation(left))
    error = math.sqrt(float(np.square(left).sum()) / degrees / spread * inflation)
    return slope, error, degrees


def _inflation(left: Floats) -> float:
    """By how much the correlation of neighbours inflates a variance."""
    energy = float(np.square(left).sum())
    correlation = float((left[1:] * left[:-1]).sum()) / energy if energy > 0 else 0.0
    correlation += (1 + 4 * correlation) / left.size  # from few values it comes out too small
    correlation = min(max(correlation, 0.0), 0.95)
    return (1 + correlation) / (1 - correlation)
