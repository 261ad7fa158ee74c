"""Numbers as another format would hold them, still stored as fp32: what the floor of the numerics is made of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils import _pytree as pytree

FP32_PERTURBATION = 2.0**-20
"""fp32 itself: another sound algorithm (Winograd, another order of sums) differs by some 16 units in the last place."""

_TF32_DROPPED_BITS = 13


def rounded_tensor(tensor: torch.Tensor, number_format: str) -> torch.Tensor:
    """`tensor` rounded to `number_format` and back; tensors that are not floating stay as they are."""
    if not tensor.is_floating_point():
        return tensor
    if number_format == "fp32":
        noise = torch.empty_like(tensor).uniform_(-FP32_PERTURBATION, FP32_PERTURBATION)
        return tensor * (1 + noise)
    if number_format == "tf32":
        half = 1 << (_TF32_DROPPED_BITS - 1)
        bits = (tensor.float().view(torch.int32) + half) & ~((1 << _TF32_DROPPED_BITS) - 1)
        # Adding to the bits of a NaN may carry into its sign and make a zero of it.
        return torch.where(torch.isfinite(tensor), bits.view(torch.float32).to(tensor.dtype), tensor)
    return tensor.to({"fp16": torch.float16, "bf16": torch.bfloat16}[number_format]).to(tensor.dtype)


def rounded_inputs(inputs: Any, number_format: str) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda leaf: rounded_tensor(leaf, number_format), inputs)


@contextmanager
def rounded_weights(model: torch.nn.Module, number_format: str) -> Iterator[None]:
    """The model's weights and statistics rounded, as long as the context lasts."""
    with unchanged_afterwards(model):
        with torch.no_grad():
            for tensor in chain(model.parameters(), model.buffers()):
                tensor.copy_(rounded_tensor(tensor, number_format))
        yield


@contextmanager
def unchanged_afterwards(model: torch.nn.Module) -> Iterator[None]:
    """Whatever happens to weights and statistics inside is undone."""
    held = [(tensor, tensor.detach().clone()) for tensor in chain(model.parameters(), model.buffers())]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in held:
                tensor.copy_(value)
        model.zero_grad(set_to_none=True)
