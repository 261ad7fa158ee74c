"""One event of a Kineto trace, typed: only what some table needs is decoded, the rest is skipped.

Three ways to read the same thing. `Event` is the fast one: its times are floats, exact to the nanosecond while they
stay below `EXACT_BELOW_US`. `ExactEvent` keeps times as text, for traces that count from 1970. `coerce` makes the best
of an event whose types are wrong.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, TypeAlias

import msgspec
import numpy as np

from redline.trace.columns import UNKNOWN, Ints

EXACT_BELOW_US = 2.0**43
"""Up to here neighbouring floats are less than a nanosecond apart; beyond, rounding would move events."""

LARGEST_US = 4.0e15
"""In nanoseconds this still fits 64 bits; the year 2096."""

LONGEST_US = 3.0e12
"""No event lasts longer than 35 days. What does is a time that wrapped around, and would spoil every sum."""

NO_TIME = int(np.iinfo(np.int64).min)

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
    values: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    # Of memory events.
    allocated: Whole = msgspec.field(default=0, name="Bytes")
    device_type: Whole = msgspec.field(default=0, name="Device Type")
    device_id: Whole = msgspec.field(default=UNKNOWN, name="Device Id")
    total_allocated: Whole = msgspec.field(default=UNKNOWN, name="Total Allocated")
    # Of collectives: on the kernel, and on the operator that describes it.
    collective: msgspec.Raw = msgspec.field(default=NOTHING, name="Collective name")
    dtype: msgspec.Raw = NOTHING
    in_elements: Whole = msgspec.field(default=UNKNOWN, name="In msg nelems")
    out_elements: Whole = msgspec.field(default=UNKNOWN, name="Out msg nelems")
    group_size: Whole = msgspec.field(default=UNKNOWN, name="Group size")
    group: msgspec.Raw = msgspec.field(default=NOTHING, name="Process Group Name")


NO_ARGS = Args()
_NUMBERS = [field for field in msgspec.structs.fields(Args) if field.type is not msgspec.Raw]


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

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises when a piece of text is not a list of events of the right types."""


class NeedsExactTimes(Exception):
    """Times so large that floats blur them: decode this batch again, with times as text."""


_ESCAPE = re.compile(
    rb"(?s)\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""A whole surrogate pair, half of one, or any other escape."""
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


def mended(text: bytes) -> bytes:
    """The same text with every byte that no JSON string may hold replaced: bad UTF-8, lone surrogates, control bytes.

    Profilers write names straight from memory; one broken name must not cost the events around it.
    """
    text = text.decode("utf-8", "replace").encode()
    text = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape.group(1) else escape.group(0), text)
    return _CONTROL.sub(b" ", text)


def nanoseconds_of(text: bytes, largest_us: float = LARGEST_US) -> int | None:
    """Microseconds as a decimal number, whole and exact in nanoseconds; None where the text is no such number."""
    whole, _, fraction = text.strip(b'"').partition(b".")
    if whole.isdigit() and len(whole) <= 16 and len(fraction) <= 3 and (fraction.isdigit() or not fraction):
        found = int(whole) * 1000 + int(fraction.ljust(3, b"0"))
        return found if found <= largest_us * 1000 else None
    try:
        value = Decimal(text.strip(b'"').decode("ascii", "replace"))
    except InvalidOperation:
        return None
    if not value.is_finite() or value.copy_abs() > largest_us:  # `abs` would round, and overflow on 1e9999999
        return None
    return int((value * 1000).to_integral_value())


def start_and_duration(events: list[AnyEvent]) -> tuple[Ints, Ints]:
    """NO_TIME and UNKNOWN for times that are missing or out of range."""
    if isinstance(events[0], Event):
        start = np.array([event.ts for event in events], np.float64)
        duration = np.array([event.dur for event in events], np.float64)
        # Comparisons with NaN are false: an event without a time does not ask for exactness.
        if (np.abs(start) >= EXACT_BELOW_US).any():
            raise NeedsExactTimes
        return _nanoseconds(start, LARGEST_US, NO_TIME), _nanoseconds(duration, LONGEST_US, UNKNOWN)
    starts = (_known(nanoseconds_of(_text(event.ts)), NO_TIME) for event in events)
    durations = (_known(nanoseconds_of(_text(event.dur), LONGEST_US), UNKNOWN) for event in events)
    return np.fromiter(starts, np.int64, len(events)), np.fromiter(durations, np.int64, len(events))


def _nanoseconds(microseconds: Any, largest_us: float, otherwise: int) -> Ints:
    """Exact below `EXACT_BELOW_US`: the whole part is multiplied as an integer, the fraction loses nothing."""
    usable = np.abs(microseconds) <= largest_us
    whole = np.floor(np.where(usable, microseconds, 0.0))
    fraction = np.where(usable, microseconds, 0.0) - whole
    found = whole.astype(np.int64) * 1000 + np.rint(fraction * 1000).astype(np.int64)
    return np.where(usable, found, otherwise)


def _text(time: float | msgspec.Raw) -> bytes:
    assert isinstance(time, msgspec.Raw)
    return bytes(time)


def _known(value: int | None, otherwise: int) -> int:
    return otherwise if value is None else value


def coerce(body: bytes) -> ExactEvent | None:
    """What can be understood of one event that is not as it should be; None when that is nothing.

    What it is, and when, must be right; of its arguments, a wrong one counts as not given. Python's own JSON reader
    does it: slower, but it takes NaN, which some tools write.
    """
    try:
        plain = json.loads(mended(body), parse_float=str, parse_constant=str)
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
    for field in _NUMBERS:
        value = plain.get(field.encode_name)
        if value is None:
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
