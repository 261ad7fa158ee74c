"""What the failure of a trial teaches: the part that broke is named by the bench, or found in workers that only prepare."""

from __future__ import annotations

import msgspec

from redline.record import RunRecord
from redline.search.group import Group
from redline.search.observer import NoJournal, Observer
from redline.search.tune.costs import Costs
from redline.search.tune.lessons import EXACTLY, find_cause, rejection, scope_of
from redline.search.tune.record import Lesson, Probe
from redline.search.tune.space import Switches
from redline.search.tune.tuner import Tuner

SHORTEST_PROBE_S = 2.0
MOST_PROBES = 5
"""To find out what broke one recipe."""


def learn_from(tuner: Tuner, switches: Switches, record: RunRecord) -> None:
    """Rule out what broke: the part that the bench names, or the one that leaving out halves finds."""
    why = rejection(record, tuner.tune)
    if why is None or why.code == "too-late":
        return
    failure = record.failure
    named = frozenset(failure.switches) if failure is not None else frozenset[str]()
    if failure is not None and failure.scope != "recipe" and named and named <= switches:
        part = named
    elif why.about in EXACTLY:
        part = switches
    else:
        part = find_cause(switches, _Inquiry(tuner, switches).runs, _in_order(tuner, switches, named))
    scope = "recipe" if why.about in EXACTLY else scope_of(part)
    text = tuner.space.text(switches)
    tuner.learn(Lesson(switches=tuple(sorted(part)), scope=scope, reason=why, recipe=text))


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

    def __init__(self, tuner: Tuner, broken: Switches) -> None:
        self._tuner = tuner
        self._broken = broken
        self._took_s = tuner.tune.trials[-1].cost_s
        self._left = MOST_PROBES

    def runs(self, part: Switches) -> bool | None:
        tuner, lessons = self._tuner, self._tuner.lessons()
        sound = [*tuner.seen(), *(tuner.space.switches_of(each.recipe) for each in tuner.tune.probes if each.runs)]
        if any(part <= recipe for recipe in sound):
            return True
        if part >= self._broken or lessons.rules_out(part):
            return False
        if not tuner.space.is_valid(part):
            return True  # it cannot be asked; what breaks is then looked for among larger parts
        expected_s = max(Costs(tuner).expected_s(part), self._took_s)  # what breaks as well takes as long
        if self._left == 0 or expected_s > min(tuner.allowance_s, tuner.left_s):
            return None
        self._left -= 1
        return self._ask(part)

    def _ask(self, part: Switches) -> bool | None:
        tuner = self._tuner
        tuner.observer.stage(f"what broke {tuner.space.text(self._broken)}: is it {tuner.space.text(part)}?")
        with (
            tuner.spending("failed"),
            Group(tuner.door, NoJournal(), Observer(), tuner.order, is_shared=False) as group,
        ):
            spec = tuner.trial_spec(part)
            limit_s = max(round(tuner.allowance_s, 1), SHORTEST_PROBE_S)
            launch = msgspec.structs.replace(spec.launch, prepare_timeout_s=limit_s)
            entry = group.open(msgspec.structs.replace(spec, launch=launch), 0)
            record = entry.record if entry is not None else group.done[0]
        why = rejection(record, tuner.tune)
        if why is not None and why.about in EXACTLY:
            return None  # beside the others; alone it may do
        tuner.keep(probes=(*tuner.tune.probes, Probe(recipe=tuner.space.text(part), runs=why is None)))
        return why is None
