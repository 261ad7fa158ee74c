"""This module says which blocks a record's figures come from, derives those figures, and takes contention between sessions out of them.

On a GPU, processes that take turns can affect each other. On an H200, compiled steps replayed from CUDA graphs ran up to
8 % faster in every block that followed another process, at the same clock, than by themselves; a deployed model runs by
itself. So a session that will have siblings is timed solo first. Where its contended blocks clearly differ from its solo
blocks, they are rescaled to match them. One process cannot tell contention from drift, so a ratio keeps the value
measured under contention inside its interval.

On a CPU, processes of other people slow recipes unequally: a step of many short parallel regions waits for its slowest thread
at the end of each. Beside four busy processes on two cores a gain of 1.5 was measured as 8, in every round. So a ratio is
made of rounds in which neither side waited for a processor. Where there are too few of them, its interval has room for
all that was waited: a step takes longer by no more than its threads waited together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from statistics import fmean, median
from typing import Literal

import msgspec
import numpy as np

from redline.analyze.statistics import Interval, PairedLog, median_interval, paired_log, percentile
from redline.model.fields import Frozen
from redline.model.record import Block, Memory, RunRecord, TimeKind

ENERGY_LEAST_S = 0.5
"""A figure over a shorter time would often be off by a tenth or more, because a driver's counter of joules moves only every 20 to 100
ms."""
ENERGY_LONG_S = 2.0
"""A contended block so long has little of the energy of the block before it, which the counter adds late."""
FEWEST_BLOCKS = 2
"""There must be so many of each sort, because a single one may be an outlier."""
SMALLEST_SHIFT = 0.01
"""Shifts of a smaller share of the time are ignored."""
CLEARLY = 4.0
"""The two sorts must differ by this many times their scatter."""
QUIET = 0.05
"""A worker that waited less than this share of a block for a processor was not disturbed."""
MOST_WAITED = 0.98
"""If it waited longer than this share of a block, nothing is known of the time it takes undisturbed."""
FEWEST_QUIET_ROUNDS = 3
"""If at least so many rounds were quiet on both sides, a ratio is made of these alone."""
NO_PROCESSOR_LEFT = 0.95
"""If others took this share of what the worker left to them, they probably also took some of what it wanted."""


def device_kind(record: RunRecord) -> str:
    """Returns what it ran on where that is known, else what was asked for."""
    if record.prepared is not None:
        return record.prepared.environment.device.kind
    return record.spec.device.partition(":")[0]


def waited_s(record: RunRecord, blocks: Sequence[Block]) -> float:
    """Returns the seconds in which threads of a worker on a CPU were ready to run and other processes had the processors.

    Threads that wait for each other are the recipe's own doing.
    """
    others_s = sum(block.others_cpu_s or 0.0 for block in blocks)
    if all(block.waited_s is not None for block in blocks):
        return min(sum(block.waited_s or 0.0 for block in blocks), others_s)
    cores = (record.prepared.environment.logical_cores if record.prepared else None) or 1
    left_s = sum(cores * block.wall_s - (block.cpu_s or 0.0) for block in blocks)
    return others_s if others_s > NO_PROCESSOR_LEFT * left_s else 0.0


def _waited_shares(record: RunRecord, kind: TimeKind) -> dict[int, float]:
    """Returns how much of each round's time was waited for a processor, by all threads together, or nothing for what is not on a CPU."""
    if device_kind(record) != "cpu":
        return {}
    rounds: dict[int, list[Block]] = {}
    for block in _sorts(record, kind)[1]:
        if block.cpu_s is not None and block.others_cpu_s is not None and block.wall_s > 0:
            rounds.setdefault(block.round, []).append(block)
    return {
        number: min(waited_s(record, blocks) / sum(block.wall_s for block in blocks), MOST_WAITED)
        for number, blocks in rounds.items()
    }


class Latency(Frozen, frozen=True, kw_only=True):
    """These are seconds per step. A percentile is None where too few samples would make it up."""

    p50: float
    p90: float | None
    p95: float | None
    p99: float | None
    mean: float
    std: float | None
    n: int
    clock: Literal["host", "device"]
    low: float | None
    """This is the lower end of the 95 % interval of p50."""
    high: float | None


def timed_blocks(record: RunRecord, kind: TimeKind, *, rescaled: bool = True) -> list[Block]:
    """Returns the blocks of this kind that figures are computed from, rescaled to match the solo blocks."""
    solo, contended = _sorts(record, kind)
    if not contended:
        return solo
    factor = math.exp(-(shift(record, kind) or 0.0)) if rescaled else 1.0
    return contended if factor == 1.0 else [_rescaled(block, factor) for block in contended]


def latency_blocks(record: RunRecord) -> list[Block]:
    """Returns throughput blocks, which serve both, if there are none of that kind."""
    return timed_blocks(record, "latency") or timed_blocks(record, "throughput")


