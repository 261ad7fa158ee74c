"""Events become columns, batch by batch; a trace's tables are made of them at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import accumulate, compress
from operator import attrgetter
from typing import Any, TypeVar

import msgspec
import numpy as np

from redline.trace.columns import (
    UNKNOWN,
    Allocations,
    Calls,
    Collective,
    DeviceWork,
    HostRanges,
    Ids,
    Ints,
    Marks,
    Operators,
    Shape,
    Work,
)
from redline.trace.events import NO_ARGS, NO_TIME, AnyEvent, Args, start_and_duration

OPERATOR, CALL, ANNOTATION, DEVICE, ALLOCATION, FRAME = range(6)
UNREAD = (-1, None)
_TABLES: dict[int, tuple[str, type[Any]]] = {
    OPERATOR: ("operators", Operators),
    CALL: ("calls", Calls),
    ANNOTATION: ("annotations", Marks),
    FRAME: ("frames", HostRanges),
    DEVICE: ("work", DeviceWork),
    ALLOCATION: ("allocations", Allocations),
}
_ARGUMENTS: dict[int, dict[str, Callable[[Args], int]]] = {
    OPERATOR: {name: attrgetter(name) for name in ("external", "sequence", "forward_thread")},
    CALL: {name: attrgetter(name) for name in ("correlation", "external")},
    ANNOTATION: {},
    FRAME: {},
    DEVICE: {name: attrgetter(name) for name in ("correlation", "bytes")},
    ALLOCATION: {
        "bytes": attrgetter("allocated"),
        "on_device": lambda args: args.device_type > 0,
        "device": attrgetter("device_id"),
        "allocated": attrgetter("total_allocated"),
    },
}
"""Columns that are arguments of the events."""

_CATEGORIES: dict[str, tuple[int, Work | None]] = {
    "cpu_op": (OPERATOR, None),
    "user_annotation": (ANNOTATION, None),
    "python_function": (FRAME, None),
    "kernel": (DEVICE, Work.KERNEL),
    "gpu_memcpy": (DEVICE, Work.COPY),
    "gpu_memset": (DEVICE, Work.FILL),
    "cpu_instant_event": (ALLOCATION, None),
    # Work on accelerators of other makers.
    "mtia_ccp_events": (DEVICE, Work.KERNEL),
    "hpu_op": (DEVICE, Work.KERNEL),
    # As torch 1.8 to 1.10 wrote them.
    "operator": (OPERATOR, None),
    "memcpy": (DEVICE, Work.COPY),
    "memset": (DEVICE, Work.FILL),
    "runtime": (CALL, None),
    # These repeat what other events say: annotations drawn on the device, arrows, the profiler's own work.
    **dict.fromkeys(("gpu_user_annotation", "ac2g", "fwdbwd", "overhead", "trace", "cuda_sync", ""), UNREAD),
}
_OLD_OPERATOR = "operator"
_OLD_MARKS = ("ProfilerStep#", "enumerate(DataLoader)", "Optimizer.")
"""Annotations, which torch 1.8 to 1.10 wrote as operators."""
_MEMORY_EVENT = "[memory]"

LONG_FRAME_US = 100.0
"""Shorter Python functions explain no wait, and there are millions of them."""
MODULE_FRAME = "nn.Module: "

WITH_VALUES = ("conv", "attention", "record_param_comms", "c10d::")
"""The work of these operators depends on inputs that are no tensors: strides, whether a mask is causal."""

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")


class Numbering(defaultdict[T, int]):
    """A number for each thing, in the order in which they are first met."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def of(self, things: Iterable[T], count: int) -> Ids:
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class _Found(dict[K, V]):
    """A table that asks a function for each key, once."""

    def __init__(self, find: Callable[[K], V]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, key: K) -> V:
        value = self[key] = self._find(key)
        return value


