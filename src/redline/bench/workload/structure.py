"""This module reads inputs and outputs of any structure: tensors inside tuples, lists, dicts, dataclasses and objects.

It also finds what a model or a function hides: weights in packed objects, operators inside operators, and modules that a
function closes over.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import ExitStack
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves


def children(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the named parts of a container, or None for anything else.

    transformers' outputs are both mappings and dataclasses; as mappings they leave out the fields that are None. An object
    of the user's own that holds tensors is a container too, unless it knows itself how to move to a device.
    """
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if isinstance(value, tuple | list):
        return list(zip(getattr(value, "_fields", None) or map(str, range(len(value))), value, strict=True))
    if isinstance(value, Tensor | nn.Module | type):
        return None
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in dataclasses.fields(value)]
    if not hasattr(value, "__dict__") or hasattr(value, "to"):
        return None
    held = [(name, part) for name, part in vars(value).items() if isinstance(part, Tensor | list | tuple | dict)]
    return held if any(isinstance(part, Tensor) for _, part in held) else None


def named_tensors(value: Any, path: str = "") -> list[tuple[str, Tensor]]:
    """Returns every tensor with its path, such as `1`, `logits` or `decoder.0`. A lone tensor has the empty path."""
    if isinstance(value, Tensor):
        return [(path, value)]
    found = []
    for key, child in children(value) or ():
        found += named_tensors(child, join(path, key))
    return found


def part_at(value: Any, path: str) -> Callable[[Any], Any]:
    """Returns a function that takes the part at this path out of values of this structure, such as `output["logits"]` or `output[1]`."""
    for place, (name, child) in enumerate(children(value) or ()):
        if path != name and not path.startswith(f"{name}."):
            continue
        take: Callable[[Any], Any] = attrgetter(name)
        if isinstance(value, Mapping):
            take = itemgetter(list(value)[place])
        elif isinstance(value, tuple | list):
            take = itemgetter(place)
        if path == name:
            return take
        rest = part_at(child, path[len(name) + 1 :])
        return lambda whole: rest(take(whole))
    return lambda whole: whole


def tensors_within(value: Any, path: str = "", seen: frozenset[int] = frozenset()) -> list[tuple[str, Tensor]]:
    """Returns what `named_tensors` does, and also the tensors in objects that move themselves to a device."""
    if isinstance(value, Tensor):
        return [(path, value)]
    parts = children(value)
    if parts is None:
        is_opaque = id(value) in seen or isinstance(value, nn.Module | type) or callable(value)
        parts = [] if is_opaque else list(getattr(value, "__dict__", {}).items())
        seen = seen | {id(value)}
    return [found for key, child in parts for found in tensors_within(child, join(path, key), seen)]


def is_plain(tensor: Tensor) -> bool:
    """Returns whether the tensor's memory is what its shape says, that is, whether it is neither sparse nor ragged."""
    return tensor.layout == torch.strided and not tensor.is_nested


def stored(tensor: Tensor) -> list[Tensor]:
    """Returns the tensors that hold the data of a sparse, ragged or wrapped tensor, the values first. A plain tensor is returned itself."""
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        return [part for name in wrapper.__tensor_flatten__()[0] for part in stored(getattr(wrapper, name))]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    return list(tensor.unbind()) if tensor.is_nested else [tensor]


def packed(value: Any) -> list[Tensor]:
    """Returns the weight and the bias that a quantized layer keeps in an object of torch's own."""
    if not isinstance(value, torch.ScriptObject) or not hasattr(value, "unpack"):
        return []
    with _disable_current_modes():
        return [part for part in value.unpack() if isinstance(part, Tensor)]


def parameter_count(*models: nn.Module) -> int:
    """Returns the number of parameters. Each counts once, however many modules share it. Packed weights of quantized layers count too."""
    given = {id(weight): weight for model in models for weight in model.parameters()}
    held = {id(value): value for model in models for module in model.modules() for value in vars(module).values()}
    kept = (weight for value in held.values() for weight in packed(value))
    return sum(int(weight.numel()) for weight in (*given.values(), *kept))


def shape_of(tensor: Tensor) -> list[int | None]:
    """Returns the lengths of the tensor's axes, with None along a ragged axis."""
    if tensor.is_nested and tensor.layout == torch.strided:
        rows = tensor._nested_tensor_size()
        return [tensor.size(0), *(int(column[0]) if len(column.unique()) == 1 else None for column in rows.T)]
    return [length if type(length) is int else None for length in tensor.shape]


