"""This module says how the recipes of a search stand against the baseline, by all that was measured, and which of them wins.

A trial is one process, timed in turns with the fastest so far, so that drift over the minutes cancels. The last race measures the last
few and the baseline in fresh processes, and only that gives an interval. A recipe that did not race moves with those that did.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from redline.analyze.blocks import round_medians_s
from redline.analyze.bound import HOST_BOUND_SHARE, host_share
from redline.analyze.pairs import (
    CONFIDENCE_AFTER,
    CONFIDENCE_LATER,
    Pair,
    RaceVerdict,
    Replicate,
    bounds,
    kind_measured,
    log_ratio,
    logs_of,
    process_spread,
    undisturbed,
    verdict_of,
)
from redline.analyze.statistics import student_t
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import RunRecord, TimeKind
from redline.model.spec import BASELINE, Recipe
from redline.search.decide import REPLICATES
from redline.search.tune.lessons import overruled_by, rejection, unproven
from redline.search.tune.record import Trial, TuneRecord

Records = Mapping[str, RunRecord]

PROCESS_SD = 0.01
"""Two processes of one recipe are taken to lie about this share apart; 0.15 to 4.4 % were seen on an H200."""
PRIOR_DEGREES = REPLICATES
"""The usual distance of processes counts as much as the replicates of a usual race, because two that agree by chance must not say that
all would."""
NEAR_ENOUGH = 0.005
"""This share of the time does not matter: a simpler recipe is preferred though it loses as much, a switch that brings no more is dropped,
and a trial need not be more exact."""


class Estimate(Frozen):
    """This is what is known of one recipe that was timed, as logarithms of seconds per step, or of joules if those are the objective."""

    recipe: str
    record_id: str
    log_s: float
    error: float
    """This is the standard error within the processes that were measured."""
    host_log_s: float | None = None
    """This is the logarithm of the time to issue a step; None if nothing is issued ahead of the device."""
    is_host_bound: bool = False
    too_late: Note | None = None
    """It says why the recipe does not keep the latency target."""


@dataclass(frozen=True)
class Standing:
    """This says how one recipe stands against the baseline."""

    log_gain: float
    """This is the logarithm of the baseline's time, or energy, over that of the recipe."""
    sd: float
    """Another pair of processes may lie this far from that (one standard deviation)."""
    low: float | None = None
    """Here the interval of the ratio begins; it is None if the recipe has met the baseline in fewer than two replicates."""
    high: float | None = None

    @property
    def ratio(self) -> float:
        return math.exp(self.log_gain)

    @property
    def may_be_off(self) -> float | None:
        """Returns the factor by which a ratio without an interval may be wrong, in either direction; None if there is an interval."""
        return math.exp(2 * self.sd) if self.low is None else None

    @property
    def verdict(self) -> RaceVerdict:
        off = self.may_be_off or 1.0
        return verdict_of(self.low or self.ratio / off, self.high or self.ratio * off)


