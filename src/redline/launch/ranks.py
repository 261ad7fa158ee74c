"""This module makes one answer of what several ranks answer, and names the rank that holds up the others if they hang."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

import msgspec

from redline.model.protocol import AllReduced, BlockReply, Position, PreparedReply, Reply, SqueezeReply, TraceReply
from redline.model.record import Block, Failure, Prepared, RankBlock


def hanging(places: Mapping[int, Position | str], ranks: int, limit_s: float) -> Failure:
    """Names who holds up the others: a rank that does not say where it is, or the one that is furthest behind.

    `places` are those of the silent ranks by their numbers: where they say they are, or the stage that was last heard of.
    Of ranks that have come equally far, one that computes holds up those that wait, and one in the user's own code the rest.
    """

    def progress(place: Position | str) -> tuple[int, ...]:
        if isinstance(place, str):
            return (-1,)
        return place.entered, place.steps, place.waits, not place.where

    least = min(map(progress, places.values()))
    behind = [rank for rank, place in places.items() if progress(place) == least]
    place = places[behind[0]]
    stage, where = (place.stage, place.where) if isinstance(place, Position) else (place, "")
    if ranks == 1:
        message = f"no answer within {limit_s:g} s while the worker was at '{stage}'; it was stopped"
        return Failure(stage=stage, kind="timeout", message=message)
    mute = isinstance(place, str)
    does = "do not respond" if mute else "wait for each other" if len(behind) == ranks else "did not go on"
    at = f"'{stage}'" + (f" in {where}" if where else "")
    names = ", ".join(map(str, behind))
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
    match first:
        case PreparedReply():
            parts = [reply.prepared for reply in replies if isinstance(reply, PreparedReply)]
            return msgspec.structs.replace(first, prepared=_prepared(parts))
        case BlockReply():
            return BlockReply(block=merged_block([reply.block for reply in replies if isinstance(reply, BlockReply)]))
        case TraceReply():
            others = tuple(reply.trace.path for reply in replies[1:] if isinstance(reply, TraceReply))
            return TraceReply(trace=msgspec.structs.replace(first.trace, others=others))
        case AllReduced():
            probes = [reply for reply in replies if isinstance(reply, AllReduced)]
            return max(probes, key=lambda probe: median(probe.seconds))
        case SqueezeReply():
            known = [reply.needed_bytes for reply in replies if isinstance(reply, SqueezeReply) and reply.needed_bytes]
            return SqueezeReply(needed_bytes=max(known, default=None))
        case _:
            return first


def _prepared(parts: Sequence[Prepared]) -> Prepared:
    first, infos = parts[0], [part.workload for part in parts]
    batches = [info.batch for info in infos if info.batch is not None]
    workload = msgspec.structs.replace(
        first.workload,
        items_per_step=sum(info.items_per_step for info in infos),
        batch=sum(batches) if len(batches) == len(infos) else None,
    )
    return msgspec.structs.replace(
        first,
        workload=workload,
        numerics=next((part.numerics for part in parts if part.numerics.is_wrong), first.numerics),
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
