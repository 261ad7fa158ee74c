"""Unions and overlaps against the plain way of computing them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from kineto import length, merged

from redline.trace.intervals import Intervals, overlap, union


def of(pairs: list[tuple[int, int]]) -> Intervals:
    return union(np.array([a for a, _ in pairs], np.int64), np.array([b for _, b in pairs], np.int64))


@pytest.mark.parametrize("seed", range(20))
def test_random_intervals(seed: int) -> None:
    chance = random.Random(seed)
    base = 1_755_000_000_000_000_000  # nanoseconds since 1970: floats would not do
    pairs = [
        (a := base + chance.randrange(500), a + chance.choice((0, 1, 7, 40))) for _ in range(chance.randrange(1, 80))
    ]
    found = of(pairs)
    assert list(zip(found.start.tolist(), found.end.tolist(), strict=True)) == [tuple(one) for one in merged(pairs)]
    assert found.total == length(pairs)
    assert all(pairs[first][0] == start for first, start in zip(found.first, found.start, strict=True))
    others = [(a := base + chance.randrange(500), a + chance.randrange(30)) for _ in range(20)]
    common = set().union(*(range(a, b) for a, b in pairs)) & set().union(*(range(a, b) for a, b in others))
    assert overlap(found, of(others)) == len(common)


def test_nothing_is_nothing() -> None:
    empty = of([])
    assert (len(empty), empty.total, empty.span) == (0, 0, 0)
    assert overlap(empty, of([(1, 5)])) == 0


def test_what_touches_is_one() -> None:
    assert len(of([(0, 5), (5, 9)])) == 1
    assert len(of([(0, 5), (6, 9)])) == 2
