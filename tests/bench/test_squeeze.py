"""The squeeze against a simulated allocator, whose least memory is known. No GPU is needed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from worlds.memory import CachingAllocator, OutOfMemory, StackedModel, convolutional, transformer

from redline.bench.device.cpu import CpuDevice
from redline.bench.measure.blocks import SQUEEZE_PRECISION, least_memory
from redline.model.record import Memory

GIB = 2**30


class SimulatedDevice(CpuDevice):
    """A GPU's allocator without the GPU."""

    kind = "cuda"

    def __init__(self) -> None:
        super().__init__()
        self.allocator = CachingAllocator()
        self.caps: list[int | None] = []

    def memory(self) -> Memory:
        return Memory(
            peak_allocated_bytes=self.allocator.peak_allocated, peak_reserved_bytes=self.allocator.peak_reserved
        )

    def reset_peaks(self) -> None:
        self.allocator.reset_peaks()

    def release_cache(self) -> None:
        self.allocator.empty_cache()

    def cap_allocator(self, cap_bytes: int | None) -> bool:
        self.caps.append(cap_bytes)
        self.allocator.cap_bytes = cap_bytes
        return True


class SimulatedStep:
    """Plays a model's allocations; what a broken step leaves behind stays until it recovers."""

    phases = ("forward",)

    def __init__(self, model: StackedModel, batch: int, device: SimulatedDevice, error: Any = torch.OutOfMemoryError):
        self.model, self.batch, self.device, self.error = model, batch, device, error
        self.recoveries = 0
        self._held: list[Any] = []
        for weights, _, _ in model.layers:
            device.allocator.allocate(weights)
        self(None)

    def __call__(self, mark: Any = None) -> None:
        allocator, started = self.device.allocator, len(self._held)
        tracked = _Tracked(allocator, self._held)
        try:
            if self.model.trains:
                self.model._train(tracked, self.batch, first=False)  # type: ignore[arg-type]
            else:
                self.model._infer(tracked, self.batch)  # type: ignore[arg-type]
        except OutOfMemory as error:
            raise self.error(f"CUDA out of memory. {error}") from None
        assert len(self._held) == started

    def context(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def recover(self) -> None:
        self.recoveries += 1
        while self._held:
            self.device.allocator.release(self._held.pop())


class _Tracked:
    """Remembers what is in use, as the tensors of a broken step are until its traceback is gone."""

    def __init__(self, allocator: CachingAllocator, held: list[Any]) -> None:
        self._allocator, self._held = allocator, held

    def allocate(self, size: int) -> Any:
        block = self._allocator.allocate(size)
        self._held.append(block)
        return block

    def release(self, block: Any) -> None:
        self._held.remove(block)
        self._allocator.release(block)


def at_ease(model: StackedModel, batch: int, **options: Any) -> tuple[SimulatedStep, SimulatedDevice]:
    device = SimulatedDevice()
    step = SimulatedStep(model, batch, device, **options)
    device.release_cache()
    device.reset_peaks()
    for _ in range(3):
        step()
    return step, device


def runs_under(model: StackedModel, batch: int, cap_bytes: int) -> bool:
    step, device = at_ease(model, batch)
    device.release_cache()
    device.cap_allocator(cap_bytes)
    try:
        step()
        step()
    except torch.OutOfMemoryError:
        return False
    return True


@pytest.mark.parametrize("model", [convolutional, transformer])
@pytest.mark.parametrize("trains", [True, False])
def test_the_least_is_enough_and_no_more_than_needed(model: Any, trains: bool) -> None:
    stacked = model(trains=trains)
    step, device = at_ease(stacked, 64)
    reserved = device.memory().peak_reserved_bytes
    needed = least_memory(step, device, 16 * GIB)
    assert needed is not None
    assert reserved is not None
    assert needed <= reserved
    assert runs_under(stacked, 64, needed)
    assert not runs_under(stacked, 64, int(needed * (1 - 2.5 * SQUEEZE_PRECISION)))


def test_the_sessions_own_cap_holds_again_afterwards() -> None:
    step, device = at_ease(convolutional(trains=True), 64)
    least_memory(step, device, 16 * GIB)
    assert device.caps[-1] == 16 * GIB
    assert step.recoveries > 0
    step()
    least_memory(step, device, None)
    assert device.caps[-1] is None


def test_any_other_error_is_not_taken_for_a_lack_of_memory() -> None:
    step, device = at_ease(convolutional(trains=True), 64, error=ValueError)
    # The message says out of memory, so a ValueError of that wording counts; another wording does not.
    step.error = lambda message: ValueError("a bug")
    with pytest.raises(ValueError, match="a bug"):
        least_memory(step, device, 16 * GIB)
    assert device.caps[-1] == 16 * GIB


def test_a_cpu_has_no_allocator_to_cap() -> None:
    assert least_memory(SimulatedStep.__new__(SimulatedStep), CpuDevice(), None) is None  # type: ignore[arg-type]
