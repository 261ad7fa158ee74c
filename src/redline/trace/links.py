"""This module says what belongs together in a trace: ranges inside ranges, device work and its launch, launches and operators.

Nothing here loops over events.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redline.trace.columns import UNKNOWN, DeviceWork, HostRanges, Ids, Ints, Mask, Trace, Work
from redline.trace.intervals import distinct, summed
from redline.trace.names import CLASSES, Described, KernelClass, describe

_NUMBER = {name: number for number, name in enumerate(CLASSES)}

DEEPEST = 1000
"""Ranges that are nested deeper than this count as neighbours at that depth: no program calls operators so deep."""


class Nesting:
    """Parents and depths of ranges. A range that ends where another begins is not around it."""

    def __init__(self, thread: Ids, start: Ints, end: Ints) -> None:
        self._end = end
        self._times, rank = np.unique(np.concatenate((start, end)), return_inverse=True)
        start_rank, end_rank = rank[: len(start)], rank[len(start) :]
        # Moments are on one long axis, a stretch of it for each thread. At one time, ends come before starts, and the end
        # of a range without length after its own start.
        self._stretch = 4 * (len(self._times) + 1)
        base = thread.astype(np.int64) * self._stretch
        opens = base + 4 * start_rank + 2
        closes = base + 4 * end_rank + np.where(start_rank == end_rank, 3, 0)
        self.order: Ints = np.lexsort((-closes, opens))
        self._opens = opens[self.order]
        self._closes = closes
        depth = np.arange(len(start)) - np.searchsorted(np.sort(closes), self._opens, side="right")
        self.depth: Ints = np.empty(len(start), np.int64)
        self.depth[self.order] = np.minimum(depth, DEEPEST)
        self.parent = self._parents()

    def levels(self) -> Iterator[Ints]:
        """Yields the ranges of each depth, the outermost first; each level is in order of time."""
        by_depth = self.order[np.argsort(self.depth[self.order], kind="stable")]
        bounds = np.searchsorted(self.depth[by_depth], np.arange(int(self.depth.max(initial=-1)) + 2))
        for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            yield by_depth[low:high]

    def _parents(self) -> Ints:
        parent = np.full(len(self.order), UNKNOWN, np.int64)
        position = np.empty(len(self.order), np.int64)
        position[self.order] = np.arange(len(self.order))
        above: Ints | None = None
        for level in self.levels():
            if above is not None and len(above):
                parent[level] = above[np.searchsorted(position[above], position[level]) - 1]
            above = level
        return parent

    def children_sum(self, values: Ints) -> Ints:
        """Returns for each range the sum of the values that are directly inside it."""
        inside = self.parent >= 0
        return summed(self.parent[inside], values[inside], len(self.parent))

    def with_all_inside(self, values: Ints) -> Ints:
        """Returns for each range the sum of its own value and of all that is inside it."""
        total = values.astype(np.int64, copy=True)
        for level in reversed(list(self.levels())[1:]):
            np.add.at(total, self.parent[level], total[level])
        return total

    def repeats(self, name: Ids) -> Ints:
        """Returns the rows that are inside a range of the same name; counting both would count the time twice."""
        found = np.zeros(len(name), np.bool_)
        rows, ancestor = np.arange(len(name)), self.parent
        for _ in range(DEEPEST):
            alive = ancestor >= 0
            if not alive.any():
                break
            rows, ancestor = rows[alive], ancestor[alive]
            found[rows] |= name[ancestor] == name[rows]
            # Whoever has found its namesake need not look further up.
            rest = ~found[rows]
            rows, ancestor = rows[rest], self.parent[ancestor[rest]]
        return np.flatnonzero(found)

    def around(self, thread: Ids, at: Ints) -> Ints:
        """Returns the innermost range that is around each moment on a thread; UNKNOWN where there is none."""
        if not len(self.order):
            return np.full(len(at), UNKNOWN, np.int64)
        rank = np.searchsorted(self._times, at, side="right") - 1
        exact = self._times[np.maximum(rank, 0)] == at
        moment = thread.astype(np.int64) * self._stretch + 4 * rank + np.where(exact, 2, 3)
        position = np.searchsorted(self._opens, moment, side="right") - 1
        found = np.where(position >= 0, self.order[np.maximum(position, 0)], UNKNOWN)
        for _ in range(DEEPEST):
            outside = (found >= 0) & (self._closes[np.maximum(found, 0)] <= moment)
            if not outside.any():
                break
            found[outside] = self.parent[found[outside]]
        # The last range opened before may belong to the thread below on the axis.
        low = thread.astype(np.int64) * self._stretch
        mine = self._closes[np.maximum(found, 0)] >= low
        return np.where((found >= 0) & mine, found, UNKNOWN)


@dataclass(frozen=True)
class Links:
    """The links of a trace are worked out once and shared by all tables. Rows that nothing is known of hold UNKNOWN."""

    trace: Trace

    @cached_property
    def nesting(self) -> Nesting:
        operators = self.trace.operators
        return Nesting(operators.thread, operators.start, operators.end)

    @cached_property
    def call(self) -> Ints:
        """Each row of device work has the call here that launched it. A graph's kernels share one call."""
        calls = self.trace.calls
        # The runtime's call and the driver's call below it may share a number: the earlier one is the host's.
        order = np.lexsort((calls.start, calls.correlation))
        return _look_up(calls.correlation, order, self.trace.work.correlation)

    @cached_property
    def is_launched(self) -> Mask:
        """True for rows of device work whose launch is in the file."""
        found: Mask = self.call >= 0
        return found

    @cached_property
    def launched_at(self) -> Ints:
        """This is when the host asked for each row of device work; only where `is_launched`."""
        return self._of_call(self.trace.calls.start)

    @cached_property
    def launched_by(self) -> Ints:
        """When the call that launched each row had done so; only where `is_launched`.

        A graph's call may last longer than its first kernels take: they were launched when the first of them began.
        """
        known, work = self.is_launched, self.trace.work
        first = np.full(len(self.trace.calls), np.iinfo(np.int64).max)
        np.minimum.at(first, self.call[known], work.start[known])
        return np.minimum(self._of_call(self.trace.calls.end), self._of_call(first))

    def _of_call(self, column: Ints) -> Ints:
        found = np.full(len(self.call), UNKNOWN, np.int64)
        found[self.is_launched] = column[self.call[self.is_launched]]
        return found

    @cached_property
    def kernel_class(self) -> Ids:
        """Each row of device work has the index of its class in `CLASSES` here; copies and fills are copies."""
        told, which = self._described
        number = np.array([_NUMBER[one.kernel_class] for one in told], np.int32)
        return np.where(self.trace.work.kind == Work.KERNEL, number[which], _NUMBER["copy"])

    @cached_property
    def _described(self) -> tuple[list[Described], Ids]:
        """This is what the names of kernels tell, and for each row which of it; the first stands for copies and fills too."""
        work, names = self.trace.work, self.trace.names
        told, index = [describe("")], {}
        of_name = np.zeros(len(names), np.int32)
        for number in distinct(work.name[work.kind == Work.KERNEL]).tolist():
            one = describe(names[number])
            if id(one) not in index:  # names by the hundred thousand, but few things that they tell
                index[id(one)] = len(told)
                told.append(one)
            of_name[number] = index[id(one)]
        return told, of_name[work.name]

    def are(self, is_meant: Callable[[Described], bool]) -> Mask:
        """Rows of kernels whose name tells what is meant."""
        told, which = self._described
        found: Mask = np.array([is_meant(one) for one in told])[which]
        kernels: Mask = self.trace.work.kind == Work.KERNEL
        return found & kernels

    def is_class(self, *names: KernelClass) -> Mask:
        """Rows of kernels of these classes."""
        found: Mask = np.isin(self.kernel_class, [CLASSES.index(name) for name in names])
        kernels: Mask = self.trace.work.kind == Work.KERNEL
        return found & kernels

    @cached_property
    def by_graph(self) -> Mask:
        """True for rows of device work that a graph launch replayed."""
        calls = self.trace.calls
        graphs = where_name(self.trace, calls, lambda name: "GraphLaunch" in name)
        found = np.zeros(len(self.call), np.bool_)
        found[self.is_launched] = np.isin(self.call[self.is_launched], np.flatnonzero(graphs))
        return found

    @cached_property
    def operator(self) -> Ints:
        """Each row of device work has the innermost operator here that launched it."""
        known = self.is_launched
        calls = distinct(self.call[known])
        operator_of_call = np.full(len(self.trace.calls), UNKNOWN, np.int64)
        operator_of_call[calls] = self.operators_of(calls)
        return self._of_call(operator_of_call)

    def operators_of(self, calls: Ints) -> Ints:
        """Returns the innermost operator that is around each of these calls."""
        table, operators = self.trace.calls, self.trace.operators
        if not len(operators):
            return np.full(len(calls), UNKNOWN, np.int64)
        order = np.lexsort((operators.start, operators.external))
        found = _look_up(operators.external, order, table.external[calls])
        # A call has the number of the operator it came from. Older traces write another number there: then, and where nothing is
        # written, the operator around it in time is meant.
        at = table.start[calls]
        fits = (found >= 0) & (operators.start[found] <= at) & (at <= operators.end[found])
        found[~fits] = UNKNOWN
        rest = np.flatnonzero(~fits)
        if len(rest):
            found[rest] = self.nesting.around(table.thread[calls[rest]], table.start[calls[rest]])
        return found


def where_name(trace: Trace, table: HostRanges | DeviceWork, is_meant: Callable[[str], bool]) -> Mask:
    """Rows with a name that is meant; each name is looked at once."""
    numbers = distinct(table.name).tolist()
    found: Mask = np.isin(table.name, [number for number in numbers if is_meant(trace.names[number])])
    return found


def matching(trace: Trace, table: HostRanges | DeviceWork, rule: re.Pattern[str]) -> Mask:
    """Rows whose name the rule finds."""
    return where_name(trace, table, lambda name: rule.search(name) is not None)


def _look_up(keys: Ints, order: Ints, wanted: Ints) -> Ints:
    """Returns the first row in `order` that has each wanted key; UNKNOWN where there is none. Keys of 0 and below name nothing."""
    if not len(keys):
        return np.full(len(wanted), UNKNOWN, np.int64)
    ordered = keys[order]
    index = np.minimum(np.searchsorted(ordered, wanted, side="left"), len(ordered) - 1)
    return np.where((ordered[index] == wanted) & (wanted > 0), order[index], UNKNOWN)
