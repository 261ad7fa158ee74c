"""This runs counted iterations in this process, for `micro_benchmarking_pytorch.py`, also as one rank of several.

It is one process, so that `rocprof`, `nsys`, `ncu` and `torchrun` in front of it see everything. The model, the recipe and the
clock are those of `redline run`, and only the number of iterations is the caller's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from redline.bench.count.count import answer_count
from redline.bench.count.counter import watching
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.recipe.compose import apply_recipe
from redline.bench.workload.build import build_workload, check_model
from redline.bench.workload.ranks import Rank, Ranks
from redline.bench.workload.step import make_optimizer, make_scaler
from redline.model.spec import RunSpec
from redline.model.work import WorkCount

BLOCK_S = 0.25
"""Iterations run without waiting for the device until about this much time is in flight; then they are read out."""


@dataclass(frozen=True)
class Iteration:
    """An iteration is one forward, with backward and perhaps an update when training."""

    number: int
    loss: float
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """When training, forward, backward and optimizer take these seconds."""


class MicroBench:
    """This is one workload under one recipe, iterated as often as asked. As a context manager it joins the other ranks and leaves them."""

    def __init__(self, spec: RunSpec, rank: Rank, accumulation: int = 1) -> None:
        """The optimizer takes a step after every `accumulation` iterations."""
        self.spec, self.rank, self._accumulation = spec, rank, accumulation
        self.device: Device = open_device(rank.device_of(resolve_device(spec.device)))
        self._trains = spec.workload.task == "train"
        self._estimate_s, self._count = 0.0, 0

    def __enter__(self) -> MicroBench:
        if self.rank.world > 1:
            self.rank.join(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare(self) -> None:
        """Builds the model, applies the recipe, and makes the optimizer."""
        torch.manual_seed(self.spec.seed)
        check_model(self.spec.workload)
        built = build_workload(self.spec.workload, self.spec.seed).to(self.device.torch_device)
        self.setup = apply_recipe(self.spec.recipe, built, self.device, Ranks(self.rank).distribute)
        if self._trains:
            self._optimizer = make_optimizer("sgd", built.model, **self.setup.optimizer_options)
            self._scaler = make_scaler(self.setup)

    def warm_up(self, iterations: int) -> Iterator[Iteration]:
        """Runs iterations one by one, and waits for the device after each. The first one compiles."""
        with self._context():
            for number in range(iterations):
                started = time.perf_counter()
                loss, _ = self._iterate()
                self.device.synchronize()
                self._estimate_s = time.perf_counter() - started
                yield Iteration(number, float(loss), self._estimate_s)
        self.setup.settle()
        self.device.reset_peaks()

    def timed(self, iterations: int) -> Iterator[Iteration]:
        """Runs iterations in a row, timed by the device's own clock and read out block by block."""
        done = 0
        while done < iterations:
            # Every rank runs blocks of the same size, because ranks meet between blocks.
            estimate_s = max(self.gathered(self._estimate_s))
            size = min(iterations - done, max(1, math.ceil(BLOCK_S / max(estimate_s, 1e-6))))
            with self._context():
                found = [self._iterate() for _ in range(size)]
                self.device.synchronize()
            block = [self._read(done + place, *one) for place, one in enumerate(found)]
            self._estimate_s = statistics.median(one.seconds for one in block)
            done += size
            yield from block

    def operator_tables(self, iterations: int, trace: str | None) -> dict[str, str]:
        """Returns the profiler's tables by CPU time, device time and memory. They are of further iterations outside the timing."""
        device, activities = "cpu", [ProfilerActivity.CPU]
        if self.device.is_accelerator:
            device = "device"
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, profile_memory=True) as profiled, self._context():
            for _ in range(iterations):
                self._iterate()
            self.device.synchronize()
        if trace is not None:
            profiled.export_chrome_trace(trace)
        averages = profiled.key_averages()
        orders = {
            "cpu": "cpu_time_total",
            "device": f"self_{device}_time_total",
            "memory": f"self_{device}_memory_usage",
        }
        return {name: averages.table(sort_by=order, row_limit=10) for name, order in orders.items()}

    def count(self) -> WorkCount:
        """Returns the work of one forward and backward, as `redline flops` counts it."""
        spec = RunSpec(workload=self.spec.workload, recipe=self.spec.recipe, device="cpu")
        return answer_count(spec).work

    def module_seconds(self) -> dict[str, float]:
        """Returns the forward seconds of every module by its path, with all that is inside it. It waits for the device around each."""
        seconds: dict[str, float] = {}

        def clock(path: str, sign: int) -> None:
            self.device.synchronize()
            seconds[path] = seconds.get(path, 0.0) + sign * time.perf_counter()

        model, setup = self.setup.workload.model, self.setup
        clocked = watching(model, partial(clock, sign=-1), partial(clock, sign=1))
        with clocked, self._context(), setup.autocast():
            model(*setup.args, **setup.kwargs)
        return seconds

    def peak_bytes(self) -> int | None:
        """Returns the most memory that was held: what the allocator reserved on a GPU, and what was resident on a CPU."""
        memory = self.device.memory()
        reserved = memory.peak_reserved_bytes
        return reserved if reserved is not None else memory.peak_rss_bytes

    def gathered(self, value: float) -> list[float]:
        """Returns what every rank has for this figure, in the order of the ranks."""
        if self.rank.world == 1:
            return [value]
        meeting = self.device.torch_device if dist.get_backend() == "nccl" else torch.device("cpu")
        mine = torch.tensor([value], dtype=torch.float64, device=meeting)
        everyone = [torch.zeros_like(mine) for _ in range(self.rank.world)]
        dist.all_gather(everyone, mine)
        return [float(one) for one in everyone]

    def _read(self, number: int, loss: torch.Tensor, marks: list[Any]) -> Iteration:
        between = self.device.seconds_between(marks)
        names = ("forward", "backward", "optimizer") if self._trains else ()
        return Iteration(number, float(loss), sum(between), dict(zip(names, between, strict=False)))

    def _iterate(self) -> tuple[torch.Tensor, list[Any]]:
        """Runs one iteration. The loss stays on the device, and the marks are read later, so that nothing waits."""
        self._count += 1
        setup, mark = self.setup, self.device.mark
        for prepare in setup.before_step:
            prepare()
        marks = [mark()]
        if not self._trains:
            with setup.autocast():
                output = setup.model(*setup.args, **setup.kwargs)
                # The loss is no part of inference. It is computed after the clock has stopped, so that it can be compared.
                marks.append(mark())
                return setup.workload.loss(output).detach(), marks
        steps_now = self._count % self._accumulation == 0
        # In an iteration that only accumulates, gradients are not sent to the other ranks.
        alone = setup.distributed.no_sync() if setup.distributed is not None and not steps_now else nullcontext()
        with alone:
            with setup.autocast():
                loss = setup.workload.loss(setup.model(*setup.args, **setup.kwargs))
            marks.append(mark())
            self._scaler.scale(loss / self._accumulation).backward()
        marks.append(mark())
        if steps_now:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad()
        marks.append(mark())
        return loss.detach(), marks

    def _context(self) -> AbstractContextManager[Any]:
        return torch.enable_grad() if self._trains else torch.no_grad()
