"""This module says where the inputs hold their items, how that is known, and how to take other items. The items are the batch.

The contract: the first input holds the items, a tensor along its axis 0, a list as its entries. Whatever else has as many entries
along its own axis 0, or is a list as long, holds them too. The rest, such as a table of positions, belongs to all items. One run
proves it: given twice the items, the model must answer twice as much, and the same for each item. An axis of time, of neighbours or
of channels does not pass that. Other readings are not tried: a person names the axis (`batch_axis`), or the factory takes the batch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.inputs import Inputs, copied, input_tensors
from redline.bench.workload.structure import children, join, map_leaves, map_tensors, named_tensors
from redline.model.errors import BenchError, SpecError

LIST = "list"
"""This stands in place of an axis if the list itself holds one entry per item."""
Axes = dict[str, int | str]
"""It gives the axis of a tensor, or `LIST`, by the path in the inputs."""

SAME = {torch.float16: 3e-2, torch.bfloat16: 3e-2}
"""Two answers for one item are the same if they differ by less than this share; `EXACT` holds for other number formats."""
EXACT = 1e-3
"""A batch of another size is summed in another order, which moves fp32 by 1e-6 a layer; an axis that is no batch moves all."""


def contract_axes(inputs: Inputs) -> Axes:
    """Returns where the items are by the contract. It is empty if the inputs hold neither a tensor nor a list of items."""
    holders = [holder for side in inputs for holder in _holders(side, "")]
    return {path: axis for path, axis, length in holders if length == holders[0][2]}


def declared_axes(axis: Any, inputs: Inputs) -> Axes:
    """Returns the axis that a person gave, for every tensor of the inputs."""
    if not isinstance(axis, int) or isinstance(axis, bool):
        raise SpecError(f"batch_axis must be a number, got {axis!r}; for other inputs let the factory take batch")
    axes: Axes = {}
    for path, tensor in input_tensors(inputs):
        if not -tensor.ndim <= axis < tensor.ndim:
            raise SpecError(f"batch_axis {axis}: input {path} has {tensor.ndim} dimensions")
        axes[path] = axis % tensor.ndim
    if not axes:
        raise SpecError(f"batch_axis {axis}: the inputs hold no tensor")
    return axes


def proven_axes(model: nn.Module, inputs: Inputs) -> Axes | str:
    """Returns the axes of the contract if one run of the model confirms them, else a clause that says why they are not known."""
    tensors = (*model.parameters(), *(tensor for _, tensor in named_tensors(inputs)))
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        raise BenchError("unsupported", "a model without values cannot be asked for its batch")
    axes = contract_axes(inputs)
    if not axes:
        return "the inputs hold neither a tensor nor a list of items"
    path, axis = next(iter(axes.items()))
    where = f"{'the list' if axis == LIST else 'axis 0'} of input {path}"
    size = size_along(inputs, axes)
    try:
        base = _answer(model, inputs)
        # All further items are copies of the first one, so that a mean over the items changes too.
        has_axes = any(tensor.ndim for _, tensor in named_tensors(base))
        rows = [*range(size), *([0] * size if has_axes else range(size))]
        verdicts = list(_compare(_answer(model, select_items(inputs, axes, rows)), base, rows))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"the model does not take twice the items along {where}: {one_line(error)}"
    if not verdicts:
        return f"the model does not answer twice as much for twice the items along {where}"
    return axes if all(verdicts) else f"the model does not answer for each item alone along {where}"


def size_along(inputs: Inputs, axes: Axes) -> int:
    """Returns how many items there are. Raises a `SpecError` if the axes disagree."""
    sizes: dict[str, int] = {}

    def look(path: str, leaf: Any) -> Any:
        if path in axes:
            sizes[path] = len(leaf) if axes[path] == LIST else leaf.shape[axes[path]]
        return leaf

    for side in inputs:
        map_leaves(side, look, until=axes.__contains__)
    if len(set(sizes.values())) != 1:
        found = ", ".join(f"{size} at {path or 'the input'}" for path, size in sizes.items())
        raise SpecError(f"batch_axis: the inputs do not agree on the batch: {found}")
    return next(iter(sizes.values()))


def select_items(inputs: Inputs, axes: Axes, rows: Sequence[int]) -> Inputs:
    """Returns the inputs with these items, in this order. An item may be taken more than once."""

    def change(path: str, leaf: Any) -> Any:
        axis = axes.get(path)
        if axis == LIST:
            return type(leaf)([map_tensors(leaf[row], lambda _, tensor: tensor.clone()) for row in rows])
        if isinstance(leaf, Tensor) and isinstance(axis, int):
            chosen = leaf.detach().index_select(axis, torch.tensor(rows, device=leaf.device))
            return chosen.requires_grad_(leaf.requires_grad)
        return leaf

    args, kwargs = (map_leaves(side, change, until=lambda path: axes.get(path) == LIST) for side in inputs)
    return args, kwargs


def resize(inputs: Inputs, axes: Axes, size: int) -> Inputs:
    """Returns the first `size` items. If there are fewer they are repeated, because a copy of a valid item is valid."""
    old = size_along(inputs, axes)
    return inputs if old == size else select_items(inputs, axes, [row % old for row in range(size)])


def _holders(value: Any, path: str) -> Iterator[tuple[str, int | str, int]]:
    """Yields path, axis and length of whatever may hold items. Numbers in a list are settings, such as a size."""
    if isinstance(value, Tensor):
        if value.ndim:
            yield path, 0, value.shape[0]
    elif isinstance(value, list) and value and (named_tensors(value) or all(isinstance(part, str) for part in value)):
        yield path, LIST, len(value)
    else:
        for key, child in children(value) or ():
            yield from _holders(child, join(path, key))


def _answer(model: nn.Module, inputs: Inputs) -> Any:
    """Returns the model's answer in evaluation mode. What the model keeps between calls, and the random state, stay as they were."""
    modes = [(module, module.training) for module in model.modules()]
    # The copy shares the weights, because a second set of them might not fit on the device.
    try:
        twin = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    # The model may hold something that cannot be copied: a lock, a file, a function that closes over modules.
    except Exception:
        twin = model
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            args, kwargs = copied(inputs)
            return twin.eval()(*args, **kwargs)
    finally:
        for module, training in modes:
            module.training = training


