"""AMD's management library: what the driver says about one card. Every figure may be missing.

Written from documentation and recorded outputs: it has not been tested on AMD GPUs.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

from redline.system.telemetry.card import Card

UNUSABLE = (ImportError, OSError, AttributeError, KeyError)
"""What importing amdsmi raises where it is missing, or the library below it is, or does not fit."""


def open_amd_card(pci_address: str | None) -> AmdCard | None:
    try:
        import amdsmi
    except UNUSABLE:
        return None
    try:
        amdsmi.amdsmi_init()
        for handle in amdsmi.amdsmi_get_processor_handles():
            if pci_address is None or amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() == pci_address:
                return AmdCard(amdsmi, handle)
    except amdsmi.AmdSmiException:
        return None
    return None


def open_amd_cards() -> list[AmdCard | RocmSmiCard]:
    """Every AMD card: by amdsmi, else by the program rocm-smi."""
    try:
        import amdsmi
    except UNUSABLE:
        return [RocmSmiCard(name) for name in rocm_smi()]
    try:
        amdsmi.amdsmi_init()
        return [AmdCard(amdsmi, handle) for handle in amdsmi.amdsmi_get_processor_handles()]
    except amdsmi.AmdSmiException:
        return []


ROCM_SMI = ("rocm-smi", "--showuse", "--showpower", "--showtemp", "--showclocks", "--showmeminfo", "vram", "--json")
ROCM_SMI_S = 10.0


def rocm_smi() -> dict[str, dict[str, Any]]:
    """What rocm-smi says of each card; nothing where it is missing, fails or prints something else."""
    if shutil.which(ROCM_SMI[0]) is None:
        return {}
    try:
        printed = subprocess.run(ROCM_SMI, capture_output=True, timeout=ROCM_SMI_S).stdout
        cards_by_name = json.loads(printed[max(printed.find(b"{"), 0) :])  # warnings about sleeping cards come first
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    cards = cards_by_name.items() if isinstance(cards_by_name, dict) else ()
    return {name: card for name, card in cards if name.startswith("card") and isinstance(card, dict)}


class RocmSmiCard(Card):
    """A card as the program rocm-smi prints it: every look starts it once. The words vary between its versions."""

    def __init__(self, name: str) -> None:
        self._name = name

    def name(self) -> str:
        return f"AMD {self._name}"

    def reading(self) -> dict[str, Any]:
        lines = rocm_smi().get(self._name, {})

        def figure(*words: str) -> float | None:
            """The figure of the first line that has all these words."""
            for line, value in lines.items():
                if all(word in line.lower() for word in words):
                    return number(str(value).strip("()").lower().removesuffix("mhz"))
            return None

        busy, used = figure("gpu use"), figure("vram", "used")
        clock = figure("sclk clock speed")
        return {
            "utilisation": busy / 100 if busy is not None else None,
            "memory_used_bytes": int(used) if used is not None else None,
            "power_w": figure("package power"),
            "temperature_c": figure("temperature", "junction") or figure("temperature", "edge"),
            "clock_hz": clock * 1e6 if clock is not None else None,
        }

    def memory_bytes(self) -> int | None:
        lines = rocm_smi().get(self._name, {})
        total = next((number(value) for line, value in lines.items() if "vram total memory" in line.lower()), None)
        return int(total) if total is not None else None


class AmdCard(Card):
    """amdsmi's view of one card. Figures come as numbers, as "N/A", or not at all (odd dies of an MI250X)."""

    def __init__(self, smi: Any, handle: Any) -> None:
        self._smi = smi
        self._handle = handle

    def _get(self, function: str, *arguments: Any) -> Any:
        call = getattr(self._smi, function, None)
        if call is None:
            return None
        try:
            return call(self._handle, *arguments)
        except self._smi.AmdSmiException:
            return None

    def facts(self) -> dict[str, Any]:
        driver = self._get("amdsmi_get_gpu_driver_info") or {}
        cap = self._get("amdsmi_get_power_cap_info") or {}
        limit = number(cap.get("power_cap"))
        return {
            "uuid": words(self._get("amdsmi_get_gpu_device_uuid")),
            "driver": words(driver.get("driver_version")),
            "power_limit_w": limit / 1e6 if limit else None,  # microwatts
        }

    def reading(self) -> dict[str, Any]:
        activity = self._get("amdsmi_get_gpu_activity") or {}
        power = self._get("amdsmi_get_power_info") or {}
        memory = self._get("amdsmi_get_gpu_vram_usage") or {}
        metrics = self._get("amdsmi_get_gpu_metrics_info") or {}
        busy, used = number(activity.get("gfx_activity")), number(memory.get("vram_used"))
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
        energy = self._get("amdsmi_get_energy_count") or {}
        count = number(energy.get("energy_accumulator", energy.get("power")))
        resolution = number(energy.get("counter_resolution"))
        return count * resolution / 1e6 if count is not None and resolution is not None else None  # microjoules


def words(value: Any) -> str | None:
    return None if value in (None, "", "N/A") else str(value)


_ALL_ONES = (float(0xFFFF), float(0xFFFFFFFF), float(0xFFFFFFFFFFFFFFFF))


def number(value: Any) -> float | None:
    """What amdsmi calls a number: sometimes text, sometimes "N/A", sometimes the all-ones of a missing sensor."""
    try:
        parsed = float(value)
    except (TypeError, ValueError):
        return None
    return None if parsed in _ALL_ONES else parsed
