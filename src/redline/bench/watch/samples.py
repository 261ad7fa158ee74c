"""This module finds how many samples a batch holds, or a call of a model was fed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import IterableDataset

from .models import with_children

Tensor = torch.Tensor


class Fed:
    """It counts how many samples a call of a model is fed, by the leading dimension of its first tensor.

    Recurrent and attention layers say that their batch is the second dimension, but only a call shows what they are given:
    a model may turn its input before. So one call of each model is listened to.
    """

    def __init__(self) -> None:
        self._second: dict[int, bool] = {}
        """It says for a model, by its id, whether the batch is the second dimension of its input."""

    def ask(self, module: Any, args: Any, kwargs: Any) -> Any:
        """Listens to the layers in this call until the handle that is returned is removed. Returns None if nothing is to be learned."""
        tree = [] if id(module) in self._second else list(with_children(module))
        self._second.setdefault(id(module), False)
        layers = {id(one) for one in tree if getattr(one, "batch_first", None) is False}
        given = next(tensors_in((args, kwargs)), None)
        if not layers or given is None or given.dim() < 2 or given.shape[0] == given.shape[1]:
            return None
        if any(vars(one).get("_compiled_call_impl") or "dynamo_ctx" in vars(one) for one in tree):
            return None

        def listen(layer: Any, inputs: Any) -> None:
            if id(layer) in layers:
                layers.clear()
                taken = next(tensors_in(inputs), None)
                self._second[id(module)] = taken is not None and taken.shape[:2] == given.shape[:2]

        return register_module_forward_pre_hook(listen)

    def count(self, module: Any, args: Any, kwargs: Any) -> float:
        first = args[0] if args else None
        # Most models are called with a batch as their first argument.
        if type(first) is not Tensor or not first.dim():
            first = next((one for one in tensors_in((args, kwargs)) if one.dim()), None)
        if first is None:
            return 0.0
        if first.dim() == 1 and first.is_floating_point():  # this is a state without a batch, as agents see it
            return 1.0
        return float(first.shape[first.dim() > 1 and self._second.get(id(module), False)])


def tensors_in(structure: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(structure, Tensor):
        yield structure
    elif depth < 5:
        if isinstance(structure, Mapping):
            structure = list(structure.values())
        elif hasattr(structure, "__dataclass_fields__"):
            structure = list(vars(structure).values())
        if isinstance(structure, (list, tuple)):
            for one in structure[:16]:
                yield from tensors_in(one, depth + 1)


def batch_samples(batch: Any, iterator: Any) -> float:
    """Returns how many samples a loader's batch holds.

    Its sampler knows the size of a whole batch. The last one of an epoch may be smaller, which its tensors show. Where they
    show something else, as packed sequences and graphs do, the sampler is right.
    """
    sampler = getattr(iterator, "_index_sampler", None)
    planned = getattr(sampler, "batch_size", None)
    first = batch[0] if type(batch) in (list, tuple) and batch else None
    if planned is not None and type(first) is Tensor and (shape := first.shape) and shape[0] == planned:
        return float(planned)  # most batches have this size
    sizes = [one.shape[0] for one in tensors_in(batch) if one.dim()]
    if not isinstance(planned, int):
        return float(max(sizes, key=sizes.count)) if sizes else float(len(batch)) if isinstance(batch, list) else 1.0
    indices = getattr(sampler, "sampler", None)
    rest = len(indices) % planned if isinstance(indices, Sized) else 0
    smaller = [size for size in sizes if size < planned]
    if planned in sizes or not smaller:
        return float(planned)
    return float(rest if rest in sizes else max(smaller, key=smaller.count))


def planned_batches(loader: Any) -> int | None:
    """Returns how many batches a pass over the loader has, as its sampler says. Returns None if the sampler does not know.

    The loader itself is not asked, because one of a stream warns later if its length was asked for and is wrong.
    """
    sampler = getattr(loader, "_index_sampler", None)
    if isinstance(getattr(loader, "dataset", None), IterableDataset) or not isinstance(sampler, Sized):
        return None
    try:
        return len(sampler)
    except Exception:  # the sampler is the script's own and may raise anything
        return None
