"""Live progress on stderr: what is happening now, for each recipe. Without a terminal, a plain line per event."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from redline.analyze.statistics import Interval
from redline.protocol import Progress
from redline.record import RunRecord
from redline.report.terminal import make_console
from redline.search.interleave import Observer
from redline.units import format_share

WORDS = {
    "device": "opening the device",
    "build": "building",
    "calibrate": "calibrating batch-norm",
    "reference": "computing the fp32 reference",
    "recipe": "applying the recipe",
    "first-call": "first call",
    "compile": "compiling",
    "numerics": "checking the numerics",
    "count": "counting the work",
    "warm-up": "warming up",
    "ready": "ready",
    "timing": "timing without the profiler",
    "profile": "capturing",
    "reading": "reading what the profiler wrote",
}
QUIET_LINE_PERIOD_S = 5.0
"""Without a terminal, rounds are told this often."""


class LiveObserver(Observer):
    """Context manager; hand it to `redline.api.run_specs`."""

    def __init__(self) -> None:
        self._console = make_console(stderr=True)
        self._live = self._console.is_terminal
        self._progress = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self._tasks: dict[str, TaskID] = {}
        self._last_line_at = 0.0
        self._start: TaskID | None = None

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
            self._start = self._progress.add_task("starting the bench (importing torch)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def waiting(self, holder: str) -> None:
        self._console.print(f"waiting for the GPU: {holder} holds it", markup=False)

    def opened(self, record: RunRecord) -> None:
        if self._start is not None:
            self._progress.remove_task(self._start)
            self._start = None
        self._tell(record, "opening a worker")

    def progress(self, record: RunRecord, progress: Progress) -> None:
        words = WORDS.get(progress.stage, progress.stage)
        show_detail = progress.stage in ("warm-up", "build")
        self._tell(record, f"{words} ({progress.detail})" if progress.detail and show_detail else words)

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        width = f"±{format_share(interval.half_width)}" if interval else "too few samples yet"
        words = f"block {rounds} of at least {record.spec.measure.min_rounds}, {width} (target {format_share(target)})"
        now = time.monotonic()
        if self._live or now - self._last_line_at > QUIET_LINE_PERIOD_S:
            self._last_line_at = now
            self._tell(record, words)

    def closed(self, record: RunRecord) -> None:
        ended = "interrupted" if record.stopped == "interrupted" else "measured"
        told = f"failed: {record.failure.message}" if record.failure else ended
        self._tell(record, told)
        if (task := self._tasks.get(record.id)) is not None:
            self._progress.stop_task(task)

    def name_of(self, record: RunRecord) -> str:
        return f"{record.spec.workload.model} {record.spec.recipe}"

    def forget(self, record: RunRecord) -> None:
        """Take its line off the display."""
        if (task := self._tasks.pop(record.id, None)) is not None:
            self._progress.remove_task(task)

    def say(self, line: RenderableType, *, on_stdout: bool) -> None:
        """A line that stays, above what moves."""
        console = make_console(stderr=not on_stdout)
        if self._live:
            self._progress.stop()
        console.print(line)
        if self._live:
            self._progress.start()

    def _tell(self, record: RunRecord, words: str) -> None:
        name = " ".join(self.name_of(record).splitlines())
        if not self._live:
            print(f"{name}: {words}", file=sys.stderr, flush=True)  # noqa: T201  (the CLI is the printer)
            return
        text = f"{name:<44.70} {words}"
        if record.id not in self._tasks:
            self._tasks[record.id] = self._progress.add_task(text)
        self._progress.update(self._tasks[record.id], description=text)