def map_leaves(
    value: Any, change: Callable[[str, Any], Any], path: str = "", *, until: Callable[[str], bool] | None = None
) -> Any:
    """Returns the same structure with `change(path, leaf)` in place of every leaf. Tensors and other objects are leaves alike.

    `until` names paths of containers that are taken as leaves.
    """
    parts = children(value)
    if parts is None or (until is not None and until(path)):
        return change(path, value)
    changed = [map_leaves(child, change, join(path, key), until=until) for key, child in parts]
    if all(new is old for new, (_, old) in zip(changed, parts, strict=True)):
        return value
    return rebuild(value, [key for key, _ in parts], changed)


def map_tensors(value: Any, change: Callable[[str, Tensor], Tensor]) -> Any:
    return map_leaves(value, lambda path, leaf: change(path, leaf) if isinstance(leaf, Tensor) else leaf)


def describe(value: Any) -> str:
    """Returns structure, shapes and dtypes as text. The values of tensors and arrays are left out."""
    if isinstance(value, Tensor):
        return f"{value.dtype}{shape_text(value)}"
    if isinstance(value, np.ndarray):
        return f"array {value.dtype}{list(value.shape)}"
    parts = children(value)
    if parts is not None:
        return f"{type(value).__name__}({', '.join(f'{key}: {describe(child)}' for key, child in parts)})"
    # The repr of other objects may hold an address, which differs between two runs of the same thing.
    return repr(value) if isinstance(value, bool | int | float | str | None) else type(value).__qualname__


def shape_text(tensor: Tensor) -> str:
    """Returns the shape as text. The name of a ragged tensor's axis is left out, because it differs from process to process."""
    if not tensor.is_nested:
        return str(list(tensor.shape))
    return f"ragged {tensor.size(0)} rows, {tensor.numel()} values"


def join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def rebuild(value: Any, keys: list[str], parts: list[Any]) -> Any:
    if isinstance(value, Mapping):
        rebuilt = dict(zip(value, parts, strict=True))
        if type(value) is dict or not isinstance(value, MutableMapping):
            return rebuilt
        twin: Any = copy.copy(value)
        twin.update(rebuilt)
        return twin
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*parts)
    if isinstance(value, tuple | list):
        return type(value)(parts)
    twin = copy.copy(value)
    for key, part in zip(keys, parts, strict=True):
        object.__setattr__(twin, key, part)  # this also works for frozen dataclasses
    return twin


def float_tensors(output: Any) -> list[tuple[str, Tensor]]:
    """Returns the floating tensors of any output with their paths. A lone tensor is called `output`."""
    return [(path or "output", tensor) for path, tensor in named_tensors(output) if tensor.is_floating_point()]


class WholeDispatchMode(TorchDispatchMode):
    """This mode also sees what `torch.cond`, loops, scans and `flex_attention` do inside, although these operators take functions.

    A subclass runs all other operators in `run`.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self.opened(func, args, kwargs)
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator, and looks at it."""
        raise NotImplementedError

    def opened(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        plain = func.py_kernels.get(torch._C.DispatchKey.CompositeExplicitAutograd)
        if plain is None:
            return func(*args, **(kwargs or {}))
        try:
            with self:
                return plain(*args, **(kwargs or {}))
        # Some of these operators refuse to start under a mode. Then the functions that they call run under it.
        except AssertionError:
            modes = (*_get_current_dispatch_mode_stack(), self)
            with _disable_current_modes():
                return plain(*(_under(modes, one) if callable(one) else one for one in args), **(kwargs or {}))


def _under(modes: tuple[TorchDispatchMode, ...], function: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as entered:
            for mode in modes:
                entered.enter_context(mode)
            return function(*args, **kwargs)

    return called


def reached_modules(*values: Any) -> dict[str, nn.Module]:
    """Returns the modules that functions, containers and objects hold, each under its own name.

    A module inside another one that was found comes with that one.
    """
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(name: str, value: Any, depth: int) -> None:
        for leaf in tree_leaves(value):
            if isinstance(leaf, nn.Module):
                if not any(leaf is part for other in found.values() for part in other.modules()):
                    found[name if name and name not in found else f"module_{len(found)}"] = leaf
            elif depth and id(leaf) not in seen:
                seen.add(id(leaf))
                for key, part in _held_by(leaf).items():
                    visit(key or name, part, depth - 1)

    visit("", values, 5)
    return found


def _held_by(value: Any) -> dict[str, Any]:
    """Returns what a function or an object holds, with the names it has there."""
    if isinstance(value, type | Tensor) or inspect.ismodule(value):
        return {}
    if isinstance(value, functools.partial):
        return {"": (value.func, value.args, value.keywords)}
    try:
        used = inspect.getclosurevars(value)
    # The value is not a function, or it closes over a name that has no value yet.
    except (TypeError, ValueError):
        return dict(getattr(value, "__dict__", {}))
    return {**used.nonlocals, **used.globals, "": getattr(value, "__self__", None)}
