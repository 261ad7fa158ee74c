"""The last few raced in fresh processes, then the winner against itself less one switch."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.race import TIME_BAND, Replicate, log_ratio, pair_of, pair_with_spread, process_spread
from redline.record import RunRecord
from redline.search.race import FEWEST_REPLICATES, Race
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import rejection
from redline.search.tune.reserve import (
    NEAR,
    RACE_MARGIN,
    affordable,
    at_once_s,
    choose_finalists,
    last_race_s,
    may_be_late,
    planned_replicates,
)
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import FULL_LOSS_PATH, Tuner, final_measure
from redline.search.tune.winner import (
    NEAR_ENOUGH,
    gains_of,
    is_narrow,
    is_settled,
    log_over,
    rejected_in_finals,
    replicates_of,
    winner_of,
)
from redline.spec import RunSpec

BEHIND_AFTER_ONE = 0.03
BEHIND = 0.005
MOST_REPLICATES = 5
MOST_TO_WIN = 8
"""Of one that seems to be faster than the baseline, while that is not sure: on a CPU, processes of one recipe may lie half apart."""
RACE_SHARE = 0.75
"""Of the time left, for the replicates of the last race; the rest is for taking the winner apart."""
LEAST_SCALE = 0.5
"""Of what is expected: replicates that took less may take more again."""
SURE_MARGIN, UNSURE_MARGIN = 0.9, 0.6
GRACE = 0.1
"""Of the budget: by so much the replicate may exceed it without which the winner would have no interval."""
ABLATION_REPLICATES = 2


def decide(tuner: Tuner, untried: Switches | None = None) -> None:
    """Replicates of the finalists with the baseline; who falls behind is out, and the budget may end it.

    `untried`: raced without a trial where nothing but the baseline was tried.
    """
    _begin_anew_for_a_newcomer(tuner)
    replicates = replicates_of(tuner.tune.finals, tuner.records)
    finalists = _still_in(tuner, replicates) if replicates else choose_finalists(tuner)
    if untried is not None and finalists == [BASELINE]:
        finalists = [untried]
    race = _race(tuner)
    while finalists and not _is_decided(tuner, replicates, finalists):
        finalists = _with_time_for_all_replicates(tuner, finalists, len(replicates))
        if not replicates:
            finalists = _with_time_for_an_interval(tuner, finalists)
        racers = [BASELINE, *(each for each in finalists if each != BASELINE)]
        if len(racers) < 2 or _is_enough(tuner, replicates, racers):
            return
        if not (_run_finals_at_once(tuner, race, racers) or _run_final(tuner, race, racers)):
            return
        replicates = replicates_of(tuner.tune.finals, tuner.records)
        finalists = _still_in(tuner, replicates)
        if set(finalists) <= {BASELINE} and rejected_in_finals(tuner.tune, tuner.records):
            finalists = choose_finalists(tuner)  # all that raced went wrong: those behind them have their turn
            replicates = []


def narrow(tuner: Tuner) -> None:
    """More replicates of the winner and the baseline while the interval of its gain is wide and there is time."""
    chosen = winner_of(tuner.tune, tuner.records)
    race = _race(tuner)
    while chosen not in (None, "baseline") and len(tuner.tune.finals) < MOST_REPLICATES:
        replicates = replicates_of(tuner.tune.finals, tuner.records)
        gain = pair_of(replicates, "baseline", chosen, tuner.asked.kind)
        racers = [BASELINE, tuner.space.switches_of(chosen)]
        if gain is None or gain.low is None or is_narrow(gain) or may_be_late(tuner, racers):
            return
        before = tuner.tune.finals
        if not _run_final(tuner, race, racers):
            return
        failures = [record.failure for record in replicates_of(tuner.tune.finals, tuner.records)[-1]]
        if any(failure is not None and failure.kind == "timeout" for failure in failures):
            tuner.keep(finals=before)  # the budget ended it: that says nothing about the winner
            return
        chosen = winner_of(tuner.tune, tuner.records)


def _is_enough(tuner: Tuner, replicates: Sequence[Replicate], racers: Sequence[Switches]) -> bool:
    """Whether another replicate may exceed the budget and is not needed: the gain of the one racer left is known well."""
    if len(racers) > 2 or not may_be_late(tuner, racers):
        return False
    gain = pair_of(replicates, "baseline", tuner.space.text(racers[1]), tuner.asked.kind)
    return gain is not None and gain.verdict == "faster" and is_narrow(gain)


def _begin_anew_for_a_newcomer(tuner: Tuner) -> None:
    """Whether an earlier session raced without the recipe that is fastest now: a recipe cannot win a race it was not in."""
    met = {
        str(record.spec.recipe) for replicate in replicates_of(tuner.tune.finals, tuner.records) for record in replicate
    }
    if met and any(tuner.space.text(first) not in met for first in choose_finalists(tuner)[:1]):
        tuner.keep(finals=(), ablations=(), batch_replicates=())


def simplify(tuner: Tuner) -> None:
    """Switches that bring nothing go, where the recipe without all of them is as fast in replicates of its own."""
    chosen = winner_of(tuner.tune, tuner.records)
    useless = {gain.switch for gain in gains_of(chosen, tuner.tune, tuner.records) if gain.gain <= 1 + NEAR_ENOUGH}
    if chosen is None or not useless:
        return
    switches = tuner.space.switches_of(chosen)
    simpler = switches - useless
    if simpler in tuner.broken() or tuner.lessons().rules_out(simpler) or not tuner.space.is_valid(simpler):
        return
    finals = replicates_of(tuner.tune.finals, tuner.records)
    if len(_with_both(finals, chosen, tuner.space.text(simpler))) >= tuner.asked.replicates:
        return  # an earlier session has seen that it is slower
    race = _race(tuner)
    racers = list(dict.fromkeys([BASELINE, switches, simpler]))
    for _ in range(tuner.asked.replicates):
        if not _run_final(tuner, race, racers):
            return
    if winner_of(tuner.tune, tuner.records) != chosen:
        tuner.keep(ablations=())
        ablate(tuner)


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
    known = sorted((each for each in tuner.seen().values() if tuner.may_win(each)), key=lambda each: each.log_s)
    others = [tuner.space.switches_of(each.recipe) for each in known]
    fitting = [each for each in others if each != BASELINE and last_race_s(tuner, costs, each) <= tuner.left_s]
    if not fitting or fastest not in tuner.seen():
        return fitting[:1] or finalists
    is_ahead = tuner.seen()[fitting[0]].log_s > tuner.seen()[fastest].log_s + NEAR
    return [fastest] if is_ahead and needed_s <= RACE_MARGIN * tuner.left_s else fitting[:1]


def race_replicate_s(tuner: Tuner, racers: Sequence[Switches]) -> float:
    """What a replicate of these takes: opening them again, and timing each for its share at most."""
    timed_s = final_measure(on_cpu=tuner.on_cpu, checks=False).max_seconds / tuner.asked.replicates
    costs = Costs(tuner)
    return sum(costs.expected_s(each) + timed_s for each in racers)


def ablate(tuner: Tuner) -> None:
    """What each switch of the winner brings: the winner raced against itself without it.

    Where there is no time for all, for as many as can be had: those first that take least.
    """
    chosen = winner_of(tuner.tune, tuner.records)
    if chosen is None or chosen == tuner.space.text(BASELINE):
        return
    race = _race(tuner)
    while True:
        racers = affordable(tuner, [tuner.space.switches_of(chosen), *_to_leave_out(tuner, chosen)])
        if len(racers) < 2:
            return
        number = min(len(tuner.tune.ablations), ABLATION_REPLICATES - 1)
        records = _run_replicate(tuner, race, racers, number, ABLATION_REPLICATES)
        tuner.keep(ablations=(*tuner.tune.ablations, tuple(record.id for record in records)))


def _to_leave_out(tuner: Tuner, chosen: str) -> list[Switches]:
    """The winner without one switch each, where that is not settled and was not asked often enough; the cheapest first."""
    met = [
        {str(record.spec.recipe) for record in replicate}
        for replicate in replicates_of(tuner.tune.ablations, tuner.records)
    ]

    def is_open(switches: Switches) -> bool:
        asked = sum({chosen, tuner.space.text(switches)} <= names for names in met)
        return asked < ABLATION_REPLICATES and not _gain_is_settled(tuner, chosen, switches)

    return sorted(filter(is_open, _ablated(tuner, chosen)), key=Costs(tuner).expected_s)


def untold_switches(tuner: Tuner) -> list[str]:
    """Switches of the winner that there was no time to leave out once."""
    chosen = winner_of(tuner.tune, tuner.records)
    if chosen is None:
        return []
    told = {gain.switch for gain in gains_of(chosen, tuner.tune, tuner.records)}
    replicates = replicates_of((*tuner.tune.finals, *tuner.tune.ablations), tuner.records)
    asked = {str(record.spec.recipe) for replicate in replicates for record in replicate} | set(
        map(tuner.space.text, tuner.broken())
    )
    without = tuner.space.less_one(tuner.space.switches_of(chosen))
    return [switch for switch, rest in without if switch not in told and tuner.space.text(rest) not in asked]


def final_spec(
    tuner: Tuner, switches: Switches, *, first: bool, hurried: bool = False, batch: int | None = None
) -> RunSpec:
    """Numbers are checked once more, over the full path of losses, in the first replicate."""
    return tuner.spec_of(switches, final_measure(on_cpu=tuner.on_cpu, checks=first, hurried=hurried), batch)


def twin_specs(tuner: Tuner, switches: Switches, *, count: int) -> list[RunSpec]:
    """Processes of a recipe in the shortest race that gives an interval.

    The trial checks the numbers; in training the path of losses is longer here.
    """
    is_checked = tuner.asked.spec.workload.task == "train" and switches != BASELINE
    return [final_spec(tuner, switches, first=is_checked and number == 0, hurried=True) for number in range(count)]


def _race(tuner: Tuner) -> Race:
    planned = tuner.asked.replicates
    return Race(tuner.door, tuner.journal, tuner.observer, tuner.order, only=tuner.only, planned=planned)


def _run_final(tuner: Tuner, race: Race, racers: Sequence[Switches]) -> bool:
    """Run and keep one more replicate; False where the budget is too short. The one that gives an interval may exceed it a little."""
    gives_interval = len(tuner.tune.finals) == FEWEST_REPLICATES - 1 and len(racers) == 2
    grace_s = GRACE * tuner.budget_s if gives_interval else 0.0
    if len(affordable(tuner, racers, grace_s)) < len(racers):
        return False
    records = _run_replicate(tuner, race, racers, len(tuner.tune.finals), tuner.asked.replicates)
    tuner.keep(finals=(*tuner.tune.finals, tuple(record.id for record in records)))
    tuner.observer.standing(race.pairs)
    return True


def _run_finals_at_once(tuner: Tuner, race: Race, racers: Sequence[Switches]) -> bool:
    """All replicates of the race prepared at the same time, where there is no time for one after the other.

    As many as can be had, and not fewer than give an interval; False where they cannot be had, or need not be.
    """
    done, costs = len(tuner.tune.finals), Costs(tuner)
    planned = max(tuner.asked.replicates, planned_replicates(tuner, costs, racers))
    missing, fewest = planned - done, max(FEWEST_REPLICATES - done, 1)
    one_by_one_s = missing * tuner.replicate_scale * sum(map(costs.expected_s, racers))
    if RACE_MARGIN * one_by_one_s <= tuner.left_s and not any(map(tuner.twins_of, racers)):
        return False
    for count in range(missing, fewest - 1, -1):
        margin = RACE_MARGIN if done + count == FEWEST_REPLICATES else _margin(tuner, costs, racers, count)
        if at_once_s(tuner, costs, racers, count) <= margin * tuner.left_s:
            names = [tuner.space.text(each) for each in racers]
            tuner.observer.replicate(len(tuner.tune.finals) + 1, tuner.asked.replicates, names)
            first, later = _final_specs(tuner, racers), _final_specs(tuner, racers, are_checked=True)
            begun = [each for each in tuner.twins if tuner.recipe_of(each.record) in racers]
            tuner.twins = [each for each in tuner.twins if each not in begun]
            replicates = race.run_replicates_at_once([first, *[later] * (count - 1)], begun=begun)
            tuner.records.update((record.id, record) for replicate in replicates for record in replicate)
            ids = tuple(tuple(record.id for record in replicate) for replicate in replicates)
            tuner.keep(finals=(*tuner.tune.finals, *ids))
            tuner.observer.standing(race.pairs)
            return True
    return False


def _margin(tuner: Tuner, costs: Costs, racers: Sequence[Switches], count: int) -> float:
    """Of what is left, for one more replicate than give an interval: less where a compiled recipe must be opened for it.

    What it finds in a cache is not known before: a MobileNet on an H200 took 15 s again of 27.
    """
    is_opened = any(costs.compiles(each) and tuner.twins_of(each) < count for each in racers)
    return UNSURE_MARGIN if is_opened and any(map(tuner.twins_of, racers)) else SURE_MARGIN


def _final_specs(tuner: Tuner, racers: Sequence[Switches], *, are_checked: bool = False) -> list[RunSpec]:
    """In a hurry the check of the trial is enough for inference; in training the path of losses is longer here.

    The baseline is what the others are checked against. `are_checked`: another replicate looks at the numbers.
    """
    is_hurried = tuner.asked.replicates * sum(map(Costs(tuner).expected_s, racers)) > tuner.left_s
    is_enough = is_hurried and tuner.asked.spec.workload.task == "infer"
    known = {str(record.spec.recipe) for record in tuner.records.values() if _is_checked(record, is_enough)}

    def is_first(switches: Switches) -> bool:
        return not are_checked and switches != BASELINE and tuner.space.text(switches) not in known

    return [final_spec(tuner, each, first=is_first(each), hurried=is_hurried) for each in racers]


def _run_replicate(tuner: Tuner, race: Race, racers: Sequence[Switches], number: int, planned: int) -> list[RunRecord]:
    tuner.observer.replicate(number + 1, planned, [tuner.space.text(each) for each in racers])
    specs = _final_specs(tuner, racers)
    expected_s, started_s = sum(map(Costs(tuner).expected_s, racers)), tuner.clock()
    records = race.run_replicate(specs)
    tuner.replicate_scale = max(LEAST_SCALE, (tuner.clock() - started_s) / expected_s)
    tuner.records.update((record.id, record) for record in records)
    return records


def _is_checked(record: RunRecord, by_trial: bool) -> bool:
    """Its numbers were looked at over the full path, or as a trial looks at them."""
    measure = record.spec.measure
    is_full = by_trial or measure.loss_path_steps >= FULL_LOSS_PATH
    return record.prepared is not None and measure.check_numerics and is_full


def _still_in(tuner: Tuner, replicates: Sequence[Replicate]) -> list[Switches]:
    """Of the last replicate, those that are not clearly behind the fastest of it."""
    sound = [record for record in replicates[-1] if record.blocks and rejection(record, tuner.tune) is None]
    names = [str(record.spec.recipe) for record in sound]
    if not names:
        return []
    fastest = min(names, key=lambda name: log_over(replicates, names[0], name, tuner.tune))
    kept = [name for name in names if name == fastest or not _is_behind(tuner, replicates, fastest, name)]
    kept.sort(key=lambda name: log_over(replicates, fastest, name, tuner.tune))
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
    spread = process_spread(_with_both(replicates, fastest, name), tuner.asked.kind)
    found = pair_with_spread(replicates, fastest, name, spread, tuner.asked.kind) or pair
    is_surely_behind = found.high is not None and found.high < 1 - BEHIND
    if fastest == tuner.space.text(BASELINE) and found.high is not None:
        return is_surely_behind  # that nothing beats the baseline is an answer, and needs an interval like any other
    return is_surely_behind or found.ratio < 1 - BEHIND_AFTER_ONE


def _moved(tuner: Tuner, one: str, other: str, log: float) -> float:
    """How far a replicate is from what the trials said of two recipes: so far apart may processes of one recipe lie."""
    known = {each.recipe: each for each in tuner.seen().values()}
    return abs(log - (known[one].log_s - known[other].log_s)) if one in known and other in known else 0.0


def _with_both(replicates: Sequence[Replicate], *names: str) -> list[Replicate]:
    return [replicate for replicate in replicates if set(names) <= {str(record.spec.recipe) for record in replicate}]


def _is_decided(tuner: Tuner, replicates: Sequence[Replicate], finalists: Sequence[Switches]) -> bool:
    """Enough replicates for the interval, and the first two told apart or too close to matter."""
    first, *others = (tuner.space.text(each) for each in finalists)
    count = len(_with_both(replicates, first))
    if count < tuner.asked.replicates:
        return False
    gain = pair_of(replicates, "baseline", first, tuner.asked.kind)
    if gain is not None and gain.verdict == "inconclusive" and gain.ratio > 1 + TIME_BAND:
        return count >= max(MOST_TO_WIN, tuner.asked.replicates)
    if count >= max(MOST_REPLICATES, tuner.asked.replicates):
        return True
    return all(is_settled(pair_of(replicates, first, other, tuner.asked.kind)) for other in others)


def _ablated(tuner: Tuner, chosen: str) -> list[Switches]:
    """Without one switch each, leaving out what is known to break."""
    broken, lessons = set(tuner.broken()), tuner.lessons()
    less_one = [without for _, without in tuner.space.less_one(tuner.space.switches_of(chosen))]
    return [without for without in less_one if without not in broken and not lessons.rules_out(without)]


def _gain_is_settled(tuner: Tuner, chosen: str, without: Switches) -> bool:
    replicates = replicates_of((*tuner.tune.finals, *tuner.tune.ablations), tuner.records)
    finals = replicates_of(tuner.tune.finals, tuner.records)
    name = tuner.space.text(without)
    spread = process_spread(_with_both(finals, "baseline", chosen), tuner.asked.kind)
    pair = pair_with_spread(replicates, name, chosen, spread, tuner.asked.kind)
    return is_settled(pair) or any(
        record.failure is not None
        for replicate in replicates
        for record in replicate
        if str(record.spec.recipe) == name
    )
