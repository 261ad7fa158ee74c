"""From the baseline to the fastest recipe: what each switch brings, and what is left to the roofline.

Only times that were measured: the baseline, the winner without each of its switches, the winner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from redline.analyze.pairs import RaceVerdict, verdict_of
from redline.analyze.summary import Line, RunSummary, VersusFirst
from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.spec import BASELINE
from redline.search.tune.result import TuneSummary, Winner


class Gain(Frozen):
    """What one switch brings: the time without it over the time with it."""

    name: str
    gain: float
    """Time before over time after: above 1 is faster."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval, where the two were measured in turns."""
    verdict: str = ""

    def __post_init__(self) -> None:
        if not self.gain > 0:
            raise SpecError(f"gain must be above 0, got {self.gain}")


class GainPath(Frozen):
    """The way from the baseline to the fastest recipe."""

    title: str
    baseline: str
    baseline_s: float
    """A step of the baseline, in seconds."""
    winner: str
    winner_s: float
    switches: tuple[Gain, ...] = ()
    """What leaving each switch out of the winner costs."""
    low: float | None = None
    high: float | None = None
    """The 95 % interval of the whole gain, where there is one."""
    verdict: str = ""
    roofline_s: float | None = None
    """The least a step could take on this device; None where it is not known."""
    record_id: str = ""
    """Of the winner."""

    def __post_init__(self) -> None:
        if not self.baseline_s > 0:
            raise SpecError(f"baseline_s must be above 0, got {self.baseline_s}")
        if not self.winner_s > 0:
            raise SpecError(f"winner_s must be above 0, got {self.winner_s}")


class Bar(Frozen):
    """One measured time, in seconds."""

    label: str
    seconds: float
    kind: Literal["baseline", "without", "winner", "roofline"]
    told: str
    """What the bar says, in words."""


def waterfall(path: GainPath) -> list[Bar]:
    """Measured times only: the baseline, the winner without each of its switches, the winner, and the roofline."""
    bars = [Bar(label=path.baseline, seconds=path.baseline_s, kind="baseline", told="baseline")]
    for switch in sorted(path.switches, key=lambda switch: -switch.gain):
        verdict = f", {switch.verdict}" if switch.verdict else ""
        told = f"{switch.gain:.2f}×{_between(switch.low, switch.high)} the winner's time{verdict}"
        bars.append(Bar(label=f"without {switch.name}", seconds=path.winner_s * switch.gain, kind="without", told=told))
    whole = f"{path.baseline_s / path.winner_s:.2f}×{_between(path.low, path.high)} as fast as {path.baseline}"
    told = f"{whole}, {path.verdict}" if path.verdict else whole
    bars.append(Bar(label=path.winner, seconds=path.winner_s, kind="winner", told=told))
    if path.roofline_s is not None:
        left = f"{path.winner_s / path.roofline_s:.1f}× left at most"
        bars.append(Bar(label="roofline", seconds=path.roofline_s, kind="roofline", told=left))
    return bars


def _between(low: float | None, high: float | None) -> str:
    return f" ({low:.2f}–{high:.2f})" if low is not None and high is not None else ""


def winner_verdict(summary: TuneSummary, winner: Winner) -> RaceVerdict:
    """By its own interval; where it has none, as the ranking has it."""
    if winner.low is not None and winner.high is not None:
        return verdict_of(winner.low, winner.high)
    return next((ranked.verdict for ranked in summary.ranking if ranked.recipe == winner.recipe), "inconclusive")


def gain_path_of(summary: TuneSummary, rows: Sequence[RunSummary]) -> GainPath | None:
    """None where there is no winner but the baseline itself, or its time is not known.

    The gain of each switch was measured by leaving it out of the winner. Such gains do not multiply to the whole: switches
    that help each other count the help twice, and switches that do the same work hide it.
    """
    winner = summary.leader
    row = next((row for row in rows if winner is not None and row.record_id == winner.record_id), None)
    winner_s = _step_s(row, summary.objective) if row is not None else None
    if (
        winner is None
        or row is None
        or winner_s is None
        or winner.recipe == BASELINE
        or not math.isfinite(winner.ratio)
    ):
        return None
    limit_s = row.roofline.attainable_s if row.roofline is not None and row.roofline.error is None else None
    return GainPath(
        title=f"{summary.model} · {summary.task} · batch {winner.batch} · {summary.objective}",
        baseline=BASELINE,
        baseline_s=winner_s * winner.ratio,
        winner=winner.recipe,
        winner_s=winner_s,
        switches=tuple(
            Gain(name=each.switch, gain=each.gain, low=each.low, high=each.high) for each in summary.switches
        ),
        low=winner.low,
        high=winner.high,
        verdict=", ".join([*row.verdict.labels, *_doubts(summary, winner)]),
        roofline_s=limit_s if limit_s is not None and 0 < limit_s < winner_s else None,
        record_id=winner.record_id,
    )


def _doubts(summary: TuneSummary, winner: Winner) -> list[str]:
    """What the ratio leaves open, beside what is to be said of the winner's own time."""
    verdict = winner_verdict(summary, winner)
    only = ["seen in one process only"] if winner.low is None else []
    return [*([verdict] if verdict != "faster" else []), *only]


def _step_s(row: RunSummary, objective: str) -> float | None:
    if objective == "energy":
        return None  # its path is drawn in seconds
    if objective == "latency":
        return row.latency_s.p50 if row.latency_s is not None else None
    if objective == "ttft":
        return row.ttft_s
    if objective == "tpot":
        return row.tpot_s.p50 if row.tpot_s is not None else None
    return row.step_s


def with_search_ratios(lines: Sequence[Line], tunes: Sequence[TuneSummary]) -> list[Line]:
    """Lines with the ratios that a search printed, where one ranked them: it saw them in more processes than one group.

    `tunes`: newest last, which is the one that speaks.
    """
    told: dict[str, VersusFirst] = {}
    for tune in tunes:
        if tune.objective == "throughput":
            told |= _ranked_ratios(tune, lines)
    return [
        dataclasses.replace(line, row=msgspec.structs.replace(line.row, vs_first=told[line.row.record_id]))
        if line.row.record_id in told
        else line
        for line in lines
    ]


def _ranked_ratios(tune: TuneSummary, lines: Sequence[Line]) -> dict[str, VersusFirst]:
    """By the record that stands for each line."""
    ranked = {row.recipe: row for row in tune.ranking if row.recipe != BASELINE and math.isfinite(row.ratio)}
    own, found = set(tune.record_ids), {}
    for line in lines:
        row, rank = line.row, ranked.get(line.row.recipe)
        versus = row.vs_first
        if rank is None or versus is None or versus.recipe != BASELINE or row.batch != tune.batch:
            continue
        if own.issuperset(record.id for record, _ in line.processes):
            found[row.record_id] = msgspec.structs.replace(versus, ratio=rank.ratio, low=rank.low, high=rank.high)
    return found
