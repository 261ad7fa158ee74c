"""What a search found: the winner with its interval, the ranking, what each switch brings, what was rejected and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from redline.analyze.advice import command_line
from redline.analyze.pairs import RaceVerdict
from redline.analyze.summary import CeilingsOf, RunSummary, cost_per_million, summarize
from redline.analyze.trust import farthest
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import ColdStart, Failure, FailureScope, Numerics, RunRecord
from redline.model.spec import Task
from redline.model.work import Facts
from redline.search.tune.estimates import Estimate, Records, estimates
from redline.search.tune.lessons import metric_of, rejection, unproven
from redline.search.tune.record import Lesson, Metric, Refused, Spent, TuneRecord, TuneState, Untried
from redline.search.tune.result_notes import notes_of
from redline.search.tune.winner import (
    Speeds,
    SwitchGain,
    Winner,
    against_baseline,
    fallen_in_race,
    gains_of,
    one_process_doubt,
    replicates_of,
    speeds_of,
    winner_and_its_replicates,
)


class Ranked(Frozen):
    recipe: str
    ratio: float
    verdict: RaceVerdict
    numerics: Numerics | None
    low: float | None = None
    """None where it was seen in one process only."""
    high: float | None = None
    may_be_off: float | None = None
    """Without an interval: the ratio may be wrong by this factor, in either direction."""
    compile_s: float | None = None
    compile_is_contended: bool = False
    compile_is_shared: bool = False
    bound: str = "unknown"
    throughput_per_s: float | None = None
    energy_per_item_j: float | None = None
    energy_too_short: bool = False
    power_w: float | None = None
    utilisation: float | None = None
    cost_per_million: float | None = None
    note: Note | None = None
    """Why it was not recommended, though it was timed."""


class Rejected(Frozen):
    """A recipe that may not be recommended, and what that taught."""

    recipe: str
    switch: str | None
    """What caused it, joined by `+`; None where that is not known."""
    scope: FailureScope
    """What is not tried again: the switch in any recipe, the pair, or only the recipe."""
    code: str
    text: str


class TuneSummary(Frozen):
    name: str
    state: TuneState
    model: str
    task: Task
    device: str
    device_name: str | None
    objective: str
    winner: Winner | None
    """None where nothing is surely faster than the baseline."""
    leader: Winner | None
    """The fastest that may be recommended, certain or not; the baseline where nothing was faster."""
    ranking: tuple[Ranked, ...]
    switches: tuple[SwitchGain, ...]
    rejected: tuple[Rejected, ...]
    metrics: tuple[Metric, ...]
    """What the user's own check said, recipe by recipe, the baseline first."""
    refused: tuple[Refused, ...]
    headroom: float | None
    """The winner's time over its roofline time; None where work or ceilings are not known."""
    snippet: str | None
    seconds: float
    compile_seconds: float
    trials: int
    """Recipes that were tried; one opened again to go on from counts once."""
    batch: int | None = None
    """Where the recipes of the ranking met; the winner may have a batch of its own."""
    notes: tuple[Note, ...] = ()
    record_ids: tuple[str, ...] = ()
    """Everything that was measured for it."""
    explained_by: str | None = None
    """The command that profiles the winner; None where there is none to be typed."""
    facts: Facts | None = None
    """What a step of the workload was seen doing before the search."""
    spent: Spent = Spent()
    untried: tuple[Untried, ...] = ()
    """Recipes that promised something and for which no time was left."""

    @property
    def has_answer(self) -> bool:
        """That nothing beats the baseline is known only when all that promised something was tried."""
        return self.state == "done" or (self.state == "out-of-budget" and self.winner is not None)


