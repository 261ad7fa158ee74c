"""Where a larger batch stops helping: the saturation point of throughput, from a handful of batches.

A step takes t = a + c·b once the device is the limit: a fixed part and a part per item. Throughput b/t then nears
1/c, and reaches the fraction f of that at b = f/(1 − f) · a/c.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from redline.model.fields import Frozen

SATURATED = 0.9
"""The knee is where throughput reaches this fraction of its limit."""
FEWEST_POINTS = 2
FEWEST_KEPT = 3
"""With this few points none is left out: two points always lie on a line."""
WELL_DESCRIBED = 0.05
"""A curve that misses a point by more is not the curve of all of them."""


class StepTime(Frozen):
    """The median step of one batch, where the device and not the host was the limit."""

    batch: int
    seconds: float


class Saturation(Frozen):
    """A fitted curve of throughput over the batch."""

    fixed_s: float
    """a: paid by every step, however small."""
    per_item_s: float
    """c: paid by every item."""
    misfit: float
    """The largest relative distance of a point from the curve."""

    @property
    def limit_per_s(self) -> float:
        return 1 / self.per_item_s

    def seconds(self, batch: float) -> float:
        return self.fixed_s + self.per_item_s * batch

    def knee(self, fraction: float = SATURATED, *, host_s: float = 0.0) -> float:
        """The batch at which throughput reaches this fraction of its limit; 1 or more.

        Where every step takes the host `host_s` to issue, the device's part must have outgrown that too.
        """
        saturated = fraction / (1 - fraction) * self.fixed_s / self.per_item_s
        return max(1.0, saturated, fraction * host_s / self.per_item_s)

    def reached(self, batch: float) -> float:
        """The fraction of the limit that this batch reaches."""
        return batch * self.per_item_s / self.seconds(batch)


def saturation(points: Sequence[StepTime]) -> Saturation | None:
    """The curve through device-bound points; None where two batches are missing.

    Below some batch a step takes what its kernels take to start and to end, and hardly less for fewer items. Where one
    line does not describe all points, the smallest batches are left out: the limit is a matter of the large ones.
    """
    kept = sorted(points, key=lambda point: point.batch)
    found = _fitted(kept)
    while found is not None and found.misfit > WELL_DESCRIBED:
        larger = [point for point in kept if point.batch > kept[0].batch]
        without = _fitted(larger) if len({point.batch for point in larger}) >= FEWEST_KEPT else None
        if without is None:
            break
        kept, found = larger, without
    return found


def _fitted(points: Sequence[StepTime]) -> Saturation | None:
    """By least squares of relative errors.

    A step time that does not grow with the batch has no limit to near, and a negative fixed part is noise: it is taken
    as none at all.
    """
    if len({point.batch for point in points}) < FEWEST_POINTS:
        return None
    batches = np.array([point.batch for point in points], dtype=np.float64)
    seconds = np.array([point.seconds for point in points], dtype=np.float64)
    # Dividing by the time makes one percent count the same at every batch.
    design = np.stack([1 / seconds, batches / seconds], axis=1)
    fixed_s, per_item_s = np.linalg.lstsq(design, np.ones_like(seconds), rcond=None)[0]
    if fixed_s < 0:
        rates = batches / seconds
        fixed_s, per_item_s = 0.0, float(rates.sum() / (rates @ rates))
    if per_item_s <= 0:
        return None
    fitted = fixed_s + per_item_s * batches
    return Saturation(
        fixed_s=float(fixed_s), per_item_s=float(per_item_s), misfit=float(np.max(np.abs(fitted / seconds - 1)))
    )