def _compare(found: Any, base: Any, rows: Sequence[int]) -> Iterator[bool]:
    """Yields for each part of the answer that grew with the items, or changed otherwise, whether it is the same per item."""
    if isinstance(base, Tensor) and isinstance(found, Tensor):
        yield from _compare_tensors(found, base, rows)
        return
    ours, theirs = children(found) or [], children(base) or []
    if isinstance(base, list) and 2 * len(theirs) == len(ours) == len(rows):
        pairs = [(mine, theirs[row][1]) for (_, mine), row in zip(ours, rows, strict=True)]
        yield all(_is_same(mine, yours) for mine, yours in pairs)
    elif [key for key, _ in ours] != [key for key, _ in theirs]:
        yield False
    else:
        for (_, mine), (_, yours) in zip(ours, theirs, strict=True):
            yield from _compare(mine, yours, rows)


def _compare_tensors(found: Tensor, base: Tensor, rows: Sequence[int]) -> Iterator[bool]:
    # A tensor without dimensions is a loss: the sum or the mean over the items, or one beside answers that tell more.
    if not base.ndim:
        if rows[: len(rows) // 2] == rows[len(rows) // 2 :]:
            yield _is_same(found, base) or _is_same(found, 2 * base)
        return
    # The scores of two towers have the items along two axes.
    grown = [axis for axis, length in enumerate(base.shape) if found.shape[axis : axis + 1] == (2 * length,)]
    expected = base
    for axis in grown:
        if 2 * base.shape[axis] == len(rows):
            expected = expected.index_select(axis, torch.tensor(rows, device=base.device))
    if grown or not _is_same(found, expected):
        yield _is_same(found, expected)


def _is_same(one: Any, other: Any) -> bool:
    """Returns whether two answers hold the same tensors."""
    ours, theirs = named_tensors(one), named_tensors(other)
    return len(ours) == len(theirs) and all(map(_is_close, (part for _, part in ours), (part for _, part in theirs)))


def _is_close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    ours, theirs = (part.detach().to(torch.complex128 if part.is_complex() else torch.float64) for part in (one, other))
    distance, whole = torch.linalg.vector_norm(ours - theirs), torch.linalg.vector_norm(theirs)
    return bool(distance <= SAME.get(other.dtype, EXACT) * whole)
