"""This module says how far a measurement has come: what each record is doing, how much is done, how long the rest may take."""

from __future__ import annotations

import time
from collections.abc import Callable

from redline.analyze.measurement import Measurement, measurements
from redline.analyze.rows import metric_of
from redline.analyze.statistics import Interval
from redline.model.metrics import RATIO, TOO_NOISY, WIDEST
from redline.model.protocol import Progress
from redline.model.record import Epoch, RunRecord
from redline.model.units import format_rate, format_seconds, format_share
from redline.show.terminal import one_line

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
"""In these stages the detail that the bench tells is shown too."""


NO_USE = (WIDEST - 1) / (WIDEST + 1)
"""An interval that spans the widest factor has this half width, relative to its middle."""


def stage_words(progress: Progress) -> str:
    words = WORDS.get(progress.stage, progress.stage)
    shows_detail = bool(progress.detail) and progress.stage in WITH_DETAIL
    return f"{words} ({progress.detail})" if shows_detail else words


def ended_words(row: Measurement) -> str:
    """Returns how a closed record has ended, in the words of its table; a speed that the table doubts has no number here."""
    if row.failure is not None:
        return f"failed: {row.failure.told}"
    speed = metric_of(row, "throughput")
    if speed is None:
        return "interrupted" if row.record.stopped == "interrupted" else "measured"
    return speed.in_words if row.verdict.trusted or row.training is not None else ", ".join(row.verdict.labels)


def epoch_line(epoch: Epoch, of: int, item: str) -> str:
    """Returns the line that is shown for an epoch when it is done."""
    parts = [
        f"epoch {epoch.number}/{of}: {format_seconds(epoch.seconds)}",
        f"{format_rate(epoch.samples_per_s)} {item}/s",
        f"loss {epoch.train_loss:.4g}" if epoch.train_loss is not None else "",
        f"val. loss {epoch.val_loss:.4g}" if epoch.val_loss is not None else "",
        f"accuracy {format_share(epoch.val_accuracy)}" if epoch.val_accuracy is not None else "",
        f"data wait {format_share(epoch.data_wait_share)}" if epoch.data_wait_share is not None else "",
    ]
    return ", ".join(part for part in parts if part)


class Course:
    """A course counts the records that are planned and done, and says how long the rest may take and which result is the best so far."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._ends_at: float | None = None
        self._planned = 0
        self._seen: set[str] = set()
        self._done: set[str] = set()
        self._firsts: dict[str, RunRecord] = {}
        """These are the records of the first recipe of each group."""
        self._gain = 1.0
        self.best = ""
        """It says in words which result gains most over the first of its group."""

    def planned(self, records: int) -> None:
        """Adds these to the records that are to be measured."""
        if not self._planned:
            self._began = self._clock()
        self._planned += records

    def ends_in(self, seconds: float) -> None:
        """Says when the measurement ends at the latest, whatever is still to be measured."""
        self._ends_at = self._clock() + seconds

    def opened(self, record: RunRecord) -> None:
        self._seen.add(record.id)

    def closed(self, record: RunRecord) -> Measurement:
        """Returns the row of the record, which is compared with the first of its group as in the table to come."""
        self._done.add(record.id)
        if record.group is not None and record.position == 0:
            self._firsts[record.group] = record
        first = self._firsts.get(record.group or "", record)
        row = measurements([record] if first is record else [first, record])[-1]
        gain = row.vs_first
        is_faster = gain is not None and gain.verdict == "faster" and not (row.numerics and row.numerics.is_wrong)
        if gain is not None and is_faster and gain.ratio > self._gain:
            self._gain = gain.ratio
            self.best = f"best so far: {row.recipe}, {RATIO(gain.ratio, gain.low, gain.high)} the first"
        return row

    @property
    def done(self) -> int:
        return len(self._done)

    @property
    def whole(self) -> int:
        """Returns how many records there are to measure; 0 if no plan is known."""
        return max(self._planned, len(self._seen)) if self._planned else 0

    @property
    def told(self) -> str:
        """Returns in a few words what is done, elapsed and left, with the best so far. The text is empty if no plan is known."""
        elapsed_s = self._clock() - self._began
        parts = [f"{self.done} of {self.whole} done"] if self.whole else []
        if self._ends_at is not None:
            parts.append(f"at most {max(0.0, self._ends_at - self._clock()):.0f} s left")
        elif 0 < self.done < self.whole:
            left_s = elapsed_s * (self.whole - self.done) / self.done
            parts.append(f"{format_seconds(elapsed_s, 2)} elapsed, about {format_seconds(max(left_s, 1.0), 2)} left")
        return ", ".join([*parts, *([self.best] if parts and self.best else [])])


def interval_words(rounds: int, interval: Interval | None, target: float) -> str:
    """Returns words that say how narrow the interval of a record is after some rounds."""
    width = f"±{format_share(interval.half_width)}" if interval else "too few samples yet"
    if interval is not None and interval.half_width > NO_USE:
        width = TOO_NOISY
    return f"{width} (target {format_share(target)}), block {rounds}"


def in_columns(name: str, words: str, width: int) -> str:
    """Returns a name and what it is doing on one line. The name is cut first, since the words have the numbers."""
    room = max(12, min(44, width - len(words) - 1))
    return shortened(f"{shortened(name, room):<{min(room, 44)}} {words}", width)


def shortened(text: str, width: int) -> str:
    line = one_line(text)
    return line if len(line) <= width else f"{line[: max(width - 1, 1)]}…"
