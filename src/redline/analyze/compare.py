"""Is one set of records faster than another? A verdict per benchmark, or the reason why there is none.

Records measured *in turns* (one group) are compared round by round, and several such pairs as a race compares its
replicates. Else each record is one process, and at least three processes on each side give an interval of the means of their
log-times: within one process samples share an offset, so pooling them would call noise a difference. With fewer processes that
offset cannot be seen, so it is assumed: an allowance as wide as processes of one recipe have been seen apart. Only what lies
clearly beyond it has a verdict, and it is never `same`. Of a generation the time to the first token and the time per further
token are compared in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any, Literal

import msgspec

from redline.analyze.blocks import device_kind, latency_blocks, median_step_s, ratio_in_turns, timed_blocks
from redline.analyze.pairs import TIME_BAND, RaceVerdict, log_ratio, ratio_over, verdict_of
from redline.analyze.statistics import Ratio, between_processes, median_interval, percentile
from redline.analyze.trust import verdict
from redline.model.errors import UsageError
from redline.model.fields import Frozen
from redline.model.identity import (
    Benchmark,
    across_devices,
    batch_of,
    benchmark_of,
    differences,
    settings_of,
    whether_in_turns,
)
from redline.model.note import Note, note
from redline.model.record import RunRecord, TimeKind

ComparisonVerdict = Literal["faster", "slower", "same", "inconclusive", "incomparable", "invalid"]
Basis = Literal["interleaved", "replicates", "single runs", "none"]

P95_BAND = 0.05
MEMORY_BAND = 0.01
FEWEST_REPLICATES = 3
ALLOWANCE = {"cpu": 0.25}
OTHER_ALLOWANCE = 0.10
"""How much two processes of one recipe may differ, where too few were run to see it. On a GPU two were seen 4 % apart,
each steady to 0.2 %; on a shared CPU medians of blocks vary by 10 %. Both are doubled, for two occasions."""
TELLING = 0.05
"""The ratio of the two medians and the ratio by rounds differ by less on a machine that keeps its pace."""
SPOILING = frozenset({"throttled", "shared-gpu", "shared-cpu"})
"""What may have affected one side only, where they were not measured interleaved. Mere noise is in the interval."""


MetricName = Literal["p95", "memory", "ttft_s", "tpot_s", "prefill_tokens_per_s", "decode_tokens_per_s"]
Change = Literal["less", "more", "same", "inconclusive"]


class Metric(Frozen):
    """A figure beside the time. `change`: relative to the first; below 0 is less."""

    name: MetricName
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
    basis: Basis
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    first_s: float | None = None
    other_s: float | None = None
    """Median step, of the middle process where there are several."""
    first_runs: int = 0
    other_runs: int = 0
    metrics: tuple[Metric, ...] = ()
    reasons: tuple[Note, ...] = ()
    """Why the verdict is not clear."""
    notes: tuple[Note, ...] = ()


class Comparisons(Frozen):
    comparisons: tuple[Comparison, ...]
    only_first: tuple[Benchmark, ...] = ()
    only_other: tuple[Benchmark, ...] = ()

    @property
    def verdict(self) -> ComparisonVerdict:
        """The exit code follows from the worst of all verdicts."""
        order: tuple[ComparisonVerdict, ...] = ("invalid", "slower", "incomparable", "inconclusive", "same", "faster")
        seen = {comparison.verdict for comparison in self.comparisons}
        return next((each for each in order if each in seen), "incomparable")


def compare_records(first: Sequence[RunRecord], other: Sequence[RunRecord], *, across: bool = False) -> Comparisons:
    """Benchmarks that both sides have; with one on each side those two, though their recipes differ.

    `across`: also where they ran on different devices or with different threads.
    """
    both = {record.id for record in first} & {record.id for record in other}
    if both:
        raise UsageError(f"record {min(both)} is on both sides: a run cannot be set against itself")
    ours, theirs = _by_benchmark(first, across), _by_benchmark(other, across)
    if len(ours) == 1 and len(theirs) == 1:
        (mine, runs), (yours, others) = next(iter(ours.items())), next(iter(theirs.items()))
        return Comparisons(comparisons=(_compare(mine, runs, yours, others, across),))
    common = sorted((benchmark for benchmark in ours if benchmark in theirs), key=_reading_order)
    return Comparisons(
        comparisons=tuple(_compare(each, ours[each], each, theirs[each], across) for each in common),
        only_first=tuple(each for each in ours if each not in theirs),
        only_other=tuple(benchmark for benchmark in theirs if benchmark not in ours),
    )


def _reading_order(benchmark: Benchmark) -> tuple[str, str, str, int]:
    return benchmark.model, benchmark.task, benchmark.recipe, benchmark.batch or 0


def _by_benchmark(records: Iterable[RunRecord], across: bool) -> dict[Benchmark, list[RunRecord]]:
    found: dict[Benchmark, list[RunRecord]] = {}
    for record in records:
        benchmark = benchmark_of(record)
        found.setdefault(across_devices(benchmark) if across else benchmark, []).append(record)
    return found


def _compare(
    mine: Benchmark, first: list[RunRecord], yours: Benchmark, other: list[RunRecord], across: bool
) -> Comparison:
    found = Comparison(
        benchmark=mine,
        other_recipe=yours.recipe,
        verdict="incomparable",
        basis="none",
        first_runs=len(first),
        other_runs=len(other),
    )
    broken = [why_broken(record) for record in (*first, *other) if valid_step_s(record) is None]
    if broken:
        return msgspec.structs.replace(found, verdict="invalid", reasons=tuple(dict.fromkeys(broken)))
    unlike, noted = differences(mine, first, yours, other, across=across)
    timed = {"reasons": tuple(unlike)} if unlike else _timed(first, other)
    return msgspec.structs.replace(found, **{**timed, "notes": (*noted, *timed.get("notes", ()))})


def _timed(first: list[RunRecord], other: list[RunRecord]) -> dict[str, Any]:
    """Returns what the times and the other figures of comparable records say: fields of a comparison."""
    first_s, other_s = (median(_medians_s(side)) for side in (first, other))
    basis, interval = _interval(first, other)
    told = _verdict(basis, interval, (*first, *other))
    reasons = list(_doubts(basis, first, other))
    if interval is not None and verdict_of(interval.low, interval.high) == "inconclusive":
        text = f"the interval includes both a difference of more than {TIME_BAND:.0%} and none"
        reasons.append(note("across-band", text))
    metrics = (*_metrics(first, other), *_parts(first, other))
    told, more = _with_parts(told, metrics)
    return {
        "verdict": told,
        "basis": basis,
        "ratio": interval.ratio if interval else first_s / other_s,
        "low": interval.low if interval else None,
        "high": interval.high if interval else None,
        "first_s": first_s,
        "other_s": other_s,
        "metrics": metrics,
        "reasons": tuple(dict.fromkeys((*more, *reasons))),
        "notes": (*_believed(first, other), *_two_ratios(interval, first_s / other_s)),
    }


def _verdict(basis: Basis, interval: Ratio | None, records: Iterable[RunRecord]) -> RaceVerdict:
    """The interval decides, unless something may have affected one side only; single runs are never the same."""
    if interval is None or (
        basis != "interleaved" and any(SPOILING & set(verdict(record).labels) for record in records)
    ):
        return "inconclusive"
    told = verdict_of(interval.low, interval.high)
    return "inconclusive" if basis == "single runs" and told == "same" else told


def _two_ratios(interval: Ratio | None, pooled: float) -> Iterator[Note]:
    """Yields a note where the times in the table contradict the ratio beside them."""
    if interval is None or interval.low / (1 + TELLING) <= pooled <= interval.high * (1 + TELLING):
        return
    yield note(
        "pace-changed",
        f"the two medians are {pooled:.2f}× apart, the ratio by rounds is {interval.ratio:.2f}×: the machine changed "
        "pace between rounds. The ratio compares neighbours in time and is the better of the two",
    )


def _interval(
    first: Sequence[RunRecord], other: Sequence[RunRecord], kind: TimeKind = "throughput"
) -> tuple[Basis, Ratio | None]:
    if paired := _in_turns(first, other, kind):
        return "interleaved", paired
    if min(len(first), len(other)) < FEWEST_REPLICATES:
        return "single runs", _allowed_for(first, other, kind)
    return "replicates", between_processes(_medians_s(first, kind), _medians_s(other, kind))


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


def _allowed_for(first: Sequence[RunRecord], other: Sequence[RunRecord], kind: TimeKind) -> Ratio:
    """The ratio of medians, within what processes may differ by and what each process knows of its own median."""
    own = [max(_half_width(record, kind) for record in side) for side in (first, other)]
    half = math.log1p(allowance(first[0])) + math.hypot(*own)
    ratio = median(_medians_s(first, kind)) / median(_medians_s(other, kind))
    return Ratio(ratio=ratio, low=ratio * math.exp(-half), high=ratio * math.exp(half), rounds=1)


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
    if len(first) > 1 and _apart(first, other):
        text = "one side was measured entirely before the other: the interval does not cover drift between the two"
        yield note("one-after-the-other", text)
    for side, records in {"A": first, "B": other}.items():
        if any(map(_wrong_answers, records)):
            yield note("wrong-answers", f"the outputs of {side} are too far from strict fp32")


def _apart(first: Sequence[RunRecord], other: Sequence[RunRecord]) -> bool:
    ours, theirs = [record.created_at for record in first], [record.created_at for record in other]
    return max(ours) < min(theirs) or max(theirs) < min(ours)


def _metrics(first: Sequence[RunRecord], other: Sequence[RunRecord]) -> Iterator[Metric]:
    tails = [[each for record in side if (each := _p95_s(record)) is not None] for side in (first, other)]
    if all(tails):
        ours, theirs = median(tails[0]), median(tails[1])
        told: Change = "inconclusive"
        if min(map(len, tails)) >= FEWEST_REPLICATES:
            interval = between_processes(tails[0], tails[1])
            told = _CHANGES[verdict_of(interval.low, interval.high, P95_BAND)]
        yield Metric(name="p95", first=ours, other=theirs, change=theirs / ours - 1, verdict=told)
    held = [[each for record in side if (each := _held_bytes(record))] for side in (first, other)]
    if all(held):
        mine, yours = median(held[0]), median(held[1])
        change = yours / mine - 1
        told = "same" if abs(change) <= MEMORY_BAND else "more" if change > 0 else "less"
        yield Metric(name="memory", first=mine, other=yours, change=change, verdict=told)


PARTS: dict[TimeKind, tuple[MetricName, MetricName]] = {
    "ttft": ("ttft_s", "prefill_tokens_per_s"),
    "tpot": ("tpot_s", "decode_tokens_per_s"),
}
"""Names the two times of a generation, each with the rate that follows from it."""
_CHANGES: dict[RaceVerdict, Change] = {
    "faster": "less",
    "slower": "more",
    "same": "same",
    "inconclusive": "inconclusive",
}


def _parts(first: Sequence[RunRecord], other: Sequence[RunRecord]) -> Iterator[Metric]:
    """Yields the times to the first token and per further token, and their rates, on the same basis as the whole."""
    for kind, (time_name, rate_name) in PARTS.items():
        ours, theirs = _medians_s(first, kind), _medians_s(other, kind)
        if len(ours) < len(first) or len(theirs) < len(other):
            continue  # another task, or a single token
        basis, found = _interval(first, other, kind)
        assert found is not None
        told = _CHANGES[_verdict(basis, found, (*first, *other))]
        yield Metric(
            name=time_name, first=median(ours), other=median(theirs), verdict=told,
            change=1 / found.ratio - 1, low=1 / found.high - 1, high=1 / found.low - 1,
        )  # fmt: skip
        tokens = batch_of(first[0]) or 1
        if kind == "ttft":
            tokens *= settings_of(first[0].spec)["prompt"]
        opposite: dict[Change, Change] = {"less": "more", "more": "less"}
        yield Metric(
            name=rate_name, first=tokens / median(ours), other=tokens / median(theirs), verdict=opposite.get(told, told),
            change=found.ratio - 1, low=found.low - 1, high=found.high - 1,
        )  # fmt: skip


def _with_parts(told: RaceVerdict, metrics: Iterable[Metric]) -> tuple[RaceVerdict, list[Note]]:
    """A part that clearly got worse where none got better makes a generation slower, though the whole does not show it."""
    names = {"ttft_s": "the time to the first token", "tpot_s": "the time per further token"}
    parts = {names[metric.name]: metric for metric in metrics if metric.name in names}
    worse = [f"{name} rose by {each.change:.1%}" for name, each in parts.items() if each.verdict == "more"]
    if told in ("faster", "slower") or not worse or any(each.verdict == "less" for each in parts.values()):
        return told, []
    return "slower", [note("part-slower", f"{' and '.join(worse)}, which the whole generation does not show clearly")]


def _held_bytes(record: RunRecord) -> int | None:
    """Returns what the allocator reserved. The memory of a whole process varies too much to compare within a percent."""
    return max((block.memory.peak_reserved_bytes or 0 for block in record.blocks), default=None)


def _p95_s(record: RunRecord) -> float | None:
    return percentile([sample for block in latency_blocks(record) for sample in block.samples], 0.95)


def _medians_s(records: Iterable[RunRecord], kind: TimeKind = "throughput") -> list[float]:
    return [each for record in records if (each := valid_step_s(record, kind)) is not None]


def valid_step_s(record: RunRecord, kind: TimeKind = "throughput") -> float | None:
    """The step as throughput blocks time it: the same clock on both sides, whatever the task; or a part of a generation.

    None where the run failed or nothing was timed.
    """
    return (median_step_s(timed_blocks(record, kind)) or None) if record.failure is None else None


def why_broken(record: RunRecord) -> Note:
    failure = record.failure
    why = f"{failure.kind} at {failure.stage}: {failure.told}" if failure else "no step was timed"
    return note("invalid-run", f"record {record.id[:13]} is not a valid run: {why}", about=record.id)


def _wrong_answers(record: RunRecord) -> bool:
    numerics = record.prepared.numerics if record.prepared else None
    return numerics is not None and numerics.is_wrong
