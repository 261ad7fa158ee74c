"""What a search found: the winner with its interval, the ranking, what each switch brings, what was rejected and why.

All of it follows from the kept search and its records.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from redline.analyze.advice import command_line
from redline.analyze.pairs import (
    CONFIDENCE_AFTER,
    CONFIDENCE_LATER,
    Pair,
    RaceVerdict,
    Replicate,
    bounds,
    logs_of,
    undisturbed,
    verdict_of,
)
from redline.analyze.statistics import student_t
from redline.analyze.summary import CeilingsOf, RunSummary, cost_per_million, lines_of, summarize
from redline.analyze.trust import farthest
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import ColdStart, Failure, FailureScope, Numerics, RunRecord, TimeKind
from redline.model.spec import BASELINE, Recipe, Task
from redline.model.units import significant
from redline.model.work import Facts
from redline.search.tune.lessons import metric_of, overruled_by, rejection, unproven
from redline.search.tune.record import Lesson, Metric, Refused, Spent, TuneRecord, TuneState, Untried
from redline.search.tune.state import PROCESS_SD, Estimate, Records, estimates

NEAR_ENOUGH = 0.005
"""A simpler recipe is taken for so much of the time, and a switch that brings less is dropped."""
PRIOR_DEGREES = 3
"""What is known beforehand of how far processes of one recipe lie apart counts as much as so many further replicates: two that agree by
chance must not say that all would."""
ONE_PROCESS_DOUBT = 0.04
"""What a ratio of single processes may be off by at least: twice what two were seen to differ on an H200."""

Speeds = dict[tuple[str, int | None], float | None]
"""Items per second, by recipe and batch."""


class Winner(Frozen):
    """A recipe against the baseline: `ratio` is the baseline's time, or energy where that is the objective, over its own."""

    recipe: str
    batch: int | None
    ratio: float
    low: float | None
    """None where the budget ended before other processes could be asked."""
    high: float | None
    may_be_off: float | None = None
    """Without an interval: the ratio may be wrong by this factor, in either direction."""
    throughput_per_s: float | None = None
    item: str | None = None
    energy_per_item_j: float | None = None
    cost_per_million: float | None = None
    """Of a million items, at the price per hour that was given."""
    ttft_s: float | None = None
    """Generation: the time to the first token."""
    tpot_s: float | None = None
    """Generation: the time per further token."""
    bandwidth_share: float | None = None
    """Generation: what a decode step must read over its time, as a share of the copy bandwidth."""
    compile_s: float | None = None
    """The first time it was compiled in this search."""
    compile_is_contended: bool = False
    """Others were prepared at the same time: alone it would have taken less."""
    compile_is_shared: bool = False
    """Other processes compiled some of its blocks: alone it would have taken longer."""
    record_id: str = ""

    @property
    def is_certain(self) -> bool:
        """Surely faster than the baseline: the interval over processes lies above 1."""
        return self.recipe != BASELINE and self.low is not None and self.low > 1


class SwitchGain(Frozen):
    """Time without the switch over time with it: above 1 it helps."""

    switch: str
    """Several, as in a recipe, where some cannot do without another: they were left out together."""
    gain: float
    low: float | None
    high: float | None


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


# Who won


def winner_of(tune: TuneRecord, records: Records) -> str | None:
    """The fastest that may be recommended; of those next to it, the simplest."""
    known = estimates(tune, records)
    replicates = replicates_of(tune.finals, records)
    timed = {recipe for recipe, each in known.items() if each.too_late is None}
    timed |= {str(record.spec.recipe) for replicate in replicates for record in replicate if record.blocks}
    may_win = {recipe for recipe in timed if unproven(recipe, tune) is None} - fallen_in_race(tune, records).keys()
    survivors = [recipe for recipe in met_last(replicates) if recipe in may_win]
    if not survivors:
        return min(may_win & known.keys(), key=lambda recipe: known[recipe].log_s, default=None)
    return _simplest_of_the_fastest(replicates, survivors, tune)


