"""A benchmark over time: at which record did it change, by how much, and how sure is that?

The logarithms of the times are taken for a smooth trend, plus steps, plus noise in which each record may follow the one
before it. Which steps there are decides a penalised likelihood: the modified Bayes information criterion of Zhang and
Siegmund (Biometrics 63, 2007). Smooth trends and correlated noise compete with the steps, as Beaulieu and Killick propose
(Journal of Climate 31, 2018): what changes little by little is drift and no staircase. Steps are placed one by one, each
where it explains most of what is left. `benchmarks/history_trials.py` has the false alarms and the power.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import numpy as np
from numpy.typing import NDArray

from redline.analyze.compare import OTHER_ALLOWANCE
from redline.analyze.statistics import shift_between, student_t
from redline.model.fields import Frozen

NEW_SESSION_S = 1800.0
"""Records that come after such a pause belong to another session. No command waits as long between two of its processes."""
FEWEST_A_SIDE = 5
"""Records before and after a change: with fewer, one session may be the cause."""
SHORTEST = 3
"""A change that lasts for fewer records is an outlier, and is compared with as many on each side. A stretch between two steps that has this
many and fewer than `FEWEST_A_SIDE` is set aside before the others are looked at again."""
SMALLEST_CHANGE = 0.01
"""A change of the time that is smaller does not matter, however sure it is."""
MOST_POINTS = 5000
"""This many of the latest records of a series are analysed."""
MOST_CHANGES = 10
"""Steps that are looked for in one series: the time this takes grows with their cube."""
CORRELATIONS = (0.0, 0.4, 0.8)
"""A record may follow the one before it this much; the criterion chooses."""
PER_STEP, PER_SLOPE = 3.5, 2.0
"""The criterion charges so many logarithms of the number of records for a step and for a power of the time. Zhang and Siegmund derive 3 for
a step in a long series. With 60 records our values keep false alarms at 0 to 5 % without losing power, also beside drift and waves. With 3
and 1, a step of 2 % was found in 72 instead of 80 of 100 histories of two modes."""
SURE = 0.999
"""The sides of a change must differ with this certainty, and a drift must be as certain: the best of many places always shows some difference."""

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
    """Returns the places at which a session begins: records between which nothing was measured for a while have clocks and neighbours of
    their own."""
    return [0, *(np.flatnonzero(np.diff(np.asarray(moments, dtype=np.float64)) > NEW_SESSION_S) + 1).tolist()]


def trend_of(seconds: Sequence[float], moments: Sequence[float] | None = None) -> Trend:
    """Changes and drift of times in the order in which they were measured.

    With the moments of measuring, records of one session count together, because what differs between sessions is no change of the code.
    """
    skipped = max(0, len(seconds) - MOST_POINTS)
    values = np.log(np.asarray(seconds[skipped:], dtype=np.float64))
    starts = sessions(moments[skipped:]) if moments is not None and values.size else list(range(values.size))
    places = list(range(values.size))
    if are_many := len(starts) >= 2 * FEWEST_A_SIDE:
        values = np.array([median(session.tolist()) for session in np.split(values, starts[1:])])
        places = starts
    if values.size < 2 * FEWEST_A_SIDE:
        return Trend()
    values = _settled(values)
    kept = np.arange(values.size)
    while True:
        models = [_Model(values[kept], correlation, order) for correlation in CORRELATIONS for order in (0, 1, 2)]
        model, found = min(((one, one.steps()) for one in models), key=lambda fitted: fitted[0].criterion(fitted[1]))
        lasts = np.diff((0, *found, kept.size))
        is_short = np.repeat(lasts < FEWEST_A_SIDE, lasts)
        if not is_short.any() or kept.size - is_short.sum() < 2 * FEWEST_A_SIDE:
            break
        kept = kept[~is_short]
    steps = kept[list(found)].tolist()
    changes = []
    for before, at, after in zip((0, *steps), steps, (*steps[1:], values.size), strict=False):
        sides = values[before:at], values[at:after]
        surely_low, _, surely_high = shift_between(*sides, SURE)
        low, middle, high = shift_between(*sides, 0.95)
        # With few sessions nobody knows how far they differ, so a step between two must exceed what single runs may differ by.
        is_between = not are_many and any(abs(start - at) <= 1 for start in starts[1:])
        least = math.log1p(OTHER_ALLOWANCE) if is_between else SMALLEST_CHANGE
        if abs(middle) >= least and not surely_low <= 0 <= surely_high:
            ratio, lowest, highest = np.exp((middle, low, high)).tolist()
            changes.append(Change(index=skipped + places[at], ratio=ratio, low=lowest, high=highest))
    return Trend(changes=tuple(changes), drift=_drift(model, found) if are_many or len(starts) == 1 else None)


def _settled(values: Floats) -> Floats:
    """Returns the values with outliers drawn to their neighbours: what lasts for one record is no change.

    An outlier lies apart from the middle of the records before it and from that of those after it; at a change a record is like one of the two.
    """
    padded = np.pad(values, SHORTEST, mode="reflect")
    windows = np.median(np.lib.stride_tricks.sliding_window_view(padded, SHORTEST), axis=1)
    before, after = windows[: values.size], windows[SHORTEST + 1 :]
    nearer = np.where(np.abs(values - before) < np.abs(values - after), before, after)
    # Five standard deviations of the noise, as the differences of neighbours tell it.
    far = 5 * 1.4826 * median(np.abs(np.diff(values)).tolist()) / math.sqrt(2)
    settled: Floats = np.where(np.abs(values - nearer) > max(far, SMALLEST_CHANGE), nearer, values)
    return settled


class _Model:
    """This is a smooth trend of one order and noise of one correlation, and what steps would explain beside them."""

    def __init__(self, values: Floats, correlation: float, order: int) -> None:
        self.count = values.size
        self.correlation, self.order = correlation, order
        self.values = self._whitened(values)
        self.times = np.linspace(-1, 1, self.count)[:, None] ** np.arange(3)

    def _whitened(self, columns: Floats) -> Floats:
        first = columns[:1] * math.sqrt(1 - self.correlation**2)
        found: Floats = np.concatenate((first, columns[1:] - self.correlation * columns[:-1]))
        return found

    def design(self, order: int, steps: Sequence[int]) -> Floats:
        """Returns the columns that explain the values: powers of the time, and steps."""
        after = np.arange(self.count)[:, None] >= np.array(steps, dtype=int)
        return self._whitened(np.hstack((self.times[:, : order + 1], after)))

    def left(self, steps: Sequence[int]) -> tuple[Floats, Floats]:
        """Returns what is left of the values, and an orthonormal basis of what explains the rest."""
        basis, _ = np.linalg.qr(self.design(self.order, steps))
        return self.values - basis @ (basis.T @ self.values), basis

    def criterion(self, steps: Sequence[int]) -> float:
        """Returns Zhang and Siegmund's criterion; the model that makes it smallest is chosen."""
        spread = max(float(np.square(self.left(steps)[0]).mean()), 1e-12)
        parameters = PER_STEP * len(steps) + PER_SLOPE * self.order + (self.correlation > 0)
        lengths = np.diff([0, *steps, self.count]) / self.count
        penalty = parameters * math.log(self.count) + float(np.log(lengths).sum())
        return self.count * math.log(spread) - math.log(1 - self.correlation**2) + penalty

    def best_step(self, steps: Sequence[int]) -> int | None:
        """Returns the step that explains most of what is left, or None where every stretch is too short for one."""
        left, basis = self.left(steps)
        columns = np.column_stack((left, basis))
        # This is the product of each column with each step: a step is 1 where it begins and `rest` afterwards.
        rest = 1 - self.correlation
        product = (1 - rest) * columns + rest * np.cumsum(columns[::-1], axis=0)[::-1]
        sizes = 1 + rest**2 * np.arange(self.count)[::-1] - np.square(product[:, 1:]).sum(axis=1)
        explained = np.where(sizes > 1e-9, np.square(product[:, 0]) / np.maximum(sizes, 1e-9), 0.0)
        for edge in (0, *steps, self.count):
            explained[max(edge - SHORTEST + 1, 0) : edge + SHORTEST] = -1.0
        best = int(explained.argmax())
        return best if explained[best] >= 0 else None

    def steps(self) -> tuple[int, ...]:
        """Adds steps one by one, each where it explains most, as long as one of the next two makes the criterion smaller."""
        best: tuple[int, ...] = ()
        steps: tuple[int, ...] = ()
        while len(steps) < min(len(best) + 2, MOST_CHANGES) and (step := self.best_step(steps)) is not None:
            steps = tuple(sorted((*steps, step)))
            for placed in steps if len(steps) > 1 else ():  # each moves to where it explains most beside the others
                others = tuple(other for other in steps if other != placed)
                steps = tuple(sorted((*others, self.best_step(others) or placed)))
            best = min(best, steps, key=self.criterion)
        return best


def _drift(model: _Model, steps: Sequence[int]) -> Drift | None:
    """Returns the slope beside the steps, if it is certain and matters."""
    if model.count < 4 * FEWEST_A_SIDE:
        return None
    design = model.design(1, steps)
    fitted, *_ = np.linalg.lstsq(design, model.values, rcond=None)
    degrees = model.count - design.shape[1] - 1
    variance = float(np.square(model.values - design @ fitted).sum()) / degrees * np.linalg.inv(design.T @ design)[1, 1]
    whole, half = 2 * float(fitted[1]), 2 * student_t(degrees, SURE) * math.sqrt(variance)
    if abs(whole) <= half or abs(whole) < SMALLEST_CHANGE:
        return None
    ratio, low, high = np.exp((-whole, -whole - half, -whole + half)).tolist()
    return Drift(ratio=ratio, low=low, high=high)