def shift(record: RunRecord, kind: TimeKind = "throughput") -> float | None:
    """Returns the logarithm of contended time over solo time, or None where there is no clear shift.

    By blocks of this kind, or of the other kind where only those were timed solo. Medians, so that an outlier does not
    hide it.
    """
    others: dict[TimeKind, TimeKind] = {"throughput": "latency", "latency": "throughput"}
    kinds = (kind, others[kind]) if kind in others else (kind,)
    for each in kinds:
        sorts = _sorts(record, each)
        if min(map(len, sorts)) < FEWEST_BLOCKS:
            continue  # mostly so, and medians take time
        solo, contended = map(_logs, sorts)
        if min(len(solo), len(contended)) >= FEWEST_BLOCKS:
            found = median(contended) - median(solo)
            is_clear = abs(found) >= max(SMALLEST_SHIFT, CLEARLY * (_scatter(solo) + _scatter(contended)))
            return found if is_clear else None
    return None


def blocks_as(blocks: Iterable[Block], kind: TimeKind) -> list[Block]:
    """Returns the blocks of the kind; for `ttft` and `tpot` those of a generation, with that part of it as their samples.

    For `energy` with the joules of each step: its seconds by the mean power over all of them, because a counter of joules
    moves too seldom for single blocks. None where the device has no counter.
    """
    if kind == "energy":
        kept = [block for block in blocks if block.kind == "throughput"]
        joules, seconds = metered_energy(kept) or (0.0, 0.0)
        watts = joules / seconds if seconds > 0 else 0.0
        return [_rescaled(block, watts) for block in kept] if watts > 0 else []
    if kind not in ("ttft", "tpot"):
        return [block for block in blocks if block.kind == kind]
    return [_part_of(block, kind) for block in blocks if "prefill" in block.phases]


def _part_of(block: Block, kind: TimeKind) -> Block:
    """Each generation's time to the first token, or its mean time per further token."""
    if kind == "ttft":
        return msgspec.structs.replace(block, samples=block.phases["prefill"])
    further = len(block.token_s) // max(len(block.samples), 1)
    seconds = block.phases.get("decode", ()) if further else ()
    return msgspec.structs.replace(block, samples=tuple(whole_s / further for whole_s in seconds))


def metered_blocks(blocks: Iterable[Block]) -> list[Block]:
    """Returns those whose joules are known and their own.

    A counter adds joules about a tenth of a second late. Where recipes take turns, a short block has part of what the
    block before it used; a solo block comes after work of its own process.
    """
    known = [block for block in blocks if block.energy_j is not None]
    if not any(block.solo for block in known):
        return known
    return [block for block in known if block.solo or block.wall_s >= ENERGY_LONG_S]


def metered_energy(blocks: Iterable[Block]) -> tuple[float, float] | None:
    """Joules and seconds of the blocks whose energy is known; None where none is."""
    metered = metered_blocks(blocks)
    return (
        (sum(block.energy_j or 0.0 for block in metered), sum(block.wall_s for block in metered)) if metered else None
    )


def has_solo_blocks(record: RunRecord) -> bool:
    return any(block.solo for block in record.blocks)


def round_medians_s(record: RunRecord, kind: TimeKind = "throughput", *, rescaled: bool = True) -> dict[int, float]:
    """Returns the median step of each round, rescaled to the solo blocks: what ratios are computed from."""
    rounds: dict[int, list[float]] = {}
    for block in timed_blocks(record, kind, rescaled=rescaled):
        rounds.setdefault(block.round, []).extend(block.samples)
    return {number: middle for number, samples in rounds.items() if (middle := median(samples)) > 0}


def log_in_turns(
    first: RunRecord, other: RunRecord, kind: TimeKind = "throughput", *, rescaled: bool = True
) -> PairedLog | None:
    """Returns the logarithm of first over other by the rounds both have: by the undisturbed ones, where there are enough of them."""
    rounds = [round_medians_s(record, kind, rescaled=rescaled) for record in (first, other)]
    waited = [_waited_shares(record, kind) for record in (first, other)]
    common = rounds[0].keys() & rounds[1].keys()
    quiet = {number for number in common if all(shares.get(number, 0.0) <= QUIET for shares in waited)}
    if common == quiet:
        return paired_log(*rounds)
    if len(quiet) >= FEWEST_QUIET_ROUNDS:
        return paired_log(*({number: times[number] for number in quiet} for times in rounds))
    found = paired_log(*rounds)
    below, above = (fmean(-math.log1p(-shares.get(number, 0.0)) for number in common) for shares in waited)
    return found and msgspec.structs.replace(found, below=below, above=above)


def _sorts(record: RunRecord, kind: TimeKind) -> tuple[list[Block], list[Block]]:
    """Returns the solo blocks, and the contended ones."""
    filled = [block for block in blocks_as(record.blocks, kind) if block.samples]
    return [block for block in filled if block.solo], [block for block in filled if not block.solo]


def _logs(blocks: Sequence[Block]) -> list[float]:
    middles = [median(block.samples) for block in blocks]
    return [math.log(middle) for middle in middles if middle > 0]


