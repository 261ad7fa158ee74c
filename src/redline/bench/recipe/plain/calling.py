"""Other ways to call a model: with one backend for its attention, and with the inputs it was made for."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Of scaled_dot_product_attention."""


class CallForm:
    """How the example was called. Later calls may write their keywords, and the keys of dicts, in any order; what went in
    by place goes in by place again, and what went in by name by name."""

    def __init__(self, args: tuple, kwargs: dict) -> None:
        leaves, self.structure = tree_flatten((args, kwargs))
        self.count, self.names = len(args), list(kwargs)
        self.places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        plain = (bool, int, float, str, type(None))
        self.fixed = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, plain)}

    def tensors(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        """The tensors of a call in the order of the example's."""
        if len(args) != self.count or kwargs.keys() != set(self.names):
            raise TypeError(
                f"made for {self.count} positional inputs and the keywords {self.names}, "
                f"called with {len(args)} and {list(kwargs)}"
            )
        leaves = self.structure.flatten_up_to((args, kwargs))
        for place, value in self.fixed.items():
            # By their words: nan is not equal to itself.
            if type(leaves[place]) is not type(value) or repr(leaves[place]) != repr(value):
                raise ValueError(f"made for an input that is {value!r}, which a later call cannot change")
        return [leaves[place] for place in self.places]


class WithAttention(torch.nn.Module):
    """The model, with every scaled_dot_product_attention in it done by one backend."""

    def __init__(self, model: torch.nn.Module, backend: SDPBackend) -> None:
        super().__init__()
        self.model, self.backend = model, backend

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(self.backend):
            return self.model(*args, **kwargs)
