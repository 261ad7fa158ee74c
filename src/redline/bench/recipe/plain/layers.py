"""Which layers are quantized: torchao's kernels are matrix products, so the fully connected ones."""

from __future__ import annotations

import torch

SIDES = {"int8": 8, "int8-weights": 8, "fp8": 16}
"""Of which number both sides of a weight must be a multiple, for the GPU's product in that format."""


def is_plain_linear(module: torch.nn.Module, sides: int) -> bool:
    """A layer whose weight nobody reads past it (as MultiheadAttention does), with sides of multiples of `sides`."""
    return type(module) is torch.nn.Linear and all(side % sides == 0 for side in module.weight.shape)


def plain_linears(model: torch.nn.Module, number_format: str) -> list[torch.nn.Linear]:
    """All that would be quantized."""
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    return [layer for layer in layers if is_plain_linear(layer, SIDES[number_format])]
