"""Which axes of the inputs hold items? The model is asked; positions say nothing.

An axis holds items when the model, given fewer of them in another order, answers the same for each. An axis of time,
of neighbours or of channels does not survive that. Where no axis or more than one does, the batch is unknown.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.inputs import (
    LIST,
    Axes,
    Inputs,
    changed_slightly,
    copied,
    extents,
    extents_in,
    select_items,
    size_along,
)
from redline.bench.workload.signal import awaken, is_dormant
from redline.bench.workload.structure import WholeDispatchMode, children, join, map_leaves, named_tensors
from redline.model.errors import BenchError

MOST_CANDIDATES = 12
"""Ways to read the inputs that are tried on the model; more than this and nothing is claimed."""
SAME = 1e-3
"""Outputs this close, relative to how far items differ, are the same; a batch of another size rounds differently."""
SAME_IN_HALF = 3e-2
NO_SPREAD = 1e-6
"""Items whose outputs differ by less than this, relative to their size, are all alike and prove nothing."""


def find_axes(model: nn.Module, inputs: Inputs) -> Axes | str:
    """The axes along which the model treats items independently of each other, or why they cannot be told."""
    tensors = (*model.parameters(), *(tensor for _, tensor in named_tensors(inputs)))
    if any(tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in tensors):
        raise BenchError("unsupported", "a model without values cannot be asked for its batch")
    try:
        call = _Caller(model)
        base = call(inputs)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"asking the model failed: {one_line(error)}"
    is_loss = _is_only_loss(base)
    candidates = list(_candidates(inputs, None if is_loss else base))
    if len(candidates) > MOST_CANDIDATES:
        return "too many axes of the inputs could be the batch"
    holds = _adds_up if is_loss else _holds_items
    found = [axes for axes in candidates if holds(call, inputs, axes, base)]
    if len(found) == 1:
        return found[0]
    if not found:
        return "no axis of the inputs holds items that the model treats one by one"
    named = len({path for axes in found for path in axes}) > 1
    return f"the batch could be {' or '.join(_told(axes, named) for axes in found)}"


class _Caller:
    """Calls a fresh copy of the model each time: whatever a model keeps between calls stays as it was."""

    def __init__(self, model: nn.Module) -> None:
        self._model = _twin(model, [weight for weight in model.parameters() if not is_dormant(weight)]).eval()
        awaken(self._model)  # a head of zeros would answer the same for every item
        self._device = next((weight.device for weight in model.parameters()), torch.device("cpu"))

    def __call__(self, inputs: Inputs) -> Any:
        devices = [self._device] if self._device.type not in ("cpu", "meta") else []
        with torch.random.fork_rng(devices=devices), torch.no_grad(), _AllAlike():
            torch.manual_seed(0)
            args, kwargs = copied(inputs)
            return _twin(self._model, list(self._model.parameters()))(*args, **kwargs)


class _AllAlike(WholeDispatchMode):
    """Makes all random draws alike: an item must not answer differently because it drew other numbers elsewhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self.opened(func, args, kwargs)
        result = func(*args, **(kwargs or {}))
        # Attention and dropout have the tag as well, but compute something: they draw only while training.
        draws = torch.Tag.nondeterministic_seeded in func.tags and not any(
            word in func.__name__ for word in ("attention", "dropout")
        )
        return pytree.tree_map_only(Tensor, _level, result) if draws else result


def _level(drawn: Tensor) -> Tensor:
    return drawn.fill_(0.5 if drawn.is_floating_point() or drawn.is_complex() else 0)


def _twin(model: nn.Module, shared: list[nn.Parameter]) -> nn.Module:
    """A copy that shares these weights, which may fill the device. What cannot be copied is shared too."""
    try:
        return copy.deepcopy(model, {id(weight): weight for weight in shared})
    except Exception:
        return _shallow_twin(model)


