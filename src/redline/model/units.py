"""This module knows how a person writes seconds, bytes, joules and rates, how they print, and which names are safe to print.

Values are in SI units inside, and made readable only here.
"""

from __future__ import annotations

import math
import re
from unicodedata import category

from redline.model.errors import SpecError

_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµ]*)\s*", re.IGNORECASE)

THIN_SPACE = "\u2009"


def parse_bytes(text: str) -> int:
    """Reads '16GiB', '14 GB' or '1000000' as a count of bytes; GB is 10⁹, GiB 2³⁰."""
    return round(_parse(text, _BYTES, "b", "a size such as 16GiB or 14GB"))


def parse_seconds(text: str) -> float:
    """Reads '20ms', '10m' or '3' as seconds."""
    return _parse(text, _SECONDS, "s", "a time such as 20ms, 3s or 10m")


_PRICE = re.compile(r"\s*[$€£]?\s*([0-9]*\.?[0-9]+)\s*[$€£]?\s*(?:/\s*(h|hour|d|day|month))?\s*", re.IGNORECASE)
_HOURS = {"h": 1.0, "hour": 1.0, "d": 24.0, "day": 24.0, "month": 730.0}


def parse_price(text: str) -> float:
    """Reads '2.50/h', '$40/day' or '2.5' as a price per hour."""
    match = _PRICE.fullmatch(text)
    price = float(match.group(1)) / _HOURS[(match.group(2) or "h").lower()] if match else math.nan
    if not (math.isfinite(price) and price > 0):
        raise SpecError(f"expected a price such as 2.50/h, got {text!r}")
    return price


def _parse(text: str, factors: dict[str, float] | dict[str, int], bare: str, expected: str) -> float:
    match = _QUANTITY.fullmatch(text)
    unit = (match.group(2).lower() or bare) if match else ""
    value = float(match.group(1)) * factors[unit] if match and unit in factors else math.nan
    if not math.isfinite(value):
        raise SpecError(f"expected {expected}, got {text!r}")
    return value


def format_ratio(ratio: float) -> str:
    """Writes a ratio as `0.82×`, and a small one as `0.0037×` rather than as a zero."""
    return f"{ratio:.2f}×" if ratio >= 0.095 or not ratio > 0 else f"{ratio:.2g}×"


def significant(value: float, digits: int) -> str:
    """Writes `value` with this many significant digits, no exponent, thousands separated."""
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    exponent = int(f"{value:.{digits - 1}e}".partition("e")[2])  # of the rounded value: 9.996 becomes 10.0
    decimals = max(0, digits - 1 - exponent)
    return f"{value:,.{decimals}f}".replace(",", THIN_SPACE)


def format_seconds(value: float | None, digits: int = 3) -> str:
    if value is None:
        return "n/a"
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if abs(value) >= factor or unit == "µs":
            return f"{significant(value / factor, digits)} {unit}"
    raise AssertionError("unreachable")


def format_bytes(value: float | None) -> str:
    if value is None:
        return "n/a"
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(value) >= factor:
            return f"{significant(value / factor, 3)} {unit}"
    return f"{value:.0f} B"


def exact_bytes(value: int) -> str:
    """Writes bytes as `parse_bytes` reads them back to the byte: 16GiB, 14GB, or the plain count."""
    for unit in ("GiB", "GB", "MiB", "MB"):
        if value and value % _BYTES[unit.lower()] == 0:
            return f"{value // _BYTES[unit.lower()]}{unit}"
    return str(value)


def format_count(value: float | None) -> str:
    """Returns a number of things with k, M, G, T or P: 4.09 G."""
    if value is None:
        return "n/a"
    for factor, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{significant(value / factor, 4)} {unit}"
    return f"{value:.0f}"


def format_rate(value: float | None) -> str:
    """Writes things per second to three digits, or four from a thousand on: 8.24, 973, 76 090."""
    return "n/a" if value is None else significant(value, 3 if abs(value) < 1000 else 4)


def format_share(value: float | None) -> str:
    if value is None:
        return "n/a"
    return f"{value * 100:.2g}{THIN_SPACE}%" if value < 0.1 else f"{value * 100:.0f}{THIN_SPACE}%"


def printable(text: str) -> str:
    """Returns the text with every character replaced that a terminal would obey or no file could hold."""
    if text.isprintable():
        return text
    # Blanks that do not break a line, as between a number and its unit, count as unprintable too.
    return "".join(one if one.isprintable() or category(one) == "Zs" else "\ufffd" for one in text)


def counted(number: int, what: str) -> str:
    """Returns a count with its noun: `1 thread`, `2 threads`."""
    return f"{number} {what}{'s' if number != 1 else ''}"
