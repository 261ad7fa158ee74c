"""Torch's global switches, put back as they were: a bench inside the user's own process must leave no trace."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch


def remember_flags() -> Callable[[], None]:
    """Returns what puts everything back."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    held = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    inductor = _inductor()
    freezing = inductor.freezing if inductor else os.environ.get("TORCHINDUCTOR_FREEZING") == "1"
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    threads, grad, random = torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()

    def restore() -> None:
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = held
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)
        torch.set_rng_state(random)
        if (now := _inductor()) is not None:
            now.freezing = freezing

    return restore


def _inductor() -> Any:
    """The compiler's settings where it has been loaded: loading it costs more than a second."""
    return sys.modules.get("torch._inductor.config")
