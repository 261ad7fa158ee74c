"""This is about what the process takes of the machine: memory, with a limit that makes running out an error; processors; and the processes in
which torch.compile compiles kernels for a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from redline.model.errors import BenchError
from redline.model.units import format_bytes

_STATUS = Path("/proc/self/status")
NEAR_LIMIT = 0.85
NAMED = 3
"""How many of the busiest other processes are named."""
WORTH_NAMING = 0.1
"""Cores. Less is what any machine has."""
_FILLING: list[mmap.mmap] = []
_MOST_FILLING = 16 * 2**40
"""An address space has 128 TiB, of which this much may be filled."""


@contextlib.contextmanager
def on_one_processor(turn: int | None) -> Iterator[None]:
    """Keep this thread on one of its processors, where that can be asked for; threads that exist already stay where they are."""
    if turn is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(allowed)[turn % len(allowed)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)


def limit_private_memory(limit_bytes: int | None) -> int | None:
    """Make running out of memory on a CPU an error inside torch instead of a visit from the kernel's OOM killer.

    Returns the limit that holds now; None where the system has no such thing.
    """
    held = private_bytes()
    if sys.platform != "linux" or held is None:
        return None
    if limit_bytes is None:
        limit_bytes = held + _available_bytes()
    if limit_bytes <= held:
        raise BenchError(
            "oom", f"max_memory {format_bytes(limit_bytes)}: torch alone holds {format_bytes(held)} before any model"
        )
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))
    return limit_bytes


def private_bytes() -> int | None:
    """Returns what this process holds for itself right now, used or not: the figure that the limit is about."""
    return _status_bytes().get("VmData")


def reset_peak_rss() -> None:
    """Start a new high-water mark of resident memory, where the kernel lets us; else `peak_rss_bytes` tells the peak so far."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    return _status_bytes().get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def restart_private_peak() -> None:
    """Let `peak_private_bytes` count from here.

    The mark of the address space cannot be taken back, but reached: an empty mapping that nobody may touch, and that
    counts neither as held nor against the limit, fills what is missing to it. Else a mark from long ago hides what
    comes: the C library maps 128 MiB and gives half of it back at once for every thread that first allocates.
    Where the person limits the address space, which this would eat, the old mark stands.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return
    _let_a_thread_allocate()
    figures = _status_bytes()
    missing = figures.get("VmPeak", 0) - figures.get("VmSize", 0)
    if missing > 0 and sum(map(len, _FILLING)) + missing < _MOST_FILLING:
        with contextlib.suppress(OSError):  # the old mark then stands, too
            _FILLING.append(mmap.mmap(-1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0))


@functools.cache
def _let_a_thread_allocate() -> None:
    """The thread that later watches the device then finds its memory mapped."""
    thread = threading.Thread(target=bytearray, args=(1 << 16,))
    thread.start()
    thread.join()


def peak_private_bytes() -> int | None:
    """The most it has held since it began, or since the peak was restarted. The kernel keeps no such mark, but one of the
    whole address space, of which everything that is not private stays as it is once the libraries are loaded."""
    figures = _status_bytes()
    if not {"VmPeak", "VmSize", "VmData"} <= figures.keys():
        return None
    return figures["VmPeak"] - figures["VmSize"] + figures["VmData"]


def is_near_private_limit() -> bool:
    """True if this process has come so close to its limit that what broke probably broke on it."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    peak = peak_private_bytes()
    return limit != resource.RLIM_INFINITY and peak is not None and peak >= NEAR_LIMIT * limit


def _status_bytes() -> dict[str, int]:
    if not _STATUS.exists():
        return {}
    lines = (line.split() for line in _STATUS.read_text().splitlines() if line.startswith("Vm"))
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines}


