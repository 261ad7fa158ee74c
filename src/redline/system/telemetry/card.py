"""This module has what all GPUs have in common for those who look at them from outside."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psutil


class Card:
    """A card is one GPU, as its driver knows it. Every figure may be None, which is unknown; a vendor's library need not have them all."""

    def name(self) -> str | None:
        return None

    def facts(self) -> dict[str, Any]:
        """Returns what does not change: its uuid, driver, limits and modes."""
        return {}

    def reading(self) -> dict[str, Any]:
        """Returns the figures of a `TelemetrySample`."""
        return {}

    def energy_j(self) -> float | None:
        """Joules since some moment."""
        return None

    def memory_bytes(self) -> int | None:
        return None

    def throttle_reasons(self) -> tuple[str, ...] | None:
        return None

    def processes(self) -> dict[int, int | None] | None:
        """Returns the bytes by process, with None where the driver hides them, or None for all where the card does not tell."""
        return None

    def strangers(self, family: Collection[int]) -> tuple[str, ...]:
        """Processes on it outside of a family, with their names where they can be seen.

        In a container the driver may speak of the host's process numbers: then nothing can be told apart.
        """
        running = set(self.processes() or ())
        return tuple(map(_described, sorted(running.difference(family)))) if running.intersection(family) else ()

    def foreign_processes(self) -> tuple[str, ...]:
        """Processes on it that are not of our family."""
        return ()

    def own_memory_bytes(self) -> int | None:
        """Returns the bytes that the driver counts for this process."""
        return None


def _described(pid: int) -> str:
    try:
        return f"{pid} {psutil.Process(pid).name()}"
    except psutil.Error:
        return str(pid)


class EnergyMeter:
    """Adds up what a counter of joules counts; a decrease means the counter wrapped or the card changed, and is not counted."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.joules: float | None = None

    def read(self, counter_j: float | None) -> None:
        if counter_j is not None and self._last is not None and counter_j >= self._last:
            self.joules = (self.joules or 0.0) + counter_j - self._last
        self._last = counter_j if counter_j is not None else self._last
