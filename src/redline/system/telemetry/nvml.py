"""This module asks NVIDIA's management library what the driver says about one card. Every figure may be missing on some card."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

import psutil

from redline.system.telemetry.card import Card

THROTTLE_REASONS = {
    0x04: "sw_power_cap",
    0x08: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "power_brake",
}

NEIGHBOUR_PERIOD_S = 2.0
"""To tell strangers from relatives, we walk the process table. We do not do so more often than this."""


def open_card(uuid: str) -> NvmlCard | None:
    """Returns the card, or None where the library or the card cannot be reached."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return NvmlCard(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


def open_cards() -> list[NvmlCard]:
    """Returns every card that the library tells of; none where it cannot be reached."""
    import pynvml

    cards: list[NvmlCard] = []
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # fallen off the bus, or not ours to see
                cards.append(NvmlCard(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
    return cards


def _milli(value: float) -> float:
    return value / 1e3


def _mega(value: float) -> float:
    return value * 1e6


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _mode(modes: Any) -> bool:
    return bool(modes[0])


class NvmlCard(Card):
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._foreign: tuple[str, ...] = ()
        self._looked_at = -math.inf

    def _get(self, function: str, of: Callable[[Any], Any], *arguments: str) -> Any:
        """Returns one figure, or None where this card, driver or permission does not give it. The arguments are names of constants."""
        call = getattr(self._nvml, f"nvmlDeviceGet{function}", None)
        if call is None:
            return None
        try:
            return of(call(self._handle, *(getattr(self._nvml, f"NVML_{name}") for name in arguments)))
        except (self._nvml.NVMLError, TypeError, ValueError, AttributeError):  # or a figure that is "N/A"
            return None

    def facts(self) -> dict[str, Any]:
        driver = None
        with contextlib.suppress(self._nvml.NVMLError):
            driver = _text(self._nvml.nvmlSystemGetDriverVersion())
        return {
            "uuid": self._get("UUID", _text),
            "driver": driver,
            "power_limit_w": self._get("EnforcedPowerLimit", _milli),
            "max_clock_hz": self._get("MaxClockInfo", _mega, "CLOCK_SM"),
            "ecc": self._get("EccMode", _mode),
            "mig": self._get("MigMode", _mode),
        }

    def reading(self) -> dict[str, Any]:
        return {
            "utilisation": self._get("UtilizationRates", lambda rates: rates.gpu / 100),
            "memory_used_bytes": self._get("MemoryInfo", lambda info: int(info.used)),
            "power_w": self._get("PowerUsage", _milli),
            "temperature_c": self._get("Temperature", float, "TEMPERATURE_GPU"),
            "clock_hz": self._get("ClockInfo", _mega, "CLOCK_SM"),
            "memory_clock_hz": self._get("ClockInfo", _mega, "CLOCK_MEM"),
            "throttle": self.throttle_reasons() or (),
        }

    def name(self) -> Any:
        return self._get("Name", _text)

    def energy_j(self) -> Any:
        return self._get("TotalEnergyConsumption", _milli)

    def memory_bytes(self) -> Any:
        return self._get("MemoryInfo", lambda info: int(info.total))

    def throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self._get("CurrentClocksEventReasons", int)
        if bits is None:  # older drivers have another word for them
            bits = self._get("CurrentClocksThrottleReasons", int)
        return None if bits is None else tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)

    def processes(self) -> Any:
        return self._get("ComputeRunningProcesses", lambda found: {one.pid: one.usedGpuMemory for one in found})

    def foreign_processes(self) -> tuple[str, ...]:
        """Sibling sessions and the desk are not foreign."""
        if time.monotonic() - self._looked_at > NEIGHBOUR_PERIOD_S:
            self._foreign, self._looked_at = self.strangers(_family()), time.monotonic()
        return self._foreign

    def own_memory_bytes(self) -> int | None:
        return (self.processes() or {}).get(os.getpid()) or None


def _family() -> set[int]:
    me = psutil.Process()
    parent = me.parent()
    # Sibling workers share our parent, the supervisor.
    siblings = parent.children(recursive=True) if parent is not None and parent.pid > 1 else []
    return {process.pid for process in (me, *me.parents(), *me.children(recursive=True), *siblings)}
