"""What is told of a recipe's distance from strict fp32, and which of several checks tells it."""

from __future__ import annotations

import pytest

from redline.analyze.trust import farthest
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
