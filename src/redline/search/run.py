"""This loop is behind every measurement: it goes group by group and keeps each record as it comes, until what was asked for is known.

A group is measured interleaved. Each of its recipes is measured until its own interval is narrow enough (`UntilPrecise`), or in
fresh processes until every pair is decided (`redline.search.decide`). A failure is a record like any other.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from redline.launch.door import Door
from redline.launch.workers import invitation
from redline.model.errors import DoorError
from redline.model.note import Note, note
from redline.model.record import Block, Failure, RunRecord, StopReason, new_id
from redline.model.spec import LaunchSpec, RunSpec
from redline.search.decide import decide
from redline.search.grid import Cell, Plan
from redline.search.group import Entry, Group, StopRule
from redline.search.observer import Journal, Observer
from redline.search.train import train_spec
from redline.store import SettledCell, SweepLedger

HOPELESS_AFTER = 0.25
HOPELESS_FACTOR = 4.0
"""After the share `HOPELESS_AFTER` of the ceiling (the longest time allowed), a target that would take `HOPELESS_FACTOR` times the ceiling
is given up."""
BROKEN_DOORS = 3
"""After this many groups in a row whose workers could not be started, the machine is at fault, not the cells."""


class Place(Protocol):
    """A place is where a grid is measured; `redline.verbs.workspace.Workspace` is one."""

    observer: Observer

    def door(self, launch: LaunchSpec | None = None) -> Door: ...

    def lock(self, device: str, ranks: int = 1) -> AbstractContextManager[None]: ...


class Account:
    """An account keeps settled cells in memory, for a grid that nobody resumes. A grid asks it the same as a ledger of the history."""

    def __init__(self) -> None:
        self._cells: dict[str, SettledCell] = {}

    def held(self) -> AbstractContextManager[object]:
        return nullcontext()

    def cells(self) -> dict[str, SettledCell]:
        return dict(self._cells)

    def settle(self, key: str, record: RunRecord) -> None:
        self._cells[key] = SettledCell.by(key, record)

    def forget(self) -> None:
        self._cells.clear()

    def tell(self, done: int, total: int, now: str, *, done_before: int) -> None: ...


Ledger = Account | SweepLedger
Spread = Callable[[Sequence[RunSpec]], Iterator[tuple[int, RunRecord]]]
"""It measures specs elsewhere and yields the record of each with its number, in the order in which they are done."""


@dataclass
class GridRun:
    """A run takes the cells of a plan into a ledger. What is settled there is not measured again."""

    plan: Plan
    place: Place
    ledger: Ledger
    live: Journal | None = None
    """This journal receives every block as it is timed. If it is None, a record is written when it is whole, since blocks of a cell
    that is cut short are not worth a row in the history."""
    load: Callable[[Iterable[str]], Mapping[str, RunRecord]] = lambda ids: {}
    """It loads records that an earlier process has settled."""
    replicates: int = 0
    """Every pair is decided, with this many replicates before an extension; if it is 0, each group is measured once."""
    spread: Spread | None = None
    """If it is given, it measures cells on other machines, one by one and in any order, and the doors of the place are not used."""
    records: dict[str, RunRecord] = field(default_factory=dict)
    """These records were measured here; each is under the key of its cell."""
    decided: list[list[list[RunRecord]]] = field(default_factory=list)
    """These are the replicates of each group, if pairs are decided."""
    _done: int = 0
    _done_before: int = 0

    def go(self, *, resume: bool = False, retry_failed: bool = False) -> None:
        """Measures what is not settled yet; without `resume` it measures all cells anew."""
        with self.ledger.held():
            if not resume:
                self.ledger.forget()
            waiting = unsettled(self.plan, self.ledger.cells(), retry_failed=retry_failed)
            self._done = self._done_before = len(self.plan.cells) - sum(map(len, waiting))
            if self.replicates:
                self._decide(retry_failed)
                return
            self.place.observer.planned(sum(map(len, waiting)))
            if self.spread is not None and waiting:
                self._measure_elsewhere([cell for group in waiting for cell in group], self.spread)
            else:
                self._measure(waiting)

    def _measure(self, waiting: Sequence[Sequence[Cell]]) -> None:
        broken = replicate = 0
        replicates = max(cell.replicate for cell in self.plan.cells)
        for cells in waiting:
            if replicates > 1 and cells[0].replicate > replicate:
                replicate = cells[0].replicate
                self.place.observer.replicate(replicate, replicates, [str(cell.spec.recipe) for cell in cells])
            self._begin(cells)
            try:
                self._measure_group(cells)
                broken = 0
            except DoorError as error:
                if self.live is not None:
                    raise
                broken += 1
                for cell in cells:
                    if cell.key not in self.records:
                        self._settle(cell, broken_record(cell.spec, error))
                if broken >= BROKEN_DOORS:
                    raise DoorError(f"the workers of {broken} groups in a row could not be started: {error}") from None

    def _measure_group(self, cells: Sequence[Cell]) -> None:
        first, observer = cells[0].spec, self.place.observer
        with self.place.lock(first.device, first.ranks if first.launch.rendezvous is None else 1):
            door, journal = self.place.door(first.launch), _CellJournal(self, cells)
            if first.launch.rendezvous is not None:
                observer.noted(invitation(first))
            if first.train is not None:
                train_spec(first, door, journal, observer)
            else:
                # Each replicate has a seed of its own for the order in which blocks are timed.
                seed = first.seed + cells[0].replicate - 1
                measure_together([cell.spec for cell in cells], door, journal, observer, seed)

    def _measure_elsewhere(self, cells: Sequence[Cell], spread: Spread) -> None:
        self.ledger.tell(self._done, len(self.plan.cells), "spread over other machines", done_before=self._done)
        for index, record in spread([cell.spec for cell in cells]):
            self._begin([cells[index]])
            self._settle(cells[index], record)
            self.ledger.tell(self._done, len(self.plan.cells), _words(record.spec), done_before=self._done_before)

    def _decide(self, retry_failed: bool) -> None:
        settled = self.ledger.cells()
        known = self.load(cell.record_id for cell in settled.values())
        for group in self.plan.groups:
            specs, observer = [cell.spec for cell in group], self.place.observer
            before = _replicates_before(group, settled, known, retry_failed=retry_failed)
            replicates = list(before)
            self.decided.append(replicates)
            self._begin(group)

            def keep(
                records: list[RunRecord], group: Sequence[Cell] = group, kept: list[list[RunRecord]] = replicates
            ) -> None:
                kept.append(records)
                for record in records:
                    if self.live is not None:
                        self.live.finish(record)
                    if record.stopped != "interrupted":
                        cell = group[record.position]
                        key = cell.key if len(kept) == 1 else f"{cell.key}-{len(kept)}"
                        self._settle(Cell(spec=cell.spec, key=key, replicate=len(kept), run=cell.run), record)

            with self.place.lock(specs[0].device):
                decide(
                    specs,
                    self.place.door(specs[0].launch),
                    observer,
                    keep,
                    replicates=self.replicates,
                    seed=specs[0].seed,
                    before=before,
                )

    def _begin(self, cells: Sequence[Cell]) -> None:
        done, total = self._done, len(self.plan.cells)
        self.place.observer.measuring(cells, min(done + 1, total), total)
        self.ledger.tell(done, total, _words(cells[0].spec), done_before=self._done_before)

    def _settle(self, cell: Cell, record: RunRecord) -> None:
        self.ledger.settle(cell.key, record)
        self._done += cell.key not in self.records
        self.records[cell.key] = record
        self.place.observer.settled(cell, record)


class _CellJournal:
    """This journal brings the records of one group to its cells."""

    def __init__(self, run: GridRun, cells: Sequence[Cell]) -> None:
        self._run, self._cells = run, cells

    def begin(self, record: RunRecord) -> None:
        if self._run.live is not None:
            self._run.live.begin(record)

    def append(self, record_id: str, block: Block) -> None:
        """Passes a block on to the live journal. If there is none, the block is written with the whole record."""
        if self._run.live is not None:
            self._run.live.append(record_id, block)

    def finish(self, record: RunRecord) -> None:
        if self._run.live is not None:
            self._run.live.finish(record)
        if record.stopped != "interrupted":
            self._run._settle(self._cells[record.position], record)


def unsettled(plan: Plan, settled: Mapping[str, SettledCell], *, retry_failed: bool = False) -> list[list[Cell]]:
    """Returns the cells of each group that are still to be measured; groups without any are left out."""

    def is_settled(cell: Cell) -> bool:
        known = settled.get(cell.key)
        return known is not None and not (retry_failed and known.status == "failed")

    waiting = [[cell for cell in group if not is_settled(cell)] for group in plan.groups]
    return [group for group in waiting if group]


def broken_record(spec: RunSpec, error: DoorError) -> RunRecord:
    failure = Failure(stage="door", kind="crash", message=str(error))
    return RunRecord(id=new_id(), spec=spec, created_at=time.time(), failure=failure, stopped="failed")


def _replicates_before(
    group: Sequence[Cell], settled: Mapping[str, SettledCell], known: Mapping[str, RunRecord], *, retry_failed: bool
) -> list[list[RunRecord]]:
    """Returns the replicates that an earlier process has measured, each with the recipes that were in it."""
    replicates: list[list[RunRecord]] = []
    while True:
        number = len(replicates) + 1
        keys = [cell.key if number == 1 else f"{cell.key}-{number}" for cell in group]
        records = [known[settled[key].record_id] for key in keys if key in settled and settled[key].record_id in known]
        if not records or (retry_failed and any(record.failure is not None for record in records)):
            return replicates
        replicates.append(records)


def _words(spec: RunSpec) -> str:
    """Returns the words that name a cell for those who look on."""
    workload = spec.workload
    batch = f"batch {workload.batch}" if workload.batch else ""
    return " ".join(part for part in (workload.model, workload.task, str(spec.recipe), batch) if part)


def measure_together(
    specs: Sequence[RunSpec],
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    seed: int = 0,
) -> list[RunRecord]:
    """Measures `specs` interleaved, and returns one record each, in their order. What breaks becomes a failed record."""
    observer = observer or Observer()
    why = _why_not_together(specs) if len(specs) > 1 else None
    if why is not None:
        return [_measure_solo(spec, position, why, door, journal, observer) for position, spec in enumerate(specs)]
    with Group(door, journal, observer, random.Random(seed), is_shared=len(specs) > 1) as group:
        for position, spec in enumerate(specs):
            entry = group.open(spec, position)
            if entry is not None:
                group.measure_solo(entry)
        group.measure(UntilPrecise())
    text = "did not fit in memory beside the other recipes: measured by itself, so there is no ratio"
    why = note("measured-separately", text, about="memory")
    for position in group.crowded:
        group.done[position] = _measure_solo(specs[position], position, why, door, journal, observer)
    return [group.done[position] for position in range(len(specs))]


def _why_not_together(specs: Sequence[RunSpec]) -> Note | None:
    separately = "measured one after the other, so there is no ratio"
    if any(spec.launch.door == "inline" for spec in specs):
        text = f"inline sessions share one process and its settings: {separately}"
        return note("measured-separately", text, about="inline")
    if any(spec.launch.rendezvous for spec in specs):
        text = f"ranks that others start serve one recipe at a time: {separately}"
        return note("measured-separately", text, about="rendezvous")
    return None


def _measure_solo(
    spec: RunSpec, position: int, why: Note, door: Door, journal: Journal, observer: Observer
) -> RunRecord:
    """Measures a spec by itself. Its record says why, because runs that merely followed each other have no ratio."""
    with Group(door, journal, observer, random.Random(0), is_shared=False) as group:
        group.open(spec, position, notes=(why,))
        group.measure(UntilPrecise())
    return group.done[position]


class UntilPrecise(StopRule):
    """Each entry is measured until its own interval is narrow enough or its time is up; the first goes on as long as any other needs it."""

    def visited(self, entries: Sequence[Entry]) -> list[Entry]:
        visited = super().visited(entries)
        first = entries[0] if entries else None
        if visited and first is not None and first not in visited and self._has_time(first):
            visited.append(first)  # ratios are to the first, so without it a round says nothing about them
        return visited

    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        for entry in entries:
            if entry.is_sound:
                entry.stopped = self._reason(entry)

    @staticmethod
    def _has_time(entry: Entry) -> bool:
        return entry.is_sound and entry.timed_s < entry.spec.measure.max_seconds

    def _reason(self, entry: Entry) -> StopReason | None:
        """Returns why an entry stops: its target is reached, or its time is up or surely will be first. None means that it goes on."""
        ceiling_s = entry.spec.measure.max_seconds
        is_over = entry.timed_s >= ceiling_s
        if not _has_enough_samples(entry):
            return "ceiling" if is_over else None
        intervals = [entry.interval(kind) for kind in entry.kinds]
        width = max(interval.half_width if interval else math.inf for interval in intervals)
        if width <= entry.target:
            return "target"
        if is_over:
            return "ceiling"
        # An interval narrows with the square root of time. If that says that the target is far out of reach, no more time is spent.
        needed_s = entry.timed_s * (width / entry.target) ** 2
        is_hopeless = entry.timed_s >= HOPELESS_AFTER * ceiling_s and needed_s > HOPELESS_FACTOR * ceiling_s
        return "unreachable" if is_hopeless else None


def _has_enough_samples(entry: Entry) -> bool:
    measure = entry.spec.measure
    if len(entry.blocks.get("throughput", [])) < measure.min_rounds:
        return False
    tail = measure.tail_samples if entry.spec.workload.task == "infer" else 0
    needed = dict.fromkeys(entry.kinds, measure.min_samples) | {entry.kinds[-1]: max(measure.min_samples, tail)}
    return all(sum(len(block.samples) for block in entry.blocks[kind]) >= count for kind, count in needed.items())
