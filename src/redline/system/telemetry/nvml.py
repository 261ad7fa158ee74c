"""NVIDIA's management library: what the driver says about one card. Every figure may be missing on some card."""

from __future__ import annotations

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
"""Telling strangers from relatives walks the process table: not more often than this."""


def open_card(uuid: str) -> NvmlCard | None:
    """The card, or None where the library or the card cannot be reached."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        return NvmlCard(pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid))
    except pynvml.NVMLError:
        return None


def open_cards() -> list[NvmlCard]:
    """Every card that the library tells of; none where it cannot be reached."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError:
        return []
    cards = []
    for index in range(count):
        try:
            cards.append(NvmlCard(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
        except pynvml.NVMLError:  # fallen off the bus, or not ours to see
            continue
    return cards


class NvmlCard(Card):
    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._foreign: tuple[str, ...] = ()
        self._looked_at = -math.inf

    def _get(self, function: str, *arguments: Any, of: Callable[[Any], Any] = lambda value: value) -> Any:
        """One figure, or None where this card, driver or permission does not give it."""
        call = getattr(self._nvml, function, None)
        if call is None:
            return None
        try:
            return of(call(self._handle, *arguments))
        except (self._nvml.NVMLError, TypeError, ValueError, AttributeError):  # or a figure that is "N/A"
            return None

    def facts(self) -> dict[str, Any]:
        nvml = self._nvml
        return {
            "uuid": self._get("nvmlDeviceGetUUID", of=_text),
            "driver": self._driver(),
            "power_limit_w": self._get("nvmlDeviceGetEnforcedPowerLimit", of=lambda milliwatts: milliwatts / 1e3),
            "max_clock_hz": self._get("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM, of=lambda mhz: mhz * 1e6),
            "ecc": self._get("nvmlDeviceGetEccMode", of=lambda modes: bool(modes[0])),
            "mig": self._get("nvmlDeviceGetMigMode", of=lambda modes: bool(modes[0])),
        }

    def _driver(self) -> str | None:
        try:
            return _text(self._nvml.nvmlSystemGetDriverVersion())
        except self._nvml.NVMLError:
            return None

    def reading(self) -> dict[str, Any]:
        nvml = self._nvml
        return {
            "utilisation": self._get("nvmlDeviceGetUtilizationRates", of=lambda rates: rates.gpu / 100),
            "memory_used_bytes": self._get("nvmlDeviceGetMemoryInfo", of=lambda info: int(info.used)),
            "power_w": self._get("nvmlDeviceGetPowerUsage", of=lambda milliwatts: milliwatts / 1e3),
            "temperature_c": self._get("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU, of=float),
            "clock_hz": self._get("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM, of=lambda mhz: mhz * 1e6),
            "memory_clock_hz": self._get("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM, of=lambda mhz: mhz * 1e6),
            "throttle": self.throttle_reasons() or (),
        }

    def energy_j(self) -> float | None:
        energy: float | None = self._get(
            "nvmlDeviceGetTotalEnergyConsumption", of=lambda millijoules: millijoules / 1e3
        )
        return energy

    def own_memory_bytes(self) -> int | None:
        for process in self._processes():
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
        return None

    def foreign_processes(self) -> tuple[str, ...]:
        """Processes on the card outside our family: sibling sessions and the desk are not foreign.

        In a container the driver may speak of the host's process numbers; then nothing can be told apart.
        """
        now = time.monotonic()
        if now - self._looked_at > NEIGHBOUR_PERIOD_S:
            running = {process.pid for process in self._processes()}
            can_tell = os.getpid() in running
            self._foreign = tuple(describe_process(pid) for pid in sorted(running - _family())) if can_tell else ()
            self._looked_at = now
        return self._foreign

    def _processes(self) -> list[Any]:
        return self._get("nvmlDeviceGetComputeRunningProcesses") or []

    def throttle_reasons(self) -> tuple[str, ...] | None:
        bits = self._get("nvmlDeviceGetCurrentClocksEventReasons", of=int)
        if bits is None:
            bits = self._get("nvmlDeviceGetCurrentClocksThrottleReasons", of=int)
        return None if bits is None else tuple(word for bit, word in THROTTLE_REASONS.items() if bits & bit)

    # What only a view of the whole machine needs

    def name(self) -> str | None:
        name: str | None = self._get("nvmlDeviceGetName", of=_text)
        return name

    def memory_bytes(self) -> int | None:
        total: int | None = self._get("nvmlDeviceGetMemoryInfo", of=lambda info: int(info.total))
        return total

    def traffic(self) -> dict[str, float | None]:
        nvml = self._nvml

        def pcie(counter: int) -> float | None:
            rate: float | None = self._get("nvmlDeviceGetPcieThroughput", counter, of=lambda kilobytes: kilobytes * 1e3)
            return rate

        links = [
            self._nvlink(name)
            for name in ("NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX", "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX")
        ]
        return {
            "pcie_received": pcie(nvml.NVML_PCIE_UTIL_RX_BYTES),
            "pcie_sent": pcie(nvml.NVML_PCIE_UTIL_TX_BYTES),
            "nvlink_received_total": links[0],
            "nvlink_sent_total": links[1],
        }

    def _nvlink(self, field: str) -> float | None:
        number = getattr(self._nvml, field, None)
        if number is None:
            return None

        def kilobytes(values: Any) -> float | None:
            field = values[0]
            return field.value.ullVal * 1024.0 if field.nvmlReturn == 0 else None

        total: float | None = self._get("nvmlDeviceGetFieldValues", [number], of=kilobytes)
        return total

    def processes(self) -> dict[int, int | None] | None:
        running = self._get("nvmlDeviceGetComputeRunningProcesses", of=list)
        return None if running is None else {one.pid: one.usedGpuMemory for one in running}


def _family() -> set[int]:
    me = psutil.Process()
    parent = me.parent()
    # Sibling workers share our parent, the supervisor.
    siblings = parent.children(recursive=True) if parent is not None and parent.pid > 1 else []
    return {process.pid for process in (me, *me.parents(), *me.children(recursive=True), *siblings)}


def describe_process(pid: int) -> str:
    try:
        return f"{pid} {psutil.Process(pid).name()}"
    except psutil.Error:
        return str(pid)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
