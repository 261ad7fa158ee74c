"""What a call may change beside the values of tensors: the containers and objects it is given, and what modules keep."""

from __future__ import annotations

import copy
from collections import deque
from enum import Enum
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

from torch import Tensor, equal, nn

from redline.bench.workload.structure import children, is_plain, rebuild, shape_text

SMALL = 64
"""A tensor inside an object is copied with it up to this many elements: it is a position or a length. Larger ones, such as keys
and values, stay, because a call that begins at the same position writes them at the same places again."""
MOST_STATES = 10_000
"""We look at this many objects at most. An object that leads to everything else in the process is not followed to the end."""

T = TypeVar("T")


def own_objects(value: Any, twins: dict[int, Any] | None = None, *, inside: bool = False) -> Any:
    """Returns the same leaves in containers and objects of their own, with small tensors `inside` objects copied too."""
    twins = {} if twins is None else twins
    if id(value) in twins:
        return twins[id(value)]
    if inside and isinstance(value, Tensor) and is_plain(value) and value.numel() <= SMALL:
        twins[id(value)] = value.detach().clone()
        return twins[id(value)]
    parts = children(value)
    if parts is not None:
        own = [own_objects(child, twins, inside=inside) for _, child in parts]
        if isinstance(value, tuple) and all(new is old for new, (_, old) in zip(own, parts, strict=True)):
            return value
        return rebuild(value, [key for key, _ in parts], own)
    if not keeps_state(value):
        return value
    try:
        twin = twins[id(value)] = copy.copy(value)
        vars(twin).update({name: own_objects(part, twins, inside=True) for name, part in vars(twin).items()})
    except Exception:  # it may refuse to be copied in any way
        return value
    return twin


def keeps_state(value: Any) -> bool:
    """Returns whether it is an object with attributes that a call may change, such as a cache of keys and values."""
    known = Tensor | nn.Module | type | ModuleType | Enum
    return not isinstance(value, known) and not callable(value) and bool(getattr(value, "__dict__", None))


def contents(value: Any) -> Any:
    """Returns what can be compared after a call: what containers hold and what objects keep, without the values of tensors."""
    parts = children(value)
    if parts is not None:
        return [(key, contents(part)) for key, part in parts]
    return _state_of(value, set(), writes=True) if keeps_state(value) else id(value)


def model_state(model: nn.Module) -> list[Any]:
    """Returns the state of every module, as far as calls leave something behind in it: shapes, numbers and texts."""
    seen: set[int] = set()
    return [
        [(name, _state_of(part, seen)) for name, part in vars(module).items() if name != "_modules"]
        for module in model.modules()
    ]


def _state_of(value: Any, seen: set[int], *, writes: bool = False) -> Any:
    """Returns shapes, numbers and texts at any depth; with `writes` also whether a tensor was written to."""
    if isinstance(value, Tensor):
        return value.dtype, shape_text(value), _writes_to(value) if writes else 0
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    parts = (
        list(vars(value).items()) if keeps_state(value) else children(list(value) if type(value) is deque else value)
    )
    if not parts or id(value) in seen or len(seen) > MOST_STATES:
        return type(value)
    seen.add(id(value))
    return type(value), [(key, _state_of(part, seen, writes=writes)) for key, part in parts]


def _writes_to(tensor: Tensor) -> object:
    """Returns what changes when a tensor is written to. Inference tensors have no version; small ones tell by their values."""
    if not tensor.is_inference():
        return tensor._version
    return tensor.tolist() if is_plain(tensor) and tensor.numel() <= SMALL else 0


class Untouched(Generic[T]):
    """A field of a dataclass that keeps inputs as they were given.

    Every reader gets lists, dicts and objects of its own, such as a cache of keys and values, so that whatever a model
    does with them, the next step makes the same call. Tensors are shared.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        if holder is None:
            raise AttributeError  # so that the dataclass sees no default
        return cast(T, own_objects(getattr(holder, self._name)))

    def __set__(self, holder: Any, value: T) -> None:
        setattr(holder, self._name, value)


Held = dict[str, tuple[Tensor, Tensor]]
"""By name: the tensor, and a copy of what it holds. Some kernels write without counting it in the tensor's version."""


def held_tensors(model: nn.Module) -> Held:
    """Returns buffers, and tensors that modules keep as plain attributes, such as caches and tables."""
    found: dict[str, Tensor] = dict(model.named_buffers())
    for path, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        found.update({f"{path}.{name}".lstrip("."): value for name, value in plain.items()})
    return {name: (tensor, tensor.detach().clone()) for name, tensor in found.items()}


def changed_tensors(before: Held, after: Held) -> tuple[str, ...]:
    """Returns the names of those that were written to, replaced, or not there before."""

    def is_same(name: str) -> bool:
        return name in before and before[name][0] is after[name][0] and equal(before[name][1], after[name][1])

    return tuple(name for name in after if not is_same(name))
