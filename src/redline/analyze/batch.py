"""This module concludes from trials of batches which is the largest that fits, where larger ones stop paying (the knee), and which is best
under a latency target.

A step takes t = a + c·b once the device is the limit: a fixed part and a part per item. Throughput b/t then nears
1/c, and reaches the fraction f of that at b = f/(1 − f) · a/c.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from redline.analyze.advice import command_line
from redline.analyze.blocks import latency_blocks
from redline.analyze.measurement import Line, Measurement, measurements
from redline.analyze.statistics import percentile_ceiling
from redline.analyze.trust import DISQUALIFYING
from redline.model.fields import Frozen
from redline.model.identity import Subject, condition_words
from redline.model.note import Note, note
from redline.model.record import Failure, Memory, RunRecord
from redline.model.units import format_bytes, format_rate

Purpose = Literal["largest", "knee", "slo"]

SLO_CONFIDENCE = 0.95
"""A batch is said to keep the target with this confidence, which holds for all batches of a search together."""
SLO_TESTS = 8
"""At most this many batches are compared with the target; the error probability is divided among them."""
CLEARLY_FASTER = 1.03
"""A batch is clearly faster than another if its throughput is more than this many times the other's."""
FEWEST_BATCHES = 3
"""A knee needs so many batches: two points always lie on a line, so a knee through them would have no evidence. None of three is left
out."""
LARGEST_MISFIT = 0.2
"""Points further than this from t = a + c·b are not described by it."""
WELL_DESCRIBED = 0.05
"""A curve that misses a point by more is not the curve of all of them."""
BEYOND = 1.5
"""A batch this many times the knee must have been measured, unless one curve describes all of several batches well: else
nobody saw that more brings little."""
SATURATED = 0.9
"""The knee is where throughput reaches this fraction of its limit."""


@dataclass(frozen=True)
class BatchTrial:
    """This is one batch, tried in its own process."""

    row: Measurement
    purpose: Purpose = "largest"

    @property
    def batch(self) -> int:
        return self.row.spec.workload.batch or self.row.batch or 0

    @property
    def failure(self) -> Failure | None:
        if self.row.failure is None and self.row.throughput_per_s is None:
            return Failure(stage="measure", kind="crash", message="no step was timed")
        return self.row.failure

    @property
    def fits(self) -> bool:
        return self.failure is None

    @property
    def is_oom(self) -> bool:
        return self.failure is not None and self.failure.kind == "oom"

    @property
    def throughput_per_s(self) -> float | None:
        return self.row.throughput_per_s if self.fits else None

    @property
    def memory(self) -> Memory:
        return self.row.memory or Memory()

    @property
    def needed_bytes(self) -> int | None:
        """Returns what must fit: the least a step ran with, on a CPU all that the worker held. It is None where it did not fit."""
        return self.memory.needed_bytes if self.fits else None

    @property
    def step_s(self) -> float:
        assert self.throughput_per_s is not None
        return (self.row.items_per_step or self.batch) / self.throughput_per_s

    @cached_property
    def p95_ceiling_s(self) -> float | None:
        """p95 of a step is at or below this, with a confidence that holds for all batches of a search at once."""
        confidence = 1 - (1 - SLO_CONFIDENCE) / SLO_TESTS
        return percentile_ceiling([block.samples for block in latency_blocks(self.row.record)], 0.95, confidence)

    def over(self, slo_p95_s: float) -> float:
        """Returns how many times over the target p95 is, by the best that is known of it."""
        latency = self.row.latency_s
        latency_s = self.p95_ceiling_s or (latency and (latency.p95 or latency.p50))
        return latency_s / slo_p95_s if latency_s else 1.0

    @property
    def doubts(self) -> list[str]:
        return [label for label in self.row.verdict.labels if label != "valid"]

    def __str__(self) -> str:
        """Returns the trial in one line, for whoever looks on."""
        if self.failure is not None:
            return f"batch {self.batch}: {'does not fit' if self.is_oom else self.failure.told}"
        speed = f"batch {self.batch}: {format_rate(self.throughput_per_s)} items/s"
        return ", ".join([speed, format_bytes(self.needed_bytes), *self.doubts])


def trial_of(record: RunRecord, purpose: Purpose = "largest") -> BatchTrial:
    return BatchTrial(measurements([record])[0], purpose)