def _simplest_of_the_fastest(replicates: Sequence[Replicate], survivors: Sequence[str], tune: TuneRecord) -> str:
    """What joined late must not cost the answer its interval."""
    counts = _times_raced(replicates)
    often = [recipe for recipe in survivors if counts[recipe] >= 2]
    survivors = often if set(often) - {BASELINE} else survivors
    times = log_times(replicates, survivors, tune)
    fastest = min(times.values())
    near = [recipe for recipe, log in times.items() if log <= fastest + NEAR_ENOUGH]
    met = {record.id: record for replicate in replicates for record in replicate}
    return min(near, key=lambda recipe: (complexity(recipe, met), times[recipe]))


def _times_raced(replicates: Sequence[Replicate]) -> Counter[str]:
    return Counter(recipe for replicate in replicates for recipe in met_last([replicate]))


def log_times(replicates: Sequence[Replicate], recipes: Sequence[str], tune: TuneRecord) -> dict[str, float]:
    """The logarithm of each one's time over that of the one that raced most often, from the replicates in which the two met.

    Not over the baseline: processes of that differ too, and one that joined late has met others of them.
    """
    counts = _times_raced(replicates)
    most = max(recipes, key=lambda recipe: (counts[recipe], recipe != BASELINE))
    pairs = {recipe: pair_with(replicates, most, recipe, tune.tune.kind) for recipe in recipes if recipe != most}
    return {most: 0.0} | {recipe: -math.log(pair.ratio) if pair else math.inf for recipe, pair in pairs.items()}


def complexity(recipe: str, records: Records) -> tuple[int, int]:
    """How much there is to maintain: first what compiles, as the records tell, then how many switches."""
    of_recipe = (record.prepared for record in records.values() if str(record.spec.recipe) == recipe)
    prepared = next((each for each in of_recipe if each is not None), None)
    compiling = sum(does.compiles for does in prepared.switches.values()) if prepared is not None else 0
    return compiling, len(Recipe.parse(recipe).switches)


def replicates_of(ids: Sequence[Sequence[str]], records: Records) -> list[list[RunRecord]]:
    return [[records[each] for each in replicate if each in records] for replicate in ids]


def met_last(replicates: Sequence[Replicate]) -> list[str]:
    """Who was still in the race at its end; the baseline always is."""
    last = replicates[-1] if replicates else ()
    return [str(record.spec.recipe) for record in last if record.failure is None and record.blocks]


def fallen_in_race(tune: TuneRecord, records: Records) -> dict[str, Note]:
    """Recipes that the last race rejected, or that hold what it ruled out, though their trials went well; and why."""
    found = {}
    for recipe in {trial.recipe for trial in tune.trials}:
        lesson = overruled_by(_words(recipe), tune.lessons)
        if lesson is not None:
            part, is_wrong = "+".join(lesson.switches), lesson.reason.about == "numerics"
            what = "a longer check has rejected" if is_wrong else "failed in the final comparison"
            found[recipe] = note("ruled-out", f"holds {part}, which {what}", about=part)
    own = note("rejected-in-final", "rejected in the final comparison")
    return found | dict.fromkeys(_rejected_in(replicates_of(tune.finals, records), tune), own)


def _rejected_in(replicates: Sequence[Replicate], tune: TuneRecord) -> set[str]:
    met = (record for replicate in replicates for record in replicate)
    return {str(record.spec.recipe) for record in met if rejection(record, tune) is not None}


def _winner_and_its_replicates(tune: TuneRecord, records: Records) -> tuple[str | None, list[list[RunRecord]]]:
    """At the batch that was found, where a race was held there; else at the first one. All that is told of the winner
    is of the same measurement."""
    there = replicates_of(tune.batch_replicates, records)
    met, late = met_last(there), _rejected_in(there, tune)
    survivors = [recipe for recipe in met if recipe not in late and unproven(recipe, tune) is None]
    if survivors and BASELINE in met:
        return _simplest_of_the_fastest(there, survivors, tune), there
    return winner_of(tune, records), replicates_of(tune.finals, records)


def recommended(tune: TuneRecord, records: Records) -> str | None:
    """The recipe that the summary names as its leader."""
    return _winner_and_its_replicates(tune, records)[0]


# Ratios and their intervals


