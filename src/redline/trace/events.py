"""One event of a Kineto trace, typed: only what some table needs is decoded, the rest is stepped over.

Three ways to read the same thing. `Event` is the fast one: its times are floats, exact to the nanosecond while they
stay below `EXACT_BELOW_US`. `ExactEvent` keeps times as text, for traces that count from 1970. `coerce` makes the best
of an event whose types are wrong.
"""

from __future__ import annotations

import json
import math
from decimal import Decimal, InvalidOperation
from typing import Annotated, Any, TypeAlias

import msgspec

from redline.trace.columns import UNKNOWN

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
