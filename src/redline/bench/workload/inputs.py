"""This module copies inputs so that a call cannot change them, sees what a call leaves behind, and makes other inputs of the same kind."""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from types import ModuleType
from typing import Any, Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, equal, nn

from redline.bench.workload.structure import (
    children,
    is_plain,
    map_tensors,
    named_tensors,
    shape_of,
    shape_text,
    stored,
    tensors_within,
)

SMALL = 64
"""A tensor inside an object is copied with it up to this many elements: it is a position or a length. Larger ones, such as keys
and values, stay, because a call that begins at the same position writes them at the same places again."""
MOST_STATES = 10_000
"""We look at this many objects at most. An object that leads to everything else in the process is not followed to the end."""

T = TypeVar("T")


def own_objects(value: Any) -> Any:
    """Returns the same leaves in containers and objects of their own, with small tensors inside objects copied too."""
    if isinstance(value, tuple) and all(isinstance(part, Tensor) for part in value):
        # A tuple of tensors cannot be changed, so it needs no copy. Steps read it, and a copy would cost them time.
        return value
    inside = {id(tensor): tensor for _, tensor in tensors_within(value)}
    shared = {id(tensor): tensor for _, tensor in named_tensors(value)}
    shared |= {key: tensor for key, tensor in inside.items() if not is_plain(tensor) or tensor.numel() > SMALL}
    try:
        return copy.deepcopy(value, dict(shared))
    except Exception:  # the object may refuse to be copied, with any error
        return value


def keeps_state(value: Any) -> bool:
    """Returns whether the value is an object with attributes that a call may change, such as a cache of keys and values."""
    known = Tensor | nn.Module | type | ModuleType | Enum
    return not isinstance(value, known) and not callable(value) and bool(getattr(value, "__dict__", None))


def contents(value: Any) -> Any:
    """Returns what can be compared after a call: what containers hold and what objects keep. The values of tensors are left out."""
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
    """Returns shapes, numbers and texts at any depth. With `writes` it also tells whether a tensor was written to."""
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
    """Returns something that changes when a tensor is written to. Inference tensors have no version, so the values of small
    ones are compared."""
    if not tensor.is_inference():
        return tensor._version
    return tensor.tolist() if is_plain(tensor) and tensor.numel() <= SMALL else 0


class Untouched(Generic[T]):
    """This field of a dataclass keeps inputs as they were given.

    Every reader gets lists, dicts and objects of its own, such as a cache of keys and values, so that whatever a model
    does with them, the next step makes the same call. Tensors are shared.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, holder: Any, owner: type | None = None) -> T:
        if holder is None:
            # This error tells the dataclass that the field has no default.
            raise AttributeError
        return cast(T, own_objects(getattr(holder, self._name)))

    def __set__(self, holder: Any, value: T) -> None:
        setattr(holder, self._name, value)


Held = dict[str, tuple[Tensor, Tensor]]
"""It maps a name to a tensor and a copy of its values. The copy is needed because some kernels write without counting it in
the tensor's version."""


def held_tensors(model: nn.Module) -> Held:
    """Returns buffers, and tensors that modules keep as plain attributes, such as caches and tables."""
    found: dict[str, Tensor] = dict(model.named_buffers())
    for path, module in model.named_modules():
        plain = {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
        found.update({f"{path}.{name}".lstrip("."): value for name, value in plain.items()})
    return {name: (tensor, tensor.detach().clone()) for name, tensor in found.items()}


def changed_tensors(before: Held, after: Held) -> tuple[str, ...]:
    """Returns the names of the tensors that were written to or replaced, or that were not there before."""

    def is_same(name: str) -> bool:
        return name in before and before[name][0] is after[name][0] and equal(before[name][1], after[name][1])

    return tuple(name for name in after if not is_same(name))


Inputs = tuple[tuple[Any, ...], dict[str, Any]]

NOISE = 0.1
"""This relative noise moves outputs by far more than rounding does, but keeps an input meaningful."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds what factories draw from, and restores the state afterwards, because the bench may share its process with the user's code."""
    python, numpy, generator = random.getstate(), np.random.get_state(), torch.default_generator
    state = generator.get_state()
    # Only the CPU's generator is seeded, because `torch.manual_seed` would reach for every device.
    generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        generator.set_state(state)


def redraw(inputs: Inputs, seed: int, vocabulary: Mapping[str, int]) -> Inputs:
    """Returns inputs of the same structure, shapes, dtypes and devices with other values. The seed decides the values."""
    # They are drawn on the CPU, so that a seed means the same numbers on every device.
    generator = torch.Generator().manual_seed(seed)
    return _mapped(inputs, lambda path, tensor: _draw_like(tensor, generator, vocabulary.get(path)))


def changed_slightly(inputs: Inputs, seed: int) -> Inputs:
    """Returns the same inputs with a little noise on floating tensors. Their meaning is not known, so nothing else changes.

    The noise is in proportion to each value and stays within the range seen, so zeros, signs, bounds and masks stay what they are.
    """
    generator = torch.Generator().manual_seed(seed)

    def change(_: str, tensor: Tensor) -> Tensor:
        has_noise = _is_drawable(tensor) and (tensor.is_floating_point() or tensor.is_complex())
        return _with_noise(tensor, generator) if has_noise else tensor

    return _mapped(inputs, change)


def copied(value: Any) -> Any:
    """Returns the same structure with tensors and objects of its own, because a model may write into its inputs."""
    return map_tensors(
        own_objects(value), lambda _, tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad)
    )