def pair_with(replicates: Sequence[Replicate], one: str, other: str, kind: TimeKind) -> Pair | None:
    """Time of the one over time of the other, with an interval over processes; None where they never met.

    How far processes lie apart is not known from two or three replicates alone: what is usual counts too. Where the rounds of two replicates
    agree, that decides; where they do not, the interval is as wide as they say.
    """
    logs = undisturbed(logs_of(replicates, one, other, kind))
    if not logs:
        return None
    count = len(logs)
    if count == 1:
        ratio = math.exp(logs[0].centre)
        return Pair(a=one, b=other, ratio=ratio, low=None, high=None, verdict="inconclusive", replicates=1)
    degrees = PRIOR_DEGREES + count - 1
    spread = PRIOR_DEGREES * 2 * PROCESS_SD**2 + (count - 1) * statistics.variance(log.mean for log in logs)
    confidence = CONFIDENCE_AFTER.get(count, CONFIDENCE_LATER)
    between = student_t(degrees, confidence) * math.sqrt(spread / degrees / count)
    error = math.sqrt(sum(log.error**2 for log in logs)) / count
    within = student_t(max(sum(log.rounds - 1 for log in logs), 1), confidence) * error
    met = bounds(logs, max(between, within))
    verdict = verdict_of(met.low, met.high)
    return Pair(a=one, b=other, ratio=met.ratio, low=met.low, high=met.high, verdict=verdict, replicates=count)


def process_sd(replicates: Sequence[Replicate], kind: TimeKind) -> float:
    """How far processes of one recipe lie apart, by what is usual and by what the race has shown of the recipes in all of it."""
    names = sorted(set.intersection(*(set(met_last([replicate])) for replicate in replicates))) if replicates else []
    seen, degrees = 2 * PRIOR_DEGREES * PROCESS_SD**2, PRIOR_DEGREES
    for name in names[1:]:
        logs = logs_of(replicates, names[0], name, kind)
        if len(logs) > 1:
            seen += (len(logs) - 1) * statistics.variance(log.mean for log in logs)
            degrees += len(logs) - 1
    return math.sqrt(seen / degrees / 2)


def gains_of(chosen: str | None, tune: TuneRecord, records: Records) -> list[SwitchGain]:
    if chosen is None:
        return []
    finals, ablations = replicates_of(tune.finals, records), replicates_of(tune.ablations, records)
    words = _words(chosen)
    taken_apart = {str(record.spec.recipe) for replicate in ablations for record in replicate}
    gains = []
    for without in dict.fromkeys(str(record.spec.recipe) for each in (*finals, *ablations) for record in each):
        left_out, rest = [word for word in words if word not in _words(without)], set(_words(without))
        # That a smaller recipe was raced too does not mean that its other switches go together.
        if not left_out or not rest <= set(words) or (len(left_out) > 1 and without not in taken_apart):
            continue
        pair = pair_with([*finals, *ablations], without, chosen, tune.tune.kind)
        if pair is not None:
            gains.append(SwitchGain(switch="+".join(left_out), gain=pair.ratio, low=pair.low, high=pair.high))
    return sorted(gains, key=lambda each: -each.gain)


def _words(recipe: str) -> list[str]:
    return recipe.split("+") if recipe != BASELINE else []


def against_baseline(
    recipe: str, replicates: Sequence[Replicate], tune: TuneRecord, known: Mapping[str, Estimate]
) -> Pair:
    """From replicates of fresh processes where both met; else by the search's scale, without an interval.

    The search met the baseline in one process at its beginning. What was off about that one is off about all, so that
    those that did not race move with those that did.
    """
    if recipe == BASELINE:
        return Pair(a=BASELINE, b=BASELINE, ratio=1.0, low=1.0, high=1.0, verdict="same", replicates=len(replicates))
    found = pair_with(replicates, BASELINE, recipe, tune.tune.kind)
    if found is not None:
        return found
    base, moves = known.get(BASELINE), _moves_by_the_race(replicates, tune, known)
    moved = statistics.fmean(moves) if moves else 0.0
    ratio = math.exp(base.log_s - known[recipe].log_s + moved) if base is not None else math.nan
    doubt = one_process_doubt(recipe, replicates, tune, known)
    verdict = verdict_of(ratio / doubt, ratio * doubt)
    return Pair(a=BASELINE, b=recipe, ratio=ratio, low=None, high=None, verdict=verdict, replicates=1)


