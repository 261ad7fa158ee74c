"""This module draws a verdict from a race, for each pair of recipes, with a ratio that covers what changes from process to process.

A replicate is one fresh process per recipe, measured in turns. Within a replicate all samples of a recipe share its process's
offset, so the interval is a Student interval over replicates, and never narrower than what the rounds inside them say.
Beside other processes on a CPU it also has room for what these may have done to either side.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from statistics import fmean, variance
from typing import Literal

import msgspec

from redline.analyze.blocks import blocks_as, has_solo_blocks, log_in_turns, round_medians_s, shift
from redline.analyze.statistics import MIN_COMMON_ROUNDS, PairedLog, Ratio, student_t
from redline.model.fields import Frozen
from redline.model.record import RunRecord, TimeKind
from redline.model.spec import RunSpec

RaceVerdict = Literal["faster", "slower", "same", "inconclusive"]

TIME_BAND = 0.03
"""Differences below this do not matter."""

CONFIDENCE = 0.95
CONFIDENCE_AFTER = {2: 0.99, 3: 0.98}
CONFIDENCE_LATER = 0.97
"""This is the confidence by the number of replicates. A race is looked at after each replicate and ends when it is decided, which favours
replicates that happen to agree; with these, up to eight looks together still cover the truth 95 % of the time (simulated, with normal
processes and with two speeds on both sides: 95.6 % at worst). Where one side alone has two speeds, three replicates that agree by chance
miss it."""

ENOUGH_QUIET = 3
"""With fewer replicates than this, those that were disturbed count too, with all the doubt about them."""

SMALLEST_SPREAD = 0.001
"""Processes count as at least this far apart, because a few may agree by chance."""

Replicate = Sequence[RunRecord]
"""A replicate has one record per recipe, each of a process of its own."""


class Pair(Frozen):
    """`ratio` is time of a over time of b: above 1, b is faster, and so says the verdict, which is about b."""

    a: str
    b: str
    ratio: float
    low: float | None
    """It is None with a single replicate, which says nothing about other processes."""
    high: float | None
    verdict: RaceVerdict
    replicates: int


def pairs_of(replicates: Sequence[Replicate], kind: TimeKind = "throughput") -> list[Pair]:
    """Returns every two recipes that met in a replicate, in the order of the first replicate."""
    names = list(dict.fromkeys(name for replicate in replicates for name in names_in(replicate)))
    found = (pair_of(replicates, a, b, kind) for a, b in combinations(names, 2))
    return [pair for pair in found if pair is not None]


def racer_names(specs: Iterable[RunSpec]) -> list[str]:
    """Returns the names of the racers; a recipe that races itself gets a number: `fp16`, `fp16 (2)`."""
    seen: Counter[str] = Counter()
    names = []
    for spec in specs:
        name = racer_name(spec)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def racer_name(spec: RunSpec) -> str:
    """Returns the recipe as written. Functions race each other, so they go by their own names."""
    if spec.workload.task != "step":
        return str(spec.recipe)
    return spec.workload.model + (f" {spec.recipe}" if spec.recipe.switches else "")


def names_in(replicate: Replicate) -> list[str]:
    return racer_names(record.spec for record in replicate)


def pair_of(
    replicates: Sequence[Replicate], a: str, b: str, kind: TimeKind = "throughput", *, looks: bool = True
) -> Pair | None:
    """Returns one pair, or None where the two never met. `looks` False: the number of replicates did not depend on this pair."""
    logs = logs_of(replicates, a, b, kind)
    if not logs:
        return None
    met = ratio_over(logs, looks=looks)
    if met is None:
        ratio = math.exp(logs[0].centre)
        return Pair(a=a, b=b, ratio=ratio, low=None, high=None, verdict="inconclusive", replicates=len(logs))
    verdict = verdict_of(met.low, met.high)
    return Pair(a=a, b=b, ratio=met.ratio, low=met.low, high=met.high, verdict=verdict, replicates=met.rounds)


def ratio_over(logs: Sequence[PairedLog], *, looks: bool = True) -> Ratio | None:
    """Over replicates, as everything that has several computes it; `rounds` are those that counted. None with a single one."""
    logs = undisturbed(logs)
    half = half_width(logs, looks=looks)
    return bounds(logs, half) if half is not None else None


def ratio_of(log: PairedLog | None) -> Ratio | None:
    """Returns the ratio of a single replicate by its rounds alone, or None with fewer than five of them."""
    if log is None or log.rounds < MIN_COMMON_ROUNDS:
        return None
    return msgspec.structs.replace(bounds([log], student_t(log.rounds - 1) * log.error), rounds=log.rounds)


def ratio_in_turns(first: RunRecord, other: RunRecord, kind: TimeKind = "throughput") -> Ratio | None:
    """First over other by the rounds both have, both rescaled; None with too few of them for an interval."""
    paired = ratio_of(log_in_turns(first, other, kind))
    if paired is None:
        return None
    back = math.exp((shift(first, kind) or 0.0) - (shift(other, kind) or 0.0))  # to what was measured under contention
    return msgspec.structs.replace(paired, low=paired.low * min(back, 1.0), high=paired.high * max(back, 1.0))


def undisturbed(logs: Sequence[PairedLog], enough: int = ENOUGH_QUIET) -> list[PairedLog]:
    """Returns the replicates beside which no other process had the processors, where they are enough by themselves; else all."""
    quiet = [log for log in logs if not log.doubt]
    return quiet if len(quiet) >= enough else list(logs)


def bounds(logs: Sequence[PairedLog], half: float) -> Ratio:
    """Returns the ratio and its interval: half its width from the replicates, and what each side may have lost to other processes."""
    centre, doubt = fmean(log.centre for log in logs), fmean(log.doubt for log in logs)
    half += doubt
    return Ratio(ratio=math.exp(centre), low=math.exp(centre - half), high=math.exp(centre + half), rounds=len(logs))


def half_width(logs: Sequence[PairedLog], *, looks: bool = True) -> float | None:
    """Returns that of the mean log-ratio: over replicates, and within them; the wider counts. It is None with a single replicate."""
    count = len(logs)
    if count < 2:
        return None
    confidence = CONFIDENCE_AFTER.get(count, CONFIDENCE_LATER) if looks else CONFIDENCE
    between = student_t(count - 1, confidence) * math.sqrt(variance(log.mean for log in logs) / count)
    error = math.sqrt(sum(log.error**2 for log in logs)) / count
    within = student_t(max(sum(log.rounds - 1 for log in logs), 1), confidence) * error
    return max(between, within)


def process_spread(replicates: Sequence[Replicate], kind: TimeKind = "throughput") -> tuple[float, int] | None:
    """Returns how far apart processes of one recipe lie, as a variance of the logarithm, and its degrees of freedom.

    From all recipes that ran in every replicate: what is left when each recipe's own time and each replicate's are taken away.
    None with fewer than two replicates or two such recipes.
    """
    sound = [_sound_racers(replicate) for replicate in replicates]
    names = [name for name in (sound[0] if sound else {}) if all(name in replicate for replicate in sound)]
    if len(sound) < 2 or len(names) < 2:
        return None
    table = [[_middle_log(replicate[name], kind) for name in names] for replicate in sound]
    rows, columns = [fmean(row) for row in table], [fmean(column) for column in zip(*table, strict=True)]
    whole = fmean(rows)
    left = [
        value - row - column + whole
        for values, row in zip(table, rows, strict=True)
        for value, column in zip(values, columns, strict=True)
    ]
    degrees = (len(sound) - 1) * (len(names) - 1)
    return max(sum(each**2 for each in left) / degrees, SMALLEST_SPREAD**2), degrees


def verdict_of(low: float, high: float, band: float = TIME_BAND) -> RaceVerdict:
    """Returns `faster` when the interval lies wholly above the band, `slower` below, `same` inside."""
    if low > 1 + band:
        return "faster"
    if high < 1 / (1 + band):
        return "slower"
    return "same" if low >= 1 / (1 + band) and high <= 1 + band else "inconclusive"


def kind_measured(record: RunRecord, kind: TimeKind) -> TimeKind:
    """On a CPU one kind of block says both; energy is never told by time."""
    return kind if kind == "energy" or any(block.samples for block in blocks_as(record.blocks, kind)) else "throughput"


def log_ratio(first: RunRecord, other: RunRecord, kind: TimeKind = "throughput") -> PairedLog | None:
    """Compares two records measured in turns by their common rounds, and two that followed each other, by their middles."""
    # If only one of them was timed before others ran, both are compared as they were in turns.
    alike = has_solo_blocks(first) == has_solo_blocks(other)
    if first.group is not None and first.group == other.group:
        return log_in_turns(first, other, kind_measured(first, kind), rescaled=alike)
    rounds = [round_medians_s(record, kind_measured(record, kind), rescaled=alike) for record in (first, other)]
    if not all(len(times) > 0 for times in rounds):
        return None
    logs = [[math.log(seconds) for seconds in times.values()] for times in rounds]
    errors = [variance(values) / len(values) if len(values) > 1 else 0.0 for values in logs]
    count = min(len(values) for values in logs)
    return PairedLog(mean=fmean(logs[0]) - fmean(logs[1]), error=math.sqrt(sum(errors)), rounds=count)


def logs_of(replicates: Sequence[Replicate], a: str, b: str, kind: TimeKind = "throughput") -> list[PairedLog]:
    """Returns the logarithms of time of a over time of b, one for each replicate in which the two met."""
    return [log for replicate in replicates if (log := _log_in(replicate, a, b, kind)) is not None]


def _log_in(replicate: Replicate, a: str, b: str, kind: TimeKind) -> PairedLog | None:
    by_name = _sound_racers(replicate)
    return log_ratio(by_name[a], by_name[b], kind) if a in by_name and b in by_name else None


def _sound_racers(replicate: Replicate) -> dict[str, RunRecord]:
    return {name: record for name, record in zip(names_in(replicate), replicate, strict=True) if _is_sound(record)}


def _middle_log(record: RunRecord, kind: TimeKind) -> float:
    return fmean(math.log(seconds) for seconds in round_medians_s(record, kind_measured(record, kind)).values())


def _is_sound(record: RunRecord) -> bool:
    return record.failure is None and bool(record.blocks)
