"""The least bytes an operator must move: each distinct input and output once, views free, stride-0 dimensions once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from redline.bench.count.kinds import Reads

Region = tuple[int, int, tuple[int, ...], tuple[int, ...]]
"""Which part of which storage a tensor shows."""


def tensors_in(value: Any) -> Iterator[Tensor]:
    """An operator's arguments are tensors, or lists of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


def tensor_bytes(tensor: Tensor) -> int:
    if tensor.layout != torch.strided:
        return int(tensor.numel()) * tensor.element_size()
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        if stride:
            elements *= int(size)
        elif size == 0:
            return 0
    return elements * tensor.element_size()


def region_of(tensor: Tensor) -> Region | None:
    if tensor.layout != torch.strided:
        return None
    try:
        storage = tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a subclass without a storage of its own
        return None
    return storage, int(tensor.storage_offset()), tuple(tensor.shape), tuple(tensor.stride())


def distinct(tensors: Iterable[Tensor]) -> list[tuple[Region | None, Tensor]]:
    found: dict[Any, tuple[Region | None, Tensor]] = {}
    for tensor in tensors:
        region = region_of(tensor)
        found.setdefault(region if region is not None else id(tensor), (region, tensor))
    return list(found.values())


def read_bytes(inputs: list[tuple[Region | None, Tensor]], reads: Reads, written: int) -> list[int]:
    """What must be read of each distinct input."""
    sizes = [tensor_bytes(tensor) for _, tensor in inputs]
    if reads == "nothing":
        return [0] * len(sizes)
    if reads == "not self" and sizes:
        return [0, *sizes[1:]]
    if reads == "gathered" and sizes:
        return [min(sizes[0], written), *sizes[1:]]
    return sizes


class Touched:
    """How much of each weight, buffer and input of the model some operator looks at."""

    def __init__(self, leaves: Iterable[Tensor]) -> None:
        self._held = list(leaves)  # kept alive, so that no later tensor takes the place of one of them
        self._sizes: dict[int, int] = {}
        self._parts: dict[int, dict[Region, int]] = {}
        for leaf in self._held:
            region = region_of(leaf)
            if region is not None:
                self._sizes[region[0]] = max(self._sizes.get(region[0], 0), leaf.untyped_storage().nbytes())

    def look(self, region: Region | None, size: int) -> None:
        if region is not None and region[0] in self._sizes and size:
            parts = self._parts.setdefault(region[0], {})
            parts[region] = max(parts.get(region, 0), size)

    def owns(self, tensor: Tensor) -> bool:
        region = region_of(tensor)
        return region is not None and region[0] in self._sizes

    def bytes(self) -> int:
        return sum(min(self._sizes[storage], sum(parts.values())) for storage, parts in self._parts.items())
