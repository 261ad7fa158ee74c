"""How far a recipe's answers are from strict fp32, in words; and which of several checks speaks."""

from __future__ import annotations

from collections.abc import Iterable

from redline.record import Numerics


def farthest(checks: Iterable[Numerics | None]) -> Numerics | None:
    """Of several checks of one recipe the one that looked farthest: errors grow along a path of losses.

    The first of those that looked equally far; what only timed says nothing.
    """
    known = [each for each in checks if each is not None]
    return max(known, key=lambda each: (not each.is_left_out, each.steps or 0), default=None)


def error_text(numerics: Numerics | None, *, with_steps: bool = False) -> str:
    """`with_steps`: say how long a path of losses was followed, where rows may differ in that."""
    if numerics is None:
        return "n/a"
    if numerics.is_left_out:
        return "not checked"
    if not numerics.finite:
        return "not finite ✗"
    if numerics.method == "reference":
        return "fp32"
    if numerics.degenerate:
        return "no signal ✗"
    told = "inf" if numerics.rel_l2 is None else f"{numerics.rel_l2:.1e}"
    told += f" in {numerics.steps} steps" if with_steps and numerics.steps is not None else ""
    return told if numerics.passed else f"{told} ✗"
