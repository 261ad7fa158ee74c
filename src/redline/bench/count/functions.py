"""What the functions that Python calls tell beyond the operators they become: values read on the host, and activations that
stand right behind a linear layer."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

READING_METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "__array__"}
"""These read values without calling an operator, where the tensor lies in the host's memory."""
ACTIVATIONS = frozenset(
    {functional.gelu, functional.relu, torch.relu, torch.relu_, functional.relu_, Tensor.relu, Tensor.relu_}
)
"""Those that libraries can do in the kernel of a product."""


class Listener(Protocol):
    """What is told; its `calls` grow with each operator that runs."""

    activating: set[int]

    @property
    def calls(self) -> Sized: ...

    def read(self, what: str) -> None: ...


class FunctionCalls(TorchFunctionMode):
    """Tells a listener when Python reads a tensor's values, and which operators are the activation of a linear layer."""

    def __init__(self, listener: Listener) -> None:
        super().__init__()
        self._listener = listener
        self._from_linear: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """Outputs of linear layers that are still alive, by their identity."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, listener = kwargs or {}, self._listener
        if func in READING_METHODS:
            listener.read(READING_METHODS[func])
        begun = len(listener.calls)
        out = func(*args, **kwargs)
        if func is functional.linear and _has_bias(args, kwargs) and out.dim() > 1:
            self._from_linear[id(out)] = out
        elif func in ACTIVATIONS:
            given = args[0] if args else kwargs.get("input")
            if given is not None and self._from_linear.get(id(given)) is given:
                listener.activating |= set(range(begun, len(listener.calls)))
        return out


def _has_bias(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return (args[2] if len(args) > 2 else kwargs.get("bias")) is not None
