"""This module shows a search for the fastest recipe: its answer as a sentence, the way to its leader, and its ratios in other tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from redline.analyze.measurement import Line, Measurement, VersusFirst
from redline.analyze.pairs import TIME_BAND
from redline.analyze.rows import metric_of
from redline.model.fields import Frozen
from redline.model.metrics import Figure, Metric
from redline.model.spec import BASELINE
from redline.model.units import format_ratio
from redline.search.tune.summary import Ranked, TuneSummary

VS_BASELINE = Figure(
    name="vs_baseline", unit="x", header="vs baseline", better="higher", doc="Baseline's time over its own."
)
GAIN = Figure(name="gain", unit="x", better="higher", doc="Time without the switch over time with it.")
FIGURE_OF = {"latency": "latency_p50", "energy": "energy_per_item", "ttft": "ttft", "tpot": "tpot"}
"""Each of these objectives has its own figure; that of any other is the throughput."""
WRONG_NUMBERS = ("above-tolerance", "unresolved", "not-finite", "no-signal")
"""A recipe with one of these codes may not be recommended, because of what it computes."""


def vs_baseline(ranked: Ranked) -> Metric:
    """Returns the ratio of a recipe with its interval over processes; one that was seen in one process only has how far it may be off."""
    off = ranked.may_be_off or 1.0
    low, high = ranked.low or ranked.ratio / off, ranked.high or ranked.ratio * off
    return VS_BASELINE(ranked.ratio, low, high) if ranked.recipe != BASELINE else VS_BASELINE(1.0)


def speed_of(found: TuneSummary, ranked: Ranked) -> Metric | None:
    """Returns the figure of the objective.

    At the batch of the ranking it is the baseline's figure by the ratio, which was measured interleaved, so that the rows of one table
    divide. By itself each process has the speed of its minute.
    """
    name = FIGURE_OF.get(found.tune.tune.objective, "throughput")
    own = metric_of(ranked.row, name)
    first = next((row for row in found.ranking if row.recipe == BASELINE), None)
    base = metric_of(first.row, name) if first is not None and first.row.batch == ranked.row.batch else None
    if own is None or base is None or not own.value or not base.value or not math.isfinite(ranked.ratio):
        return own
    factor = base.value * (ranked.ratio if own.figure.better == "higher" else 1 / ranked.ratio) / own.value
    low, high = (end and end * factor for end in (own.low, own.high))
    return msgspec.structs.replace(own, value=own.value * factor, low=low, high=high)


def answer(found: TuneSummary) -> str:
    """Returns the sentence that gives the result of the search; it follows from its table."""
    leader, codes = found.leader, {each.code for each in found.tune.notes}
    if leader is None:
        if "not-finite" in codes:
            return "no answer: the baseline gives numbers that are not finite"
        late = "baseline-too-slow" in codes
        return f"no answer: the baseline {'was not ready within the budget' if late else 'itself does not run here'}"
    if found.winner is not None:
        roofline = leader.row.roofline
        left = f"; {roofline.headroom:.1f}× left to the roofline" if roofline is not None and roofline.headroom else ""
        return f"{'winner' if found.has_answer else 'best so far'}: {_figures_of(found, leader)}{left}"
    if leader.recipe != BASELINE:
        so_far = "no winner" if found.has_answer else "best so far, but not certain"
        return f"{so_far}: whether it {_beats(found)} the baseline is not decided for {_figures_of(found, leader)}"
    if "not-repeatable" in codes:
        return "no answer: the baseline itself does not give the same twice; nothing can be compared with it"
    if len(found.ranking) + len(found.rejected) > 1:
        return f"no winner: {_nothing_faster(found)}"
    why = "there is nothing else to try here" if found.has_answer else "the search ended before anything else was tried"
    if "no-signal" in codes:
        why = "nothing can be compared with it"
    elif found.tune.given_up:
        why = "what else was begun was not ready in time"
    elif "untried" in codes:
        why = "the budget does not hold another recipe and its final comparison"
    return f"no answer: only the baseline was tried; {why}"


def _nothing_faster(found: TuneSummary) -> str:
    """Says of each row that looks faster why it is not recommended."""
    ended = "" if found.has_answer else "; the search ended before all that may be faster was tried"
    others = [row for row in found.ranking if row.recipe != BASELINE]
    for row in others:
        if row.high is not None and row.verdict == "inconclusive" and row.high > 1 + TIME_BAND:
            ratio = vs_baseline(row)
            told = f"{row.recipe} was measured at {ratio}, which decides nothing"
            told = f"the times of {row.recipe} scatter too much to tell" if ratio.is_too_noisy else told
            return f"nothing that was tried surely {_beats(found)} the baseline; {told}{ended}"
    rejected = {each.recipe: each.code for each in found.rejected}
    faster = [row for row in others if row.ratio > 1 + TIME_BAND]
    sound = " and kept its numbers" if any(rejected.get(row.recipe) in WRONG_NUMBERS for row in faster) else ""
    sound = sound or (" and may be recommended" if any(row.note for row in faster) else "")
    unraced = [row.recipe for row in faster if row.low is None and row.recipe not in rejected and not row.note]
    ended += f"; {unraced[0]} was faster in one process and was not raced" if unraced else ""
    return f"nothing that was tried{sound} {'surely ' if unraced else ''}{_beats(found)} the baseline{ended}"


def _beats(found: TuneSummary) -> str:
    return "needs less energy than" if found.tune.tune.objective == "energy" else "is faster than"


def _figures_of(found: TuneSummary, leader: Ranked) -> str:
    row, objective, ratio = leader.row, found.tune.tune.objective, vs_baseline(leader)
    of = "the items per joule of the baseline" if objective == "energy" else "the baseline"
    parts = [leader.recipe, "whose times scatter too much to tell" if ratio.is_too_noisy else f"{ratio} {of}"]
    parts += ["seen in one process only"] if leader.low is None else []
    words = {
        "throughput": "{}",
        "latency_p50": "{} per step",
        "ttft": "first token after {}",
        "tpot": "then {} per token",
        "bandwidth_share": "{} of the copy bandwidth",
        "energy_per_item": f"{{}}/{row.item or 'item'}",
    }
    speed = speed_of(found, leader)
    shown = ["throughput", "ttft", "tpot", "bandwidth_share", FIGURE_OF.get(objective, "throughput")]
    known = [speed if speed and name == speed.name else metric_of(row, name) for name in dict.fromkeys(shown)]
    parts += [words[metric.name].format(metric.in_words) for metric in known if metric and not metric.is_too_noisy]
    return ", ".join(parts) + (f" at batch {row.batch}" if row.batch else "")


# The way to the leader has only times that were measured.


class Bar(Frozen):
    """A bar is one measured time, in seconds."""

    label: str
    seconds: float
    kind: Literal["baseline", "without", "winner", "roofline"]
    told: str
    """It says in words what the bar shows."""


class GainPath(Frozen):
    """The path has the baseline, the leader without each of its switches, the leader, and the roofline if that is known.

    What switches bring does not multiply to the whole: switches that help each other count the help twice, and switches that do the
    same work hide it.
    """

    title: str
    bars: tuple[Bar, ...]
    record_id: str = ""
    """This is the record of the leader."""


def gain_path_of(found: TuneSummary, rows: Sequence[Measurement]) -> GainPath | None:
    """Returns the path; None if nothing but the baseline leads, or if the leader's time is not among these rows."""
    leader, objective = found.leader, found.tune.tune.objective
    row = next((row for row in rows if leader is not None and row.record_id == leader.row.record_id), None)
    if leader is None or row is None or leader.recipe == BASELINE or not math.isfinite(leader.ratio):
        return None
    times_s = {
        "latency": row.latency_s.p50 if row.latency_s is not None else None,
        "ttft": row.ttft_s,
        "tpot": row.tpot_s.p50 if row.tpot_s is not None else None,
        "energy": None,  # the bars are in seconds
    }
    step_s = times_s.get(objective, row.step_s)
    if step_s is None:
        return None
    title = " · ".join((row.model, row.task, f"batch {row.batch}", objective))
    return GainPath(title=title, bars=tuple(_bars(found, leader, row, step_s)), record_id=row.record_id)


