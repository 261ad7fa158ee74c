"""What a step's memory is, in truth: curves over the batch for a `Landscape`, and torch's caching allocator in miniature.

A finder of the largest batch is set against these: it sees figures and out-of-memory errors, the curve is what it
must find again.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from redline.model.spec import RunSpec
from redline.testing.landscape import MemoryTruth

MIB = 2**20


MemoryOf = Callable[[RunSpec], MemoryTruth]


def curve(of_batch: Callable[[int], float], *, resident: float = 0.0, ease: float = 1.0) -> MemoryOf:
    """A landscape's memory from bytes needed per batch; at its ease the allocator reserves `ease` times as much."""

    def truth(spec: RunSpec) -> MemoryTruth:
        needed = round(of_batch(spec.workload.batch or 1))
        return MemoryTruth(
            needed=needed, allocated=round(0.97 * needed), reserved=round(ease * needed), resident=round(resident)
        )

    return truth


def largest_batch(memory: MemoryOf, spec_of: Callable[[int], RunSpec], limit_bytes: int) -> int:
    """The truth: by doubling and bisection over the curve itself."""
    low, high = 0, 1
    while memory(spec_of(high)).needed <= limit_bytes:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory(spec_of(middle)).needed <= limit_bytes else (low, middle)
    return low


class OutOfMemory(Exception):
    """The miniature allocator's."""


@dataclass(eq=False)
class _Block:
    size: int
    address: int
    small: bool
    before: _Block | None = None
    after: _Block | None = None
    free: bool = False