class Knee(Frozen):
    """The knee is the smallest measured batch whose throughput reaches `SATURATED` of what larger batches reach at most."""

    batch: int
    throughput_per_s: float
    """It was measured at this batch."""
    share: float
    """It is the share of the limit that this batch reaches."""
    limit_per_s: float
    """Throughput nears this as the batch grows. It comes from the fit, or from what was surely measured, whichever is more."""
    above: int | None = None
    """The largest measured batch below it, which does not reach as much: the knee is above this one."""


@dataclass
class BatchSummary:
    """This holds what a search for one recipe has found so far."""

    trials: list[BatchTrial] = field(default_factory=list)
    slo_p95_s: float | None = None
    """The p95 of a step must stay within this."""
    upper: float = math.inf
    """The largest there is lies below this, by the trials and by their secant."""

    @property
    def row(self) -> Measurement:
        """Returns a row that says what all trials have in common, by one that ran if any did."""
        rows = [trial.row for trial in self.trials]
        return next((row for row in rows if row.device_name and row.item), rows[0])

    @property
    def setting(self) -> str:
        """Returns sizes, threads and versions in words. Shapes of inputs are those of one trial, and the limit has a place of its own."""
        words = condition_words(self.row.conditions, self.row.device)
        return " · ".join(text for name, text in words.items() if name not in ("inputs", "max_memory_bytes"))

    @property
    def fitting(self) -> list[BatchTrial]:
        """Returns the trials that ran, by growing batch."""
        return sorted((trial for trial in self.trials if trial.fits), key=lambda trial: trial.batch)

    @property
    def limit_bytes(self) -> int | None:
        return next((trial.memory.limit_bytes for trial in self.trials if trial.memory.limit_bytes), None)

    @property
    def max_batch(self) -> int | None:
        """Returns the largest that ran in its own process, or None where none did."""
        return max((trial.batch for trial in self.fitting), default=None)

    @property
    def max_batch_below(self) -> int | None:
        return math.ceil(self.upper) if math.isfinite(self.upper) else None

    @property
    def ooms(self) -> int:
        return sum(trial.is_oom for trial in self.trials)

    @property
    def knee(self) -> Knee | None:
        """Returns the knee, or None where the measured batches do not show one; a note then says why."""
        found = supported_knee(self.trials)
        return None if isinstance(found, Note) else found

    @property
    def knee_batch(self) -> int | None:
        return self.knee.batch if self.knee else None

    @property
    def slo_batch(self) -> int | None:
        """Returns the largest batch whose p95 keeps the target with 95 % confidence, unless a smaller one is clearly faster.

        Only trials made for it count.
        """
        if self.slo_p95_s is None:
            return None
        kept = [trial for trial in self.fitting if trial.purpose == "slo" and keeps(trial, self.slo_p95_s)]
        if not kept:
            return None
        fastest = max(kept, key=lambda trial: trial.throughput_per_s or 0.0)
        clearly = (fastest.throughput_per_s or 0.0) > CLEARLY_FASTER * (kept[-1].throughput_per_s or 0.0)
        return (fastest if clearly else kept[-1]).batch

    @property
    def at_length(self) -> str | None:
        """Returns the command that measures the largest batch thoroughly, or None where no command line can name the model."""
        return command_line("run", self.trials[0].row.spec, batch=self.max_batch) if self.max_batch else None

    @property
    def is_doubted(self) -> bool:
        """Returns whether other processes disturbed the trials, so that nothing is recommended by their speeds."""
        return any(DISQUALIFYING.intersection(trial.doubts) for trial in self.fitting)

    @property
    def notes(self) -> Iterator[Note]:
        last, knee, fitting = self.trials[-1], supported_knee(self.trials), self.fitting
        if not fitting:
            why = last.failure.message if last.failure else "nothing timed"
            yield note("no-batch", f"no batch ran; batch {last.batch} ended with: {why}")
        elif isinstance(knee, Note):
            yield knee
        if doubts := [labels for trial in fitting if (labels := DISQUALIFYING.intersection(trial.doubts))]:
            text = f"{len(doubts)} of {len(self.trials)} trials are doubted ({', '.join(sorted(set().union(*doubts)))})"
            yield note("doubted-trials", f"{text}: speeds and knee may be off; what fits is not")
        if self.slo_p95_s is not None and fitting and self.slo_batch is None:
            yield note("over-target", "no batch was within the latency target with 95 % confidence")
        if squeezed := [str(trial.batch) for trial in fitting if trial.memory.allocator_retries]:
            text = f"short of memory at batch {', '.join(dict.fromkeys(squeezed))}"
            yield note("short-of-memory", f"{text}: the allocator freed its cache while timing, which costs speed")
        failures = [(trial, trial.failure) for trial in self.trials if trial.failure is not None]
        for trial, failure in failures:
            for told in failure.notes:
                if told.code == "fragmented":
                    yield note("fragmented", f"batch {trial.batch} failed because memory was fragmented: {told}")
        odd = next(((trial, failure) for trial, failure in failures if not trial.is_oom), None)
        if odd is not None and fitting:
            text = f"batch {odd[0].batch} failed for another reason than memory: {odd[1].told}"
            yield note("other-failure", text)


