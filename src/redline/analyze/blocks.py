"""Which blocks a record's figures rest on, and what company did to them.

On a GPU, processes that take turns may change each other. Compiled steps replayed from CUDA graphs on an H200 ran up to
8 % faster in every block after another process had run, at the same clock, than alone from start to end; who deploys them
runs them alone. So a session that will have siblings is timed alone first. Where its blocks in turns lie clearly apart
from those, they are led back: times are as it took them alone. That it was company and not drift nobody can tell from one
process, so a ratio keeps what was seen in turns inside its interval.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec

from redline.analyze.statistics import Ratio, paired_ratio
from redline.record import Block, BlockKind, RunRecord

FEWEST_BLOCKS = 2
"""Of each sort: one alone may be a hiccup."""
SMALLEST_SHIFT = 0.01
"""Of the time: what is less is not worth a word."""
CLEARLY = 4.0
"""By so many times their scatter the two sorts must lie apart."""


def timed_blocks(record: RunRecord, kind: BlockKind) -> list[Block]:
    """The blocks of this kind that figures are made of, as they would have been alone."""
    alone, in_turns = _sorts(record, kind)
    if not in_turns:
        return alone
    factor = math.exp(-(shift(record, kind) or 0.0))
    return in_turns if factor == 1.0 else [_scaled(block, factor) for block in in_turns]


def latency_blocks(record: RunRecord) -> list[Block]:
    """Where there are none of that kind, throughput blocks serve both."""
    return timed_blocks(record, "latency") or timed_blocks(record, "throughput")


def shift(record: RunRecord, kind: BlockKind = "throughput") -> float | None:
    """The logarithm of the time in turns over the time alone; None where there is no clear one.

    By blocks of this kind, or of the other where only those were timed alone. Medians, lest a hiccup hides it.
    """
    kinds: tuple[BlockKind, ...] = (kind, "latency" if kind == "throughput" else "throughput")
    for each in kinds:
        alone, in_turns = (_logs(blocks) for blocks in _sorts(record, each))
        if min(len(alone), len(in_turns)) >= FEWEST_BLOCKS:
            found = median(in_turns) - median(alone)
            is_clear = abs(found) >= max(SMALLEST_SHIFT, CLEARLY * (_scatter(alone) + _scatter(in_turns)))
            return found if is_clear else None
    return None


def round_medians_s(record: RunRecord, kind: BlockKind = "throughput") -> dict[int, float]:
    """What a record took in each round, as it would have alone: what ratios are made of."""
    rounds: dict[int, list[float]] = {}
    for block in timed_blocks(record, kind):
        rounds.setdefault(block.round, []).extend(block.samples)
    return {number: middle for number, samples in rounds.items() if (middle := median(samples)) > 0}


def ratio_in_turns(first: RunRecord, other: RunRecord) -> Ratio | None:
    """First over other by the rounds both have, both as alone; None with too few of them for an interval."""
    paired = paired_ratio(round_medians_s(first), round_medians_s(other))
    if paired is None:
        return None
    back = math.exp((shift(first) or 0.0) - (shift(other) or 0.0))  # to what was seen in turns
    return msgspec.structs.replace(paired, low=paired.low * min(back, 1.0), high=paired.high * max(back, 1.0))


def _sorts(record: RunRecord, kind: BlockKind) -> tuple[list[Block], list[Block]]:
    """Alone, and in turns."""
    filled = [block for block in record.blocks if block.kind == kind and block.samples]
    return [block for block in filled if block.alone], [block for block in filled if not block.alone]


def _logs(blocks: Sequence[Block]) -> list[float]:
    middles = [median(block.samples) for block in blocks]
    return [math.log(middle) for middle in middles if middle > 0]


def _scatter(logs: Sequence[float]) -> float:
    middle = median(logs)
    return median(abs(each - middle) for each in logs)


def _scaled(block: Block, factor: float) -> Block:
    """Host times of issuing stay: they are not the device's."""
    return msgspec.structs.replace(
        block,
        samples=tuple(factor * each for each in block.samples),
        settling=tuple(factor * each for each in block.settling),
        phases={name: tuple(factor * each for each in samples) for name, samples in block.phases.items()},
        wall_s=factor * block.wall_s,
    )