@dataclass
class CachingAllocator:
    """Sizes, pools, best fit, splitting, coalescing and giving back as in torch's allocator with its default settings."""

    cap_bytes: int | None = None
    allocated: int = 0
    reserved: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    retries: int = 0
    _free: dict[bool, list[tuple[int, int, _Block]]] = field(default_factory=lambda: {True: [], False: []})
    _next_address: int = 0

    def allocate(self, size: int) -> _Block:
        size = max(512, -(-size // 512) * 512)
        small = size <= MIB
        block = self._best_fit(size, small) or self._new_segment(size, small)
        left = block.size - size
        if left >= 512 if small else left > MIB:
            rest = _Block(left, block.address + size, small, before=block, after=block.after, free=True)
            if block.after is not None:
                block.after.before = rest
            block.after, block.size = rest, size
            self._keep(rest)
        block.free = False
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def release(self, block: _Block) -> None:
        self.allocated -= block.size
        block.free = True
        if block.before is not None and block.before.free:
            block = self._joined(block.before, block, forget=block.before)
        if block.after is not None and block.after.free:
            block = self._joined(block, block.after, forget=block.after)
        self._keep(block)

    def empty_cache(self) -> None:
        """Give back every segment of which nothing is in use."""
        for small, blocks in self._free.items():
            whole = [entry for entry in blocks if entry[2].before is None and entry[2].after is None]
            self.reserved -= sum(entry[0] for entry in whole)
            gone = {entry[1] for entry in whole}
            self._free[small] = [entry for entry in blocks if entry[1] not in gone]

    def reset_peaks(self) -> None:
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _best_fit(self, size: int, small: bool) -> _Block | None:
        blocks = self._free[small]
        position = bisect_left(blocks, size, key=lambda entry: entry[0])
        return blocks.pop(position)[2] if position < len(blocks) else None

    def _new_segment(self, size: int, small: bool) -> _Block:
        segment = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        if self.cap_bytes is not None and self.reserved + segment > self.cap_bytes:
            self.retries += 1
            self.empty_cache()
            if self.reserved + segment > self.cap_bytes:
                raise OutOfMemory(f"{size} bytes asked for, {self.allocated} in use, {self.reserved} reserved")
        self.reserved += segment
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._next_address += segment + 1  # the 1 keeps segments apart
        return _Block(segment, self._next_address - segment, small)

    def _joined(self, first: _Block, second: _Block, forget: _Block) -> _Block:
        blocks = self._free[forget.small]
        position = bisect_left(blocks, (forget.size, forget.address), key=lambda entry: entry[:2])
        assert blocks[position][2] is forget
        blocks.pop(position)
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first
        return first

    def _keep(self, block: _Block) -> None:
        insort(self._free[block.small], (block.size, block.address, block), key=lambda entry: entry[:2])


@dataclass(frozen=True, kw_only=True)
class StackedModel:
    """Layers in a row, whose steps are played through the allocator: a training or an inference step in outline."""

    layers: Sequence[tuple[int, int, int]]
    """For each: bytes of weights, bytes of output per item, bytes of workspace per item."""
    trains: bool

    def truth(self, batch: int) -> MemoryTruth:
        allocator = CachingAllocator()
        resident = self._play(allocator, batch)
        low, high = allocator.peak_allocated, allocator.peak_reserved
        while high - low > MIB:
            middle = (low + high) // 2
            low, high = (low, middle) if self._fits(batch, middle) else (middle, high)
        return MemoryTruth(
            needed=high, allocated=allocator.peak_allocated, reserved=allocator.peak_reserved, resident=resident
        )

    def _fits(self, batch: int, cap_bytes: int) -> bool:
        try:
            self._play(CachingAllocator(cap_bytes=cap_bytes), batch)
        except OutOfMemory:
            return False
        return True

    def _play(self, allocator: CachingAllocator, batch: int) -> int:
        """A first step, then peaks counted afresh over two more, as on the bench; returns what stays between steps."""
        for weights, _, _ in self.layers:
            allocator.allocate(weights)
        for step in range(3):
            self._train(allocator, batch, first=step == 0) if self.trains else self._infer(allocator, batch)
            if step == 0:
                allocator.empty_cache()
                allocator.reset_peaks()
        return allocator.allocated

    def _infer(self, allocator: CachingAllocator, batch: int) -> None:
        before: _Block | None = None
        for _, output, workspace in self.layers:
            out = allocator.allocate(output * batch)
            if workspace:
                allocator.release(allocator.allocate(workspace * batch))
            if before is not None:
                allocator.release(before)
            before = out
        assert before is not None
        allocator.release(before)

    def _train(self, allocator: CachingAllocator, batch: int, *, first: bool) -> None:
        saved = []
        for _, output, workspace in self.layers:
            saved.append((allocator.allocate(output * batch), allocator.allocate(output * batch)))
            if workspace:
                allocator.release(allocator.allocate(workspace * batch))
        gradients = []
        flowing: _Block | None = None
        for (weights, output, workspace), (kept, normalised) in zip(
            reversed(self.layers), reversed(saved), strict=True
        ):
            incoming = allocator.allocate(output * batch)
            if workspace:
                allocator.release(allocator.allocate(2 * workspace * batch))
            gradients.append(allocator.allocate(weights))
            for gone in (normalised, kept, flowing):
                if gone is not None:
                    allocator.release(gone)
            flowing = incoming
        assert flowing is not None
        allocator.release(flowing)
        if first:  # the optimizer's state
            for weights, _, _ in self.layers:
                allocator.allocate(weights)
        for gradient in gradients:
            allocator.release(gradient)


def convolutional(*, trains: bool, scale: float = 1.0) -> StackedModel:
    """A network like ResNet: outputs shrink and weights grow with depth, wide layers want a workspace."""
    layers = []
    for stage, blocks in enumerate((3, 4, 6, 3)):
        output = int(3.2e6 * scale / 2**stage)
        for _ in range(blocks):
            layers += [(75_000 * 4**stage, output // 4, output // 2)] * 2 + [(70_000 * 4**stage, output, 0)]
    return StackedModel(layers=layers, trains=trains)


def transformer(*, trains: bool, scale: float = 1.0) -> StackedModel:
    """Equal blocks and a wide head."""
    width = int(400_000 * scale)
    block = [(3_000_000, 3 * width, 0), (1_000_000, width, width), (4_000_000, 4 * width, 0), (4_000_000, width, 0)]
    return StackedModel(layers=[*block * 12, (25_000_000, 30 * width, 0)], trains=trains)


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