class Builder:
    """Takes batches of events; `finish` gives the tables."""

    def __init__(self, *, all_frames: bool = False) -> None:
        self.names: Numbering[str] = Numbering()
        self.threads: Numbering[tuple[int | str, int | str]] = Numbering()
        self.shapes: Numbering[Shape] = Numbering()
        self.collectives: Numbering[Collective] = Numbering()
        self.devices: Numbering[tuple[int, int | str]] = Numbering()
        """Device number and the process the event is drawn under: the second tells fused files' devices apart."""
        self.events = 0
        self.rejected: Counter[str] = Counter()
        self.unused: Counter[str] = Counter()
        """Events with a duration in categories that no table reads."""
        self._shortest_frame_us = 0.0 if all_frames else LONG_FRAME_US
        self._parts: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._shape_numbers: _Found[tuple[bytes, bytes, bytes], int] = _Found(
            lambda written: self.shapes[Shape(*(b"".join(text.split()).decode("utf-8", "replace") for text in written))]
        )
        self._has_values: _Found[str, bool] = _Found(lambda name: any(word in name for word in WITH_VALUES))

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Raises `NeedsExactTimes` before anything is taken from the batch."""
        by_category: defaultdict[str, list[AnyEvent]] = defaultdict(list)
        for event in events:
            by_category[event.cat].append(event)
        groups: list[tuple[int, Work | None, list[AnyEvent]]] = []
        unused: Counter[str] = Counter()
        begun = 0
        for category, group in by_category.items():
            known = _kind_of(category)
            if known == UNREAD:
                continue
            if known is None:
                # Whatever says on which device and stream it ran is work of an accelerator nobody told us about.
                unknown = [
                    event for event in group if not (event.args and min(event.args.device, event.args.stream) >= 0)
                ]
                if len(unknown) == len(group):
                    unused[category] += sum(event.ph == "X" for event in group)
                    continue
                group = [event for event in group if event.args and min(event.args.device, event.args.stream) >= 0]
                known = (DEVICE, Work.KERNEL)
            kind, work = known
            if category.lower() == _OLD_OPERATOR:
                groups.append(
                    (ANNOTATION, None, [one for one in group if one.ph == "X" and one.name.startswith(_OLD_MARKS)])
                )
                group = [event for event in group if not event.name.startswith(_OLD_MARKS)]
            wanted = self._wanted(kind, group)
            groups.append((kind, work, wanted))
            if kind != ALLOCATION and len(wanted) < len(group):
                begun += sum(event.ph == "B" for event in group)
        self._keep_all([group for group in groups if group[2]])
        self.rejected["their beginning and end are written apart (ph B and E), which Kineto does not do"] += begun
        self.unused += unused
        self.events += len(events)

    def _wanted(self, kind: int, events: list[AnyEvent]) -> list[AnyEvent]:
        if kind == ALLOCATION:
            return [event for event in events if event.ph == "i" and event.name == _MEMORY_EVENT]
        if kind == FRAME and self._shortest_frame_us and events and isinstance(events[0].dur, float):
            # Python functions that last long, and calls of modules. Times that are still text are not compared.
            least: Any = self._shortest_frame_us
            return [one for one in events if one.ph == "X" and (one.dur >= least or one.name.startswith(MODULE_FRAME))]
        return [event for event in events if event.ph == "X"]

    def _keep_all(self, groups: list[tuple[int, Work | None, list[AnyEvent]]]) -> None:
        """Times are worked out for all groups at once: for each by itself, calling numpy would take most of the time."""
        if not groups:
            return
        start, duration = start_and_duration([event for _, _, group in groups for event in group])
        ends = list(accumulate(len(group) for _, _, group in groups))
        parts = [slice(end - len(group), end) for end, (_, _, group) in zip(ends, groups, strict=True)]
        for (kind, _, _), part in zip(groups, parts, strict=True):
            if kind == ALLOCATION:
                duration[part] = 0
        good = (start != NO_TIME) & (duration >= 0)
        self.rejected["no time, or one out of range"] += int((start == NO_TIME).sum())
        self.rejected["a duration below zero, out of range, or none"] += int((~good & (start != NO_TIME)).sum())
        for (kind, work, group), part in zip(groups, parts, strict=True):
            keep = good[part]
            kept = group if keep.all() else list(compress(group, keep.tolist()))
            columns = {"start": start[part][keep], "duration": duration[part][keep]}
            self._parts[kind].append(columns | self._columns(kind, work, kept))

    def _columns(self, kind: int, work: Work | None, events: list[AnyEvent]) -> dict[str, Any]:
        count, args = len(events), [event.args or NO_ARGS for event in events]
        columns: dict[str, Any] = {name: _keys(list(map(read, args))) for name, read in _ARGUMENTS[kind].items()}
        if kind != ALLOCATION:
            columns["name"] = self.names.of((event.name for event in events), count)
        if kind != DEVICE:
            columns["thread"] = self.threads.of(((event.pid, event.tid) for event in events), count)
        if kind in (OPERATOR, ANNOTATION):
            columns["shape"] = self._shapes(events, args)
        if kind in (OPERATOR, DEVICE):
            columns["collective"] = self._collectives(args)
        if kind == DEVICE:
            drawn = [(arg.device, event.pid) for arg, event in zip(args, events, strict=True)]
            number = {pair: self.devices[_device(*pair)] for pair in dict.fromkeys(drawn)}
            streams = [arg.stream for arg in args]
            if UNKNOWN in streams:
                streams = [_either(stream, event.tid) for stream, event in zip(streams, events, strict=True)]
            columns |= {"kind": np.full(count, work, np.int32), "stream": _keys(streams)}
            columns["device"] = np.array([number[pair] for pair in drawn], np.int32)
        return columns

    def _shapes(self, events: list[AnyEvent], args: list[Args]) -> Ids:
        numbers, has_values = self._shape_numbers, self._has_values
        found = [
            numbers[bytes(arg.dims), bytes(arg.types), bytes(arg.values) if has_values[event.name] else b""]
            if arg.dims
            else UNKNOWN
            for event, arg in zip(events, args, strict=True)
        ]
        return np.array(found, np.int32)

    def _collectives(self, args: list[Args]) -> Ids:
        if not any([arg.collective for arg in args]):  # noqa: C419 - a list is made in half the time
            return np.full(len(args), UNKNOWN, np.int32)
        numbers = [self.collectives[_collective(arg)] if arg.collective else UNKNOWN for arg in args]
        return np.array(numbers, np.int32)

    def finish(self) -> dict[str, Any]:
        """The tables of a `Trace`, by field; the parts they were made from are let go on the way."""
        self._shape_numbers.clear()
        tables: dict[str, Any] = {}
        for kind, (field, table) in _TABLES.items():
            parts = self._parts.pop(kind, [])
            columns = {}
            for name in table.__dataclass_fields__:
                pieces = [part.pop("start" if name == "at" else name) for part in parts]
                columns[name] = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
            tables[field] = table(**columns)
        return tables

    def device_numbers(self) -> list[int]:
        """The number of each device; where two share one, that of the process they are drawn under."""
        pairs = list(self.devices)
        shared = Counter(number for number, _ in pairs)
        return [
            number if shared[number] == 1 or not isinstance(pid, int) or abs(pid) >= 2**31 else pid
            for number, pid in pairs
        ]


@cache
def _kind_of(category: str) -> tuple[int, Work | None] | None:
    """None for a category that nobody knows."""
    lower = category.lower()
    return (CALL, None) if lower.endswith(("_runtime", "_driver")) else _CATEGORIES.get(lower)


def _collective(args: Args) -> Collective:
    def word(raw: msgspec.Raw) -> str:
        return bytes(raw).decode("utf-8", "replace").strip('" ')

    return Collective(
        name=word(args.collective),
        dtype=word(args.dtype),
        in_elements=args.in_elements,
        out_elements=args.out_elements,
        group_size=args.group_size,
        group=word(args.group),
    )


def _keys(values: list[int]) -> Ints | Ids:
    """Return whole numbers as a column, in half the space where they fit."""
    column = np.array(values, np.int64)
    small = column.astype(np.int32)
    return small if (small == column).all() else column


def _device(number: int, pid: int | str) -> tuple[int, int | str]:
    # No machine has so many devices: such a number is damaged, and says nothing.
    return _either(number if abs(number) < 2**31 else UNKNOWN, pid), pid


def _either(value: int, otherwise: int | str) -> int:
    """The argument where it is given, else the process or thread number the event is drawn under."""
    if value != UNKNOWN:
        return value
    return otherwise if isinstance(otherwise, int) and abs(otherwise) < 2**31 else UNKNOWN
