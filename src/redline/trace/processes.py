"""Files that hold several processes, as tools write that fuse the traces of a job: one trace for each of them.

Each process counts its launches and operators from 1, so that their numbers collide. Work on a device names the launch
it came from but not the process; what decides is which process has a launch of that number before the work began.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from redline.model.errors import TraceError
from redline.trace.columns import UNKNOWN, Ids, Ints, Trace
from redline.trace.intervals import distinct

MOST_PROCESSES = 1024
FITS_AS_WELL = 0.99
"""Ranks of one job launch the same things: processes that explain this share of the best one's work fit equally well."""


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
    owner, names = _owners(trace, of_thread, working.tolist()), list(processes)
    found = []
    for process in working.tolist():
        tables = {}
        for name in ("operators", "calls", "annotations", "frames", "allocations"):
            table = getattr(trace, name)
            mine = of_thread[table.thread] == process
            tables[name] = replace(table, **{column: values[mine] for column, values in vars(table).items()})
        work = trace.work.only(owner == process)
        work = replace(work, device=numbers[work.device])
        found.append(replace(trace, work=work, process=str(names[process]), **tables))
    return found


class _Fit(NamedTuple):
    """How well a process explains the work of a device."""

    distance: int
    """Devices and processes are numbered as they appear in the file, where those of one rank stand together."""
    delay: float
    """From launch to work, the median."""
    matches: int
    device: int
    process: int


def _owners(trace: Trace, of_thread: Ids, processes: list[int]) -> Ints:
    """For each row of device work, the process that launched it."""
    work = trace.work
    latest, owner = np.full(len(work), np.iinfo(np.int64).min), np.full(len(work), UNKNOWN, np.int64)
    launched = {process: _launched(trace, of_thread, process) for process in processes}
    fits: list[_Fit] = []
    for process, (rows, at) in launched.items():
        is_later = at > latest[rows]
        latest[rows[is_later]], owner[rows[is_later]] = at[is_later], process
        for device in distinct(work.device[rows]).tolist():
            mine = work.device[rows] == device
            delay = float(np.median(work.start[rows[mine]] - at[mine]))
            fits.append(_Fit(abs(device - process), delay, int(mine.sum()), device, process))
    # A device is nearly always driven by one process; only elsewhere must the latest launch before the work decide.
    most = {device: max(fit.matches for fit in fits if fit.device == device) for device in {fit.device for fit in fits}}
    likely = sorted(fit for fit in fits if fit.matches >= FITS_AS_WELL * most[fit.device])
    driver: dict[int, int] = {}
    for fit in likely:  # each drives a device of its own, where that is possible
        if fit.process not in driver.values():
            driver.setdefault(fit.device, fit.process)
    for fit in likely:
        driver.setdefault(fit.device, fit.process)
    usual = np.array([driver.get(device, processes[0]) for device in range(int(work.device.max(initial=0)) + 1)])
    for process, (rows, _) in launched.items():
        owner[rows[usual[work.device[rows]] == process]] = process
    return np.where(owner == UNKNOWN, usual[work.device], owner)


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
