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
from redline.trace.intervals import Intervals, distinct, overlap, seconds, summed, union, usual
from redline.trace.links import Links, matching
from redline.trace.names import label_of

SHORT_KERNEL_NS = 10_000
"""A kernel this short takes no longer than it takes to launch it."""
LOADING_CODE_NS = 200_000
"""The first launch of a kernel may load its code, which takes this long or longer; a launch takes some microseconds."""

_BLOCKING = re.compile(r"Synchronize|^(cuda|hip|cu)Memcpy(2D|3D|HtoD|DtoH|DtoD|WithStream)?(_v\d+|_ptds|_ptsz)*$")
_ASYNC_COPY = re.compile(r"^(cuda|hip|cu)Memcpy\w*Async")
_COPY = re.compile(r"^(cuda|hip|cu)Memcpy")
_ALLOCATING = re.compile(r"^(cuda|hip|cu)(Malloc|Free|HostAlloc|HostFree|HostMalloc|MemAlloc|MemFree|HostRegister)")
_LOADING_CODE = re.compile(
    r"^(cu|hip|cuda)(Module|Library)(Load|Get)|GraphInstantiate|FuncGetAttributes|GetFuncBySymbol"
)
_CAPTURE = re.compile(r"(Begin|End)Capture")
STEP = re.compile(r"^ProfilerStep\s*#\d+$")
_COMPILING = re.compile(
    r"^(_compile\b|entire_frame_compile|backend_compile|compile_fx|inductor_codegen|create_aot_dispatcher|"
    r"aot_collect|triton_compile|async_compile|PyCodeCache|autotun)|\(dynamo_timed\)"
)
_LAUNCH = re.compile(r"Launch(?!Host)")
_LOADER = re.compile(r"enumerate\(DataLoader\)|DataLoader\w*\.__next__|^redline/data$", re.IGNORECASE)

NamedCause = Literal["warm-up", "sync", "allocator", "data"]
"""These causes of idle time can be named by calls and marks."""


