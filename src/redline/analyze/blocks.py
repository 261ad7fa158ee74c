"""Which blocks a record's figures rest on: those in turns with its siblings, or those it ran before they came.

On a GPU, processes that take turns may change each other. Compiled steps replayed from CUDA graphs on an H200 ran up to
8 % faster in every block after another process had run, at the same clock, than alone from start to end; who deploys them
runs them alone. So a session that will have siblings is timed alone first. Where its blocks in turns lie clearly apart
from those, the figures are of the ones alone, and ratios, which are made of rounds in turns, are led back to them. That
it was company and not drift nobody can tell from one process, so the ratio in turns stays inside the interval.
"""

from __future__ import annotations

import math
from statistics import median

from redline.record import Block, BlockKind, RunRecord

FEWEST_BLOCKS = 2
"""Of each sort: one alone may be a hiccup."""
SMALLEST_SHIFT = 0.01
"""Of the time: what is less is not worth a word."""


def timed_blocks(record: RunRecord, kind: BlockKind) -> list[Block]:
    """The blocks of this kind that figures are made of."""
    alone, in_turns = _sorts(record, kind)
    return alone if alone and (not in_turns or shift(record) is not None) else in_turns


def latency_blocks(record: RunRecord) -> list[Block]:
    """Where there are none of that kind, throughput blocks serve both."""
    return timed_blocks(record, "latency") or timed_blocks(record, "throughput")


def shift(record: RunRecord) -> float | None:
    """The logarithm of the time in turns over the time alone, by throughput blocks; None where there is no clear one.

    Clear: the two sorts lie further apart than the blocks of either lie among themselves.
    """
    alone, in_turns = (_logs(blocks) for blocks in _sorts(record, "throughput"))
    if min(len(alone), len(in_turns)) < FEWEST_BLOCKS:
        return None
    gap = max(min(in_turns) - max(alone), min(alone) - max(in_turns))
    scatter = max(max(logs) - min(logs) for logs in (alone, in_turns))
    found = median(in_turns) - median(alone)
    return found if abs(found) >= SMALLEST_SHIFT and gap > scatter else None


def round_medians_s(record: RunRecord, kind: BlockKind = "throughput") -> dict[int, float]:
    """What a record took in each round: what ratios are made of."""
    rounds: dict[int, list[float]] = {}
    for block in _sorts(record, kind)[1]:
        rounds.setdefault(block.round, []).extend(block.samples)
    return {number: middle for number, samples in rounds.items() if (middle := median(samples)) > 0}


def from_turns_to_alone(first: RunRecord, other: RunRecord) -> float:
    """What to add to the logarithm of first over other in turns, so that it is the one of both alone."""
    return (shift(other) or 0.0) - (shift(first) or 0.0)


def _sorts(record: RunRecord, kind: BlockKind) -> tuple[list[Block], list[Block]]:
    """Alone, and in turns."""
    filled = [block for block in record.blocks if block.kind == kind and block.samples]
    return [block for block in filled if block.alone], [block for block in filled if not block.alone]


def _logs(blocks: list[Block]) -> list[float]:
    middles = [median(block.samples) for block in blocks]
    return [math.log(middle) for middle in middles if middle > 0]