def one_process_doubt(
    recipe: str, replicates: Sequence[Replicate], tune: TuneRecord, known: Mapping[str, Estimate]
) -> float:
    """By which factor the ratio of a recipe that met no other process may be off.

    By two standard deviations of a ratio of two processes, or as far as the race moved those it met; and by the noise inside its own.
    """
    moved = max(map(abs, _moves_by_the_race(replicates, tune, known)), default=0.0)
    apart = math.sqrt(2) * process_sd(replicates, tune.tune.kind)
    return math.exp(math.hypot(max(ONE_PROCESS_DOUBT, 2 * moved, 2 * apart), 2 * known[recipe].error))


def _moves_by_the_race(replicates: Sequence[Replicate], tune: TuneRecord, known: Mapping[str, Estimate]) -> list[float]:
    """How far the last race moved its recipes, as logarithms, from where the search saw them against the baseline."""
    base = known.get(BASELINE)
    met = {str(record.spec.recipe) for replicate in replicates for record in replicate} & known.keys() - {BASELINE}
    pairs = {recipe: pair_with(replicates, BASELINE, recipe, tune.tune.kind) for recipe in met}
    return [
        math.log(pair.ratio) - (base.log_s - known[recipe].log_s)
        for recipe, pair in pairs.items()
        if base is not None and pair is not None
    ]


# All that is said


def summary_of(tune: TuneRecord, records: Records, ceilings_of: CeilingsOf | None = None) -> TuneSummary:
    """All of it. With the device's ceilings, also how far the winner is from them."""
    known = estimates(tune, records)
    chosen, replicates = _winner_and_its_replicates(tune, records)
    made = _all(tune, records)
    rows = {row.record_id: row for row in summarize(made, ceilings_of)}
    lines = lines_of(made, [rows[record.id] for record in made])
    # Over all processes of the search, as every table tells it.
    speeds = {
        (line.row.recipe, line.row.batch): line.row.throughput_per_s for line in lines if line.row.failure is None
    }
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
        notes=_notes_of(tune, records, rows, leader, numerics),
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
    replicates: Sequence[Replicate],
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
    gone = (lesson for recipe, lesson in taught.items() if recipe not in found and lesson.reason.about != "late")
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


# What is to be said beside it


def _notes_of(
    tune: TuneRecord, records: Records, rows: Mapping[str, RunSummary], leader: Winner | None, numerics: Numerics | None
) -> tuple[Note, ...]:
    """`numerics`: the farthest that the leader was seen from strict fp32."""
    winner = leader if leader is not None and leader.is_certain else None
    return (
        *tune.notes,
        *_check_notes(winner, tune),
        *_batch_notes(leader, tune, records),
        *_disturbance_notes(leader, rows),
        *_scope_notes(winner, tune, numerics),
        *_comparison_notes(winner, records),
        *_given_up_notes(tune),
    )


def _given_up_notes(tune: TuneRecord) -> list[Note]:
    """What was begun, and not prepared in time in any session."""
    tried, longest = {trial.recipe for trial in tune.trials}, dict[str, float]()
    for each in tune.given_up:
        longest[each.recipe] = max(each.seconds, longest.get(each.recipe, 0.0))
    return [
        note("given-up", f"{recipe} was given up: {seconds:.0f} s were not enough to prepare it", about=recipe)
        for recipe, seconds in longest.items()
        if recipe not in tried
    ]


DISTURBANCES = ("shared-cpu", "shared-gpu", "throttled", "others-at-work")
"""Doubts about times that are not the recipe's doing."""


def _disturbance_notes(leader: Winner | None, rows: Mapping[str, RunSummary]) -> list[Note]:
    if leader is None:
        return []
    found = rows[leader.record_id].verdict
    notes = [note(each.code, f"{leader.recipe}: {each}", about=leader.recipe) for each in found.noted("contended")]
    for each in (*found.reasons, *found.notes):
        if each.code in DISTURBANCES:
            doubt = "" if leader.recipe == BASELINE else "; undisturbed it may be faster, and its gain another"
            remedy = ": run it again when they have ended" if each.code == "shared-cpu" else ""
            text = f"{leader.recipe}: {each}{doubt}{remedy}"
            notes.append(note(each.code, text, about=leader.recipe))
    return notes


