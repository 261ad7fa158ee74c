"""Who wins: the fastest that may be recommended, of those next to it the simplest; and what its switches bring."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from redline.analyze.pairs import Pair, pair_of, pair_with_spread, process_spread, verdict_of
from redline.analyze.replicates import lines_of
from redline.analyze.summary import RunSummary
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.spec import BASELINE, Recipe
from redline.search.decide import FEWEST_REPLICATES
from redline.search.tune.estimates import Estimate, Records, estimates
from redline.search.tune.lessons import overruled_by, rejection, unproven
from redline.search.tune.record import TuneRecord

NEAR_ENOUGH = 0.005
"""A simpler recipe is taken for this much."""
ONE_PROCESS_DOUBT = 0.04
"""What a recipe that met no other process may be off by at least: its verdict must be clear beyond that."""
SETTLED = 0.01
"""Half an interval: two recipes closer than this need no further replicate to tell them apart."""
WIDE = 1.25
"""The upper end of an interval over its lower: a gain of 3 to 20 times tells nobody what to expect."""

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


def winner_of(tune: TuneRecord, records: Records) -> str | None:
    """The fastest that may be recommended; of those next to it, the simplest."""
    known = estimates(tune, records)
    replicates = replicates_of(tune.finals, records)
    timed = {recipe for recipe, each in known.items() if each.too_late is None}
    timed |= {str(record.spec.recipe) for replicate in replicates for record in replicate if record.blocks}
    may_win = {recipe for recipe in timed if unproven(recipe, tune) is None} - fallen_in_race(tune, records).keys()
    survivors = [recipe for recipe in met_last(replicates) if recipe in may_win]
    if not survivors:
        best = min((known[recipe] for recipe in may_win & known.keys()), key=lambda each: each.log_s, default=None)
        return best.recipe if best else None
    return simplest_of_the_fastest(replicates, survivors, tune)


def simplest_of_the_fastest(
    replicates: Sequence[Sequence[RunRecord]], survivors: Sequence[str], tune: TuneRecord
) -> str:
    survivors = _with_an_interval(replicates, survivors) or survivors
    times = log_times(replicates, survivors, tune)
    fastest = min(times.values())
    near = [recipe for recipe, log in times.items() if log <= fastest + NEAR_ENOUGH]
    met = {record.id: record for replicate in replicates for record in replicate}
    return min(near, key=lambda recipe: (complexity(recipe, met), times[recipe]))


def _with_an_interval(replicates: Sequence[Sequence[RunRecord]], survivors: Sequence[str]) -> list[str]:
    """Those that raced often enough, and the baseline; none where only the baseline did.

    What joined late must not cost the answer its interval.
    """
    raced = _times_raced(replicates)
    often = [recipe for recipe in survivors if raced[recipe] >= FEWEST_REPLICATES]
    return often if set(often) - {BASELINE} else []


def _times_raced(replicates: Sequence[Sequence[RunRecord]]) -> Counter[str]:
    return Counter(recipe for replicate in replicates for recipe in met_last([replicate]))


def log_times(replicates: Sequence[Sequence[RunRecord]], recipes: Sequence[str], tune: TuneRecord) -> dict[str, float]:
    """The logarithm of each one's time over that of the one that raced most often, from the replicates in which the two met.

    Not over the baseline: processes of that differ too, and one that joined late has met others of them.
    """
    raced = _times_raced(replicates)
    most = max(recipes, key=lambda recipe: (raced[recipe], recipe != BASELINE))
    return {recipe: log_over(replicates, most, recipe, tune) for recipe in recipes}


def log_over(replicates: Sequence[Sequence[RunRecord]], one: str, other: str, tune: TuneRecord) -> float:
    """The logarithm of the other's time over the one's."""
    pair = None if one == other else pair_of(replicates, one, other, tune.tune.kind)
    return 0.0 if one == other else -math.log(pair.ratio) if pair else math.inf


def complexity(recipe: str, records: Records) -> tuple[int, int]:
    """How much there is to maintain: first what compiles, as the records tell, then how many switches."""
    of_recipe = (record.prepared for record in records.values() if str(record.spec.recipe) == recipe)
    prepared = next((each for each in of_recipe if each is not None), None)
    compiling = sum(does.compiles for does in prepared.switches.values()) if prepared is not None else 0
    return compiling, len(Recipe.parse(recipe).switches)


def replicates_of(ids: Sequence[Sequence[str]], records: Records) -> list[list[RunRecord]]:
    return [[records[each] for each in replicate if each in records] for replicate in ids]


def met_last(replicates: Sequence[Sequence[RunRecord]]) -> list[str]:
    """Who was still in the race at its end; the baseline always is."""
    if not replicates:
        return []
    return [str(record.spec.recipe) for record in replicates[-1] if record.failure is None and record.blocks]


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
    return found | dict.fromkeys(rejected_in(replicates_of(tune.finals, records), tune), own)


def rejected_in(replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord) -> set[str]:
    return {
        str(record.spec.recipe)
        for replicate in replicates
        for record in replicate
        if rejection(record, tune) is not None
    }


def winner_and_its_replicates(tune: TuneRecord, records: Records) -> tuple[str | None, list[list[RunRecord]]]:
    """At the batch that was found, where a race was held there; else at the first one. All that is told of the winner
    is of the same measurement."""
    there = replicates_of(tune.batch_replicates, records)
    met, late = met_last(there), rejected_in(there, tune)
    survivors = [recipe for recipe in met if recipe not in late and unproven(recipe, tune) is None]
    if survivors and BASELINE in met:
        return simplest_of_the_fastest(there, survivors, tune), there
    return winner_of(tune, records), replicates_of(tune.finals, records)


def recommended(tune: TuneRecord, records: Records) -> str | None:
    """The recipe that the summary names as its leader."""
    return winner_and_its_replicates(tune, records)[0]


def gains_of(chosen: str | None, tune: TuneRecord, records: Records) -> list[SwitchGain]:
    if chosen is None:
        return []
    finals, ablations = replicates_of(tune.finals, records), replicates_of(tune.ablations, records)
    spread = process_spread([replicate for replicate in finals if _has_survivors(replicate, finals)], tune.tune.kind)
    words = _words(chosen)
    taken_apart = {str(record.spec.recipe) for replicate in ablations for record in replicate}
    gains = []
    for without in dict.fromkeys(str(record.spec.recipe) for each in (*finals, *ablations) for record in each):
        left_out, rest = [word for word in words if word not in _words(without)], set(_words(without))
        # That a smaller recipe was raced too does not mean that its other switches go together.
        if not left_out or not rest <= set(words) or (len(left_out) > 1 and without not in taken_apart):
            continue
        pair = pair_with_spread([*finals, *ablations], without, chosen, spread, tune.tune.kind)
        if pair is not None:
            gains.append(SwitchGain(switch="+".join(left_out), gain=pair.ratio, low=pair.low, high=pair.high))
    return sorted(gains, key=lambda each: -each.gain)


def _words(recipe: str) -> list[str]:
    return recipe.split("+") if recipe != BASELINE else []


def _has_survivors(replicate: Sequence[RunRecord], replicates: Sequence[Sequence[RunRecord]]) -> bool:
    return set(met_last(replicates)) <= {str(record.spec.recipe) for record in replicate}


def against_baseline(
    recipe: str, replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord, known: dict[str, Estimate]
) -> Pair:
    """From replicates of fresh processes where both met; else by the search's scale, without an interval."""
    if recipe == BASELINE:
        return Pair(a=BASELINE, b=BASELINE, ratio=1.0, low=1.0, high=1.0, verdict="same", replicates=len(replicates))
    # More replicates than were planned are run for the sake of this pair and of the first two.
    found = pair_of(replicates, BASELINE, recipe, tune.tune.kind, looks=len(replicates) > tune.tune.replicates)
    if found is not None:
        return found
    base = known.get(BASELINE)
    moved = _moved_by_the_race(replicates, tune, known)
    ratio = math.exp(base.log_s - known[recipe].log_s + moved) if base is not None else math.nan
    doubt = one_process_doubt(recipe, replicates, tune, known)
    return Pair(
        a=BASELINE,
        b=recipe,
        ratio=ratio,
        low=None,
        high=None,
        verdict=verdict_of(ratio / doubt, ratio * doubt),
        replicates=1,
    )


