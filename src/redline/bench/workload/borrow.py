"""A module of the user's own process, borrowed for a measurement and given back as it was: weights, place, mode."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


def remember_module(model: nn.Module) -> Callable[[], None]:
    """Returns what undoes casts, moves, training steps and changes of mode."""
    modes = {module: module.training for module in model.modules()}
    tensors = [(tensor, _copied(tensor)) for tensor in (*model.parameters(), *model.buffers())]
    buffers = [(module, name, buffer) for module in model.modules() for name, buffer in module._buffers.items()]

    def restore() -> None:
        for module, name, buffer in buffers:
            module._buffers[name] = buffer  # a cast replaces the buffer itself
        for tensor, (value, gradient) in tensors:
            tensor.data = value
            tensor.grad = gradient
        for module, training in modes.items():
            module.training = training

    return restore


def _copied(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    return tensor.detach().clone(), None if tensor.grad is None else tensor.grad.detach().clone()
