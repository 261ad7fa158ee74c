"""Live progress in a notebook: a table that is written over while a cell measures, and gone when it is done."""

from __future__ import annotations

import html
import importlib
import math
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from redline.analyze.race import Pair
from redline.analyze.statistics import Interval
from redline.protocol import Progress
from redline.record import RunRecord
from redline.report.course import Course, ended_words, stage_words
from redline.search.observer import Observer
from redline.training import Epoch
from redline.units import format_seconds, printable

PERIOD_S = 0.25
"""The page is written over this often at most."""
MOST_LINES = 12

Show = Callable[[str], None]


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook; nothing is imported to find out."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return running is not None and getattr(running, "kernel", None) is not None


def running_cell() -> object:
    """What tells one cell from the next."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return getattr(running, "execution_count", None)


def display_in_place() -> Show:
    """What writes HTML below the running cell, each time over what it wrote before."""
    shell: Any = importlib.import_module("IPython.display")
    handle: Any = shell.display(shell.HTML(""), display_id=True)
    return lambda page: handle.update(shell.HTML(page))


class NotebookProgress(Observer):
    """`display` makes room below a cell and returns what writes into it; a workspace may serve several cells."""

    def __init__(
        self,
        display: Callable[[], Show] = display_in_place,
        clock: Callable[[], float] = time.monotonic,
        cell: Callable[[], object] = running_cell,
    ) -> None:
        self._display = display
        self._show: Show | None = None
        self._clock = clock
        self._cell = cell
        self._of_cell: object = None
        self._shown_at = -math.inf
        self.course = Course(clock)
        self._lines: dict[str, tuple[str, str]] = {}
        """By record: its name and what it is doing."""
        self._head = ""

    def planned(self, records: int) -> None:
        self._turn_page()
        self.course.planned(records)

    def noted(self, line: str) -> None:
        self._set_head(line)

    def asked(self, progress: Progress) -> None:
        self._set_head(stage_words(progress))

    def waiting(self, holder: str) -> None:
        self._set_head(f"waiting for the GPU: {holder} is using it")

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self._set_head(f"replicate {number} of {planned}")

    def standing(self, pairs: Sequence[Pair]) -> None:
        decided = sum(pair.verdict != "inconclusive" for pair in pairs)
        self._set_head(f"{decided} of {len(pairs)} pairs decided")

    def stage(self, words: str) -> None:
        self._set_head(words)

    def attempting(self, recipe: str, number: int, why: str) -> None:
        self._set_head(f"trial {number}: {recipe} ({why})")

    def leads(self, recipe: str, ratio: float) -> None:
        self._set_head(f"leader: {recipe}, {ratio:.2f}× the baseline")

    def opened(self, record: RunRecord) -> None:
        self._turn_page()
        self.course.opened(record)
        self._tell(record, "opening a worker")

    def progress(self, record: RunRecord, progress: Progress) -> None:
        self.course.entered(record, progress.stage)
        if progress.training is not None:
            now = progress.training
            steps = f" of {now.steps}" if now.steps else ""
            self._tell(record, f"epoch {now.epoch} of {now.epochs}, step {now.step}{steps}")
            return
        self._tell(record, stage_words(progress))

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        self._tell(record, self.course.measured(record, str(record.spec.recipe), rounds, interval, target))

    def epoch(self, record: RunRecord, epoch: Epoch) -> None:
        self._tell(record, f"epoch {epoch.number}: {format_seconds(epoch.seconds)}")

    def closed(self, record: RunRecord) -> None:
        self.course.closed(record)
        self._shown_at = -math.inf  # results appear at once
        self._tell(record, f"{'✗' if record.failure else '✓'} {ended_words(record)}")

    def ended(self) -> None:
        """The result follows: the display makes room for it."""
        if self._show is not None:
            self._show("")
        self._of_cell = None
        self._turn_page()

    def _turn_page(self) -> None:
        """A new cell begins with an empty display."""
        cell = self._cell()
        if cell != self._of_cell:
            self._of_cell, self._show = cell, None
            self.course = Course(self._clock)
            self._lines.clear()
            self._head = ""

    def _set_head(self, words: str) -> None:
        self._turn_page()
        self._head = words
        self._draw()

    def _tell(self, record: RunRecord, words: str) -> None:
        batch = f" batch {record.spec.workload.batch}" if record.spec.workload.batch else ""
        self._lines[record.id] = f"{record.spec.workload.model} {record.spec.recipe}{batch}", words
        self._draw()

    def _draw(self) -> None:
        now = self._clock()
        if now - self._shown_at < PERIOD_S:
            return
        self._shown_at = now
        if self._show is None:
            self._show = self._display()
        self._show(self.page())

    def page(self) -> str:
        """The newest lines as a table, and above it how far everything is."""
        head = ", ".join(part for part in (self.course.told, self._head) if part)
        rows = "".join(
            f'<tr><td style="text-align:left">{_escaped(name)}</td><td style="text-align:left">{_escaped(words)}</td></tr>'
            for name, words in list(self._lines.values())[-MOST_LINES:]
        )
        return f'<div class="redline-progress"><p style="margin:.2em 0">{_escaped(head)}</p><table>{rows}</table></div>'


def _escaped(text: str) -> str:
    return html.escape(printable(" ".join(text.splitlines())))
