"""This module shows results in a notebook (tables and a picture as HTML, a data frame, a figure), and a bar while a cell measures."""

from __future__ import annotations

import html
import importlib
import math
import sys
import time
from collections.abc import Callable
from typing import Any

from redline.analyze.statistics import Interval
from redline.model.protocol import Progress
from redline.model.record import RunRecord
from redline.model.units import printable
from redline.search.observer import Observer
from redline.show.course import Course, ended_words, interval_words, stage_words

PERIOD_S = 0.25
"""The page is written over this often at most."""


def in_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook; nothing is imported to find out."""
    shell = sys.modules.get("IPython")
    running: Any = shell.get_ipython() if shell is not None else None
    return running is not None and getattr(running, "kernel", None) is not None


def display_in_place() -> Callable[[str], None]:
    """Returns a function that writes HTML below the running cell, each time over what it wrote before."""
    shell: Any = importlib.import_module("IPython.display")
    handle: Any = shell.display(shell.HTML(""), display_id=True)
    return lambda page: handle.update(shell.HTML(page))


class NotebookProgress(Observer):
    """This is a bar below the cell, with one line that says what is happening; it is gone when the result comes."""

    def __init__(
        self,
        display: Callable[[], Callable[[str], None]] = display_in_place,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = display
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._show: Callable[[str], None] | None = None
        self._course = Course(self._clock)
        self._shown_at = -math.inf

    def planned(self, records: int) -> None:
        if self._course.whole and self._course.done == self._course.whole:
            self.ended()  # a workspace may serve several cells, each with a bar of its own
        self._course.planned(records)

    def noted(self, line: str) -> None:
        self._draw(line)

    def asked(self, progress: Progress) -> None:
        self._draw(stage_words(progress))

    def waiting(self, holder: str) -> None:
        self._draw(f"waiting for the GPU: {holder} is using it")

    def opened(self, record: RunRecord) -> None:
        self._course.opened(record)

    def progress(self, record: RunRecord, progress: Progress) -> None:
        self._draw(f"{record.spec.workload.model} {record.spec.recipe}: {stage_words(progress)}")

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        words = interval_words(rounds, interval, target)
        self._draw(f"{record.spec.workload.model} {record.spec.recipe}: {words}")

    def closed(self, record: RunRecord) -> None:
        row = self._course.closed(record)
        self._draw(f"{record.spec.workload.model} {record.spec.recipe}: {ended_words(row)}", at_once=True)

    def ended(self) -> None:
        """Removes the bar, because the result follows. What is measured next gets a bar of its own."""
        if self._show is not None:
            self._show("")
        self._begin()

    def _draw(self, words: str, *, at_once: bool = False) -> None:
        now = self._clock()
        if now - self._shown_at < PERIOD_S and not at_once:
            return
        self._shown_at = now
        if self._show is None:
            self._show = self._display()
        course = self._course
        bar = f'<progress value="{course.done}" max="{course.whole}"></progress> ' if course.whole else ""
        line = html.escape(printable(" ".join(", ".join(filter(None, (course.told, words))).splitlines())))
        self._show(f"<div>{bar}{line}</div>")
