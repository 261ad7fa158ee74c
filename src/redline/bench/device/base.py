"""This defines a device: the questions that the rest of the bench asks one, and the answers of a device that has nothing special."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import Any, Literal, TypeVar

import torch

from redline.model.errors import UsageError
from redline.model.record import DeviceInfo, Memory, TelemetrySample

T = TypeVar("T")


class Lane:
    """A lane is a second queue of work beside the main one. Where nothing runs ahead of the host, it is the host itself."""

    def run(self, work: Callable[[], T]) -> tuple[T, Any]:
        """Issues `work` in this queue. Returns what it returned, and the point at which it will be done."""
        return work(), None

    def join(self, tensors: Sequence[torch.Tensor], done: Any) -> None:
        """Lets the main queue wait for that point, and keeps the tensors alive for what it does with them."""


class Device(ABC):
    """A device is a clock, a barrier, memory figures and a thermometer."""

    kind: str
    torch_device: torch.device
    clock: Literal["host", "device"]
    autocast_type: str

    @property
    def is_accelerator(self) -> bool:
        return self.clock == "device"

    @abstractmethod
    def info(self) -> DeviceInfo: ...

    def make_current(self) -> None:
        """Makes this the device of libraries that are told none."""
        return

    @abstractmethod
    def synchronize(self) -> None: ...

    @abstractmethod
    def mark(self) -> Any:
        """Returns a mark, which is a point in the device's own time. It is cheap and does not wait."""

    def marker(self, count: int) -> Callable[[], Any]:
        """Returns a function that takes up to `count` marks. Most of what a mark costs is paid here, before anything is timed."""
        return self.mark

    @abstractmethod
    def seconds_between(self, marks: Sequence[Any]) -> list[float]:
        """Returns the seconds from each mark to the next, once everything up to the last has happened."""

    def wait_for(self, mark: Any) -> None:
        """Waits on the host until the device has come to this mark."""
        return

    @abstractmethod
    def reset_peaks(self) -> None: ...

    @abstractmethod
    def memory(self) -> Memory:
        """Returns the peaks since `reset_peaks`."""

    @abstractmethod
    def look(self, at_s: float, *, neighbours: bool = False) -> TelemetrySample:
        """Returns clocks, power, temperature and load right now. With `neighbours` it also looks for other processes, which is costly."""

    @abstractmethod
    def refusal_of(self, dtype: torch.dtype) -> str | None:
        """Returns why this device cannot compute in `dtype`, or None if it can."""

    def product_time(self, number_format: str) -> float | None:
        """Returns the measured time of a matrix product in this number format over one in fp32, or None if it does not matter."""
        return None

    def compiler_refusal(self) -> str | None:
        """Returns why torch.compile cannot build anything for this device, or None if it can."""
        return None if find_spec("triton") else "torch.compile needs Triton here"

    def energy_j(self) -> float | None:
        """Returns the joules that a counter has counted so far, or None if there is no counter."""
        return None

    def reserved_bytes(self) -> int | None:
        """Returns the bytes that the allocator holds now, given out or not. Returns None if there is no allocator that tells."""
        return None

    def release_cache(self) -> None:
        """Gives cached memory back, so that what follows is counted afresh."""
        return

    def limit_memory(self, limit_bytes: int | None, *, isolated: bool) -> None:
        """Makes the process behave as if there were this much memory. None stands for what is free now.

        `isolated` says that the process is the bench's own, so that a limit may outlast the session.
        """
        if limit_bytes is not None:
            raise UsageError(f"max_memory cannot be held on {self.kind}")

    def cap_allocator(self, cap_bytes: int | None) -> bool:
        """Lets the allocator take no more than this from the device. None lifts the cap. Returns False if there can be no cap."""
        return False

    def cache_bytes(self) -> int | None:
        """Returns the size of the last cache in front of memory, or None if the device does not tell."""
        return None

    def neighbours(self) -> tuple[str, ...]:
        """Returns the processes on this device that are not ours."""
        return ()

    def synchronises(self, step: Callable[[], object]) -> bool | None:
        """Returns True if one call of `step` waits for the device by itself, and None if nothing here runs ahead of the host."""
        return None

    def hold(self, seconds: float) -> None:
        """Keeps the device busy for about this long. What is issued meanwhile waits, and then runs without gaps."""
        return

    def random_state(self) -> torch.Tensor:
        """Returns a state that changes with every random number that is drawn, on the host or on the device."""
        return torch.get_rng_state()

    def lane(self) -> Lane:
        """Returns a second queue, whose copies and kernels run beside those of the main one."""
        return Lane()

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Returns a context. The vendor's profiler shows the time inside it by this name."""
        return nullcontext()

    def profiled(self) -> AbstractContextManager[Any]:
        """Returns a context around the steps to look at, for a profiler that waits to be told when they begin."""
        return nullcontext()

    def allow_tf32(self, allowed: bool) -> None:
        """Lets fp32 products use TF32, the shorter format, or forbids it."""
        return

    def unseen_work(self) -> str | None:
        """Returns the name of another device on which this process did work that this device's clock does not see, or None."""
        return None

    def tf32_refusal(self) -> str | None:
        """Returns why this device cannot use TF32, or None if it can."""
        return f"TF32 is a format of NVIDIA Ampere and later GPUs, not of {self.kind}"

    def early_launch_refusal(self) -> str | None:
        """Returns why a kernel here cannot begin while the one before it ends, or None if it can."""
        return f"kernels begin before the last has ended on NVIDIA Hopper and later GPUs, not on {self.kind}"

    def graph_refusal(self) -> str | None:
        """Returns why this device cannot record work into a graph and replay it, or None if it can."""
        return f"{self.kind} has no graphs to record work into; a GPU has"

    def shorten_launches(self) -> str | None:
        """Makes kernels start sooner, on a device that can, once all of them are loaded. Returns why it could not be done, or None."""
        return None

    def record_graph(self, work: Callable[[], T], warmups: int) -> tuple[Callable[[], None], T]:
        """Runs `work` some times, then records it. Returns what replays it, and what it returned, which every replay rewrites."""
        raise NotImplementedError(self.graph_refusal())

    def keeping_refusal(self) -> str | None:
        """Returns why the process cannot be told to keep the memory that is freed, or None if it can."""
        return "it is about the memory of a CPU: that of a GPU is kept by torch's own allocator"

    def keep_memory(self, keep: bool) -> None:
        """Keeps freed memory in the process from here on, or gives it back to the system as usual."""
        raise NotImplementedError(self.keeping_refusal())

    def restore(self) -> None:
        """Undoes what switches changed about the device, for whoever uses this process next."""
        return

    def versions(self) -> dict[str, str]:
        """Returns the versions of the libraries that only this kind of device has."""
        return {}
