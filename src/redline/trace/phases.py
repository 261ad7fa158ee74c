"""Forward, backward, optimizer, data: how long each keeps the host and the device, and which one is the bottleneck.

Redline marks its own phases (`redline/forward`). In traces from elsewhere they are known by torch's marks: the loader's
`enumerate(DataLoader)`, `Optimizer.step`, and autograd's operators for the backward; what is left is the forward.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from redline.spec import Spec
from redline.trace.columns import HostRanges, Ints, Mask, Trace, seconds
from redline.trace.host import blocking_calls, host_activity
from redline.trace.intervals import Intervals, joined, overlap, union
from redline.trace.links import Links

PHASES = ("data", "forward", "backward", "optimizer")
OWN_PREFIX = "redline/"

_DATA = re.compile(r"enumerate\(DataLoader\)|DataLoader\w*\.__next__", re.IGNORECASE)
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
_BACKWARD = re.compile(r"^autograd::engine::evaluate_function")


class Phase(Spec):
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
