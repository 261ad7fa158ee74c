"""Counted iterations in this process: what `micro_benchmarking_pytorch.py` runs, also as one rank of several.

One process, so that `rocprof`, `nsys`, `ncu` and `torchrun` in front of it see everything. The model, the recipe and the
clock are those of `redline run`; only the number of iterations is the caller's.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from redline.bench.count.ask import answer_count
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.recipe.compose import apply_recipe
from redline.bench.workload.build import build_workload, check_model
from redline.bench.workload.ranks import Rank, Ranks
from redline.bench.workload.step import INITIAL_GRADIENT_SCALE, OPTIMIZER_SETTINGS, Setup
from redline.model.spec import Recipe, RunSpec, WorkloadSpec
from redline.model.work import WorkCount

BLOCK_S = 0.25
"""Iterations run without waiting for the device until about this much time is in flight; then they are read out."""


@dataclass(frozen=True)
class Iteration:
    number: int
    loss: float
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds of forward, backward and optimizer, when training."""


@dataclass(frozen=True)
class MicroSpec:
    network: str
    """As `redline run` names it."""
    batch: int
    """Of this rank."""
    training: bool
    recipe: str
    accumulation: int = 1
    """Iterations per optimizer step."""
    device: str = "auto"
    image_size: int | None = None
    seed: int = 0


