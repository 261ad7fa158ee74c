"""A step whose phases carry names that profilers show. For profiling only: a range costs microseconds to enter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.module_watch import watching
from redline.bench.workload.step import TimedStep

PREFIX = "redline/"
MODULE_PREFIX = "redline-module/"


@contextmanager
def marked_modules(model: nn.Module) -> Iterator[None]:
    """A range around every module of the forward pass, named by its path."""
    opened: list[tuple[str, torch.profiler.record_function]] = []

    def enter(path: str) -> None:
        mark = torch.profiler.record_function(MODULE_PREFIX + path)
        mark.__enter__()
        opened.append((path, mark))

    def leave(path: str) -> None:
        while opened:
            name, mark = opened.pop()
            mark.__exit__(None, None, None)
            if name == path:
                return

    with watching(model, enter, leave):
        yield


class MarkedStep:
    """Runs a step with a range around each phase: in torch's own trace, and by NVTX or ROCTX for the vendors' tools.

    The step already says where its phases end, for the clock; the same marks serve here, so that what is timed stays
    free of ranges.
    """

    def __init__(self, step: TimedStep, device: Device) -> None:
        self._step = step
        self._device = device
        self._open: torch.profiler.record_function | None = None

    def __call__(self) -> None:
        names = iter(self._step.phases)
        self._enter(names)
        try:
            self._step(lambda: self._next(names))
        finally:
            self._leave()

    def _next(self, names: Iterator[str]) -> None:
        self._leave()
        self._enter(names)

    def _enter(self, names: Iterator[str]) -> None:
        name = next(names, None)
        if name is None:
            return
        self._device.push_range(PREFIX + name)
        self._open = torch.profiler.record_function(PREFIX + name)
        self._open.__enter__()

    def _leave(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
            self._device.pop_range()