def _bars(found: TuneSummary, leader: Ranked, row: Measurement, step_s: float) -> Iterator[Bar]:
    yield Bar(label=BASELINE, seconds=step_s * leader.ratio, kind="baseline", told=BASELINE)
    for switch in found.switches:
        told = f"{GAIN(switch.gain, switch.low, switch.high)} the winner's time"
        yield Bar(label=f"without {switch.switch}", seconds=step_s * switch.gain, kind="without", told=told)
    doubts = [*([leader.verdict] if leader.verdict != "faster" else []), *(["seen in one process only"] if leader.low is None else [])]  # fmt: skip
    whole = ", ".join([f"{vs_baseline(leader)} as fast as {BASELINE}", *row.verdict.labels, *doubts])
    yield Bar(label=leader.recipe, seconds=step_s, kind="winner", told=whole)
    least_s = row.roofline.attainable_s if row.roofline is not None and row.roofline.error is None else None
    if least_s is not None and 0 < least_s < step_s:
        told = f"{format_ratio(step_s / least_s)} left at most"
        yield Bar(label="roofline", seconds=least_s, kind="roofline", told=told)


def with_search_ratios(lines: Sequence[Line], tunes: Sequence[TuneSummary]) -> list[Line]:
    """Returns lines with the ratios by which a search has ranked them, because it saw them in more processes than one group has.

    `tunes` has the newest last, which is the one that counts.
    """
    ratios: dict[str, VersusFirst] = {}
    for found in tunes:
        ranked = {row.recipe: row for row in found.ranking if row.recipe != BASELINE and math.isfinite(row.ratio)}
        own = set(found.tune.record_ids)
        for line in lines if found.tune.tune.objective == "throughput" else ():
            rank, versus = ranked.get(line.row.recipe), line.row.vs_first
            is_own = own.issuperset(record.id for record, _ in line.processes)
            if rank and versus and versus.recipe == BASELINE and line.row.batch == rank.row.batch and is_own:
                ratio = msgspec.structs.replace(versus, ratio=rank.ratio, low=rank.low, high=rank.high)
                ratios[line.row.record_id] = ratio
    return [
        dataclasses.replace(line, row=line.row.changed(vs_first=ratios[line.row.record_id]))
        if line.row.record_id in ratios
        else line
        for line in lines
    ]