@dataclass(frozen=True)
class HostView:
    """A view of one trace's host is worked out once and shared by the tables that ask who waited for whom."""

    links: Links

    @property
    def trace(self) -> Trace:
        return self.links.trace

    def calls(self, rule: re.Pattern[str]) -> Mask:
        return matching(self.trace, self.trace.calls, rule)

    @cached_property
    def blocking(self) -> Ints:
        """Returns calls that wait for the device. A copy "async" of pageable memory does so too.

        Such a call ends after its copy, or once the last piece of a long one is staged. Then the copy's own end is waited for next.
        """
        work = self.trace.work
        known = self.links.is_launched & (work.kind != Work.KERNEL)
        done = np.zeros(len(self.trace.calls), np.bool_)
        call = self.links.call[known]
        done[call] = (work.start + work.duration // 2)[known] <= self.trace.calls.end[call]
        return np.flatnonzero(self.calls(_BLOCKING) | (self.calls(_ASYNC_COPY) & done))

    @cached_property
    def copying(self) -> Mask:
        """The mask is true for calls that copy."""
        return self.calls(_COPY)

    @cached_property
    def _allocating(self) -> tuple[Ints, Ints]:
        """Returns calls that take memory from the driver or give it back: those that do so again and again, and those that do so once.

        A call happens once if only the first of several steps makes it. Without marks of steps, it does if an operator
        makes it once although the operator runs again.
        """
        trace, rows = self.trace, np.flatnonzero(self.calls(_ALLOCATING))
        steps = np.sort(trace.annotations.start[matching(trace, trace.annotations, STEP)])
        if len(steps) > 1:
            once = np.full(len(rows), (trace.calls.start[rows] < steps[1]).all())
        else:
            operator = self.links.operators_of(rows)
            name = np.append(trace.operators.name, UNKNOWN)[operator]
            runs = np.append(np.bincount(trace.operators.name, minlength=1), 0)[name]
            _, which, count = np.unique(
                trace.calls.name[rows] * np.int64(len(trace.names) + 1) + name, return_inverse=True, return_counts=True
            )
            once = (count[which] == 1) & (runs > 1)
        return rows[~once], rows[once]

    @cached_property
    def warming_up(self) -> HostRanges:
        """This is what happens once: loading a kernel's code, compiling, recording a graph, memory that the first step takes."""
        rows = self.calls(_LOADING_CODE)
        rows[self._first_launches()] = True
        rows[self._allocating[1]] = True
        return joined_ranges(picked(self.trace.calls, rows), self._capturing(), compiling(self.trace))

    def _capturing(self) -> HostRanges:
        """Returns when graphs are recorded, from the beginning to the end. What the host launches there does not run."""
        calls, rows = self.trace.calls, np.flatnonzero(self.calls(_CAPTURE))
        rows = rows[np.lexsort((calls.start[rows], calls.thread[rows]))]
        found, begins = picked(calls, rows), ["Begin" in self.trace.names[name] for name in calls.name[rows].tolist()]
        for at in range(len(rows) - 1):
            if begins[at] and not begins[at + 1] and found.thread[at] == found.thread[at + 1]:
                found.duration[at] = found.end[at + 1] - found.start[at]
        return found

    def _first_launches(self) -> Ints:
        """Returns launches that were far longer than others, each the first of its kernel. Graphs are left out, because
        they always take long."""
        links, calls = self.links, self.trace.calls
        known = np.flatnonzero(links.is_launched & ~links.by_graph & (self.trace.work.kind == Work.KERNEL))
        order = known[np.argsort(links.launched_at[known], kind="stable")]
        first = np.unique(self.trace.work.name[order], return_index=True)[1]
        call, again = links.call[order[first]], np.delete(links.call[order], first)
        return call[calls.duration[call] >= max(LOADING_CODE_NS, usual(calls.duration[again]))]

    @cached_property
    def loader(self) -> HostRanges:
        """These are ranges in which the host sat in a data loader."""
        annotations = self.trace.annotations
        return picked(annotations, matching(self.trace, annotations, _LOADER))

    @cached_property
    def named(self) -> dict[NamedCause, HostRanges]:
        """Returns calls and marks by the cause of idle time that they are. If several causes fit, the first one counts."""
        calls = self.trace.calls
        return {
            "warm-up": self.warming_up,
            "sync": picked(calls, self.blocking),
            "allocator": picked(calls, self._allocating[0]),
            "data": self.loader,
        }

    @property
    def launched(self) -> int:
        """Returns the number of calls that launch work, whether the work is in the trace or not."""
        return int(self.calls(_LAUNCH).sum())

    @cached_property
    def launching(self) -> Ints:
        """Returns the calls that launched the work."""
        return distinct(self.links.call[self.links.is_launched])

    @cached_property
    def launching_threads(self) -> Ids:
        """Returns the threads whose work the steps wait for: those that launch it, and the one that marks steps."""
        return distinct(np.append(self.trace.calls.thread[self.launching], self.main_thread))

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
        marks = trace.annotations.thread[matching(trace, trace.annotations, STEP)]
        for threads in (marks, trace.calls.thread[self.launching], trace.operators.thread):
            if len(threads):
                return int(np.bincount(threads).argmax())
        return UNKNOWN

    @cached_property
    def active(self) -> Intervals:
        """Returns when some operator or runtime call was under way."""
        return union_of(joined_ranges(self.trace.operators, self.trace.calls))

    @cached_property
    def blocked(self) -> Intervals:
        """This is when some thread sat in a call that waits for the device."""
        return union_of(self.named["sync"])


MOSTLY = 0.5
"""To explain a stretch of time, a cause must cover this share of it."""

_NOT_TELLING = re.compile(r"^(ProfilerStep|<built-in|<string>|threading\.py|contextlib\.py|nn\.Module: )")
WAITS_FOR_WORK = re.compile(
    r"queue\.py\(\d+\): get\b|multiprocessing/(queues|connection)\.py\(\d+\): (get|recv|poll|wait)\b|"
    r"selectors\.py\(\d+\): select\b|socket\.py\(\d+\): (accept|recv)|<built-in method (sleep|select|epoll)|"
    r"asyncio/base_events\.py\(\d+\): _run_once|\bzmq/|Event\.wait|of select\.epoll"
)
"""A program sits in these Python functions when it has nothing to do."""


def meanwhile(view: HostView, when: Intervals) -> str:
    """Returns the Python function or annotation that the steps' threads were in for most of this time. It is empty if there was none.

    The tightest around it is the most telling. Functions of torch itself count only if nothing else does.
    """
    trace, best = view.trace, (False, False, 0.0, "")
    for ranges in (trace.frames, trace.annotations):
        rows = np.flatnonzero(np.isin(ranges.thread, view.launching_threads))
        inside = when.within(ranges.start[rows], ranges.end[rows])
        rows, inside = rows[inside > 0], inside[inside > 0]
        names, which = np.unique(ranges.name[rows], return_inverse=True)
        covered, whole = (summed(which, values, len(names)) for values in (inside, ranges.duration[rows]))
        for number, cover, total in zip(names.tolist(), covered.tolist(), whole.tolist(), strict=True):
            name = trace.names[number]
            if cover >= MOSTLY * when.total and not _NOT_TELLING.search(name):
                told = (bool(WAITS_FOR_WORK.search(name)), not name.startswith("torch/"), cover / total, name)
                best = max(best, told)
    return label_of(best[-1]) if best[2] >= MOSTLY else ""


def compiling(trace: Trace) -> HostRanges:
    """Returns ranges in which torch.compile was at work. It marks them as operators or as annotations, depending on its version."""
    return joined_ranges(
        *(picked(table, matching(trace, table, _COMPILING)) for table in (trace.annotations, trace.operators))
    )


def picked(ranges: HostRanges, rows: Mask | Ints) -> HostRanges:
    return HostRanges(ranges.name[rows], ranges.start[rows], ranges.duration[rows], ranges.thread[rows])


def joined_ranges(*several: HostRanges) -> HostRanges:
    return HostRanges(
        *(np.concatenate([getattr(one, name) for one in several]) for name in HostRanges.__dataclass_fields__)
    )


def union_of(ranges: HostRanges) -> Intervals:
    return union(ranges.start, ranges.end)


def on_thread(ranges: HostRanges, *threads: int) -> Intervals:
    return union_of(picked(ranges, np.isin(ranges.thread, threads)))


class Host(Frozen):
    """The figures are sums over several traces of what the host did."""

    busy_s: float
    """This is the time in operators and runtime calls on any thread, less the time blocked."""
    blocked_s: float
    """This is the time in calls that wait for the device."""
    ratio: float | None
    """This is the busy time of the host over that of the device. If it is above 1, the host has more to do than the device."""
    verdict: str
    launched: int = 0
    """This many calls launch work, whether the work is in the trace or not."""


class Launches(Frozen):
    """This says how work gets to the device."""

    calls: int
    """This many calls launched anything. A graph counts as one."""
    work: int
    """This many pieces of work were launched."""
    host_s: float
    """This is the host's time inside those calls."""
    mean_call_s: float | None
    median_latency_s: float | None
    """The latency is from the beginning of the call to the beginning of the work. It is long if the queue is full of work ahead of it."""
    median_kernel_s: float | None
    short_kernels: int
    """This many kernels took 10 µs or less."""
    short_share: float
    """This is their share of all kernels."""
    graphs: int = 0
    """This many of the calls are launches of recorded graphs."""


def host_of(views: Sequence[HostView], device_busy_s: float) -> Host:
    blocked = sum(view.blocked.total for view in views)
    busy = sum(view.active.total - overlap(view.active, view.blocked) for view in views)
    ratio = seconds(busy) / device_busy_s if device_busy_s else None
    launched = sum(view.launched for view in views)
    if ratio is not None:
        verdict = f"the {'host' if ratio > 1 else 'device'} has more to do than the {'device' if ratio > 1 else 'host'}"
    elif launched:
        verdict = f"{launched:,} launches but no work of a device in the trace: its records are missing"
    else:
        verdict = "no device work in the trace: host and device are the same"
    return Host(busy_s=seconds(busy), blocked_s=seconds(blocked), ratio=ratio, verdict=verdict, launched=launched)


def launches_of(views: Sequence[HostView]) -> Launches:
    launching = [view.trace.calls.duration[view.launching] for view in views]
    calls, host = sum(map(len, launching)), sum(int(lasts.sum()) for lasts in launching)
    none = np.empty(0, np.int64)
    kernels = np.concatenate([none, *(view.trace.work.duration[view.trace.work.kind == Work.KERNEL] for view in views)])
    delays = np.concatenate(
        [none, *((view.trace.work.start - view.links.launched_at)[view.links.is_launched] for view in views)]
    )
    short = int((kernels <= SHORT_KERNEL_NS).sum())
    return Launches(
        calls=calls,
        work=len(delays),
        host_s=seconds(host),
        mean_call_s=seconds(host / calls) if calls else None,
        median_latency_s=_median(np.maximum(delays, 0)),
        median_kernel_s=_median(kernels),
        short_kernels=short,
        short_share=short / max(len(kernels), 1),
        graphs=sum(len(distinct(view.links.call[view.links.by_graph])) for view in views),
    )


def _median(values: Ints) -> float | None:
    return seconds(float(np.median(values))) if len(values) else None
