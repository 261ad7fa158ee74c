"""What all GPUs have in common for those who look at them from outside."""

from __future__ import annotations

from typing import Any


class Card:
    """One GPU, as its driver knows it. Every figure may be None, which is unknown; a vendor's library need not have them all."""

    def name(self) -> str | None:
        return None

    def facts(self) -> dict[str, Any]:
        """What does not change: its uuid, driver, limits and modes."""
        return {}

    def reading(self) -> dict[str, Any]:
        """The figures of a `TelemetrySample`."""
        return {}

    def energy_j(self) -> float | None:
        """Joules since some moment."""
        return None

    def memory_bytes(self) -> int | None:
        return None

    def traffic(self) -> dict[str, float | None]:
        """Bytes per second over PCIe in each direction, and bytes over NVLink since some moment."""
        return {}

    def throttle_reasons(self) -> tuple[str, ...] | None:
        return None

    def processes(self) -> dict[int, int | None] | None:
        """Bytes by process, None where the driver hides them; None for all where the card does not tell."""
        return None

    def foreign_processes(self) -> tuple[str, ...]:
        """Processes on it that are not of our family, with their names where they can be seen."""
        return ()

    def own_memory_bytes(self) -> int | None:
        """Bytes that the driver counts for this process."""
        return None


class EnergyMeter:
    """Adds up what a counter of joules counts; a decrease means the counter wrapped or the card changed, and is not counted."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.joules: float | None = None

    def read(self, counter_j: float | None) -> None:
        if counter_j is not None and self._last is not None and counter_j >= self._last:
            self.joules = (self.joules or 0.0) + counter_j - self._last
        self._last = counter_j if counter_j is not None else self._last
