"""Drivers and the system tell of the machine without torch: of its CPU, of the energy of its packages, and of every GPU. Each vendor's
library has a file of its own."""

from __future__ import annotations

from pathlib import Path

import psutil

from redline.system.telemetry.amd import open_amd_cards
from redline.system.telemetry.card import Card
from redline.system.telemetry.nvml import open_cards

_CPUINFO = Path("/proc/cpuinfo")
_RAPL = Path("/sys/class/powercap")


def open_all_cards() -> list[Card]:
    """Returns every GPU of the machine, by NVIDIA's library, then by AMD's. There are none where neither library is there."""
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
    total, has_any = 0.0, False
    for package in sorted(folder.glob("*-rapl:[0-9]*")):
        if package.name.count(":") != 1:
            continue  # cores and memory are parts of their package
        try:
            total += int((package / "energy_uj").read_text()) / 1e6
            has_any = True
        except (OSError, ValueError):
            return None  # readable by root alone, on most systems
    return total if has_any else None
