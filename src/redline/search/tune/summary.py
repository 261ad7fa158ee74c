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
from redline.search.tune.standings import Records, Standings, fallen_in_race, pair_with, replicates_of


class Ranked(Frozen):
    """This says how a recipe ranks: its `ratio` is the baseline's time, or energy if that is the objective, over its own."""

    recipe: str
    ratio: float
    verdict: RaceVerdict
    row: Measurement
    """These are its figures over all of its processes."""
    low: float | None = None
    """It is None where fewer than two processes of the recipe met the baseline."""
    high: float | None = None
    may_be_off: float | None = None
    """If there is no interval, the ratio may be wrong by this factor, in either direction."""
    compile_s: float | None = None
    """Compiling took this long the first time in this search; other recipes may have been prepared beside it."""
    note: Note | None = None
    """It says why the recipe was not recommended, though it was timed."""

    @property
    def is_certain(self) -> bool:
        """It is True if the recipe is surely faster than the baseline: the interval over processes lies above 1."""
        return self.recipe != BASELINE and self.low is not None and self.low > 1


class SwitchGain(Frozen):
    """The gain is the time without a switch over the time with it: the switch helps if it is above 1."""

    switch: str
    """It names several, as in a recipe, if some of them cannot do without another: they were left out together."""
    gain: float
    low: float | None
    high: float | None


class Rejected(Frozen):
    """This recipe may not be recommended; it says why, and what that taught."""

    recipe: str
    switch: str | None
    """These switches have caused it, joined by `+`; None if that is not known."""
    scope: FailureScope
    """It says what is not tried again: the switch in any recipe, the pair, or only the recipe."""
    code: str
    text: str


class TuneSummary(Frozen):
    tune: TuneRecord
    leader: Ranked | None
    """This is the fastest that may be recommended, certain or not; it is the baseline if nothing was faster."""
    ranking: tuple[Ranked, ...]
    """These were measured at the first batch; the fastest comes first."""
    switches: tuple[SwitchGain, ...]
    rejected: tuple[Rejected, ...]

    @property
    def winner(self) -> Ranked | None:
        """Returns the leader, or None if it is not surely faster than the baseline."""
        return self.leader if self.leader is not None and self.leader.is_certain else None

    @property
    def has_answer(self) -> bool:
        """Returns whether the search has an answer. That nothing is faster is known only when all that promised a gain was tried."""
        return self.tune.state == "done" or (self.tune.state == "out-of-budget" and self.winner is not None)


def summary_of(tune: TuneRecord, records: Records, ceilings_of: CeilingsOf | None = None) -> TuneSummary:
    """Returns all that a search found. With the device's ceilings it also says how far the leader is from them."""
    measured = [records[each] for each in dict.fromkeys(tune.record_ids) if each in records]
    lines = [line for line in lines_of(measurements(measured, ceilings_of)) if line.row.failure is None]
    rows: dict[tuple[str, int | None], Measurement] = {}
    for line in sorted(lines, key=lambda line: not (line.row.throughput_per_s or line.row.latency_s)):
        rows.setdefault((line.row.recipe, line.row.batch), line.row)  # the row is over all processes of the search
    batch = next((line.row.batch for line in lines), None)
    standings, fallen = Standings(tune, records), fallen_in_race(tune, records)
    chosen = standings.winner()

    def ranked(recipe: str, row: Measurement) -> Ranked:
        standing, estimate = standings.of(recipe), standings.trials.get(recipe)
        own = (record.prepared for record in measured if str(record.spec.recipe) == recipe)
        compile_s = (prepared.cold_start.compile_s for prepared in own if prepared is not None)
        return Ranked(
            recipe=recipe,
            ratio=standing.ratio,
            low=standing.low,
            high=standing.high,
            may_be_off=standing.may_be_off,
            verdict=standing.verdict,
            row=row,
            compile_s=next(filter(None, compile_s), None),
            note=(estimate and estimate.too_late) or unproven(recipe, tune) or fallen.get(recipe),
        )

    raced = {str(each.spec.recipe) for final in standings.replicates for each in final if each.blocks}
    ranking = [
        ranked(recipe, row)
        for recipe in raced | standings.trials.keys()
        if (row := rows.get((recipe, batch))) is not None
    ]
    return TuneSummary(
        tune=tune,
        leader=next((row for row in ranking if row.recipe == chosen), None),
        ranking=tuple(sorted(ranking, key=lambda each: (-each.ratio, each.recipe))),
        switches=tuple(gains_of(chosen or BASELINE, tune, records)),
        rejected=tuple(_rejected(tune, measured)),
    )


def gains_of(chosen: str, tune: TuneRecord, records: Records) -> list[SwitchGain]:
    """Returns what it costs to leave out each switch of this recipe, by all replicates in which both recipes were measured."""
    ablations = replicates_of(tune.ablations, records)
    replicates = [*replicates_of(tune.finals, records), *ablations]
    taken_apart = {str(record.spec.recipe) for replicate in ablations for record in replicate}
    words, gains = _words(chosen), []
    for without in dict.fromkeys(str(record.spec.recipe) for each in replicates for record in each):
        left_out = [word for word in words if word not in _words(without)]
        # A smaller recipe may have been raced by itself. It tells the gain of several switches only if they were left out on purpose.
        if (
            not left_out
            or not words.keys() >= _words(without).keys()
            or (len(left_out) > 1 and without not in taken_apart)
        ):
            continue
        pair = pair_with(replicates, without, chosen, tune.tune.kind)
        if pair is not None:
            gains.append(SwitchGain(switch="+".join(left_out), gain=pair.ratio, low=pair.low, high=pair.high))
    return sorted(gains, key=lambda each: -each.gain)


def _words(recipe: str) -> dict[str, None]:
    """Returns the switches of a recipe in their order."""
    return dict.fromkeys(recipe.split("+") if recipe != BASELINE else [])


def _rejected(tune: TuneRecord, measured: list[RunRecord]) -> Iterator[Rejected]:
    """Yields each rejected recipe once, with what its failure has taught; also those of an earlier race that was begun anew since."""
    taught = {lesson.recipe: lesson for lesson in tune.lessons}
    reasons: dict[str, tuple[Note, Any]] = {}
    for record in measured:
        recipe = str(record.spec.recipe)
        if why := rejection(record, tune) or unproven(recipe, tune):
            reasons.setdefault(recipe, (why, taught.get(recipe) or record.failure))
    lessons = {lesson.recipe: (lesson.reason, lesson) for lesson in tune.lessons if lesson.reason.about != "late"}
    for recipe, (why, cause) in (lessons | reasons).items():
        yield Rejected(
            recipe=recipe,
            switch="+".join(cause.switches) or None if cause is not None else None,
            scope=cause.scope if cause is not None else "recipe",
            code=why.about if why.code == "failed" else why.code,
            text=str(why),
        )
