"""The machine as drivers and system tell it, without torch: its CPU, the energy of its packages, and every GPU that a driver
speaks of. One file for each vendor's library."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import psutil

from redline.system.telemetry.amd import open_amd_cards
from redline.system.telemetry.nvml import open_cards

_CPUINFO = Path("/proc/cpuinfo")
_RAPL = Path("/sys/class/powercap")


class Card(Protocol):
    """One GPU, as its driver knows it. Every figure may be None: unknown."""

    def facts(self) -> dict[str, Any]: ...

    def reading(self) -> dict[str, Any]: ...

    def energy_j(self) -> float | None: ...


def open_all_cards() -> list[Card]:
    """Every GPU of the machine, by NVIDIA's library, then by AMD's; none where neither is there."""
    return [*open_cards(), *open_amd_cards()]


def cpu_name() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    import platform

    return platform.processor() or platform.machine()


def cpu_temperature_c() -> float | None:
    read = getattr(psutil, "sensors_temperatures", None)
    sensors = read() if read else {}
    for name in ("coretemp", "k10temp", "zenpower", "cpu_thermal"):
        if sensors.get(name):
            return float(max(entry.current for entry in sensors[name]))
    return None


def package_energy_j(folder: Path = _RAPL) -> float | None:
    """Joules that all CPU packages have used since some moment (RAPL); None where this user may not read it.

    The counters wrap; `EnergyMeter` takes differences often enough to notice.
    """
    total, found = 0.0, False
    for package in sorted(folder.glob("*-rapl:[0-9]*")):
        if package.name.count(":") != 1:
            continue  # cores and memory are parts of their package
        try:
            total += int((package / "energy_uj").read_text()) / 1e6
            found = True
        except (OSError, ValueError):
            return None  # readable by root alone, on most systems
    return total if found else None


class EnergyMeter:
    """Adds up what a counter of joules counts; a decrease means the counter wrapped or the card changed, and is not counted."""

    def __init__(self) -> None:
        self._last: float | None = None
        self.joules: float | None = None

    def read(self, counter_j: float | None) -> None:
        if counter_j is not None and self._last is not None and counter_j >= self._last:
            self.joules = (self.joules or 0.0) + counter_j - self._last
        self._last = counter_j if counter_j is not None else self._last
