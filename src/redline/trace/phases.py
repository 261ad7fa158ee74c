"""How long each profiled step took, and how much that varies."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from redline.spec import Frozen
from redline.trace.columns import HostRanges, Intervals, Ints, Mask, Trace, Work, joined, overlap, seconds, union
from redline.trace.links import Links

_STEP = re.compile(r"^ProfilerStep\s*#\d+$")


class Steps(Frozen):
    count: int
    seconds: tuple[float, ...]
    """Of each step, in order. With a device: from the start of its first work to that of the next step's first work."""
    mean_s: float
    std_s: float | None
    min_s: float
    max_s: float
    spread: float | None
    """Standard deviation over mean."""


def steps_of(links: Sequence[Links]) -> Steps | None:
    """None where the trace has no marks of steps; of several traces, all their steps."""
    lengths = np.concatenate([_lengths(each) for each in links]) if links else np.empty(0, np.int64)
    if not len(lengths):
        return None
    mean = float(lengths.mean())
    std = float(lengths.std(ddof=1)) if len(lengths) > 1 else None
    return Steps(
        count=len(lengths),
        seconds=tuple(seconds(length) for length in lengths.tolist()),
        mean_s=seconds(mean),
        std_s=None if std is None else seconds(std),
        min_s=seconds(int(lengths.min())),
        max_s=seconds(int(lengths.max())),
        spread=None if std is None or not mean else std / mean,
    )


def count_steps(trace: Trace) -> int:
    return int(_step_rows(trace).sum())


def _lengths(links: Links) -> Ints:
    trace = links.trace
    rows = _step_rows(trace)
    start, end = trace.annotations.start[rows], trace.annotations.end[rows]
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    on_host: Ints = end - start
    launched = links.launched_at
    known = launched >= 0
    if not len(start) or not known.any():
        return on_host
    step = np.searchsorted(start, launched[known], side="right") - 1
    inside = (step >= 0) & (launched[known] < end[np.maximum(step, 0)])
    first = np.full(len(start), np.iinfo(np.int64).max)
    last = np.full(len(start), np.iinfo(np.int64).min)
    np.minimum.at(first, step[inside], trace.work.start[known][inside])
    np.maximum.at(last, step[inside], trace.work.end[known][inside])
    if (last < first).any():
        return on_host  # a step without work on the device: only the host's view covers all of them
    # The host runs ahead; a step is over for the device when the next one begins there.
    over = np.concatenate((first[1:], last[-1:]))
    on_device: Ints = np.maximum(over - first, 0)
    return on_device


def _step_rows(trace: Trace) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    names = np.unique(trace.annotations.name).tolist()
    return np.isin(trace.annotations.name, [number for number in names if _STEP.match(trace.names[number])])


SHORT_KERNEL_NS = 10_000
"""A kernel this short takes no longer than it takes to launch it."""

_BLOCKING = re.compile(r"Synchronize|^(cuda|hip|cu)Memcpy(2D|3D|HtoD|DtoH|WithStream)?(_v2|_ptds)?$|EventQuery")


class Host(Frozen):
    """Of several traces, sums."""

    busy_s: float
    """In operators and runtime calls on any thread, less the time blocked."""
    blocked_s: float
    """In calls that wait for the device."""
    ratio: float | None
    """Busy host over busy device: above 1, the host has more to do than the device."""
    verdict: str


class Launches(Frozen):
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


PHASES = ("data", "forward", "backward", "optimizer")
OWN_PREFIX = "redline/"

_DATA = re.compile(r"enumerate\(DataLoader\)|DataLoader\w*\.__next__", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")


class Phase(Frozen):
    name: str
    host_s: float
    """On the host, less the time blocked waiting for the device."""
    device_s: float
    """Union of the device work launched from it."""

    @property
    def needs_s(self) -> float:
        """No step can spend less on it: host and device may overlap, but neither can be skipped."""
        return max(self.host_s, self.device_s)


def loading_ranges(trace: Trace) -> Intervals:
    """When the host sat in a data loader."""
    return joined(
        _named(trace, trace.annotations, _DATA), _named(trace, trace.annotations, re.compile("^redline/data$"))
    )


def phases_of(links: Sequence[Links]) -> list[Phase]:
    """Those that occur, in the order of a step; of several traces, sums."""
    sums = {name: [0, 0] for name in PHASES}
    seen: set[str] = set()
    for each in links:
        marks = _marked(each.trace)
        for name, (host, device) in _times(each, marks).items():
            sums[name][0] += host
            sums[name][1] += device
            seen.add(name)
    return [
        Phase(name=name, host_s=seconds(host), device_s=seconds(device))
        for name, (host, device) in sums.items()
        if name in seen and (host or device)
    ]


def bottleneck(phases: Sequence[Phase]) -> str | None:
    return max(phases, key=lambda phase: phase.needs_s).name if len(phases) > 1 else None


def _marked(trace: Trace) -> dict[str, Intervals]:
    own = {name: _named(trace, trace.annotations, re.compile(f"^{OWN_PREFIX}{name}$")) for name in PHASES}
    own = {name: ranges for name, ranges in own.items() if len(ranges)}
    if own:
        return own
    found = {
        "data": loading_ranges(trace),
        "optimizer": joined(_named(trace, trace.annotations, _OPTIMIZER), _named(trace, trace.operators, _OPTIMIZER)),
        "backward": _named(trace, trace.operators, _BACKWARD),
    }
    return {name: ranges for name, ranges in found.items() if len(ranges)}


def _times(links: Links, marks: dict[str, Intervals]) -> dict[str, tuple[int, int]]:
    """Host and device nanoseconds of each phase in one trace."""
    trace = links.trace
    blocked = blocking_calls(trace)
    launched = links.launched_at
    left = launched >= 0
    times = {}
    for name, ranges in marks.items():
        inside = left & _inside(ranges, launched)
        left &= ~inside
        times[name] = (ranges.total - overlap(ranges, blocked), _device(trace, inside))
    if "forward" not in marks and not _is_marked_by_us(marks, trace):
        active = host_activity(trace)
        others = joined(*marks.values()) if marks else union(active.start[:0], active.end[:0])
        rest = joined(active, others).total - others.total
        waiting = overlap(blocked, active) - overlap(blocked, others) if len(blocked) else 0
        times["forward"] = (max(rest - max(waiting, 0), 0), _device(trace, left))
    return times


def _is_marked_by_us(marks: dict[str, Intervals], trace: Trace) -> bool:
    return any(name.startswith(OWN_PREFIX) for name in (trace.names[n] for n in np.unique(trace.annotations.name)))


def _device(trace: Trace, rows: Mask) -> int:
    return union(trace.work.start[rows], trace.work.end[rows]).total


def _inside(ranges: Intervals, moments: Ints) -> Mask:
    place = np.searchsorted(ranges.start, moments, side="right") - 1
    found: Mask = (place >= 0) & (moments < ranges.end[np.maximum(place, 0)])
    return found


def _named(trace: Trace, ranges: HostRanges, rule: re.Pattern[str]) -> Intervals:
    numbers = [number for number in np.unique(ranges.name).tolist() if rule.search(trace.names[number])]
    rows = np.isin(ranges.name, numbers)
    return union(ranges.start[rows], ranges.end[rows])
