"""Files that hold several processes, as tools write that fuse the traces of a job: one trace for each of them.

Each process counts its launches and operators from 1, so that their numbers collide. Work on a device names the launch
it came from but not the process; what decides is which process has a launch of that number before the work began.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from redline.model.errors import TraceError
from redline.trace.columns import UNKNOWN, Allocations, HostRanges, Ids, Ints, Mask, Trace
from redline.trace.intervals import distinct

MOST_PROCESSES = 1024

Table = TypeVar("Table", bound=HostRanges | Allocations)


def split_by_process(trace: Trace, device_numbers: list[int]) -> list[Trace]:
    """The trace itself where one process made it. `device_numbers`: of each device that its work names by index."""
    numbers = np.array(device_numbers, np.int32)
    processes = {pid: number for number, pid in enumerate(dict.fromkeys(pid for pid, _ in trace.threads))}
    of_thread = np.array([processes[pid] for pid, _ in trace.threads], np.int32)
    working = distinct(np.concatenate((of_thread[trace.operators.thread], of_thread[trace.calls.thread])))
    if len(working) < 2:
        return [replace(trace, work=replace(trace.work, device=numbers[trace.work.device]))]
    if len(working) > MOST_PROCESSES:
        raise TraceError(f"{trace.source} names {len(working):,} processes: this is not the trace of one job")
    owner = _owners(trace, of_thread, working.tolist())
    names = list(processes)
    found = []
    for process in working.tolist():
        mine, work = of_thread == process, trace.work.only(owner == process)
        found.append(
            replace(
                trace,
                operators=_only(trace.operators, mine),
                calls=_only(trace.calls, mine),
                annotations=_only(trace.annotations, mine),
                frames=_only(trace.frames, mine),
                allocations=_only(trace.allocations, mine),
                work=replace(work, device=numbers[work.device]),
                process=str(names[process]),
            )
        )
    return found


def _only(table: Table, wanted: Mask) -> Table:
    rows = wanted[table.thread]
    return replace(table, **{name: column[rows] for name, column in vars(table).items()})


def _owners(trace: Trace, of_thread: Ids, processes: list[int]) -> Ints:
    """For each row of device work, the process that launched it."""
    work = trace.work
    latest = np.full(len(work), np.iinfo(np.int64).min)
    owner = np.full(len(work), UNKNOWN, np.int64)
    fits: list[_Fit] = []
    for process in processes:
        rows, launched = _launched(trace, of_thread, process)
        is_later = launched > latest[rows]
        latest[rows[is_later]], owner[rows[is_later]] = launched[is_later], process
        for device in distinct(work.device[rows]).tolist():
            mine = work.device[rows] == device
            delay = float(np.median(work.start[rows[mine]] - launched[mine]))
            fits.append(_Fit(device, process, int(mine.sum()), delay))
    # A device is nearly always driven by one process; only elsewhere must the latest launch before the work decide.
    driver = _drivers(fits)
    usual = np.array([driver.get(device, processes[0]) for device in range(int(work.device.max(initial=0)) + 1)])
    for process in processes:
        rows, _ = _launched(trace, of_thread, process)
        owner[rows[usual[work.device[rows]] == process]] = process
    return np.where(owner == UNKNOWN, usual[work.device], owner)


@dataclass(frozen=True)
class _Fit:
    """How well a process explains the work of a device."""

    device: int
    process: int
    matches: int
    delay: float
    """From launch to work, the median."""


def _likeliest(fit: _Fit) -> tuple[int, float]:
    """Devices and processes are numbered as they appear in the file, where those of one rank stand together."""
    return abs(fit.device - fit.process), fit.delay


def _drivers(fits: list[_Fit]) -> dict[int, int]:
    """The process that drives each device: the one with the most matching launches.

    Ranks of one job launch the same things, so that several fit equally well; then each drives a device of its own.
    """
    most: defaultdict[int, int] = defaultdict(int)
    for fit in fits:
        most[fit.device] = max(most[fit.device], fit.matches)
    likely = sorted((fit for fit in fits if fit.matches >= 0.99 * most[fit.device]), key=_likeliest)
    driver: dict[int, int] = {}
    for fit in likely:
        if fit.device not in driver and fit.process not in driver.values():
            driver[fit.device] = fit.process
    for fit in likely:
        driver.setdefault(fit.device, fit.process)
    return driver


def _launched(trace: Trace, of_thread: Ids, process: int) -> tuple[Ints, Ints]:
    """The rows of device work that one process may have launched, and when."""
    work, calls = trace.work, trace.calls
    mine = np.flatnonzero(of_thread[calls.thread] == process)
    if not len(mine):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    order = mine[np.argsort(calls.correlation[mine], kind="stable")]
    index = np.minimum(np.searchsorted(calls.correlation[order], work.correlation), len(order) - 1)
    call = order[index]
    same = (calls.correlation[call] == work.correlation) & (work.correlation > 0)
    rows = np.flatnonzero(same & (calls.start[call] <= work.start))
    return rows, calls.start[call[rows]]
