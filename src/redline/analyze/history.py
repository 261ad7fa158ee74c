"""A benchmark over time: at which record did it change, by how much, and how sure is that?

The logarithms of the times are taken for a smooth trend, plus steps, plus noise in which each record may follow the one
before it. Which steps there are decides a penalised likelihood: the modified Bayes information criterion of Zhang and
Siegmund (Biometrics 63, 2007). Smooth trends and correlated noise compete with the steps, as Beaulieu and Killick propose
(Journal of Climate 31, 2018): what changes little by little is drift and no staircase. Steps are placed one by one, each
where it explains most of what is left. `benchmarks/history_trials.py` has the false alarms and the power.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from redline.analyze.compare import OTHER_ALLOWANCE
from redline.analyze.statistics import shift_between, student_t
from redline.model.fields import Frozen

NEW_SESSION_S = 1800.0
"""After such a pause records belong to another session. No command waits as long between two of its processes."""
FEWEST_A_SIDE = 5
"""Records before and after a change: with fewer, one session may be the cause."""
SMALLEST_CHANGE = 0.01
"""A change of the time that is smaller does not matter, however sure it is."""
MOST_POINTS = 5000
"""How many of the latest records of a series are analysed."""
MOST_CHANGES = 10
"""Steps that are looked for in one series: the time this takes grows with their cube."""
CORRELATIONS = (0.0, 0.4, 0.8)
"""How much a record may follow the one before it; the criterion chooses."""
SHORTEST = 3
"""What lasts for fewer records is an outlier: it is compared with as many on each side. A stretch between two steps that has this many and
fewer than `FEWEST_A_SIDE` is set aside before the others are looked at again."""
PER_STEP, PER_SLOPE = 3.5, 2.0
"""A step and a power of the time cost so many logarithms of the number of records. Zhang and Siegmund derive 3 for a step in a long series; with
60 records these keep false alarms at 1 to 3 %, also beside drift and waves."""
SURE = 0.999
"""The sides of a change must differ with this certainty: the best of many places always shows some difference."""
CONFIDENCE = 0.99
"""Drift must be as certain as this."""

Floats = NDArray[np.float64]


class Change(Frozen):
    """A change is abrupt. `ratio` is time before over time after: below 1 it got slower."""

    index: int
    """The first record after the change has this index."""
    ratio: float
    low: float
    high: float


class Drift(Frozen):
    """A drift goes little by little from the first record to the last. Its `ratio` is that of a change."""

    ratio: float
    low: float
    high: float


class Trend(Frozen):
    changes: tuple[Change, ...] = ()
    drift: Drift | None = None


def sessions(moments: Sequence[float]) -> list[int]:
    """The places at which a session begins: records between which nothing was measured for a while have clocks and neighbours of their own."""
    return [0, *(np.flatnonzero(np.diff(np.asarray(moments, dtype=np.float64)) > NEW_SESSION_S) + 1).tolist()]


def trend_of(seconds: Sequence[float], moments: Sequence[float] | None = None) -> Trend:
    """Changes and drift of times in the order in which they were measured.

    With the moments of measuring, records of one session count together, because what differs between sessions is no change of the code.
    """
    skipped = max(0, len(seconds) - MOST_POINTS)
    logs = np.log(np.asarray(seconds[skipped:], dtype=np.float64))
    starts = sessions(moments[skipped:]) if moments is not None and logs.size else list(range(logs.size))
    are_many = len(starts) >= 2 * FEWEST_A_SIDE
    values, places = logs, list(range(logs.size))
    if are_many:
        values = np.array([median(logs[a:b].tolist()) for a, b in itertools.pairwise([*starts, logs.size])])
        places = starts
    if values.size < 2 * FEWEST_A_SIDE:
        return Trend()
    values = _settled(values)
    steps, drift = _fitted(values)
    bounds = [0, *steps, values.size]
    changes = []
    for before, at, after in zip(bounds, bounds[1:], bounds[2:], strict=False):
        sides = values[before:at], values[at:after]
        surely_low, _, surely_high = shift_between(*sides, SURE)
        low, middle, high = shift_between(*sides, 0.95)
        # Of few sessions nobody knows how far they differ, so a step between two must exceed what single runs may differ by.
        is_between = not are_many and any(abs(start - at) <= 1 for start in starts[1:])
        least = math.log1p(OTHER_ALLOWANCE) if is_between else SMALLEST_CHANGE
        if abs(middle) >= least and not surely_low <= 0 <= surely_high:
            ratio, lowest, highest = (math.exp(log) for log in (middle, low, high))
            changes.append(Change(index=skipped + places[at], ratio=ratio, low=lowest, high=highest))
    return Trend(changes=tuple(changes), drift=drift if are_many or len(starts) == 1 else None)


def _settled(values: Floats) -> Floats:
    """With single outliers drawn to their neighbours: what lasts for one record is no change.

    An outlier lies apart from the middle of the records before it and from that of those after it; at a change a record is like one of the two.
    """
    padded = np.pad(values, SHORTEST, mode="reflect")
    windows = np.sort(np.lib.stride_tricks.sliding_window_view(padded, SHORTEST), axis=1)[:, SHORTEST // 2]
    before, after = windows[: values.size], windows[SHORTEST + 1 :]
    nearer = np.where(np.abs(values - before) < np.abs(values - after), before, after)
    scatter = 1.4826 * median(np.abs(np.diff(values)).tolist()) / math.sqrt(2)
    settled: Floats = np.where(np.abs(values - nearer) > np.maximum(5 * scatter, SMALLEST_CHANGE), nearer, values)
    return settled


class _Model:
    """A smooth trend of one order and noise of one correlation, and what steps would explain beside them."""

    def __init__(self, values: Floats, correlation: float, order: int) -> None:
        self.count = values.size
        self.correlation, self.order = correlation, order
        self.values = self.whitened(values)
        self._known: dict[tuple[int, ...], tuple[Floats, Floats]] = {}

    def whitened(self, columns: Floats) -> Floats:
        first = columns[:1] * math.sqrt(1 - self.correlation**2)
        found: Floats = np.concatenate((first, columns[1:] - self.correlation * columns[:-1]))
        return found

    def design(self, order: int, steps: Sequence[int]) -> Floats:
        times = np.linspace(-1, 1, self.count)
        columns = [times**power for power in range(order + 1)] + [np.arange(self.count) >= step for step in steps]
        return self.whitened(np.stack(columns, axis=1).astype(np.float64))

    def left(self, steps: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Returns what is left of the values, and an orthonormal basis of what explains the rest."""
        if steps not in self._known:
            basis, _ = np.linalg.qr(self.design(self.order, steps))
            self._known[steps] = self.values - basis @ (basis.T @ self.values), basis
        return self._known[steps]

    def criterion(self, steps: tuple[int, ...]) -> float:
        """Zhang and Siegmund's, to be made small."""
        left, _ = self.left(steps)
        lengths = np.diff([0, *steps, self.count])
        parameters = PER_STEP * len(steps) + PER_SLOPE * self.order + (self.correlation > 0)
        penalty = parameters * math.log(self.count) + float(np.log(lengths / self.count).sum())
        spread = max(float(np.square(left).sum()) / self.count, 1e-12)
        return self.count * math.log(spread) - math.log(1 - self.correlation**2) + penalty

    def best_step(self, steps: tuple[int, ...]) -> int | None:
        """Returns the step that explains most of what is left, or None where every stretch is too short for one."""
        left, basis = self.left(steps)
        rest = 1 - self.correlation
        columns = np.concatenate((left[:, None], basis), axis=1)
        # The product of each column with each step: a step is 1 where it begins and `rest` afterwards.
        after = np.cumsum(columns[::-1], axis=0)[::-1]
        product = columns + rest * (after - columns)
        places = np.arange(self.count)
        sizes = 1 + rest**2 * (self.count - 1 - places) - np.square(product[:, 1:]).sum(axis=1)
        explained = np.where(sizes > 1e-9, np.square(product[:, 0]) / np.maximum(sizes, 1e-9), 0.0)
        for edge in (0, *steps, self.count):
            explained[max(edge - SHORTEST + 1, 0) : edge + SHORTEST] = -1.0
        best = int(explained.argmax())
        return best if explained[best] >= 0 else None

    def steps(self) -> tuple[int, ...]:
        """Adds steps one by one, each where it explains most, as long as one of the next two makes the criterion smaller."""
        best: tuple[int, ...] = ()
        steps: tuple[int, ...] = ()
        while len(steps) < min(len(best) + 2, MOST_CHANGES):
            step = self.best_step(steps)
            if step is None:
                break
            steps = tuple(sorted((*steps, step)))
            for placed in steps if len(steps) > 1 else ():  # each moves to where it explains most beside the others
                others = tuple(other for other in steps if other != placed)
                steps = tuple(sorted((*others, self.best_step(others) or placed)))
            if self.criterion(steps) < self.criterion(best):
                best = steps
        return best


