"""What several ranks answer becomes one answer, and of ranks that hang the one that holds up the others is named."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeVar

import msgspec

from redline.model.errors import DoorError
from redline.model.protocol import AllReduced, BlockReply, Position, PreparedReply, Reply, SqueezeReply, TraceReply
from redline.model.record import Block, Failure, Numerics, Prepared, RankBlock

R = TypeVar("R")


def hanging(places: Mapping[int, Position | str], ranks: int, limit_s: float) -> Failure:
    """Names who holds up the others: a rank that does not say where it is, or the one that is furthest behind.

    `places` are those of the silent ranks by their numbers: where they say they are, or the stage that was last heard of.
    """
    mute = [rank for rank, place in places.items() if isinstance(place, str)]
    known = {rank: place for rank, place in places.items() if isinstance(place, Position)}
    if mute:
        behind = mute
    else:
        least = min((place.entered, place.steps) for place in known.values())
        late = {rank: place for rank, place in known.items() if (place.entered, place.steps) == least}
        computing = [rank for rank, place in late.items() if not place.waits]
        in_own_code = [rank for rank, place in late.items() if place.where]
        behind = computing or (in_own_code if len(in_own_code) < len(late) else []) or list(late)
    place = places[behind[0]]
    stage, where = (place.stage, place.where) if isinstance(place, Position) else (place, "")
    does = "do not respond" if mute else "wait for each other" if len(behind) == ranks > 1 else "did not go on"
    names = ", ".join(map(str, behind))
    at = f"'{stage}'" + (f" in {where}" if where else "")
    return Failure(
        stage=stage,
        kind="timeout",
        message=f"rank {names} of {ranks} {does} at {at}: no answer within {limit_s:g} s; all were stopped",
        where=where,
        rank=behind[0] if len(behind) == 1 else None,
    )


def merged(replies: Sequence[Reply]) -> Reply:
    """Returns one reply made from those of all ranks, in their order. That of a single worker stays as it is."""
    first = replies[0]
    if len(replies) == 1:
        return first
    if isinstance(first, PreparedReply):
        return msgspec.structs.replace(
            first, prepared=_prepared([_as(PreparedReply, reply).prepared for reply in replies])
        )
    if isinstance(first, BlockReply):
        return BlockReply(block=merged_block([_as(BlockReply, reply).block for reply in replies]))
    if isinstance(first, TraceReply):
        others = tuple(_as(TraceReply, reply).trace.path for reply in replies[1:])
        return TraceReply(trace=msgspec.structs.replace(first.trace, others=others))
    if isinstance(first, AllReduced):
        probes = [_as(AllReduced, reply) for reply in replies]
        return max(probes, key=lambda probe: median(probe.seconds))
    if isinstance(first, SqueezeReply):
        known = [reply.needed_bytes for reply in replies if isinstance(reply, SqueezeReply) and reply.needed_bytes]
        return SqueezeReply(needed_bytes=max(known, default=None))
    return first


def _as(kind: type[R], reply: object) -> R:
    if not isinstance(reply, kind):
        raise DoorError(f"ranks answered unlike things: {kind.__name__} and {type(reply).__name__}")
    return reply


def _prepared(parts: Sequence[Prepared]) -> Prepared:
    first, infos = parts[0], [part.workload for part in parts]
    items = sum(info.items_per_step for info in infos)
    batches = [info.batch for info in infos]
    batch = None if None in batches else sum(size or 0 for size in batches)
    wrong = next((part.numerics for part in parts if part.numerics.is_wrong), None)
    numerics: Numerics = wrong or first.numerics
    return msgspec.structs.replace(
        first,
        workload=msgspec.structs.replace(first.workload, items_per_step=items, batch=batch),
        numerics=numerics,
        ranks=tuple(rank for part in parts for rank in part.ranks),
    )


def merged_block(blocks: Sequence[Block]) -> Block:
    """Returns the slowest rank's block with the samples and the memory of all: the others have to wait for it."""
    slowest = max(blocks, key=lambda block: sum(block.samples) / max(len(block.samples), 1))
    siblings_s = sum(block.cpu_s or 0.0 for block in blocks if block is not slowest)
    others_s = slowest.others_cpu_s
    energies = [block.energy_j for block in blocks]
    return msgspec.structs.replace(
        slowest,
        # Siblings are no strangers on this machine. Their shares cannot be told from others' by name.
        others_cpu_s=None if others_s is None else max(others_s - siblings_s, 0.0),
        busiest=(),
        energy_j=None if None in energies else sum(joules or 0.0 for joules in energies),
        ranks=tuple(
            RankBlock(
                rank=rank,
                samples=block.samples,
                # Without `alone` nobody knows which part of a phase is waiting for others, as in every phase of FSDP.
                phases=block.phases if block.alone else {},
                alone=block.alone,
                wall_s=block.wall_s,
                cpu_s=block.cpu_s,
                waited_s=block.waited_s,
                memory=block.memory,
            )
            for rank, block in enumerate(blocks)
        ),
    )