def summary_of(tune: TuneRecord, records: Records, ceilings_of: CeilingsOf | None = None) -> TuneSummary:
    """All of it. With the device's ceilings, also how far the winner is from them."""
    known = estimates(tune, records)
    chosen, replicates = winner_and_its_replicates(tune, records)
    made = _all(tune, records)
    rows = {row.record_id: row for row in summarize(made, ceilings_of)}
    speeds = speeds_of(made, rows)
    leader = _against(chosen, replicates, tune, records, rows, known, speeds)
    winner = leader if leader is not None and leader.is_certain else None
    ranking = tuple(_ranking(tune, records, rows, known, leader, speeds))
    numerics = next((row.numerics for row in ranking if leader is not None and row.recipe == leader.recipe), None)
    roofline = rows[leader.record_id].roofline if leader is not None else None
    first = next(iter(rows.values()), None)
    return TuneSummary(
        name=tune.name,
        state=tune.state,
        model=tune.tune.spec.workload.model,
        task=tune.tune.spec.workload.task,
        device=first.device if first else tune.tune.spec.device,
        device_name=next((row.device_name for row in rows.values() if row.device_name), None),
        objective=tune.tune.objective,
        winner=winner,
        leader=leader,
        ranking=ranking,
        switches=tuple(gains_of(chosen, tune, records)),
        rejected=tuple(_rejected(tune, records, ranking, leader)),
        metrics=tune.metrics,
        refused=tune.refused,
        headroom=roofline.headroom if roofline is not None else None,
        snippet=tune.snippet,
        seconds=tune.seconds,
        compile_seconds=sum(each.prepared.cold_start.compile_s or 0.0 for each in made if each.prepared is not None),
        trials=len({trial.recipe for trial in tune.trials} | _raced(tune, records)),
        batch=first.batch if first else None,
        notes=notes_of(tune, records, rows, leader, numerics),
        record_ids=tuple(tune.record_ids),
        explained_by=command_line("profile", tune.tune.spec, batch=winner.batch, recipes=[winner.recipe])
        if winner is not None
        else None,
        facts=tune.facts,
        spent=tune.spent,
        untried=tune.untried,
    )


def _raced(tune: TuneRecord, records: Records) -> set[str]:
    """Recipes of the final comparison: where there was no time for a trial, one is compared there at once."""
    return {str(record.spec.recipe) for replicate in replicates_of(tune.finals, records) for record in replicate}


def with_price(found: TuneSummary, per_hour: float) -> TuneSummary:
    """With what a million items cost under each recipe, at this price of the machine."""

    def priced(row: Any) -> Any:
        cost = None if row is None else cost_per_million(row.throughput_per_s, per_hour)
        return row if row is None else msgspec.structs.replace(row, cost_per_million=cost)

    return msgspec.structs.replace(
        found, winner=priced(found.winner), leader=priced(found.leader), ranking=tuple(map(priced, found.ranking))
    )


def _against(
    chosen: str | None,
    replicates: Sequence[Sequence[RunRecord]],
    tune: TuneRecord,
    records: Records,
    rows: dict[str, RunSummary],
    known: dict[str, Estimate],
    speeds: Speeds,
) -> Winner | None:
    if chosen is None:
        return None
    pair = against_baseline(chosen, replicates, tune, known)
    own = [
        record
        for replicate in replicates
        for record in replicate
        if str(record.spec.recipe) == chosen and record.blocks
    ]
    # The first replicate checks and counts; the others only time.
    counted = next((each for each in own if each.prepared is not None and each.prepared.work is not None), None)
    record = counted or (own[0] if own else records[known[chosen].record_id])
    row = rows[record.id]
    cold = _first_compiled(chosen, tune, records)
    return Winner(
        recipe=chosen,
        batch=row.batch,
        ratio=pair.ratio,
        low=pair.low,
        high=pair.high,
        may_be_off=one_process_doubt(chosen, replicates, tune, known) if pair.low is None and chosen in known else None,
        throughput_per_s=speeds.get((chosen, row.batch)),
        item=row.item,
        energy_per_item_j=row.energy_per_item_j,
        ttft_s=row.ttft_s,
        tpot_s=row.tpot_s.p50 if row.tpot_s is not None else None,
        bandwidth_share=row.generation.bandwidth_share if row.generation is not None else None,
        compile_s=cold.compile_s,
        compile_is_contended=cold.contended,
        compile_is_shared=cold.shared,
        record_id=record.id,
    )


