"""The state of a search while it runs knows what was tried and seen, what may still be spent, and where it is kept."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
import psutil

from redline.analyze.blocks import memory_of
from redline.launch.door import Door
from redline.model.note import Note
from redline.model.record import Memory, RunRecord, TimeKind
from redline.model.spec import MeasureSpec, Recipe, RunSpec
from redline.search.decide import Race
from redline.search.group import Pending
from redline.search.observer import Journal, Observer
from redline.search.tune.lessons import Lessons, is_checked_long, overruled_by, quantizing_of, rejection, unproven
from redline.search.tune.record import Lesson, TuneRecord, TuneSpec
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.standings import Estimate, Standings

Clock = Callable[[], float]
"""A clock returns seconds; a simulated bench has one of its own."""
Purpose = Literal["baseline", "trials", "race", "ablation", "failed", "other"]

FAILED_SHARE = 0.1
"""Recipes that break or are given up may take this share of the budget, as `redline tune` promises."""
RESERVE = 0.03
"""This share of the budget is kept for closing workers and writing the code, which come after all that is planned."""
DERIVED = ("standings", "timed", "lessons", "seen")
"""These attributes follow from the kept search. They are computed once for each state of it, and dropped when it changes."""


class SearchKeeper(Protocol):
    """A keeper saves the state of the search. `KeptSearches` does so; others keep nothing."""

    def save(self, record: TuneRecord) -> None: ...


@dataclass
class Search:
    """This is one search for the fastest recipe."""

    tune: TuneRecord
    space: Space
    door: Door
    journal: Journal
    keeper: SearchKeeper
    observer: Observer
    clock: Clock
    budget_s: float
    order: random.Random
    records: dict[str, RunRecord] = field(default_factory=dict)
    jobs: int = 1
    """This many recipes may be prepared at the same time."""
    before_s: float = 0.0
    """This many seconds were spent in this session before the search began."""
    is_short: bool = False
    """It is True if more was left to do than this session's budget held."""
    given_up: set[Switches] = field(default_factory=set)
    """These recipes were begun in this session and were not ready in time."""
    held: list[Pending] = field(default_factory=list)
    """These processes are prepared beside a trial, for the last race."""

    def __post_init__(self) -> None:
        self.started_s = self._charged_s = self.clock() - self.before_s
        self._spent_before_s, self._failed_before_s = self.tune.seconds, self.tune.spent.failed

    @property
    def asked(self) -> TuneSpec:
        return self.tune.tune

    @cached_property
    def on_cpu(self) -> bool:
        return is_on_cpu(self.asked.spec)

    @cached_property
    def fewest(self) -> int:
        """Returns how many replicates the shortest race has that gives an interval, which needs two."""
        return min(2, self.asked.replicates)

    @property
    def only(self) -> TimeKind | None:
        """Returns the one kind of block to measure; None means both kinds, which a latency target needs."""
        return None if self.asked.slo_p95_s is not None else self.asked.kind

    @cached_property
    def runner(self) -> Race:
        """Returns what runs replicates in fresh processes. It is kept, because it remembers in which order it has opened the last."""
        race = Race(self.door, self.journal, self.observer, self.order, only=self.only, planned=self.asked.replicates)
        race.left_s = lambda: self.left_s
        return race

    # Time

    @property
    def elapsed_s(self) -> float:
        """Returns the seconds that have passed in this session."""
        return self.clock() - self.started_s

    @property
    def left_s(self) -> float:
        """Returns the seconds that are left of the budget, less those for what comes last."""
        return (1 - RESERVE) * self.budget_s - self.elapsed_s

    @property
    def allowance_s(self) -> float:
        """Returns the seconds that may still be lost on failures in this session."""
        return FAILED_SHARE * self.budget_s - (self.tune.spent.failed - self._failed_before_s)

    def charge(self, purpose: Purpose, failed_s: float = 0.0) -> None:
        """Charges all that passed since the last charge to a purpose.

        Of what trials took until now, `failed_s` went into one that failed.
        """
        now_s, spent = self.clock(), self.tune.spent
        spent = msgspec.structs.replace(spent, **{purpose: getattr(spent, purpose) + now_s - self._charged_s})
        failed_s, left_s = min(failed_s, spent.trials), max(self.budget_s - self.elapsed_s, 0.0)
        changed = {"trials": spent.trials - failed_s, "failed": spent.failed + failed_s, "left": left_s}
        self.tune = msgspec.structs.replace(self.tune, spent=msgspec.structs.replace(spent, **changed))
        self._charged_s = now_s

    # Memory

    def has_memory_for(self, workers: int) -> bool:
        """Returns whether this many workers fit on the device beside each other, and one more on the host.

        Each is taken to need half as much again as the baseline did, or as the facts say before the baseline was timed.
        """
        baseline, facts, resident = self.baseline(), self.tune.facts, 0
        if baseline is not None:
            record = self.records[baseline.record_id]
            context = record.prepared.memory.context_bytes if record.prepared is not None else None
            memory = memory_of(record) or Memory()
            needed, limit = (memory.needed_bytes or 0) + (context or 0), memory.limit_bytes
            resident = memory.peak_rss_bytes or 0
        elif facts is not None:
            limits = facts.limit_bytes, self.asked.spec.launch.memory_limit_bytes
            needed, limit = facts.peak_bytes or 0, min(filter(None, limits), default=None)
        else:
            return False
        return psutil.virtual_memory().available > 2 * resident and (not limit or 1.5 * workers * needed <= limit)

    def held_of(self, switches: Switches) -> int:
        """Returns how many processes of this recipe the last race will find prepared."""
        return sum(self.recipe_of(pending.record) == switches for pending in self.held)

    def drop_held(self) -> None:
        """Ends the processes that no race has taken."""
        while self.held:
            self.held.pop().session.kill()

    # What is kept

    def keep(self, **changes: Any) -> None:
        """Changes the search and saves it, so that whatever is known is on disk before the next worker is opened."""
        seconds = self._spent_before_s + self.elapsed_s
        self.tune = msgspec.structs.replace(self.tune, seconds=seconds, budget_s=self.budget_s, **changes)
        for name in DERIVED:
            self.__dict__.pop(name, None)
        self.keeper.save(self.tune)

    def tell(self, told: Note, *, is_short: bool = False) -> None:
        """Adds a note to the search. `is_short` says that the budget ended before something that is worth having."""
        self.is_short |= is_short
        self.keep(notes=(*self.tune.notes, told))

    def learn(self, lesson: Lesson) -> None:
        if lesson not in self.tune.lessons:
            self.keep(lessons=(*self.tune.lessons, lesson))

    # What is known

    @cached_property
    def standings(self) -> Standings:
        """Returns how the recipes stand against the baseline by now, which is at the first batch."""
        return Standings(self.tune, self.records)

    @cached_property
    def timed(self) -> dict[Switches, Estimate]:
        """Returns what was timed and has kept its numbers in its trial, by its switches, even if the last race has rejected it since."""
        return {self.space.switches_of(text): estimate for text, estimate in self.standings.trials.items()}

    @cached_property
    def lessons(self) -> Lessons:
        """Returns what is ruled out and what is suspected by now."""
        sound = {*self.checked_long(), BASELINE} if self._is_overruled else self.timed.keys()
        doubted = [choice.switch for choice in self.space.choices if choice.is_doubtful]
        return Lessons(self.tune.lessons, sound, self.timed.keys(), self.space.kin, doubted)

    @cached_property
    def seen(self) -> dict[Switches, Estimate]:
        """Returns what was timed and is still believed to keep its numbers: no longer check has found them wrong, or is likely to."""
        doubted: set[Switches] = set()
        if self._is_overruled:
            likely = {each for each in self.timed if self.lessons.chance(each) >= 0.5} | self.checked_long()
            doubted = {each for each in self.timed if each not in likely or overruled_by(each, self.tune.lessons)}
        return {switches: each for switches, each in self.timed.items() if switches not in doubted}

    @property
    def _is_overruled(self) -> bool:
        return any(lesson.overrules_trials for lesson in self.tune.lessons)

    def checked_long(self) -> set[Switches]:
        """Returns the recipes whose numbers have held over as many steps as the last race looks at."""
        sound = (record for record in self.records.values() if is_checked_long(record))
        return {self.recipe_of(record) for record in sound if rejection(record, self.tune) is None}

    def tried(self) -> set[Switches]:
        """Returns what need not be tried again. What has come into doubt since may be looked at more closely."""
        doubted = self.timed.keys() - self.seen.keys()
        tried = {self.space.switches_of(trial.recipe) for trial in self.tune.trials}
        return tried - {switches for switches in doubted if not self.lessons.rules_out(switches)}

    def baseline(self) -> Estimate | None:
        return self.timed.get(BASELINE)

    def ranked(self) -> list[Switches]:
        """Returns the recipes that may be recommended for all that is known; the fastest comes first."""
        able = [one for one, each in self.seen.items() if not (each.too_late or unproven(each.recipe, self.tune))]
        return sorted(able, key=lambda switches: self.seen[switches].log_s)

    def leader(self) -> Switches | None:
        return next(iter(self.ranked()), None)

    def is_only_shown(self, switches: Switches) -> bool:
        """Returns whether a recipe is shown and never recommended: it is quantized without a check, or in a way that has failed one."""
        quantizing = quantizing_of(switches, self.tune)
        if self.asked.check is None:
            return bool(quantizing)
        fallen = [metric.recipe for metric in self.tune.metrics if unproven(metric.recipe, self.tune) is not None]
        return any(switch in self.space.switches_of(recipe) for recipe in fallen for switch in quantizing)

    # Questions to the bench

    def recipe_of(self, record: RunRecord) -> Switches:
        return self.space.switches_of(str(record.spec.recipe))

    def trial_spec(self, switches: Switches) -> RunSpec:
        """Returns the spec of a trial. Once a recipe has lost its numbers in the last race, trials look as closely as that race."""
        lost = any(lesson.overrules_trials and lesson.reason.about == "numerics" for lesson in self.tune.lessons)
        return self.spec_of(switches, trial_measure(on_cpu=self.on_cpu, checks_long=lost))

    def race_spec(self, switches: Switches, *, checks: bool) -> RunSpec:
        longer_s = 15.0 if self.on_cpu else 10.0
        measure = trial_measure(on_cpu=self.on_cpu, checks_long=True)
        changes = {"max_seconds": longer_s, "check_numerics": checks, "sparing": not checks}
        return self.spec_of(switches, msgspec.structs.replace(measure, **changes))

    def spec_of(self, switches: Switches, measure: MeasureSpec) -> RunSpec:
        """Returns the spec of a recipe. Its worker may take half a minute to prepare, however little is left of the budget."""
        spec, replace = self.asked.spec, msgspec.structs.replace
        patience_s = min(spec.launch.prepare_timeout_s, round(max(self.left_s, 30.0), 1))
        if self.asked.objective == "energy":  # a counter of joules moves every 20 to 100 ms
            measure = replace(measure, block_seconds=max(measure.block_seconds, 0.5))
        return replace(
            spec,
            recipe=Recipe.parse(self.space.text(switches)),
            measure=measure,
            launch=replace(spec.launch, prepare_timeout_s=patience_s),
        )


def is_on_cpu(spec: RunSpec) -> bool:
    return spec.device.partition(":")[0] == "cpu"


def usual_jobs(spec: RunSpec) -> int:
    """Returns how many recipes may be prepared at the same time on this machine.

    A worker that prepares for a GPU keeps about two processors busy; one for a CPU computes on all of them in between.
    """
    if spec.launch.door not in ("fork", "spawn"):
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(processors // (4 if is_on_cpu(spec) else 2), 1), 8)


def trial_measure(*, on_cpu: bool, checks_long: bool = False) -> MeasureSpec:
    """Returns settings for a short look, which only has to tell which recipes are worth a longer one.

    With `checks_long` numbers are checked as in the last race.
    """
    quick = MeasureSpec.for_effort("quick")
    return msgspec.structs.replace(
        quick,
        block_seconds=0.25 if on_cpu else 0.1,
        warmup_max_seconds=3.0,
        max_seconds=5.0,
        loss_path_steps=(MeasureSpec() if checks_long else quick).loss_path_steps,
    )
