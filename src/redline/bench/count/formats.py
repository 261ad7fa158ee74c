"""Which number format an operator computes in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.bench.device.base import Device
from redline.work import OperatorKind

_FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
    torch.int8: "int8",
    torch.uint8: "int8",
    **{getattr(torch, name): "fp8" for name in (
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    ) if hasattr(torch, name)},
}  # fmt: skip


@dataclass(frozen=True)
class Tf32:
    """Where fp32 products may use the shorter format."""

    matmul: bool = False
    convolution: bool = False

    @classmethod
    def of(cls, device: Device) -> Tf32:
        if not device.is_accelerator:
            return cls()
        return cls(matmul=torch.backends.cuda.matmul.allow_tf32, convolution=torch.backends.cudnn.allow_tf32)


NO_TF32 = Tf32()


def number_format(tensors: Iterable[Tensor], kind: OperatorKind | None, tf32: Tf32) -> str:
    """That of the first tensor that holds numbers to compute with."""
    found = next((_FORMATS[tensor.dtype] for tensor in tensors if tensor.dtype in _FORMATS), "int")
    if found == "fp32" and kind in ("matmul", "attention"):
        return "tf32" if tf32.matmul else found
    if found == "fp32" and kind == "convolution":
        return "tf32" if tf32.convolution else found
    return found
