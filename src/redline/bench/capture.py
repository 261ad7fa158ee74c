"""This runs a few steps under a profiler, outside every timed block, and says what capturing cost."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch import nn

from redline.bench.count.counter import watching
from redline.bench.device.base import Device
from redline.bench.workload.step import TimedStep
from redline.model.protocol import Profile
from redline.model.record import TraceRef


def capture(step: TimedStep, device: Device, request: Profile, eager: torch.nn.Module | None = None) -> TraceRef:
    """Captures a trace and returns where it lies. `eager` is the model whose modules may be marked; None if the recipe dissolves them."""
    started = time.perf_counter()
    marked = MarkedStep(step, device)
    with step.context(), marked_modules(eager) if request.modules and eager is not None else nullcontext():
        if request.outside:
            run_for_others(marked, device, request)
        else:
            run_under_torch(marked, device, request)
    path = Path(request.path)
    return TraceRef(
        path=str(path),
        steps=request.active,
        capture_s=time.perf_counter() - started,
        bytes=path.stat().st_size if path.is_file() else 0,
    )


def run_under_torch(step: MarkedStep, device: Device, request: Profile) -> None:
    """Runs the steps under torch's own profiler, and writes its trace to the file that was asked for."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.is_accelerator:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    path = Path(request.path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unwatched = request.wait + request.warmup
    with warnings.catch_warnings():
        # "Profiler won't be using warmup" and its kin say nothing here, because the schedule is ours.
        warnings.simplefilter("ignore")
        with torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=request.wait, warmup=request.warmup, active=request.active),
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
            record_shapes=request.shapes,
            profile_memory=request.memory,
            with_stack=request.stacks,
        ) as profiler:
            for number in range(1, unwatched + request.active + 1):
                step()
                # Recorded steps follow each other as in a timed block, where the host runs ahead. Only the first begins
                # with an empty queue, so that the trace has no work without its launch, and the last ends with one.
                if number in (unwatched, unwatched + request.active):
                    device.synchronize()
                profiler.step()


def run_for_others(step: MarkedStep, device: Device, request: Profile) -> None:
    """Runs the steps for a profiler that stands in front of the worker, and tells it when to look."""
    for _ in range(request.warmup):
        step()
    device.synchronize()
    with device.profiled():
        for _ in range(request.active):
            step()
        device.synchronize()


PREFIX = "redline/"
MODULE_PREFIX = "redline-module/"
"""Ranges of phases and of modules begin with these, so that whoever reads the trace can tell them from others."""


@contextmanager
def marked_modules(model: nn.Module) -> Iterator[None]:
    """Within this context every module of the forward pass has a range, named by its path."""
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
    """This runs a plain step with a range around each phase: in torch's own trace, and by NVTX or ROCTX for the vendors' tools."""

    def __init__(self, step: TimedStep, device: Device) -> None:
        self._phases, self._device = step.phases, device
        self._names = iter(step.phases)
        self._run = step.plain(self._next)
        self._open = ExitStack()

    def __call__(self) -> None:
        self._names = iter(self._phases)
        self._enter()
        try:
            self._run()
        finally:
            self._open.close()

    def _next(self) -> None:
        self._open.close()
        self._enter()

    def _enter(self) -> None:
        name = next(self._names, None)
        if name is not None:
            self._open.enter_context(self._device.range(PREFIX + name))
            self._open.enter_context(torch.profiler.record_function(PREFIX + name))
