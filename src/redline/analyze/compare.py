"""Is one set of records faster than another? A verdict per benchmark, or the reason why there is none.

Records measured *in turns* (one group) are compared round by round, and several such pairs as a race compares its
replicates. Else each record is one process, and at least three processes on each side give an interval of the means of their
log-times: within one process samples share an offset, so pooling them would call noise a difference. With fewer processes that
offset cannot be seen, so it is assumed: an allowance as wide as processes of one recipe have been seen apart. Only what lies
clearly beyond it has a verdict, and it is never `same`. Of a generation the time to the first token and the time per further
token are compared in the same way. The times that are shown beside a ratio agree with it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import geometric_mean, median
from typing import Literal

import msgspec

from redline.analyze.blocks import device_kind, latency_blocks, median_step_s, timed_blocks
from redline.analyze.pairs import TIME_BAND, RaceVerdict, log_ratio, ratio_in_turns, ratio_over, verdict_of
from redline.analyze.statistics import Ratio, between_processes, median_interval, percentile
from redline.analyze.trust import verdict
from redline.model.errors import UsageError
from redline.model.fields import Frozen
from redline.model.identity import Benchmark, across_devices, benchmark_of, differences, whether_in_turns
from redline.model.note import Note, note
from redline.model.record import RunRecord, TimeKind

ComparisonVerdict = Literal["faster", "slower", "same", "inconclusive", "incomparable", "invalid"]
WORST_FIRST: tuple[ComparisonVerdict, ...] = ("invalid", "slower", "incomparable", "inconclusive", "same", "faster")
Basis = Literal["interleaved", "replicates", "single runs", "none"]

P95_BAND = 0.05
"""A p95 is the same on both sides if the interval of its ratio lies within this band."""
MEMORY_BAND = 0.01
"""Memory that differs by this share or less is the same."""
FEWEST_REPLICATES = 3
"""With fewer processes a side, what differs between processes is allowed for instead of being measured."""
ALLOWANCE = {"cpu": 0.25}
OTHER_ALLOWANCE = 0.10
"""Two processes of one recipe may differ so much, where too few were run to see it. On a GPU two were seen 4 % apart, each steady to 0.2 %;
on a shared CPU medians of blocks vary by 10 %. Both are doubled, for two occasions."""
SPOILING = frozenset({"throttled", "shared-gpu", "shared-cpu"})
"""These labels name what may have affected one side only, where the sides were not measured interleaved. Mere noise is in the interval."""
PARTS: dict[TimeKind, str] = {"ttft": "time to first token", "tpot": "time per output token"}
"""The two times of a generation that are compared beside the whole."""

Change = Literal["less", "more", "same", "inconclusive"]


class Compared(Frozen):
    """This is a figure beside the time. `change` is relative to the first; below 0 is less."""

    name: str
    first: float
    other: float
    change: float
    verdict: Change
    low: float | None = None
    high: float | None = None
    """These are the ends of the 95 % interval of `change`; parts of a generation have one."""


class Comparison(Frozen):
    """`ratio` is time of the first over time of the other: above 1 the other is faster."""

    benchmark: Benchmark
    other_recipe: str
    """Differs from the benchmark's where two recipes are compared."""
    verdict: ComparisonVerdict
    basis: Basis = "none"
    ratio: Ratio | None = None
    first_s: float | None = None
    other_s: float | None = None
    """This is the median step over all processes; the two are as far apart as the ratio says."""
    runs: tuple[int, int] = (0, 0)
    figures: tuple[Compared, ...] = ()
    reasons: tuple[Note, ...] = ()
    """They say why the verdict is not clear."""
    notes: tuple[Note, ...] = ()


class Comparisons(Frozen):
    comparisons: tuple[Comparison, ...]
    only_first: tuple[Benchmark, ...] = ()
    only_other: tuple[Benchmark, ...] = ()

    @property
    def verdict(self) -> ComparisonVerdict:
        """Returns the worst of all verdicts, from which the exit code follows."""
        seen = {comparison.verdict for comparison in self.comparisons}
        return next((each for each in WORST_FIRST if each in seen), "incomparable")


def compare_records(first: Sequence[RunRecord], other: Sequence[RunRecord], *, across: bool = False) -> Comparisons:
    """Benchmarks that both sides have; with one on each side those two, though their recipes differ.

    `across`: also where they ran on different devices or with different threads.
    """
    both = {record.id for record in first} & {record.id for record in other}
    if both:
        raise UsageError(f"record {min(both)} is on both sides: a run cannot be set against itself")
    sides: list[dict[Benchmark, list[RunRecord]]] = [{}, {}]
    for side, records in zip(sides, (first, other), strict=True):
        for record in records:
            benchmark = benchmark_of(record)
            side.setdefault(across_devices(benchmark) if across else benchmark, []).append(record)
    ours, theirs = sides
    if len(ours) == 1 and len(theirs) == 1:
        (mine, runs), (yours, others) = next(iter(ours.items())), next(iter(theirs.items()))
        return Comparisons(comparisons=(_compare(mine, runs, yours, others, across),))
    common = sorted(ours.keys() & theirs.keys(), key=lambda each: (each.model, each.task, each.recipe, each.batch or 0))
    return Comparisons(
        comparisons=tuple(_compare(each, ours[each], each, theirs[each], across) for each in common),
        only_first=tuple(each for each in ours if each not in theirs),
        only_other=tuple(each for each in theirs if each not in ours),
    )


