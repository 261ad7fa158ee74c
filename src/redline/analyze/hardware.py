"""This module finds out what a trace ran on, from its header, from the record beside it or from its kernels, and holds its operators
against that."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Literal

import msgspec
import numpy as np

from redline.analyze.attainable import LimitedBy
from redline.analyze.roofline import Datasheet
from redline.model.fields import Frozen
from redline.model.record import RunRecord
from redline.model.work import Ceilings
from redline.trace.columns import DeviceInfo, Trace
from redline.trace.intervals import distinct, summed
from redline.trace.links import Links
from redline.trace.names import PRODUCT_CLASSES, KernelClass, class_of, label_of
from redline.trace.shapes import OperatorWork, work_of
from redline.trace.tables import self_times

Maker = Literal["nvidia", "amd", "other"]

_ARCHITECTURE = re.compile(r"(?:^|\W|_)(?:sm|cutlass|Policy)_?(\d{2,3})(?=_|>|,|\W|$)|^(volta|turing|ampere|hopper)_")
_FAMILIES = {"volta": (7, 0), "turing": (7, 5), "ampere": (8, 0), "hopper": (9, 0)}
"""These are the compute capabilities of the families that kernels of NVIDIA's libraries name."""
_MOST_NAMES = 1000
"""At most so many names of kernels are looked at, because more would hardly tell anything else."""
_AMD_KERNELS = ("Cijk_", "igemm_", "miopen", "gfx9")


class Hardware(Frozen):
    name: str = ""
    """This is what the driver calls it. It is empty where the trace does not say."""
    maker: Maker | None = None
    capability: tuple[int, int] | None = None
    """This is NVIDIA's compute capability."""
    at_least: bool = False
    """The capability is only the highest that a kernel was built for: the GPU may be newer."""

    @property
    def has_tf32(self) -> bool:
        """Returns whether it has matrix units for fp32 with rounded inputs. Unknown hardware is not promised any."""
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
    listed = [info for trace in traces if (info := _own(trace)) is not None]
    names = Counter(info.name for info in listed if info.name)
    name = names.most_common(1)[0][0] if names else _recorded_name(record)
    capability = next((info.capability for info in listed if info.capability), None)
    kernels = [trace.names[number] for trace in traces for number in distinct(trace.work.name).tolist()]
    calls = {trace.names[number] for trace in traces for number in distinct(trace.calls.name).tolist()}
    maker = _maker(calls, name, kernels)
    return _hardware(name, maker, capability, kernels)


def hardware_by_kernels(kernels: Sequence[str], tool: str, record: RunRecord | None = None) -> Hardware:
    """Returns what the kernels of a vendor's table tell of the GPU they ran on."""
    maker: Maker = "amd" if tool.startswith("roc") else "nvidia"
    return _hardware(_recorded_name(record), maker, None, kernels)


def _hardware(name: str, maker: Maker | None, capability: tuple[int, int] | None, kernels: Sequence[str]) -> Hardware:
    if maker != "nvidia":
        return Hardware(name=name, maker=maker)
    told = capability or _built_for(kernels)
    at_least = capability is None and told is not None
    return Hardware(name=name, maker=maker, capability=told, at_least=at_least)


def _recorded_name(record: RunRecord | None) -> str:
    device = record.prepared.environment.device if record is not None and record.prepared is not None else None
    return device.name if device is not None and device.kind != "cpu" else ""


