"""Which layers are quantized: torchao's kernels are matrix products, so the fully connected ones."""

from __future__ import annotations

import torch


def is_plain_linear(module: torch.nn.Module, name: str = "") -> bool:
    """A layer whose weight nobody reads past it (as MultiheadAttention does), of sides that int8 and fp8 kernels take."""
    return type(module) is torch.nn.Linear and module.in_features % 16 == module.out_features % 16 == 0
