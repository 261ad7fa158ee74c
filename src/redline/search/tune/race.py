"""Replicates in fresh processes decide two things here: the last race, and what each switch of its winner brings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from redline.analyze.pairs import TIME_BAND, Pair
from redline.model.note import note
from redline.model.record import RunRecord
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import lesson_of
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.standings import NEAR_ENOUGH, pair_with, replicates_of
from redline.search.tune.state import Search
from redline.search.tune.summary import gains_of

Kept = Literal["finals", "ablations"]

FINALISTS = 4
"""At most this many of the fastest recipes are considered for the last race."""
USABLE = 1.2
"""The race goes on while time is left and the upper end of the winner's interval is more than this many times its lower end."""
AFTERWARDS = 0.25
"""At most this share of the budget is spent on what each switch brings."""


# These run the last race.


def race(search: Search) -> None:
    """Runs replicates until the first recipe is told apart from all others, or the time is over. One that falls behind or breaks is out."""
    leader, standings = search.leader(), search.standings
    if standings.met and leader is not None and not standings.times_met(search.space.text(leader)):
        # An earlier session raced without it, and a recipe cannot win a race it was not in.
        search.keep(finals=(), ablations=())
    if not standings.met and len(search.seen) == len(search.tune.trials) == 2:
        first, only = search.tune.trials  # nothing was chosen by this trial, so it counts as a replicate
        search.keep(finals=((first.record_id, only.record_id),) if only.anchor_id == first.record_id else ())
    begun = len(search.tune.lessons)
    while len(search.tune.lessons) == begun:  # else others may be tried before those behind it have their turn
        racers, count = _planned(search, finalists(search))
        if not count or _is_decided(search, racers) or not run_replicates(search, racers, "finals", count):
            return
        _learn(search)


def finalists(search: Search) -> list[Switches]:
    """Returns the recipes that could be the fastest, given how far processes of one recipe lie apart. The fastest comes first.

    A trial is one process. Processes are believed to lie apart as they usually do, and later as the race has shown, so that a recipe
    whose trial may have been unlucky joins late. None joins late if nothing in the race is surely faster than the baseline: the best
    of many that are no faster would sooner or later seem to be.
    """
    standings, ranked = search.standings, search.ranked()
    stand = {switches: standings.of(search.space.text(switches)) for switches in ranked}
    met = {switches: each for switches, each in stand.items() if search.space.text(switches) in standings.met}
    first = max(met.values(), key=lambda each: each.log_gain, default=None)
    if first is not None and first.low is not None and first.verdict != "faster":
        stand = met
    able = sorted(stand, key=lambda switches: -stand[switches].log_gain)[:FINALISTS]
    best = stand[able[0]] if able else None
    return [
        one for one in able if best and best.log_gain - stand[one].log_gain <= 2 * math.hypot(stand[one].sd, best.sd)
    ]


def _planned(search: Search, able: list[Switches]) -> tuple[list[Switches], int]:
    """Returns the baseline with as many finalists as there is time for, and how many replicates to prepare at the same time.

    An interval of the fastest is worth more than rivals. The number is one, or several if there is no time for one after the other; 0
    means that no race fits. If even the race of the fastest takes too long, the next is chosen whose race fits, if it is faster than
    the baseline.
    """
    costs, seen, done = Costs(search), search.seen, len(search.tune.finals)
    missing, fewest = max(search.asked.replicates - done, 1), max(search.fewest - done, 1)
    rivals = [switches for switches in able if switches != BASELINE]
    others = [each for each in search.ranked() if not done and seen[each].log_s < seen[BASELINE].log_s]
    for chosen in [*(rivals[:count] for count in range(len(rivals), 0, -1)), *([each] for each in others)]:
        racers = [BASELINE, *chosen]
        if len(chosen) > 1 and costs.replicates_s(racers, missing) > search.left_s:
            continue
        is_tight = search.held or costs.one_by_one_s(racers, missing) > search.left_s
        for count in range(missing, fewest - 1, -1) if is_tight and not search.on_cpu else [1]:
            # Without the first interval there is no winner, so that race is begun even if it may only just fit.
            share = 0.8 if done + count <= search.fewest else 1.0
            if share * costs.replicates_s(racers, max(count, fewest) if not done else count) <= search.left_s:
                return racers, count
    return [BASELINE], 0


def _is_decided(search: Search, racers: Sequence[Switches]) -> bool:
    """Returns whether there are enough replicates for the interval, and the first is told apart from the others or too close to matter."""
    standings, usual = search.standings, search.asked.replicates
    first, *others = [search.space.text(switches) for switches in racers[1:]]
    if len(search.tune.finals) >= 2 * usual:
        return True  # recipes that cannot be told apart are taken for equal
    gain = standings.of(first)
    low, high = gain.low or 0.0, gain.high or math.inf
    is_open = gain.verdict == "inconclusive" and gain.ratio > 1 + TIME_BAND
    if is_open or high > USABLE * low or min(map(standings.times_met, (first, *others))) < usual:
        return False
    return all(_is_settled(standings.pair(first, other)) for other in others)


def _is_settled(pair: Pair | None) -> bool:
    """Returns whether two recipes are told apart, or are so close that it does not matter which is taken."""
    if pair is None or pair.low is None or pair.high is None:
        return False
    return pair.high < 1 or pair.low > 1 or pair.high - pair.low <= 4 * NEAR_ENOUGH