def _own(trace: Trace) -> DeviceInfo | None:
    """Returns the header's entry for the device that worked; a process that sees one device may number it otherwise."""
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
    """Returns the newest architecture that a kernel was built for, because the GPU is at least that."""
    found = []
    products = list(islice((kernel for kernel in kernels if class_of(kernel) in PRODUCT_CLASSES), _MOST_NAMES))
    for kernel in products or kernels[:_MOST_NAMES]:
        for digits, family in _ARCHITECTURE.findall(kernel[:200]):
            if family:
                found.append(_FAMILIES[family])
            elif 50 <= int(digits) <= 130:
                found.append((int(digits) // 10, int(digits) % 10))
    return max(found, default=None)


IN_CACHE = 1.05
"""This much faster than memory allows: its data was in a cache."""


class OperatorLimit(Frozen):
    """This is the row for all calls of one operator on inputs of one shape."""

    name: str
    kind: KernelClass
    dims: str
    number_format: str
    calls: int
    device_s: float
    """The device spent this time in kernels that the operator launched itself."""
    flops: int
    """These are the products of all calls."""
    bytes: int
    flops_per_s: float
    bytes_per_s: float
    intensity: float
    """This is in FLOPs per byte."""
    limited_by: LimitedBy | None
    """It is None where the device's limits are not known."""
    efficiency: float | None
    """This is the least time that the device allows, over the time it took."""
    in_cache: bool = False
    """True if it was faster than memory allows, which a cache explains; there is no efficiency then."""
    limit_of: str = "the device"
    """Says whose limits these are."""

    @property
    def label(self) -> str:
        return label_of(f"{self.name} {_NO_SHAPE.sub(']', self.dims)}")


_NO_SHAPE = re.compile(r"(,\[\])+\]$")
"""Inputs behind the last tensor."""
_TOLD_BY_OTHERS = frozenset(("elementwise", "copy", "communication", "other"))


def slowest_operator(limits: Sequence[OperatorLimit]) -> OperatorLimit | None:
    """Returns the one with most time beyond what the device needs for it, of those to which more than half of their time is lost."""
    slow = [
        row for row in limits if row.efficiency is not None and row.efficiency < 0.5 and row.kind not in _TOLD_BY_OTHERS
    ]
    return max(slow, key=lambda row: row.device_s * (1 - (row.efficiency or 0.0)), default=None)


def operator_limits(links: Sequence[Links], hardware: Hardware, ceilings: Ceilings | None) -> list[OperatorLimit]:
    """Returns the operators, the longest first, held against measured ceilings where there are some, else the datasheet of the GPU in the
    header.

    On a host whose ceilings nobody measured, an operator is held against the fastest of at least its size in the same trace.
    """
    sums: defaultdict[tuple[str, str, OperatorWork], list[int]] = defaultdict(lambda: [0, 0])
    on_device = any(len(one.trace.work) for one in links)
    for one in links:
        trace, operators = one.trace, one.trace.operators
        if not len(trace.shapes) or (on_device and not len(trace.work)):
            continue
        taken = self_times(one)[1 if on_device else 0]
        if not on_device:  # an operator that only calls others is no measure of anything
            taken = np.where(2 * taken >= operators.duration, taken, 0)
        rows = np.flatnonzero((taken > 0) & (operators.shape >= 0))
        group = operators.name[rows].astype(np.int64) * len(trace.shapes) + operators.shape[rows]
        groups, which = np.unique(group, return_inverse=True)
        total, calls = summed(which, taken[rows], len(groups)), np.bincount(which, minlength=len(groups))
        if not on_device:
            # Calls on a processor that other programs take away now and then say nothing of the operator: the usual one does.
            order = np.lexsort((taken[rows], which))
            total = taken[rows][order[np.cumsum(calls) - (calls + 1) // 2]] * calls
        for number, ns, count in zip(groups.tolist(), total.tolist(), calls.tolist(), strict=True):
            name, shape = divmod(number, len(trace.shapes))
            work = work_of(trace.names[name], trace.shapes[shape])
            if work is not None and (on_device or work.bytes):
                key = (trace.names[name], trace.shapes[shape].dims, work)
                sums[key][0] += ns
                sums[key][1] += count
    peaks = _peaks(hardware, ceilings)
    found = []
    for (name, dims, work), (ns, count) in sums.items():
        own = peaks if on_device or ceilings is not None else _fastest(sums, work)
        row = _limit(name, dims, work, ns, count, own)
        told = "the device" if own is peaks else "the fastest operator of its size in this trace"
        found.append(msgspec.structs.replace(row, limit_of=told))
    return sorted(found, key=lambda row: -row.device_s)


def _fastest(
    sums: Mapping[tuple[str, str, OperatorWork], Sequence[int]], own: OperatorWork
) -> tuple[dict[str, float], float]:
    """Returns the highest rates of operators that have at least as much to do in one call."""
    flops: dict[str, float] = {}
    speed = 0.0
    for (_, _, work), (ns, calls) in sums.items():
        if work.bytes >= own.bytes:
            speed = max(speed, work.bytes * calls * 1e9 / ns)
        if work.flops >= own.flops > 0 and work.number_format == own.number_format:
            flops[own.number_format] = max(flops.get(own.number_format, 0.0), work.flops * calls * 1e9 / ns)
    return flops, speed


def _peaks(hardware: Hardware, ceilings: Ceilings | None) -> tuple[dict[str, float], float] | None:
    if ceilings is not None:
        return ceilings.flops_per_s, ceilings.copy_bytes_per_s
    sheet = Datasheet.of(hardware.name) if hardware.name else None
    return (sheet.flops_per_s, sheet.bytes_per_s) if sheet is not None else None


def _limit(
    name: str, dims: str, work: OperatorWork, ns: int, calls: int, peaks: tuple[dict[str, float], float] | None
) -> OperatorLimit:
    device_s = ns / 1e9
    flops, moved = work.flops * calls, work.bytes * calls
    compute_s = memory_s = 0.0
    limited_by: LimitedBy | None = None
    if peaks is not None:
        peak = peaks[0].get(work.number_format)
        memory_s = moved / peaks[1]
        compute_s = flops / peak if peak and flops else 0.0
        # Products in a format whose peak is not known may be limited by either.
        limited_by = None if flops and not peak else "compute" if compute_s > memory_s else "memory"
    efficiency = max(compute_s, memory_s) / device_s if limited_by is not None and device_s else None
    in_cache = efficiency is not None and limited_by == "memory" and efficiency > IN_CACHE
    return OperatorLimit(
        name=name,
        kind=work.kind,
        dims=dims,
        number_format=work.number_format,
        calls=calls,
        device_s=device_s,
        flops=flops,
        bytes=moved,
        flops_per_s=flops / device_s if device_s else 0.0,
        bytes_per_s=moved / device_s if device_s else 0.0,
        intensity=flops / moved if moved else 0.0,
        limited_by=limited_by,
        efficiency=None if in_cache else efficiency,
        in_cache=in_cache,
    )
