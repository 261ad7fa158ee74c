"""When the forward pass enters and leaves each module of a model, by path; the modules themselves stay untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook


@contextmanager
def watching(model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """A module with several names goes by its first; one that is no part of the model belongs to whoever called it."""
    paths = {id(module): path for path, module in model.named_modules()}

    def before(module: nn.Module, _: Any) -> None:
        path = paths.get(id(module))
        if path is not None:
            enter(path)

    def after(module: nn.Module, _: Any, __: Any) -> None:
        path = paths.get(id(module))
        if path is not None:
            leave(path)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
