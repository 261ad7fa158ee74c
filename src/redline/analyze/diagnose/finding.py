"""A finding, and the arithmetic of what mending it can bring at most."""

from __future__ import annotations

from typing import TYPE_CHECKING

from redline.spec import Recipe, Spec

if TYPE_CHECKING:
    from redline.analyze.profile import Profile

LARGEST_GAIN = 100.0
"""What is bounded by nothing is not told as infinity."""


class Finding(Spec):
    code: str
    evidence: str
    next: str
    """What to try, in Redline's recipe words where there is one."""
    gain_bound: float
    """The step can become so many times faster at most, were this all of it gone."""


def gain_without(profile: Profile, seconds: float) -> float:
    """The step's time over what would be left of it."""
    whole = profile.wall_s
    left = whole - min(seconds, whole)
    return min(whole / left, LARGEST_GAIN) if left > 0 else LARGEST_GAIN


def has_step(profile: Profile, *names: str) -> bool:
    """Whether the profiled recipe holds one of these steps already. Unknown of a trace from elsewhere: then no."""
    if profile.capture is None:
        return False
    return any(step.name in names for step in Recipe.parse(profile.capture.recipe).steps)


def with_step(profile: Profile, step: str, without: str | None = None) -> str:
    """The profiled recipe with this step, in the place of one of the same name; of a foreign trace, the step alone."""
    if profile.capture is None:
        return step
    gone = (step.partition(":")[0], without)
    kept = [str(other) for other in Recipe.parse(profile.capture.recipe).steps if other.name not in gone]
    return "+".join([*kept, step])
