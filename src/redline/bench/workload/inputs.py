"""Drawing inputs anew and giving them another leading size, whatever their structure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from redline.bench.workload.structure import map_tensors, named_tensors

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

COARSE_CELLS = 2


def redraw(inputs: Inputs, seed: int, vocabulary: Mapping[str, int]) -> Inputs:
    """Inputs of the same structure, shapes, dtypes and devices with other values; the same seed gives the same ones."""
    # Drawn on the CPU, so that a seed means the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    args, kwargs = inputs
    return (
        map_tensors(args, lambda path, tensor: _draw_like(tensor, generator, vocabulary.get(path))),
        map_tensors(kwargs, lambda path, tensor: _draw_like(tensor, generator, vocabulary.get(path))),
    )


def leading_size(inputs: Inputs) -> int | None:
    """Dimension 0 of the first tensor that has one."""
    return next((tensor.shape[0] for _, tensor in _all_tensors(inputs) if tensor.ndim > 0), None)


def resize_leading(inputs: Inputs, size: int, seed: int) -> Inputs:
    """Give every tensor that shares the leading size `size` rows: the rows there are, then more like them.

    New floating rows are drawn, so that no two items are alike. Integers and booleans repeat instead: they may be
    masks, lengths or sorted positions, which stop making sense when drawn.
    """
    old = leading_size(inputs)
    if old is None or old == size:
        return inputs
    generator = torch.Generator().manual_seed(seed)

    def change(_: str, tensor: Tensor) -> Tensor:
        return _resized(tensor, size, generator) if tensor.ndim and tensor.shape[0] == old else tensor

    args, kwargs = inputs
    return map_tensors(args, change), map_tensors(kwargs, change)


def input_shapes(inputs: Inputs) -> tuple[str, ...]:
    """`1×3×224×224 float32`, and `input_ids 1×128 int64` where the input has a name."""
    args, kwargs = inputs
    lone = len(named_tensors(args)) == 1 and not kwargs
    shapes = []
    for path, tensor in _all_tensors(inputs):
        size = "×".join(str(length) for length in tensor.shape) or "scalar"
        shapes.append(f"{'' if lone else f'{path} '}{size} {str(tensor.dtype).removeprefix('torch.')}")
    return tuple(shapes)


def _all_tensors(inputs: Inputs) -> list[tuple[str, Tensor]]:
    args, kwargs = inputs
    return named_tensors(args) + named_tensors(kwargs)


def _resized(tensor: Tensor, size: int, generator: torch.Generator) -> Tensor:
    if tensor.shape[0] == 0:
        return tensor.new_zeros((size, *tensor.shape[1:]))
    rows = torch.arange(size, device=tensor.device) % tensor.shape[0]
    resized = tensor.detach().index_select(0, rows)
    if size > tensor.shape[0] and tensor.is_floating_point() and not _says_nothing(tensor):
        fresh = _draw_like(resized, generator, None)
        resized = torch.cat([resized[: tensor.shape[0]], fresh[tensor.shape[0] :]])
    return resized.requires_grad_(tensor.requires_grad)


def _draw_like(tensor: Tensor, generator: torch.Generator, vocabulary: int | None) -> Tensor:
    """Another draw of the same kind; scalars, booleans, masks and layouts that are not plain stay as they are."""
    if tensor.layout != torch.strided or tensor.ndim == 0 or tensor.numel() == 0 or tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        drawn = _draw_floating(tensor, generator)
    else:
        drawn = _draw_integers(tensor, generator, vocabulary)
    # Copying into an empty twin keeps the strides, hence a channels-last input stays one.
    return torch.empty_like(tensor, requires_grad=False).copy_(drawn).requires_grad_(tensor.requires_grad)


def _draw_floating(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.complex64)
    values = tensor.detach().float()
    if not bool(values.isfinite().all()):
        return tensor.detach()  # a mask with -inf, or an input that is broken and had better show it
    drawn = _draw_normal(tensor.shape, generator)
    if _says_nothing(values):
        return drawn
    drawn = drawn * values.std().item() + values.mean().item()
    low, high = values.min().item(), values.max().item()
    # A model fed with pixels or probabilities may take a root or a logarithm: stay on the side of zero that was given.
    return drawn.clamp(low, high) if low >= 0 or high <= 0 else drawn


def _draw_normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Standard normal values; in images half of their variance is shared by each quarter of the picture.

    To a network that ends in average pooling all pictures of pure noise look alike: its output hardly depends on
    the input, and rounding errors drown what little does. Quarters that differ bring the dependence back.
    """
    drawn = torch.randn(shape, generator=generator)
    if len(shape) < 4:
        return drawn
    coarse = torch.randn((*shape[:-2], COARSE_CELLS, COARSE_CELLS), generator=generator)
    for dimension in (-2, -1):
        cells = torch.arange(shape[dimension]) * COARSE_CELLS // shape[dimension]
        coarse = coarse.index_select(dimension, cells)
    return (drawn + coarse) * math.sqrt(0.5)


def _draw_integers(tensor: Tensor, generator: torch.Generator, vocabulary: int | None) -> Tensor:
    low, high = 0, (vocabulary or 0) - 1
    if vocabulary is None:
        low, high = int(tensor.min()), int(tensor.max())
        if low >= 0 and high <= 1:
            return tensor  # a mask: drawn anew it might hide everything
    return torch.randint(low, high + 1, tensor.shape, generator=generator)


def _says_nothing(tensor: Tensor) -> bool:
    """Whether no spread can be read off these values."""
    values = tensor.detach().float()
    spread = values.std().item() if values.numel() > 1 else 0.0
    return not 0.0 < spread < float("inf")
