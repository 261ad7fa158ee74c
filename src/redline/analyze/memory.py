"""What a record says about memory: what its step needs, and what there was to be had."""

from __future__ import annotations

import re
from collections.abc import Iterator

from redline.record import Memory, RunRecord
from redline.units import format_bytes, parse_bytes

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
