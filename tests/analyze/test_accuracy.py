"""What is told of a recipe's distance from strict fp32, and which of several checks tells it."""

from __future__ import annotations

import pytest

from redline.analyze.trust import error_text, farthest
from redline.model.record import Numerics

SHORT = Numerics(method="loss-path", rel_l2=4e-4, passed=True, steps=5)
LONG = Numerics(method="loss-path", rel_l2=0.12, passed=True, steps=20)
ONLY_TIMED = Numerics(method="unchecked")


@pytest.mark.parametrize("checks", [(SHORT, LONG, ONLY_TIMED), (ONLY_TIMED, LONG, None, SHORT)])
def test_the_longest_path_speaks(checks: tuple[Numerics | None, ...]) -> None:
    assert farthest(checks) is LONG


def test_a_check_speaks_before_none_and_the_first_of_equals_before_the_others() -> None:
    outputs = [Numerics(rel_l2=1e-3, passed=True), Numerics(rel_l2=2e-3, passed=True)]
    assert farthest([ONLY_TIMED, *outputs]) is outputs[0]
    assert farthest([None, ONLY_TIMED]) is ONLY_TIMED
    assert farthest([None]) is None


@pytest.mark.parametrize(
    ("numerics", "told"),
    [
        (None, "n/a"),
        (ONLY_TIMED, "not checked"),
        (Numerics(method="reference", rel_l2=0.0, passed=True), "fp32"),
        (Numerics(method="reference", finite=False), "not finite ✗"),
        (Numerics(finite=False), "not finite ✗"),
        (Numerics(rel_l2=0.9, degenerate=True), "no signal ✗"),
        (Numerics(rel_l2=1e-3, passed=True), "1.0e-03"),
        (Numerics(rel_l2=0.7), "7.0e-01 ✗"),
        (LONG, "1.2e-01 in 20 steps"),
    ],
)
def test_errors_in_words(numerics: Numerics | None, told: str) -> None:
    assert error_text(numerics, with_steps=True) == told


def test_where_all_rows_looked_equally_far_the_length_is_left_out() -> None:
    assert error_text(LONG) == "1.2e-01"
