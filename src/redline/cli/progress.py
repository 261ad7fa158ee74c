"""Live progress on stderr: what is happening now, for each recipe. Without a terminal, a plain line per event."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import RenderableType
from rich.progress import Progress as RichProgress
from rich.progress import SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from redline.analyze.batch import BatchTrial, Purpose, trial_words
from redline.analyze.grid import Estimate
from redline.analyze.load import LoadPoint
from redline.analyze.pairs import Pair
from redline.analyze.statistics import Interval
from redline.model.protocol import Progress
from redline.model.record import RunRecord
from redline.model.training import Epoch, TrainingProgress
from redline.model.units import format_seconds, format_share
from redline.search.grid import Cell, Plan, value_of
from redline.search.observer import Observer
from redline.show.course import (
    Course,
    ended_words,
    in_columns,
    interval_words,
    replicate_words,
    shortened,
    stage_words,
)
from redline.show.grid import estimate_text, pair_line
from redline.show.terminal import make_console, one_line
from redline.show.train import epoch_line

QUIET_LINE_PERIOD_S = 5.0
"""Without a terminal, rounds are printed this often."""


class LiveObserver(Observer):
    """Context manager: hand it to a workspace. `quiet` shows nothing while nothing is measured."""

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
        self._tasks: dict[str, TaskID] = {}
        self.course = Course()
        self._overall: TaskID | None = None
        self._last_line_at = 0.0
        self._last_line = ""
        self._start: TaskID | None = None

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

    def waiting(self, holder: str) -> None:
        self.noted(f"waiting for the GPU: {holder} is using it")

    def noted(self, line: str) -> None:
        if line != self._last_line:  # each cell of a sweep would repeat it
            self._last_line = line
            self._console.print(one_line(line), markup=False)

    def opened(self, record: RunRecord) -> None:
        if self._start is not None:
            self._progress.remove_task(self._start)
            self._start = None
        self.course.opened(record)
        self._tell(record, "opening a worker")

    def planned(self, records: int) -> None:
        self.course.planned(records)

    def asked(self, progress: Progress) -> None:
        words = stage_words(progress)
        if not self._live:
            print(one_line(words), file=sys.stderr, flush=True)  # noqa: T201  (the CLI is the printer)
        elif self._start is not None:
            self._progress.update(self._start, description=words)

    def progress(self, record: RunRecord, progress: Progress) -> None:
        self._tell(record, stage_words(progress))

    def measured(self, record: RunRecord, rounds: int, interval: Interval | None, target: float) -> None:
        now = time.monotonic()
        if self._live or now - self._last_line_at > QUIET_LINE_PERIOD_S:
            self._last_line_at = now
            self._tell(record, interval_words(rounds, interval, target))

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self.say(Text(replicate_words(number, planned), style="dim"), on_stdout=False)

    def closed(self, record: RunRecord) -> None:
        """Its line stops moving and stays, with the result."""
        self.course.closed(record)
        if not self._live:
            self._tell(record, ended_words(record))
            return
        self.forget(record)
        name = " ".join(self.name_of(record).splitlines())
        self.say(
            Text(f"{'✗' if record.failure else '✓'} {one_line(f'{name}: {ended_words(record)}')}"), on_stdout=False
        )
        self._show_overall()

    def name_of(self, record: RunRecord) -> str:
        return f"{record.spec.workload.model} {record.spec.recipe}"

    def forget(self, record: RunRecord) -> None:
        """Take its line off the display."""
        if (task := self._tasks.pop(record.id, None)) is not None:
            self._progress.remove_task(task)

    def say(self, line: RenderableType, *, on_stdout: bool) -> None:
        """A line that stays, above what moves."""
        if not on_stdout:
            self._console.print(line)  # a live display moves below it
            return
        if self._live:
            self._progress.stop()
        make_console().print(line)
        if self._live:
            self._progress.start()

    def _tell(self, record: RunRecord, words: str) -> None:
        name = " ".join(self.name_of(record).splitlines())
        if not self._live:
            overall = self.course.told
            standing = f" [{overall}]" if overall else ""
            print(one_line(f"{name}: {words}{standing}"), file=sys.stderr, flush=True)  # noqa: T201  (the CLI is the printer)
            return
        if record.id not in self._tasks:
            self._tasks[record.id] = self._progress.add_task("")
        self._progress.update(self._tasks[record.id], description=in_columns(name, words, self._console.width - ROOM))
        self._show_overall()

    def _show_overall(self) -> None:
        """The last line of the display: how much is done, how long the rest may take."""
        told = self.course.told
        if not told:
            return
        if self._overall is not None:  # once more at the end: tasks stand in the order in which they were added
            self._progress.remove_task(self._overall)
        self._overall = self._progress.add_task(shortened(told, self._console.width - ROOM))


ROOM = 14
"""Columns of the spinner and the clock."""


PURPOSES = {"largest": "the largest batch", "knee": "the knee", "slo": "the latency target"}


class LiveBatches(LiveObserver):
    """A line for each trial, with how many there are at most and the time that is left."""

    def __init__(self) -> None:
        super().__init__()
        self._purpose: Purpose = "largest"
        self._began = time.monotonic()
        self._most = self._done = 0

    def planned(self, records: int) -> None:
        """Trials at most, of all searches; a search that ends early takes back what it did not need."""
        self._most += records

    def trying(self, batch: int, purpose: Purpose) -> None:
        self._purpose = purpose

    def name_of(self, record: RunRecord) -> str:
        done, per_trial_s = self._done, (time.monotonic() - self._began) / max(self._done, 1)
        left = f", at most {format_seconds(per_trial_s * (self._most - done), 2)} left" if done else ""
        standing = f"[trial {done + 1} of at most {self._most}{left}]"
        return f"{standing} {record.spec.recipe} at batch {record.spec.workload.batch} for {PURPOSES[self._purpose]}"

    def closed(self, record: RunRecord) -> None:
        self.forget(record)

    def tried(self, trial: BatchTrial) -> None:
        self._done += 1
        self.say(Text(one_line(trial_words(trial)), style="dim"), on_stdout=False)


class LiveRace(LiveObserver):
    """One live line per recipe of the replicate, and after each replicate the state of the pairs."""

    def __init__(self) -> None:
        super().__init__()
        self._replicate = ""

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self._replicate = replicate_words(number, planned)

    def name_of(self, record: RunRecord) -> str:
        # A gate measures one recipe at two commits: the other one lies in a folder of its own.
        side = ", baseline's commit" if record.spec.launch.folder else ""
        return f"{self._replicate} {record.spec.recipe}{side}"

    def closed(self, record: RunRecord) -> None:
        super().closed(record)
        self.forget(record)

    def standing(self, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            self.say(Text(f"{self._replicate}: {pair_line(pair)}", style="dim"), on_stdout=False)


class LiveLoad(LiveObserver):
    """One live line, and one that stays for each rate."""

    def served(self, record: RunRecord, point: LoadPoint) -> None:
        told = f"{self.name_of(record)}: {point.rate:.4g} requests/s, p50 {format_seconds(point.p50_s)}, "
        told += f"p99 {format_seconds(point.p99_s)}, batches of {point.mean_batch:.3g}"
        self.say(Text(one_line(told), style="dim"), on_stdout=False)


class LiveTrain(LiveObserver):
    """One line that moves, with loss, accuracy and the time that is left; one that stays for each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self._began: dict[str, tuple[float, float]] = {}
        """By record: when its first epoch was seen, and how much was done by then."""

    def progress(self, record: RunRecord, progress: Progress) -> None:
        if progress.training is None:
            super().progress(record, progress)
            return
        self._move(record, progress.training)

    def epoch(self, record: RunRecord, epoch: Epoch) -> None:
        settings, prepared = record.spec.train, record.prepared
        assert settings is not None
        item = prepared.workload.item if prepared else "items"
        told = epoch_line(epoch, settings.epochs, item)
        self.say(Text(one_line(f"{self.name_of(record)}: {told}"), style="dim"), on_stdout=False)

    def _move(self, record: RunRecord, now: TrainingProgress) -> None:
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
        told = ", ".join(part for part in parts if part)
        quiet_until = self._last_line_at + QUIET_LINE_PERIOD_S
        if self._live or time.monotonic() > quiet_until:
            self._last_line_at = time.monotonic()
            self._tell(record, told)


