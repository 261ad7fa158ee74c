"""This module says what the host did: when it worked, when it waited, and how it launched work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.columns import UNKNOWN, HostRanges, Ids, Ints, Mask, Trace, Work
from redline.trace.intervals import Intervals, both, distinct, overlap, seconds, summed, union
from redline.trace.links import Links, matching
from redline.trace.names import label_of

SHORT_KERNEL_NS = 10_000
"""A kernel this short takes no longer than it takes to launch it."""

LONG_LAUNCH_NS = 200_000
LONG_LAUNCH_RATIO = 20
"""A launch takes some microseconds. The first of a kernel may load its code, which takes a hundred times as long."""

LONG_COPY_NS = 50_000
"""A call that lasts until the middle of such a copy was held up by it: calls that only ask for one take some microseconds."""

_BLOCKING = re.compile(r"Synchronize|^(cuda|hip|cu)Memcpy(2D|3D|HtoD|DtoH|DtoD|WithStream)?(_v\d+|_ptds|_ptsz)*$")
_ASYNC_COPY = re.compile(r"^(cuda|hip|cu)Memcpy\w*Async")
_COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
_ALLOCATING = re.compile(r"^(cuda|hip|cu)(Malloc|Free|HostAlloc|HostFree|HostMalloc|MemAlloc|MemFree|HostRegister)")
_LOADING_CODE = re.compile(
    r"^(cu|hip|cuda)(Module|Library)(Load|Get)|GraphInstantiate|FuncGetAttributes|GetFuncBySymbol"
)
_CAPTURE, _BEGIN_CAPTURE = re.compile(r"(Begin|End)Capture"), re.compile(r"BeginCapture")
_STEP = re.compile(r"^ProfilerStep")
_COMPILING = re.compile(
    r"^(_compile\b|entire_frame_compile|backend_compile|compile_fx|inductor_codegen|create_aot_dispatcher|"
    r"aot_collect|triton_compile|async_compile|PyCodeCache|autotun)|\(dynamo_timed\)"
)
_LAUNCH = re.compile(r"Launch(?!Host)")
_LOADER = re.compile(r"enumerate\(DataLoader\)|DataLoader\w*\.__next__|^redline/data$", re.IGNORECASE)


NamedCause = Literal["warm-up", "sync", "allocator", "data"]
"""Causes of idle time that calls and marks have a name for."""


@dataclass(frozen=True)
class HostView:
    """A view of one trace's host is worked out once and shared by the tables that ask who waited for whom."""

    links: Links

    @property
    def trace(self) -> Trace:
        return self.links.trace

    @cached_property
    def blocking(self) -> Ints:
        """Calls that wait for the device. A copy "async" of pageable memory does so too.

        It ends after its copy, or once the last piece of a long one is staged: then the copy's own end is waited for next.
        """
        trace, work = self.trace, self.trace.work
        rows = matching(trace, trace.calls, _BLOCKING)
        maybe = matching(trace, trace.calls, _ASYNC_COPY)
        if maybe.any():
            known = self.links.is_launched & (work.kind != Work.KERNEL)
            calls = self.links.call[known]
            done = np.zeros(len(trace.calls), np.bool_)
            start, lasts = work.start[known], work.duration[known]
            staged = (lasts >= LONG_COPY_NS) & (start + lasts // 2 <= trace.calls.end[calls])
            done[calls] = staged | (work.end[known] <= trace.calls.end[calls])
            rows |= maybe & done
        return np.flatnonzero(rows)

    @cached_property
    def copying(self) -> Mask:
        """True for calls that copy."""
        return matching(self.trace, self.trace.calls, _COPY)

    @cached_property
    def allocating(self) -> Ints:
        """Calls that take memory from the driver or give it back, again and again."""
        calls = matching(self.trace, self.trace.calls, _ALLOCATING)
        calls[self._allocated_once] = False
        return np.flatnonzero(calls)

    @cached_property
    def _allocated_once(self) -> Ints:
        """Such calls that only the first of several steps makes; without marks of steps, that an operator makes once."""
        trace = self.trace
        rows = np.flatnonzero(matching(trace, trace.calls, _ALLOCATING))
        steps = np.sort(trace.annotations.start[matching(trace, trace.annotations, _STEP)])
        if len(steps) > 1 and len(rows):
            return rows if (trace.calls.start[rows] < steps[1]).all() else rows[:0]
        operators = self.links.operators_of(rows)
        names = (
            np.where(operators >= 0, trace.operators.name[operators], UNKNOWN) if len(trace.operators) else operators
        )
        _, which, counts = np.unique(
            np.stack((trace.calls.name[rows], names)), axis=1, return_inverse=True, return_counts=True
        )
        runs_again = np.array([(trace.operators.name == name).sum() > 1 for name in names.tolist()], np.bool_)
        found: Ints = rows[(counts[which.ravel()] == 1) & runs_again]
        return found

    @cached_property
    def warming_up(self) -> HostRanges:
        """This is what happens once: loading a kernel's code, compiling, recording a graph, memory that the first step takes."""
        trace = self.trace
        rows = matching(trace, trace.calls, _LOADING_CODE)
        rows[self._first_launches()] = True
        rows[self._allocated_once] = True
        return joined_ranges(joined_ranges(picked(trace.calls, rows), self._capturing()), compiling(trace))

    def _capturing(self) -> HostRanges:
        """Returns when graphs are recorded, from the beginning to the end: what the host launches there does not run."""
        calls = self.trace.calls
        rows = np.flatnonzero(matching(self.trace, calls, _CAPTURE))
        rows = rows[np.lexsort((calls.start[rows], calls.thread[rows]))]
        begins = matching(self.trace, calls, _BEGIN_CAPTURE)[rows]
        ends_next = np.append(
            begins[:-1] & ~begins[1:] & (calls.thread[rows][1:] == calls.thread[rows][:-1]), [False] * (len(rows) > 0)
        )
        found, pairs = picked(calls, rows), np.flatnonzero(ends_next)
        found.duration[pairs] = calls.end[rows[pairs + 1]] - calls.start[rows[pairs]]
        return found

    def _first_launches(self) -> Ints:
        """Returns launches that were far longer than the others, each the first of its kernel; graphs take long by nature."""
        links, calls = self.links, self.trace.calls
        known = np.flatnonzero(links.is_launched & ~links.by_graph & (self.trace.work.kind == Work.KERNEL))
        if not len(known):
            return known
        order = known[np.argsort(links.launched_at[known], kind="stable")]
        _, first = np.unique(self.trace.work.name[order], return_index=True)
        duration = calls.duration[links.call[order[first]]]
        usual = float(np.median(calls.duration[links.call[known]]))
        # If nearly every launch is a first one there is no usual launch to compare with.
        long = duration >= max(LONG_LAUNCH_NS, min(LONG_LAUNCH_RATIO * usual, 10 * LONG_LAUNCH_NS))
        return links.call[order[first[long]]]

    @cached_property
    def loader(self) -> HostRanges:
        """These are ranges in which the host sat in a data loader."""
        annotations = self.trace.annotations
        return picked(annotations, matching(self.trace, annotations, _LOADER))

    @cached_property
    def named(self) -> dict[NamedCause, HostRanges]:
        """Calls and marks by the cause of idle time that they are; where several fit, the first one counts."""
        calls = self.trace.calls
        return {
            "warm-up": self.warming_up,
            "sync": picked(calls, self.blocking),
            "allocator": picked(calls, self.allocating),
            "data": self.loader,
        }

    @property
    def launched(self) -> int:
        """Calls that launch work, whether the work is in the trace or not."""
        return int(matching(self.trace, self.trace.calls, _LAUNCH).sum())

    @cached_property
    def launching(self) -> Ints:
        """The calls that launched the work."""
        return distinct(self.links.call[self.links.is_launched])

    @cached_property
    def launching_threads(self) -> Ids:
        """Threads whose work the steps wait for: those that launch it, and the one that marks steps."""
        return distinct(np.concatenate((self.trace.calls.thread[self.launching], [self.main_thread])))

    @cached_property
    def waits(self) -> Ints:
        """These are the blocking calls on threads that the steps wait for, in order of time."""
        calls = self.trace.calls
        rows = self.blocking[np.isin(calls.thread[self.blocking], self.launching_threads)]
        return rows[np.argsort(calls.start[rows], kind="stable")]

    @cached_property
    def main_thread(self) -> int:
        """This is the thread that marks steps, else the one that launches most."""
        trace = self.trace
        marks = trace.annotations.thread[matching(trace, trace.annotations, _STEP)]
        for threads in (marks, trace.calls.thread[self.launching], trace.operators.thread):
            if len(threads):
                return int(np.bincount(threads).argmax())
        return UNKNOWN

    @cached_property
    def active(self) -> Intervals:
        """Whenever some operator or runtime call was under way."""
        operators, calls = self.trace.operators, self.trace.calls
        return union(np.concatenate((operators.start, calls.start)), np.concatenate((operators.end, calls.end)))

    @cached_property
    def blocked(self) -> Intervals:
        """This is when some thread sat in a call that waits for the device."""
        calls = self.trace.calls
        return union(calls.start[self.blocking], calls.end[self.blocking])


MOSTLY = 0.5
"""The share of a stretch of time that must be covered to explain it."""

_NOT_TELLING = re.compile(r"^(ProfilerStep|<built-in|<string>|threading\.py|contextlib\.py|nn\.Module: )")
WAITS_FOR_WORK = re.compile(
    r"queue\.py\(\d+\): get\b|multiprocessing/(queues|connection)\.py\(\d+\): (get|recv|poll|wait)\b|"
    r"selectors\.py\(\d+\): select\b|socket\.py\(\d+\): (accept|recv)|<built-in method (sleep|select|epoll)|"
    r"asyncio/base_events\.py\(\d+\): _run_once|\bzmq/|Event\.wait|of select\.epoll"
)
"""Python functions in which a program sits when it has nothing to do."""


def meanwhile(view: HostView, when: Intervals) -> str:
    """The Python function or annotation that the steps' threads were in for most of this time; empty where none was.

    The tightest around it is the most telling; torch's own functions tell only where nothing else does.
    """
    trace = view.trace
    best: tuple[bool, bool, float, str] | None = None
    for ranges in (trace.frames, trace.annotations):
        rows = np.flatnonzero(np.isin(ranges.thread, view.launching_threads))
        inside = when.within(ranges.start[rows], ranges.end[rows])
        rows, inside = rows[inside > 0], inside[inside > 0]
        numbers, which = np.unique(ranges.name[rows], return_inverse=True)
        covered, whole = (summed(which, values, len(numbers)) for values in (inside, ranges.duration[rows]))
        for number, cover, total in zip(numbers.tolist(), covered.tolist(), whole.tolist(), strict=True):
            name = trace.names[number]
            if cover < MOSTLY * when.total or _NOT_TELLING.search(name):
                continue
            told = (bool(WAITS_FOR_WORK.search(name)), not name.startswith("torch/"), cover / total, name)
            best = told if best is None or told > best else best
    return label_of(best[-1]) if best is not None and best[2] >= MOSTLY else ""


def other_threads(view: HostView, when: Intervals) -> str:
    """Returns what is computed for most of this time by threads that launch nothing; empty where they did not.

    Threads of one process share one interpreter: such work makes the one that launches late.
    """
    operators = view.trace.operators
    rows = np.flatnonzero(~np.isin(operators.thread, view.launching_threads))
    busy = union(operators.start[rows], operators.end[rows])
    if both(busy, when).total < MOSTLY * when.total or not when.total:
        return ""
    inside = when.within(operators.start[rows], operators.end[rows])
    return label_of(view.trace.names[int(summed(operators.name[rows], inside, len(view.trace.names)).argmax())])


def compiling(trace: Trace) -> HostRanges:
    """Ranges in which torch.compile was at work; it marks them as operators or as annotations, by its version."""
    marked = [picked(table, matching(trace, table, _COMPILING)) for table in (trace.annotations, trace.operators)]
    return joined_ranges(*marked)


def picked(ranges: HostRanges, rows: Mask | Ints) -> HostRanges:
    return HostRanges(ranges.name[rows], ranges.start[rows], ranges.duration[rows], ranges.thread[rows])


def joined_ranges(one: HostRanges, other: HostRanges) -> HostRanges:
    return HostRanges(
        *(np.concatenate((getattr(one, name), getattr(other, name))) for name in HostRanges.__dataclass_fields__)
    )


def on_thread(ranges: HostRanges, thread: int) -> Intervals:
    rows = ranges.thread == thread
    return union(ranges.start[rows], ranges.end[rows])


class Host(Frozen):
    """The figures are sums over several traces of what the host did."""

    busy_s: float
    """This is the time in operators and runtime calls on any thread, less the time blocked."""
    blocked_s: float
    """In calls that wait for the device."""
    ratio: float | None
    """Busy host over busy device: above 1, the host has more to do than the device."""
    verdict: str
    launched: int = 0
    """Calls that launch work, whether the work is in the trace or not."""


class Launches(Frozen):
    """How work gets to the device."""

    calls: int
    """Calls that launched anything; a graph is one."""
    work: int
    """This many pieces of work were launched."""
    host_s: float
    """Host time inside those calls."""
    mean_call_s: float | None
    median_latency_s: float | None
    """The latency is from the beginning of the call to the beginning of the work: long when the queue is full of work ahead of it."""
    median_kernel_s: float | None
    short_kernels: int
    """Kernels of 10 µs or less."""
    short_share: float
    """Share of all kernels."""
    graphs: int = 0
    """So many of the calls are launches of recorded graphs."""
    graph_work: int = 0
    p90_latency_s: float | None = None
    p99_latency_s: float | None = None


def host_of(views: Sequence[HostView], device_busy_s: float) -> Host:
    busy = blocked = 0
    for view in views:
        busy += view.active.total - overlap(view.active, view.blocked)
        blocked += view.blocked.total
    ratio = seconds(busy) / device_busy_s if device_busy_s else None
    launched = sum(view.launched for view in views)
    return Host(
        busy_s=seconds(busy),
        blocked_s=seconds(blocked),
        ratio=ratio,
        verdict=_verdict(ratio, launched),
        launched=launched,
    )


def _verdict(ratio: float | None, launched: int) -> str:
    if ratio is None and launched:
        return f"{launched:,} launches but no work of a device in the trace: its records are missing"
    if ratio is None:
        return "no device work in the trace: host and device are the same"
    if ratio > 1:
        return "the host has more to do than the device"
    return "the device has more to do than the host"


def launches_of(links: Sequence[Links]) -> Launches:
    calls = work = host = graphs = graph_work = 0
    latencies, kernels = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for each in links:
        trace, known = each.trace, each.is_launched
        launching = distinct(each.call[known])
        calls += len(launching)
        work += int(known.sum())
        host += int(trace.calls.duration[launching].sum())
        graphs += len(distinct(each.call[each.by_graph]))
        graph_work += int(each.by_graph.sum())
        latencies.append(np.maximum(trace.work.start[known] - each.launched_at[known], 0))
        kernels.append(trace.work.duration[trace.work.kind == Work.KERNEL])
    durations, delays = np.concatenate(kernels), np.concatenate(latencies)
    short = int((durations <= SHORT_KERNEL_NS).sum())
    usual, late, latest = (seconds(float(one)) for one in np.percentile(delays, (50, 90, 99))) if work else [None] * 3
    return Launches(
        calls=calls,
        work=work,
        host_s=seconds(host),
        mean_call_s=seconds(host / calls) if calls else None,
        median_latency_s=usual,
        p90_latency_s=late,
        p99_latency_s=latest,
        median_kernel_s=seconds(float(np.median(durations))) if len(durations) else None,
        short_kernels=short,
        short_share=short / len(durations) if len(durations) else 0.0,
        graphs=graphs,
        graph_work=graph_work,
    )
