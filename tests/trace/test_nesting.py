"""Parents by the vectorised way against a stack."""

from __future__ import annotations

import random

import numpy as np
import pytest

from redline.trace.columns import HostRanges
from redline.trace.links import DEEPEST, Nesting


def nest(rows: list[tuple[int, int, int]]) -> Nesting:
    thread, start, end = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    return Nesting(HostRanges(np.zeros(len(rows), np.int32), start, end - start, thread.astype(np.int32)))


def by_stack(rows: list[tuple[int, int, int]]) -> list[int]:
    parents = [-1] * len(rows)
    for thread in {row[0] for row in rows}:
        stack: list[int] = []
        order = sorted((i for i, row in enumerate(rows) if row[0] == thread), key=lambda i: (rows[i][1], -rows[i][2]))
        for i in order:
            while stack and rows[stack[-1]][2] <= rows[i][1]:
                stack.pop()
            parents[i] = stack[-1] if stack else -1
            stack.append(i)
    return parents


def random_tree(chance: random.Random, thread: int, low: int, high: int, depth: int) -> list[tuple[int, int, int]]:
    rows: list[tuple[int, int, int]] = []
    at = low
    while at < high - 2 and depth:
        start = at + chance.randrange(3)
        end = min(start + chance.randrange(1, 40), high)
        if end <= start:
            break
        rows.append((thread, start, end))
        rows += random_tree(chance, thread, start + 1, end, depth - 1)
        at = end
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_random_trees_on_several_threads(seed: int) -> None:
    chance = random.Random(seed)
    rows = [row for thread in (0, 1, 5) for row in random_tree(chance, thread, chance.randrange(20), 200, 4)]
    chance.shuffle(rows)
    found = nest(rows)
    assert found.parent.tolist() == by_stack(rows)
    weights = np.array([chance.randrange(100) for _ in rows])
    totals = weights.astype(np.int64).copy()
    for row in sorted(range(len(rows)), key=lambda i: -found.depth[i]):
        if found.parent[row] >= 0:
            totals[found.parent[row]] += totals[row]
    assert found.with_all_inside(weights).tolist() == totals.tolist()
    for thread in (0, 1, 3, 5):
        for at in range(0, 200, 3):
            around = [i for i, row in enumerate(rows) if row[0] == thread and row[1] <= at < row[2]]
            expected = max(around, key=lambda i: found.depth[i], default=-1)
            assert found.around(np.array([thread], np.int32), np.array([at])).tolist() == [expected]


def test_same_start_same_end_and_no_length() -> None:
    rows = [(0, 0, 10), (0, 0, 10), (0, 0, 4), (0, 4, 4), (0, 10, 12)]
    found = nest(rows)
    assert found.parent.tolist() == [-1, 0, 1, 1, -1]
    assert found.around(np.array([0], np.int32), np.array([4])).tolist() == [3]


def test_namesakes_inside_each_other_are_found_at_any_depth() -> None:
    rows = [(0, 0, 100), (0, 1, 99), (0, 2, 98), (0, 200, 300)]
    found = nest(rows)
    assert found.has_namesake_around(np.array([7, 8, 7, 7], np.int32)).tolist() == [False, False, True, False]


def test_absurd_depth_does_not_hang() -> None:
    count = 20 * DEEPEST
    rows = [(0, n, 3 * count - n) for n in range(count)]
    found = nest(rows)
    assert int(found.depth.max()) == DEEPEST
    assert found.has_namesake_around(np.zeros(count, np.int32)).sum() == count - 1
