"""Events become columns, batch by batch; a trace's tables are made of them at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, compress
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

_CATEGORIES: dict[str, tuple[int, Work | None] | None] = {
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
    "gpu_user_annotation": None,
    "ac2g": None,
    "fwdbwd": None,
    "overhead": None,
    "trace": None,
    "cuda_sync": None,
    "": None,
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
    """What a function gives for each key, asked once."""

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
        self.shapes: list[Shape] = []
        self.collectives: list[Collective] = []
        self.devices: Numbering[tuple[int, int | str]] = Numbering()
        """Device number and the process the event is drawn under: the second tells fused files' devices apart."""
        self.events = 0
        self.rejected: defaultdict[str, int] = defaultdict(int)
        self.unused: defaultdict[str, int] = defaultdict(int)
        """Events with a duration in categories that no table reads."""
        self._shortest_frame_us = 0.0 if all_frames else LONG_FRAME_US
        self._parts: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self._kinds: dict[str, tuple[int, Work | None] | None] = {}
        self._shape_texts: Numbering[Shape] = Numbering()
        self._shape_numbers = _Found(partial(_number_of_shape, self._shape_texts))
        self._collective_numbers: Numbering[Collective] = Numbering()
        self._with_values = _Found(_needs_values)

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Raises `NeedsExactTimes` before anything is taken from the batch."""
        groups: list[tuple[int, Work | None, list[AnyEvent]]] = []
        unused: defaultdict[str, int] = defaultdict(int)
        begun = 0
        for category, group in _by_category(events).items():
            if category.lower() == _OLD_OPERATOR:
                marks = [event for event in group if event.ph == "X" and event.name.startswith(_OLD_MARKS)]
                if marks:
                    groups.append((ANNOTATION, None, marks))
                    group = [event for event in group if not event.name.startswith(_OLD_MARKS)]
            kind, work, wanted = self._sorted_out(category, group)
            if kind is None and category.lower() not in _CATEGORIES:
                unused[category] += sum(event.ph == "X" for event in group)
            elif kind is not None and wanted:
                groups.append((kind, work, wanted))
            if kind not in (None, ALLOCATION) and len(wanted) < len(group):
                begun += sum(event.ph == "B" for event in group)
        if groups:
            self._keep_all(groups)
        if begun:
            self.rejected["their beginning and end are written apart (ph B and E), which Kineto does not do"] += begun
        for category, count in unused.items():
            if count:
                self.unused[category] += count
        self.events += len(events)

    def _keep_all(self, groups: list[tuple[int, Work | None, list[AnyEvent]]]) -> None:
        """Times are worked out for all groups at once: for each by itself, calling numpy would take most of the time."""
        start, duration = start_and_duration([event for _, _, group in groups for event in group])
        ends = list(accumulate(len(group) for _, _, group in groups))
        parts = [slice(end - len(group), end) for end, (_, _, group) in zip(ends, groups, strict=True)]
        for (kind, _, _), part in zip(groups, parts, strict=True):
            if kind == ALLOCATION:
                duration[part] = 0
        good = (start != NO_TIME) & (duration >= 0)
        if not good.all():
            self.rejected["no time, or one out of range"] += int((start == NO_TIME).sum())
            self.rejected["a duration below zero, out of range, or none"] += int(
                ((start != NO_TIME) & (duration < 0)).sum()
            )
        for (kind, work, group), part in zip(groups, parts, strict=True):
            keep = good[part]
            if keep.all():
                self._keep(kind, work, group, start[part].copy(), duration[part].copy())
            else:
                self._keep(kind, work, list(compress(group, keep.tolist())), start[part][keep], duration[part][keep])

    def _sorted_out(self, category: str, group: list[AnyEvent]) -> tuple[int | None, Work | None, list[AnyEvent]]:
        known = self._kind_of(category)
        if known is not None:
            kind, work = known
            return kind, work, self._wanted(kind, group)
        if category.lower() in _CATEGORIES:
            return None, None, []
        # Whatever says on which device and stream it ran is work of an accelerator nobody told us about.
        on_device = [event for event in group if event.args and event.args.device >= 0 and event.args.stream >= 0]
        if on_device:
            return DEVICE, Work.KERNEL, [event for event in on_device if event.ph == "X"]
        return None, None, []

    def _kind_of(self, category: str) -> tuple[int, Work | None] | None:
        if category not in self._kinds:
            lower = category.lower()
            is_call = lower.endswith(("_runtime", "_driver"))
            self._kinds[category] = (CALL, None) if is_call else _CATEGORIES.get(lower)
        return self._kinds[category]

    def _wanted(self, kind: int, events: list[AnyEvent]) -> list[AnyEvent]:
        if kind == ALLOCATION:
            return [event for event in events if event.ph == "i" and event.name == _MEMORY_EVENT]
        if kind == FRAME and self._shortest_frame_us:
            events = _telling(events, self._shortest_frame_us)
        return [event for event in events if event.ph == "X"]

    def _keep(self, kind: int, work: Work | None, events: list[AnyEvent], start: Ints, duration: Ints) -> None:
        count = len(events)
        args = [event.args or NO_ARGS for event in events]
        columns: dict[str, Any] = {"start": start, "duration": duration}
        if kind != ALLOCATION:
            columns["name"] = self.names.of((event.name for event in events), count)
        if kind != DEVICE:
            columns["thread"] = self.threads.of(((event.pid, event.tid) for event in events), count)
        columns |= self._special(kind, work, events, args)
        self._parts[kind].append(columns)

    def _special(self, kind: int, work: Work | None, events: list[AnyEvent], args: list[Args]) -> dict[str, Any]:
        """The columns that one kind of event has and others have not."""
        if kind == OPERATOR:
            return {
                "shape": self._shapes(events, args),
                "external": _keys([arg.external for arg in args]),
                "sequence": _keys([arg.sequence for arg in args]),
                "forward_thread": _keys([arg.forward_thread for arg in args]),
                "collective": self._collectives(args),
            }
        if kind == ANNOTATION:
            return {"shape": self._shapes(events, args)}
        if kind == CALL:
            return {
                "correlation": _keys([arg.correlation for arg in args]),
                "external": _keys([arg.external for arg in args]),
            }
        if kind == DEVICE:
            return {
                "kind": np.full(len(args), work, np.int32),
                "device": self._devices(events, args),
                "stream": _streams(events, args),
                "correlation": _keys([arg.correlation for arg in args]),
                "bytes": np.array([arg.bytes for arg in args], np.int64),
                "collective": self._collectives(args),
            }
        if kind == ALLOCATION:
            return {
                "bytes": np.array([arg.allocated for arg in args], np.int64),
                "on_device": np.array([arg.device_type > 0 for arg in args], np.int32),
                "device": _keys([arg.device_id for arg in args]),
                "allocated": np.array([arg.total_allocated for arg in args], np.int64),
                "reserved": np.array([arg.total_reserved for arg in args], np.int64),
            }
        return {}

    def _devices(self, events: list[AnyEvent], args: list[Args]) -> Ids:
        drawn = [(arg.device, event.pid) for arg, event in zip(args, events, strict=True)]
        number = {pair: self.devices[_device(*pair)] for pair in dict.fromkeys(drawn)}
        return np.array([number[pair] for pair in drawn], np.int32)

    def _shapes(self, events: list[AnyEvent], args: list[Args]) -> Ids:
        shapes, with_values = self._shape_numbers, self._with_values
        found = []
        for event, arg in zip(events, args, strict=True):
            if not arg.dims:
                found.append(UNKNOWN)
                continue
            values = bytes(arg.values) if with_values[event.name] else b""
            found.append(shapes[bytes(arg.dims), bytes(arg.types), values])
        return np.array(found, np.int32)

    def _collectives(self, args: list[Args]) -> Ids:
        if not any([arg.collective for arg in args]):  # noqa: C419 - a list is made in half the time
            return np.full(len(args), UNKNOWN, np.int32)
        numbers = [self._collective_numbers[_collective(arg)] if arg.collective else UNKNOWN for arg in args]
        return np.array(numbers, np.int32)

    def finish(self) -> dict[str, Any]:
        """The tables of a `Trace`, by field; the parts they were made from are let go on the way."""
        self.shapes = list(self._shape_texts)
        self.collectives = list(self._collective_numbers)
        self._shape_numbers.clear()
        tables = {
            "operators": Operators(**self._joined(OPERATOR, Operators)),
            "calls": Calls(**self._joined(CALL, Calls)),
            "annotations": Marks(**self._joined(ANNOTATION, Marks)),
            "frames": HostRanges(**self._joined(FRAME, HostRanges)),
            "work": DeviceWork(**self._joined(DEVICE, DeviceWork)),
        }
        allocations = self._joined(ALLOCATION, Allocations, renamed={"at": "start"})
        return {**tables, "allocations": Allocations(**allocations)}

    def _joined(self, kind: int, table: type[Any], renamed: dict[str, str] | None = None) -> dict[str, Any]:
        parts = self._parts.pop(kind, [])
        columns = {}
        for name in table.__dataclass_fields__:
            pieces = [part.pop((renamed or {}).get(name, name)) for part in parts]
            columns[name] = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        return columns

    def device_numbers(self) -> list[int]:
        """The number of each device; where two share one, that of the process they are drawn under."""
        pairs = list(self.devices)
        shared = Counter(number for number, _ in pairs)
        return [
            number if shared[number] == 1 or not isinstance(pid, int) or abs(pid) >= 2**31 else pid
            for number, pid in pairs
        ]


def _by_category(events: Sequence[AnyEvent]) -> dict[str, list[AnyEvent]]:
    groups: defaultdict[str, list[AnyEvent]] = defaultdict(list)
    for event in events:
        groups[event.cat].append(event)
    return groups


def _telling(frames: list[AnyEvent], shortest_us: float) -> list[AnyEvent]:
    """Python functions that last long, and calls of modules."""
    if not isinstance(frames[0].dur, float):  # a batch whose times are still text
        return frames
    return [frame for frame in frames if frame.dur >= shortest_us or frame.name.startswith(MODULE_FRAME)]  # type: ignore[operator]


def _needs_values(operator: str) -> bool:
    return any(word in operator for word in WITH_VALUES)


def _number_of_shape(shapes: Numbering[Shape], written: tuple[bytes, bytes, bytes]) -> int:
    return shapes[Shape(*(b"".join(text.split()).decode("utf-8", "replace") for text in written))]


def _collective(args: Args) -> Collective:
    return Collective(
        name=_word(args.collective),
        dtype=_word(args.dtype),
        in_elements=args.in_elements,
        out_elements=args.out_elements,
        group_size=args.group_size,
        group=_word(args.group),
    )


def _word(raw: msgspec.Raw) -> str:
    return bytes(raw).decode("utf-8", "replace").strip('" ')


def _keys(values: list[int]) -> Ints | Ids:
    """Numbers that are compared and never added: in half the space where they fit."""
    column = np.array(values, np.int64)
    small = column.astype(np.int32)
    return small if (small == column).all() else column


def _streams(events: list[AnyEvent], args: list[Args]) -> Ints | Ids:
    streams = [arg.stream for arg in args]
    if UNKNOWN in streams:
        streams = [_either(stream, event.tid) for stream, event in zip(streams, events, strict=True)]
    return _keys(streams)


def _device(number: int, pid: int | str) -> tuple[int, int | str]:
    # No machine has so many devices: such a number is damaged, and says nothing.
    return _either(number if abs(number) < 2**31 else UNKNOWN, pid), pid


def _either(value: int, otherwise: int | str) -> int:
    """The argument where it is given, else the process or thread number the event is drawn under."""
    if value != UNKNOWN:
        return value
    return otherwise if isinstance(otherwise, int) and abs(otherwise) < 2**31 else UNKNOWN
