"""Events become columns, batch by batch; a trace's tables are made of them at the end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
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
_MEMORY_EVENT = "[memory]"

LONG_FRAME_US = 100.0
"""Shorter Python functions explain no wait, and there are millions of them."""
MODULE_FRAME = "nn.Module: "

WITH_VALUES = ("conv", "attention", "record_param_comms", "c10d::")
"""The work of these operators depends on inputs that are no tensors: strides, whether a mask is causal."""

T = TypeVar("T")


class Numbering(defaultdict[T, int]):
    """A number for each thing, in the order in which they are first met."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def of(self, things: Iterable[T], count: int) -> Ids:
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


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
        self._shape_numbers: dict[tuple[bytes, bytes, bytes], int] = {}
        self._collective_numbers: Numbering[Collective] = Numbering()
        self._with_values: dict[str, bool] = {}

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Raises `NeedsExactTimes` before anything is taken from the batch."""
        groups = []
        unused: defaultdict[str, int] = defaultdict(int)
        for category, group in _by_category(events).items():
            kind, work, wanted = self._sorted_out(category, group)
            if kind is None and category.lower() not in _CATEGORIES:
                unused[category] += sum(event.ph == "X" for event in group)
            elif kind is not None and wanted:
                groups.append((kind, work, wanted, *start_and_duration(wanted)))
        for kind, work, wanted, start, duration in groups:
            self._keep(kind, work, wanted, start, np.zeros_like(start) if kind == ALLOCATION else duration)
        for category, count in unused.items():
            if count:
                self.unused[category] += count
        self.events += len(events)

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
            return [event for event in events if _is_telling(event, self._shortest_frame_us) and event.ph == "X"]
        return [event for event in events if event.ph == "X"]

    def _keep(self, kind: int, work: Work | None, events: list[AnyEvent], start: Ints, duration: Ints) -> None:
        good = (start != NO_TIME) & (duration >= 0)
        if not good.all():
            self.rejected["no time, or one out of range"] += int((start == NO_TIME).sum())
            self.rejected["a duration below zero, out of range, or none"] += int(
                ((start != NO_TIME) & (duration < 0)).sum()
            )
            events = [event for event, keep in zip(events, good.tolist(), strict=True) if keep]
            start, duration = start[good], duration[good]
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
                "shape": np.fromiter(map(self._shape_of, events, args), np.int32, len(args)),
                "external": _keys(arg.external for arg in args),
                "sequence": _keys(arg.sequence for arg in args),
                "forward_thread": _keys(arg.forward_thread for arg in args),
                "collective": self._collectives(args),
            }
        if kind == ANNOTATION:
            return {"shape": np.fromiter(map(self._shape_of, events, args), np.int32, len(args))}
        if kind == CALL:
            return {
                "correlation": _keys(arg.correlation for arg in args),
                "external": _keys(arg.external for arg in args),
            }
        if kind == DEVICE:
            pairs = list(zip(args, events, strict=True))
            return {
                "kind": np.full(len(args), work, np.int32),
                "device": self.devices.of((_device(arg, event.pid) for arg, event in pairs), len(args)),
                "stream": _keys(_either(arg.stream, event.tid) for arg, event in pairs),
                "correlation": _keys(arg.correlation for arg in args),
                "bytes": _column(arg.bytes for arg in args),
                "collective": self._collectives(args),
            }
        if kind == ALLOCATION:
            return {
                "bytes": _column(arg.allocated for arg in args),
                "on_device": _keys(arg.device_type > 0 for arg in args),
                "device": _keys(arg.device_id for arg in args),
                "allocated": _column(arg.total_allocated for arg in args),
                "reserved": _column(arg.total_reserved for arg in args),
            }
        return {}

    def _shape_of(self, event: AnyEvent, args: Args) -> int:
        if not args.dims:
            return UNKNOWN
        values = bytes(args.values) if self._needs_values(event.name) else b""
        written = bytes(args.dims), bytes(args.types), values
        number = self._shape_numbers.get(written)
        if number is None:
            texts = (b"".join(text.split()).decode("utf-8", "replace") for text in written)
            number = self._shape_numbers[written] = self._shape_texts[Shape(*texts)]
        return number

    def _needs_values(self, name: str) -> bool:
        known = self._with_values.get(name)
        if known is None:
            known = self._with_values[name] = any(word in name for word in WITH_VALUES)
        return known

    def _collectives(self, args: list[Args]) -> Ids:
        return np.fromiter(
            (self._collective_numbers[_collective(arg)] if arg.collective else UNKNOWN for arg in args),
            np.int32,
            len(args),
        )

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


def _is_telling(event: AnyEvent, shortest_us: float) -> bool:
    long = not isinstance(event.dur, float) or event.dur >= shortest_us
    return long or event.name.startswith(MODULE_FRAME)


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


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _keys(values: Iterable[int]) -> Ints:
    """Numbers that are compared and never added: in half the space where they fit."""
    column = np.fromiter(values, np.int64)
    fits = len(column) > 0 and column.min() >= -(2**31) and column.max() < 2**31
    return column.astype(np.int32) if fits else column


def _device(args: Args, pid: int | str) -> tuple[int, int | str]:
    # No machine has so many devices: such a number is damaged, and says nothing.
    return _either(args.device if abs(args.device) < 2**31 else UNKNOWN, pid), pid


def _either(value: int, otherwise: int | str) -> int:
    """The argument where it is given, else the process or thread number the event is drawn under."""
    if value != UNKNOWN:
        return value
    return otherwise if isinstance(otherwise, int) and abs(otherwise) < 2**31 else UNKNOWN
