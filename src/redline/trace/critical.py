"""The critical path: what each moment of the steps waited for, followed back from their end through device and host.

A block of work starts when the one before has ended, or when its launch has come, whichever is later. A late launch
leads to the host, and on the host back to the last call that waited for the device, which leads to the device again.
Whatever is not on this path could be faster without the steps ending earlier.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from redline.model.fields import Frozen
from redline.trace.classes import CLASSES
from redline.trace.columns import Ids, Ints, Work
from redline.trace.host import picked
from redline.trace.idle import Cause
from redline.trace.intervals import NEVER, Intervals, both, distinct, joined, seconds, union, without
from redline.trace.names import label_of
from redline.trace.replay import DeviceRun

PathKind = Literal["device", "host", "launch"]

SHORTENS = {
    "loader": "a faster data loader, or more workers",
    "warm-up": "recording later steps: this happens once",
    "allocator": "steady memory: no calls to the driver in a step",
    "waiting calls": "fewer calls that wait for the device",
    "launch calls": "fewer launches: graphs, fusion, a larger batch",
    "operators": "fewer or cheaper operators on the host: torch.compile, graphs",
    "Python": "less Python between operators: torch.compile, graphs",
    "latency": "launching earlier: the host then runs ahead of the device",
    "gaps": "fewer, larger kernels, or graphs",
    "another stream": "less waiting between streams",
    "unknown": "nothing in the trace tells",
    "communication": "overlapping it with computation, or smaller messages",
    "copy": "fewer copies, or copies beside kernels",
}
_BY_DEFAULT = "faster kernels of this kind"


class PathPart(Frozen):
    kind: PathKind
    name: str
    """On the device the class of the work; on the host what it did."""
    seconds: float
    share: float
    """Share of the whole path."""
    shortens: str
    """What would make this part shorter."""
    most: str = ""
    """The kernel or operator that takes most of it."""


class CriticalPath(Frozen):
    """With several devices, all their paths together."""

    span_s: float
    parts: tuple[PathPart, ...]
    """The longest first; together the whole span."""


@dataclass
class _Path:
    """Stretches of one device's path."""

    device: list[tuple[int, int]] = field(default_factory=list)
    host: list[tuple[int, int]] = field(default_factory=list)
    latency: list[tuple[int, int]] = field(default_factory=list)