def _ranking(
    tune: TuneRecord,
    records: Records,
    rows: dict[str, RunSummary],
    known: dict[str, Estimate],
    winner: Winner | None,
    speeds: Speeds,
) -> list[Ranked]:
    """Fastest first."""
    replicates = replicates_of(tune.finals, records)
    fallen = fallen_in_race(tune, records)
    shown = {recipe: each.record_id for recipe, each in known.items()}
    for record in (record for replicate in replicates for record in replicate if record.blocks):
        shown.setdefault(str(record.spec.recipe), record.id)
    checks: dict[str, list[Numerics | None]] = {}
    for record in _all(tune, records):
        checks.setdefault(str(record.spec.recipe), []).append(rows[record.id].numerics)
    ranked = []
    for recipe, record_id in shown.items():
        pair, row = against_baseline(recipe, replicates, tune, known), rows[record_id]
        cold = _first_compiled(recipe, tune, records)
        late = known[recipe].too_late if recipe in known else None
        ranked.append(
            Ranked(
                recipe=recipe,
                ratio=pair.ratio,
                low=pair.low,
                high=pair.high,
                may_be_off=one_process_doubt(recipe, replicates, tune, known)
                if pair.low is None and recipe in known
                else None,
                verdict=pair.verdict,
                numerics=farthest(checks[recipe]),
                compile_s=cold.compile_s,
                compile_is_contended=cold.contended,
                compile_is_shared=cold.shared,
                bound=row.bound.label,
                throughput_per_s=speeds.get((recipe, row.batch)),
                energy_per_item_j=row.energy_per_item_j,
                energy_too_short=row.energy_too_short,
                power_w=row.power_w,
                utilisation=row.utilisation,
                note=late or _why_not_recommended(recipe, pair.ratio, tune, winner) or fallen.get(recipe),
            )
        )
    return sorted(ranked, key=lambda each: -each.ratio)


def _why_not_recommended(recipe: str, ratio: float, tune: TuneRecord, winner: Winner | None) -> Note | None:
    """What the check or the lack of one says; but what is slower than the winner would not have needed a check."""
    why = unproven(recipe, tune)
    is_slower = winner is not None and ratio < winner.ratio
    if why is None or metric_of(recipe, tune) is not None or not is_slower or winner is None:
        return why
    return note("slower", f"slower: {ratio:.2f}× the baseline, where {winner.recipe} has {winner.ratio:.2f}×")


def _rejected(tune: TuneRecord, records: Records, ranking: Sequence[Ranked], winner: Winner | None) -> list[Rejected]:
    """Each recipe once, with what its failure taught."""
    ratios = {row.recipe: row.ratio for row in ranking}
    taught = {lesson.recipe: lesson for lesson in tune.lessons}
    found: dict[str, Rejected] = {}
    for record in _all(tune, records):
        recipe = str(record.spec.recipe)
        why = rejection(record, tune) or _why_not_recommended(recipe, ratios.get(recipe, math.inf), tune, winner)
        if why is None or recipe in found:
            continue
        found[recipe] = _rejection(recipe, why, taught.get(recipe) or record.failure)
    # A race that was begun anew is no longer part of the search, and what it taught still is.
    gone = (lesson for recipe, lesson in taught.items() if recipe not in found)
    return [*found.values(), *(_rejection(lesson.recipe, lesson.reason, lesson) for lesson in gone)]


def _rejection(recipe: str, why: Note, cause: Lesson | Failure | None) -> Rejected:
    return Rejected(
        recipe=recipe,
        switch="+".join(cause.switches) or None if cause is not None else None,
        scope=cause.scope if cause is not None else "recipe",
        code=why.about if why.code == "failed" else why.code,
        text=str(why),
    )


def _all(tune: TuneRecord, records: Records) -> list[RunRecord]:
    return [records[each] for each in dict.fromkeys(tune.record_ids) if each in records]


def _first_compiled(recipe: str, tune: TuneRecord, records: Records) -> ColdStart:
    """The cold start in which it was first compiled; an empty one where it never was."""
    own = (record.prepared for record in _all(tune, records) if str(record.spec.recipe) == recipe)
    starts = (prepared.cold_start for prepared in own if prepared is not None)
    return next((cold for cold in starts if cold.compile_s), ColdStart())
