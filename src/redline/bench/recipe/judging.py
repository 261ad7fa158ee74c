"""Whether a difference from strict fp32 passes, given what rounding alone does; and why."""

from __future__ import annotations

import math
from typing import Any

from redline.bench.recipe.outputs import Difference, finite_or_none
from redline.model.note import Note, note
from redline.model.record import Numerics

TOLERANCE_OVER_FLOOR = 4.0
SMALLEST_TOLERANCE = 1e-5
SMALLEST_LOSS_TOLERANCE = 0.02
SMALLEST_UNEQUAL = 1e-3
"""Of integers: among thousands of classes some hang on the last bit of a score."""
LARGEST_TOLERANCE = 0.8
"""Beyond this a recipe that ignores its input (error 1 and more) would come close to passing."""
UNRESOLVED_FLOOR = 0.5
"""Above this the number format cannot resolve the signal of this model, and nothing can be judged."""
ASKING_TWICE = "asking twice"
ANOTHER_SEED = "another seed"
FEW_BITS = "the format of the loss"
REFERENCE = note("reference", "the strict fp32 reference itself")


def judged(
    found: Difference,
    floor: float,
    number_format: str,
    smallest: float | None = None,
    method: Any = "outputs",
    mover: str = "rounding",
) -> Numerics:
    """The verdict on a difference, given what `mover` alone would do."""
    if smallest is None:
        smallest = SMALLEST_UNEQUAL if found.by_equality else SMALLEST_TOLERANCE
    unresolved = not math.isfinite(floor) or floor > UNRESOLVED_FLOOR
    tolerance = LARGEST_TOLERANCE if unresolved else min(max(TOLERANCE_OVER_FLOOR * floor, smallest), LARGEST_TOLERANCE)
    passed = found.finite and not found.degenerate and not unresolved and found.rel_l2 <= tolerance
    return Numerics(
        **{**found.told(), "degenerate": found.degenerate or unresolved},
        method=method,
        number_format=number_format,
        floor=finite_or_none(floor),
        tolerance=tolerance,
        passed=passed,
        reason=_reason(found, floor, tolerance, number_format, method, mover, unresolved),
    )


def _reason(
    found: Difference, floor: float, tolerance: float, number_format: str, method: str, mover: str, unresolved: bool
) -> Note:
    if not found.finite:
        return note("not-finite", "the output is not finite")
    if found.degenerate:
        what = "its loss stands still" if method == "loss-path" else "its output does not depend on the input"
        return note("no-signal", f"the reference carries no signal: {what}")
    hidden_by = mover if unresolved else ""
    if hidden_by == ASKING_TWICE:
        text = (
            f"the same inputs twice give outputs {floor:.2g} apart, so nothing can be compared: the model keeps state between "
            "calls, or draws random numbers that torch.manual_seed does not reach"
        )
        return note("not-repeatable", text)
    if hidden_by == ANOTHER_SEED:
        text = (
            f"the model draws random numbers, and this recipe draws others than strict fp32: another seed alone moves it by "
            f"{floor:.2g}, so nothing can be compared"
        )
        return note("unresolved", text)
    if hidden_by == FEW_BITS:
        text = (
            f"the loss comes in 16 bits, which alone moves it by {floor:.2g}, so nothing can be compared: compute it in fp32, as in "
            "loss(output.float())"
        )
        return note("unresolved", text)
    if hidden_by:
        text = f"{number_format} cannot resolve this model's signal: {hidden_by} alone moves it by {floor:.2g}"
        return note("unresolved", text)
    passes = found.rel_l2 <= tolerance
    plain = f"rel. error {found.rel_error:.2g}; " if found.rel_error is not None else ""
    equal = f"; {found.equal_share:.2%} of the integers are equal" if found.equal_share is not None else ""
    if floor > 0:
        allowed = tolerance / floor
        bound = f"within {allowed:.2g}×" if passes else f"above {allowed:.2g}×"
        cause = f"rounding to {number_format}" if mover == "rounding" else mover
        text = f"{plain}{bound} of what {cause} does (signal error {found.rel_l2:.2g} against {floor:.2g})"
    else:
        where = "within" if passes else "above"
        text = f"{plain}signal error {found.rel_l2:.2g}, {where} the tolerance {tolerance:.2g}"
    return note("within-tolerance" if passes else "above-tolerance", f"{text}{equal}")


def as_reference(own: str) -> Note:
    return REFERENCE if own == "fp32" else note("reference", f"the reference itself: the model as it came, in {own}")


def not_finite(own: str, what: str) -> Note:
    return note("not-finite", f"the {own} {what} is not finite")
