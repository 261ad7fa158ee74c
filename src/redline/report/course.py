"""How far a measurement has come: what each record is doing, how much is done, how long the rest may take, who leads.

The terminal and the notebook show the same; this is where the words and the arithmetic are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from rich.text import Text

from redline.analyze.batch import BatchTrial, Purpose
from redline.analyze.bound import step_s
from redline.analyze.recommend import rate_text
from redline.analyze.statistics import Interval
from redline.analyze.train import training_of
from redline.model.protocol import Progress
from redline.model.record import RunRecord
from redline.model.spec import MeasureSpec
from redline.model.training import Epoch
from redline.model.units import format_seconds, format_share
from redline.report.batch import trial_line
from redline.report.terminal import as_text, make_console, one_line
from redline.report.train import epoch_line
from redline.search.observer import Observer

WORDS = {
    "device": "opening the device",
    "ranks": "waiting for all ranks",
    "build": "building",
    "batch": "searching for the batch",
    "calibrate": "preparing the weights",
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
    "data": "reading the data",
    "epoch": "training",
    "feed": "loader and model",
    "load": "serving",
    "ceilings": "measuring",
}
WITH_DETAIL = ("warm-up", "build", "data", "feed", "load", "ceilings")
REACHED = {
    "device": 0.02, "build": 0.05, "calibrate": 0.08, "reference": 0.1, "recipe": 0.13, "first-call": 0.16,
    "compile": 0.2, "numerics": 0.35, "count": 0.4, "warm-up": 0.44, "ready": 0.5,
}  # fmt: skip
"""The share of a record's time that has passed when it enters a stage; rounds make up the rest."""
SHOWN_FROM = 0.08
"""Less of the whole says nothing about how long the rest takes."""


def stage_words(progress: Progress) -> str:
    words = WORDS.get(progress.stage, progress.stage)
    shows_detail = bool(progress.detail) and progress.stage in WITH_DETAIL
    return f"{words} ({progress.detail})" if shows_detail else words


def replicate_words(number: int, planned: int) -> str:
    """Where processes lie apart, there are more of them than were planned."""
    return f"replicate {number} of {planned}" if number <= planned else f"replicate {number}"


def ended_words(record: RunRecord) -> str:
    """How a closed record ended, in words."""
    if record.failure is not None:
        return f"failed: {record.failure.told}"
    return speed_told(record) or ("interrupted" if record.stopped == "interrupted" else "measured")


def speed_told(record: RunRecord) -> str:
    """What a finished record measured, in a few words; empty where nothing was timed."""
    if record.spec.train is not None:  # as its tables: over whole epochs, with what they waited for
        trained = training_of(record)
        return rate_text(trained.samples_per_s, trained.item) if trained.samples_per_s else ""
    seconds, prepared = step_s(record), record.prepared
    if not seconds or prepared is None or not prepared.workload.items_per_step:
        return ""
    return rate_text(prepared.workload.items_per_step / seconds, prepared.workload.item)