def _compare(
    mine: Benchmark, first: list[RunRecord], yours: Benchmark, other: list[RunRecord], across: bool
) -> Comparison:
    found = Comparison(benchmark=mine, other_recipe=yours.recipe, verdict="incomparable", runs=(len(first), len(other)))
    broken = [why_broken(record) for record in (*first, *other) if valid_step_s(record) is None]
    if broken:
        return msgspec.structs.replace(found, verdict="invalid", reasons=tuple(dict.fromkeys(broken)))
    unlike, noted = differences(mine, first, yours, other, across=across)
    if unlike:
        return msgspec.structs.replace(found, reasons=tuple(unlike), notes=tuple(noted))
    basis, ratio = _ratio(first, other)
    told, parts = _verdict(basis, ratio, (*first, *other)), list(_parts(first, other))
    # A part that clearly got worse where none got better makes a generation slower, though the whole does not show it.
    worse = [f"the {part.name} rose by {part.change:.1%}" for part in parts if part.verdict == "more"]
    reasons = list(_doubts(basis, first, other))
    if verdict_of(ratio.low, ratio.high) == "inconclusive":
        text = f"the interval includes both a difference of more than {TIME_BAND:.0%} and none"
        reasons.append(note("across-band", text))
    if told not in ("faster", "slower") and worse and not any(part.verdict == "less" for part in parts):
        told = "slower"
        text = f"{' and '.join(worse)}, which the whole generation does not show clearly"
        reasons.insert(0, note("part-slower", text))
    first_s = geometric_mean(_medians_s(first))
    return msgspec.structs.replace(
        found,
        verdict=told,
        basis=basis,
        ratio=ratio,
        first_s=first_s,
        other_s=first_s / ratio.ratio,
        figures=(*_tail_and_memory(first, other), *parts),
        reasons=tuple(dict.fromkeys(reasons)),
        notes=(*noted, *_believed(first, other)),
    )


def _verdict(basis: Basis, ratio: Ratio, records: Iterable[RunRecord]) -> RaceVerdict:
    """The interval decides, unless something may have affected one side only; single runs are never the same."""
    told = verdict_of(ratio.low, ratio.high)
    is_spoilt = basis != "interleaved" and any(SPOILING & set(verdict(record).labels) for record in records)
    return "inconclusive" if is_spoilt or (basis == "single runs" and told == "same") else told


def _ratio(
    first: Sequence[RunRecord], other: Sequence[RunRecord], kind: TimeKind = "throughput"
) -> tuple[Basis, Ratio]:
    if paired := _in_turns(first, other, kind):
        return "interleaved", paired
    ours, theirs = _medians_s(first, kind), _medians_s(other, kind)
    if min(len(first), len(other)) >= FEWEST_REPLICATES:
        return "replicates", between_processes(ours, theirs)
    # Within what processes may differ by, and what each process knows of its own median.
    own = [max(_half_width(record, kind) for record in side) for side in (first, other)]
    half = math.log1p(allowance(first[0])) + math.hypot(*own)
    ratio = geometric_mean(ours) / geometric_mean(theirs)
    return "single runs", Ratio(ratio=ratio, low=ratio * math.exp(-half), high=ratio * math.exp(half), rounds=1)


def _in_turns(first: Sequence[RunRecord], other: Sequence[RunRecord], kind: TimeKind) -> Ratio | None:
    """Returns the ratio if records of the two sides were measured in pairs, each pair in a group of its own; several pairs count as in a race."""
    by_group = {record.group: record for record in other}
    met = [(record, by_group[record.group]) for record in first if record.group in by_group]
    groups = {record.group for record, _ in met}
    if not len(groups) == len(first) == len(other) or not all(whether_in_turns(*pair) for pair in met):
        return None
    if len(met) == 1:
        return ratio_in_turns(*met[0], kind)
    logs = [log for pair in met if (log := log_ratio(*pair, kind)) is not None]
    return ratio_over(logs) if len(logs) == len(met) else None


def allowance(record: RunRecord) -> float:
    return ALLOWANCE.get(device_kind(record), OTHER_ALLOWANCE)