class LiveGrid(LiveTrain):
    """One live line for each running cell, one permanent line for each finished cell; pairs as they stand after a replicate."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: Plan | None = None
        self._index = ""
        self._replicate = ""
        self._grid_began = time.monotonic()
        self._settled = 0

    def grid_planned(self, plan: Plan, waiting: int, estimate: Estimate) -> None:
        self._plan = plan
        settled = len(plan.cells) - waiting
        told = (
            f"grid {plan.name}: {len(plan.cells)} cells, {settled} settled, {waiting} to do; {estimate_text(estimate)}"
        )
        self.say(Text(told), on_stdout=False)
        for idle in plan.idle_exclusions:  # now, while it can still be stopped and fixed
            self.say(Text(str(idle), style="yellow"), on_stdout=False)

    def measuring(self, cells: Sequence[Cell], number: int, of: int) -> None:
        left = (time.monotonic() - self._grid_began) / self._settled * (of - number + 1) if self._settled else None
        self._index = f"[{number}/{of}{'' if left is None else f', {format_seconds(left, 2)} left'}]"

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        self._replicate = replicate_words(number, planned)
        super().replicate(number, planned, recipes)

    def standing(self, pairs: Sequence[Pair]) -> None:
        for pair in pairs:
            self.say(Text(f"{self._replicate}: {pair_line(pair)}", style="dim"), on_stdout=False)

    def name_of(self, record: RunRecord) -> str:
        if self._plan is None:
            return super().name_of(record)
        workload = record.spec.workload
        parts = [self._index, self._replicate, workload.model, workload.task, str(record.spec.recipe)]
        parts += [f"{name.replace('_', ' ')} {value_of(record.spec, name)}" for name in self._plan.axes]
        return " ".join(part for part in parts if part)

    def settled(self, cell: Cell, record: RunRecord) -> None:
        self._settled += 1


class LiveTune(LiveRace):
    """A permanent line for each trial and for the leader; a live line for what is happening."""

    def __init__(self) -> None:
        super().__init__()
        self._attempts: dict[str, tuple[str, str]] = {}
        """Of recipes that are being prepared: their number and why they are tried."""
        self._leader = ""
        self._ends_at: float | None = None

    def tune_planned(self, name: str, recipes: int, budget_s: float, elapsed_s: float) -> None:
        self._ends_at = time.monotonic() + budget_s - elapsed_s
        self._stay(f"tune {name}: {recipes} recipes are possible, {budget_s:.0f} s at most")

    def stage(self, words: str) -> None:
        self._stay(words)

    def attempting(self, recipe: str, number: int, why: str) -> None:
        self._attempts[recipe] = (f"[{number}]", why)

    def attempted(self, recipe: str, said: str) -> None:
        index, why = self._attempts.get(recipe, ("", "again"))
        self._stay(f"{index} {recipe} ({why}): {said}{self._left()}")

    def _left(self) -> str:
        if self._ends_at is None:
            return ""
        return f"; {max(0.0, self._ends_at - time.monotonic()):.0f} s of the budget left"

    def leads(self, recipe: str, ratio: float) -> None:
        told = f"leader: {recipe}, {ratio:.2f}× the baseline"
        if told != self._leader:
            self._leader = told
            self._stay(told)

    def standing(self, pairs: Sequence[Pair]) -> None:
        """Nothing: the report shows it."""

    def name_of(self, record: RunRecord) -> str:
        recipe = str(record.spec.recipe)
        return f"{self._replicate or self._attempts.get(recipe, ('',))[0]} {recipe}"

    def closed(self, record: RunRecord) -> None:
        self.forget(record)

    def _stay(self, words: str) -> None:
        self.say(Text(words, style="dim"), on_stdout=False)