def _fitted(values: Floats) -> tuple[list[int], Drift | None]:
    """Returns the steps of the model with the best criterion, and the drift beside them."""
    kept = np.arange(values.size)
    while True:
        models = [_Model(values[kept], correlation, order) for correlation in CORRELATIONS for order in (0, 1, 2)]
        model, steps = min(((one, one.steps()) for one in models), key=lambda found: found[0].criterion(found[1]))
        edges = [0, *steps, kept.size]
        short = [(a, b) for a, b in itertools.pairwise(edges) if b - a < FEWEST_A_SIDE]
        if not short or kept.size - sum(b - a for a, b in short) < 2 * FEWEST_A_SIDE:
            return [int(kept[step]) for step in steps], _drift(model, steps)
        kept = np.delete(kept, np.concatenate([np.arange(a, b) for a, b in short]))


def _drift(model: _Model, steps: Sequence[int]) -> Drift | None:
    """Returns the slope beside the steps, if it is certain and matters."""
    if model.count < 4 * FEWEST_A_SIDE:
        return None
    design = model.design(1, steps)
    fitted, *_ = np.linalg.lstsq(design, model.values, rcond=None)
    left = model.values - design @ fitted
    degrees = model.count - design.shape[1] - 1
    variance = float(np.square(left).sum()) / degrees * float(np.linalg.inv(design.T @ design)[1, 1])
    whole, half = 2 * float(fitted[1]), 2 * student_t(degrees, CONFIDENCE) * math.sqrt(variance)
    if abs(whole) <= half or abs(whole) < SMALLEST_CHANGE:
        return None
    return Drift(ratio=math.exp(-whole), low=math.exp(-whole - half), high=math.exp(-whole + half))
