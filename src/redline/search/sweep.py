"""A sweep: its plan of cells (`make_plan`), and measuring those that are not settled yet (`sweep_plan`).

The cells have keys that are known before anything runs. The spec key of a record holds the hash of the built model,
so it comes too late to ask whether a cell is already there. The plan key stands in for it: the spec, the machine as one
question to the bench describes it, and what the model's source knows without building it
(`docs/decisions/0002-plan-keys.md`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

from redline.analyze.sweep import (
    Estimate,
    IdleExclusion,
    LeftOut,
    SweepCell,
    SweepSummary,
    cell_of,
    elapsed_s,
    sweep_summary,
)
from redline.launch.door import Door
from redline.model.environment import Environment, TelemetrySample
from redline.model.errors import DoorError, SpecError, UsageError
from redline.model.identity import plan_key
from redline.model.note import note
from redline.model.questions import Checked
from redline.model.record import Block, Failure, RunRecord, new_id
from redline.model.spec import RunSpec
from redline.search.grid import default_name, in_informative_order, is_default_name
from redline.search.observer import Observer
from redline.search.run import measure_together
from redline.store import Row, SettledCell
from redline.system.locks import device_lock

LOOK_BACK = 100
"""Records of a model that an estimate looks through: the newest, so that a long history costs no more than a short one."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One combination, to be measured in a process of its own."""

    spec: RunSpec
    key: str
    replicate: int = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    name: str
    cells: tuple[Cell, ...]
    """In the order in which they are measured."""
    shares: bool = False
    """It has no name of its own: cells that another such sweep has measured need not be measured again."""
    left_out: tuple[LeftOut, ...] = ()
    idle_exclusions: tuple[IdleExclusion, ...] = ()


class Past(Protocol):
    """What an estimate asks a history: `redline.store.History`."""

    def rows(self, *, model: str, limit: int) -> list[Row]: ...

    def load(self, id_or_unique_prefix: str, /) -> RunRecord: ...


def make_plan(
    specs: Sequence[RunSpec],
    answers: Sequence[Checked],
    environment_of: Callable[[str], Environment],
    name: str | None = None,
    idle_exclusions: Sequence[IdleExclusion] = (),
    replicates: int = 1,
) -> Plan:
    """From a grid and the bench's answers about it. A mistake is raised; a combination that cannot be is left out."""
    possible = [answer for answer in answers if answer.usage is None]
    left_out = [_left_out(answer, possible) for answer in answers if answer.usage is not None]
    environments = {device: environment_of(device) for device in {answer.spec.device for answer in possible}}
    cells = [
        Cell(spec=answer.spec, key=plan_key(answer.spec, answer.fingerprint, environments[answer.spec.device]))
        for answer in in_informative_order(possible)
    ]
    once = list({cell.key: cell for cell in cells}.values())
    return Plan(
        # By what was asked for: what `auto` means may differ from machine to machine.
        name=name or default_name(specs),
        # All cells once before any is measured again: what drifts then hits all of them alike.
        cells=tuple(_repeated(cell, number) for number in range(1, replicates + 1) for cell in once),
        shares=name is None,
        left_out=tuple(left_out),
        idle_exclusions=tuple(idle_exclusions),
    )


def _repeated(cell: Cell, replicate: int) -> Cell:
    """The first keeps the plain key, so that asking for more replicates goes on with what is there."""
    return cell if replicate == 1 else Cell(spec=cell.spec, key=f"{cell.key}-{replicate}", replicate=replicate)


def check_name(name: Any) -> None:
    """Refuse a name that cannot be used later: `redline compare` takes several joined by commas."""
    if name is not None and (not isinstance(name, str) or not name.strip()):
        raise SpecError(f"name must be a text that is not empty, got {name!r}")
    if name is not None and "," in name:
        raise SpecError(f"name must not have a comma, which joins names where sweeps are compared, got {name!r}")


def estimate(cells: Iterable[Cell], past: Past) -> Estimate:
    """A cell takes about as long as the newest of its model and task under the same recipe, else under any."""

    @cache
    def rows_of(model: str) -> list[Row]:
        found = past.rows(model=model, limit=LOOK_BACK)
        # Records measured in turns with others took the others' time as well.
        return [row for row in found if row.status == "done" and row.group is None]

    @cache
    def seconds_of(model: str, task: str, recipe: str) -> float | None:
        same_task = [row for row in rows_of(model) if row.task == task]
        for row in sorted(same_task, key=lambda row: row.recipe != recipe)[:1]:
            return elapsed_s(past.load(row.id))
        return None

    cells = list(cells)
    times = [seconds_of(cell.spec.workload.model, cell.spec.workload.task, str(cell.spec.recipe)) for cell in cells]
    known = [seconds for seconds in times if seconds is not None]
    strangers = [cell.spec.workload.model for cell, seconds in zip(cells, times, strict=True) if seconds is None]
    return Estimate(
        seconds=sum(known),
        known=len(known),
        unknown=len(strangers),
        unknown_models=tuple(dict.fromkeys(strangers)),
    )


def _left_out(answer: Checked, possible: Sequence[Checked]) -> LeftOut:
    """A refusal is a mistake, unless its model and its recipe are both possible elsewhere in the grid."""
    spec, reason = answer.spec, answer.usage
    assert reason is not None
    model_is_sound = any(other.spec.workload.model == spec.workload.model for other in possible)
    recipe_is_sound = any(other.spec.recipe == spec.recipe for other in possible)
    if not (model_is_sound and recipe_is_sound):
        raise UsageError(reason)
    workload = spec.workload
    return LeftOut(
        model=workload.model,
        task=workload.task,
        recipe=str(spec.recipe),
        batch=workload.batch,
        reason=note("impossible", reason),
    )


