"""What a process must do to become a worker: own descriptors, death with its parent, first in line when memory ends."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent goes, and go at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def volunteer_for_oom() -> None:
    """Rather this worker than the desk or the user's editor."""
    if _OOM_SCORE_ADJ.exists():
        _OOM_SCORE_ADJ.write_text("1000")


def own_descriptors(log: int) -> None:
    """Libraries below Python (Kineto, nanobind, compilers) write to 1 and 2: send them to the worker's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def limit_private_memory(limit_bytes: int | None) -> None:
    """Make running out of memory on a CPU an error inside torch instead of a visit from the kernel's OOM killer."""
    if sys.platform != "linux":
        return
    if limit_bytes is None:
        limit_bytes = _private_bytes() + _available_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, hard))


def _private_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0


def _available_bytes() -> int:
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        available = min(available, int(text) - int(used.read_text()))
    return max(available, 0)
