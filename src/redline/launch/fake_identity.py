"""What a fake bench says of itself: device, environment and workload."""

from __future__ import annotations

import zlib

import msgspec

from redline import record
from redline.launch.landscape import Landscape
from redline.spec import RunSpec


def device_of(spec: RunSpec, truth: Landscape) -> str:
    if spec.device != "auto":
        return spec.device
    return "cpu" if truth.device_kind == "cpu" else f"{truth.device_kind}:0"


def kind_of(device: str) -> str:
    return device.partition(":")[0]


def device_info(device: str, truth: Landscape) -> record.DeviceInfo:
    kind, _, index = device.partition(":")
    if kind == "cpu":
        return record.DeviceInfo(kind=kind, name="fake cpu", memory_bytes=truth.memory_limit_bytes)
    return record.DeviceInfo(
        kind=kind,
        index=int(index or 0),
        name=f"fake {kind} device",
        driver="fake",
        memory_bytes=truth.memory_limit_bytes,
    )


def environment_of(device: str, truth: Landscape) -> record.Environment:
    return record.Environment(device=device_info(device, truth), hostname="fake", versions={"torch": "fake"})


def workload_of(spec: RunSpec, truth: Landscape) -> record.WorkloadInfo:
    model = spec.workload.model
    return record.WorkloadInfo(
        source="fake",
        class_name=model,
        parameters=0,
        items_per_step=spec.workload.batch or truth.default_batch,
        item="img",
        model_hash=f"{zlib.crc32(model.encode()):08x}",
        input_hash=f"{zlib.crc32(msgspec.json.encode(spec.workload)):08x}",
    )
