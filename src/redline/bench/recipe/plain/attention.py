"""One backend for every attention of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


class WithAttention(torch.nn.Module):
    """The model, with every scaled_dot_product_attention in it done by one backend."""

    def __init__(self, model: torch.nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(*args, **kwargs)
