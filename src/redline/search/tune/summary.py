"""This module sums up what a search found: the leader with its interval, the ranking, what each switch brings, what was rejected and why.

All of it follows from the kept search and its records.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from redline.analyze.measurement import CeilingsOf, Measurement, lines_of, measurements
from redline.analyze.pairs import RaceVerdict
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import FailureScope, RunRecord
from redline.model.spec import BASELINE
from redline.search.tune.lessons import rejection, unproven
from redline.search.tune.record import TuneRecord
from redline.search.tune.standings import Records, Standings, conclusive, fallen_in_race, pair_with, replicates_of


class Ranked(Frozen):
    """A recipe against the baseline: `ratio` is the baseline's time, or energy where that is the objective, over its own."""

    recipe: str
    ratio: float
    verdict: RaceVerdict
    row: Measurement
    """Its figures, over all of its processes."""
    low: float | None = None
    """It is None where fewer than two processes of the recipe met the baseline."""
    high: float | None = None
    may_be_off: float | None = None
    """Without an interval: the ratio may be wrong by this factor, in either direction."""
    compile_s: float | None = None
    """The first time it was compiled in this search; other recipes may have been prepared beside it."""
    note: Note | None = None
    """Why it was not recommended, though it was timed."""

    @property
    def is_certain(self) -> bool:
        """Surely faster than the baseline: the interval over processes lies above 1."""
        return self.recipe != BASELINE and self.low is not None and self.low > 1


class SwitchGain(Frozen):
    """The time without a switch over the time with it: above 1 it helps."""

    switch: str
    """Several, as in a recipe, where some cannot do without another: they were left out together."""
    gain: float
    low: float | None
    high: float | None


class Rejected(Frozen):
    """A recipe that may not be recommended, and what that taught."""

    recipe: str
    switch: str | None
    """The switches that caused it, joined by `+`; None where that is not known."""
    scope: FailureScope
    """Says what is not tried again: the switch in any recipe, the pair, or only the recipe."""
    code: str
    text: str


class TuneSummary(Frozen):
    tune: TuneRecord
    leader: Ranked | None
    """The fastest that may be recommended, certain or not; the baseline where nothing was faster."""
    ranking: tuple[Ranked, ...]
    """At the first batch, the fastest first."""
    switches: tuple[SwitchGain, ...]
    rejected: tuple[Rejected, ...]

    @property
    def winner(self) -> Ranked | None:
        """None where nothing is surely faster than the baseline."""
        return self.leader if self.leader is not None and self.leader.is_certain else None

    @property
    def has_answer(self) -> bool:
        """Whether the search has an answer: that nothing beats the baseline is known only when all that promised something was tried."""
        return self.tune.state == "done" or (self.tune.state == "out-of-budget" and self.winner is not None)


def summary_of(tune: TuneRecord, records: Records, ceilings_of: CeilingsOf | None = None) -> TuneSummary:
    """All of it. With the device's ceilings, also how far the leader is from them."""
    measured = records_of(tune, records)
    lines = lines_of(measurements(measured, ceilings_of))
    # Over all processes of the search, as every table has it.
    rows: dict[tuple[str, int | None], Measurement] = {}
    for line in sorted(lines, key=lambda line: not (line.row.throughput_per_s or line.row.latency_s)):
        if line.row.failure is None:
            rows.setdefault((line.row.recipe, line.row.batch), line.row)
    batch = next((line.row.batch for line in lines), None)
    there, chosen = conclusive(tune, records)
    first, fallen = Standings(tune, records), fallen_in_race(tune, records)

    def ranked(recipe: str, at: Standings, row: Measurement) -> Ranked:
        standing, estimate = at.of(recipe), at.trials.get(recipe)
        return Ranked(
            recipe=recipe,
            ratio=standing.ratio,
            low=standing.low,
            high=standing.high,
            may_be_off=standing.may_be_off,
            verdict=standing.verdict,
            row=row,
            compile_s=_first_compile_s(recipe, measured),
            note=(estimate and estimate.too_late) or unproven(recipe, tune) or fallen.get(recipe),
        )

    shown = {*first.trials, *(str(each.spec.recipe) for final in first.replicates for each in final if each.blocks)}
    ranking = [ranked(recipe, first, row) for recipe in shown if (row := rows.get((recipe, batch))) is not None]
    at_batch = (record.spec.workload.batch for record in there.replicates[0]) if there.at_batch else iter((batch,))
    row = rows.get((chosen or "", next(at_batch)))
    return TuneSummary(
        tune=tune,
        leader=ranked(chosen, there, row) if chosen is not None and row is not None else None,
        ranking=tuple(sorted(ranking, key=lambda each: (-each.ratio, each.recipe))),
        switches=tuple(gains_of(chosen, tune, records)),
        rejected=tuple(_rejected(tune, measured)),
    )


def records_of(tune: TuneRecord, records: Records) -> list[RunRecord]:
    return [records[each] for each in dict.fromkeys(tune.record_ids) if each in records]


def gains_of(chosen: str | None, tune: TuneRecord, records: Records) -> list[SwitchGain]:
    """Returns what leaving out each switch of this recipe costs, by all replicates in which the two met."""
    finals, ablations = replicates_of(tune.finals, records), replicates_of(tune.ablations, records)
    words = _words(chosen or BASELINE)
    taken_apart = {str(record.spec.recipe) for replicate in ablations for record in replicate}
    gains = []
    for without in dict.fromkeys(str(record.spec.recipe) for each in (*finals, *ablations) for record in each):
        left_out, rest = [word for word in words if word not in _words(without)], set(_words(without))
        # That a smaller recipe was raced too does not mean that its other switches go together.
        if not left_out or not rest <= set(words) or (len(left_out) > 1 and without not in taken_apart):
            continue
        pair = pair_with([*finals, *ablations], without, chosen or BASELINE, tune.tune.kind)
        if pair is not None:
            gains.append(SwitchGain(switch="+".join(left_out), gain=pair.ratio, low=pair.low, high=pair.high))
    return sorted(gains, key=lambda each: -each.gain)


def _words(recipe: str) -> list[str]:
    return recipe.split("+") if recipe != BASELINE else []


def _first_compile_s(recipe: str, measured: list[RunRecord]) -> float | None:
    own = (record.prepared for record in measured if str(record.spec.recipe) == recipe)
    seconds = (prepared.cold_start.compile_s for prepared in own if prepared is not None)
    return next((each_s for each_s in seconds if each_s), None)


def _rejected(tune: TuneRecord, measured: list[RunRecord]) -> Iterator[Rejected]:
    """Yields each rejected recipe once, with what its failure taught."""
    taught = {lesson.recipe: lesson for lesson in tune.lessons}
    reasons: dict[str, tuple[Note, Any]] = {}
    for record in measured:
        recipe = str(record.spec.recipe)
        why = rejection(record, tune) or unproven(recipe, tune)
        if why is not None:
            reasons.setdefault(recipe, (why, taught.get(recipe) or record.failure))
    for (
        lesson
    ) in tune.lessons:  # a race that was begun anew is no longer part of the search, and what it taught still is
        if lesson.reason.about != "late":
            reasons.setdefault(lesson.recipe, (lesson.reason, lesson))
    for recipe, (why, cause) in reasons.items():
        yield Rejected(
            recipe=recipe,
            switch="+".join(cause.switches) or None if cause is not None else None,
            scope=cause.scope if cause is not None else "recipe",
            code=why.about if why.code == "failed" else why.code,
            text=str(why),
        )
