"""This module says what could be taken out of the recorded steps: the host's time, waits and device work that a cause of lost
time stands for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from redline.trace.columns import HostRanges, Ids, Ints, Mask, Trace
from redline.trace.host import MOSTLY, HostView, NamedCause, on_thread, picked
from redline.trace.idle import CAUSES, Cause, IdleTime
from redline.trace.intervals import (
    NEVER,
    QUARTILES,
    Intervals,
    both,
    distinct,
    joined,
    summed,
    union,
    usual,
    without,
)
from redline.trace.links import Links, matching, where_name
from redline.trace.names import Described, describe, short_name
from redline.trace.patterns import attention_on_host, recomputed_operators
from redline.trace.replay import DeviceRun, Replay, Without
from redline.trace.shapes import work_of
from redline.trace.tables import self_times
from redline.trace.timeline import host_busy
from redline.trace.window import Recorded

WORTH_A_LINE = 0.02
"""A cause must take this share of the time to get a line of its own."""
FIRST_CACHE_BYTES = 32 << 10
"""The first data cache of most processors is this large."""

_MANY_VIEWS = re.compile(r"^aten::(unbind|chunk|(tensor_|unsafe_)?split(_with_sizes)?)$")
_READS_A_NUMBER = re.compile(r"^aten::(item|_local_scalar_dense|is_nonzero|equal)$")


def all_time(bounds: tuple[int, int]) -> Intervals:
    return union(np.array([bounds[0]]), np.array([max(bounds[1], bounds[0])]))


def unusual(rest: Intervals, least_ns: float, few: int = 0) -> Intervals:
    """Returns stretches of at least this length that are longer than usual. If fewer than `few` are as long as that, all of
    them are unusual."""
    length = rest.end - rest.start
    long = length >= least_ns
    if long.sum() >= few:
        long &= (length > usual(length)) & (len(rest) >= QUARTILES)
    return union(rest.start[long], rest.end[long])


def _longest(trace: Trace, names: Ids, duration: Ints) -> str:
    """Returns the name that takes most of the time."""
    return short_name(trace.names[int(summed(names, duration, len(trace.names)).argmax())]) if len(names) else ""


@dataclass(frozen=True)
class OnDevice:
    """This selects time of one device and of the host that drives it."""

    run: DeviceRun

    @property
    def links(self) -> Links:
        return self.run.recorded.links

    @property
    def trace(self) -> Trace:
        return self.run.recorded.trace

    @property
    def view(self) -> HostView:
        return self.run.host

    def on_launching_threads(self, ranges: HostRanges) -> Intervals:
        return on_thread(ranges, *self.view.launching_threads)

    @cached_property
    def named(self) -> dict[NamedCause, Intervals]:
        """Returns when the host did what has a name of its own, by the cause of idle time that it is."""
        return {cause: self.on_launching_threads(ranges) for cause, ranges in self.view.named.items()}

    @cached_property
    def plain(self) -> Intervals:
        """Returns when the host did none of these things."""
        return without(all_time(self.run.bounds), joined(*self.named.values()))

    @cached_property
    def pauses(self) -> Intervals:
        """Returns when no thread launched anything."""
        calls, launches = self.trace.calls, self.view.launching
        return without(all_time(self.run.bounds), union(calls.start[launches], calls.end[launches]))

    @cached_property
    def stalls(self) -> Intervals:
        """Returns pauses in the plain time that are far longer than usual. If they are together too short to be worth a
        line, they count as the host's usual lateness."""
        length = self.run.bounds[1] - self.run.bounds[0]
        found = both(self.plain, unusual(self.pauses, WORTH_A_LINE * length / max(len(self.run.recorded.steps), 1)))
        return found if both(found, self.run.idle.when["host"]).total >= WORTH_A_LINE * length else NEVER

    @cached_property
    def steady(self) -> Intervals:
        """Returns the plain time without stalls. Each stall leaves the length of a usual pause, because it too begins and
        ends with launching."""
        if not len(self.stalls):
            return self.plain
        start = self.stalls.start + int(np.median(self.pauses.end - self.pauses.start))
        return without(self.plain, union(start, np.maximum(start, self.stalls.end)))

    @cached_property
    def waits(self) -> Mask:
        """The mask is true for calls that make the steps wait for the device."""
        found = np.zeros(len(self.trace.calls), np.bool_)
        found[self.view.waits] = True
        return found

    def operators_around(self, calls: Mask) -> Intervals:
        """Returns the operators that make these calls. They disappear with them."""
        rows = self.links.operators_of(np.flatnonzero(calls))
        return union(self.trace.operators.start[rows[rows >= 0]], self.trace.operators.end[rows[rows >= 0]])

    def next_launch(self, at: Ints) -> Ints:
        """Returns when the host is launching again after each moment."""
        begins = np.sort(self.trace.calls.start[self.view.launching])
        found: Ints = np.maximum(np.append(begins, self.run.bounds[1])[np.searchsorted(begins, at)], at)
        return found

    def after(self, calls: Mask) -> Intervals:
        """Returns the time from the end of each call to the next launch. What the host does there may be for the sake of the result.

        Operators that launch nothing are work of their own, so they are left out.
        """
        operators, end = self.trace.operators, self.trace.calls.end[calls]
        launching = self.links.operators_of(self.view.launching)
        launches = np.bincount(launching[launching >= 0], minlength=len(operators))
        others = picked(operators, self.links.nesting.with_all_inside(launches) == 0)
        return both(without(union(end, self.next_launch(end)), self.on_launching_threads(others)), self.plain)

    def making(self, calls: Mask) -> Intervals:
        """Returns the operators around these waits, without what has another name."""
        return both(self.operators_around(calls), joined(self.plain, self.named["warm-up"]))

    @cached_property
    def own_stalls(self) -> Intervals:
        """Returns stalls by themselves. A stall behind a wait belongs to the wait, unless the stalls are the larger trouble."""
        stalls, claimed = self.stalls, NEVER
        if not len(stalls):
            return stalls
        replay = Replay([self.run])
        for calls in (self.waits & self.view.copying, self.waits & ~self.view.copying):
            after = self.after(calls)
            alone = replay.saved([Without(host=both(after, stalls))])
            if replay.saved([Without(host=self.making(calls), waits=calls)]) >= alone:
                claimed = joined(claimed, after)
        own = claimed.within(stalls.start, stalls.end) < MOSTLY * (stalls.end - stalls.start)
        return union(stalls.start[own], stalls.end[own])

    @cached_property
    def waits_into_stalls(self) -> Mask:
        """The mask is true for waits behind which a stall of its own begins. What makes the program stall there also makes it wait."""
        found, end = self.waits.copy(), self.trace.calls.end[self.waits]
        until = self.next_launch(end)
        found[found] = self.own_stalls.within(end, until) > MOSTLY * (until - end)
        return found

    @cached_property
    def blocking_copies(self) -> Mask:
        """The mask is true for copies between the host and the device for which the host waits."""
        return self.run.view.moves & self.links.is_launched & np.isin(self.links.call, self.view.blocking)

    def launching(self, rows: Mask) -> Intervals:
        """Returns the host's time to launch these rows: the operators that do it, and for each launch the time since the
        launch before it."""
        calls = self.trace.calls
        launches = self.view.launching[np.argsort(calls.start[self.view.launching], kind="stable")]
        mine = np.zeros(len(calls), np.bool_)
        mine[self.links.call[rows & self.links.is_launched]] = True
        wanted, end = mine[launches], np.maximum.accumulate(calls.end[launches])
        since = np.concatenate((calls.start[launches[:1]], end[:-1]))
        before = union(since[wanted], np.maximum(end, since)[wanted])
        return both(joined(before, self.operators_around(mine)), self.steady)

    def longest(self, rows: Mask) -> str:
        """Returns the name that takes most of these rows' time."""
        mine = self.trace.work.only(self.run.view.rows[rows[self.run.view.rows]])
        return _longest(self.trace, mine.name, mine.duration)

    def total(self, rows: Mask) -> int:
        return int(self.trace.work.duration[self.run.view.rows][rows[self.run.view.rows]].sum())


