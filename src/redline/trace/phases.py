"""Forward, backward, optimizer and data loading, prefill and decode: what each costs the host and the device."""

from __future__ import annotations

import re
from collections.abc import Sequence

from redline.spec import Frozen
from redline.trace.columns import HostRanges, Mask, Trace
from redline.trace.host import HostView
from redline.trace.intervals import NEVER, Intervals, distinct, joined, overlap, seconds, union
from redline.trace.links import Links, matching

PHASES = ("data", "forward", "backward", "optimizer", "prefill", "decode")
OWN_PREFIX = "redline/"

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


def phases_of(views: Sequence[HostView]) -> list[Phase]:
    """Those that occur, in the order of a step; of several traces, sums."""
    sums = {name: [0, 0] for name in PHASES}
    seen: set[str] = set()
    for view in views:
        marks = phases_marked(view)
        for name, (host, device) in _times(view, marks).items():
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


def phases_marked(view: HostView) -> dict[str, Intervals]:
    """When each phase was under way on the host; those without marks are left out."""
    trace = view.trace
    own = {name: _named(trace, trace.annotations, re.compile(f"^{OWN_PREFIX}{name}$")) for name in PHASES}
    own = {name: ranges for name, ranges in own.items() if len(ranges)}
    if own:
        return own
    found = {
        "data": union(view.loader.start, view.loader.end),
        "optimizer": joined(_named(trace, trace.annotations, _OPTIMIZER), _named(trace, trace.operators, _OPTIMIZER)),
        "backward": _named(trace, trace.operators, _BACKWARD),
    }
    return {name: ranges for name, ranges in found.items() if len(ranges)}


def _times(view: HostView, marks: dict[str, Intervals]) -> dict[str, tuple[int, int]]:
    """Host and device nanoseconds of each phase in one trace."""
    links, blocked = view.links, view.blocked
    left = links.is_launched.copy()
    times = {}
    for name, ranges in marks.items():
        inside = left & ranges.holds(links.launched_at)
        left &= ~inside
        times[name] = (ranges.total - overlap(ranges, blocked), _device(links, inside))
    if "forward" not in marks and not _is_marked_by_us(view.trace):
        others = joined(*marks.values()) if marks else NEVER
        rest = joined(view.active, others).total - others.total
        waiting = overlap(blocked, view.active) - overlap(blocked, others) if len(blocked) else 0
        times["forward"] = (max(rest - max(waiting, 0), 0), _device(links, left))
    return times


def _is_marked_by_us(trace: Trace) -> bool:
    marks = {OWN_PREFIX + name for name in PHASES}
    return any(trace.names[number] in marks for number in distinct(trace.annotations.name).tolist())


def _device(links: Links, rows: Mask) -> int:
    work = links.trace.work
    return union(work.start[rows], work.end[rows]).total


def _named(trace: Trace, ranges: HostRanges, rule: re.Pattern[str]) -> Intervals:
    rows = matching(trace, ranges, rule)
    return union(ranges.start[rows], ranges.end[rows])