def _scatter(logs: Sequence[float]) -> float:
    middle = median(logs)
    return median(abs(log - middle) for log in logs)


def _rescaled(block: Block, factor: float) -> Block:
    """Issue times are not rescaled: they are the host's."""
    return msgspec.structs.replace(
        block,
        samples=tuple(factor * sample for sample in block.samples),
        settling=tuple(factor * each for each in block.settling),
        phases={name: tuple(factor * each for each in samples) for name, samples in block.phases.items()},
        token_s=tuple(factor * seconds for seconds in block.token_s),
        wall_s=factor * block.wall_s,
    )


def memory_of(record: RunRecord) -> Memory | None:
    """Returns the memory over the timed blocks: the highest of each peak, and the least that was resident and that there was to be had.

    Needed is what must fit: the least a squeeze found, else what was reserved, on a CPU what the worker held for itself. Retries
    are those between the first block and the last. None where nothing was timed.
    """
    timed = [block.memory for block in record.blocks if block.samples]
    if not timed:
        return None
    seen = {name: [getattr(memory, name) for memory in timed] for name in Memory.__struct_fields__}
    known = {name: [value for value in values if value is not None] for name, values in seen.items()}
    figures = {name: max(values) for name, values in known.items() if values}
    for name in ("resident_bytes", "limit_bytes"):
        figures |= {name: min(known[name])} if known[name] else {}
    if retries := known["allocator_retries"]:
        figures["allocator_retries"] = retries[-1] - retries[0]
    if record.prepared is not None and (whole := record.prepared.environment.device.memory_bytes) is not None:
        figures.setdefault("limit_bytes", whole)
    squeezed = record.closed.memory.needed_bytes if record.closed is not None else None
    held = (figures.get(name) for name in ("peak_reserved_bytes", "peak_private_bytes", "peak_rss_bytes"))
    return Memory(**{**figures, "needed_bytes": next(filter(None, (squeezed, *held)), None)})


def median_step_s(blocks: Sequence[Block]) -> float | None:
    samples = list(chain.from_iterable(block.samples for block in blocks))
    return median(samples) if samples else None


def per_wall_second(blocks: Sequence[Block], items: int | None) -> float | None:
    timed = [block for block in blocks if block.wall_s > 0]
    wall_s = sum(block.wall_s for block in timed)
    return items * _steps(timed) / wall_s if items and wall_s else None


def throughput_interval(blocks: Sequence[Block], items: int | None) -> Interval | None:
    """Returns the interval of the median step, turned around into a rate."""
    step_s = median_interval([block.samples for block in blocks])
    if step_s is None or step_s.low <= 0 or not items:
        return None
    return Interval(low=items / step_s.high, median=items / step_s.median, high=items / step_s.low)


def latency_of(record: RunRecord) -> Latency | None:
    """Returns the latency from latency blocks. Where there are none, throughput blocks serve both."""
    blocks = latency_blocks(record)
    samples = list(chain.from_iterable(block.samples for block in blocks))
    if not samples:
        return None
    interval = median_interval([block.samples for block in blocks])
    single = all(block.steps_per_sample == 1 for block in blocks)  # the tail of means is not the tail of the steps
    return Latency(
        p50=median(samples),
        p90=percentile(samples, 0.90) if single else None,
        p95=percentile(samples, 0.95) if single else None,
        p99=percentile(samples, 0.99) if single else None,
        mean=float(np.mean(samples)),
        std=float(np.std(samples, ddof=1)) if len(samples) > 1 and single else None,
        n=len(samples),
        clock=blocks[0].clock,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
    )


def energy_figures(blocks: Sequence[Block], items: int | None) -> dict[str, float]:
    """Returns joules per item and watts, where a counter had time enough for them."""
    energy_j, wall_s = metered_energy(blocks) or (0.0, 0.0)
    if wall_s < ENERGY_LEAST_S or not energy_j:
        return {}
    count = (items or 0) * _steps(metered_blocks(blocks))
    return {"power_w": energy_j / wall_s} | ({"per_item_j": energy_j / count} if count else {})


def utilisation_of(record: RunRecord) -> float | None:
    seen = [look.utilisation for block in record.blocks for look in block.telemetry if look.utilisation is not None]
    return sum(seen) / len(seen) if seen else None


def _steps(blocks: Iterable[Block]) -> int:
    """Wall time and energy are of whole blocks, so the settling steps count."""
    return sum(block.steps_per_sample * (len(block.samples) + len(block.settling)) for block in blocks)


def phase_medians(record: RunRecord) -> dict[str, float] | None:
    """Returns the median of each phase of a training step, or None for inference."""
    if record.spec.workload.task == "infer":
        return None
    pooled: dict[str, list[float]] = {}
    for block in timed_blocks(record, "throughput"):
        for phase, samples in block.phases.items():
            pooled.setdefault(phase, []).extend(samples)
    return {phase: median(samples) for phase, samples in pooled.items() if samples} or None
