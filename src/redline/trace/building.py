"""One event of a Kineto trace, typed: only what some table needs is decoded, the rest is stepped over.

Three ways to read the same thing. `Event` is the fast one: its times are floats, exact to the nanosecond while they
stay below `EXACT_BELOW_US`. `ExactEvent` keeps times as text, for traces that count from 1970. `coerce` makes the best
of an event whose types are wrong.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from redline.trace.columns import UNKNOWN, Allocations, Calls, DeviceWork, HostRanges, Ids, Ints, Operators, Shape, Work

EXACT_BELOW_US = 2.0**43
"""Up to here neighbouring floats are less than a nanosecond apart; beyond, rounding would move events."""

LARGEST_US = 4.0e15
"""In nanoseconds this still fits 64 bits; the year 2096."""

Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]

NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    correlation: Whole = UNKNOWN
    external: Whole = msgspec.field(default=UNKNOWN, name="External id")
    device: Whole = UNKNOWN
    stream: Whole = UNKNOWN
    bytes: Whole = UNKNOWN
    sequence: Whole = msgspec.field(default=UNKNOWN, name="Sequence number")
    forward_thread: Whole = msgspec.field(default=0, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    allocated: Whole = msgspec.field(default=0, name="Bytes")
    device_type: Whole = msgspec.field(default=0, name="Device Type")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = UNKNOWN
    tid: int | str = UNKNOWN
    ts: float = math.nan
    dur: float = -1.0
    args: Args | None = None


class ExactEvent(msgspec.Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = UNKNOWN
    tid: int | str = UNKNOWN
    ts: msgspec.Raw = NOTHING
    dur: msgspec.Raw = NOTHING
    args: Args | None = None


AnyEvent: TypeAlias = Event | ExactEvent

# Not strict: ROCm writes some numbers as text.
fast_decoder = msgspec.json.Decoder(list[Event], strict=False)
exact_decoder = msgspec.json.Decoder(list[ExactEvent], strict=False)


def nanoseconds_of(text: bytes) -> int | None:
    """Microseconds as a decimal number, whole and exact in nanoseconds; None where the text is no such number."""
    whole, _, fraction = text.strip(b'"').partition(b".")
    if whole.isdigit() and len(fraction) <= 3 and (fraction.isdigit() or not fraction):
        return int(whole) * 1000 + int(fraction.ljust(3, b"0"))
    try:
        value = Decimal(text.strip(b'"').decode("ascii", "replace"))
    except InvalidOperation:
        return None
    if not value.is_finite() or abs(value) > LARGEST_US:
        return None
    return int((value * 1000).to_integral_value())


def coerce(body: bytes) -> ExactEvent | None:
    """What can be understood of one event that is not as it should be; None when that is nothing.

    What it is, and when, must be right; of its arguments, a wrong one counts as not given. Python's own JSON reader
    does it: slower, but it takes NaN, which some tools write.
    """
    try:
        plain = json.loads(body, parse_float=str, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict):
        return None
    ph, cat, name = plain.get("ph", ""), plain.get("cat", ""), plain.get("name", "")
    if not (isinstance(ph, str) and isinstance(cat, str) and isinstance(name, str)):
        return None
    return ExactEvent(
        ph=ph,
        cat=cat,
        name=name,
        pid=_label(plain.get("pid", UNKNOWN)),
        tid=_label(plain.get("tid", UNKNOWN)),
        ts=_raw(plain.get("ts")),
        dur=_raw(plain.get("dur")),
        args=_args(plain.get("args")),
    )


def _args(plain: Any) -> Args | None:
    if not isinstance(plain, dict):
        return None
    args = Args()
    for field in msgspec.structs.fields(Args):
        value = plain.get(field.encode_name)
        if value is None or field.type is msgspec.Raw:
            continue
        try:
            setattr(args, field.name, msgspec.convert(value, field.type, strict=False))
        except msgspec.ValidationError:
            continue
    return args


def _label(value: Any) -> int | str:
    return value if isinstance(value, int | str) else repr(value)


def _raw(value: Any) -> msgspec.Raw:
    return msgspec.Raw(str(value).encode()) if isinstance(value, int | str) else NOTHING


OPERATOR, CALL, ANNOTATION, DEVICE, ALLOCATION = range(5)

_CATEGORIES: dict[str, tuple[int, Work | None]] = {
    "cpu_op": (OPERATOR, None),
    "user_annotation": (ANNOTATION, None),
    "kernel": (DEVICE, Work.KERNEL),
    "gpu_memcpy": (DEVICE, Work.COPY),
    "gpu_memset": (DEVICE, Work.FILL),
    "cpu_instant_event": (ALLOCATION, None),
    # As torch 1.8 to 1.10 wrote them.
    "operator": (OPERATOR, None),
    "memcpy": (DEVICE, Work.COPY),
    "memset": (DEVICE, Work.FILL),
    "runtime": (CALL, None),
}
_MEMORY_EVENT = "[memory]"

T = TypeVar("T")


class Numbering(defaultdict[T, int]):
    """A number for each thing, in the order in which they are first met."""

    def __init__(self) -> None:
        super().__init__()
        self.default_factory = self.__len__

    def of(self, things: Iterable[T], count: int) -> Ids:
        return np.fromiter(map(self.__getitem__, things), np.int32, count)


class NeedsExactTimes(Exception):
    """Times so large that floats blur them: decode this batch again, with times as text."""


class Builder:
    """Takes batches of events; `finish` gives the tables."""

    def __init__(self) -> None:
        self.names: Numbering[str] = Numbering()
        self.threads: Numbering[tuple[int | str, int | str]] = Numbering()
        self.shapes: list[Shape] = []
        self.events = 0
        self.rejected: defaultdict[str, int] = defaultdict(int)
        """Events left out, by reason."""
        self._shape_numbers: dict[tuple[bytes, bytes], int] = {}
        self._shape_texts: Numbering[Shape] = Numbering()
        self._kinds: dict[str, tuple[int, Work | None] | None] = {}
        self._parts: dict[int, list[dict[str, Any]]] = {kind: [] for kind in range(5)}

    def add(self, events: Sequence[AnyEvent]) -> None:
        """Raises `NeedsExactTimes` before anything of the batch is kept."""
        groups = []
        for category, group in _by_category(events).items():
            kind, work = self._kind_of(category) or (None, None)
            if kind is None:
                continue
            wanted = _wanted(kind, group)
            if wanted:
                groups.append((kind, work, wanted, *_times(wanted, instant=kind == ALLOCATION)))
        for kind, work, wanted, start, duration in groups:
            self._keep(kind, work, wanted, start, duration)
        self.events += len(events)

    def _kind_of(self, category: str) -> tuple[int, Work | None] | None:
        if category not in self._kinds:
            lower = category.lower()
            is_call = lower.endswith(("_runtime", "_driver"))
            self._kinds[category] = (CALL, None) if is_call else _CATEGORIES.get(lower)
        return self._kinds[category]

    def _keep(self, kind: int, work: Work | None, events: list[AnyEvent], start: Ints, duration: Ints) -> None:
        good = (start != _NO_TIME) & (duration >= 0)
        if not good.all():
            self.rejected["no time, or one out of range"] += int((start == _NO_TIME).sum())
            self.rejected["a duration below zero, or none"] += int(((start != _NO_TIME) & (duration < 0)).sum())
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
            shapes = np.fromiter(map(self._shape_of, args), np.int32, len(args))
            return {
                "shape": shapes,
                "external": _column(arg.external for arg in args),
                "sequence": _column(arg.sequence for arg in args),
                "forward_thread": _column(arg.forward_thread for arg in args),
            }
        if kind == CALL:
            return {
                "correlation": _column(arg.correlation for arg in args),
                "external": _column(arg.external for arg in args),
            }
        if kind == DEVICE:
            return {
                "kind": np.full(len(args), work, np.int32),
                "device": _column(_either(arg.device, event.pid) for arg, event in zip(args, events, strict=True)),
                "stream": _column(_either(arg.stream, event.tid) for arg, event in zip(args, events, strict=True)),
                "correlation": _column(arg.correlation for arg in args),
                "bytes": _column(arg.bytes for arg in args),
            }
        if kind == ALLOCATION:
            return {
                "bytes": _column(arg.allocated for arg in args),
                "on_device": _column(arg.device_type > 0 for arg in args).astype(np.int32),
            }
        return {}

    def _shape_of(self, args: Args) -> int:
        if not args.dims:
            return UNKNOWN
        written = bytes(args.dims), bytes(args.types)
        number = self._shape_numbers.get(written)
        if number is None:
            dims, types = (b"".join(text.split()).decode("utf-8", "replace") for text in written)
            number = self._shape_numbers[written] = self._shape_texts[Shape(dims, types)]
        return number

    def finish(self) -> dict[str, Any]:
        """The tables of a `Trace`, by field; the parts they were made from are let go on the way."""
        self.shapes = list(self._shape_texts)
        tables = {
            "operators": Operators(**self._joined(OPERATOR, Operators)),
            "calls": Calls(**self._joined(CALL, Calls)),
            "annotations": HostRanges(**self._joined(ANNOTATION, HostRanges)),
            "work": DeviceWork(**self._joined(DEVICE, DeviceWork)),
        }
        allocations = self._joined(ALLOCATION, Allocations, renamed={"at": "start"})
        return {**tables, "allocations": Allocations(**allocations)}

    def _joined(self, kind: int, table: type[Any], renamed: dict[str, str] | None = None) -> dict[str, Any]:
        parts = self._parts.pop(kind)
        columns = {}
        for name in table.__dataclass_fields__:
            pieces = [part.pop((renamed or {}).get(name, name)) for part in parts]
            small = name in ("name", "thread", "shape", "kind", "device", "on_device")
            dtype = np.int32 if small else np.int64
            columns[name] = np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.empty(0, dtype)
        return columns


_NO_TIME = np.iinfo(np.int64).min


def _by_category(events: Sequence[AnyEvent]) -> dict[str, list[AnyEvent]]:
    groups: defaultdict[str, list[AnyEvent]] = defaultdict(list)
    for event in events:
        groups[event.cat].append(event)
    return groups


def _wanted(kind: int, events: list[AnyEvent]) -> list[AnyEvent]:
    if kind == ALLOCATION:
        return [event for event in events if event.ph == "i" and event.name == _MEMORY_EVENT]
    return [event for event in events if event.ph == "X"]


def _times(events: list[AnyEvent], *, instant: bool) -> tuple[Ints, Ints]:
    if isinstance(events[0], Event):
        start = np.array([event.ts for event in events], np.float64)
        duration = np.array([event.dur for event in events], np.float64)
        # Comparisons with NaN are false: an event without a time does not ask for exactness.
        if (np.abs(start) >= EXACT_BELOW_US).any() or (duration >= EXACT_BELOW_US).any():
            raise NeedsExactTimes
        starts, durations = _nanoseconds(start), _nanoseconds(duration)
    else:
        starts = _column(_known(nanoseconds_of(_text(event.ts)), _NO_TIME) for event in events)
        durations = _column(_known(nanoseconds_of(_text(event.dur)), UNKNOWN) for event in events)
    return starts, np.zeros_like(starts) if instant else durations


def _nanoseconds(microseconds: Any) -> Ints:
    """Exact below `EXACT_BELOW_US`: the whole part is multiplied as an integer, the fraction loses nothing."""
    usable = np.abs(microseconds) <= LARGEST_US
    whole = np.floor(np.where(usable, microseconds, 0.0))
    fraction = np.where(usable, microseconds, 0.0) - whole
    found = whole.astype(np.int64) * 1000 + np.rint(fraction * 1000).astype(np.int64)
    return np.where(usable, found, _NO_TIME)


def _column(values: Iterable[int]) -> Ints:
    return np.fromiter(values, np.int64)


def _either(value: int, otherwise: int | str) -> int:
    """The argument where it is given, else the process or thread number the event is drawn under."""
    if value != UNKNOWN:
        return value
    return otherwise if isinstance(otherwise, int) and abs(otherwise) < 2**31 else UNKNOWN


def _text(time: float | msgspec.Raw) -> bytes:
    assert isinstance(time, msgspec.Raw)
    return bytes(time)


def _known(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value
