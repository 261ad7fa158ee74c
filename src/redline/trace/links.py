"""This module says what belongs together in a trace: ranges inside ranges, device work and its launch, launches and operators.

Nothing here loops over events.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from redline.trace.columns import UNKNOWN, DeviceWork, HostRanges, Ids, Ints, Mask, Trace, Work
from redline.trace.intervals import distinct, summed
from redline.trace.names import Described, KernelClass, describe

DEEPEST = 1000
"""Ranges that are nested deeper than this count as neighbours at that depth, because no program calls operators so deep."""


class Nesting:
    """It holds parents and depths of ranges. A range that ends where another begins is not around it."""

    def __init__(self, ranges: HostRanges) -> None:
        thread, start, end = ranges.thread.astype(np.int64), ranges.start, ranges.end
        self._times, rank = np.unique(np.concatenate((start, end)), return_inverse=True)
        start_rank, end_rank = np.split(rank, 2)
        # Moments are on one long axis, which has a stretch for each thread. At one time, ends come before starts, and the
        # end of a range without length comes after its own start.
        self._stretch = 4 * (len(self._times) + 1)
        self._opens = thread * self._stretch + 4 * start_rank + 2
        self._closes = thread * self._stretch + 4 * end_rank + np.where(start_rank == end_rank, 3, 0)
        self._order: Ints = np.lexsort((-self._closes, self._opens))
        self._opened = self._opens[self._order]
        depth = np.arange(len(start)) - np.searchsorted(np.sort(self._closes), self._opened, side="right")
        self.depth: Ints = np.empty(len(start), np.int64)
        self.depth[self._order] = np.minimum(depth, DEEPEST)
        self.parent: Ints = np.full(len(start), UNKNOWN, np.int64)
        position = np.argsort(self._order)
        for above, level in pairwise(self.levels()):
            self.parent[level] = above[np.searchsorted(position[above], position[level]) - 1]

    def levels(self) -> list[Ints]:
        """Returns the ranges of each depth, the outermost first. Each level is in order of time."""
        by_depth = self._order[np.argsort(self.depth[self._order], kind="stable")]
        return np.split(
            by_depth, np.searchsorted(self.depth[by_depth], np.arange(1, int(self.depth.max(initial=0)) + 1))
        )

    def children_sum(self, values: Ints) -> Ints:
        """Returns for each range the sum of the values that are directly inside it."""
        inside = self.parent >= 0
        return summed(self.parent[inside], values[inside], len(self.parent))

    def with_all_inside(self, values: Ints) -> Ints:
        """Returns for each range the sum of its own value and of all that is inside it."""
        total = values.astype(np.int64, copy=True)
        for level in reversed(self.levels()[1:]):
            np.add.at(total, self.parent[level], total[level])
        return total

    def has_namesake_around(self, name: Ids) -> Mask:
        """Returns True for ranges that are inside one of the same name. Counting both would count the time twice."""
        order = np.lexsort((-self._closes, self._opens, name))
        closes = self._closes[order] + name[order] * (self._closes.max(initial=0) + 1)
        found = np.zeros(len(name), np.bool_)
        # A range that opened before and closes later is around it.
        found[order[1:]] = np.maximum.accumulate(closes)[:-1] > closes[1:]
        return found

    def around(self, thread: Ids, at: Ints) -> Ints:
        """Returns the innermost range that is around each moment on a thread. It is UNKNOWN if there is none."""
        if not len(self._order):
            return np.full(len(at), UNKNOWN, np.int64)
        rank = np.searchsorted(self._times, at, side="right") - 1
        exact = self._times[np.maximum(rank, 0)] == at
        low = thread.astype(np.int64) * self._stretch
        moment = low + 4 * rank + np.where(exact, 2, 3)
        position = np.searchsorted(self._opened, moment, side="right") - 1
        found = np.where(position >= 0, self._order[np.maximum(position, 0)], UNKNOWN)
        for _ in range(DEEPEST):
            outside = (found >= 0) & (self._closes[found] <= moment)
            if not outside.any():
                break
            found[outside] = self.parent[found[outside]]
        # The last range opened before may belong to the thread below on the axis.
        return np.where((found >= 0) & (self._closes[found] >= low), found, UNKNOWN)


@dataclass(frozen=True)
class Links:
    """The links of a trace are worked out once and shared by all tables. Rows that nothing is known of hold UNKNOWN."""

    trace: Trace

    @cached_property
    def nesting(self) -> Nesting:
        return Nesting(self.trace.operators)

    @cached_property
    def call(self) -> Ints:
        """Returns the call that launched each row of device work. A graph's kernels share one call."""
        calls = self.trace.calls
        # The runtime's call and the driver's call below it may share a number. The earlier one is the host's.
        order = np.lexsort((calls.start, calls.correlation))
        return _look_up(calls.correlation, order, self.trace.work.correlation)

    @cached_property
    def is_launched(self) -> Mask:
        """Returns True for rows of device work whose launch is in the file."""
        found: Mask = self.call >= 0
        return found

    @cached_property
    def launched_at(self) -> Ints:
        """Returns when the host asked for each row of device work. It is valid only where `is_launched`."""
        return self._of_call(self.trace.calls.start)

    @cached_property
    def launched_by(self) -> Ints:
        """Returns when the call that launched each row had done so. It is valid only where `is_launched`.

        A graph's call may last longer than its first kernels take. They were launched when the first of them began.
        """
        known, ends = self.is_launched, self.trace.calls.end
        first = np.full(len(ends), np.iinfo(np.int64).max)
        np.minimum.at(first, self.call[known], self.trace.work.start[known])
        return self._of_call(np.minimum(ends, first))

    def _of_call(self, column: Ints) -> Ints:
        found = np.full(len(self.call), UNKNOWN, np.int64)
        found[self.is_launched] = column[self.call[self.is_launched]]
        return found

    def are(self, is_meant: Callable[[Described], bool]) -> Mask:
        """The mask is true for kernels whose description `is_meant` accepts."""
        work = self.trace.work
        found = where_name(self.trace, work, lambda name: is_meant(describe(name)))
        found &= work.kind == Work.KERNEL
        return found

    def is_class(self, *classes: KernelClass) -> Mask:
        """The mask is true for kernels of these classes."""
        return self.are(lambda name: name.kernel_class in classes)

    @cached_property
    def by_graph(self) -> Mask:
        """Returns True for rows of device work that a graph launch replayed."""
        graphs = where_name(self.trace, self.trace.calls, lambda name: "GraphLaunch" in name)
        return self._of_call(graphs.astype(np.int64)) > 0

    @cached_property
    def operator(self) -> Ints:
        """Returns the innermost operator that launched each row of device work."""
        calls = distinct(self.call[self.is_launched])
        operator_of_call = np.full(len(self.trace.calls), UNKNOWN, np.int64)
        operator_of_call[calls] = self.operators_of(calls)
        return self._of_call(operator_of_call)

    def operators_of(self, calls: Ints) -> Ints:
        """Returns the innermost operator that is around each of these calls."""
        table, operators = self.trace.calls, self.trace.operators
        if not len(operators):
            return np.full(len(calls), UNKNOWN, np.int64)
        found = _look_up(operators.external, np.lexsort((operators.start, operators.external)), table.external[calls])
        # A call has the number of the operator it came from. Older traces write another number there. Then, and if nothing
        # is written, the operator around it in time is taken.
        at = table.start[calls]
        fits = (found >= 0) & (operators.start[found] <= at) & (at <= operators.end[found])
        found[~fits] = self.nesting.around(table.thread[calls[~fits]], at[~fits])
        return found


def where_name(trace: Trace, table: HostRanges | DeviceWork, is_meant: Callable[[str], object]) -> Mask:
    """The mask is true for rows with a name that `is_meant` accepts. Each name is looked at once."""
    found: Mask = np.isin(
        table.name, [number for number in distinct(table.name).tolist() if is_meant(trace.names[number])]
    )
    return found


def matching(trace: Trace, table: HostRanges | DeviceWork, rule: re.Pattern[str]) -> Mask:
    """The mask is true for rows whose name the rule finds."""
    return where_name(trace, table, rule.search)


def _look_up(keys: Ints, order: Ints, wanted: Ints) -> Ints:
    """Returns the first row in `order` that has each wanted key. It is UNKNOWN if there is none. Keys of 0 and below name nothing."""
    if not len(keys):
        return np.full(len(wanted), UNKNOWN, np.int64)
    ordered = keys[order]
    index = np.minimum(np.searchsorted(ordered, wanted, side="left"), len(ordered) - 1)
    return np.where((ordered[index] == wanted) & (wanted > 0), order[index], UNKNOWN)
