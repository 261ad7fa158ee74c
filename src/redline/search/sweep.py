"""Sweeps that never lose a row: each cell measured alone, in a process of its own, and written the moment it is done.

Cells follow each other, so no ratio between two of them carries an interval; `redline run` with several recipes
measures them in turns. What a kill can take away is the cell in flight: its record and the note that settles it are
one transaction (`redline.store.sweeps`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from redline.analyze.summary import FailureSummary
from redline.analyze.sweep import Estimate, SweepCell, SweepSummary, cell_of, sweep_summary
from redline.errors import DoorError
from redline.launch.lock import device_lock
from redline.launch.session import Door
from redline.record import Block, Failure, RunRecord, new_id
from redline.search.interleave import Observer, measure_together
from redline.search.plan import Cell, Plan
from redline.store import SettledCell

BROKEN_DOORS = 3
"""So many workers in a row that could not even be started: the machine is at fault, not the cells."""


class Ledger(Protocol):
    """Where settled cells are kept: `redline.store.SweepLedger`."""

    def held(self) -> AbstractContextManager[None]: ...

    def cells(self) -> dict[str, SettledCell]: ...

    def settle(self, key: str, record: RunRecord) -> None: ...

    def forget(self) -> None: ...


class SweepObserver(Observer):
    """Is told of cells as well."""

    def planned(self, plan: Plan, waiting: int, estimate: Estimate) -> None: ...

    def cell(self, cell: Cell, number: int, of: int) -> None: ...

    def settled(self, cell: Cell, record: RunRecord) -> None: ...


class CellJournal:
    """Keeps a cell's record back until it is whole: blocks of a cell that is cut short are not worth a row."""

    def __init__(self, ledger: Ledger, key: str) -> None:
        self._ledger = ledger
        self._key = key

    def begin(self, record: RunRecord) -> None:
        """Nothing yet."""

    def append(self, record_id: str, block: Block) -> None:
        """Nothing yet."""

    def finish(self, record: RunRecord) -> None:
        if record.stopped != "interrupted":
            self._ledger.settle(self._key, record)


def sweep(
    plan: Plan,
    door: Door,
    ledger: Ledger,
    observer: SweepObserver | None = None,
    *,
    fresh: bool = False,
    retry_failed: bool = False,
) -> SweepSummary:
    """Measure what is not settled yet. `fresh` starts over, `retry_failed` tries failed cells again."""
    observer = observer or SweepObserver()
    with ledger.held():
        if fresh:
            ledger.forget()
        waiting = unsettled(plan, ledger.cells(), retry_failed=retry_failed)
        broken = 0
        for number, cell in enumerate(waiting, start=len(plan.cells) - len(waiting) + 1):
            observer.cell(cell, number, len(plan.cells))
            record = measure_cell(cell, door, ledger, observer)
            observer.settled(cell, record)
            failure = record.failure
            broken = broken + 1 if failure is not None and failure.stage == "door" else 0
            if failure is not None and broken == BROKEN_DOORS:
                raise DoorError(f"{broken} workers in a row could not be started: {failure.message}")
        return standing(plan, ledger.cells())


def measure_cell(cell: Cell, door: Door, ledger: Ledger, observer: Observer) -> RunRecord:
    """One cell, alone. A worker that cannot even be started is a failed cell too."""
    journal = CellJournal(ledger, cell.key)
    try:
        with device_lock(cell.spec.device, on_wait=observer.waiting):
            (record,) = measure_together([cell.spec], door, journal, observer, seed=cell.spec.seed)
    except DoorError as error:
        failure = Failure(stage="door", kind="crash", message=str(error))
        record = RunRecord(id=new_id(), spec=cell.spec, created_at=time.time(), failure=failure, stopped="failed")
        journal.finish(record)
    return record


def unsettled(plan: Plan, settled: Mapping[str, SettledCell], *, retry_failed: bool = False) -> list[Cell]:
    def is_settled(cell: Cell) -> bool:
        known = settled.get(cell.key)
        return known is not None and not (retry_failed and known.status == "failed")

    return [cell for cell in plan.cells if not is_settled(cell)]


def standing(plan: Plan, settled: Mapping[str, SettledCell]) -> SweepSummary:
    """How every cell of the plan stands."""
    cells = [_standing(cell, settled.get(cell.key)) for cell in plan.cells]
    return sweep_summary(plan.name, cells, plan.left_out, plan.idle_exclusions)


def _standing(cell: Cell, settled: SettledCell | None) -> SweepCell:
    if settled is None:
        return cell_of(cell.spec, "pending")
    failure = None
    if settled.status == "failed":
        failure = FailureSummary(
            stage=settled.failure_stage or "", kind=settled.failure_kind or "", message=settled.failure_message or ""
        )
    return cell_of(cell.spec, settled.status, settled.record_id, failure)
