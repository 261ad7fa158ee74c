"""What a failure teaches: the part that broke is named by the bench, or found in workers that only prepare."""

from __future__ import annotations

import msgspec

from redline.model.record import RunRecord
from redline.search.group import Group
from redline.search.observer import NoJournal, Observer
from redline.search.tune.costs import Costs
from redline.search.tune.final_runs import is_checked
from redline.search.tune.lessons import EXACTLY, find_cause, overruled_by, rejection, scope_of
from redline.search.tune.record import Lesson, Probe
from redline.search.tune.space import BASELINE, Switches
from redline.search.tune.tuner import FULL_LOSS_PATH, Tuner, trial_measure
from redline.search.tune.winner import replicates_of

SHORTEST_PROBE_S = 2.0
MOST_PROBES = 5
"""To find out what broke one recipe."""


def learn_from(tuner: Tuner, switches: Switches, record: RunRecord, *, raced: bool = False) -> None:
    """Rule out what broke: the part that the bench names, or the one that leaving out halves finds.

    `raced`: it broke in the last race, after a trial that went well. Smaller recipes are asked about only where the race looks
    more closely than its trial did; what breaks now and then tells nothing of them.
    """
    why = rejection(record, tuner.tune)
    if why is None or why.code == "too-late":
        return
    failure = record.failure
    named = frozenset(failure.switches) if failure is not None else frozenset[str]()
    checked_long = why.about == "numerics" and record.spec.measure.loss_path_steps >= FULL_LOSS_PATH
    if failure is not None and failure.scope != "recipe" and named and named <= switches:
        part = named
    elif why.about in EXACTLY or (raced and not checked_long):
        part = switches
    else:
        inquiry = _Inquiry(tuner, switches, checks_long=checked_long)
        part = find_cause(switches, inquiry.runs, _in_order(tuner, switches, named))
    scope = "recipe" if why.about in EXACTLY else scope_of(part)
    text = tuner.space.text(switches)
    overrules = raced or checked_long
    tuner.learn(Lesson(switches=tuple(sorted(part)), scope=scope, reason=why, recipe=text, overrules_trials=overrules))


def learn_from_race(tuner: Tuner) -> None:
    """What broke or lost its numbers in the last race is ruled out like what did so in a trial.

    What was not ready in time may be so with a larger budget.
    """
    for record in (record for replicate in replicates_of(tuner.tune.finals, tuner.records) for record in replicate):
        switches, failure = tuner.recipe_of(record), record.failure
        is_known = overruled_by(switches, tuner.tune.lessons) is not None
        if switches != BASELINE and not is_known and (failure is None or failure.kind != "timeout"):
            learn_from(tuner, switches, record, raced=True)


def _in_order(tuner: Tuner, switches: Switches, named: Switches) -> list[str]:
    """What is known to run first, then what is quick to prepare; what the bench suspects comes last.

    What needs another switch stands behind it, so that what stands before any switch is a recipe, and can be asked for.
    """
    known = {switch for recipe in tuner.seen() for switch in recipe}
    compiles = {choice.switch for choice in tuner.space.choices if choice.capabilities.compiles}
    left = sorted(switches, key=lambda switch: (switch in named, switch in compiles, switch not in known, switch))
    order: list[str] = []
    while left:
        possible = (switch for switch in left if tuner.space.is_valid(frozenset([*order, switch])))
        order.append(next(possible, left[0]))
        left.remove(order[-1])
    return order


class _Inquiry:
    """What broke a recipe? Asks workers that only prepare, as long as that is cheap."""

    def __init__(self, tuner: Tuner, broken: Switches, *, checks_long: bool) -> None:
        """`checks_long`: numbers are checked as in the last race; trials that went well tell nothing of that."""
        self._tuner = tuner
        self._broken = broken
        self._checks_long = checks_long
        is_last = tuner.space.switches_of(tuner.tune.trials[-1].recipe) == broken
        # What breaks as well takes as long. What ran, and lost its numbers in a race, says nothing of that.
        self._took_s = tuner.tune.trials[-1].cost_s if is_last and not checks_long else 0.0
        self._left = MOST_PROBES

    def runs(self, part: Switches) -> bool | None:
        tuner, lessons = self._tuner, self._tuner.lessons()
        if any(part <= recipe for recipe in self._sound()):
            return True
        if part >= self._broken or lessons.rules_out(part):
            return False
        if not tuner.space.is_valid(part):
            return True  # it cannot be asked; what breaks is then looked for among larger parts
        expected_s = max(Costs(tuner).expected_s(part), self._took_s)
        if self._left == 0 or expected_s > min(tuner.allowance_s, tuner.left_s):
            return None
        self._left -= 1
        return self._ask(part)

    def _sound(self) -> list[Switches]:
        """What is known to run and to keep its numbers, as closely as they are looked at here."""
        tuner = self._tuner
        probes = (each for each in tuner.tune.probes if each.runs and (each.checked_long or not self._checks_long))
        probed = [tuner.space.switches_of(probe.recipe) for probe in probes]
        if not self._checks_long:
            return [*tuner.seen(), *probed]
        checked = (record for record in tuner.records.values() if is_checked(record, by_trial=False))
        return [*(tuner.recipe_of(each) for each in checked if rejection(each, tuner.tune) is None), *probed]

    def _ask(self, part: Switches) -> bool | None:
        tuner = self._tuner
        tuner.observer.stage(f"what broke {tuner.space.text(self._broken)}: is it {tuner.space.text(part)}?")
        with (
            tuner.spending("failed"),
            Group(tuner.door, NoJournal(), Observer(), tuner.order, is_shared=False) as group,
        ):
            spec = tuner.spec_of(part, trial_measure(on_cpu=tuner.on_cpu, checks_long=self._checks_long))
            limit_s = max(round(tuner.allowance_s, 1), SHORTEST_PROBE_S)
            launch = msgspec.structs.replace(spec.launch, prepare_timeout_s=limit_s)
            entry = group.open(msgspec.structs.replace(spec, launch=launch), 0)
            record = entry.record if entry is not None else group.done[0]
        why = rejection(record, tuner.tune)
        if why is not None and why.about in EXACTLY:
            return None  # beside the others; alone it may do
        probe = Probe(recipe=tuner.space.text(part), runs=why is None, checked_long=self._checks_long)
        tuner.keep(probes=(*tuner.tune.probes, probe))
        return why is None
