"""This module lets several processes work together: who this one is, how they meet, and what they must agree on.

Every rank gets the same requests. What one of them decides by its own clock (when the warm-up is over, how many steps a
block has) is rank 0's word for all: ranks that run different numbers of steps would wait for each other for ever.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from redline.bench.device import cuda
from redline.bench.device.base import Device
from redline.bench.device.failure import line_of_user
from redline.bench.workload.batch import proven_axes, select_items
from redline.bench.workload.step import Setup
from redline.bench.workload.workload import Workload
from redline.model.errors import SpecError, UsageError
from redline.model.note import note
from redline.model.protocol import AllReduce, AllReduced, Hello
from redline.model.record import RankInfo
from redline.model.units import format_bytes

RENDEZVOUS_TIMEOUT_S = 120.0
"""All ranks must have started within this time."""
GLOO_JOINED = threading.Event()
"""It is set once this process is in a group of gloo. A script ends such a process with `os._exit`.

A thread of gloo drops the last collective, and waits for the interpreter for that. If the interpreter is being taken down
by then, the thread ends the process with SIGABRT: 3 of 45 plain scripts did, with torch 2.15 on two busy cores.
"""
PROBE_WARMUPS = 2
"""This many repeats of a probe are not counted, because the first ones set up connections."""
_TORCH = Path(torch.__file__).parent
_MEETING_PLACES = (
    _TORCH / "distributed",
    _TORCH / "autograd",  # the backward pass waits here for the gradients of other ranks
    _TORCH / "nn" / "parallel" / "distributed.py",
    Path(__file__),
)


@dataclass(frozen=True)
class Rank:
    """This describes this process among its siblings."""

    number: int = 0
    local: int = 0
    world: int = 1
    backend: str | None = None
    url: str = "env://"

    @classmethod
    def of_environment(cls) -> Rank:
        """Returns the rank that torchrun assigns. The global rank is RANK, because LOCAL_RANK begins again on every node."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return cls()
        number = int(os.environ["RANK"])
        return cls(
            number=number,
            local=int(os.environ.get("LOCAL_RANK", number)),
            world=int(os.environ["WORLD_SIZE"]),
        )

    def hello(self, token: str = "") -> Hello:
        return Hello(
            rank=self.number,
            world=self.world,
            local_rank=self.local,
            host=socket.gethostname(),
            pid=os.getpid(),
            token=token,
        )

    def device_of(self, resolved: str) -> str:
        """Returns the device of this rank. Every rank on a machine takes a GPU of its own."""
        kind = resolved.partition(":")[0]
        if kind == "cpu" or self.world == 1:
            return resolved
        refuse_shared_devices(kind, self.local + 1)
        return f"{kind}:{self.local}"

    def join(self, device: Device, timeout_s: float = RENDEZVOUS_TIMEOUT_S) -> None:
        """Waits for all others. `timeout_s` is also the longest that any rank waits in a collective."""
        backend = self.backend or ("nccl" if device.is_accelerator else "gloo")
        given: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s)}
        if device.is_accelerator:
            device.make_current()
            given["device_id"] = device.torch_device
        if self.url != "env://":
            given |= {"init_method": self.url, "rank": self.number, "world_size": self.world}
        dist.init_process_group(backend, **given)
        if backend == "gloo":
            GLOO_JOINED.set()


def refuse_shared_devices(kind: str, ranks: int) -> None:
    """Refuses more ranks than devices, because ranks that share a GPU only take turns on it."""
    count = cuda.device_count()
    if ranks > count:
        names = ", ".join(dict.fromkeys(cuda.device_names()))
        raise UsageError(
            f"{ranks} ranks need {ranks} {kind} devices, and this machine has {count}{f' ({names})' if names else ''}: "
            f"ranks that share a GPU take turns and do not scale; ask for {count} at most, or use --device cpu"
        )


def refuse_more_than_fit(ranks: int) -> None:
    """Refuses ranks on the CPU that cannot fit. A rank holds at least what this process does, which has loaded torch and no model."""
    own, machine = psutil.Process().memory_info(), psutil.virtual_memory().total
    least = ranks * (own.rss - own.shared)
    if least > machine:
        raise UsageError(
            f"{ranks} ranks need {format_bytes(least)} before any of them has a model, and this machine has "
            f"{format_bytes(machine)}: ask for fewer"
        )


