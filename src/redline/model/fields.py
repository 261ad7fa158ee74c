"""Types, limits and checks of the fields that specs and records are made of, and the base class of both."""

from __future__ import annotations

from typing import Annotated, Any, dataclass_transform, get_args

import msgspec

from redline.model.errors import SpecError
from redline.model.units import parse_seconds

MOST_ITEMS = 2**31 - 1
"""No machine holds more in a batch, a sequence, a set of classes or samples, and messages carry 64 bits at most."""
MOST_PIXELS = 2**16
"""A picture has at most this many pixels per side."""
MOST_THREADS = 2**12
MOST_RANKS = 2**14
MOST_BYTES = 2**60
MOST_SECONDS = 10**7
"""This is four months. No measurement takes longer, and every system clock can count this far."""
MOST_CELLS = 20_000
"""A grid may have so many cells. More would take weeks; a typing mistake easily makes millions."""
MOST_REPLICATES = 1000
MOST_DEPTH = 1000
"""This is the depth of nested modules, which is Python's recursion limit."""
MOST_ROWS = 1_000_000
"""More rows in a listing or a table, or steps under a profiler, nobody reads."""
SEEDS = (-(2**63), 2**64 - 2)
"""This is the range torch accepts, less one: the second inputs are drawn from the next seed."""

Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
"""This is a measured duration: a number, not negative, less than a lifetime. It is checked whenever a record or a message is read."""
LAST_MOMENT = 253_400_000_000.0
"""This moment is in the year 9999, the last that dates can be written in, in any time zone."""
Moment = Annotated[float, msgspec.Meta(ge=0, le=LAST_MOMENT)]
"""Seconds since the epoch."""
Figure = Annotated[float, msgspec.Meta(ge=-1e30, le=1e30)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Items = Annotated[int, msgspec.Meta(ge=0, le=MOST_ITEMS)]


def require_choice(name: str, value: str, choices: Any) -> None:
    allowed = get_args(choices)
    if value not in allowed:
        raise SpecError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def require_range(name: str, value: int | None, low: int, high: int) -> None:
    if value is None:
        return
    if value < low:
        raise SpecError(f"{name} must be {low} or more, got {shown_number(value)}")
    if value > high:
        raise SpecError(f"{name} must be {high} or less, got {shown_number(value)}")


def require_between(name: str, value: float, low: float, high: float) -> None:
    """Refuse what is no number between the two, or is one of them."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not low < value < high:
        got = shown_number(value) if is_number else repr(value)
        raise SpecError(f"{name} must be above {low:g} and below {high:g}, got {got}")


def require_seconds(name: str, value: float, *, zero_too: bool = False) -> None:
    if not (value >= 0 if zero_too else value > 0):
        raise SpecError(f"{name} must {'not be negative' if zero_too else 'be above 0'}, got {shown_number(value)}")
    if value > MOST_SECONDS:
        raise SpecError(f"{name} must be {MOST_SECONDS} seconds or less, got {shown_number(value)}")


def seconds_of(name: str, value: float | str, *, zero_too: bool = False) -> float:
    """Returns the seconds in a number or a text such as "20ms"; an error names the field."""
    try:
        found = parse_seconds(value) if isinstance(value, str) else float(value)
    except SpecError as error:
        raise SpecError(f"{name}: {error}") from None
    require_seconds(name, found, zero_too=zero_too)
    return found


def split_address(name: str, text: str) -> tuple[str, int]:
    """Returns host and port of `HOST:PORT`."""
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise SpecError(f"{name} must be HOST:PORT, such as node1:7777, got {text!r}")
    return host, int(port)


def shown_number(value: float) -> str:
    """Returns the number as text, because Python refuses to print numbers of thousands of digits."""
    is_long = isinstance(value, int) and abs(value) >= 10**30
    return "a number of more than 30 digits" if is_long else str(value)


def require_unicode(name: str, text: str) -> None:
    """Refuses a text typed in another encoding: Python gets half a surrogate pair, which no message can carry."""
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecError(f"{name} {text!r} is not Unicode in this locale: set LC_ALL=C.UTF-8, or rename it")
    if "\0" in text:
        raise SpecError(f"{name} {text!r} has a NUL character in it")


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class _FrozenMeta(msgspec.StructMeta):
    """Gives every spec and record the same settings, because msgspec does not inherit them."""

    def __new__(mcls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **settings: Any) -> Any:
        fixed = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}
        return super().__new__(mcls, name, bases, namespace, **{**fixed, **settings})


class Frozen(msgspec.Struct, metaclass=_FrozenMeta):
    """This is the base of all specs and records. They are frozen and keyword-only, and refuse unknown fields."""
