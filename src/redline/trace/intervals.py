"""This module has sets of intervals in whole nanoseconds: unions, differences and overlaps, without a loop over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from redline.trace.columns import Ints, Mask

AnyInt = TypeVar("AnyInt", bound=np.integer[Any])


def seconds(nanoseconds: float) -> float:
    # Dividing gives the nearest float there is, which multiplying by 1e-9 does not.
    return nanoseconds / 1e9


def distinct(values: npt.NDArray[AnyInt]) -> npt.NDArray[AnyInt]:
    """Returns each value once, in order. Sorting takes a tenth of the time of `np.unique`, which hashes."""
    ordered = np.sort(values)
    return ordered[np.concatenate(([True], ordered[1:] != ordered[:-1]))] if len(ordered) else ordered


def summed(at: npt.NDArray[Any], values: npt.NDArray[Any] | int, count: int) -> Ints:
    """Returns the sum of the values for each index from 0 to below `count`."""
    total = np.zeros(count, np.int64)
    np.add.at(total, at, values)
    return total


@dataclass(frozen=True)
class Intervals:
    """The intervals are in order of time. Each one ends before the next begins."""

    start: Ints
    end: Ints
    first: Ints
    """This is the index of the given interval that begins each."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())

    @property
    def span(self) -> int:
        return int(self.end[-1] - self.start[0]) if len(self) else 0

    def holds(self, moments: Ints) -> Mask:
        """Returns whether each moment lies inside one of them. The end of an interval does not lie inside it."""
        index = np.searchsorted(self.start, moments, side="right")
        found: Mask = (index > 0) & (moments < np.append(0, self.end)[index])
        return found

    def before(self, moments: Ints) -> Ints:
        """Returns how much of the intervals lies before each moment."""
        if not len(self):
            return np.zeros(len(moments), np.int64)
        lengths = self.end - self.start
        earlier = np.concatenate(([0], np.cumsum(lengths)))
        last = np.maximum(np.searchsorted(self.start, moments, side="right") - 1, 0)
        found: Ints = earlier[last] + np.clip(moments - self.start[last], 0, lengths[last])
        return found

    def within(self, start: Ints, end: Ints) -> Ints:
        """Returns how much of the intervals lies inside each stretch of time."""
        return self.before(end) - self.before(start)


NEVER = Intervals(np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.int64))


def union(start: Ints, end: Ints) -> Intervals:
    if not len(start):
        return NEVER
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    # A new interval begins where everything before has ended.
    begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    ends = np.concatenate((begins[1:] - 1, [len(order) - 1]))
    return Intervals(start[begins], reach[ends], order[begins])


def joined(*several: Intervals) -> Intervals:
    return union(np.concatenate([each.start for each in several]), np.concatenate([each.end for each in several]))


def overlap(one: Intervals, other: Intervals) -> int:
    """Returns how long both hold."""
    return one.total + other.total - joined(one, other).total


def without(one: Intervals, other: Intervals) -> Intervals:
    """Returns the parts of the first that lie outside the second."""
    return _where(one, other, inside=False) if len(other) else one


def both(one: Intervals, other: Intervals) -> Intervals:
    """Returns when both hold."""
    return _where(one, other, inside=True) if len(other) else NEVER


def _where(one: Intervals, other: Intervals, *, inside: bool) -> Intervals:
    borders = distinct(np.concatenate((one.start, one.end, other.start, other.end)))
    start, end = borders[:-1], borders[1:]
    keep = one.holds(start) & (other.holds(start) == inside)
    return union(start[keep], end[keep])


QUARTILES = 4
"""With fewer values there are no quartiles."""
_FENCE = 1.5
"""This is Tukey's fence. A value is unusual if it lies further above the upper quartile than this many ranges between the quartiles."""


def usual(lengths: Ints) -> int:
    """Returns the largest length that is not unusual, by Tukey's fence."""
    low, high = np.percentile(lengths, (25, 75)) if len(lengths) else (0, 0)
    return int(high + _FENCE * (high - low))


def usual_at_least(lengths: Ints) -> int:
    """Returns the same from the shorter half alone, by symmetry. It is for lengths whose only error is to be too long."""
    low, middle = np.percentile(lengths, (25, 50)) if len(lengths) else (0, 0)
    return int(middle + (1 + 2 * _FENCE) * (middle - low))
