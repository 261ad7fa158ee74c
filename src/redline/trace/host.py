"""What the host did: busy in operators and runtime calls, blocked waiting for the device, launching work."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from redline.spec import Spec
from redline.trace.columns import Ints, Trace, Work, seconds
from redline.trace.intervals import Intervals, joined, overlap, union
from redline.trace.links import Links

SHORT_KERNEL_NS = 10_000
"""A kernel this short takes no longer than it takes to launch it."""

_BLOCKING = re.compile(r"Synchronize|^(cuda|hip|cu)Memcpy(2D|3D|HtoD|DtoH|WithStream)?(_v2|_ptds)?$|EventQuery")


class Host(Spec):
    """Of several traces, sums."""

    busy_s: float
    """In operators and runtime calls on any thread, less the time blocked."""
    blocked_s: float
    """In calls that wait for the device."""
    ratio: float | None
    """Busy host over busy device: above 1, the host has more to do than the device."""
    verdict: str


class Launches(Spec):
    """How work gets to the device."""

    calls: int
    """Calls that launched anything; a graph is one."""
    work: int
    """What they launched."""
    host_s: float
    """Host time inside those calls."""
    mean_call_s: float | None
    median_latency_s: float | None
    """From the beginning of the call to the beginning of the work: long when the queue is full of work ahead of it."""
    median_kernel_s: float | None
    short_kernels: int
    """Kernels of no more than 10 µs."""
    short_share: float
    """Their share of all kernels, by number."""


def blocking_calls(trace: Trace) -> Intervals:
    numbers = [number for number in np.unique(trace.calls.name).tolist() if _BLOCKING.search(trace.names[number])]
    rows = np.isin(trace.calls.name, numbers)
    return union(trace.calls.start[rows], trace.calls.end[rows])


def host_activity(trace: Trace) -> Intervals:
    """Whenever some operator or runtime call was under way."""
    operators, calls = trace.operators, trace.calls
    return union(np.concatenate((operators.start, calls.start)), np.concatenate((operators.end, calls.end)))


def host_of(traces: Sequence[Trace], device_busy_s: float) -> Host:
    busy = blocked = 0
    for trace in traces:
        active, waiting = host_activity(trace), blocking_calls(trace)
        busy += active.total - overlap(active, waiting)
        blocked += waiting.total
    ratio = seconds(busy) / device_busy_s if device_busy_s else None
    return Host(busy_s=seconds(busy), blocked_s=seconds(blocked), ratio=ratio, verdict=_verdict(ratio))


def launches_of(links: Sequence[Links]) -> Launches:
    calls = work = host = 0
    latencies: list[Ints] = []
    kernels: list[Ints] = []
    for each in links:
        trace, known = each.trace, each.call >= 0
        launching = np.unique(each.call[known])
        calls += len(launching)
        work += int(known.sum())
        host += int(trace.calls.duration[launching].sum())
        latencies.append(trace.work.start[known] - each.launched_at[known])
        kernels.append(trace.work.duration[trace.work.kind == Work.KERNEL])
    durations = np.concatenate(kernels) if kernels else np.empty(0, np.int64)
    short = int((durations <= SHORT_KERNEL_NS).sum())
    return Launches(
        calls=calls,
        work=work,
        host_s=seconds(host),
        mean_call_s=seconds(host / calls) if calls else None,
        median_latency_s=_median(np.concatenate(latencies)) if latencies else None,
        median_kernel_s=_median(durations),
        short_kernels=short,
        short_share=short / len(durations) if len(durations) else 0.0,
    )


def all_busy(traces: Sequence[Trace]) -> Intervals:
    return joined(*(union(trace.work.start, trace.work.end) for trace in traces))


def _median(values: Ints) -> float | None:
    return seconds(float(np.median(values))) if len(values) else None


def _verdict(ratio: float | None) -> str:
    if ratio is None:
        return "no device work in the trace: host and device are the same"
    if ratio > 1:
        return "the host has more to do than the device"
    return "the device has more to do than the host"