@dataclass(frozen=True)
class OnHost:
    """It selects time of one process where the host is the device. Nothing runs beside anything else there, so taking out a
    piece of time saves all of it."""

    recorded: Recorded
    view: HostView

    @property
    def links(self) -> Links:
        return self.recorded.links

    @property
    def trace(self) -> Trace:
        return self.recorded.trace

    @cached_property
    def busy(self) -> Intervals:
        return host_busy(self.trace)

    @cached_property
    def time(self) -> Intervals:
        """Returns all the time of the steps."""
        return all_time(self.recorded.bounds(0, self.busy)) if len(self.busy) else NEVER

    @cached_property
    def named(self) -> dict[NamedCause, Intervals]:
        """Returns when the main thread did what has a name of its own, by the cause of idle time that it is."""
        main = self.view.main_thread
        return {cause: both(self.time, on_thread(ranges, main)) for cause, ranges in self.view.named.items()}

    @cached_property
    def idle(self) -> IdleTime:
        """Returns when no operator was under way, by cause."""
        # Between the marks of two steps the profiler does its own work, which is left out.
        rest = without(both(self.time, self.recorded.steps) if len(self.recorded.steps) else self.time, self.busy)
        when: dict[Cause, Intervals] = dict.fromkeys(CAUSES, NEVER)
        causes: tuple[NamedCause, ...] = ("warm-up", "data")
        for cause in causes:
            when[cause], rest = both(rest, self.named[cause]), without(rest, self.named[cause])
        return IdleTime(when | {"host": rest}, np.zeros(len(self.trace.calls), np.int64))

    @cached_property
    def stalls(self) -> Intervals:
        """Returns stretches of the host's own idle time that are far longer than usual."""
        steps = max(len(self.recorded.steps), 1)
        least_ns = max(WORTH_A_LINE * self.time.total / steps, self.dispatch_ns + 1)
        return unusual(self.idle.when["host"], least_ns, few=QUARTILES * steps)

    @cached_property
    def python(self) -> Intervals:
        """Returns the short stretches between one operator and the next."""
        return without(self.idle.when["host"], self.stalls)

    @cached_property
    def own_ns(self) -> Ints:
        """Returns the time of each operator without those it called."""
        return self_times(self.links)[0]

    def with_name(self, is_meant: Callable[[Described], bool]) -> Mask:
        """The mask is true for operators whose description `is_meant` accepts."""
        return where_name(self.trace, self.trace.operators, lambda name: is_meant(describe(name)))

    def with_helpers(self, rows: Mask) -> Mask:
        """Returns these operators and those that they call to prepare their work, which are views, allocations and
        conversions of a number."""
        nesting, found = self.links.nesting, rows.copy()
        helps = self.with_name(lambda name: name.kernel_class in ("other", "copy"))
        for level in nesting.levels()[1:]:
            found[level] |= helps[level] & found[nesting.parent[level]]
        return found

    @cached_property
    def attention(self) -> Mask:
        return attention_on_host(self.links)

    @cached_property
    def again(self) -> Mask:
        return recomputed_operators(self.links)

    def around(self, rows: Mask) -> int:
        """Returns the own time of the ranges around operators. These ranges contain the Python that calls the operators."""
        parent = distinct(self.links.nesting.parent[rows])
        return int(self.own_ns[parent[(parent >= 0) & ~rows[parent]]].sum())

    def python_beside(self, rows: Mask) -> int:
        """Returns how much of the Python between operators is right before or behind one of these, or in what does little but call it."""
        operators, parent, found = self.trace.operators, self.links.nesting.parent, np.flatnonzero(rows)
        for _ in range(int(self.links.nesting.depth.max(initial=0))):
            little = operators.duration[parent[found]] < operators.duration[found] / MOSTLY
            found = np.where((parent[found] >= 0) & little, parent[found], found)
        touching = np.isin(self.python.start, operators.end[found]) | np.isin(self.python.end, operators.start[found])
        return int((self.python.end - self.python.start)[touching].sum())

    @cached_property
    def dispatch_ns(self) -> int:
        """Returns the longest usual time that finding and entering an operator takes. Operators that compute nothing show it."""
        calls = self.own_ns[self.with_name(lambda name: name.kernel_class == "other") & (self.own_ns > 0)]
        own = self.idle.when["host"]
        return usual(calls if len(calls) >= QUARTILES else own.end - own.start)

    @cached_property
    def call_ns(self) -> int:
        """Returns what calling an operator takes, which is the Python before it and entering it."""
        pauses = self.python.end - self.python.start
        return self.dispatch_ns + int(np.median(pauses) if len(pauses) else 0)

    @cached_property
    def _alike(self) -> Ints:
        """Returns a number for each operator. It is the same for all of one name and shape."""
        operators = self.trace.operators
        found: Ints = np.unique(
            operators.name * np.int64(len(self.trace.shapes) + 1) + operators.shape, return_inverse=True
        )[1]
        return found

    @cached_property
    def is_work(self) -> Mask:
        """The mask is true for operators that usually take longer than calling one takes."""
        order, calls = np.lexsort((self.own_ns, self._alike)), np.bincount(self._alike)
        middle = self.own_ns[order[np.cumsum(calls) - (calls + 1) // 2]]
        found: Mask = (middle > self.call_ns)[self._alike]
        return found & ~self.views

    @cached_property
    def views(self) -> Mask:
        """The mask is true for operators that make many views. They take time for each view, and compute nothing."""
        return matching(self.trace, self.trace.operators, _MANY_VIEWS)

    @cached_property
    def is_little(self) -> Mask:
        """The mask is true for operators whose data is in a processor's first cache and which multiply no matrices.
        Computing them takes less time than calling them. It is only known if shapes were recorded."""
        operators, trace = self.trace.operators, self.trace
        first = np.unique(self._alike, return_index=True)[1]
        pairs = zip(operators.name[first].tolist(), operators.shape[first].tolist(), strict=True)
        works = [work_of(trace.names[name], trace.shapes[shape]) if shape >= 0 else None for name, shape in pairs]
        little = [work is not None and not work.flops and work.bytes <= FIRST_CACHE_BYTES for work in works]
        return np.array(little, np.bool_)[self._alike]

    @cached_property
    def calling(self) -> int:
        """Returns the time that operators take to be called, outside of loops that read numbers. It is all of their own
        time, except for those that take longer, which count only what calling them takes."""
        inside = ~self.reading.holds(self.trace.operators.start)
        most = np.where(self.is_little | self.views, self.own_ns, self.call_ns)
        called, taken = (np.bincount(self._alike, each * inside) for each in (most, self.own_ns))
        return int(np.minimum(taken, called).sum())

    @cached_property
    def numbers_read(self) -> Mask:
        """The mask is true for operators that turn a tensor into a number of Python."""
        return matching(self.trace, self.trace.operators, _READS_A_NUMBER)

    @cached_property
    def reading(self) -> Intervals:
        """Returns when tensors are turned into numbers one by one: the operators that do it, and the time before each since
        an operator last computed something, such as the views of a loop over rows. Stalls are left out."""
        operators = self.trace.operators
        on_main = operators.thread == self.view.main_thread
        reads = self.numbers_read & on_main
        computed = np.sort(operators.end[self.is_work & on_main & ~self.with_helpers(reads)])
        read = union(operators.start[reads], operators.end[reads])
        start = int(self.time.start[0]) if len(self.time) else 0
        since = np.append(start, computed)[np.searchsorted(computed, read.start, side="right")]
        before = without(union(np.minimum(since, read.start), read.end), self.stalls)
        return both(joined(read, before), self.time)

    def longest(self, rows: Mask) -> str:
        return _longest(self.trace, self.trace.operators.name[rows], self.own_ns[rows])
