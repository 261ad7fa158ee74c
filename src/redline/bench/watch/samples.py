"""How many samples a batch holds, or a call of a model was fed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sized
from typing import Any

import torch
from torch._C import _functorch as functorch
from torch.utils.data import IterableDataset

from .models import with_children

Tensor = torch.Tensor


class Question:
    """One call of a model is asked whether the first dimension of its input is the batch.

    Layers that take sequences say that their batch is the second dimension, but only a call shows what they are given: a model may
    turn its input before. What comes out shows whether a vector was one sample.
    """

    def __init__(self, first: torch.Tensor, layers: list[Any]) -> None:
        self._first = first
        self._layers = layers
        self._taken: tuple[int, ...] = ()
        """The shape that the first of these layers was given."""
        for layer in layers:
            vars(layer)["forward"] = self._listening(layer.forward)

    def _listening(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def listening(*args: Any, **kwargs: Any) -> Any:
            given = next(tensors_in((args, kwargs)), None)
            if given is not None and not self._taken:
                self._taken = tuple(given.shape)
            return forward(*args, **kwargs)

        return listening

    def close(self) -> None:
        """Leaves the layers as they were before."""
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def is_second(self, output: Any) -> bool:
        """True if the second dimension is the batch. A model that returns a row for each of the first does not see it so."""
        shape, result = tuple(self._first.shape), next(tensors_in(output), None)
        if len(shape) < 2 or len(self._taken) != 3 or shape[0] == shape[1] or self._taken[1] != shape[1]:
            return False
        return result is None or result.dim() > 2 or not result.dim() or result.shape[0] != shape[0]

    def single(self, output: Any) -> tuple[int, int] | None:
        """Dimensions and size of the input if it was one sample: a vector for whose numbers no rows come out."""
        first, result = self._first, next(tensors_in(output), None)
        is_vector = first.dim() == 1 and first.is_floating_point()
        if is_vector and result is not None and result.dim() > 0 and result.shape[0] != first.shape[0]:
            return 1, first.shape[0]
        return None


class Samples:
    """Counts how many samples a call of a model is fed.

    A layer of torch takes `(features,)` as well as `(batch, features)`, and `(channels, height, width)` likewise, so the layers
    say what may be one sample without a batch.
    """

    def __init__(self) -> None:
        self._singles: dict[int, frozenset[tuple[int, int]]] = {}
        """Dimensions and leading size of inputs that may be one sample, by the ids of models."""
        self._asked = set[int]()
        self._second = set[int]()
        """Models whose batch is the second dimension of their input."""

    def forget(self) -> None:
        """To be called when modules were made: they may have the ids of others that are gone."""
        self._singles.clear()
        self._asked.clear()
        self._second.clear()

    def fed(self, module: Any, args: Any, kwargs: Any) -> int:
        """The batch dimension of the first tensor that has one."""
        first = _first_of(args, kwargs)
        if first is None:
            return 0
        shape = first.shape
        if id(module) in self._second and len(shape) > 1:
            return shape[1]
        singles = self._singles.get(id(module))
        if singles is None:
            singles = self._ask(module)
        return 1 if (len(shape), shape[0]) in singles and _is_single(module, first) else shape[0]

    def question(self, module: Any, args: Any, kwargs: Any) -> Question | None:
        """A question that the next call answers; None if it cannot tell more than is known."""
        first = _first_of(args, kwargs)
        if first is None or id(module) in self._asked:
            return None
        self._asked.add(id(module))
        tree = with_children(module)
        if any(vars(one).get("_compiled_call_impl") or "dynamo_ctx" in vars(one) for one in tree):
            return None
        layers = [one for one in tree if vars(one).get("batch_first") is False and "forward" not in vars(one)]
        return Question(first, layers)

    def learn(self, module: Any, question: Question, output: Any) -> None:
        if question.is_second(output):
            self._second.add(id(module))
        elif (single := question.single(output)) is not None:
            self._singles[id(module)] = self._ask(module) | {single}

    def _ask(self, module: Any) -> frozenset[tuple[int, int]]:
        inputs = {shape for one in with_children(module) if (shape := _input_of(one)) is not None}
        # If a layer takes one feature, a vector is a batch of numbers, however wide the layers after it are.
        singles = frozenset(shape for shape in inputs if shape[1] > 1 and (shape[0], 1) not in inputs)
        if all(width > 0 for _, width in inputs):  # a lazy layer does not know its width yet
            self._singles[id(module)] = singles
        return singles


def _is_single(module: Any, tensor: torch.Tensor) -> bool:
    """True if an input that has the shape of a single sample is one, and not a batch for another layer."""
    if not tensor.is_floating_point():  # indices, as of words
        return False
    return tensor.dim() == 1 or (1, tensor.shape[-1]) not in {_input_of(one) for one in with_children(module)}


def _input_of(layer: Any) -> tuple[int, int] | None:
    """Dimensions and leading size of one sample for this layer, where it says so."""
    own = vars(layer)
    if isinstance(width := own.get("in_features"), int):
        return 1, width
    if isinstance(width := own.get("in_channels"), int) and isinstance(kernel := own.get("kernel_size"), tuple):
        return len(kernel) + 1, width
    return None


def tensors_in(structure: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    if isinstance(structure, torch.Tensor):
        yield structure
    elif depth < 5:
        if isinstance(structure, Mapping):
            structure = list(structure.values())
        elif hasattr(structure, "__dataclass_fields__"):
            structure = list(getattr(structure, "__dict__", {}).values())
        if isinstance(structure, (list, tuple)):
            for one in structure[:16]:
                yield from tensors_in(one, depth + 1)


def _first_of(args: Any, kwargs: Any) -> torch.Tensor | None:
    """The first tensor that has a dimension."""
    first = args[0] if args else None
    if type(first) is Tensor and first.shape:  # most models are called with a batch
        return first
    return next((one for one in tensors_in((args, kwargs)) if one.dim()), None)


def samples_given(args: Any, kwargs: Any) -> int:
    """The samples given to a function that computes a loss: by the first tensor that is no weight."""
    given = (one for one in tensors_in((args, kwargs)) if one.dim() and not one.requires_grad)
    return next((one.shape[0] for one in given), 0)


def samples_mapped(args: Any, kwargs: Any) -> int:
    """The number of samples over which `torch.func.vmap` maps a call that sees one of them, or one batch of them."""
    inner, times = next(tensors_in((args, kwargs)), None), 1
    while inner is not None and functorch.is_functorch_wrapped_tensor(inner):
        outer, inner = inner, functorch.get_unwrapped(inner)
        if functorch.is_batchedtensor(outer):
            times *= inner.shape[functorch.maybe_get_bdim(outer)]
    return times


def batch_samples(batch: Any, iterator: Any) -> float:
    """How many samples a loader's batch holds.

    Its sampler knows the size of a whole batch; the last one of an epoch may be smaller, which its tensors say. Where
    they say something else, as packed sequences and graphs do, the sampler is right.
    """
    planned = getattr(getattr(iterator, "_index_sampler", None), "batch_size", None)
    first = batch[0] if type(batch) in (list, tuple) and batch else None
    if planned is not None and type(first) is Tensor and (shape := first.shape) and shape[0] == planned:
        return float(planned)  # as most batches are
    sizes = [one.shape[0] for one in tensors_in(batch) if one.dim()]
    if not isinstance(planned, int):
        return float(max(sizes, key=sizes.count)) if sizes else float(len(batch)) if isinstance(batch, list) else 1.0
    if planned in sizes or not sizes:
        return float(planned)
    if (rest := _last_batch(iterator, planned)) in sizes:
        return float(rest)
    smaller = [size for size in sizes if size < planned]
    return float(max(smaller, key=smaller.count)) if smaller else float(planned)


def _last_batch(iterator: Any, planned: int) -> int:
    """The sampler says how large an epoch's last batch is; 0 if it does not know."""
    sampler = getattr(iterator._index_sampler, "sampler", None)
    return len(sampler) % planned if isinstance(sampler, Sized) else 0


def planned_batches(loader: Any) -> int | None:
    """The sampler says how many batches a pass over the loader has; None if it does not know.

    The loader itself is not asked: one of a stream warns later when its length was asked for and is wrong.
    """
    sampler = getattr(loader, "_index_sampler", None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or not isinstance(sampler, Sized):
        return None
    try:
        return len(sampler)
    except Exception:  # the script's own sampler, which nobody else may ask
        return None
