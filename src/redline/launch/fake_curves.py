"""Memory curves to search on, drawn at random but with a known truth: what models and allocators really look like."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

from redline.launch.fake_memory import MIB, MemoryOf, MemoryTruth, convolutional, curve, transformer
from redline.spec import RunSpec


def linear(chance: Random, capacity: int) -> MemoryOf:
    """Inference: weights, and so much per item."""
    weights, item = _weights(chance), _item(chance)
    return curve(lambda batch: weights + item * batch, resident=weights, ease=chance.uniform(1.0, 1.2))


def training(chance: Random, capacity: int) -> MemoryOf:
    """Flat while gradients outweigh activations, then steep: weights and momentum stay throughout."""
    weights, item = _weights(chance), _item(chance)
    return curve(
        lambda batch: 2 * weights + max(item * batch, weights + 0.05 * item * batch),
        resident=2 * weights,
        ease=chance.uniform(1.0, 1.25),
    )


def convex(chance: Random, capacity: int) -> MemoryOf:
    """Bending upwards, as where every item of a batch meets every other."""
    weights, item = _weights(chance), _item(chance)
    largest, bend = (capacity - weights) / item, chance.uniform(0.1, 0.7)

    def needed(batch: int) -> float:
        share = batch / largest
        return weights + (capacity - weights) * ((1 - bend) * share + bend * share**2)

    return curve(needed, resident=weights)


def workspace_kinks(chance: Random, capacity: int) -> MemoryOf:
    """Linear, with steps where a library changes to an algorithm that wants more room."""
    weights, item = _weights(chance), _item(chance)
    steps = [
        (math.exp(chance.uniform(0, math.log(capacity / item))), capacity * chance.uniform(0, 0.04)) for _ in range(4)
    ]
    return curve(
        lambda batch: weights + item * batch + sum(more for start, more in steps if batch >= start), resident=weights
    )


def rounded(chance: Random, capacity: int) -> MemoryOf:
    """In whole segments of 20 MiB."""
    weights, item = _weights(chance), _item(chance)
    return curve(lambda batch: weights + (item * batch // (20 * MIB) + 1) * 20 * MIB, resident=weights)


def allocator(chance: Random, capacity: int) -> MemoryOf:
    """Steps played through a caching allocator: what is reserved, allocated and needed all differ."""
    make = chance.choice((convolutional, transformer))
    model = make(trains=chance.random() < 0.5, scale=math.exp(chance.uniform(-1.5, 1.0)))
    known: dict[int, MemoryTruth] = {}

    def truth(spec: RunSpec) -> MemoryTruth:
        batch = spec.workload.batch or 1
        if batch not in known:
            known[batch] = model.truth(batch)
        return known[batch]

    return truth


CURVES: dict[str, Callable[[Random, int], MemoryOf]] = {
    "linear": linear,
    "training": training,
    "convex": convex,
    "workspace kinks": workspace_kinks,
    "rounded": rounded,
    "caching allocator": allocator,
}


def _weights(chance: Random) -> float:
    return math.exp(chance.uniform(math.log(1 * MIB), math.log(2000 * MIB)))


def _item(chance: Random) -> float:
    return math.exp(chance.uniform(math.log(0.3 * MIB), math.log(400 * MIB)))
