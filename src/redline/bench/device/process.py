"""This is about what the process takes of the machine: its memory, with a limit that makes running out of it an error, its processors,
and the processes in which torch.compile compiles kernels for a GPU.
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
"""Linux tells the memory of this process here. Other systems have no such file, and then some figures are missing."""
NEAR_LIMIT = 0.85
"""A process whose peak reaches this share of its limit probably broke on it: the piece that did not fit counts towards no peak."""
NAMED = 3
"""At most this many of the busiest other processes are named."""
WORTH_NAMING = 0.1
"""A process that uses fewer cores than this is not named, because every machine has such processes."""
_FILLING: list[mmap.mmap] = []
"""These are the empty mappings of `restart_private_peak`, which must stay for as long as the process lives."""
_MOST_FILLING = 16 * 2**40
"""At most this much of the address space may be filled, which has 128 TiB."""


@contextlib.contextmanager
def on_one_processor(turn: int | None) -> Iterator[None]:
    """Within this context the thread stays on one of its processors, where the system allows that. Other threads that exist already
    stay where they are."""
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
    """Makes running out of memory on a CPU an error inside torch instead of a visit from the kernel's OOM killer.

    Returns the limit that holds now, or None if the system has no such limit.
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
    """Returns the bytes that this process holds for itself now, used or not. This is the figure that the limit is about."""
    return _status_bytes().get("VmData")


def reset_peak_rss() -> None:
    """Starts a new high-water mark of resident memory if the kernel allows it. Otherwise `peak_rss_bytes` is the peak so far."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_rss_bytes() -> int:
    return _status_bytes().get("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def restart_private_peak() -> None:
    """Makes `peak_private_bytes` count from here.

    The mark of the address space cannot be taken back, but it can be reached: an empty mapping that nobody may touch fills what is
    missing to it, and counts neither as held nor against the limit. Otherwise a mark from long ago hides what comes. For example,
    the C library maps 128 MiB and gives half of it back at once for every thread that first allocates.
    If the person limits the address space, which the mapping would use up, the old mark stands.
    """
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return
    _let_a_thread_allocate()
    figures = _status_bytes()
    missing = figures.get("VmPeak", 0) - figures.get("VmSize", 0)
    if missing > 0 and sum(map(len, _FILLING)) + missing < _MOST_FILLING:
        with contextlib.suppress(OSError):  # in this case the old mark stands, too
            _FILLING.append(mmap.mmap(-1, missing, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0))


@functools.cache
def _let_a_thread_allocate() -> None:
    """Lets a thread allocate and end, once. The thread that later watches the device then finds its memory mapped."""
    thread = threading.Thread(target=bytearray, args=(1 << 16,))
    thread.start()
    thread.join()


def peak_private_bytes() -> int | None:
    """Returns the most bytes that the process has held for itself since it began, or since the peak was restarted.

    The kernel keeps no such mark. It keeps one of the whole address space, of which everything that is not private stays as it is
    once the libraries are loaded.
    """
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
    """These are seconds of processors, counted since some moment long ago. Only differences between two of them mean something."""

    own_s: float
    """This process and all that it started have used these seconds."""
    waited_s: dict[str, float]
    """Each thread was ready to run for these seconds while no processor was free. It is empty if the system does not tell."""
    machine_s: float
    """All processors of the machine together were busy for these seconds."""
    others: dict[int, tuple[str, float]]
    """This holds the name and the seconds of each process that is not ours, by its number."""
    at_s: float = 0.0
    """This is the moment of the look. Looking at every process of a busy machine takes longer than a short block, so it counts."""

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
        """Returns what was used since an earlier look, as fields of a `Block`."""
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
        """Returns the busiest other processes as a person reads them, such as `python3 (pid 4711): 0.98 cores`."""
        used = {
            pid: (name, (seconds - before.others.get(pid, ("", 0.0))[1]) / max(wall_s, 1e-9))
            for pid, (name, seconds) in self.others.items()
        }
        busiest = sorted(used.items(), key=lambda item: -item[1][1])[:NAMED]
        return tuple(
            f"{name} (pid {pid}): {cores:.2f} cores" for pid, (name, cores) in busiest if cores >= WORTH_NAMING
        )


def _descendants() -> list[psutil.Process]:
    """Returns the processes that this one started, such as loader workers, which compute for the step too.

    Looking for them takes long, so it is done only if there are any.
    """
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
    """Returns every process outside our own session, which holds what we started. It is empty if the system does not tell."""
    session, found = os.getsid(0), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # it may end meanwhile, or not be ours to see
            # The name stands in parentheses, and may contain blanks and parentheses.
            head, _, tail = path.read_text(errors="replace").rpartition(")")
            fields = tail.split()
            if int(fields[3]) != session:
                ticks = int(fields[11]) + int(fields[12])
                found[int(path.parts[-2])] = (head.partition("(")[2], ticks / os.sysconf("SC_CLK_TCK"))
    return found


def _waited_s() -> dict[str, float]:
    """Returns how long each thread has waited for a processor. The scheduler's own account has three numbers for each thread:
    nanoseconds running, nanoseconds waiting, and how often it ran."""
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError):  # a thread may end meanwhile
            found[path.parts[-2]] = int(path.read_text().split()[1]) / 1e9
    return found


def _available_bytes() -> int:
    """Returns the memory that is free, of the machine or of the process's control group, whichever is less."""
    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)


COMPILER = "torch._inductor.async_compile"
"""This module of torch holds the processes in which it compiles. It is looked up and not imported, because loading it takes long."""


def end_compile_pool() -> None:
    """Ends the processes in which torch.compile compiles. The next kernel that must be compiled starts new ones.

    They begin when the first kernel is loaded, even one that is found in the cache, and then import torch for about 4 s. Torch's
    own way to end them waits for that. If they were left alone, they would take a core while this program or another is timed.
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
        pool.running = False  # so that its thread knows that the process was meant to end
    if (timer := getattr(pool, "timer", None)) is not None:
        timer.quit()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pool.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
    pool.process.kill()
    pool.process.wait()
    pool.shutdown()  # what still waits for its answers is told that none will come
