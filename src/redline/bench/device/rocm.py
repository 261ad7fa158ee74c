"""AMD GPUs. Torch's ROCm builds answer to `torch.cuda`, so only what differs stands here.

Written from documentation and recorded outputs: this file has not met the hardware yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from redline.bench.device.cuda import CudaDevice
from redline.record import DeviceInfo, TelemetrySample


class RocmDevice(CudaDevice):
    kind = "rocm"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._amd = open_amd_card(self._pci_address())

    def _open_card(self) -> None:
        return None  # NVML is NVIDIA's

    def _pci_address(self) -> str | None:
        """How amdsmi knows the card: its index is not HIP's."""
        properties = self._properties()
        bus = getattr(properties, "pci_bus_id", None)
        if bus is None:
            return None
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def info(self) -> DeviceInfo:
        properties = self._properties()
        facts = self._amd.facts() if self._amd else {}
        return DeviceInfo(
            kind=self.kind,
            index=self.torch_device.index,
            name=properties.name,
            memory_bytes=properties.total_memory,
            capability=getattr(properties, "gcnArchName", None),
            multiprocessors=properties.multi_processor_count,
            **facts,
        )

    def look(self, at_s: float, *, neighbours: bool = False) -> TelemetrySample:
        return TelemetrySample(at_s=at_s, **(self._amd.reading() if self._amd else {}))

    def cache_bytes(self) -> int | None:
        return None  # HIP tells the L2, behind which Instinct cards have a larger cache that it does not tell

    def energy_j(self) -> float | None:
        return self._amd.energy_j() if self._amd else None

    def refusal_of(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.float8_e4m3fn:
            return "AMD GPUs before gfx950 have other fp8 formats, and this one has not been tried on any"
        return super().refusal_of(dtype)

    def tf32_refusal(self) -> str | None:
        if "gfx94" in (getattr(self._properties(), "gcnArchName", "") or ""):
            return None
        return "among AMD GPUs only the MI300 family (gfx94x) has a TF32-like format"

    def synchronises(self, step: Callable[[], object]) -> bool | None:
        return None  # torch's synchronisation warnings are not raised on ROCm

    def segments_refusal(self) -> str | None:
        return "expandable segments have not been tested on AMD GPUs"

    def start_profiler(self) -> None:
        """HIP has the call and says that it is not supported; ROCm's profilers look at the whole process."""
        return

    def stop_profiler(self) -> None:
        return

    def versions(self) -> dict[str, str]:
        found = {"hip": torch.version.hip or ""}
        if torch.backends.cudnn.is_available():
            found["miopen"] = str(torch.backends.cudnn.version())
        return found


def open_amd_card(pci_address: str | None) -> AmdCard | None:
    try:
        import amdsmi
    except ImportError:
        return None
    try:
        amdsmi.amdsmi_init()
        for handle in amdsmi.amdsmi_get_processor_handles():
            if pci_address is None or amdsmi.amdsmi_get_gpu_device_bdf(handle).lower() == pci_address:
                return AmdCard(amdsmi, handle)
    except amdsmi.AmdSmiException:
        return None
    return None


class AmdCard:
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
        found = float(value)
    except (TypeError, ValueError):
        return None
    return None if found in _ALL_ONES else found
