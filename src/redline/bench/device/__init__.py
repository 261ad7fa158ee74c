"""Models run on devices, and each kind of device has one file. `torch.cuda` is named nowhere else on the bench."""

from __future__ import annotations

import torch

from redline.bench.device import cuda
from redline.bench.device.base import Device
from redline.bench.device.cpu import CpuDevice
from redline.bench.device.rocm import RocmDevice
from redline.model.errors import UsageError
from redline.model.names import refuse_impossible_device

__all__ = ["Device", "open_device", "resolve_device"]


def resolve_device(text: str) -> str:
    """Returns the exact name of a device, such as `cpu`, `cuda:0` or `rocm:1`, for `auto` or a bare kind.

    Raises a `UsageError` that says why a device is not available.
    """
    refuse_impossible_device(text)
    kind, _, index_text = text.partition(":")
    if kind == "auto":
        accelerator = cuda.built_for()
        return f"{accelerator}:0" if accelerator and _accelerator_problem(accelerator) is None else "cpu"
    if kind == "cpu":
        return "cpu"
    problem = _accelerator_problem(kind)
    if problem:
        raise UsageError(f"device {text} is not available: {problem}; run 'redline doctor', or use --device cpu")
    return f"{kind}:{_index(text, index_text)}"


def open_device(text: str, threads: int | None = None) -> Device:
    """Opens the device of that name. If `threads` is given, torch uses that many threads inside operators."""
    if threads is not None:
        torch.set_num_threads(threads)
    kind, _, index_text = resolve_device(text).partition(":")
    if kind == "cpu":
        return CpuDevice()
    if kind == "rocm":
        return RocmDevice(int(index_text))
    return cuda.CudaDevice(int(index_text))


def _index(text: str, index_text: str) -> int:
    if not index_text:
        return 0
    count = cuda.device_count()
    if int(index_text) >= count:
        raise UsageError(f"device {text} does not exist: {count} visible, numbered from 0")
    return int(index_text)


def _accelerator_problem(kind: str) -> str | None:
    """Returns why no accelerator of this kind can be used, or None."""
    built = cuda.built_for()
    if built != kind:
        return f"this torch was built for {built or 'the CPU only'}"
    return cuda.unavailable_because()
