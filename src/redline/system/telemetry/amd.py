"""This module asks AMD's management library what the driver says about one card. Every figure may be missing.

Written from documentation and recorded outputs: it has not been tested on AMD GPUs.
"""

from __future__ import annotations

import contextlib
from typing import Any

from redline.system.telemetry.card import Card

UNUSABLE = (ImportError, OSError, AttributeError, KeyError)
"""Importing amdsmi raises one of these where it is missing, or where the library below it is missing or does not fit."""


def open_amd_cards(pci_address: str | None = None) -> list[AmdCard]:
    """Returns every AMD card that amdsmi tells of, or the one at an address."""
    try:
        import amdsmi
    except UNUSABLE:
        return []
    cards: list[AmdCard] = []
    with contextlib.suppress(amdsmi.AmdSmiException):
        amdsmi.amdsmi_init()
        for handle in amdsmi.amdsmi_get_processor_handles():
            if pci_address is None or amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() == pci_address:
                cards.append(AmdCard(amdsmi, handle))
    return cards


class AmdCard(Card):
    """This is amdsmi's view of one card. Figures come as numbers, as "N/A", or not at all (odd dies of an MI250X)."""

    def __init__(self, smi: Any, handle: Any) -> None:
        self._smi = smi
        self._handle = handle

    def _get(self, what: str) -> Any:
        """Returns what the library says of something, or an empty table where it says nothing."""
        with contextlib.suppress(self._smi.AmdSmiException, AttributeError):
            return getattr(self._smi, f"amdsmi_get_{what}")(self._handle)
        return {}

    def facts(self) -> dict[str, Any]:
        limit = number(self._get("power_cap_info").get("power_cap"))
        return {
            "uuid": words(self._get("gpu_device_uuid")),
            "driver": words(self._get("gpu_driver_info").get("driver_version")),
            "power_limit_w": limit / 1e6 if limit else None,  # microwatts
        }

    def reading(self) -> dict[str, Any]:
        power, metrics = self._get("power_info"), self._get("gpu_metrics_info")
        busy = number(self._get("gpu_activity").get("gfx_activity"))
        used = number(self._get("gpu_vram_usage").get("vram_used"))
        clock, memory_clock = number(metrics.get("current_gfxclk")), number(metrics.get("current_uclk"))
        watts = number(power.get("current_socket_power"))
        return {
            "utilisation": busy / 100 if busy is not None else None,
            "memory_used_bytes": int(used * 2**20) if used is not None else None,  # told in MiB
            "power_w": watts if watts is not None else number(power.get("average_socket_power")),
            "temperature_c": number(metrics.get("temperature_hotspot")),
            "clock_hz": clock * 1e6 if clock is not None else None,
            "memory_clock_hz": memory_clock * 1e6 if memory_clock is not None else None,
        }

    def energy_j(self) -> float | None:
        energy = self._get("energy_count")
        count = number(energy.get("energy_accumulator", energy.get("power")))
        resolution = number(energy.get("counter_resolution"))
        return count * resolution / 1e6 if count is not None and resolution is not None else None  # microjoules


def words(value: Any) -> str | None:
    return None if value in (None, "", "N/A", {}) else str(value)


_ALL_ONES = (float(0xFFFF), float(0xFFFFFFFF), float(0xFFFFFFFFFFFFFFFF))
"""The library gives one of these, of 16, 32 or 64 bits, where a sensor is missing."""


def number(value: Any) -> float | None:
    """Returns what amdsmi calls a number: sometimes it is text, sometimes "N/A", sometimes the all-ones of a missing sensor."""
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        return None
    return None if parsed in _ALL_ONES else parsed
