"""Who wins: the fastest that may be recommended, of those next to it the simplest; and what its switches bring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.analyze.race import pair_of, pair_with_spread, process_spread
from redline.record import RunRecord
from redline.search.tune.lessons import rejection, unproven
from redline.search.tune.model import Records, estimates
from redline.search.tune.record import TuneRecord
from redline.spec import BASELINE, Frozen, Recipe

NEAR_ENOUGH = 0.005
"""A simpler recipe is taken for this much."""


class SwitchGain(Frozen):
    """Time without the switch over time with it: above 1 it helps."""

    switch: str
    gain: float
    low: float | None
    high: float | None


def winner_of(tune: TuneRecord, records: Records) -> str | None:
    """The fastest that may be recommended; of those next to it, the simplest."""
    known = estimates(tune, records)
    replicates = replicates_of(tune.finals, records)
    timed = {recipe for recipe, each in known.items() if each.too_late is None}
    timed |= {str(record.spec.recipe) for replicate in replicates for record in replicate if record.blocks}
    may_win = {recipe for recipe in timed if unproven(recipe, tune) is None} - rejected_in_finals(tune, records)
    survivors = [recipe for recipe in met_last(replicates) if recipe in may_win]
    if not survivors:
        best = min((known[recipe] for recipe in may_win & known.keys()), key=lambda each: each.log_s, default=None)
        return best.recipe if best else None
    return simplest_of_the_fastest(replicates, survivors, tune)


def simplest_of_the_fastest(
    replicates: Sequence[Sequence[RunRecord]], survivors: Sequence[str], tune: TuneRecord
) -> str:
    times = {recipe: log_over(replicates, survivors[0], recipe, tune) for recipe in survivors}
    fastest = min(times.values())
    near = [recipe for recipe, log in times.items() if log <= fastest + NEAR_ENOUGH]
    met = {record.id: record for replicate in replicates for record in replicate}
    return min(near, key=lambda recipe: (complexity(recipe, met), times[recipe]))


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


def rejected_in_finals(tune: TuneRecord, records: Records) -> set[str]:
    return rejected_in(replicates_of(tune.finals, records), tune)


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
    words = chosen.split("+") if chosen != BASELINE else []
    gains = []
    for switch in words:
        without = "+".join(word for word in words if word != switch) or BASELINE
        pair = pair_with_spread([*finals, *ablations], without, chosen, spread, tune.tune.kind)
        if pair is not None:
            gains.append(SwitchGain(switch=switch, gain=pair.ratio, low=pair.low, high=pair.high))
    return sorted(gains, key=lambda each: -each.gain)


def _has_survivors(replicate: Sequence[RunRecord], replicates: Sequence[Sequence[RunRecord]]) -> bool:
    return set(met_last(replicates)) <= {str(record.spec.recipe) for record in replicate}