def keeps(trial: BatchTrial, slo_p95_s: float) -> bool:
    """Returns whether p95 surely keeps the target. A tail that is not known keeps none."""
    return trial.fits and trial.p95_ceiling_s is not None and trial.p95_ceiling_s <= slo_p95_s


# The saturation of throughput


class Saturation(Frozen):
    """This is a fitted curve of throughput over the batch."""

    fixed_s: float
    """This is a: every step pays it, however small it is."""
    per_item_s: float
    """This is c: every item pays it."""
    misfit: float
    """It is the largest relative distance of a point from the curve."""

    @property
    def limit_per_s(self) -> float:
        return 1 / self.per_item_s

    def seconds(self, batch: float) -> float:
        return self.fixed_s + self.per_item_s * batch

    def knee(self, fraction: float = SATURATED, *, host_s: float = 0.0) -> float:
        """Returns the batch at which throughput reaches this fraction of its limit; 1 or more.

        Where every step takes the host `host_s` to issue, the device's part must have outgrown that too.
        """
        saturated = fraction / (1 - fraction) * self.fixed_s / self.per_item_s
        return max(1.0, saturated, fraction * host_s / self.per_item_s)


def saturation(points: Sequence[tuple[int, float]]) -> Saturation | None:
    """Returns the curve through the seconds of device-bound steps by batch, or None where two batches are missing.

    Below some batch a step takes what its kernels take to start and to end, and hardly less for fewer items. Where one
    line does not describe all points, the smallest batches are left out: the limit is a matter of the large ones.
    """
    kept = sorted(points)
    found = _fitted(kept)
    while found is not None and found.misfit > WELL_DESCRIBED:
        larger = [point for point in kept if point[0] > kept[0][0]]
        without = _fitted(larger) if len({batch for batch, _ in larger}) >= FEWEST_BATCHES else None
        if without is None:
            break
        kept, found = larger, without
    return found


def _fitted(points: Sequence[tuple[int, float]]) -> Saturation | None:
    """Fits by least squares of relative errors.

    A step time that does not grow with the batch has no limit to near, and a negative fixed part is noise: it is taken
    as none at all.
    """
    if len({batch for batch, _ in points}) < 2:
        return None
    batches, seconds = np.array(points, dtype=np.float64).T
    # Dividing by the time makes one percent count the same at every batch.
    design = np.stack([1 / seconds, batches / seconds], axis=1)
    fixed_s, per_item_s = map(float, np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0])
    if fixed_s < 0:
        rates = batches / seconds
        fixed_s, per_item_s = 0.0, float(rates.sum() / (rates @ rates))
    if per_item_s <= 0:
        return None
    misfit = float(np.max(np.abs((fixed_s + per_item_s * batches) / seconds - 1)))
    return Saturation(fixed_s=fixed_s, per_item_s=per_item_s, misfit=misfit)


def curve_of(trials: Sequence[BatchTrial]) -> Saturation | None:
    """Returns throughput over the batch, from the trials that only the device limits."""
    return saturation([(trial.batch, trial.step_s) for trial in device_bound(trials)])


def device_bound(trials: Sequence[BatchTrial]) -> list[BatchTrial]:
    """Returns trials limited neither by the host nor by an allocator short of memory."""
    fitting = [trial for trial in trials if trial.fits]
    # If the device limits one batch, it limits every larger one. This holds even where a few steps suggest otherwise.
    since = min((trial.batch for trial in fitting if trial.row.bound.label != "host"), default=math.inf)
    return [trial for trial in fitting if trial.batch >= since and not trial.memory.allocator_retries]