class Standings:
    """This class says how the recipes of a search stand by its records. Everything is computed when it is first asked for."""

    def __init__(self, tune: TuneRecord, records: Records) -> None:
        self.tune, self.records = tune, records
        self.replicates = replicates_of(tune.finals, records)

    @cached_property
    def trials(self) -> dict[str, Estimate]:
        return estimates(self.tune, self.records)

    @cached_property
    def met(self) -> list[str]:
        """Returns the recipes that were still in the race at its end; the baseline always is."""
        return _sound_in(self.replicates[-1]) if self.replicates else []

    def times_met(self, *recipes: str) -> int:
        """Returns in how many replicates all of these recipes have met."""
        return sum(set(recipes).issubset(_sound_in(replicate)) for replicate in self.replicates)

    @cached_property
    def process_sd(self) -> float:
        """Returns how far processes of one recipe lie apart, for which what is usual and what the race has shown are weighed together."""
        variance, degrees = process_spread(self.replicates, self.tune.tune.kind) or (0.0, 0)
        return math.sqrt((PRIOR_DEGREES * PROCESS_SD**2 + degrees * variance) / (PRIOR_DEGREES + degrees))

    def pair(self, one: str, other: str) -> Pair | None:
        return pair_with(self.replicates, one, other, self.tune.tune.kind)

    def of(self, recipe: str) -> Standing:
        if recipe == BASELINE:
            return Standing(0.0, 0.0, 1.0, 1.0)
        pair = self.pair(BASELINE, recipe)
        if pair is not None:
            sd = self.process_sd * math.sqrt(2 / self.times_met(recipe))
            return Standing(math.log(pair.ratio), sd, self._least(recipe, pair), pair.high)
        anchor, own = self._anchor, self.trials.get(recipe)
        if own is None or anchor not in self.trials:
            return Standing(-math.inf, math.inf)
        log_gain = self.of(anchor).log_gain + self.trials[anchor].log_s - own.log_s
        return Standing(log_gain, math.hypot(self.process_sd * math.sqrt(2), own.error))

    def _least(self, recipe: str, pair: Pair) -> float | None:
        """Returns the low end of the interval of a recipe.

        However slow or quick the host happens to be in a process, a step of the baseline never takes less than its work on the
        device, which was watched before the search. If the host varies, that says more than the spread of processes.
        """
        facts, own = self.tune.facts, self.trials.get(recipe)
        device_s = facts.device_s if facts is not None and facts.host_s is not None else None
        if pair.low is None or own is None or device_s is None or self.tune.tune.kind != "throughput":
            return pair.low
        by_device = device_s / math.exp(own.log_s + 2 * math.hypot(self.process_sd, own.error))
        return min(max(pair.low, by_device), pair.ratio)

    @cached_property
    def _anchor(self) -> str:
        """Returns the fastest recipe that raced and was on trial. Others are compared with it by the ratios of their trials.

        It is the baseline only if nothing raced, because the baseline's first process may have been slow.
        """
        raced = [name for name in self.met if name in self.trials and name != BASELINE]
        return max(raced, key=lambda name: self.of(name).log_gain, default=BASELINE)

    def winner(self) -> str | None:
        """Returns the fastest recipe that may be recommended, or the simplest of those that are as fast within `NEAR_ENOUGH`."""
        timed = {recipe for recipe, estimate in self.trials.items() if estimate.too_late is None}
        fallen = fallen_in_race(self.tune, self.records).keys() | self.rejected
        may_win = {recipe for recipe in {*timed, *self.met} - fallen if unproven(recipe, self.tune) is None}
        raced = [recipe for recipe in self.met if recipe in may_win]
        if not raced:
            return min(may_win & self.trials.keys(), key=lambda recipe: self.trials[recipe].log_s, default=None)
        often = [recipe for recipe in raced if self.times_met(recipe) >= 2]  # a recipe that joined late has no interval
        gains = {recipe: self.of(recipe).log_gain for recipe in (often if set(often) - {BASELINE} else raced)}
        near = [recipe for recipe, gain in gains.items() if gain >= max(gains.values()) - NEAR_ENOUGH]
        return min(near, key=lambda recipe: (complexity(recipe, self.records), -gains[recipe]))

    @property
    def rejected(self) -> set[str]:
        return {str(each.spec.recipe) for all_of in self.replicates for each in all_of if rejection(each, self.tune)}


def complexity(recipe: str, records: Records) -> tuple[int, int]:
    """Returns how much there is to maintain: first how many switches compile, as the records tell, then how many there are."""
    of_recipe = (record.prepared for record in records.values() if str(record.spec.recipe) == recipe)
    prepared = next((each for each in of_recipe if each is not None), None)
    compiling = sum(does.compiles for does in prepared.switches.values()) if prepared is not None else 0
    return compiling, len(Recipe.parse(recipe).switches)


def replicates_of(ids: Sequence[Sequence[str]], records: Records) -> list[list[RunRecord]]:
    return [[records[each] for each in replicate if each in records] for replicate in ids]


def _sound_in(replicate: Replicate) -> list[str]:
    return [str(record.spec.recipe) for record in replicate if record.failure is None and record.blocks]


def fallen_in_race(tune: TuneRecord, records: Records) -> dict[str, Note]:
    """Returns the recipes that the last race has rejected, or that hold what it ruled out, though their trials went well; and why."""
    fallen = {}
    for recipe in {trial.recipe for trial in tune.trials}:
        lesson = overruled_by(recipe.split("+"), tune.lessons)
        if lesson is not None:
            part, is_wrong = "+".join(lesson.switches), lesson.reason.about == "numerics"
            what = "a longer check has rejected" if is_wrong else "failed in the final comparison"
            fallen[recipe] = note("ruled-out", f"holds {part}, which {what}", about=part)
    own = note("rejected-in-final", "rejected in the final comparison")
    return fallen | dict.fromkeys(Standings(tune, records).rejected, own)


