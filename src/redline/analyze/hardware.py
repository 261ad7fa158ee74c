"""What a trace ran on: told by its header, by the record beside it, or by the names of its kernels."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import islice
from typing import Literal

from redline.record import RunRecord
from redline.spec import Frozen
from redline.trace.classes import PRODUCT_CLASSES, class_of
from redline.trace.columns import DeviceInfo, Trace
from redline.trace.intervals import distinct

Maker = Literal["nvidia", "amd", "other"]

_ARCHITECTURE = re.compile(r"(?:^|\W|_)(?:sm|cutlass|Policy)_?(\d{2,3})(?=_|>|,|\W|$)|^(volta|turing|ampere|hopper)_")
_FAMILIES = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "hopper": (9, 0)}
_MOST_NAMES = 1000
_AMD_KERNELS = ("Cijk_", "igemm_", "miopen", "gfx9")


class Hardware(Frozen):
    name: str = ""
    """As the driver calls it; empty where the trace does not say."""
    maker: Maker | None = None
    capability: tuple[int, int] | None = None
    """NVIDIA's compute capability."""
    at_least: bool = False
    """The capability is only the highest that a kernel was built for: the GPU may be newer."""
    devices: int = 0
    """Devices with work in the traces."""

    @property
    def has_tf32(self) -> bool:
        """Matrix units for fp32 with rounded inputs. Unknown hardware is not promised any."""
        return self.maker == "nvidia" and self.capability is not None and self.capability >= (8, 0)

    @property
    def has_fp16(self) -> bool:
        if self.maker == "amd":
            return True
        return self.maker == "nvidia" and (self.capability is None or self.capability >= (7, 0))

    @property
    def has_bf16(self) -> bool:
        return self.maker == "amd" or self.has_tf32


def hardware_of(traces: Sequence[Trace], record: RunRecord | None = None) -> Hardware:
    used = {(trace.source, int(device)) for trace in traces for device in distinct(trace.work.device)}
    listed = [info for trace in traces if (info := _own(trace)) is not None]
    names = Counter(info.name for info in listed if info.name)
    name = names.most_common(1)[0][0] if names else _recorded_name(record)
    capability = next((info.capability for info in listed if info.capability), None)
    kernels = [trace.names[number] for trace in traces for number in distinct(trace.work.name).tolist()]
    calls = {trace.names[number] for trace in traces for number in distinct(trace.calls.name).tolist()}
    maker = _maker(calls, name, kernels)
    return _hardware(name, maker, capability, kernels, len(used))


def hardware_by_kernels(kernels: Sequence[str], tool: str, record: RunRecord | None = None) -> Hardware:
    """From a table of kernels that a vendor's tool made."""
    maker: Maker = "amd" if tool.startswith("roc") else "nvidia"
    return _hardware(_recorded_name(record), maker, None, kernels, 1)


def _hardware(
    name: str, maker: Maker | None, capability: tuple[int, int] | None, kernels: Sequence[str], devices: int
) -> Hardware:
    if maker != "nvidia":
        return Hardware(name=name, maker=maker, devices=devices)
    told = capability or _built_for(kernels)
    at_least = capability is None and told is not None
    return Hardware(name=name, maker=maker, capability=told, at_least=at_least, devices=devices)


def _recorded_name(record: RunRecord | None) -> str:
    device = record.prepared.environment.device if record is not None and record.prepared is not None else None
    return device.name if device is not None and device.kind != "cpu" else ""


def _own(trace: Trace) -> DeviceInfo | None:
    """The header's entry for the device that worked; a process that sees one device may number it otherwise."""
    devices = {int(device) for device in distinct(trace.work.device)}
    named = [info for info in trace.devices if info.index in devices]
    return next(iter(named or trace.devices), None)


def _maker(calls: Collection[str], name: str, kernels: Sequence[str]) -> Maker | None:
    if any(call.startswith("hip") for call in calls) or any(word in name for word in ("AMD", "Instinct", "Radeon")):
        return "amd"
    if any(call.startswith(("cuda", "cu")) for call in calls) or any(
        word in name for word in ("NVIDIA", "Tesla", "GeForce")
    ):
        return "nvidia"
    if any(kernel.startswith(_AMD_KERNELS) for kernel in kernels):
        return "amd"
    return "nvidia" if _built_for(kernels) is not None else "other" if kernels else None


def _built_for(kernels: Sequence[str]) -> tuple[int, int] | None:
    """The newest architecture that a kernel was built for: the GPU is at least that."""
    found = []
    products = list(islice((kernel for kernel in kernels if class_of(kernel) in PRODUCT_CLASSES), _MOST_NAMES))
    for kernel in products or kernels[:_MOST_NAMES]:
        for digits, family in _ARCHITECTURE.findall(kernel[:200]):
            if family:
                found.append(_FAMILIES[family])
            elif 50 <= int(digits) <= 130:
                found.append((int(digits) // 10, int(digits) % 10))
    return max(found, default=None)
