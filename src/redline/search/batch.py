"""This module finds batches: the largest that fits, the knee of the throughput, and the largest that keeps a latency target.

Every batch is tried in a fresh process: a second shape in one process would share its allocator's state and turn
torch.compile dynamic. So whatever is reported as fitting has fitted, from a cold start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from redline.analyze.batch import (
    SLO_TESTS,
    BatchSummary,
    BatchTrial,
    Purpose,
    curve_of,
    device_bound,
    expected_knee,
    keeps,
    trial_of,
)
from redline.launch.door import Door
from redline.model.errors import SpecError
from redline.model.fields import MOST_ITEMS, Frozen
from redline.model.spec import RunSpec
from redline.search.observer import Journal, Observer
from redline.search.run import measure_together

MAX_TRIALS = 8
"""The searches for the largest batch and for the knee together take at most this many trials."""
KNEE_NEIGHBOURHOOD = 1.5
"""A measured batch within this factor of a wanted one says enough about the shape of the curve there."""
KNEE_MARGIN, KNEE_WITHIN = 1.03, 1.15
"""The knee that is reported must have been measured. A batch `KNEE_MARGIN` times the expected knee is tried, unless one was measured that
lies between the expected knee and `KNEE_WITHIN` times the batch that would be tried."""
SLO_SAMPLES = 400
SLO_SECONDS = 8.0
"""A trial of latency takes at least `SLO_SAMPLES` samples and may last this long, because a p95 of fewer cannot be promised."""
SLO_WITHIN = 0.03
"""The search for the latency target ends when the batch expected to just keep it is at most this share above one that does."""
SLO_MARGIN = 0.99
"""This share of the batch that should just meet the target is tried, because half of those that just meet it would
miss it another time."""
HOPELESS = ("user", "unsupported", "compile", "numerics")
"""The search ends if its first trial fails in one of these ways, because every batch would; so it does if the device cannot be opened."""


@dataclass
class _Finder:
    """This is the search for one recipe: it holds what was found so far, and tries more batches."""

    spec: RunSpec
    door: Door
    journal: Journal
    observer: Observer
    found: BatchSummary

    def attempt(self, batch: int, purpose: Purpose) -> BatchTrial:
        self.observer.trying(batch, purpose)
        (record,) = measure_together([trial_spec(self.spec, batch, purpose)], self.door, self.journal, self.observer)
        trial = trial_of(record, purpose)
        self.found.trials.append(trial)
        self.observer.tried(trial)
        return trial

    @property
    def tried(self) -> list[Tried]:
        """Returns the trials by which the largest batch is searched.

        Trials of latency are left out, because their memory is measured in another way.
        """
        by_memory = (trial for trial in self.found.trials if trial.purpose != "slo")
        return [Tried(batch=trial.batch, needed_bytes=trial.needed_bytes) for trial in by_memory]

    @property
    def room(self) -> Room:
        """Returns how much memory there is. The smallest trial tells best what is resident, because the fewest inputs are counted in."""
        resident = next((trial.memory.resident_bytes for trial in self.found.fitting), None)
        capacity = next((trial.memory.limit_bytes for trial in self.found.fitting if trial.memory.limit_bytes), None)
        return Room(capacity_bytes=capacity, resident_bytes=resident or 0)

    @property
    def largest(self) -> int:
        return self.found.max_batch or 0

    def was_tried(self, batch: int) -> bool:
        return any(trial.batch == batch for trial in self.found.trials)

    def find_largest(self, most: int) -> None:
        """Tries batches, each chosen by what the last ones needed, until the largest batch is known closely enough."""
        while len(self.found.trials) < MAX_TRIALS and (batch := next_batch(self.tried, self.room, most=most)):
            trial = self.attempt(batch, "largest")
            if not self.largest and _is_hopeless(trial):
                break
        # The bound is that of the memory, however far the caller asked to look. If no batch ran, only trials that ran out of memory
        # give a bound, because a model that breaks does so at any batch.
        ooms = (trial.batch for trial in self.found.trials if trial.is_oom)
        self.found.upper = bounds(self.tried, self.room).upper if self.largest else min(ooms, default=math.inf)

    def find_knee(self) -> None:
        """Adds the points that a sound fit still lacks, as long as there are trials left."""
        while len(self.found.trials) < MAX_TRIALS and (batch := self._missing_for_knee()):
            self.attempt(batch, "knee")

    def _missing_for_knee(self) -> int | None:
        """Returns the batch whose step time would tell most about the knee; None if the knee is known well enough."""
        points = device_bound(self.found.trials)
        if len({trial.batch for trial in points}) < 2:
            return self._untried(points, [self.largest * 0.8, self.largest * 0.5])
        curve, knee = curve_of(self.found.trials), expected_knee(self.found.trials)
        if curve is None or knee is None:
            return None
        # The fixed part shows best where it is half of the step.
        shape = self._untried(points, [curve.fixed_s / curve.per_item_s])
        if shape is not None:
            return shape
        at = max(round(knee * KNEE_MARGIN), self._smallest)
        near = any(at / KNEE_MARGIN <= trial.batch <= KNEE_WITHIN * at for trial in self.found.fitting)
        return None if near or at > self.largest or self.was_tried(at) else at

    def _untried(self, points: Sequence[BatchTrial], wanted: Sequence[float]) -> int | None:
        """Returns the first of these batches about which no measured point says enough."""
        for batch in (round(min(max(value, self._smallest), self.largest)) for value in wanted):
            is_known = any(max(trial.batch / batch, batch / trial.batch) <= KNEE_NEIGHBOURHOOD for trial in points)
            if not is_known and not self.was_tried(batch):
                return batch
        return None

    @property
    def _smallest(self) -> int:
        """Returns the smallest batch that is tried: two in training, because normalisation over a batch of one fails there."""
        return 2 if self.spec.workload.task == "train" else 1

    def find_under_target(self, slo_p95_s: float) -> None:
        """Closes in on the largest batch that surely keeps the target, by what the fitted curve expects."""
        low, high = 0, self.largest + 1
        near = min(self.found.fitting, key=lambda trial: abs(math.log(trial.over(slo_p95_s))))
        batch = self._expected_at(slo_p95_s, near)
        for _ in range(SLO_TESTS):
            at = min(max(batch, low + 1), high - 1)
            if not low < at < high:
                return
            trial = self.attempt(at, "slo")
            low, high = (at, high) if keeps(trial, slo_p95_s) else (low, at)
            expected = self._expected_at(slo_p95_s, trial)
            if high - low <= 1 or (low and min(expected, high) <= low * (1 + SLO_WITHIN)):
                return
            batch = expected if low < expected < high else (low + high) // 2

    def _expected_at(self, slo_p95_s: float, like: BatchTrial) -> int:
        """Returns the batch that should just meet the target, if latency follows the step time as it does in `like`."""
        if not like.fits:
            return like.batch // 2
        curve, over = curve_of(self.found.trials), like.over(slo_p95_s)
        if curve is None:
            return int(like.batch / over)
        return int((curve.seconds(like.batch) / over - curve.fixed_s) / curve.per_item_s * SLO_MARGIN)


def search_batch(
    spec: RunSpec,
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    *,
    most: int | None = None,
    slo_p95_s: float | None = None,
) -> BatchSummary:
    """Searches the batches of one spec, whose own batch is ignored. No batch above `most` is tried."""
    finder = _Finder(spec, door, journal, observer or Observer(), BatchSummary(slo_p95_s=slo_p95_s))
    finder.find_largest(min(most or MOST_ITEMS, MOST_ITEMS))
    if finder.largest:
        finder.find_knee()
        if slo_p95_s is not None:
            finder.find_under_target(slo_p95_s)
    return finder.found


def require_batches(specs: Sequence[RunSpec]) -> None:
    """Refuses specs whose batch cannot be searched.

    The inline door has no fresh process to give: what fits after other batches in one process need not fit in a fresh one.
    """
    for spec in specs:
        if spec.workload.items is not None:
            raise SpecError("items is what one batch counts as: for other batches the factory must return items itself")
        if spec.launch.door == "inline":
            cannot_travel = (spec.workload.artifact or "").startswith("memory:")
            why = "this model cannot be pickled: give it as file.py:factory" if cannot_travel else "use fork or spawn"
            raise SpecError(f"every batch is tried in a fresh process, which door 'inline' does not have: {why}")


def trial_spec(spec: RunSpec, batch: int, purpose: Purpose) -> RunSpec:
    """Returns the spec of one trial. It does not check numerics, because fp32 may not fit where the recipe does.

    A trial of little effort is shorter than a quick measurement elsewhere.

    A trial of latency is long enough for its p95 to be promised.
    """
    measure = spec.measure
    times = (
        (3, 2.0, 2.0)
        if measure.effort == "quick"
        else (measure.min_rounds, measure.max_seconds, measure.warmup_max_seconds)
    )
    trial = msgspec.structs.replace(
        measure,
        min_rounds=min(measure.min_rounds, times[0]),
        max_seconds=min(measure.max_seconds, times[1]),
        warmup_max_seconds=min(measure.warmup_max_seconds, times[2]),
        tail_samples=max(measure.tail_samples, 130),
        check_numerics=False,
        sparing=True,
        squeeze_memory=purpose != "slo",
    )
    if purpose == "slo":
        longer = max(measure.max_seconds, SLO_SECONDS)
        trial = msgspec.structs.replace(trial, max_seconds=longer, min_samples=SLO_SAMPLES, tail_samples=SLO_SAMPLES)
    workload = msgspec.structs.replace(spec.workload, batch=batch)
    return msgspec.structs.replace(spec, workload=workload, measure=trial)


def _is_hopeless(trial: BatchTrial) -> bool:
    return trial.failure is not None and (trial.failure.kind in HOPELESS or trial.failure.stage == "device")


START = 8
"""The search begins with this batch."""
WITHIN = 0.02
"""The largest batch is known well enough when the bound lies no further above it than this share."""

FIRST_STEP = 0.35
"""After the first trial the search goes this share of the way to what surely fits, because a small batch says little about large ones."""
NEAR = 1.2
"""The line is believed if it ends within this factor of what surely fits."""
GROWTH = 8.0
"""A line alone never multiplies the batch by more than this."""
FAR, STEP = 0.7, 0.75
"""If the batch is below the share `FAR` of the aim, the search goes only the part `STEP` of the way, so that the last line is drawn
close to the end."""
MARGIN, LEAST_MARGIN = 0.05, 0.008
"""The search stays under its aim by `MARGIN` of the way left, and by `LEAST_MARGIN` of the batch at least."""
APART = 0.8
"""A line is drawn only through batches of which the smaller is at most this share of the larger; closer ones would show little but
rounding."""
BLIND = 1.25
"""The batch is multiplied by this factor if the figures of memory say nothing."""
BACK = 0.6
"""After a failure that no figure announced, the search goes this part of the gap between what ran and what failed."""
BENDS = 1.02
"""The curve of memory bends upwards if it grew by more than this factor beyond the growth of the batch."""
ROUNDING_BYTES = 24 * 2**20
ROUNDING_SHARE = 0.005
"""A memory figure may be off by the larger of these two: a segment of the allocator, or what measuring can resolve."""


class Tried(Frozen):
    """This says what one batch needed, or that it did not run."""

    batch: int
    needed_bytes: int | None
    """It is None if the batch did not fit, or broke in another way."""


class Room(Frozen):
    """This says how much memory there is to fill."""

    capacity_bytes: int | None
    """It is None if nothing says how much there is; then only trying tells."""
    resident_bytes: int = 0
    """Weights and optimizer state take this much, whatever the batch."""


class _Point(NamedTuple):
    batch: int
    needed: int


class Bounds(Frozen):
    """These are the bounds of the largest batch, by what the trials say."""

    fits: int | None
    """This is the largest batch that ran."""
    upper: float
    """The largest batch that would run is below this."""

    @property
    def settled(self) -> bool:
        return self.fits is not None and (self.upper <= self.fits + 1 or self.upper <= self.fits * (1 + WITHIN))


def bounds(tried: Sequence[Tried], room: Room, most: int | None = None) -> Bounds:
    points = _points(tried)
    ceiling = _ceiling(tried, most)
    if not points:
        return Bounds(fits=None, upper=ceiling + 1)
    return Bounds(fits=points[-1].batch, upper=min(_line(points, room), ceiling + 1))


def next_batch(tried: Sequence[Tried], room: Room, *, most: int | None = None, start: int = START) -> int | None:
    """Returns the batch to try now; None if the largest is known well enough, or if nothing fits at all."""
    points, ceiling = _points(tried), _ceiling(tried, most)
    if not points:
        return int(min(start, ceiling)) if not tried else _retreat(tried)
    if bounds(tried, room, most).settled:
        return None
    batch = points[-1].batch
    failed = min((trial.batch for trial in tried if trial.needed_bytes is None), default=math.inf)
    aim = _aim(points, room)
    if aim >= batch + 0.95 * (failed - batch):  # what was expected to fit has already failed
        aim = math.sqrt(batch * failed) if failed > 4 * batch else batch + BACK * (failed - batch)
    return int(min(max(aim, batch + 1), ceiling))


def _aim(points: Sequence[_Point], room: Room) -> float:
    batch, needed = points[-1]
    if room.capacity_bytes is None:
        return 2 * batch
    free = room.capacity_bytes - needed
    if free <= 0:  # the batch ran, so that the figure is off, and only trying tells
        return BLIND * batch
    sure = batch + free * batch / (needed - _base(points[-1], room))
    if len(points) == 1:
        return batch + FIRST_STEP * (sure - batch)
    line = _line(points, room)
    if _bends(points, room):
        goal = min(line, _parabola(points, room))
    elif line <= NEAR * sure:
        goal = line
    else:
        goal = max(sure, min(GROWTH * batch, math.sqrt(sure * line)))
    if batch < FAR * goal:
        return batch + STEP * (goal - batch)
    return goal - max(MARGIN * (goal - batch), LEAST_MARGIN * batch)


def _retreat(tried: Sequence[Tried]) -> int | None:
    """Returns a much smaller batch where nothing has fitted yet; None after a batch of one."""
    smallest = min(trial.batch for trial in tried)
    return None if smallest == 1 else max(1, smallest // 4)


def _points(tried: Sequence[Tried]) -> list[_Point]:
    """Returns the trials that fitted, by batch; of those too close together to draw a line only the outer ones."""
    fitted = sorted(_Point(trial.batch, trial.needed_bytes) for trial in tried if trial.needed_bytes is not None)
    kept = fitted[-1:]
    for point in reversed(fitted[:-1]):
        if point.batch <= APART * kept[0].batch:
            kept.insert(0, point)
    return kept if len(kept) > 1 or len(fitted) < 2 else [fitted[0], fitted[-1]]


def _ceiling(tried: Sequence[Tried], most: int | None) -> float:
    failed = [trial.batch - 1 for trial in tried if trial.needed_bytes is None]
    return min([*failed, most if most is not None else math.inf])


def _line(points: Sequence[_Point], room: Room) -> float:
    """Returns the batch at which a line through the last two points would meet the capacity."""
    if len(points) < 2 or room.capacity_bytes is None:
        return math.inf
    before, last = points[-2:]
    rise = last.needed - before.needed
    if rise <= 0 or last.needed >= room.capacity_bytes:
        return math.inf
    return last.batch + (room.capacity_bytes - last.needed) * (last.batch - before.batch) / rise


def _parabola(points: Sequence[_Point], room: Room) -> float:
    """Returns the batch at which a parabola through the last three points would meet the capacity.

    What is resident, at a batch of zero, stands in for a missing third point.
    """
    assert room.capacity_bytes is not None
    first = points[-3] if len(points) > 2 else _Point(0, _base(points[-1], room))
    middle, last = points[-2:]
    slope_before = (middle.needed - first.needed) / (middle.batch - first.batch)
    slope = (last.needed - middle.needed) / (last.batch - middle.batch)
    bend = (slope - slope_before) / (last.batch - first.batch)
    if bend <= 0:
        return math.inf
    slope_here = slope + bend * (last.batch - middle.batch)
    free = room.capacity_bytes - last.needed
    return last.batch + 2 * free / (slope_here + math.sqrt(slope_here**2 + 4 * bend * free))


def _bends(points: Sequence[_Point], room: Room) -> bool:
    """Returns whether memory has grown by more than the batch did. What surely fits by proportion is not sure then."""
    before, last = points[-2:]
    base = _base(last, room)
    return last.needed - base > BENDS * (before.needed + _rounding(last) - base) * last.batch / before.batch


def _base(point: _Point, room: Room) -> int:
    """Returns what does not grow with the batch. It is taken low, because the inputs of the trial were counted with what is resident."""
    return min(round(0.95 * room.resident_bytes), point.needed - _rounding(point))


def _rounding(point: _Point) -> int:
    return max(ROUNDING_BYTES, round(ROUNDING_SHARE * point.needed))