def least_log_by_trial(
    recipe: str, replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord, known: Mapping[str, Estimate]
) -> float:
    """The logarithm of the time over the baseline's that one which did not race may have at best, going by its trial.

    The race may have moved it as it moved the others, or not at all where it moved a single one: that was lucky in its trial then.
    """
    moves = _moves_by_the_race(replicates, tune, known)
    moved = max(moves) if len(moves) > 1 else max([*moves, 0.0])
    apart = _processes_apart(replicates, tune)
    return known[recipe].log_s - known[BASELINE].log_s - moved - 2 * math.hypot(apart, known[recipe].error)


def one_process_doubt(
    recipe: str, replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord, known: Mapping[str, Estimate]
) -> float:
    """By which factor the ratio of a recipe that met no other process may be off.

    By two standard deviations of a ratio of two processes: as they lay apart in the race, or as far as that moved those it
    met; and by the noise inside its own, and what other processes may have done to it.
    """
    moved, apart = _moved_by_the_race(replicates, tune, known), _processes_apart(replicates, tune)
    return math.exp(math.hypot(max(ONE_PROCESS_DOUBT, 2 * abs(moved), 2 * apart), 2 * known[recipe].error))


def _processes_apart(replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord) -> float:
    """The standard deviation of a ratio of two processes, as a logarithm; 0 where the race does not tell it."""
    spread = process_spread(replicates, tune.tune.kind)
    return math.sqrt(2 * spread[0]) if spread is not None else 0.0


