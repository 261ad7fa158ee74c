"""The last few raced in fresh processes: who goes on, who is out, and when it is decided."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.analyze.pairs import TIME_BAND, Replicate, log_ratio, pair_of, pair_with_spread, process_spread
from redline.search.decide import FEWEST_REPLICATES
from redline.search.tune.costs import Costs
from redline.search.tune.final_runs import (
    race_of,
    race_replicate_s,
    run_final,
    run_finals_at_once,
    times_raced,
)
from redline.search.tune.inquiry import learn_from_race
from redline.search.tune.lessons import rejection
from redline.search.tune.reserve import FINALISTS, NEAR, RACE_MARGIN, choose_finalists, last_race_s, may_be_late
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import (
    is_narrow,
    is_settled,
    least_log_by_trial,
    log_times,
    replicates_of,
    winner_of,
)

BEHIND_AFTER_ONE = 0.03
BEHIND = 0.005
MOST_REPLICATES = 5
MOST_TO_WIN = 8
"""Of one that seems to be faster than the baseline, while that is not sure: on a CPU, processes of one recipe may lie half apart."""
RACE_SHARE = 0.75
"""Of the time left, for the replicates of the last race; the rest is for taking the winner apart."""


def decide(tuner: Tuner, untried: Switches | None = None) -> None:
    """Replicates of the finalists with the baseline; who falls behind or breaks is out, and the budget may end it.

    `untried`: raced without a trial where nothing but the baseline was tried.
    """
    replicates = [] if _has_newcomer(tuner) else replicates_of(tuner.tune.finals, tuner.records)
    finalists = _still_in(tuner, replicates) if replicates else choose_finalists(tuner)
    if untried is not None and finalists == [BASELINE]:
        finalists = [untried]
    race = race_of(tuner)
    while finalists:
        if _is_decided(tuner, replicates, finalists):
            late = _that_may_still_win(tuner, replicates, finalists)
            if not late:
                return
            finalists = [*finalists, *late]
        finalists = _with_time_for_all_replicates(tuner, finalists, len(replicates))
        if not replicates:
            finalists = _with_time_for_an_interval(tuner, finalists)
        racers = [BASELINE, *(each for each in finalists if each != BASELINE)]
        if len(racers) < 2 or _is_enough(tuner, replicates, racers):
            return
        if not (run_finals_at_once(tuner, race, racers) or run_final(tuner, race, racers)):
            finalists = _quicker_to_race(tuner, racers)
            if not finalists:
                return
            tuner.keep(finals=())
        learn_from_race(tuner)
        replicates = replicates_of(tuner.tune.finals, tuner.records)
        if not replicates:
            continue
        finalists = _still_in(tuner, replicates)
        if set(finalists) <= {BASELINE} and tuner.fallen():
            return  # all that raced went wrong: others may be tried before those behind them have their turn


def narrow(tuner: Tuner) -> None:
    """More replicates of the winner and the baseline while the interval of its gain is wide and there is time."""
    chosen = winner_of(tuner.tune, tuner.records)
    race = race_of(tuner)
    while chosen not in (None, "baseline") and len(tuner.tune.finals) < MOST_REPLICATES:
        replicates = replicates_of(tuner.tune.finals, tuner.records)
        gain = pair_of(replicates, "baseline", chosen, tuner.asked.kind)
        racers = [BASELINE, tuner.space.switches_of(chosen)]
        if gain is None or gain.low is None or is_narrow(gain) or may_be_late(tuner, racers):
            return
        if not run_final(tuner, race, racers):
            return
        chosen = winner_of(tuner.tune, tuner.records)


def _that_may_still_win(tuner: Tuner, replicates: Sequence[Replicate], finalists: Sequence[Switches]) -> list[Switches]:
    """Those that did not race and may well be faster than the first, as processes were seen to lie apart; if there is time.

    A trial is one process. Where the host sets the pace, two of one recipe may lie a third apart, and the fastest in its trial
    may be the luckiest.
    """
    gain = pair_of(replicates, "baseline", tuner.space.text(finalists[0]), tuner.asked.kind)
    if gain is None or gain.verdict != "faster":
        return []  # the best of many that are no faster would sooner or later seem to be
    met = {str(record.spec.recipe) for replicate in replicates for record in replicate}
    known = {each.recipe: each for each in tuner.seen().values()}
    unraced = [recipe for recipe, each in known.items() if tuner.may_win(each) and recipe not in met]
    least = {recipe: least_log_by_trial(recipe, replicates, tuner.tune, known) for recipe in unraced}
    able = [recipe for recipe in sorted(least, key=least.__getitem__) if least[recipe] < -math.log(gain.ratio) - NEAR]
    found = [tuner.space.switches_of(recipe) for recipe in able[:FINALISTS]]
    racers = [BASELINE, *(each for each in finalists if each != BASELINE)]
    while found and race_replicate_s(tuner, [*racers, *found]) * FEWEST_REPLICATES > RACE_SHARE * tuner.left_s:
        found.pop()
    return found


def _is_enough(tuner: Tuner, replicates: Sequence[Replicate], racers: Sequence[Switches]) -> bool:
    """Whether another replicate may exceed the budget and is not needed: the gain of the one racer left is known well."""
    if len(racers) > 2 or not may_be_late(tuner, racers):
        return False
    gain = pair_of(replicates, "baseline", tuner.space.text(racers[1]), tuner.asked.kind)
    return gain is not None and gain.verdict == "faster" and is_narrow(gain)


def begin_anew_for_a_newcomer(tuner: Tuner) -> None:
    """Where an earlier session raced without the recipe that is fastest now, that race says nothing of this one."""
    if _has_newcomer(tuner):
        tuner.keep(finals=(), ablations=(), batch_replicates=())


def _has_newcomer(tuner: Tuner) -> bool:
    """Whether the recipe that is fastest now was in no replicate so far: a recipe cannot win a race it was not in."""
    replicates = replicates_of(tuner.tune.finals, tuner.records)
    met = {str(record.spec.recipe) for replicate in replicates for record in replicate}
    return bool(met) and any(tuner.space.text(first) not in met for first in choose_finalists(tuner)[:1])


def _with_time_for_all_replicates(tuner: Tuner, finalists: list[Switches], done: int) -> list[Switches]:
    """Fewer, the slowest going first, where the budget does not hold the replicates that are left.

    An interval of the fastest is worth more than one rival more in a single replicate.
    """
    replicates, kept = max(tuner.asked.replicates - done, 1), [each for each in finalists if each != BASELINE]
    while len(kept) > 1 and race_replicate_s(tuner, [BASELINE, *kept]) * replicates > RACE_SHARE * tuner.left_s:
        kept = kept[:-1]
    return [each for each in finalists if each in kept or each == BASELINE]


def _with_time_for_an_interval(tuner: Tuner, finalists: list[Switches]) -> list[Switches]:
    """Where the fastest takes too long to be opened twice more, the fastest that does not: it may have an interval.

    What is expected of a race is not exact: one that clearly beats all others may take a little more than is left.
    """
    costs, fastest = Costs(tuner), finalists[0]
    needed_s = last_race_s(tuner, costs, fastest)
    if needed_s <= tuner.left_s:
        return finalists
    fitting = _with_time_to_be_raced(tuner, costs)
    if not fitting or fastest not in tuner.seen():
        return fitting[:1] or finalists
    is_ahead = tuner.seen()[fitting[0]].log_s > tuner.seen()[fastest].log_s + NEAR
    return [fastest] if is_ahead and needed_s <= RACE_MARGIN * tuner.left_s else fitting[:1]


def _with_time_to_be_raced(tuner: Tuner, costs: Costs) -> list[Switches]:
    """Those that may win and whose shortest race fits, the fastest first."""
    known = sorted((each for each in tuner.seen().values() if tuner.may_win(each)), key=lambda each: each.log_s)
    others = [tuner.space.switches_of(each.recipe) for each in known]
    return [each for each in others if each != BASELINE and last_race_s(tuner, costs, each) <= tuner.left_s]


def _quicker_to_race(tuner: Tuner, racers: Sequence[Switches]) -> list[Switches]:
    """Where opening the fastest took so long that it will have no interval: another that can have one, if it beats the baseline."""
    if times_raced(tuner, racers) >= FEWEST_REPLICATES or not tuner.tune.finals:
        return []
    found, seen = _with_time_to_be_raced(tuner, Costs(tuner)), tuner.seen()
    return [each for each in found if each not in racers and seen[each].log_s < seen[BASELINE].log_s - NEAR][:1]


def _still_in(tuner: Tuner, replicates: Sequence[Replicate]) -> list[Switches]:
    """Of the last replicate, those that are not clearly behind the fastest of it, and that no earlier one rejected."""
    sound = [record for record in replicates[-1] if record.blocks and rejection(record, tuner.tune) is None]
    names = [str(record.spec.recipe) for record in sound if str(record.spec.recipe) not in tuner.fallen()]
    if not names:
        return []
    times = log_times(replicates, names, tuner.tune)
    fastest = min(names, key=times.__getitem__)
    kept = [name for name in names if name == fastest or not _is_behind(tuner, replicates, fastest, name)]
    kept.sort(key=times.__getitem__)
    return [tuner.space.switches_of(name) for name in kept]


def _is_behind(tuner: Tuner, replicates: Sequence[Replicate], fastest: str, name: str) -> bool:
    pair = pair_of(replicates, fastest, name, tuner.asked.kind)
    if pair is None:
        return True
    if pair.replicates == 1:
        records = {str(record.spec.recipe): record for record in replicates[-1]}
        log = log_ratio(records[fastest], records[name], tuner.asked.kind)
        if log is None:
            return True
        doubt = 2 * log.error + log.doubt + _moved(tuner, fastest, name, log.centre)
        return log.centre < -(BEHIND_AFTER_ONE + doubt)
    spread = process_spread(with_both(replicates, fastest, name), tuner.asked.kind)
    found = pair_with_spread(replicates, fastest, name, spread, tuner.asked.kind) or pair
    is_surely_behind = found.high is not None and found.high < 1 - BEHIND
    if fastest == tuner.space.text(BASELINE) and found.high is not None:
        return is_surely_behind  # that nothing beats the baseline is an answer, and needs an interval like any other
    # Not for so little that more replicates may well turn it round.
    error = math.sqrt(2 * spread[0] / pair.replicates) if spread is not None else 0.0
    return is_surely_behind or math.log(found.ratio) < -(BEHIND_AFTER_ONE + error / 2)


def _moved(tuner: Tuner, one: str, other: str, log: float) -> float:
    """How far a replicate is from what the trials said of two recipes: so far apart may processes of one recipe lie."""
    known = {each.recipe: each for each in tuner.seen().values()}
    return abs(log - (known[one].log_s - known[other].log_s)) if one in known and other in known else 0.0


def with_both(replicates: Sequence[Replicate], *names: str) -> list[Replicate]:
    return [replicate for replicate in replicates if set(names) <= {str(record.spec.recipe) for record in replicate}]


def _is_decided(tuner: Tuner, replicates: Sequence[Replicate], finalists: Sequence[Switches]) -> bool:
    """Enough replicates for the interval, and the first two told apart or too close to matter."""
    first, *others = (tuner.space.text(each) for each in finalists)
    count = len(with_both(replicates, first))
    if count < tuner.asked.replicates:
        return False
    gain = pair_of(replicates, "baseline", first, tuner.asked.kind)
    if gain is not None and gain.verdict == "inconclusive" and gain.ratio > 1 + TIME_BAND:
        return count >= max(MOST_TO_WIN, tuner.asked.replicates)
    open_others = [other for other in others if not is_settled(pair_of(replicates, first, other, tuner.asked.kind))]
    if any(len(with_both(replicates, other)) < tuner.asked.replicates for other in open_others):
        return False  # it joined late
    return not open_others or count >= max(MOST_REPLICATES, tuner.asked.replicates)
