"""This module tells processes from each other, and leaves none behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Collection
from functools import cache
from pathlib import Path

import psutil

STRAYS_END_S = 5.0
"""A killed process is gone at once, unless it waits for a disk or a driver."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
"""Both numbers are those of Linux's `prctl`, for which Python has no names."""


def give_way() -> None:
    """Lets a measurement on the same machine come first: this process never interrupts another that runs.

    It still gets a small share of processors that are all busy.
    """
    os.nice(10)
    policy = getattr(os, "SCHED_BATCH", None)
    if policy is not None:
        with contextlib.suppress(OSError):  # a sandbox may forbid it, and the lower priority remains
            os.sched_setscheduler(0, policy, os.sched_param(0))


def this_process() -> str:
    """Returns a name that no other process on any machine has."""
    return f"{_machine()} {os.getpid()} {_started(psutil.Process())}"


def is_gone(name: str) -> bool:
    """Returns true only where that is certain, because nothing is known here of another machine or container."""
    machine, pid, started = name.rsplit(" ", 2)
    if machine != _machine():
        return False
    try:
        process = psutil.Process(int(pid))
        return process.status() == psutil.STATUS_ZOMBIE or _started(process) != started
    except psutil.NoSuchProcess:
        return True
    except psutil.AccessDenied:  # somebody else's, which the system hides
        return False


def _started(process: psutil.Process) -> str:
    """Returns when a process started, counted from boot: setting the clock does not change it."""
    booted = psutil.boot_time()
    return f"{process.create_time() - booted:.2f}"


def _machine() -> str:
    try:
        processes = os.readlink("/proc/self/ns/pid")  # a container numbers its processes anew
    except OSError:
        processes = ""
    return f"{socket.gethostname()}/{_machine_id()}/{processes}"


@cache
def _machine_id() -> str:
    """Hosts may share a name; machines that were set up apart do not share this."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent goes, and go at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> bool:
    """Becomes the parent of what this process's descendants leave behind, also of daemons. Returns false where only init can."""
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1) == 0)


def kill_group(leader: int) -> None:
    """End a process group, if it still has processes."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def end_strays(spared: Collection[int] = ()) -> None:
    """End the children of this process and all their descendants, but for those that are `spared`.

    With `adopt_orphans` in this process and in its workers, a child that is no worker was left behind by a worker that
    has ended: a living one adopts its own.
    """
    deadline = time.monotonic() + STRAYS_END_S
    while strays := [child for child in psutil.Process().children() if child.pid not in spared]:
        for stray in strays:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in (stray, *stray.children(recursive=True)):
                    process.kill()
        psutil.wait_procs(strays, timeout=0.1)  # theirs become ours
        if time.monotonic() > deadline:
            return


def keep_standard_descriptors() -> None:
    """Open what the person has closed of 0, 1 and 2: a socket would get its number, and a child would lose it."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number
