"""This is the CPU as a device: the host's clock is its clock, its memory is what is resident, and psutil tells its telemetry."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import psutil
import torch

from redline.bench.device.base import Device
from redline.bench.device.process import (
    limit_private_memory,
    peak_private_bytes,
    peak_rss_bytes,
    private_bytes,
    reset_peak_rss,
    restart_private_peak,
)
from redline.model.errors import UsageError
from redline.model.record import DeviceInfo, Memory, TelemetrySample
from redline.system.telemetry import cpu_name, cpu_temperature_c, package_energy_j

_CACHES = Path("/sys/devices/system/cpu")
"""Linux tells the caches of each processor here."""
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""These are the numbers that malloc.h gives to the two settings of `mallopt`."""
KEEP_ALL = 2**31 - 1
"""The largest value of the threshold keeps all memory that is freed."""
USUAL_TRIM_BYTES, USUAL_MMAP_MAX = 128 * 1024, 65536
"""These are glibc's own values, which are set again when memory is no longer kept."""


class CpuDevice(Device):
    kind = "cpu"
    clock: Literal["host", "device"] = "host"
    autocast_type = "cpu"

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self._limit_bytes: int | None = None
        self._product_times: dict[str, float] = {}
        self._keeps_memory = False
        psutil.cpu_percent(interval=None)  # the first look only starts the counter

    def info(self) -> DeviceInfo:
        frequency = psutil.cpu_freq()
        return DeviceInfo(
            kind="cpu",
            name=cpu_name(),
            memory_bytes=psutil.virtual_memory().total,
            capability=torch.backends.cpu.get_cpu_capability(),
            max_clock_hz=frequency.max * 1e6 if frequency and frequency.max else None,
        )

    def unseen_work(self) -> str | None:
        used = torch.cuda.is_initialized() and torch.cuda.memory_allocated() > 0
        return "a GPU" if used else None

    def synchronize(self) -> None:
        """There is nothing to wait for, because a CPU is never ahead of itself."""

    def mark(self) -> int:
        return time.perf_counter_ns()

    def seconds_between(self, marks: Sequence[int]) -> list[float]:
        return [(later - earlier) / 1e9 for earlier, later in pairwise(marks)]

    def reset_peaks(self) -> None:
        reset_peak_rss()
        if self._limit_bytes is not None:  # this is a worker of its own, whose address space is ours to fill
            restart_private_peak()

    def memory(self) -> Memory:
        return Memory(
            peak_rss_bytes=peak_rss_bytes(),
            peak_private_bytes=peak_private_bytes(),
            resident_bytes=private_bytes(),
            limit_bytes=self._limit_bytes,
        )

    def limit_memory(self, limit_bytes: int | None, *, isolated: bool) -> None:
        if isolated:
            self._limit_bytes = limit_private_memory(limit_bytes)
        elif limit_bytes is not None:
            # The limit holds for the whole process, and could not be lifted again for the person's own code.
            raise UsageError("max_memory on a CPU needs a worker of its own: use the fork or the spawn door")

    def cache_bytes(self) -> int | None:
        return last_cache_bytes()

    def look(self, at_s: float, *, neighbours: bool = False) -> TelemetrySample:
        frequency = psutil.cpu_freq()
        return TelemetrySample(
            at_s=at_s,
            utilisation=psutil.cpu_percent(interval=None) / 100,
            memory_used_bytes=psutil.virtual_memory().used,
            temperature_c=cpu_temperature_c(),
            clock_hz=frequency.current * 1e6 if frequency and frequency.current else None,
        )

    def energy_j(self) -> float | None:
        return package_energy_j()

    def compiler_refusal(self) -> str | None:
        found = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), None)
        return None if found else "torch.compile needs a C++ compiler on a CPU"

    def refusal_of(self, dtype: torch.dtype) -> str | None:
        if dtype == torch.float8_e4m3fn:
            return "fp8 products run on GPUs of compute capability 8.9 and later, not on a CPU"
        return None  # every format computes on a CPU, if slowly; a call shows if an operator is missing

    def keeping_refusal(self) -> str | None:
        return None if platform.libc_ver()[0] == "glibc" else "only the C library of Linux (glibc) can be told to"

    def keep_memory(self, keep: bool) -> None:
        # The C library gives memory back in two ways: it trims the heap above a threshold, and it maps large pieces one by one and
        # unmaps them when they are freed. Keeping memory means to stop both.
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_TRIM_THRESHOLD, KEEP_ALL if keep else USUAL_TRIM_BYTES)
        mallopt(M_MMAP_MAX, 0 if keep else USUAL_MMAP_MAX)
        self._keeps_memory = keep

    def restore(self) -> None:
        if self._keeps_memory:
            self.keep_memory(False)

    def product_time(self, number_format: str) -> float | None:
        """Returns the time of a product in bf16 or fp16 over one in fp32, measured once.

        Some CPUs have arithmetic for bf16, and few for fp16. Without it a product takes up to fifty times as long.
        """
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(number_format)
        if dtype is None:
            return None
        if number_format not in self._product_times:
            self._product_times[number_format] = _product_s(dtype) / _product_s(torch.float32)
        return self._product_times[number_format]


PRODUCT_SIZE, PRODUCT_TRIES = 256, 5
"""Products of this size are timed this often. They are small, because a CPU may emulate the format slowly."""


def _product_s(dtype: torch.dtype) -> float:
    """Returns the seconds of the shortest of a few small products. One thread computes them, because several wait for each other on a
    busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        one, other = (torch.ones(PRODUCT_SIZE, PRODUCT_SIZE, dtype=dtype) for _ in range(2))
        taken = []
        for _ in range(PRODUCT_TRIES):
            started = time.perf_counter()
            torch.mm(one, other)
            taken.append(time.perf_counter() - started)
        return min(taken)
    finally:
        torch.set_num_threads(threads)


def last_cache_bytes(caches: Path = _CACHES) -> int | None:
    """Returns the size of all caches of the highest level together, or None if the system does not tell.

    A cache that several cores share counts once.
    """
    found: dict[tuple[int, str], int] = {}
    for folder in caches.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size = int((folder / "level").read_text()), (folder / "size").read_text().strip()
            shared = (folder / "shared_cpu_list").read_text().strip()
        except (OSError, ValueError):
            continue
        if size.endswith("K") and size[:-1].isdigit():
            found[level, shared] = int(size[:-1]) * 1024
    highest = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == highest) or None
