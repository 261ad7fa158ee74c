"""The way from the baseline to the fastest recipe, step by step, and what is left to the roofline.

Times, not rates: each step of the way takes some of the baseline's time off, and the parts add up.
"""

from __future__ import annotations

from redline.errors import SpecError
from redline.spec import Spec


class HeadroomStep(Spec):
    """One change on the way."""

    name: str
    gain: float
    """Time before over time after: above 1 is faster."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval, where the two were measured in turns."""
    verdict: str = ""

    def __post_init__(self) -> None:
        if not self.gain > 0:
            raise SpecError(f"gain must be above 0, got {self.gain}")


class Headroom(Spec):
    title: str
    baseline: str
    baseline_s: float
    """A step of the baseline, in seconds."""
    winner: str
    steps: tuple[HeadroomStep, ...] = ()
    low: float | None = None
    high: float | None = None
    """The 95 % interval of the whole gain, where there is one."""
    verdict: str = ""
    roofline_s: float | None = None
    """The least a step could take on this device; None where it is not known."""
    record_id: str = ""
    """Of the winner."""

    def __post_init__(self) -> None:
        if not self.baseline_s > 0:
            raise SpecError(f"baseline_s must be above 0, got {self.baseline_s}")

    @property
    def winner_s(self) -> float:
        seconds = self.baseline_s
        for step in self.steps:
            seconds /= step.gain
        return seconds


class Bar(Spec):
    """One bar of the waterfall, in seconds: where it starts and where it ends."""

    label: str
    from_s: float
    to_s: float
    kind: str
    """`total`, `gain`, `loss` or `headroom`."""
    told: str
    """What the bar says, in words."""


def waterfall(headroom: Headroom) -> list[Bar]:
    """Baseline, the gain of each step, the winner, and what is left to the roofline."""
    before_s = headroom.baseline_s
    bars = [Bar(label=headroom.baseline, from_s=0.0, to_s=before_s, kind="total", told="baseline")]
    for step in headroom.steps:
        after_s = before_s / step.gain
        verdict = f", {step.verdict}" if step.verdict else ""
        kind = "gain" if after_s <= before_s else "loss"
        bars.append(
            Bar(
                label=step.name,
                from_s=before_s,
                to_s=after_s,
                kind=kind,
                told=f"{step.gain:.2f}×{_between(step.low, step.high)}{verdict}",
            )
        )
        before_s = after_s
    whole = f"{headroom.baseline_s / before_s:.2f}×{_between(headroom.low, headroom.high)} in all"
    told = f"{whole}, {headroom.verdict}" if headroom.verdict else whole
    bars.append(Bar(label=headroom.winner, from_s=0.0, to_s=before_s, kind="total", told=told))
    if headroom.roofline_s is not None:
        left = before_s / headroom.roofline_s
        bars.append(
            Bar(
                label="roofline",
                from_s=before_s,
                to_s=headroom.roofline_s,
                kind="headroom",
                told=f"{left:.1f}× left at most",
            )
        )
    return bars


def _between(low: float | None, high: float | None) -> str:
    return f" ({low:.2f}–{high:.2f})" if low is not None and high is not None else ""
