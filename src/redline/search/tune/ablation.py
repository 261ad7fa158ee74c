"""The winner against itself without one switch each: what each brings, and whether a simpler recipe is as fast."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.pairs import pair_with_spread, process_spread
from redline.search.decide import FEWEST_REPLICATES
from redline.search.tune.costs import Costs
from redline.search.tune.final_runs import race_of, run_final, run_replicate, run_replicate_at_once
from redline.search.tune.finals import with_both
from redline.search.tune.reserve import affordable, together_s
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import Tuner
from redline.search.tune.winner import NEAR_ENOUGH, gains_of, is_settled, replicates_of, winner_of

ABLATION_REPLICATES = 2
KEPT_BACK = 0.25
"""Of the time left: recipes that nobody has tried may take longer than expected, and what they tell is worth no exceeded budget."""


def simplify(tuner: Tuner) -> None:
    """Switches that bring nothing go, where the recipe without all of them is as fast in replicates of its own."""
    chosen = winner_of(tuner.tune, tuner.records)
    gains = gains_of(chosen, tuner.tune, tuner.records)
    useless = {switch for gain in gains if gain.gain <= 1 + NEAR_ENOUGH for switch in gain.switch.split("+")}
    if chosen is None or not useless:
        return
    switches = tuner.space.switches_of(chosen)
    simpler = switches - useless
    if simpler in tuner.broken() or tuner.lessons().rules_out(simpler) or not tuner.space.is_valid(simpler):
        return
    finals = replicates_of(tuner.tune.finals, tuner.records)
    if len(with_both(finals, chosen, tuner.space.text(simpler))) >= tuner.asked.replicates:
        return  # an earlier session has seen that it is slower
    race = race_of(tuner)
    racers = list(dict.fromkeys([BASELINE, switches, simpler]))
    if len(affordable(tuner, racers * FEWEST_REPLICATES)) < len(racers) * FEWEST_REPLICATES:
        return  # with fewer it would have no interval
    for _ in range(tuner.asked.replicates):
        if not run_final(tuner, race, racers):
            break
    if winner_of(tuner.tune, tuner.records) != chosen:
        tuner.keep(ablations=())
        ablate(tuner)


def ablate(tuner: Tuner) -> None:
    """What each switch of the winner brings: the winner raced against itself without it.

    On a GPU with processors to spare, all of them are prepared at the same time: most have to be compiled first. Where there is
    no time for all, as many as can be had: those first that take least.
    """
    chosen = winner_of(tuner.tune, tuner.records)
    if chosen is None or chosen == tuner.space.text(BASELINE):
        return
    race = race_of(tuner)
    while True:
        planned = [tuner.space.switches_of(chosen), *_to_leave_out(tuner, chosen)]
        racers, run = affordable(tuner, planned, grace_s=-KEPT_BACK * tuner.left_s), run_replicate
        at_once = _affordable_at_once(tuner, planned)
        if len(at_once) >= len(racers):
            racers, run = at_once, run_replicate_at_once
        if len(racers) < 2:
            return
        number = min(len(tuner.tune.ablations), ABLATION_REPLICATES - 1)
        records = run(tuner, race, racers, number, ABLATION_REPLICATES)
        tuner.keep(ablations=(*tuner.tune.ablations, tuple(record.id for record in records)))


def _affordable_at_once(tuner: Tuner, racers: Sequence[Switches]) -> list[Switches]:
    """As many of them, from the first on, as can be prepared at the same time and raced while the budget lasts."""
    costs, found = Costs(tuner), list(racers)
    while found and together_s(tuner, costs, found) > (1 - KEPT_BACK) * tuner.left_s:
        found.pop()
    return found


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
    """Switches of the winner that there was no time to leave out once; several where they go together."""
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


def _ablated(tuner: Tuner, chosen: str) -> list[Switches]:
    """Without one switch each, leaving out what is known to break."""
    broken, lessons = set(tuner.broken()), tuner.lessons()
    less_one = [without for _, without in tuner.space.less_one(tuner.space.switches_of(chosen))]
    return [without for without in less_one if without not in broken and not lessons.rules_out(without)]


def _gain_is_settled(tuner: Tuner, chosen: str, without: Switches) -> bool:
    replicates = replicates_of((*tuner.tune.finals, *tuner.tune.ablations), tuner.records)
    finals = replicates_of(tuner.tune.finals, tuner.records)
    name = tuner.space.text(without)
    spread = process_spread(with_both(finals, "baseline", chosen), tuner.asked.kind)
    pair = pair_with_spread(replicates, name, chosen, spread, tuner.asked.kind)
    return is_settled(pair) or any(
        record.failure is not None
        for replicate in replicates
        for record in replicate
        if str(record.spec.recipe) == name
    )
