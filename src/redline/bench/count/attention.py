"""Whether a kernel can do a call of attention, found by trying."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def cast(value: Any, dtype: torch.dtype, trains: bool = False) -> Any:
    """Of an attention's arguments, query, key and value come first: those take part in autograd when training."""
    if isinstance(value, tuple):
        return tuple(cast(part, dtype, trains and index < 3) for index, part in enumerate(value))
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    with torch.inference_mode(False):
        return value.detach().to(dtype, copy=True).requires_grad_(trains)


def attends(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], backend: SDPBackend, trains: bool) -> bool:
    with torch.inference_mode(False), torch.set_grad_enabled(trains), warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # torch tells why a backend will not do
        try:
            func(*args, **kwargs)
        except RuntimeError:  # also out of memory: it cannot do this call here
            return False
    return True