def page_faults() -> int:
    """Returns how often the kernel had to give this process a page of memory so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class ProcessorUse(NamedTuple):
    """These are seconds of processors, counted since some moment long ago: only differences mean something."""

    own_s: float
    """The seconds of this process and all that it started."""
    waited_s: dict[str, float]
    """The seconds of each thread in which it was ready to run and no processor was free. Empty where the system does not tell."""
    machine_s: float
    others: dict[int, tuple[str, float]]
    """The name and the seconds of each process that is not ours."""
    at_s: float = 0.0
    """The moment of the look, because looking at every process of a busy machine takes longer than a short block."""

    @classmethod
    def now(cls) -> ProcessorUse:
        # Loader workers that have ended since the look before count as ours too.
        usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(_processor_s, _descendants()))
        times = psutil.cpu_times()
        idle_s = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "guest", 0.0)
        return cls(
            own_s=own_s, waited_s=_waited_s(), machine_s=sum(times) - idle_s, others=_others(), at_s=time.perf_counter()
        )

    def since(self, before: ProcessorUse, wall_s: float) -> dict[str, Any]:
        """Returns the fields of a `Block`."""
        own_s = max(self.own_s - before.own_s, 0.0)
        waited_s = sum(waited - before.waited_s.get(thread, 0.0) for thread, waited in self.waited_s.items())
        looked_s = max(self.at_s - before.at_s, wall_s)
        others_s = max(self.machine_s - before.machine_s - own_s, 0.0)
        return {
            "cpu_s": own_s,
            "waited_s": max(waited_s, 0.0) if self.waited_s else None,
            "others_cpu_s": others_s * wall_s / looked_s if looked_s > 0 else others_s,
            "busiest": self._busiest(before, looked_s),
        }

    def _busiest(self, before: ProcessorUse, wall_s: float) -> tuple[str, ...]:
        """Returns the busiest as a person reads them: `python3 (pid 4711): 0.98 cores`."""
        used = {
            pid: (name, (seconds - before.others.get(pid, ("", 0.0))[1]) / max(wall_s, 1e-9))
            for pid, (name, seconds) in self.others.items()
        }
        busiest = sorted(used.items(), key=lambda item: -item[1][1])[:NAMED]
        return tuple(
            f"{name} (pid {pid}): {cores:.2f} cores" for pid, (name, cores) in busiest if cores >= WORTH_NAMING
        )


def _descendants() -> list[psutil.Process]:
    """Loader workers compute for the step too. Looking for them takes long, so only where there are any."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    if children.exists() and not children.read_text().strip():
        return []
    return psutil.Process().children(recursive=True)


def _processor_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it has just ended
        return 0.0
    return float(times.user + times.system)


def _others() -> dict[int, tuple[str, float]]:
    """Returns every process outside our own session, which holds what we started. Empty where the system does not tell."""
    session, found = os.getsid(0), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it may end meanwhile, or not be ours to see
            # The name stands in parentheses and may hold blanks and parentheses of its own.
            head, _, tail = path.read_text(errors="replace").rpartition(")")
            fields = tail.split()
            if int(fields[3]) != session:
                ticks = int(fields[11]) + int(fields[12])
                found[int(path.parts[-2])] = (head.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK"))
    return found


def _waited_s() -> dict[str, float]:
    """From the scheduler's own account: running, waiting, and how often, in nanoseconds."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread may end meanwhile
            found[path.parts[-2]] = int(path.read_text().split()[1]) / 1e9
    return found


def _available_bytes() -> int:
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


COMPILER = "torch._inductor.async_compile"


def end_compile_pool() -> None:
    """End them; the next kernel that must be compiled starts new ones.

    They begin when the first kernel is loaded, also one that is found in the cache, and then import torch for about 4 s. Torch's
    own way to end them waits for that. Left alone, they take a core while the program, or another beside it, is timed.
    """
    module = sys.modules.get(COMPILER)
    if module is None:
        return
    pools = [pool for pool in module._pool_set if isinstance(getattr(pool, "process", None), subprocess.Popen)]
    for pool in pools:
        _end_pool(pool)
    if pools:
        module.AsyncCompile._ready_future = None
        module.after_fork()


def _end_pool(pool: Any) -> None:
    with pool.write_lock:
        pool.running = False  # so that its thread takes the end of the process as asked for
    if (timer := getattr(pool, "timer", None)) is not None:
        timer.quit()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pool.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    pool.process.kill()
    pool.process.wait()
    pool.shutdown()  # nothing is left of it but what waits for its answers, which is told so
