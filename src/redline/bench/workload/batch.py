"""Along which axes inputs hold items: as a person declares them, how many items there are, and how to take others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from redline.bench.workload.inputs import Inputs
from redline.bench.workload.structure import children, join, map_leaves, map_tensors, named_tensors
from redline.errors import SpecError, closest

LIST = "list"
"""In place of an axis: the list itself holds one entry per item."""
Axes = dict[str, int | str]
"""By path in the inputs: the axis of a tensor, or `LIST`."""


def declared_axes(declared: Any, inputs: Inputs) -> Axes:
    """The axes a person gave: one for all tensors, or a structure like the inputs; None leaves what lies below it alone."""
    args, kwargs = inputs
    axes: Axes = {}
    if isinstance(declared, Mapping) and len(args) == 1 and "0" not in declared:
        _declare(declared, args[0], "0", axes)  # the one input has parts with names
    elif isinstance(declared, Mapping | list | tuple):
        _declare(declared, kwargs or args, "", axes)
    else:
        _declare(declared, args, "", axes)
        _declare(declared, kwargs, "", axes)
    if not axes:
        raise SpecError(f"batch_axis {declared!r} names no tensor of the inputs")
    return axes


def _declare(declared: Any, value: Any, path: str, axes: Axes) -> None:
    """Collect the axes of `value`, which stands at `path`."""
    where = f"input {path}" if path else "the inputs"
    if declared is None:
        return
    parts = children(value)
    if declared == LIST and path:
        if not isinstance(value, list | tuple):
            raise SpecError(f"batch_axis: {where} is {type(value).__name__}, not a list")
        axes[path] = LIST
    elif isinstance(declared, Mapping):
        names = dict(parts or ())
        for key, below in declared.items():
            if key not in names:
                near = closest(str(key), names)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise SpecError(f"batch_axis: {where} has no part {key!r}{hint}")
            _declare(below, names[key], join(path, str(key)), axes)
    elif isinstance(declared, list | tuple):
        if len(parts or ()) != len(declared):
            raise SpecError(f"batch_axis: {where} has {len(parts or ())} parts, but {len(declared)} axes were given")
        for (key, child), below in zip(parts or (), declared, strict=True):
            _declare(below, child, join(path, key), axes)
    elif isinstance(declared, int) and not isinstance(declared, bool):
        if isinstance(value, Tensor):
            if not -value.ndim <= declared < value.ndim:
                raise SpecError(f"batch_axis {declared}: {where} has {value.ndim} dimensions")
            axes[path] = declared % value.ndim
        for key, child in parts or ():
            _declare(declared, child, join(path, key), axes)
    elif declared == LIST:
        for key, child in parts or ():
            _declare(LIST, child, key, axes)
    else:
        raise SpecError(f"batch_axis must be a number, 'list', or a structure of them, got {declared!r}")


def size_along(inputs: Inputs, axes: Axes) -> int:
    """How many items there are; a `SpecError` where the axes disagree."""
    sizes = {path: size for path, axis, size in extents(inputs) if axes.get(path) == axis}
    if len(set(sizes.values())) != 1:
        told = ", ".join(f"{size} at {path or 'the input'}" for path, size in sizes.items())
        raise SpecError(f"batch_axis: the inputs do not agree on the batch: {told}")
    return next(iter(sizes.values()))


def select_items(inputs: Inputs, axes: Axes, rows: Sequence[int]) -> Inputs:
    """The inputs with these items, in this order; an item may be taken more than once."""
    args, kwargs = inputs
    return _selected(args, axes, rows), _selected(kwargs, axes, rows)


def resize(inputs: Inputs, axes: Axes, size: int) -> Inputs:
    """The first `size` items; where there are fewer, they are repeated: a copy of a valid item is valid."""
    old = size_along(inputs, axes)
    return inputs if old == size else select_items(inputs, axes, [row % old for row in range(size)])


def _selected(value: Any, axes: Axes, rows: Sequence[int]) -> Any:
    def change(path: str, leaf: Any) -> Any:
        axis = axes.get(path)
        if axis == LIST:
            return type(leaf)([map_tensors(leaf[row], lambda _, tensor: tensor.clone()) for row in rows])
        if isinstance(leaf, Tensor) and isinstance(axis, int):
            chosen = leaf.detach().index_select(axis, torch.tensor(rows, device=leaf.device))
            return chosen.requires_grad_(leaf.requires_grad)
        return leaf

    return map_leaves(value, change, until=lambda path: axes.get(path) == LIST)


def extents(inputs: Inputs) -> list[tuple[str, int | str, int]]:
    """Path, axis and size of whatever could count items: axes of tensors, and lists below the top."""
    args, kwargs = inputs
    return [found for side in (args, kwargs) for found in extents_in(side, "", top=True)]


def extents_in(value: Any, path: str, *, top: bool = False) -> Iterator[tuple[str, int | str, int]]:
    if isinstance(value, Tensor):
        # A ragged axis has no size that could be compared.
        yield from ((path, axis, size) for axis, size in enumerate(value.shape) if type(size) is int)
        return
    if isinstance(value, list | tuple) and not hasattr(value, "_fields") and not top and _may_be_items(value):
        yield path, LIST, len(value)
    for key, child in children(value) or ():
        yield from extents_in(child, join(path, key))


def _may_be_items(entries: Sequence[Any]) -> bool:
    """Tensors or what holds them, or texts; numbers are settings, such as a size."""
    return bool(named_tensors(entries)) or (bool(entries) and all(isinstance(entry, str) for entry in entries))
