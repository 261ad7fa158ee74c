"""What a record says about memory: what its step needs, and what there was to be had."""

from __future__ import annotations

from collections.abc import Iterator

from redline.record import Memory, RunRecord


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


def peak(record: RunRecord, figure: str) -> int | None:
    return max((value for memory in _timed(record) if (value := getattr(memory, figure)) is not None), default=None)


def _timed(record: RunRecord) -> Iterator[Memory]:
    return (block.memory for block in record.blocks if block.samples)