def _moved_by_the_race(
    replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord, known: Mapping[str, Estimate]
) -> float:
    """How far the last race moved its recipes, as a logarithm, from where the search saw them against the baseline.

    The search met the baseline in one process at its beginning. What was off about that one is off about all, so that
    those that did not race move with those that did: else they would stand above a winner that is faster.
    """
    moves = _moves_by_the_race(replicates, tune, known)
    return statistics.fmean(moves) if moves else 0.0


def _moves_by_the_race(
    replicates: Sequence[Sequence[RunRecord]], tune: TuneRecord, known: Mapping[str, Estimate]
) -> list[float]:
    base = known.get(BASELINE)
    raced = {str(record.spec.recipe) for replicate in replicates for record in replicate} & known.keys() - {BASELINE}
    pairs = {recipe: pair_of(replicates, BASELINE, recipe, tune.tune.kind) for recipe in raced}
    return [
        math.log(pair.ratio) - (base.log_s - known[recipe].log_s)
        for recipe, pair in pairs.items()
        if base is not None and pair is not None
    ]


def is_narrow(gain: Pair) -> bool:
    return gain.low is not None and gain.high is not None and gain.high <= WIDE * gain.low


def is_settled(pair: Pair | None) -> bool:
    if pair is None or pair.low is None or pair.high is None:
        return False
    return pair.high < 1 or pair.low > 1 or pair.high - pair.low <= 2 * SETTLED


def speeds_of(made: Sequence[RunRecord], rows: Mapping[str, RunSummary]) -> Speeds:
    """Over all processes of the search, as every table tells it."""
    lines = lines_of(made, [rows[record.id] for record in made])
    return {(line.row.recipe, line.row.batch): line.row.throughput_per_s for line in lines if line.row.failure is None}
