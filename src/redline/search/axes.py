"""How values of a grid's axes are written: one, a list, and for batches a range as well."""

from __future__ import annotations

import re
from typing import Any

from redline.errors import SpecError

AXES = ("model", "task", "threads", "batch", "recipe")
_DOUBLING = re.compile(r"(\d+)\.\.(\d+)")


def listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple | set | range) else [value]


def parse_batches(value: Any) -> list[int]:
    """`8`, `[1, 8]`, `"1,8,16"` and `"16..512"`, which doubles from the first to the last."""
    found: list[int] = []
    for part in (word for item in listed(value) for word in (item.split(",") if isinstance(item, str) else [item])):
        text = str(part).strip()
        doubling = _DOUBLING.fullmatch(text)
        if doubling:
            found += _doubled(int(doubling.group(1)), int(doubling.group(2)), text)
        elif text.isdecimal() and not isinstance(part, bool):
            found.append(int(text))
        else:
            raise SpecError(f"batch must be a number, a list such as 1,8,16 or a range such as 16..512, got {text!r}")
    return list(dict.fromkeys(found))


def _doubled(low: int, high: int, text: str) -> list[int]:
    if not 0 < low <= high:
        raise SpecError(f"batch range {text!r} must go from 1 or more upwards")
    batches = [low]
    while batches[-1] * 2 <= high:
        batches.append(batches[-1] * 2)
    return batches if batches[-1] == high else [*batches, high]
