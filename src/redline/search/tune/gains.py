"""From the baseline to the fastest recipe: what each switch brings, and what is left to the roofline.

Only times that were measured: the baseline, the winner without each of its switches, the winner.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from redline.analyze.pairs import RaceVerdict, verdict_of
from redline.analyze.recommend import Advice, costs, may_recommend, noise_remark, work
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary, VersusFirst
from redline.analyze.trust import farthest
from redline.model.errors import SpecError
from redline.model.fields import Frozen
from redline.model.identity import Subject
from redline.model.spec import BASELINE
from redline.search.tune.result import TuneSummary
from redline.search.tune.winner import ONE_PROCESS_DOUBT, Winner


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


Certainty = Literal["decided", "one process", "undecided"]
"""`decided`: the interval over processes lies above 1. `one process`: a gain that no other process has confirmed."""


def certainty_of(winner: Winner) -> Certainty:
    """As everywhere in the advice: a recipe whose interval reaches down to 1 may be no faster at all."""
    if winner.recipe == BASELINE or not math.isfinite(winner.ratio):
        return "undecided"
    if winner.low is not None:
        return "decided" if winner.low > 1 else "undecided"
    return "one process" if math.log(winner.ratio) > ONE_PROCESS_DOUBT else "undecided"


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


def with_winners(
    advice: Sequence[Advice],
    tunes: Sequence[TuneSummary],
    subjects: Mapping[str, Subject],
    rows: Mapping[str, RunSummary],
    lines: Sequence[Line] = (),
) -> list[Advice]:
    """A search saw its recipes in several processes: the best of its replicates alone would flatter.

    Where a winner was measured again after its search, `lines` have both and speak for it.

    `tunes`: newest last; of several that asked the same about one subject and batch, one that ended speaks before one
    that was cut short, then the newest, unless an older one found what is surely faster. `subjects` and `rows`: by record.
    """
    searched: dict[Subject, dict[tuple[int | None, str], TuneSummary]] = {}
    for tune in sorted(tunes, key=lambda tune: tune.has_answer):
        subject = next((subjects[record_id] for record_id in tune.record_ids if record_id in subjects), None)
        if subject is not None:
            batch = tune.leader.batch if tune.leader else None
            alike = searched.setdefault(subject, {})
            older = alike.get((batch, tune.objective))
            if older is None or not _is_surely_better(older, tune, lines):
                alike[batch, tune.objective] = tune
    suggested = {each.subject: each for each in advice if each.kind == "recipe"}
    about = list(dict.fromkeys([*(each.subject for each in advice), *searched]))
    told: list[Advice] = []
    for subject in about:
        own = suggested.get(subject)
        about_it = list(searched.get(subject, {}).values())
        speaking = [tune for tune in about_it if not _is_overtaken(tune, subject, lines)]
        winners = _winners(subject, speaking, rows)
        # A search that found nothing speaks for what it measured, and for nothing else.
        measured = {record_id for tune in speaking for record_id in tune.record_ids}
        suggestion = [own] if own is not None and own.record_id not in measured else []
        told += suggestion if _are_outdone(winners, suggestion, measured, lines) else winners or suggestion
        told += [each for each in advice if each.subject == subject and each.kind != "recipe"]
    return told


def _is_surely_better(older: TuneSummary, newer: TuneSummary, lines: Sequence[Line]) -> bool:
    """Whether the winner of the older search gains more beyond doubt, on the same model: a short search may miss it."""
    one, other = older.winner, newer.winner
    if not older.has_answer or one is None or other is None or one.low is None or other.high is None:
        return False
    return one.low > other.high and _models(older.record_ids, lines) == _models(newer.record_ids, lines)


def _are_outdone(
    winners: Sequence[Advice], suggestion: Sequence[Advice], measured: Collection[str], lines: Sequence[Line]
) -> bool:
    """Whether others measured what surely gains more than the one winner, at its batch and on the same model."""
    if len(winners) != 1 or not suggestion:
        return False
    (winner,), (other,) = winners, suggestion
    if other.low is None or winner.high is None or not other.decided or other.batch != winner.batch:
        return False
    return other.low > winner.high and _models([other.record_id], lines) == _models(measured, lines)


def _models(record_ids: Iterable[str], lines: Sequence[Line]) -> set[str]:
    """The models, as they were then, behind these records."""
    hashes = {
        record.id: record.prepared.workload.model_hash
        for line in lines
        for record, _ in line.processes
        if record.prepared is not None
    }
    return {hashes[each] for each in record_ids if each in hashes}


def _is_overtaken(tune: TuneSummary, subject: Subject, lines: Sequence[Line]) -> bool:
    """Whether its winner has been measured since, in other processes: one recipe has one ratio."""
    winner, own = tune.leader, set(tune.record_ids)
    if winner is None or tune.objective != "throughput":
        return False
    return any(
        line.subject == subject
        and (line.row.recipe, line.row.batch) == (winner.recipe, winner.batch)
        and line.row.vs_first is not None
        and not line.is_capture
        and not own.issuperset(record.id for record, _ in line.processes)
        for line in lines
    )


def _winners(subject: Subject, tunes: Sequence[TuneSummary], rows: Mapping[str, RunSummary]) -> list[Advice]:
    found = [(tune, tune.leader) for tune in tunes if tune.leader is not None]
    several = len({winner.batch for _, winner in found}) > 1
    found = [(tune, winner) for tune, winner in found if winner.recipe != BASELINE or tune.state == "done"]
    # The first is the headline of the page: what is decided goes before what is not.
    found.sort(key=lambda each: certainty_of(each[1]) != "decided")
    return [_advice(subject, tune, winner, rows, name_batch=several) for tune, winner in found]


def _advice(
    subject: Subject, tune: TuneSummary, winner: Winner, rows: Mapping[str, RunSummary], *, name_batch: bool
) -> Advice:
    where = f" at batch {winner.batch}" if name_batch else ""
    if _may_be_no_faster(winner):
        return _stay(subject, tune, winner, rows, where)
    is_decided = certainty_of(winner) == "decided"
    row = rows.get(winner.record_id)
    doubted = row is not None and row.verdict.doubts("throughput")
    return Advice(
        subject=subject,
        kind="recipe",
        decided=(is_decided and not doubted) or (winner.recipe == BASELINE and tune.has_answer),
        headline=_headline(tune, winner, where),
        details=(*_details(tune, winner, rows), *_costs(tune, winner, rows)),
        recipe=winner.recipe,
        batch=winner.batch,
        record_id=winner.record_id,
        ratio=winner.ratio if is_decided else None,
        low=winner.low if is_decided else None,
        high=winner.high if is_decided else None,
    )


def _may_be_no_faster(winner: Winner) -> bool:
    has_ratio = winner.recipe != BASELINE and math.isfinite(winner.ratio)
    return has_ratio and certainty_of(winner) == "undecided"


def _stay(subject: Subject, tune: TuneSummary, winner: Winner, rows: Mapping[str, RunSummary], where: str) -> Advice:
    first = next((row for row in _there(tune, winner, rows) if row.recipe == BASELINE), None)
    return Advice(
        subject=subject,
        kind="recipe",
        headline=f"Stay with {BASELINE} for {work(subject)}{where}: nothing that was tried is clearly faster",
        details=(f"next best: {winner.recipe}, {_proof(tune, winner, rows)}",),
        decided=winner_verdict(tune, winner) in ("same", "slower"),
        recipe=BASELINE,
        batch=winner.batch,
        record_id=first.record_id if first is not None else "",
    )


def _headline(summary: TuneSummary, winner: Winner, where: str) -> str:
    if winner.recipe == BASELINE:
        return f"Nothing that was tried beats the baseline of {summary.model}{where}"
    if not math.isfinite(winner.ratio):
        return (
            f"{winner.recipe} is the fastest that was found for {summary.model}{where}; the baseline itself has no time"
        )
    device = summary.device_name or summary.device
    by = "" if summary.objective == "throughput" else f" by {summary.objective}"
    times = f"{winner.ratio:.2f}×{_between(winner.low, winner.high)}"
    faster = f"{times} as fast{by} as {BASELINE} on {device}{where}"
    if summary.objective == "energy":
        faster = f"with {times} the items per joule of {BASELINE} on {device}{where}"
    if certainty_of(winner) == "one process":
        did = "trained" if summary.task == "train" else "ran"
        return f"{winner.recipe} {did} {summary.model} {faster} in one process: whether it does in others is not known"
    does = "trains" if summary.task == "train" else "runs"
    return f"{winner.recipe} {does} {summary.model} {faster}"


def _details(summary: TuneSummary, winner: Winner, rows: Mapping[str, RunSummary]) -> list[str]:
    lines = [_proof(summary, winner, rows)]
    for switch in summary.switches:
        between = f" ({switch.low:.2f}–{switch.high:.2f})" if switch.low is not None and switch.high is not None else ""
        lines.append(
            f"without {switch.switch} it takes {switch.gain:.2f}×{between} {'the energy' if summary.objective == 'energy' else 'as long'}"
        )
    return lines


def _proof(summary: TuneSummary, winner: Winner, rows: Mapping[str, RunSummary]) -> str:
    verdict = winner_verdict(summary, winner)
    doubt = f": {verdict}" if verdict != "faster" and winner.recipe != BASELINE else ""
    if not math.isfinite(winner.ratio) or winner.low is None or winner.high is None:
        row = rows.get(winner.record_id)
        ratio = f"{winner.ratio:.2f}×, " if math.isfinite(winner.ratio) else ""
        only = f"{ratio}seen in one process only, the budget ended before others could be asked{doubt}"
        return only + (noise_remark(row) if row is not None else "")
    return f"{winner.ratio:.2f}× ({winner.low:.2f}–{winner.high:.2f}) over fresh processes, measured in turns{doubt}"


def _costs(tune: TuneSummary, winner: Winner, rows: Mapping[str, RunSummary]) -> list[str]:
    """By its first trial, which compiled from cold, and the longest check of its answers; nothing of another batch."""
    there = _there(tune, winner, rows)
    best = next((row for row in there if row.recipe == winner.recipe), None)
    first = next((row for row in there if row.recipe == BASELINE), None)
    if best is None or first is None or winner.recipe == BASELINE:
        return []
    checked = farthest(row.numerics for row in there if row.recipe == winner.recipe)
    return list(costs(msgspec.structs.replace(best, numerics=checked), first))


def _there(tune: TuneSummary, winner: Winner, rows: Mapping[str, RunSummary]) -> list[RunSummary]:
    """What may be recommended of all that was measured at the winner's batch."""
    own = [rows[record_id] for record_id in tune.record_ids if record_id in rows]
    return [row for row in own if row.batch == winner.batch and may_recommend(row)]
