"""What a call may change beside the values of tensors: the containers and objects it is given, and what modules keep."""

from __future__ import annotations

import copy
from collections import deque
from enum import Enum
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from redline.bench.workload.structure import children, is_plain, rebuild, shape_text

SMALL = 64
"""Elements of a tensor inside an object that is copied with it: a position or a length. Larger ones, such as keys and values, stay:
a call that begins at the same position writes them at the same places again."""


def own_objects(value: Any, twins: dict[int, Any] | None = None, *, inside: bool = False) -> Any:
    """The same leaves in containers and objects of their own, as far as those can be copied, with small tensors `inside` them."""
    twins = {} if twins is None else twins
    if id(value) in twins:
        return twins[id(value)]
    if inside and isinstance(value, Tensor) and is_plain(value) and value.numel() <= SMALL:
        twins[id(value)] = value.detach().clone()
        return twins[id(value)]
    parts = children(value)
    if parts is not None:
        own = [own_objects(child, twins, inside=inside) for _, child in parts]
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
    """Whether it is an object with attributes that a call may change, such as a cache of keys and values."""
    known = Tensor | nn.Module | type | ModuleType | Enum
    return not isinstance(value, known) and not callable(value) and bool(getattr(value, "__dict__", None))


def holds_containers(value: Any) -> bool:
    """Whether there is something inside it that a model could change without writing into a tensor."""
    return any(
        not isinstance(child, tuple) or holds_containers(child)
        for _, child in children(value) or ()
        if children(child) is not None
    )


MOST_STATES = 10_000
"""Objects that are looked at: one that leads to everything else in the process is not followed to the end."""


def state_of(value: Any, seen: set[int] | None = None, *, writes: bool = False) -> Any:
    """What can be compared with a later look: shapes, numbers and texts at any depth.

    The values of tensors do not show; with `writes`, whether they were written does.
    """
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return value.dtype, shape_text(value), value._version if writes and not value.is_inference() else 0
    if value is None or isinstance(value, bool | int | float | str):
        return repr(value)
    parts = list(vars(value).items()) if keeps_state(value) else _parts(value)
    if not parts or id(value) in seen or len(seen) > MOST_STATES:
        return type(value)
    seen.add(id(value))
    return type(value), [(key, state_of(part, seen, writes=writes)) for key, part in parts]


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    return [("", part) for part in value] if isinstance(value, deque) else children(value)


def model_state(model: nn.Module) -> list[Any]:
    """The state of every module: what its calls leave behind in it."""
    seen: set[int] = set()
    return [
        [(name, state_of(part, seen)) for name, part in vars(module).items() if name != "_modules"]
        for module in model.modules()
    ]


T = TypeVar("T")


class _Kept(Generic[T]):
    """Inputs, and whether a model has changed a container or an object among them."""

    def __init__(self, value: T) -> None:
        self._value = value
        self.is_watched = holds_containers(value) or _holds_state(value)
        """A call may change them. Later calls do what the first ones did, so watching ends with `stop_watching`."""
        self._lent = own_objects(value) if self.is_watched else value
        """What is handed out until a call changes it."""
        self._then = _states(self._lent) if self.is_watched else None
        self.has_changed = False

    def handed(self) -> T:
        if self.is_watched and not self.has_changed:
            self.has_changed = _states(self._lent) != self._then
        return cast(T, own_objects(self._value)) if self.has_changed else self._lent

    def stop_watching(self) -> None:
        self.handed()
        self.is_watched = False


def _holds_state(value: Any) -> bool:
    parts = children(value)
    return keeps_state(value) if parts is None else any(_holds_state(part) for _, part in parts)


def _states(value: Any) -> Any:
    """What containers hold and what objects keep; writes into the tensors themselves are looked for elsewhere."""
    parts = children(value)
    if parts is not None:
        return [(key, _states(part)) for key, part in parts]
    return state_of(value, writes=True) if keeps_state(value) else id(value)


class Untouched(Generic[T]):
    """A field of a dataclass that keeps inputs as they were given, whatever a model does with them.

    Lists, dicts and objects that keep state, such as a cache of keys and values, are handed out anew for every call once one
    was seen to change them: every step is then the same call. Where none does, every call gets the same ones.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        if holder is None:
            raise AttributeError  # so that the dataclass sees no default
        return cast(_Kept[T], getattr(holder, self._name)).handed()

    def __set__(self, holder: Any, value: T) -> None:
        setattr(holder, self._name, _Kept(value))


def kept(holder: Any, name: str) -> _Kept[Any]:
    """What keeps the inputs of this field, for a step that takes them again and again."""
    return cast(_Kept[Any], getattr(holder, f"_{name}"))


def inputs_changed(holder: Any) -> bool:
    """Whether the calls so far have changed something among the inputs that `holder` keeps; later ones are not watched."""
    held = [value for value in vars(holder).values() if isinstance(value, _Kept)]
    for one in held:
        one.stop_watching()
    return any(one.has_changed for one in held)


Held = dict[str, tuple[Tensor, Tensor]]
"""By name: the tensor, and a copy of what it holds. Some kernels write without counting it in the tensor's version."""


def held_tensors(model: nn.Module) -> Held:
    """Buffers, and tensors that modules keep as plain attributes: caches, tables."""
    found: dict[str, Tensor] = dict(model.named_buffers())
    for path, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        found.update({f"{path}.{name}" if path else name: value for name, value in plain.items()})
    return {name: (tensor, tensor.detach().clone()) for name, tensor in found.items()}


def changed_tensors(before: Held, after: Held) -> tuple[str, ...]:
    """Those written to, those replaced, and those that were not there."""

    def is_same(name: str) -> bool:
        return name in before and before[name][0] is after[name][0] and torch.equal(before[name][1], after[name][1])

    return tuple(name for name in after if not is_same(name))