class MicroBench:
    """Context manager: one workload under one recipe, iterated as often as asked."""

    def __init__(self, spec: MicroSpec, rank: Rank) -> None:
        self.spec = spec
        self.rank = rank
        self.device: Device = open_device(rank.device_of(resolve_device(spec.device)))
        self.compile_s: float | None = None
        self._estimate_s = 0.0

    def __enter__(self) -> MicroBench:
        if self.rank.world > 1:
            self.rank.join(self.device)
        return self

    def __exit__(self, *_: object) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def prepare(self) -> None:
        """Build the model, apply the recipe, and make the optimizer."""
        torch.manual_seed(self.spec.seed)
        workload = self._workload_spec()
        check_model(workload)
        built = build_workload(workload, self.spec.seed)
        built.to(self.device.torch_device)
        recipe, distribute = Recipe.parse(self.spec.recipe), Ranks(self.rank).distribute
        self.setup: Setup = apply_recipe(recipe, built, self.device, distribute)
        parameters = [each for each in built.model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.SGD(parameters, **OPTIMIZER_SETTINGS["sgd"], **self.setup.optimizer_options)
        self._scaler = torch.amp.GradScaler(
            self.device.autocast_type, init_scale=INITIAL_GRADIENT_SCALE, enabled=self.setup.scales_gradients
        )
        self._count = 0

    def warm_up(self, iterations: int) -> Iterator[Iteration]:
        """Iterations that wait for the device, one by one; the first compiles."""
        with self._context():
            for number in range(iterations):
                started = time.perf_counter()
                loss, _ = self._iterate()
                self.device.synchronize()
                seconds = time.perf_counter() - started
                self._estimate_s = seconds
                yield Iteration(number, float(loss), seconds)
        self.setup.settle()
        self.device.reset_peaks()

    def timed(self, iterations: int) -> Iterator[Iteration]:
        """Iterations in a row, timed by the device's own clock and read out block by block."""
        done = 0
        while done < iterations:
            # Every rank runs blocks of the same size: they meet between them.
            estimate_s = max(self.gathered(self._estimate_s))
            size = min(iterations - done, max(1, math.ceil(BLOCK_S / max(estimate_s, 1e-6))))
            block = self._block(size, done)
            self._estimate_s = statistics.median(each.seconds for each in block)
            done += size
            yield from block

    def operator_tables(self, iterations: int, trace: str | None) -> dict[str, str]:
        """Profiler tables by CPU time, device time and memory, of further iterations outside the timing."""
        activities = [ProfilerActivity.CPU]
        if self.device.is_accelerator:
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities, record_shapes=False, profile_memory=True) as profiled, self._context():
            for _ in range(iterations):
                self._iterate()
            self.device.synchronize()
        if trace is not None:
            profiled.export_chrome_trace(trace)
        averages = profiled.key_averages()
        on_device = "self_device_time_total" if self.device.is_accelerator else "self_cpu_time_total"
        memory = "self_device_memory_usage" if self.device.is_accelerator else "self_cpu_memory_usage"
        return {
            "cpu": averages.table(sort_by="cpu_time_total", row_limit=10),
            "device": averages.table(sort_by=on_device, row_limit=10),
            "memory": averages.table(sort_by=memory, row_limit=10),
        }

    def count(self) -> WorkCount:
        """FLOPs of one forward and backward, as `redline flops` counts them."""
        spec = RunSpec(workload=self._workload_spec(), recipe=Recipe.parse(self.spec.recipe), device="cpu")
        return answer_count(spec).work

    def module_seconds(self) -> dict[str, float]:
        """Forward seconds of every module with all inside it, by path; waits for the device around each."""
        model = self.setup.workload.model
        seconds: dict[str, float] = {}
        started: dict[str, float] = {}
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._clock_in(path, started)))
            handles.append(module.register_forward_hook(self._clock_out(path, started, seconds)))
        try:
            with self._context(), self.setup.autocast():
                model(*self.setup.args, **self.setup.kwargs)
        finally:
            for handle in handles:
                handle.remove()
        return seconds

    def peak_bytes(self) -> int | None:
        memory = self.device.memory()
        reserved = memory.peak_reserved_bytes
        return reserved if reserved is not None else memory.peak_rss_bytes

    def gathered(self, value: float) -> list[float]:
        """The same figure of every rank."""
        if self.rank.world == 1:
            return [value]
        mine = torch.tensor([value], dtype=torch.float64, device=self._meeting_device())
        everyone = [torch.zeros_like(mine) for _ in range(self.rank.world)]
        dist.all_gather(everyone, mine)
        return [float(each) for each in everyone]

    def _workload_spec(self) -> WorkloadSpec:
        task = "train" if self.spec.training else "infer"
        return WorkloadSpec(model=self.spec.network, task=task, batch=self.spec.batch, image_size=self.spec.image_size)  # type: ignore[arg-type]

    def _block(self, size: int, first: int) -> list[Iteration]:
        losses, marks = [], []
        with self._context():
            for _ in range(size):
                loss, own = self._iterate()
                losses.append(loss)
                marks.append(own)
            self.device.synchronize()
        names = ("forward", "backward", "optimizer") if self.spec.training else ("forward",)
        found = []
        for offset, (loss, own) in enumerate(zip(losses, marks, strict=True)):
            between = self.device.seconds_between(own)
            phases = dict(zip(names, between, strict=True)) if self.spec.training else {}
            found.append(Iteration(first + offset, float(loss), sum(between), phases))
        return found

    def _iterate(self) -> tuple[torch.Tensor, list[Any]]:
        """One iteration; the loss stays on the device, and the marks are read later."""
        self._count += 1
        return self._train() if self.spec.training else self._infer()

    def _infer(self) -> tuple[torch.Tensor, list[Any]]:
        setup, mark = self.setup, self.device.mark
        for prepare in setup.before_step:
            prepare()
        begin = mark()
        with setup.autocast():
            output = setup.model(*setup.args, **setup.kwargs)
        end = mark()
        # The loss is not part of inference: it is there to be compared, and is computed after the clock has stopped.
        with setup.autocast():
            loss = setup.workload.loss(output)
        return loss.detach(), [begin, end]

    def _train(self) -> tuple[torch.Tensor, list[Any]]:
        setup, mark = self.setup, self.device.mark
        steps_now = self._count % self.spec.accumulation == 0
        for prepare in setup.before_step:
            prepare()
        marks = [mark()]
        with self._without_sync(steps_now):
            with setup.autocast():
                loss = setup.workload.loss(setup.model(*setup.args, **setup.kwargs))
            marks.append(mark())
            self._scaler.scale(loss / self.spec.accumulation).backward()
        marks.append(mark())
        if steps_now:
            self._scaler.step(self._optimizer)
            self._scaler.update()
            self._optimizer.zero_grad(set_to_none=True)
        marks.append(mark())
        return loss.detach(), marks

    def _without_sync(self, steps_now: bool) -> AbstractContextManager[Any]:
        """Gradients of iterations that are only accumulated are not sent to the other ranks."""
        if self.setup.distributed is not None and not steps_now:
            return self.setup.distributed.no_sync()
        return nullcontext()

    def _context(self) -> AbstractContextManager[Any]:
        return torch.enable_grad() if self.spec.training else torch.no_grad()

    def _meeting_device(self) -> torch.device:
        return self.device.torch_device if dist.get_backend() == "nccl" else torch.device("cpu")

    def _clock_in(self, path: str, started: dict[str, float]) -> Any:
        def begin(*_: Any) -> None:
            self.device.synchronize()
            started[path] = time.perf_counter()

        return begin

    def _clock_out(self, path: str, started: dict[str, float], seconds: dict[str, float]) -> Any:
        def end(*_: Any) -> None:
            self.device.synchronize()
            seconds[path] = seconds.get(path, 0.0) + time.perf_counter() - started[path]

        return end
