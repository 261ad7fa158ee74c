"""This is an NVIDIA GPU as a device, with what AMD GPUs share with it because torch gives both the name `torch.cuda`."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any, Literal

import torch

from redline.bench.device.base import Device, Lane, T
from redline.bench.device.failure import is_about_synchronizing
from redline.bench.device.process import peak_rss_bytes, reset_peak_rss
from redline.model.record import DeviceInfo, Memory, TelemetrySample
from redline.system.telemetry.card import Card
from redline.system.telemetry.nvml import open_card

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""These variables may hide GPUs, so they are named where torch sees none."""
CYCLES_PER_S = 2e9
"""This is about the clock of today's cards. Torch's sleep on a GPU takes cycles, and an estimate is enough to hold it back."""


def built_for() -> str | None:
    """Returns the kind of accelerator that this torch was built for, or None. ROCm builds answer to torch.cuda as well."""
    if torch.version.hip:
        return "rocm"
    return "cuda" if torch.version.cuda else None


def device_count() -> int:
    return torch.cuda.device_count()


def device_names() -> list[str]:
    return [torch.cuda.get_device_name(index) for index in range(device_count())]


def unavailable_because() -> str | None:
    """Returns why no GPU can be used, in torch's own words, or None if one can."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    said = [str(warning.message).splitlines()[0] for warning in caught]
    hiding = [f"{name}={os.environ[name]!r} may hide it" for name in VISIBLE if name in os.environ]
    return said[0] if said else " and ".join(["torch sees no GPU", *hiding])


def record_graph(work: Callable[[], Any], warmups: int) -> tuple[Callable[[], None], Any]:
    """Records work as a CUDA graph on the current device. Returns what replays it, and where its result then lies.

    Snippets do not contain this function: their templates have code of their own that records.
    """
    # The work has a stream of its own, because what libraries and autograd set up at their first calls must not end up in the graph.
    # The stream has a high priority, so that what a program puts on further streams stands back behind it.
    stream = torch.cuda.Stream(priority=-1)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        output = work()
    return graph.replay, output


def shorten_launches() -> str | None:
    """Open a second CUDA context and close it: kernels then start sooner, until the next one is loaded. Says why it could not be had.

    From the moment a process has loaded a kernel, as compiled programs do when they first run, each of its launches takes longer. A
    change of the context ends that. On an H200 (driver 580) a recorded training step of a few hundred short kernels took 1.295 ms
    before and 1.199 after. It takes 0.2 s, and half a GiB for that time. Snippets contain it as it stands here.
    """
    torch.cuda.synchronize()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return str(error)
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if code := driver.cuCtxGetDevice(ctypes.byref(device)):
        return f"cuCtxGetDevice: error {code}"
    if code := driver.cuCtxCreate_v2(ctypes.byref(context), 0, device):
        return f"cuCtxCreate: error {code}"
    code = driver.cuCtxDestroy_v2(context)
    return f"cuCtxDestroy: error {code}" if code else None


class CudaLane(Lane):
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Callable[[], T]) -> tuple[T, Any]:
        with torch.cuda.stream(self._stream):
            result = work()
            done = torch.cuda.Event()
            done.record(self._stream)
        return result, done

    def join(self, tensors: Sequence[torch.Tensor], done: Any) -> None:
        main = torch.cuda.current_stream(self._device)
        main.wait_event(done)
        for tensor in tensors:
            tensor.record_stream(main)  # otherwise the allocator gives it away while the main stream still reads it


class CudaDevice(Device):
    kind = "cuda"
    clock: Literal["host", "device"] = "device"
    autocast_type = "cuda"

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(index)
        torch.cuda.init()
        self._card = self._open_card()
        self._limit_bytes: int | None = None

    def _open_card(self) -> Card:
        """Returns the card that the driver knows. If the driver cannot be asked, everything about the card is unknown."""
        uuid = getattr(self._properties(), "uuid", None)
        return (open_card(f"GPU-{uuid}") if uuid is not None else None) or Card()

    def _properties(self) -> Any:
        return torch.cuda.get_device_properties(self.torch_device)

    def info(self) -> DeviceInfo:
        properties = self._properties()
        return DeviceInfo(
            kind=self.kind,
            index=self.torch_device.index,
            name=properties.name,
            memory_bytes=properties.total_memory,
            multiprocessors=properties.multi_processor_count,
            **{**self._identity(properties), **self._card.facts()},
        )

    def _identity(self, properties: Any) -> dict[str, str | None]:
        uuid = str(getattr(properties, "uuid", "")) or None
        return {"capability": f"{properties.major}.{properties.minor}", "uuid": uuid}

    def make_current(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def marker(self, count: int) -> Callable[[], torch.cuda.Event]:
        stream = torch.cuda.current_stream(self.torch_device)
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
        for event in events:
            event.record(stream)  # the driver makes an event when it is first recorded
        waiting = iter(events)

        def mark() -> torch.cuda.Event:
            event = next(waiting)
            event.record(stream)
            return event

        return mark

    def seconds_between(self, marks: Sequence[torch.cuda.Event]) -> list[float]:
        if marks:
            marks[-1].synchronize()
        return [earlier.elapsed_time(later) / 1e3 for earlier, later in pairwise(marks)]

    def wait_for(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def reset_peaks(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        reset_peak_rss()

    def memory(self) -> Memory:
        statistics = torch.cuda.memory_stats(self.torch_device)
        in_use = self._card.own_memory_bytes()
        return Memory(
            peak_allocated_bytes=statistics.get("allocated_bytes.all.peak", 0),
            peak_reserved_bytes=statistics.get("reserved_bytes.all.peak", 0),
            context_bytes=in_use - statistics.get("reserved_bytes.all.current", 0) if in_use is not None else None,
            peak_rss_bytes=peak_rss_bytes(),
            allocator_retries=statistics.get("num_alloc_retries", 0),
            resident_bytes=statistics.get("allocated_bytes.all.current", 0),
            limit_bytes=self._limit_bytes,
        )

    def reserved_bytes(self) -> int | None:
        return int(torch.cuda.memory_reserved(self.torch_device))

    def release_cache(self) -> None:
        torch.cuda.empty_cache()

    def limit_memory(self, limit_bytes: int | None, *, isolated: bool) -> None:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        available = free + torch.cuda.memory_reserved(self.torch_device)
        # The context and the libraries take some hundred megabytes, which are outside the allocator and outside the cap.
        self._limit_bytes = available if limit_bytes is None else min(limit_bytes, available)
        if limit_bytes is not None:
            self.cap_allocator(limit_bytes)

    def cap_allocator(self, cap_bytes: int | None) -> bool:
        _, total = torch.cuda.mem_get_info(self.torch_device)
        share = 1.0 if cap_bytes is None else min(cap_bytes / total, 1.0)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)
        return True

    def look(self, at_s: float, *, neighbours: bool = False) -> TelemetrySample:
        foreign = self._card.foreign_processes() if neighbours else ()
        return TelemetrySample(at_s=at_s, foreign=foreign, **self._card.reading())

    def cache_bytes(self) -> int | None:
        return getattr(self._properties(), "L2_cache_size", None) or None

    def energy_j(self) -> float | None:
        return self._card.energy_j()

    def neighbours(self) -> tuple[str, ...]:
        return self._card.foreign_processes()

    def refusal_of(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.bfloat16 and not torch.cuda.is_bf16_supported(including_emulation=False):
            return f"{self._properties().name} has no bf16 arithmetic (compute capability 8.0 and later do)"
        if dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(self.torch_device) < (8, 9):
            return f"{self._properties().name} has no fp8 arithmetic (compute capability 8.9 and later do)"
        return None

    def synchronises(self, step: Callable[[], object]) -> bool | None:
        previous = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step()
            finally:
                torch.cuda.set_sync_debug_mode(previous)
        self.synchronize()
        return any(map(is_about_synchronizing, caught))

    def hold(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * CYCLES_PER_S))

    def random_state(self) -> torch.Tensor:
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device).cpu()])

    def lane(self) -> Lane:
        return CudaLane(self.torch_device)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.cuda.nvtx.range(name)  # on ROCm these are ROCTX ranges

    def profiled(self) -> AbstractContextManager[Any]:
        return torch.cuda.profiler.profile()

    def allow_tf32(self, allowed: bool) -> None:
        # This is the older of torch's two ways. Inductor reads it, and mixing it with `fp32_precision` raises in torch 2.9 and later.
        torch.backends.cuda.matmul.allow_tf32 = allowed
        torch.backends.cudnn.allow_tf32 = allowed

    def tf32_refusal(self) -> str | None:
        properties = self._properties()
        if properties.major < 8:
            return f"{properties.name} has no TF32 (compute capability 8.0 and later do)"
        return None

    def early_launch_refusal(self) -> str | None:
        if torch.cuda.get_device_capability(self.torch_device) >= (9, 0):
            return None
        return f"{self._properties().name} waits for a kernel to end (compute capability 9.0 and later need not)"

    def graph_refusal(self) -> str | None:
        return None

    def record_graph(self, work: Callable[[], T], warmups: int) -> tuple[Callable[[], None], T]:
        return record_graph(work, warmups)

    def shorten_launches(self) -> str | None:
        why = shorten_launches()
        return (
            why and f"no second CUDA context could be opened and closed, so each kernel may start a little later: {why}"
        )

    def versions(self) -> dict[str, str]:
        found = {"cuda": torch.version.cuda or ""}
        if torch.backends.cudnn.is_available():
            found["cudnn"] = str(torch.backends.cudnn.version())
        return found
