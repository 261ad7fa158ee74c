"""An `Observer` hears what a measurement reports while it runs, and a `Journal` receives its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from redline.analyze.batch import BatchTrial, Purpose
from redline.analyze.load import LoadPoint
from redline.analyze.pairs import Pair
from redline.analyze.statistics import Interval
from redline.model.protocol import Progress
from redline.model.record import Block, Epoch, RunRecord

if TYPE_CHECKING:
    from redline.search.grid import Cell, Plan


class Observer:
    """An observer receives events. Every method does nothing: override the ones you need."""

    def waiting(self, holder: str) -> None:
        """Another process holds the device."""

    def noted(self, line: str) -> None:
        """There is something that a person should know: a server is waited for, or other users do not see a lock."""

    def planned(self, records: int) -> None:
        """`records` more are to be measured; the number is negative if a search needed fewer than planned."""

    def asked(self, progress: Progress) -> None:
        """A bench that answers a question, and measures no record, says where it is."""

    def opened(self, record: RunRecord) -> None: ...

    def progress(self, record: RunRecord, progress: Progress) -> None: ...

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None: ...

    def closed(self, record: RunRecord) -> None: ...

    def ended(self) -> None:
        """Nothing more is measured: its workspace was closed."""

    # train

    def epoch(self, record: RunRecord, epoch: Epoch) -> None:
        """An epoch is done and written down."""

    # load

    def served(self, record: RunRecord, point: LoadPoint) -> None:
        """The requests of one rate are done."""

    # run, where pairs are decided

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        """A new set of fresh processes is about to start."""

    def standing(self, pairs: Sequence[Pair]) -> None:
        """This is how the recipes compare after a replicate."""

    # run, of a grid

    def grid_planned(self, plan: Plan, waiting: int) -> None: ...

    def measuring(self, cells: Sequence[Cell], number: int, of: int) -> None:
        """These cells are next, `number` being that of the first among all cells."""

    def settled(self, cell: Cell, record: RunRecord) -> None: ...

    # batch

    def trying(self, batch: int, purpose: Purpose) -> None: ...

    def tried(self, trial: BatchTrial) -> None: ...

    # tune

    def tune_planned(self, name: str, recipes: int, budget_s: float, elapsed_s: float) -> None: ...

    def attempting(self, recipe: str, number: int, why: str) -> None: ...

    def attempted(self, recipe: str, said: str) -> None: ...

    def leads(self, recipe: str, ratio: float) -> None: ...

    def stage(self, words: str) -> None: ...


class Journal(Protocol):
    """A journal receives each record as it is measured. `redline.store.History` is one, `NoJournal` another."""

    def begin(self, record: RunRecord) -> None: ...

    def append(self, record_id: str, block: Block) -> None: ...

    def finish(self, record: RunRecord) -> None: ...


class NoJournal:
    """This journal keeps nothing."""

    def begin(self, record: RunRecord) -> None: ...

    def append(self, record_id: str, block: Block) -> None: ...

    def finish(self, record: RunRecord) -> None: ...
