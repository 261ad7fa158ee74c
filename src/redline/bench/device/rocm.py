"""This is an AMD GPU as a device. Torch's ROCm builds answer to `torch.cuda`, so only what differs stands here.

It was written from documentation and recorded outputs, and has not met the hardware yet.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from redline.bench.device.cuda import CudaDevice
from redline.system.telemetry.amd import open_amd_cards
from redline.system.telemetry.card import Card


class RocmDevice(CudaDevice):
    kind = "rocm"

    def _open_card(self) -> Card:
        return next(iter(open_amd_cards(self._pci_address())), Card())

    def shorten_launches(self) -> None:
        return None  # nothing of the kind is known of AMD

    def _pci_address(self) -> str | None:
        """Returns the address by which amdsmi knows the card, because its index there is not HIP's. Returns None if torch does not tell."""
        properties = self._properties()
        bus = getattr(properties, "pci_bus_id", None)
        if bus is None:
            return None
        domain, device = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
        return f"{domain:04x}:{bus:02x}:{device:02x}.0"

    def _identity(self, properties: Any) -> dict[str, str | None]:
        return {"capability": getattr(properties, "gcnArchName", None)}

    def cache_bytes(self) -> int | None:
        return None  # HIP tells the L2, behind which Instinct cards have a larger cache that it does not tell

    def early_launch_refusal(self) -> str | None:
        return "AMD GPUs have no launches that begin before the last kernel has ended"

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

    def profiled(self) -> AbstractContextManager[Any]:
        """Returns a context that does nothing. HIP has the call but does not support it, and ROCm's profilers look at the whole process."""
        return nullcontext()

    def versions(self) -> dict[str, str]:
        found = {"hip": torch.version.hip or ""}
        if torch.backends.cudnn.is_available():
            found["miopen"] = str(torch.backends.cudnn.version())
        return found