BROKEN_DOORS = 3
"""After this many workers in a row that could not be started, the machine is at fault, not the cells."""


class Ledger(Protocol):
    """Where settled cells are kept: `redline.store.SweepLedger`."""

    def held(self) -> AbstractContextManager[None]: ...

    def cells(self) -> dict[str, SettledCell]: ...

    def elsewhere(self, keys: Sequence[str], is_welcome: Callable[[str], bool]) -> dict[str, SettledCell]: ...

    def adopt(self, cells: Iterable[SettledCell]) -> None: ...

    def settle(self, key: str, record: RunRecord) -> None: ...

    def forget(self) -> None: ...

    def announce(self, done: int, total: int, now: str, *, done_before: int) -> None: ...

    def observe(self, telemetry: TelemetrySample) -> None: ...


Spread = Callable[[Sequence[RunSpec]], Iterator[tuple[int, RunRecord]]]
"""Measures specs elsewhere: the record of each with its number, in the order in which they are done."""


class CellJournal:
    """Keeps a cell's record back until it is whole: blocks of a cell that is cut short are not worth a row."""

    def __init__(self, ledger: Ledger, key: str) -> None:
        self._ledger = ledger
        self._key = key

    def begin(self, record: RunRecord) -> None:
        """Nothing yet."""

    def append(self, record_id: str, block: Block) -> None:
        """Show the latest telemetry; the block itself is written with the whole record."""
        if block.telemetry:
            self._ledger.observe(block.telemetry[-1])

    def finish(self, record: RunRecord) -> None:
        if record.stopped != "interrupted":
            self._ledger.settle(self._key, record)


def sweep_plan(
    plan: Plan,
    door: Door,
    ledger: Ledger,
    observer: Observer | None = None,
    *,
    fresh: bool = False,
    retry_failed: bool = False,
    spread: Spread | None = None,
) -> SweepSummary:
    """Measure what is not settled yet. `fresh` starts over, `retry_failed` tries failed cells again.

    `spread` measures cells on other machines, in any order, instead of through the door.
    """
    observer = observer or Observer()
    with ledger.held():
        if fresh:
            ledger.forget()
        else:
            ledger.adopt(measured_elsewhere(plan, ledger).values())
        waiting = unsettled(plan, ledger.cells(), retry_failed=retry_failed)
        broken, settled = 0, len(plan.cells) - len(waiting)
        if spread is not None and waiting:
            ledger.announce(settled, len(plan.cells), "spread over other machines", done_before=settled)
            for count, (index, record) in enumerate(spread([cell.spec for cell in waiting]), start=settled + 1):
                observer.cell(waiting[index], count, len(plan.cells))
                ledger.settle(waiting[index].key, record)
                observer.settled(waiting[index], record)
                ledger.announce(count, len(plan.cells), _words(waiting[index].spec), done_before=settled)
            return standing(plan, ledger.cells())
        for number, cell in enumerate(waiting, start=settled + 1):
            observer.cell(cell, number, len(plan.cells))
            ledger.announce(number - 1, len(plan.cells), _words(cell.spec), done_before=settled)
            record = measure_cell(cell, door, ledger, observer)
            observer.settled(cell, record)
            failure = record.failure
            broken = broken + 1 if failure is not None and failure.stage == "door" else 0
            if failure is not None and broken == BROKEN_DOORS:
                raise DoorError(f"{broken} workers in a row could not be started: {failure.message}")
        return standing(plan, ledger.cells())


def _words(spec: RunSpec) -> str:
    """Which cell, for those who look on."""
    workload = spec.workload
    batch = f"batch {workload.batch}" if workload.batch else ""
    return " ".join(part for part in (workload.model, workload.task, str(spec.recipe), batch) if part)


def measure_cell(cell: Cell, door: Door, ledger: Ledger, observer: Observer) -> RunRecord:
    """One cell, alone. A worker that cannot even be started is a failed cell too."""
    journal = CellJournal(ledger, cell.key)
    try:
        with device_lock(cell.spec.device, on_wait=observer.waiting, on_note=observer.noted):
            (record,) = measure_together([cell.spec], door, journal, observer, seed=cell.spec.seed)
    except DoorError as error:
        failure = Failure(stage="door", kind="crash", message=str(error))
        record = RunRecord(id=new_id(), spec=cell.spec, created_at=time.time(), failure=failure, stopped="failed")
        journal.finish(record)
    return record


def measured_elsewhere(plan: Plan, ledger: Ledger) -> dict[str, SettledCell]:
    """Cells of this plan that a smaller or another grid has measured; a sweep with a name of its own keeps to itself."""
    if not plan.shares:
        return {}
    own = ledger.cells()
    return ledger.elsewhere([cell.key for cell in plan.cells if cell.key not in own], is_default_name)


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
        return cell_of(cell.spec, "pending", replicate=cell.replicate)
    failure = None
    if settled.status == "failed":
        failure = Failure(
            stage=settled.failure_stage or "",
            kind=settled.failure_kind or "crash",
            message=settled.failure_message or "",
        )
    return cell_of(cell.spec, settled.status, settled.record_id, failure, cell.replicate)
