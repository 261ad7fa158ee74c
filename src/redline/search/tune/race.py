"""The last race: those that could be the fastest and the baseline, replicate by replicate in fresh processes, until it is decided."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.analyze.pairs import TIME_BAND
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.search.decide import Race
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import lesson_of, rejection
from redline.search.tune.result import NEAR_ENOUGH, log_times, met_last, pair_with, process_sd, replicates_of
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.state import Search, final_measure

FINALISTS = 4
FEWEST, USUAL_MOST = 2, 5
"""Replicates: with one there is no interval; after so many two recipes that cannot be told apart are taken for equal."""
WIDE = 1.1
"""The upper end of an interval over its lower one: while it is wider and time is left, the race goes on."""


def race(search: Search) -> None:
    """Run replicates until the first is told apart from all others, or the time is over. Who falls behind or breaks is out."""
    runner = Race(
        search.door,
        search.journal,
        search.observer,
        search.order,
        only=search.only,
        planned=search.asked.replicates,
        left_s=lambda: search.left_s,
    )
    if _has_newcomer(search):
        search.keep(finals=(), ablations=(), batch_replicates=())
    begun = len(search.tune.lessons)
    while len(search.tune.lessons) == begun:  # else others may be tried before those behind it have their turn
        racers = _with_time(search, finalists(search))
        if len(racers) < 2 or _is_decided(search, racers):
            return
        count = _count(search, racers)
        if not count or not run_replicates(search, runner, racers, "finals", count):
            return
        _learn(search)


def _has_newcomer(search: Search) -> bool:
    """Whether an earlier session raced without the recipe that is fastest now: a recipe cannot win a race it was not in."""
    leader, met = search.leader(), {name for names in _met(search) for name in names}
    return bool(met) and leader is not None and search.space.text(leader) not in met


def _met(search: Search) -> list[list[str]]:
    return [met_last([replicate]) for replicate in raced(search)]


def raced(search: Search) -> list[list[RunRecord]]:
    return replicates_of(search.tune.finals, search.records)


def finalists(search: Search) -> list[Switches]:
    """Those that could be the fastest for all that is known of processes of one recipe, the fastest first.

    A trial is one process. How far processes lie apart is believed as usual at first, and as the race has shown it then, so that one whose
    trial may have been unlucky joins late; unless nothing is surely faster than the baseline: the best of many that are not would
    sooner or later seem to be.
    """
    replicates, ranked = raced(search), search.ranked()
    if search.guess is not None and ranked == [BASELINE]:
        return [search.guess]
    names = [search.space.text(switches) for switches in ranked]
    met = [name for name in names if name in met_last(replicates)]
    spread = process_sd(replicates, search.asked.kind)
    log_s, sd = dict[str, float](), dict[str, float]()
    if met:
        log_s = log_times(replicates, met, search.tune)
        counts = {name: sum(name in each for each in _met(search)) for name in met}
        sd = {name: spread * math.sqrt(2 / counts[name]) for name in met}
        anchor = min(met, key=log_s.__getitem__)
        if not _is_surely_faster(search, anchor):
            names = met
    seen = {search.space.text(switches): search.seen()[switches] for switches in ranked}
    for name in names:
        if name not in met:
            base = seen[anchor].log_s - log_s[anchor] if met else 0.0
            log_s[name] = seen[name].log_s - base
            sd[name] = math.hypot(spread * math.sqrt(2), seen[name].error)
    names = sorted((name for name in names if math.isfinite(log_s[name])), key=log_s.__getitem__)
    if not names:
        return []
    best = names[0]
    able = [name for name in names if log_s[name] <= log_s[best] + 2 * math.hypot(sd[name], sd[best])]
    return [search.space.switches_of(name) for name in able[:FINALISTS]]


def _is_surely_faster(search: Search, name: str) -> bool:
    gain = pair_with(raced(search), "baseline", name, search.asked.kind)
    return gain is None or gain.low is None or gain.verdict == "faster"


def _with_time(search: Search, able: list[Switches]) -> list[Switches]:
    """The baseline and as many finalists as there is time for, the fastest first: an interval of the fastest is worth more than rivals.

    Where even the fastest takes too long, it is the next whose race fits, if that is faster than the baseline.
    """
    costs, done = Costs(search), len(raced(search))
    rivals = [switches for switches in able if switches != BASELINE]
    missing = max(search.asked.replicates - done, 1)
    while len(rivals) > 1 and costs.replicates_s([BASELINE, *rivals], missing) > 0.75 * search.left_s:
        rivals.pop()
    if not rivals or done:
        return [BASELINE, *rivals]
    if 0.8 * costs.race_s(rivals[0]) <= search.left_s or rivals[0] == search.guess:
        return [BASELINE, *rivals]
    seen = search.seen()
    quick = [each for each in search.ranked() if each != BASELINE and costs.race_s(each) <= search.left_s]
    return [BASELINE, *[each for each in quick if seen[each].log_s < seen[BASELINE].log_s][:1]]


def _is_decided(search: Search, racers: Sequence[Switches]) -> bool:
    """Enough replicates for the interval, and the first two told apart or too close to matter."""
    replicates = raced(search)
    names = [search.space.text(switches) for switches in racers[1:]]
    counts = {name: sum(name in met for met in _met(search)) for name in names}
    usual, first = search.asked.replicates, names[0]
    if min(counts.values()) < usual:
        return False
    gain = pair_with(replicates, "baseline", first, search.asked.kind)
    if gain is not None and gain.verdict == "inconclusive" and gain.ratio > 1 + TIME_BAND:
        return counts[first] >= max(USUAL_MOST + 3, usual)
    pairs = [pair_with(replicates, first, other, search.asked.kind) for other in names[1:]]
    are_told_apart = all(pair is not None and is_settled(pair.low, pair.high) for pair in pairs)
    is_narrow = gain is not None and gain.low is not None and gain.high is not None and gain.high <= WIDE * gain.low
    return (are_told_apart and is_narrow) or counts[first] >= max(USUAL_MOST, usual)


def is_settled(low: float | None, high: float | None) -> bool:
    """Whether two recipes are told apart, or so close that it does not matter which is taken."""
    if low is None or high is None:
        return False
    return high < 1 or low > 1 or high - low <= 4 * NEAR_ENOUGH


def final_spec(
    search: Search, switches: Switches, *, checks: bool, hurried: bool = False, batch: int | None = None
) -> RunSpec:
    return search.spec_of(switches, final_measure(on_cpu=search.on_cpu, checks=checks, hurried=hurried), batch)


def _count(search: Search, racers: Sequence[Switches]) -> int:
    """How many replicates to prepare at the same time: one, or several where there is no time for one after the other.

    None fits where it is 0.
    """
    costs, done = Costs(search), len(search.tune.finals)
    missing, fewest = max(search.asked.replicates - done, 1), max(min(FEWEST, search.asked.replicates) - done, 1)
    count = 1
    if search.held or (missing * costs.replicates_s(racers, 1) > search.left_s and not search.on_cpu):
        counts = range(missing, fewest, -1)
        count = next((each for each in counts if costs.replicates_s(racers, each) <= 0.9 * search.left_s), fewest)
    is_first = done + count <= FEWEST  # without it there is no interval, which is worth a little more than is left
    return count if (0.8 if is_first else 1.0) * costs.replicates_s(racers, count) <= search.left_s else 0


def run_replicates(search: Search, runner: Race, racers: Sequence[Switches], purpose: str, count: int = 1) -> bool:
    """Run and keep so many more replicates, prepared at the same time; False where the budget ended before any was ready."""
    costs, done = Costs(search), len(getattr(search.tune, purpose))
    names = [search.space.text(switches) for switches in racers]
    search.observer.replicate(done + 1, max(search.asked.replicates, done + count), names)
    one_by_one_s = sum(map(costs.reopen_s, racers))
    hurried = search.asked.replicates * one_by_one_s > search.left_s
    checked = search.checked_long() | {BASELINE}
    later = [final_spec(search, switches, checks=False, hurried=hurried) for switches in racers]
    first = [final_spec(search, switches, checks=switches not in checked, hurried=hurried) for switches in racers]
    begun = [pending for pending in search.held if search.recipe_of(pending.record) in racers]
    search.held = [pending for pending in search.held if pending not in begun]
    if begun or count > 1 or costs.replicates_s(racers, 1) < one_by_one_s:
        replicates = runner.run_replicates_at_once([first, *[later] * (count - 1)], begun=begun)
    else:
        replicates = [runner.run_replicate(first)]
    search.records.update((record.id, record) for replicate in replicates for record in replicate)
    # One in which a recipe was not ready before the budget ended says nothing about it.
    kept = [each for each in replicates if search.left_s > 1.0 or not any(map(_was_late, each))]
    ids = tuple(tuple(record.id for record in replicate) for replicate in kept)
    search.keep(**{purpose: (*getattr(search.tune, purpose), *ids)})
    return bool(kept)


def _was_late(record: RunRecord) -> bool:
    return record.failure is not None and record.failure.kind == "timeout"


def _learn(search: Search) -> None:
    """What broke or lost its numbers in the last race is ruled out. What was not ready in time may be so with a larger budget."""
    known = {lesson.recipe for lesson in search.tune.lessons if lesson.overrules_trials}
    for record in (record for replicate in raced(search) for record in replicate):
        switches = search.recipe_of(record)
        text = search.space.text(switches)
        if switches == BASELINE or text in known or rejection(record, search.tune) is None or _was_late(record):
            continue
        lesson = lesson_of(switches, text, record, search.tune, raced=True)
        if lesson is not None:
            search.learn(lesson)