def critical_path(runs: Sequence[DeviceRun]) -> CriticalPath | None:
    if not runs:
        return None
    times: defaultdict[tuple[PathKind, str], int] = defaultdict(int)
    names: defaultdict[tuple[PathKind, str], defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for run in runs:
        path = _followed(run)
        _of_device(run, _intervals(path.device), times, names)
        _of_host(run, _intervals(path.host), times, names)
        _of_gaps(run, joined(without(_intervals(path.device), run.view.busy), _intervals(path.latency)), times)
    whole = sum(times.values())
    parts = [
        PathPart(
            kind=kind,
            name=name,
            seconds=seconds(ns),
            share=ns / whole if whole else 0.0,
            shortens=SHORTENS.get(name, _BY_DEFAULT),
            most=label_of(max(names[kind, name].items(), key=lambda item: item[1])[0]) if names[kind, name] else "",
        )
        for (kind, name), ns in times.items()
        if ns
    ]
    return CriticalPath(span_s=seconds(whole), parts=tuple(sorted(parts, key=lambda part: -part.seconds)))


def _followed(run: DeviceRun) -> _Path:
    """From the end of the steps to their beginning, one turn for each change from device to host and back."""
    replay = run.replay
    path = _Path()
    begin, now = run.bounds
    late = np.flatnonzero(replay.late)
    real = np.flatnonzero(replay.waited_for > replay.wait_start)
    wait_end, waited_for = replay.wait_end[real], replay.waited_for[real]
    on_device = now <= int(replay.end[-1])
    while now > begin:
        if on_device:
            block = int(np.searchsorted(replay.start, now, side="left")) - 1
            index = int(np.searchsorted(late, block, side="right")) - 1
            if block < 0 or index < 0:
                path.device.append((begin, now))
                break
            start, launched = int(replay.start[late[index]]), int(replay.launched[late[index]])
            path.device.append((start, now))
            now = max(min(launched, start), begin)
            path.latency.append((now, start))
        else:
            index = int(np.searchsorted(wait_end, now, side="right")) - 1
            device = int(waited_for[index]) if index >= 0 else begin
            # What the wait was for must lie before: times that do not fit end the path on the host.
            since = device if index >= 0 and begin < device < now else begin
            path.host.append((since, now))
            now = since
        on_device = not on_device
    return path


def _intervals(pairs: list[tuple[int, int]]) -> Intervals:
    if not pairs:
        return NEVER
    columns = np.array(pairs, np.int64)
    return union(columns[:, 0], columns[:, 1])


def _of_device(
    run: DeviceRun,
    when: Intervals,
    times: defaultdict[tuple[PathKind, str], int],
    names: defaultdict[tuple[PathKind, str], defaultdict[str, int]],
) -> None:
    """Of work beside work, computing comes first: communication and copies count where nothing is computed."""
    links, view = run.recorded.links, run.view
    work, classes = links.trace.work, links.kernel_class[view.rows]
    talking = links.is_class("communication")[view.rows]
    computing = (work.kind[view.rows] == Work.KERNEL) & ~talking
    rest = when
    for mine in (computing, talking, ~computing & ~talking):
        rows = view.rows[mine]
        order = np.argsort(work.start[rows], kind="stable")
        start, end = work.start[rows[order]], work.end[rows[order]]
        # Of two at the same time, the later one counts from when it is alone.
        reach = np.concatenate((start[:1], np.maximum.accumulate(end)[:-1]))
        alone = rest.within(np.minimum(np.maximum(start, reach), end), end)
        kinds = classes[mine][order]
        for kind in distinct(kinds).tolist():
            key: tuple[PathKind, str] = ("device", CLASSES[kind])
            times[key] += int(alone[kinds == kind].sum())
            _add_names(names[key], work.name[rows[order]][kinds == kind], alone[kinds == kind], links.trace.names)
        rest = without(rest, union(start, end))


_GAPS: dict[Cause, tuple[PathKind, str]] = {
    "host": ("host", "Python"),
    "sync": ("host", "waiting calls"),
    "data": ("host", "loader"),
    "allocator": ("host", "allocator"),
    "warm-up": ("host", "warm-up"),
    "latency": ("launch", "latency"),
    "launch": ("launch", "gaps"),
    "dependency": ("launch", "another stream"),
    "unknown": ("launch", "unknown"),
}


def _of_gaps(run: DeviceRun, when: Intervals, times: defaultdict[tuple[PathKind, str], int]) -> None:
    """Between a launch and its work, and between one piece of work and the next: by the cause of the idle time."""
    for cause, key in _GAPS.items():
        times[key] += both(when, run.idle.when[cause]).total


def _of_host(
    run: DeviceRun,
    when: Intervals,
    times: defaultdict[tuple[PathKind, str], int],
    names: defaultdict[tuple[PathKind, str], defaultdict[str, int]],
) -> None:
    host, trace = run.host, run.host.trace
    calls, operators = trace.calls, trace.operators
    ranges = (
        ("loader", host.loader),
        ("warm-up", host.warming_up),
        ("waiting calls", picked(calls, host.waits)),
        ("allocator", picked(calls, host.allocating)),
        ("launch calls", calls),
        ("operators", operators),
    )
    rest = when
    for name, table in ranges:
        mine = np.isin(table.thread, host.launching_threads)
        start, end = table.start[mine], table.end[mine]
        inside = both(rest, union(start, end))
        if not len(inside):
            continue
        key: tuple[PathKind, str] = ("host", name)
        times[key] += inside.total
        if name != "operators":
            _add_names(names[key], table.name[mine], inside.within(start, end), trace.names)
        rest = without(rest, inside)
    times[("host", "Python")] += rest.total


def _add_names(sums: defaultdict[str, int], name: Ids, amount: Ints, names: Sequence[str]) -> None:
    numbers, which = np.unique(name, return_inverse=True)
    total = np.zeros(len(numbers), np.int64)
    np.add.at(total, which, amount)
    for number, ns in zip(numbers.tolist(), total.tolist(), strict=True):
        if ns > 0:
            sums[names[number]] += ns
