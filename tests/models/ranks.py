"""Models whose ranks misbehave, each in its own way, on rank 1 from the moment they are told to."""

from __future__ import annotations

import os
import signal
import time

import torch
import torch.distributed as dist
from torch import nn

SIGN = os.path.join(os.environ.get("REDLINE_TEST_FOLDER", ""), "misbehave")
"""The file that tells them: how many steps preparing takes depends on the machine."""


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1 and os.path.exists(SIGN):
            self.misbehave()
        return self.layers(x)

    def misbehave(self) -> None: ...


class Killed(Small):
    def misbehave(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Sleeping(Small):
    def misbehave(self) -> None:
        time.sleep(10_000)


class Alone(Small):
    """Waits in a collective that no other rank enters."""

    def misbehave(self) -> None:
        dist.barrier()


class Raising(Small):
    def misbehave(self) -> None:
        raise ValueError("rank 1 does not like this step")


class Drawing(Small):
    """Draws random numbers on rank 1 only, as dropout in a branch that only some ranks take does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            torch.rand(1)
        return self.layers(x)


def of(make):
    """Returns a factory of this model."""
    return lambda batch=8: (make(), torch.randn(batch, 16))


sound, killed, sleeping, alone, raising, drawing = map(of, (Small, Killed, Sleeping, Alone, Raising, Drawing))

LATE_S = 0.2


class Late(Small):
    """Takes longer in one phase of a training step, on rank 1 or on every rank."""

    def __init__(self, phase: str, *, on_all: bool = False) -> None:
        super().__init__()
        self.phase, self.on_all = phase, on_all

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.phase == "forward":
            self.dawdle()
        y = self.layers(x)
        if self.phase == "backward" and y.requires_grad:
            y.register_hook(lambda gradient: self.dawdle())
        return y

    def dawdle(self) -> None:
        if self.on_all or (dist.is_initialized() and dist.get_rank() == 1):
            time.sleep(LATE_S)


late_in_forward, late_in_backward = of(lambda: Late("forward")), of(lambda: Late("backward"))
all_late = of(lambda: Late("backward", on_all=True))

DELAY_S = 0.05


def slow_link(batch: int = 8):
    """Every collective takes a while longer, as over a bad cable; once, however often a factory is called."""
    if dist.all_reduce.__name__ == "delayed":
        return Small(), torch.randn(batch, 16)
    sum_up, average = dist.all_reduce, torch.nn.parallel.DistributedDataParallel.__init__

    def delayed(*args, **kwargs):
        time.sleep(DELAY_S)
        return sum_up(*args, **kwargs)

    def hook(_, bucket):
        with torch.profiler.record_function("gloo:all_reduce"):
            delayed(bucket.buffer().div_(dist.get_world_size()))
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    def distribute(self, *args, **kwargs):
        average(self, *args, **kwargs)
        self.register_comm_hook(None, hook)

    dist.all_reduce = delayed
    torch.nn.parallel.DistributedDataParallel.__init__ = distribute
    return Small(), torch.randn(batch, 16)
