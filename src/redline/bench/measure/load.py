"""What other processes did while something was measured: how many cores they kept busy, and which they were.

Steps that wait for a core take longer than they need, all of them alike: neither the spread nor the interval shows it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType

PROC = Path("/proc")
_TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
NAMED = 3
"""So many of the busiest are named."""
WORTH_NAMING = 0.1
"""Cores. Less is what any machine has."""

Ticks = dict[int, tuple[str, int]]
"""Of each process that is not ours: its name and the ticks of processor time it has had."""


class OthersAtWork:
    """Context manager: `cores` and `busiest` are there once it has been left. Reading takes milliseconds at either end."""

    def __init__(self) -> None:
        self.cores: float | None = None
        """Kept busy by others; None where the system does not tell."""
        self.busiest: tuple[str, ...] = ()

    def __enter__(self) -> OthersAtWork:
        self._processes = _others()
        self._busy, self._own = _busy_ticks(), _own_ticks()
        self._started = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._started
        busy, own = _busy_ticks(), _own_ticks()
        if busy is None or self._busy is None or seconds <= 0:
            return
        self.cores = max(0.0, (busy - self._busy - (own - self._own)) / _TICKS_PER_S / seconds)
        if self.cores >= WORTH_NAMING:
            self.busiest = _named(self._processes, _others(), seconds)


def _named(before: Ticks, after: Ticks, seconds: float) -> tuple[str, ...]:
    """The busiest, with their share: `python3 (pid 4711): 0.98 cores`."""
    used = {pid: (name, ticks - before[pid][1]) for pid, (name, ticks) in after.items() if pid in before}
    used |= {pid: known for pid, known in after.items() if pid not in before}
    shares = {pid: (name, ticks / _TICKS_PER_S / seconds) for pid, (name, ticks) in used.items()}
    busiest = sorted(shares.items(), key=lambda item: -item[1][1])[:NAMED]
    return tuple(f"{name} (pid {pid}): {cores:.2f} cores" for pid, (name, cores) in busiest if cores >= WORTH_NAMING)


def _busy_ticks() -> int | None:
    """Of all processors together, idle and waiting for disks left out."""
    try:
        fields = [int(word) for word in (PROC / "stat").read_text().split("\n", 1)[0].split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _, _, irq, soft = fields[:7]
    return user + nice + system + irq + soft


def _own_ticks() -> int:
    times = os.times()
    return round((times.user + times.system + times.children_user + times.children_system) * _TICKS_PER_S)


def _others() -> Ticks:
    """Every process outside our own session, which holds what we started."""
    session, found = os.getsid(0), {}
    try:
        entries = [entry for entry in os.listdir(PROC) if entry.isdecimal()]
    except OSError:
        return {}
    for entry in entries:
        try:
            text = (PROC / entry / "stat").read_text()
        except OSError:
            continue  # it has ended meanwhile, or is not ours to see
        # The name stands in parentheses and may hold blanks and parentheses of its own.
        head, _, tail = text.rpartition(")")
        fields = tail.split()
        if int(fields[3]) != session:
            found[int(entry)] = (head.partition("(")[2], int(fields[11]) + int(fields[12]))
    return found