def items_of_one(trials: Sequence[BatchTrial]) -> float:
    """Returns how many items throughput counts for each of the batch; 1 unless something else was declared."""
    largest = max((trial for trial in trials if trial.fits), key=lambda trial: trial.batch, default=None)
    return (largest.row.items_per_step or largest.batch) / largest.batch if largest else 1.0


def expected_knee(trials: Sequence[BatchTrial]) -> float | None:
    """Returns where the fit puts the knee; where small batches wait for the host, not before the device outgrows that wait."""
    curve = curve_of(trials)
    if curve is None:
        return None
    since = min(trial.batch for trial in device_bound(trials))
    host_s = max((trial.step_s for trial in trials if trial.fits and trial.batch < since), default=0.0)
    return curve.knee(host_s=host_s)


def supported_knee(trials: Sequence[BatchTrial]) -> Knee | Note:
    """Returns the knee where measured batches show one, else why there is none."""
    rates = {trial.batch: trial.throughput_per_s for trial in trials if trial.throughput_per_s}
    curve = curve_of(trials)
    if len(rates) < FEWEST_BATCHES:
        return _no_knee(f"fewer than {FEWEST_BATCHES} batches ran")
    if len({trial.batch for trial in device_bound(trials)}) < 2:
        return _no_knee("fewer than two batches were limited by the device alone")
    if curve is None:
        return _no_knee("a step took no longer for more items")
    if curve.misfit > LARGEST_MISFIT:
        return _no_knee(f"the times do not follow one curve: some are {curve.misfit:.0%} off it")
    # The lower ends of the intervals, because the highest of several noisy rates is too high.
    surely = [trial.row.throughput_interval.low for trial in trials if trial.fits and trial.row.throughput_interval]
    limit = max(curve.limit_per_s * items_of_one(trials), *surely, 0.0)
    # Rounded as it is printed: a row that says 90 % does not deny a knee at 90 %.
    enough = [batch for batch, rate in rates.items() if round(rate / limit, 2) >= SATURATED]
    largest = max(rates)
    if not enough:
        return _no_knee(f"throughput still grows at {largest}, at {rates[largest] / limit:.0%} of its limit")
    batch = min(enough)
    share = rates[batch] / limit
    if largest < BEYOND * batch and not (curve.misfit <= WELL_DESCRIBED and len(rates) > FEWEST_BATCHES):
        return _no_knee(f"batch {batch} reaches {share:.0%} of its limit, but none much larger was measured")
    above = max((each for each in rates if each < batch), default=None)
    return Knee(batch=batch, throughput_per_s=rates[batch], share=share, limit_per_s=limit, above=above)


def _no_knee(why: str) -> Note:
    return note("no-knee", f"no knee: {why}")


@dataclass(frozen=True)
class Curve:
    """A curve holds the rows of one recipe of a subject, one for each batch, with the batches growing."""

    subject: Subject
    recipe: str
    rows: tuple[Measurement, ...]

    @cached_property
    def knee(self) -> Knee | None:
        """Returns the knee, or None if the measured batches do not show one."""
        return BatchSummary([BatchTrial(row) for row in self.rows]).knee

    @property
    def measured(self) -> list[Measurement]:
        return [row for row in self.rows if row.throughput_per_s is not None]


def curves_of(lines: Sequence[Line]) -> list[Curve]:
    """Returns the curves in the order in which subjects and recipes first appear."""
    chosen: dict[tuple[Subject, str], dict[int, Line]] = {}
    for line in lines:
        if (batch := line.row.batch) is not None:
            points = chosen.setdefault((line.subject, line.row.recipe), {})
            points[batch] = max(points.get(batch, line), line, key=_standing)
    return [
        Curve(subject, recipe, tuple(points[batch].row for batch in sorted(points)))
        for (subject, recipe), points in chosen.items()
    ]


def _standing(line: Line) -> tuple[bool, bool, float, str]:
    """Returns a key: of several lines of one batch the one with the highest standing is shown: it ran, was measured at length, and is the newest."""
    return line.row.failure is None, not line.is_capture, line.measured_at, line.record.id
