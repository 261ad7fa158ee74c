"""Which blocks a record's figures rest on, and what company did to them.

On a GPU, processes that take turns may change each other. Compiled steps replayed from CUDA graphs on an H200 ran up to
8 % faster in every block after another process had run, at the same clock, than alone from start to end; who deploys them
runs them alone. So a session that will have siblings is timed alone first. Where its blocks in turns lie clearly apart
from those, they are led back: times are as it took them alone. That it was company and not drift nobody can tell from one
process, so a ratio keeps what was seen in turns inside its interval.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from statistics import median

import msgspec

from redline.analyze.statistics import Ratio, paired_ratio
from redline.record import Block, BlockKind, Memory, RunRecord
from redline.units import format_bytes, parse_bytes

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


_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes))"
_ASKED = re.compile(rf"Tried to allocate {_SIZE}")
_IDLE = re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated")
_CURE = re.compile(r"PYTORCH_\w*ALLOC_CONF=expandable_segments:True")


def needed_bytes(record: RunRecord) -> int | None:
    """What must fit: the least a squeeze found, else what was reserved, on a CPU what the worker held for itself."""
    if record.failure is not None:
        return None
    if record.closed is not None and record.closed.memory.needed_bytes is not None:
        return record.closed.memory.needed_bytes
    return peak(record, "peak_reserved_bytes") or peak(record, "peak_private_bytes") or peak(record, "peak_rss_bytes")


def resident_bytes(record: RunRecord) -> int | None:
    """Held between two steps, whatever the batch."""
    return min((memory.resident_bytes for memory in _timed(record) if memory.resident_bytes is not None), default=None)


def limit_bytes(record: RunRecord) -> int | None:
    """The cap that was asked for, or what was free; else what the device has."""
    limit = min((memory.limit_bytes for memory in _timed(record) if memory.limit_bytes is not None), default=None)
    if limit is None and record.prepared is not None:
        return record.prepared.environment.device.memory_bytes
    return limit


def retries_while_timed(record: RunRecord) -> int:
    """How often the allocator had to give its cache back between the first timed block and the last."""
    counts = [memory.allocator_retries for memory in _timed(record) if memory.allocator_retries is not None]
    return counts[-1] - counts[0] if counts else 0


def fragments(out_of_memory: str) -> str | None:
    """What torch's error says of memory in pieces: more lay idle than was asked for, so that it was not short of it.

    Whether a batch fits is then a matter of luck: a larger one may run where this one broke.
    """
    asked, idle, cure = (pattern.search(out_of_memory) for pattern in (_ASKED, _IDLE, _CURE))
    if asked is None or idle is None:
        return None
    asked_bytes, idle_bytes = (parse_bytes(found.group(1).replace("bytes", "B")) for found in (asked, idle))
    if idle_bytes < asked_bytes:
        return None
    told = f"{format_bytes(asked_bytes)} were asked for while {format_bytes(idle_bytes)} lay idle in pieces"
    return f"{told}; {cure.group()} joins them" if cure else told


def peak(record: RunRecord, figure: str) -> int | None:
    return max((value for memory in _timed(record) if (value := getattr(memory, figure)) is not None), default=None)


def _timed(record: RunRecord) -> Iterator[Memory]:
    return (block.memory for block in record.blocks if block.samples)