def _half_width(record: RunRecord, kind: TimeKind) -> float:
    """Returns half the interval of the median within the process. It is as wide as the time itself where too little was timed to say."""
    interval = median_interval([block.samples for block in timed_blocks(record, kind)])
    return interval.half_width if interval else 1.0


def _doubts(basis: Basis, first: Sequence[RunRecord], other: Sequence[RunRecord]) -> Iterator[Note]:
    if basis == "single runs":
        yield note(
            "single-runs",
            f"fewer than {FEWEST_REPLICATES} processes a side: the interval allows for {allowance(first[0]):.0%} between "
            "processes, which these runs cannot show. Narrower: measure interleaved ('redline run -r A -r B') or with "
            f"--replicates {FEWEST_REPLICATES}",
        )
    for record in (*first, *other):
        labels = SPOILING & set(verdict(record).labels)
        if labels and basis != "interleaved":
            text = f"record {record.id[:13]} is {', '.join(sorted(labels))}, which may have affected one side only"
            yield note("spoilt", text, about=record.id)


def _believed(first: Sequence[RunRecord], other: Sequence[RunRecord]) -> Iterator[Note]:
    noisy = sum("noisy" in verdict(record).labels for record in (*first, *other))
    if noisy:
        yield note("noisy", f"{noisy} of {len(first) + len(other)} records are noisy")
    ours, theirs = ([record.created_at for record in side] for side in (first, other))
    if len(first) > 1 and (max(ours) < min(theirs) or max(theirs) < min(ours)):
        text = "one side was measured entirely before the other: the interval does not cover drift between the two"
        yield note("one-after-the-other", text)
    for side, records in {"A": first, "B": other}.items():
        prepared = (record.prepared for record in records if record.prepared is not None)
        if any(each.numerics and each.numerics.is_wrong for each in prepared):
            yield note("wrong-answers", f"the outputs of {side} are too far from strict fp32")


def _tail_and_memory(first: Sequence[RunRecord], other: Sequence[RunRecord]) -> Iterator[Compared]:
    tails = [[p95_s for record in side if (p95_s := _p95_s(record)) is not None] for side in (first, other)]
    if all(tails):
        ours, theirs = map(median, tails)
        told: Change = "inconclusive"
        if min(map(len, tails)) >= FEWEST_REPLICATES:
            interval = between_processes(*tails)
            told = _change(verdict_of(interval.low, interval.high, P95_BAND))
        yield Compared(name="p95", first=ours, other=theirs, change=theirs / ours - 1, verdict=told)
    # We compare what the allocator reserved, because the memory of a whole process varies too much to compare within a percent.
    held = [
        [max((block.memory.peak_reserved_bytes or 0 for block in record.blocks), default=0) for record in side]
        for side in (first, other)
    ]
    if all(map(any, held)):
        mine, yours = (median(filter(None, side)) for side in held)
        change = yours / mine - 1
        told = "same" if abs(change) <= MEMORY_BAND else "more" if change > 0 else "less"
        yield Compared(name="memory", first=mine, other=yours, change=change, verdict=told)


def _parts(first: Sequence[RunRecord], other: Sequence[RunRecord]) -> Iterator[Compared]:
    """Yields the times to the first token and per further token, on the same basis as the whole."""
    for kind, name in PARTS.items():
        ours, theirs = _medians_s(first, kind), _medians_s(other, kind)
        if len(ours) < len(first) or len(theirs) < len(other):
            continue  # another task, or a single token
        basis, ratio = _ratio(first, other, kind)
        told = _change(_verdict(basis, ratio, (*first, *other)))
        low, change, high = (1 / each - 1 for each in (ratio.high, ratio.ratio, ratio.low))
        ours_s = geometric_mean(ours)
        theirs_s = ours_s / ratio.ratio
        yield Compared(name=name, first=ours_s, other=theirs_s, change=change, verdict=told, low=low, high=high)


def _change(told: RaceVerdict) -> Change:
    """Less time is faster."""
    return "less" if told == "faster" else "more" if told == "slower" else told


def _p95_s(record: RunRecord) -> float | None:
    return percentile([sample for block in latency_blocks(record) for sample in block.samples], 0.95)


def _medians_s(records: Iterable[RunRecord], kind: TimeKind = "throughput") -> list[float]:
    return [seconds for record in records if (seconds := valid_step_s(record, kind)) is not None]


def valid_step_s(record: RunRecord, kind: TimeKind = "throughput") -> float | None:
    """Returns the step as throughput blocks time it: the same clock on both sides, whatever the task; or a part of a generation.

    None where the run failed or nothing was timed.
    """
    return (median_step_s(timed_blocks(record, kind)) or None) if record.failure is None else None


def why_broken(record: RunRecord) -> Note:
    why = record.failure.line if record.failure else "no step was timed"
    return note("invalid-run", f"record {record.id[:13]} is not a valid run: {why}", about=record.id)