def _shallow_twin(module: nn.Module) -> nn.Module:
    """For a module that holds a lock, a file or the like: only its own attributes and buffers are copies."""
    twin = copy.copy(module)
    twin._modules = {name: child and _shallow_twin(child) for name, child in module._modules.items()}
    twin._buffers = {name: buffer if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
    twin._parameters = {
        name: nn.Parameter(weight.detach().clone()) if weight is not None and is_dormant(weight) else weight
        for name, weight in module._parameters.items()
    }
    return twin


def _candidates(inputs: Inputs, base: Any) -> Iterator[Axes]:
    """Every way to read the inputs: one size, and for each input that has it one of the axes of that size.

    `base` None: the output is a loss, which has no axes.
    """
    by_size: dict[int, dict[str, list[int | str]]] = {}
    for path, axis, size in extents(inputs):
        by_size.setdefault(size, {}).setdefault(path, []).append(axis)
    known: list[Axes] = []
    answered = set(by_size) if base is None else {size for _, _, size in extents_in(base, "")}
    for size, axes in sorted(by_size.items()):
        # An output without an axis of this size does not answer per item.
        if size == 0 or size not in answered:
            continue
        # A pair of tensors with two items each is probably no list of two items, and texts may be names of classes: both
        # readings are tried.
        options = [
            [*each, None] if LIST in each and _is_open(path, axes, inputs) else each for path, each in axes.items()
        ]
        for chosen in product(*options):
            picked = {path: axis for path, axis in zip(axes, chosen, strict=True) if axis is not None}
            reading: Axes = {path: axis for path, axis in picked.items() if not _lies_in_list(path, picked)}
            if reading not in known:
                known.append(reading)
                yield reading


def _is_open(path: str, axes: Mapping[str, Any], inputs: Inputs) -> bool:
    has_inside = any(other.startswith(f"{path}.") for other in axes)
    return has_inside or not any(named_tensors(found) for _, found in _at_axes(inputs, {path: LIST}))


def _lies_in_list(path: str, axes: Mapping[str, int | str]) -> bool:
    """Inside a list that holds the items: its own axes are not the batch."""
    return any(axis == LIST and path.startswith(f"{other}.") for other, axis in axes.items())


def _holds_items(call: _Caller, inputs: Inputs, axes: Axes, base: Any) -> bool:
    try:
        size = size_along(inputs, axes)
        if size == 1:  # one item cannot be selected from: put a slightly different one beside it
            inputs, size = _beside(inputs, axes), 2
            base = call(inputs)
        # Fewer items, in another order: an axis of time or of neighbours does not survive that.
        rows = [1, 0, 1] if size == 2 else list(range(size - 1, -1, -2))
        try:
            found = call(select_items(inputs, axes, rows))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            # Some models take only multiples of a number: twice as many, the last of them again and again.
            rows = [*range(size - 1, -1, -1), *[size - 1] * size]
            found = call(select_items(inputs, axes, rows))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    verdicts = Counter(_compare(found, base, rows, size))
    return verdicts["moved"] > 0 and not verdicts["wrong"]


def _is_only_loss(output: Any) -> bool:
    tensors = [tensor for _, tensor in named_tensors(output)]
    return bool(tensors) and all(tensor.ndim == 0 and tensor.is_floating_point() for tensor in tensors)


def _adds_up(call: _Caller, inputs: Inputs, axes: Axes, base: Any) -> bool:
    """Whether the loss of all items is the mean, or the sum, of the losses of two parts of them."""
    try:
        size = size_along(inputs, axes)
        if size == 1:
            inputs, size = _beside(inputs, axes), 2
            base = call(inputs)
        rows = list(range(size - 1, -1, -2))
        rest = [row for row in range(size) if row not in rows]
        parts = [named_tensors(call(select_items(inputs, axes, part))) for part in (rows, rest)]
        triples = list(zip(named_tensors(base), *parts, strict=True))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return False
    is_shown = False
    for (_, whole), *of_parts in triples:
        one, other = (float(part) for _, part in of_parts)
        spread = abs(one - other)
        if spread <= NO_SPREAD * max(abs(one), abs(other)):
            continue  # two parts with the same loss show nothing
        mean = (one * len(rows) + other * len(rest)) / size
        if min(abs(mean - float(whole)), abs(one + other - float(whole))) > _tolerance(whole) * spread:
            return False
        is_shown = True
    return is_shown


def _beside(inputs: Inputs, axes: Axes) -> Inputs:
    """The one item, and another like it."""
    twice = select_items(inputs, axes, [0, 0])
    other = changed_slightly(inputs, seed=1, flip=True)
    args, kwargs = twice
    others = dict(_at_axes(other, axes))

    def put(path: str, leaf: Any) -> Any:
        axis = axes.get(path)
        if axis == LIST:
            return type(leaf)([leaf[0], others[path][0]])
        if isinstance(leaf, Tensor) and isinstance(axis, int):
            return torch.cat([leaf.narrow(axis, 0, 1), others[path]], dim=axis)
        return leaf

    stop = lambda path: axes.get(path) == LIST  # noqa: E731
    return map_leaves(args, put, until=stop), map_leaves(kwargs, put, until=stop)


def _at_axes(inputs: Inputs, axes: Axes) -> Iterator[tuple[str, Any]]:
    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if path in axes:
            yield path, value
            return
        for key, child in children(value) or ():
            yield from walk(child, join(path, key))

    for side in inputs:
        yield from walk(side, "")


def _compare(found: Any, base: Any, rows: Sequence[int], size: int) -> Iterator[str]:
    """For each part of the output: `moved` with its items, `still`, or `wrong`."""
    if isinstance(base, Tensor) and isinstance(found, Tensor):
        yield _compare_tensors(found, base, rows, size)
        return
    ours, theirs = children(found), children(base)
    if ours is None or theirs is None:
        return  # no tensor: says nothing
    is_list = isinstance(base, list | tuple) and not hasattr(base, "_fields")
    if is_list and len(theirs) == size and len(ours) == len(rows):
        differs = any(_differ(base[row], base[index]) for index, row in enumerate(rows[:size]))
        same = not any(_differ(found[index], base[row]) for index, row in enumerate(rows))
        yield ("moved" if differs else "still") if same else "wrong"
        return
    if [key for key, _ in ours] != [key for key, _ in theirs]:
        yield "wrong"
        return
    for (_, mine), (_, yours) in zip(ours, theirs, strict=True):
        yield from _compare(mine, yours, rows, size)


def _differ(one: Any, other: Any) -> bool:
    """Whether two items of a list of outputs are different."""
    ours, theirs = named_tensors(one), named_tensors(other)
    if [path for path, _ in ours] != [path for path, _ in theirs]:
        return True
    return any(
        mine.shape != yours.shape or _distance(mine, yours) > _tolerance(yours) * max(_norm(yours), 1e-30)
        for (_, mine), (_, yours) in zip(ours, theirs, strict=True)
    )


def _compare_tensors(found: Tensor, base: Tensor, rows: Sequence[int], size: int) -> str:
    if base.ndim == found.ndim == 0:
        return "still"  # the mean loss of a batch says nothing about its items
    if found.shape == base.shape:
        return "still" if _distance(found, base) <= _tolerance(base) * max(_norm(base), 1e-30) else "wrong"
    axes = [axis for axis, length in enumerate(base.shape) if length == size]
    index = torch.tensor(rows, device=base.device)
    for count in range(1, len(axes) + 1):
        for chosen in combinations(axes, count):  # the outputs of two towers have the batch along two axes
            expected, unmoved = base, base
            for axis in chosen:
                expected = expected.index_select(axis, index)
                unmoved = unmoved.index_select(axis, index.new_tensor(range(len(rows))) % size)
            if expected.shape != found.shape:
                continue
            spread = _distance(expected, unmoved)
            if spread <= NO_SPREAD * _norm(expected):
                return "still" if _distance(found, expected) <= SAME * max(_norm(expected), 1e-30) else "wrong"
            if _distance(found, expected) <= _tolerance(base) * spread:
                return "moved"
    return "wrong"


def _tolerance(tensor: Tensor) -> float:
    return SAME_IN_HALF if tensor.dtype in (torch.float16, torch.bfloat16) else SAME


def _distance(one: Tensor, other: Tensor) -> float:
    return _norm(_double(one) - _double(other))


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_double(tensor)))


def _double(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor.resolve_conj()).double() if tensor.is_complex() else tensor.double()


def _told(axes: Axes, named: bool) -> str:
    where = {path: f" of input {path}" if named else "" for path in axes}
    return " with ".join(
        f"the list{where[path]}" if axis == LIST else f"axis {axis}{where[path]}" for path, axis in axes.items()
    )
