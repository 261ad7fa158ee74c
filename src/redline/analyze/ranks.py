"""This module reads what the ranks of one run tell: the memory of each, which rank holds up the others and why, and whether they share processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median

from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Block, RankBlock, RankInfo, RunRecord
from redline.model.units import counted, format_seconds

STRAGGLER = 1.1
"""A rank is named if its own part of a step takes this much longer than that of the middle rank, in most blocks."""
EXPLAINS = 0.5
"""A figure explains why a rank takes longer if it accounts for at least this share of the difference."""


class LateRank(Frozen):
    """This is the rank that the others wait for."""

    rank: int
    phase: str
    """The phase of the step in which it takes longer than the others."""
    seconds: float
    """It takes so much longer for its own part of a step."""
    why: Note


def rank_peaks(blocks: Sequence[Block]) -> tuple[int | None, ...]:
    """Returns the peak memory of each rank; a single process is rank 0."""
    memories: dict[int, list[int]] = {}
    for block in blocks:
        for rank, memory in [(each.rank, each.memory) for each in block.ranks] or [(0, block.memory)]:
            peak = memory.peak_reserved_bytes if memory.peak_reserved_bytes is not None else memory.peak_rss_bytes
            if peak is not None:
                memories.setdefault(rank, []).append(peak)
    return tuple(max(memories[rank]) for rank in sorted(memories))


def own_seconds(block: RankBlock) -> dict[str, float]:
    """Returns the median time of each phase in which a rank is working by itself and waits for no other.

    In the backward pass ranks wait for each other's gradients, so that phase counts only where it was timed without averaging.
    Where no phase was timed, the whole step counts.
    """
    own = {name: seconds for name, seconds in block.phases.items() if name != "backward"} | block.alone
    return {name: median(seconds) for name, seconds in own.items() if seconds} or {"step": median(block.samples)}


def late_rank(record: RunRecord) -> LateRank | None:
    """Returns the rank whose own part of a step clearly takes longer than that of the middle rank in most blocks, and why.

    A rank with a larger part of the batch counts as late only if it also takes longer per item. Returns None if no rank does.
    """
    timed = [block for block in record.blocks if len(block.ranks) > 1]
    # Blocks of few steps may have no phases. In their whole steps all ranks that average gradients take equally long.
    timed = [block for block in timed if any(rank.alone or rank.phases for rank in block.ranks)] or timed
    infos = {info.rank: info for info in record.prepared.ranks} if record.prepared is not None else {}
    late: Counter[int] = Counter()
    for block in timed:
        seconds = {rank.rank: sum(own_seconds(rank).values()) for rank in block.ranks}
        per_item = {rank: own / (infos[rank].items_per_step if rank in infos else 1) for rank, own in seconds.items()}
        slowest = max(seconds, key=lambda rank: seconds[rank])
        if all(_exceeds(values, slowest) for values in (seconds, per_item)):
            late[slowest] += 1
    rank, count = next(iter(late.most_common(1)), (-1, 0))
    if count <= len(timed) / 2:
        return None

    def longer(phase: str) -> float:
        return _longer(rank, timed, lambda each: own_seconds(each).get(phase)) or 0.0

    phases = {name for block in timed for each in block.ranks for name in own_seconds(each)}
    whole = _longer(rank, timed, lambda each: sum(own_seconds(each).values())) or 0.0
    return LateRank(rank=rank, phase=max(phases, key=longer), seconds=whole, why=_why(rank, timed, infos, whole))


def _exceeds(values: Mapping[int, float], slowest: int) -> bool:
    others = median(value for rank, value in values.items() if rank != slowest)
    return others > 0 and values[slowest] > STRAGGLER * others


def _why(rank: int, blocks: Sequence[Block], infos: Mapping[int, RankInfo], longer_s: float) -> Note:
    devices = {info.device.name for number, info in infos.items() if number != rank}
    own = infos[rank].device if rank in infos else None
    if own is not None and devices and own.name not in devices:
        return note("unlike-device", f"it computes on {own.name}, the others on {', '.join(sorted(devices))}")
    if own is not None and own.kind != "cpu":
        text = "the same device takes longer there: its clocks, its temperature, or others that use it"
        return note("slow-device", text)
    enough = EXPLAINS * longer_s
    waited_s = _longer(rank, blocks, lambda each: _per_step(each, each.waited_s))
    if waited_s is not None and waited_s > enough:
        text = f"it has no processor for {format_seconds(waited_s)} a step more than the others"
        return note("no-processor", f"{text}: something else runs on its processors")
    computed_s = _longer(rank, blocks, lambda each: _per_step(each, each.cpu_s))
    if computed_s is None:
        return note("cause-unknown", "the system does not tell what its processors did")
    if computed_s > enough:
        text = f"it computes {format_seconds(computed_s)} a step more than the others"
        return note("computes-longer", f"{text}: more work, or slower processors")
    return note("waits-for-something", "computing does not explain it: it waits for data, a lock or a device")


def _longer(rank: int, blocks: Sequence[Block], figure: Callable[[RankBlock], float | None]) -> float | None:
    """Returns by how much a figure of this rank is above that of the others. Both are medians over blocks."""
    known = [
        (each.rank == rank, value) for block in blocks for each in block.ranks if (value := figure(each)) is not None
    ]
    own, others = ([value for is_own, value in known if is_own is wanted] for wanted in (True, False))
    return median(own) - median(others) if own and others else None


def _per_step(block: RankBlock, figure: float | None) -> float | None:
    return None if figure is None or not block.samples else figure / len(block.samples)


def oversubscription(record: RunRecord) -> Note | None:
    """Returns a note if ranks on one machine have more threads than it has processors for them."""
    prepared = record.prepared
    if prepared is None or not prepared.ranks or prepared.environment.device.kind != "cpu":
        return None
    environment = prepared.environment
    threads, cores = environment.threads or 1, len(environment.affinity) or environment.logical_cores or 1
    here = max(Counter(rank.host for rank in prepared.ranks).values())
    if here * threads <= cores:
        return None
    shared = f"{counted(threads, 'thread')} each share {counted(cores, 'processor')}"
    return note("oversubscribed", f"{here} ranks with {shared}: this is not scaling")