MUCH_DOUBLE = 0.2
"""Of the operators' time: a model that computes with 64 bits in so much of it does so on purpose."""
DIGITS = {"bf16": 2, "fp16": 3, "tf32": 3}
"""Decimal digits that a number format keeps, about."""


def _scope_notes(winner: Winner | None, tune: TuneRecord, numerics: Numerics | None) -> list[Note]:
    """What the gain was measured on, where other inputs may show another; and digits that a person asked for and loses."""
    if winner is None or tune.facts is None:
        return []
    notes, facts = [], tune.facts
    if facts.branches or facts.varies_shapes:
        what = "runs other operators" if facts.branches else "gives its operators other shapes"
        text = (
            f"the model {what} on other values of its inputs, and was timed with its own: elsewhere the gain may differ"
        )
        notes.append(note("one-branch", text))
    digits = DIGITS.get(numerics.number_format) if numerics is not None else None
    if facts.double_share >= MUCH_DOUBLE and numerics is not None and digits is not None:
        kept = f"{numerics.number_format} keeps about {digits} of its 16 digits"
        text = f"the model computes in float64, and {kept}: where they matter, search with --tolerance 1e-6"
        notes.append(note("fewer-digits", text))
    return notes


LEFT_OUT_OF_COMPARISON = ("masked-positions", "one-input-set")
"""What a workload says about how its outputs are compared."""


def _comparison_notes(winner: Winner | None, records: Records) -> list[Note]:
    """What the verdict on the winner's numbers leaves out."""
    if winner is None:
        return []
    prepared = (each.prepared for each in records.values() if str(each.spec.recipe) == winner.recipe)
    found = (each for one in prepared if one is not None for each in one.workload.notes)
    return list(dict.fromkeys(each for each in found if each.code in LEFT_OUT_OF_COMPARISON))


def _check_notes(winner: Winner | None, tune: TuneRecord) -> list[Note]:
    if winner is None or tune.tune.check is None or metric_of(winner.recipe, tune) is not None:
        return []
    return [note("check-not-run", f"your check has not been run on {winner.recipe}: it is not proven")]


def _batch_notes(winner: Winner | None, tune: TuneRecord, records: Records) -> list[Note]:
    """What the search for the batch saw, where the winner is told elsewhere or is another there."""
    if winner is None or not tune.batches:
        return []
    raced = {
        record.spec.workload.batch
        for replicate in replicates_of(tune.batch_replicates, records)
        for record in replicate
    }
    if winner.batch in raced:
        first = winner_of(tune, records)
        if first == winner.recipe:
            return []
        why = _why_not(first, winner, tune, records)
        return [note("other-winner", f"{first} won at the first batch, but not at batch {winner.batch}: {why}")]
    found = ", ".join(
        f"{choice.recipe} {significant(choice.throughput_per_s, 3)} {winner.item or 'item'}/s at batch {choice.batch}"
        for choice in tune.batches
    )
    if any(each.code == "batch-not-raced" for each in tune.notes):
        why = "they were not compared there"
    elif raced:
        why = "none of them may be recommended there"
    else:
        why = (
            "the budget ended before they were compared there"
            if tune.state in ("done", "out-of-budget")
            else "they have not been compared there yet"
        )
    return [note("batch-not-raced", f"the search for the batch, each recipe by itself, measured {found}; {why}")]


def _why_not(first: str | None, winner: Winner, tune: TuneRecord, records: Records) -> str:
    """Why the winner at the first batch is not the one at the batch that was found."""
    there = [
        each
        for replicate in replicates_of(tune.batch_replicates, records)
        for each in replicate
        if str(each.spec.recipe) == first
    ]
    lost = next((reason for each in there if (reason := rejection(each, tune)) is not None), None)
    return f"it fails there ({lost})" if lost else f"{winner.recipe} is as fast there, or faster"
