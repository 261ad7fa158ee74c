"""Which batch to try next, on the way to the largest that fits: pure decisions from what was tried so far.

Two bounds hold for almost every model. Peak memory is convex in the batch, so a line through two batches that fit
meets the capacity at or above the largest (`line`). And each part of the peak grows at most in proportion to the
batch once what is resident anyway is taken off, so `batch × free / used` surely fits (`sure`). Where the two are
close the line is followed; where they are far apart (a flat stretch whose end is not yet in sight) steps grow by a
limited factor. A batch that ran out of memory although both said otherwise means that the curve bends or has a step:
then the gap is halved. The numbers below were chosen on simulated curves: `benchmarks/batch_finder.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from redline.model.fields import Frozen

START = 8
WITHIN = 0.02
"""Good enough: the bound lies no further above than this."""

FIRST_STEP = 0.35
"""Of the way to what surely fits, from the first trial: it was small, and a small batch says little about large ones."""
NEAR = 1.2
"""Line and sure bound this close together are believed."""
GROWTH = 8.0
"""The most a batch is multiplied by on a line alone."""
FAR, STEP = 0.7, 0.75
"""Below this share of the aim, go only this part of the way: the last line should be drawn close to the end."""
MARGIN, LEAST_MARGIN = 0.05, 0.008
"""Stay this much under the aim: of the way left, and of the batch."""
APART = 0.8
"""Two batches closer than this draw a line of little but rounding."""
BLIND = 1.25
"""Where figures say nothing, the batch is multiplied by this."""
BACK = 0.6
"""After a failure that nothing announced: this part of the gap."""
BENDS = 1.02
"""More than in proportion, by this factor: the curve bends upwards."""
ROUNDING_BYTES = 24 * 2**20
ROUNDING_SHARE = 0.005
"""How far a memory figure may be off: a segment of the allocator, or what measuring can resolve."""


class Tried(Frozen):
    """One batch: what it needed, or that it did not run."""

    batch: int
    needed_bytes: int | None
    """None: it did not fit, or broke in another way."""


class Room(Frozen):
    """What there is to fill."""

    capacity_bytes: int | None
    """None where nothing says how much there is; then only trying tells."""
    resident_bytes: int = 0
    """Taken whatever the batch: weights and optimizer state."""


class _Point(NamedTuple):
    batch: int
    needed: int


class Bounds(Frozen):
    """What the trials say about the largest batch."""

    fits: int | None
    """The largest that ran."""
    upper: float
    """It is below this."""

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
    """The batch to try now; None when the largest is known well enough, or nothing fits at all."""
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
    if free <= 0:  # it ran, so that the figure is off: only trying tells
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
    """Nothing has fitted yet: much smaller, down to one."""
    smallest = min(trial.batch for trial in tried)
    return None if smallest == 1 else max(1, smallest // 4)


def _points(tried: Sequence[Tried]) -> list[_Point]:
    """What fitted, by batch; of those too close together to draw a line only the outer ones."""
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
    """Where the line through the last two meets the capacity."""
    if len(points) < 2 or room.capacity_bytes is None:
        return math.inf
    before, last = points[-2:]
    rise = last.needed - before.needed
    if rise <= 0 or last.needed >= room.capacity_bytes:
        return math.inf
    return last.batch + (room.capacity_bytes - last.needed) * (last.batch - before.batch) / rise


def _parabola(points: Sequence[_Point], room: Room) -> float:
    """Where a parabola through the last three meets the capacity; what is resident stands in for a missing third."""
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
    """Whether memory has grown by more than the batch did: then what was sure is not."""
    before, last = points[-2:]
    base = _base(last, room)
    return last.needed - base > BENDS * (before.needed + _rounding(last) - base) * last.batch / before.batch


def _base(point: _Point, room: Room) -> int:
    """What does not grow with the batch, told low: the inputs of the trial were counted with what is resident."""
    return min(round(0.95 * room.resident_bytes), point.needed - _rounding(point))


def _rounding(point: _Point) -> int:
    return max(ROUNDING_BYTES, round(ROUNDING_SHARE * point.needed))
