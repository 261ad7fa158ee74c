"""This shows live progress on stderr: one line for each job, and below them how much is done, how long the rest may take, and the best so
far.

Without a terminal there is one line for each result.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from redline.analyze.batch import BatchTrial, Purpose
from redline.analyze.load import LoadPoint
from redline.analyze.pairs import Pair
from redline.analyze.statistics import Interval
from redline.model.metrics import RATIO, in_words
from redline.model.protocol import Progress, TrainingProgress
from redline.model.record import Epoch, RunRecord
from redline.model.units import format_ratio, format_seconds, format_share
from redline.search.grid import Plan, value_of
from redline.search.observer import Observer
from redline.show.course import Course, ended_words, epoch_line, in_columns, interval_words, shortened, stage_words
from redline.show.terminal import make_console, one_line

ROOM = 14
"""The spinner and the clock take so many columns."""
PURPOSES = {"largest": "the largest batch", "knee": "the knee", "slo": "the latency target"}


class LiveObserver(Observer):
    """This is a context manager, to be handed to a workspace. `quiet` shows nothing while nothing is measured."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._console = make_console(stderr=True)
        self._live = self._console.is_terminal and not quiet
        self._progress = RichProgress(
            SpinnerColumn(finished_text="✓"),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
        )
        self.course = Course()
        self._tasks: dict[str, TaskID] = {}
        self._overall: TaskID | None = None
        self._last_line = ""
        self._start: TaskID | None = None
        self._plan: Plan | None = None
        self._round = self._purpose = ""
        self._attempts: dict[str, str] = {}
        """For recipes that a search prepares, this has their number and why they are tried."""
        self._began: dict[str, tuple[float, float]] = {}
        """For each record of a training, this says when its first epoch was seen, and how much was done by then."""

    def __enter__(self) -> Self:
        if self._live:
            self._progress.start()
            self._start = self._progress.add_task("starting the bench (importing torch)")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """End the moving display, so that the result can be printed."""
        if self._live:
            self._progress.stop()

    # Every verb tells the following.

    def waiting(self, holder: str) -> None:
        self.noted(f"waiting for the GPU: {holder} is using it")

    def noted(self, line: str) -> None:
        if line != self._last_line:  # each cell of a grid would repeat it
            self._last_line = line
            self.say(line)

    def planned(self, records: int) -> None:
        self.course.planned(records)

    def asked(self, progress: Progress) -> None:
        if self._start is not None:
            self._progress.update(self._start, description=stage_words(progress))

    def opened(self, record: RunRecord) -> None:
        if self._start is not None:
            self._progress.remove_task(self._start)
            self._start = None
        self.course.opened(record)
        self._move(record, "opening a worker")

    def progress(self, record: RunRecord, progress: Progress) -> None:
        self._move(record, stage_words(progress) if progress.training is None else self._trained(record, progress.training))  # fmt: skip

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        self._move(record, interval_words(rounds, interval, target))

    def closed(self, record: RunRecord) -> None:
        """Makes its line stop moving and stay, with the result. What a search tries has lines of its own."""
        row = self.course.closed(record)
        self.forget(record)
        if not self._attempts and not self._purpose:
            mark = "✗" if record.failure else "✓"
            self.say(f"{mark} {self.name_of(record)}: {ended_words(row)}{self._standing()}")
        self._show_overall()

    # Grids and decisions

    def grid_planned(self, plan: Plan, waiting: int) -> None:
        self._plan = plan
        self.say(f"grid {plan.name}: {len(plan.cells)} cells, {len(plan.cells) - waiting} settled, {waiting} to do")

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        # If processes lie apart, there are more of them than were planned.
        self._round = f"replicate {number} of {planned}" if number <= planned else f"replicate {number}"
        self.say(self._round)

    def standing(self, pairs: Sequence[Pair]) -> None:
        if not self._attempts:
            for pair in pairs:
                self.say(f"{self._round}: {pair_line(pair)}")

    # Batches, rates, epochs, searches

    def trying(self, batch: int, purpose: Purpose) -> None:
        self._purpose = f"for {PURPOSES[purpose]}"

    def tried(self, trial: BatchTrial) -> None:
        self.say(str(trial))

    def served(self, record: RunRecord, point: LoadPoint) -> None:
        told = f"{point.rate:.4g} requests/s, p50 {format_seconds(point.p50_s)}, p99 {format_seconds(point.p99_s)}"
        self.say(f"{self.name_of(record)}: {told}, batches of {point.mean_batch:.3g}")

    def epoch(self, record: RunRecord, epoch: Epoch) -> None:
        settings, prepared = record.spec.train, record.prepared
        assert settings is not None
        told = epoch_line(epoch, settings.epochs, prepared.workload.item if prepared else "items")
        self.say(f"{self.name_of(record)}: {told}")

    def tune_planned(self, name: str, recipes: int, budget_s: float, elapsed_s: float) -> None:
        self.course.ends_in(budget_s - elapsed_s)
        self.say(f"tune {name}: {recipes} recipes are possible, {budget_s:.0f} s at most")

    def stage(self, words: str) -> None:
        self.noted(words)

    def attempting(self, recipe: str, number: int, why: str) -> None:
        self._attempts[recipe] = f"[{number}] ({why})"

    def attempted(self, recipe: str, said: str) -> None:
        self.say(f"{recipe} {self._attempts.get(recipe, '(again)')}: {said}{self._standing()}")

    def leads(self, recipe: str, ratio: float) -> None:
        self.course.best = f"best so far: redline.recipe({recipe!r}), {format_ratio(ratio)} the baseline"

    # The display

    def name_of(self, record: RunRecord) -> str:
        """Returns the model and the recipe, and what else tells a job from its neighbours."""
        workload = record.spec.workload
        parts = [self._round, workload.model, str(record.spec.recipe)]
        # A gate measures one recipe at two commits, and the baseline's lies in a folder of its own.
        parts += ["at the baseline's commit"] if record.spec.launch.folder else []
        if self._plan is not None:
            parts += [in_words(name, value_of(record.spec, name)) for name in self._plan.axes]
        parts += [f"batch {workload.batch}", self._purpose] if self._purpose else []
        return " ".join(filter(None, " ".join(parts).splitlines()))

    def forget(self, record: RunRecord) -> None:
        """Takes its line off the display."""
        if (task := self._tasks.pop(record.id, None)) is not None:
            self._progress.remove_task(task)

    def say(self, line: str) -> None:
        """Prints a line that stays, above what moves."""
        self._console.print(Text(one_line(line)), soft_wrap=not self._live)

    def _standing(self) -> str:
        """Returns how much is done. Where there is a terminal, the last line of the display says it."""
        return f" [{self.course.told}]" if not self._live and self.course.told else ""

    def _move(self, record: RunRecord, words: str) -> None:
        if not self._live:
            return
        if record.id not in self._tasks:
            self._tasks[record.id] = self._progress.add_task("")
        line = in_columns(self.name_of(record), words, self._console.width - ROOM)
        self._progress.update(self._tasks[record.id], description=line)
        self._show_overall()

    def _show_overall(self) -> None:
        if not self._live or not self.course.told:
            return
        if self._overall is not None:  # once more at the end: tasks stand in the order in which they were added
            self._progress.remove_task(self._overall)
        self._overall = self._progress.add_task(shortened(self.course.told, self._console.width - ROOM))

    def _trained(self, record: RunRecord, now: TrainingProgress) -> str:
        done = (now.epoch - 1 + (now.step / now.steps if now.steps else 0.0)) / now.epochs
        began, before = self._began.setdefault(record.id, (time.monotonic(), done))
        left_s = (time.monotonic() - began) * (1 - done) / (done - before) if done > before else None
        accuracy = record.epochs[-1].val_accuracy if record.epochs else None
        parts = [
            f"epoch {now.epoch}/{now.epochs}",
            f"step {now.step}/{now.steps}" if now.steps else f"step {now.step}",
            f"loss {now.loss:.3g}" if now.loss is not None else "",
            f"accuracy {format_share(accuracy)}" if accuracy is not None else "",
            f"{now.samples_per_s:.0f}/s" if now.samples_per_s else "",
            f"{format_seconds(left_s, 2)} left" if left_s is not None else "",
        ]
        return ", ".join(filter(None, parts))


def pair_line(pair: Pair) -> str:
    """Returns a pair as a sentence about the second of the two."""
    if pair.low is None or pair.high is None:
        return f"{pair.b} runs at {format_ratio(pair.ratio)} {pair.a} so far"
    words = {"faster": "faster than", "slower": "slower than", "same": "the same as", "inconclusive": "undecided against"}  # fmt: skip
    return f"{pair.b} is {words[pair.verdict]} {pair.a}: {RATIO(pair.ratio, pair.low, pair.high)}"