def processors() -> int:
    """Returns how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_ranked() -> bool:
    """Returns True if this process is a rank, even if it is the only one."""
    return dist.is_available() and dist.is_initialized()


def world_size() -> int:
    return dist.get_world_size() if is_ranked() else 1


class Ranks:
    """A bench session asks these things of its siblings. A session by itself is a world of one and asks nobody."""

    def __init__(self, rank: Rank | None = None) -> None:
        self.rank = rank or Rank()
        self.is_rank = rank is not None
        self.steps = 0
        """This many steps have begun. See `Position`."""
        self._meeting: Any = None
        self.has_share = False

    @property
    def several(self) -> bool:
        return self.rank.world > 1

    def join(self, device: Device, timeout_s: float) -> None:
        """Joins a group for the model's own traffic, and another one on the CPU for what ranks agree on."""
        if is_ranked():
            return
        self.rank.join(device, timeout_s)
        if self.several:
            self._meeting = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    def leave(self) -> None:
        if is_ranked():
            dist.destroy_process_group()

    def agreed(self, *values: int) -> list[int]:
        """Returns the values of rank 0."""
        if not self.several:
            return list(values)
        told = torch.tensor(values, dtype=torch.int64)
        dist.broadcast(told, 0, group=self._meeting)
        return told.tolist()

    def any_of(self, is_so: bool) -> bool:
        """Returns True if it is so on any rank. The answer decides how many steps run, and all ranks must run as many."""
        if not self.several:
            return is_so
        told = torch.tensor([int(is_so)])
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._meeting)
        return bool(told.item())

    def meet(self) -> None:
        """Waits until all ranks are here."""
        if self.several:
            dist.barrier(group=self._meeting)

    def count_step(self) -> None:
        self.steps += 1

    def info(self, device: Device, items: int) -> tuple[RankInfo, ...]:
        if not self.several:
            return ()
        here = self.rank.hello()
        return (
            RankInfo(
                rank=here.rank,
                host=here.host,
                local_rank=here.local_rank,
                device=device.info(),
                items_per_step=items,
                threads=torch.get_num_threads(),
            ),
        )

    def set_threads(self, threads: int | None) -> None:
        """Uses as many threads as were asked for. Otherwise ranks on one machine share its processors."""
        if threads is None and self.several:
            here = int(os.environ.get("LOCAL_WORLD_SIZE", self.rank.world))
            threads = max(1, processors() // here)
        if threads is not None:
            torch.set_num_threads(threads)

    def share(self, workload: Workload, batch: int | None, *, ask: bool = False) -> None:
        """Keeps this rank's part of the global batch. If the batch does not divide evenly, the first ranks take one item more.

        Nothing is split until it is known which axes hold the items. `ask` lets the model be asked. The batch is split only once.
        """
        if not self.several or self.has_share or batch is None:
            return
        if workload.axes is None and ask:
            found = proven_axes(workload.model, (workload.args, workload.kwargs))
            if isinstance(found, str):
                raise SpecError(f"batch {batch} cannot be split over ranks: {found}; declare batch_axis")
            workload.axes = found
        if workload.axes is None or workload.batch != batch:
            return
        self.has_share = True
        world, number = self.rank.world, self.rank.number
        size, remainder = divmod(batch, world)
        mine = size + (number < remainder)
        first = number * size + min(number, remainder)
        rows = range(first, first + mine)
        workload.loss.take(rows, batch)
        workload.put(select_items((workload.args, workload.kwargs), workload.axes, rows))
        workload.batch = mine
        if workload.items is not None:
            workload.items = max(1, round(workload.items * mine / batch))
        if remainder:
            text = f"batch {batch} over {world} ranks: {remainder} of them take {size + 1} items, the others {size}"
            workload.notes.append(note("uneven-batch", text))
            # Gradients are averaged over ranks, so without a weight each item of a rank with fewer items would count more.
            workload.loss.weight = mine * world / batch

    def level(self, model: nn.Module) -> None:
        """Gives every rank the weights and statistics of rank 0, because each rank has calibrated them on its own items."""
        if self.several:
            with torch.no_grad():
                for tensor in chain(model.parameters(), model.buffers()):
                    dist.broadcast(tensor.data, 0)

    def distribute(self, setup: Setup) -> None:
        """Averages gradients over the ranks. It does not do so if a switch already distributes the model in its own way."""
        if self.several and setup.task == "train" and not setup.is_sharded:
            device = setup.device
            ids = [device.torch_device] if device.is_accelerator else None
            setup.distributed = DistributedDataParallel(setup.workload.model, device_ids=ids)
            setup.model = setup.distributed

    def probe(self, request: AllReduce, device: Device) -> AllReduced:
        message = torch.zeros(max(request.message_bytes // 4, 1), device=device.torch_device)
        seconds = []
        for number in range(PROBE_WARMUPS + request.repeats):
            self.meet()
            started = time.perf_counter()
            if is_ranked():
                dist.all_reduce(message)
            device.synchronize()
            if number >= PROBE_WARMUPS:
                seconds.append(time.perf_counter() - started)
        return AllReduced(message_bytes=request.message_bytes, seconds=tuple(seconds))


def gradient_bytes(model: nn.Module) -> int:
    return sum(weight.numel() * weight.element_size() for weight in model.parameters() if weight.requires_grad)


def where_is_main_thread() -> tuple[bool, str]:
    """Returns whether the main thread waits for other ranks, and the line of the user's own code it is in."""
    main = threading.main_thread().ident
    stack = traceback.extract_stack(sys._current_frames().get(main or 0))
    innermost = Path(stack[-1].filename) if stack else Path()
    waits = any(innermost == place or innermost.is_relative_to(place) for place in _MEETING_PLACES)
    return waits, line_of_user(stack)
