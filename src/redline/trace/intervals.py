"""Lengths of unions of intervals, exact in whole nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from redline.trace.columns import Ints


@dataclass(frozen=True)
class Intervals:
    """In order, and none touches the next."""

    start: Ints
    end: Ints
    first: Ints
    """For each, which of the given intervals began it."""

    def __len__(self) -> int:
        return len(self.start)

    @property
    def total(self) -> int:
        return int((self.end - self.start).sum())

    @property
    def span(self) -> int:
        return int(self.end[-1] - self.start[0]) if len(self) else 0


def union(start: Ints, end: Ints) -> Intervals:
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order]) if len(order) else end
    if not len(order):
        return Intervals(start, reach, order)
    # A new one begins where everything before has ended.
    begins = np.flatnonzero(np.concatenate(([True], start[1:] > reach[:-1])))
    ends = np.concatenate((begins[1:] - 1, [len(order) - 1]))
    return Intervals(start[begins], reach[ends], order[begins])


def joined(*several: Intervals) -> Intervals:
    return union(np.concatenate([each.start for each in several]), np.concatenate([each.end for each in several]))


def overlap(one: Intervals, other: Intervals) -> int:
    """How long both hold."""
    return one.total + other.total - joined(one, other).total


def gaps(busy: Intervals) -> Intervals:
    """What lies between them; `first` then tells which of the given intervals ended each gap."""
    return Intervals(busy.end[:-1], busy.start[1:], busy.first[1:])