def pair_with(replicates: Sequence[Replicate], one: str, other: str, kind: TimeKind) -> Pair | None:
    """Returns the ratio that the time of the one has to that of the other, with an interval over processes; None if they never met.

    Two or three replicates alone do not tell how far processes lie apart, so what is usual counts too. The interval is as wide as
    the processes or the rounds inside them say, whichever is more.
    """
    logs = undisturbed(logs_of(replicates, one, other, kind))
    count = len(logs)
    if count < 2:
        ratio = math.exp(logs[0].centre) if logs else 0.0
        undecided = Pair(a=one, b=other, ratio=ratio, low=None, high=None, verdict="inconclusive", replicates=1)
        return undecided if logs else None
    degrees = PRIOR_DEGREES + count - 1
    spread = PRIOR_DEGREES * 2 * PROCESS_SD**2 + (count - 1) * statistics.variance(log.mean for log in logs)
    confidence = CONFIDENCE_AFTER.get(count, CONFIDENCE_LATER)
    between = student_t(degrees, confidence) * math.sqrt(spread / degrees / count)
    error = math.sqrt(sum(log.error**2 for log in logs)) / count
    within = student_t(max(sum(log.rounds - 1 for log in logs), 1), confidence) * error
    met = bounds(logs, max(between, within))
    verdict = verdict_of(met.low, met.high)
    return Pair(a=one, b=other, ratio=met.ratio, low=met.low, high=met.high, verdict=verdict, replicates=count)


def estimates(tune: TuneRecord, records: Records) -> dict[str, Estimate]:
    """Returns every recipe that was timed on trial and has kept its numbers; the last trial of it counts.

    A trial's time is that of the recipe beside it by their ratio, and the chain begins with the baseline's own time.
    """
    kind = tune.tune.kind
    on_scale: dict[str, tuple[float, float]] = {}
    found: dict[str, Estimate] = {}
    for trial in tune.trials:
        record = records.get(trial.record_id)
        why = rejection(record, tune) if record is not None else None
        if why is not None and why.about == "numerics":
            found.pop(trial.recipe, None)  # this look was closer than the first
        if record is None or record.failure is not None or not round_medians_s(record, kind_measured(record, kind)):
            continue  # it broke, or its energy could not be read
        known = found.get(trial.recipe)
        if known is not None and trial.anchor_id is None:
            time = (known.log_s, known.error)  # it was opened again to go on from, so the scale is the one it gave
        else:
            time = _time_of(record, trial, records, on_scale, kind)
        on_scale[record.id] = time
        if why is None or why.code == "too-late":
            synchronises = record.prepared is not None and record.prepared.step_synchronises
            share = None if kind == "energy" or synchronises else host_share(record)
            found[trial.recipe] = Estimate(
                recipe=trial.recipe,
                record_id=record.id,
                log_s=time[0],
                error=time[1],
                host_log_s=None if share is None else time[0] + math.log(max(share, 1e-3)),
                is_host_bound=share is not None and share > HOST_BOUND_SHARE,
                too_late=why,
            )
    return found


def _time_of(
    record: RunRecord, trial: Trial, records: Records, on_scale: Mapping[str, tuple[float, float]], kind: TimeKind
) -> tuple[float, float]:
    """Returns the logarithm that a step's seconds have on the scale of the search, and its standard error."""
    anchor = records.get(trial.anchor_id or "")
    log = log_ratio(record, anchor, kind) if anchor is not None and anchor.id in on_scale else None
    if log is None or anchor is None:
        times = round_medians_s(record, kind_measured(record, kind)).values()
        return statistics.fmean(map(math.log, times)), 0.0
    log_s, error = on_scale[anchor.id]
    # Two or three rounds may agree by chance, so the error is never taken to be less than this.
    return log_s + log.centre, math.hypot(max(log.error, NEAR_ENOUGH / 2), error, log.doubt / 2)
