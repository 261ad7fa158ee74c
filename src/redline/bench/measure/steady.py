"""Has the workload settled? Two windows in a row must agree; a new compilation restarts the wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from redline.note import note
from redline.record import Warmup
from redline.spec import MeasureSpec

MEDIAN_AGREEMENT = 0.01
QUARTILE_AGREEMENT = 0.05
CPU_MEDIAN_AGREEMENT = 0.05
CPU_QUARTILE_AGREEMENT = 0.15
"""A shared CPU never agrees to 1 %."""

LOOK_PERIOD_S = 0.02
"""Windows of short steps are long lists: no need to sort them again after every step."""


GO_ON, SETTLED, LATE = 0, 1, 2
AGREED = note("steady", "two windows of steps agree")


def reach_steady_state(
    step: Callable[[], object],
    spec: MeasureSpec,
    *,
    compilations: Callable[[], int],
    is_accelerator: bool,
    on_step: Callable[[int, float], None] = lambda steps, seconds: None,
    agreed: Callable[[int], list[int]] = lambda verdict: [verdict],
    clock: Callable[[], float] = time.perf_counter,
) -> Warmup:
    """Run `step` (which returns when its work is done) until it settles or the cap is reached.

    Of several ranks, `agreed` gives the verdict of the one that decides.
    """
    median_agreement = MEDIAN_AGREEMENT if is_accelerator else CPU_MEDIAN_AGREEMENT
    quartile_agreement = QUARTILE_AGREEMENT if is_accelerator else CPU_QUARTILE_AGREEMENT
    samples: list[float] = []
    settled_from = 0
    compiled = compilations()
    agree = False
    started = look_again_at = clock()
    while True:
        before = clock()
        step()
        now = clock()
        samples.append(now - before)
        on_step(len(samples), now - started)
        if compilations() != compiled:
            compiled = compilations()
            settled_from = len(samples)
        long_enough = now - started >= spec.warmup_min_seconds and len(samples) >= spec.warmup_min_steps
        if long_enough and now >= look_again_at:
            look_again_at = now + LOOK_PERIOD_S
            settled = samples[settled_from:]
            window = window_length(settled, spec.warmup_window, spec.warmup_window_seconds)
            agree = windows_agree(settled, window, median_agreement, quartile_agreement)
        is_late = now - started >= spec.warmup_max_seconds
        [verdict] = agreed(SETTLED if agree else LATE if is_late else GO_ON)
        if verdict == SETTLED:
            return Warmup(samples=tuple(samples), seconds=now - started, steady=True, reason=AGREED)
        if verdict == LATE:
            text = f"no two windows of steps agreed within {spec.warmup_max_seconds:g} s of warm-up"
            reason = note("not-steady", text)
            return Warmup(samples=tuple(samples), seconds=now - started, steady=False, reason=reason)


def window_length(samples: Sequence[float], fewest: int, seconds: float) -> int:
    """How many of the last steps make a window: ten steps of a microsecond would never see a clock that drifts."""
    elapsed, count = 0.0, 0
    for sample in reversed(samples):
        if elapsed >= seconds and count >= fewest:
            break
        elapsed += sample
        count += 1
    return max(count, fewest)


def windows_agree(samples: Sequence[float], window: int, median: float, quartile: float) -> bool:
    """Whether the last two windows have the same median and quartiles, each within its share."""
    if len(samples) < 2 * window:
        return False
    earlier = _quartiles(samples[-2 * window : -window])
    later = _quartiles(samples[-window:])
    allowed = (quartile, median, quartile)
    return all(abs(b - a) <= share * a for a, b, share in zip(earlier, later, allowed, strict=True))


def _quartiles(window: Sequence[float]) -> tuple[float, float, float]:
    ordered = sorted(window)
    return _at(ordered, 0.25), _at(ordered, 0.5), _at(ordered, 0.75)


def _at(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
