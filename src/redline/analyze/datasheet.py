"""Peaks from datasheets, by the name the driver gives. A card that is not listed has none: nothing is guessed."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from redline.spec import Spec

_MEMORY_SIZE = r"(?:[- ]\d+ ?GB)?"
"""Some names go on with the size of the memory, which changes no peak listed here."""


class Datasheet(Spec):
    card: str
    flops_per_s: dict[str, float]
    """Dense, by number format."""
    bytes_per_s: float
    source: str
    verified: bool
    """False: remembered, not checked against the source."""

    @staticmethod
    def of(device_name: str) -> Datasheet | None:
        return next((sheet for names, sheet in _sheets() if any(_is(name, device_name) for name in names)), None)


def _is(name: str, device_name: str) -> bool:
    """As whole words at the end: an A10 is no A100, an RTX 4090 no RTX 4090 Laptop GPU, a slice of a card not the card."""
    return re.search(rf"(?:^|\s){re.escape(name)}{_MEMORY_SIZE}$", device_name.strip()) is not None


@cache
def _sheets() -> list[tuple[tuple[str, ...], Datasheet]]:
    table: dict[str, Any] = tomllib.loads((files("redline.analyze") / "data" / "gpu_peaks.toml").read_text("utf-8"))
    formats = ("fp32", "tf32", "fp16", "bf16", "fp8")
    return [
        (
            tuple(card["match"]),
            Datasheet(
                card=name,
                flops_per_s={form: card[form] * 1e12 for form in formats if form in card},
                bytes_per_s=card["memory"] * 1e9,
                source=card["source"],
                verified=card["verified"],
            ),
        )
        for name, card in table.items()
    ]