class Course:
    """Receives what an observer hears."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._planned = 0
        self._shares: dict[str, float] = {}
        self._done: set[str] = set()
        self._speeds: dict[str, tuple[float, str, str]] = {}
        """By record: items per second, the item, and what it is called; of one workload."""
        self._together: tuple[str | None, ...] = ()

    def planned(self, records: int) -> None:
        """Add to the number of records to be measured."""
        if not self._planned:
            self._began = self._clock()
        self._planned += records

    def opened(self, record: RunRecord) -> None:
        self._shares.setdefault(record.id, 0.0)

    def entered(self, record: RunRecord, stage: str) -> None:
        self._move(record, REACHED.get(stage, 0.0))

    def measured(self, record: RunRecord, name: str, rounds: int, interval: Interval | None, target: float) -> str:
        """What to say of a round: the speed so far, whether it leads, and how narrow the interval is."""
        needed = _rounds_needed(record.spec.measure, rounds, interval, target)
        self._move(record, 0.5 + 0.5 * min(rounds / needed, 1.0))
        width = f"±{format_share(interval.half_width)}" if interval else "too few samples yet"
        words = f"{width} (target {format_share(target)}), block {rounds} of at least {record.spec.measure.min_rounds}"
        speed = self._speed(record, name, interval)
        return f"{speed}, {words}" if speed else words

    def closed(self, record: RunRecord) -> None:
        self._done.add(record.id)
        self._shares[record.id] = 1.0
        if record.failure is not None:
            self._speeds.pop(record.id, None)

    @property
    def left_s(self) -> float | None:
        """How long the rest may take, if it goes on as it went; None where that cannot be said yet."""
        whole = max(self._planned, len(self._shares))
        passed = sum(self._shares.values())
        if not self._planned or passed < SHOWN_FROM * whole or passed >= whole:
            return None
        return (self._clock() - self._began) * (whole - passed) / passed

    @property
    def told(self) -> str:
        """Done, left and leader in a few words; empty where no plan is known."""
        if not self._planned:
            return ""
        left_s = self.left_s
        parts = [f"{len(self._done)} of {max(self._planned, len(self._shares))} done"]
        parts += [f"about {format_seconds(max(left_s, 1.0), 2)} left"] if left_s is not None else []
        parts += [f"leader: {leader}"] if (leader := self.leader) else []
        return ", ".join(parts)

    @property
    def leader(self) -> str:
        """The fastest so far, where there are several to choose from."""
        if len(self._speeds) < 2:
            return ""
        per_s, item, name = max(self._speeds.values())
        return f"{name}, {rate_text(per_s, item)}"

    def _move(self, record: RunRecord, share: float) -> None:
        self._shares[record.id] = max(self._shares.get(record.id, 0.0), share)

    def _speed(self, record: RunRecord, name: str, interval: Interval | None) -> str:
        workload = record.prepared.workload if record.prepared is not None else None
        if interval is None or interval.low <= 0 or workload is None or not workload.items_per_step:
            return ""
        together = (record.group, record.spec.workload.model, record.spec.workload.task, record.spec.device)
        if together != self._together:  # what another workload reached is no measure for this one
            self._together = together
            self._speeds.clear()
        per_s = workload.items_per_step / math.sqrt(interval.low * interval.high)
        self._speeds[record.id] = per_s, workload.item, name
        leads = len(self._speeds) > 1 and per_s == max(speed for speed, _, _ in self._speeds.values())
        return f"{rate_text(per_s, workload.item)}{', leading' if leads else ''}"


def _rounds_needed(measure: MeasureSpec, rounds: int, interval: Interval | None, target: float) -> float:
    """An interval narrows with the square root of time; the ceiling ends it."""
    most = max(measure.max_seconds / measure.block_seconds, measure.min_rounds)
    if interval is None:
        return most
    return min(max(rounds * (interval.half_width / target) ** 2, measure.min_rounds), most)


class CollectingObserver(Observer):
    """Remembers every finished record."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []

    def closed(self, record: RunRecord) -> None:
        self.records.append(record)


class LineObserver(CollectingObserver):
    """A plain line per event on stderr, which a notebook shows at once."""

    def __init__(self) -> None:
        super().__init__()
        self._console = make_console(stderr=True)

    def waiting(self, holder: str) -> None:
        self._say(f"waiting for the GPU: {holder} is using it")

    def trying(self, batch: int, purpose: Purpose) -> None:
        self._say(f"batch search: trying {batch}")

    def tried(self, trial: BatchTrial) -> None:
        self._say(as_text(trial_line(trial)).strip())

    def epoch(self, record: RunRecord, epoch: Epoch) -> None:
        assert record.spec.train is not None
        item = record.prepared.workload.item if record.prepared else "items"
        self._say(f"batch {record.spec.workload.batch}, {epoch_line(epoch, record.spec.train.epochs, item)}")

    def progress(self, record: RunRecord, progress: Progress) -> None:
        if progress.stage == "profile":
            self._say("profiling a few steps")

    def _say(self, line: str) -> None:
        self._console.print(Text(one_line(line)))


def in_columns(name: str, words: str, width: int) -> str:
    """A name and what it is doing on one line: the words are cut last, since they have the numbers."""
    room = max(12, min(44, width - len(words) - 1))
    return shortened(f"{shortened(name, room):<{min(room, 44)}} {words}", width)


def shortened(text: str, width: int) -> str:
    line = one_line(text)
    return line if len(line) <= width else f"{line[: max(width - 1, 1)]}…"
