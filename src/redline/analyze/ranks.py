"""What the ranks of one run tell: memory of each, the rank that holds up the others and why, and processors they share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Block, RankBlock, RankInfo, RunRecord
from redline.model.units import counted, format_seconds

STRAGGLER = 1.1
"""A rank this much slower than the middle one, in most blocks, is named."""
EXPLAINS = 0.5
"""Of what a rank takes longer: a figure that differs by less does not explain it."""


class LateRank(Frozen):
    """The rank that the others wait for."""

    rank: int
    why: Note


def rank_peaks(blocks: Sequence[Block]) -> tuple[int | None, ...]:
    """One per rank; a single process is rank 0."""
    memories: dict[int, list[int]] = {}
    for block in blocks:
        for rank, memory in [(each.rank, each.memory) for each in block.ranks] or [(0, block.memory)]:
            peak = memory.peak_reserved_bytes if memory.peak_reserved_bytes is not None else memory.peak_rss_bytes
            if peak is not None:
                memories.setdefault(rank, []).append(peak)
    return tuple(max(memories[rank]) for rank in sorted(memories))


def late_rank(record: RunRecord) -> LateRank | None:
    """The rank that is clearly slower than the middle one in most blocks, and why.

    Ranks that train wait for each other in the backward pass and so take equally long: their forward passes tell. A rank
    whose part of the batch is larger is only late where it is slower per item too.
    """
    timed = [block for block in record.blocks if len(block.ranks) > 1]
    infos = {each.rank: each for each in record.prepared.ranks} if record.prepared is not None else {}
    items = {rank: info.items_per_step for rank, info in infos.items()}
    late: Counter[int] = Counter()
    for block in timed:
        seconds = {each.rank: _seconds(each) for each in block.ranks}
        slowest = max(seconds, key=lambda rank: seconds[rank])
        per_item = {rank: value / (items.get(rank) or 1) for rank, value in seconds.items()}
        if all(_exceeds(values, slowest) for values in (seconds, per_item)):
            late[slowest] += 1
    rank, count = next(iter(late.most_common(1)), (-1, 0))
    return LateRank(rank=rank, why=_why(rank, timed, infos)) if count > len(timed) / 2 else None


def _exceeds(values: dict[int, float], slowest: int) -> bool:
    others = median(value for rank, value in values.items() if rank != slowest)
    return others > 0 and values[slowest] > STRAGGLER * others


def _why(rank: int, blocks: Sequence[Block], infos: dict[int, RankInfo]) -> Note:
    devices = {each.device.name for number, each in infos.items() if number != rank}
    if rank in infos and devices and infos[rank].device.name not in devices:
        text = f"its device is {infos[rank].device.name}, those of the others {', '.join(sorted(devices))}"
        return note("unlike-device", text)
    if rank in infos and infos[rank].device.kind != "cpu":
        return note(
            "slow-device", "the same device takes longer there: its clocks, its temperature, or others that use it"
        )
    took, others_took = _compared(rank, blocks, _seconds)
    assert took is not None
    assert others_took is not None
    enough = EXPLAINS * (took - others_took)
    waited, others_waited = _compared(rank, blocks, lambda each: _per_step(each, each.waited_s))
    if waited is not None and others_waited is not None and waited - others_waited > enough:
        text = (
            f"it has no processor for {format_seconds(waited)} a step, the others for {format_seconds(others_waited)}"
        )
        return note("no-processor", f"{text}: something else runs on its processors")
    busy, others_busy = _compared(rank, blocks, lambda each: _per_step(each, each.cpu_s))
    if busy is None or others_busy is None:
        return note("cause-unknown", "the system does not tell what its processors did")
    if busy - others_busy > enough:
        text = f"it computes {format_seconds(busy)} a step, the others {format_seconds(others_busy)}"
        return note("computes-longer", f"{text}: more work, or slower processors")
    text = f"it computes {format_seconds(busy)} a step and the others {format_seconds(others_busy)}, which does not explain it"
    return note("waits-for-something", f"{text}: it waits for data, a lock or a device")


def _compared(
    rank: int, blocks: Sequence[Block], figure: Callable[[RankBlock], float | None]
) -> tuple[float | None, float | None]:
    """The median over blocks, of this rank and of the others."""
    read = [(each.rank == rank, figure(each)) for block in blocks for each in block.ranks]
    own = [value for is_own, value in read if is_own and value is not None]
    others = [value for is_own, value in read if not is_own and value is not None]
    return (median(own), median(others)) if own and others else (None, None)


def _seconds(block: RankBlock) -> float:
    return median(block.phases.get("forward") or block.samples)


def _per_step(block: RankBlock, figure: float | None) -> float | None:
    return None if figure is None or not block.samples else figure / len(block.samples)


def oversubscription(record: RunRecord) -> Note | None:
    """Where ranks on one machine have more threads than it has processors for them."""
    prepared = record.prepared
    if prepared is None or not prepared.ranks or prepared.environment.device.kind != "cpu":
        return None
    environment = prepared.environment
    threads, cores = environment.threads or 1, len(environment.affinity) or environment.logical_cores or 1
    here = max(Counter(rank.host for rank in prepared.ranks).values())
    if here * threads <= cores:
        return None
    each = counted(threads, "thread")
    shared = counted(cores, "processor")
    return note("oversubscribed", f"{here} ranks with {each} each share {shared}: this is not scaling")
