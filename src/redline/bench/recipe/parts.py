"""Parts of a model that can be recorded where the whole cannot, because it waits for values of the device in between.

Plain PyTorch, as in `plain.py`: switches apply it and snippets contain it, unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from redline.bench.recipe.plain import CallForm

WORTH_RECORDING = 8
"""Operators: launching a graph takes the host about as long as launching two or three of them."""


class Waits(TorchDispatchMode):
    """Counts operators, and those for which the host waits: values that Python reads, shapes that depend on values, copies
    between host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.waits = 0
        self.written: list[int] = []
        """Where the memory begins that operators wrote into in place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        self.operators += 1
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if isinstance(value, torch.Tensor) and argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append(value.untyped_storage().data_ptr())
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        tags = getattr(func, "tags", ())
        by_value = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
        if by_value and func is torch.ops.aten.index.Tensor:  # only with a mask
            by_value = any(each.dtype in (torch.bool, torch.uint8) for each in given[1:])
        places = {each.device.type for each in (*given, *made)}
        self.waits += bool(by_value or ("cpu" in places and len(places) > 1))
        return output


def kinds_of(output: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in tree_leaves(output)]


class Part:
    """What one call of a module did."""

    def __init__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seen: Waits) -> None:
        self.module, self.args, self.kwargs = module, args, kwargs
        self.calls, self.suits = 1, False
        self.begun = seen.operators, seen.waits, len(seen.written)
        self.tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        self.returned: list[Any] = []

    def end(self, output: Any, seen: Waits) -> None:
        """It suits where it waited for nothing, wrote into none of its inputs, and returned tensors."""
        operators, waits = seen.operators - self.begun[0], seen.waits - self.begun[1]
        given = {tensor.untyped_storage().data_ptr() for tensor in self.tensors}
        writes = not given.isdisjoint(seen.written[self.begun[2] :])
        returns = all(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(output))
        self.suits = operators >= WORTH_RECORDING and not waits and not writes and returns and bool(given)
        self.returned = kinds_of(output) if self.suits else []


def parts_of(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Part]:
    """By name, what each module below the model did in one call; those called more often do not suit."""
    parts: dict[str, Part] = {}
    hooks = []
    with Waits() as seen:
        for name, module in model.named_modules():

            def begin(module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                if name in parts:
                    parts[name].calls += 1
                else:
                    parts[name] = Part(module, args, kwargs, seen)

            def end(module: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                if parts[name].calls == 1:
                    parts[name].end(output, seen)

            hooks.append(module.register_forward_pre_hook(begin, with_kwargs=True))
            hooks.append(module.register_forward_hook(end, with_kwargs=True))
        try:
            model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
    return parts


class RecordedPart:
    """Stands in for the forward of a module: replays what it did for inputs like those it was recorded with.

    What it returns is overwritten by the next replay.
    """

    def __init__(self, part: Part, record: Callable[..., Any]) -> None:
        self.forward = part.module.forward
        args, kwargs = tree_map_only(torch.Tensor, torch.clone, (part.args, part.kwargs))
        self.form = CallForm(args, kwargs)
        self.inputs = self.form.tensors(args, kwargs)
        self.replay, self.output = record(lambda: self.forward(*args, **kwargs), 3)
        if kinds_of(self.output) != part.returned:
            raise ValueError("called alone it returns something else: a context around it matters, such as autocast")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.form.tensors(args, kwargs)
        if any(one.shape != own.shape or one.dtype != own.dtype for one, own in zip(given, self.inputs, strict=True)):
            return self.forward(*args, **kwargs)
        for own, one in zip(self.inputs, given, strict=True):
            own.copy_(one)
        self.replay()
        return self.output


def record_parts(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], record: Callable[..., Any]
) -> list[str]:
    """Record the largest parts of a model that wait for nothing, in place; their names. `record` records a call as a graph."""
    parts = parts_of(model, args, kwargs)
    recorded: list[str] = []
    for name, part in parts.items():  # a module is called before those inside it
        inside = any(name.startswith(f"{other}.") for other in recorded)
        if not name or inside or part.calls > 1 or not part.suits:
            continue
        try:
            forward = RecordedPart(part, record)
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, TypeError, ValueError):
            continue  # it waits in a way that no operator shows; what is inside it may not
        part.module.forward = forward
        recorded.append(name)
    return recorded