def run_replicates(search: Search, racers: Sequence[Switches], kept: Kept, count: int = 1) -> bool:
    """Runs and keeps this many more replicates, prepared at the same time; returns False if the budget ended before any was ready."""
    done = len(getattr(search.tune, kept))
    search.observer.replicate(
        done + 1, max(search.asked.replicates, done + count), [search.space.text(switches) for switches in racers]
    )
    checked = search.checked_long() | {BASELINE}
    planned = [
        [search.race_spec(each, checks=not number and each not in checked) for each in racers]
        for number in range(count)
    ]
    begun, search.held = search.held, []
    replicates = search.runner.run_replicates(planned, begun=begun)
    search.records.update((record.id, record) for replicate in replicates for record in replicate)
    # A replicate says nothing about a recipe that was not ready before the budget ended.
    sound = [each for each in replicates if search.left_s > 1.0 or not any(map(_was_late, each))]
    ids = tuple(tuple(record.id for record in replicate) for replicate in sound)
    search.keep(**{kept: (*getattr(search.tune, kept), *ids)})
    return bool(sound)


def _was_late(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind == "timeout"


def _learn(search: Search) -> None:
    """Rules out what broke or lost its numbers in the last race. One that was not ready in time may be with a larger budget."""
    known = {lesson.recipe for lesson in search.tune.lessons if lesson.overrules_trials}
    for record in (record for replicate in search.standings.replicates for record in replicate):
        switches = search.recipe_of(record)
        text = search.space.text(switches)
        lesson = lesson_of(switches, text, record, search.tune, raced=True)
        if switches and text not in known and lesson is not None and not _was_late(record):
            search.learn(lesson)


# These measure what each switch brings.


def take_apart(search: Search) -> None:
    """Races the winner against itself without each of its switches, as many as there is time for, and drops switches that bring nothing."""
    if search.standings.winner() not in (None, "baseline"):
        search.observer.stage("what each switch brings")
        _leave_out(search)
        _simplify(search)


def _leave_out(search: Search) -> None:
    """Races the winner against itself without one switch each. The cheapest are measured first, and each is measured twice at most."""
    ends_s = search.elapsed_s + AFTERWARDS * search.budget_s
    while True:
        chosen, costs = search.space.switches_of(search.standings.winner() or "baseline"), Costs(search)
        racers = [chosen]
        for switches in sorted(_unsettled(search, chosen), key=costs.seconds):
            cold_s = sum(costs.seconds(each) - costs.reopen_s(each) for each in (*racers, switches))
            if costs.replicates_s([*racers, switches], 1) + cold_s > min(
                0.75 * search.left_s, ends_s - search.elapsed_s
            ):
                break
            racers.append(switches)
        if len(racers) < 2 or not run_replicates(search, racers, "ablations"):
            break
    known = {gain.switch for gain in gains_of(search.space.text(chosen), search.tune, search.records)}
    missing = [switch for rest, switch in _without_one(search, chosen).items() if switch not in known]
    if missing:
        text = f"the budget ended before the gain of these was measured: {', '.join(missing)}; raise --budget"
        search.tell(note("gains-unknown", text), is_short=True)


def _without_one(search: Search, chosen: Switches) -> dict[Switches, str]:
    """Returns the winner without each of its switches, where that may run: it has not broken, on trial or here."""
    broken = {search.space.switches_of(trial.recipe) for trial in search.tune.trials} - search.seen.keys()
    for replicate in replicates_of(search.tune.ablations, search.records):
        broken |= {search.recipe_of(record) for record in replicate if record.failure is not None}
    less_one = search.space.less_one(chosen) if chosen else {}
    return {
        rest: switch for rest, switch in less_one.items() if rest not in broken and not search.lessons.rules_out(rest)
    }


def _unsettled(search: Search, chosen: Switches) -> list[Switches]:
    """Returns the recipes whose missing switch was not left out twice yet and is not settled."""
    ablations = replicates_of(search.tune.ablations, search.records)
    times = [search.recipe_of(record) for replicate in ablations for record in replicate]
    met, kind, text = [*search.standings.replicates, *ablations], search.asked.kind, search.space.text
    open_ones = (rest for rest in _without_one(search, chosen) if times.count(rest) < 2)
    return [rest for rest in open_ones if not _is_settled(pair_with(met, text(rest), text(chosen), kind))]


def _simplify(search: Search) -> None:
    """Drops the switches that bring nothing, if the recipe without all of them is as fast in replicates of its own."""
    winner = search.standings.winner() or "baseline"
    gains = gains_of(winner, search.tune, search.records)
    useless = {switch for gain in gains if gain.gain <= 1 + NEAR_ENOUGH for switch in gain.switch.split("+")}
    chosen = search.space.switches_of(winner)
    simpler = chosen - useless
    if simpler == chosen or not search.space.is_valid(simpler) or search.lessons.rules_out(simpler):
        return
    racers = list(dict.fromkeys([BASELINE, chosen, simpler]))
    while search.standings.times_met(*map(search.space.text, racers)) < search.asked.replicates:
        if Costs(search).one_by_one_s(racers) > search.left_s or not run_replicates(search, racers, "finals"):
            break
    if search.standings.winner() != winner:
        search.keep(ablations=(), notes=tuple(each for each in search.tune.notes if each.code != "gains-unknown"))
        _leave_out(search)