def same_values(one: Inputs, other: Inputs) -> bool:
    """Returns whether two inputs of the same structure hold the same numbers."""
    pairs = zip(input_tensors(one), input_tensors(other), strict=True)
    return all(torch.equal(_values_of(mine), _values_of(yours)) for (_, mine), (_, yours) in pairs)


def input_shapes(inputs: Inputs) -> tuple[str, ...]:
    """Returns `1×3×224×224 float32`, or `input_ids 1×128 int64` if the input has a name."""
    args, kwargs = inputs
    found = tensors_within(args) + tensors_within(kwargs)
    lone = len(found) == 1 and not kwargs
    shapes = []
    for path, tensor in found:
        size = "×".join("*" if length is None else str(length) for length in shape_of(tensor)) or "scalar"
        shapes.append(f"{'' if lone else f'{path} '}{size} {str(tensor.dtype).removeprefix('torch.')}")
    return tuple(shapes)


def input_tensors(inputs: Inputs) -> list[tuple[str, Tensor]]:
    """Returns every tensor with its path in the positional or in the keyword arguments."""
    return [pair for side in inputs for pair in named_tensors(side)]


def _mapped(inputs: Inputs, change: Callable[[str, Tensor], Tensor]) -> Inputs:
    args, kwargs = inputs
    return map_tensors(args, change), map_tensors(kwargs, change)


def _values_of(tensor: Tensor) -> Tensor:
    """Returns the numbers a tensor stores, whatever its layout."""
    if tensor.is_nested:
        return torch.cat([row.flatten() for row in tensor.unbind()])
    # The dense form of a sparse tensor might not fit into memory, so we take the stored values.
    return stored(tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor)[0]


def _is_drawable(tensor: Tensor) -> bool:
    """Returns whether it is a dense tensor with dimensions. Scalars are settings, and other layouts hold more than values."""
    return is_plain(tensor) and tensor.ndim > 0 and tensor.numel() > 0


def _with_noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    values = tensor.detach()
    if not bool(values.isfinite().all()):
        return tensor  # this is a mask with -inf
    noise = (NOISE * torch.randn(values.shape, generator=generator)).to(values.device)
    if values.is_complex():
        changed = values * (1 + noise)
    # If all values are alike, noise that stays within their range would change nothing.
    elif _says_nothing(values):
        changed = values + noise
    else:
        changed = (values.float() * (1 + noise)).clamp(values.min().item(), values.max().item())
    return torch.empty_like(values).copy_(changed).requires_grad_(tensor.requires_grad)


def _draw_like(tensor: Tensor, generator: torch.Generator, vocabulary: int | None) -> Tensor:
    """Returns another draw of the same kind. Scalars, booleans, masks and other layouts stay as they are."""
    if not _is_drawable(tensor) or tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        drawn = _draw_floating(tensor, generator)
    else:
        low, high = (0, vocabulary - 1) if vocabulary else (int(tensor.min()), int(tensor.max()))
        if vocabulary is None and low >= 0 and high <= 1:
            return tensor  # this is a mask, which might hide everything if it were drawn anew
        drawn = torch.randint(low, high + 1, tensor.shape, generator=generator)
    # Copying into an empty twin keeps the strides, so a channels-last input stays one.
    return torch.empty_like(tensor, requires_grad=False).copy_(drawn).requires_grad_(tensor.requires_grad)


def _draw_floating(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.is_complex():
        return torch.randn(tensor.shape, generator=generator, dtype=torch.complex64)
    values = tensor.detach().float()
    if not bool(values.isfinite().all()):
        # This is a mask with -inf, or an input that is broken, which the result should show.
        return tensor.detach()
    drawn = _draw_normal(tensor.shape, generator)
    if _says_nothing(values):
        return drawn
    drawn = drawn * values.std().item() + values.mean().item()
    low, high = values.min().item(), values.max().item()
    # A model fed with pixels or probabilities may take a root or a logarithm, so values stay on the side of zero that was given.
    return drawn.clamp(low, high) if low >= 0 or high <= 0 else drawn


def _draw_normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Returns standard normal values. In images half of their variance is shared by each quarter of the picture.

    To a network that ends in average pooling all pictures of pure noise look alike: its output hardly depends on the input,
    and rounding errors drown what little does. Quarters that differ bring the dependence back.
    """
    drawn = torch.randn(shape, generator=generator)
    if len(shape) < 4:
        return drawn
    quarters = torch.randn((*shape[:-2], 2, 2), generator=generator)
    rows, columns = (torch.arange(size) * 2 // size for size in shape[-2:])
    # `index_select` is not used, because its many small parallel parts take seconds where other processes keep the processors busy.
    return (drawn + quarters[..., rows[:, None], columns]) * math.sqrt(0.5)


def _says_nothing(tensor: Tensor) -> bool:
    """Returns whether these values have no spread that a draw could follow."""
    values = tensor.detach().float()
    spread = values.std().item() if values.numel() > 1 else 0.0
    return not 0.0 < spread < float("inf")
