"""A module of the user's own process, borrowed for a measurement and given back as it was: weights, place, mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn


def remember_module(model: nn.Module) -> Callable[[], None]:
    """Returns what undoes casts, moves, training steps, changes of mode, and layers or weights that were exchanged."""
    modes = {module: module.training for module in model.modules()}
    tensors = [(tensor, _copied(tensor)) for tensor in (*model.parameters(), *model.buffers())]
    # A cast replaces the buffer itself, folding and quantizing replace weights and whole layers.
    parts = [(held, dict(held)) for module in model.modules() for held in _parts_of(module)]

    def restore() -> None:
        for held, then in parts:
            held.clear()
            held.update(then)
        for tensor, (value, gradient) in tensors:
            tensor.data = value
            tensor.grad = gradient
        for module, training in modes.items():
            module.training = training

    return restore


def _parts_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._parameters, module._buffers, module._modules


def _copied(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    return tensor.detach().clone(), None if tensor.grad is None else tensor.grad.detach().clone()
