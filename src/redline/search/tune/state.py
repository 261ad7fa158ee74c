"""The state of a search while it runs knows what was tried and seen, what may still be spent, and where it is kept."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, cast

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
from redline.search.tune.lessons import (
    FULL_LOSS_PATH,
    Lessons,
    is_checked_long,
    overruled_by,
    quantizing_of,
    rejection,
    unproven,
)
from redline.search.tune.record import Lesson, TuneRecord, TuneSpec
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.standings import Estimate, Standings

Clock = Callable[[], float]
"""Seconds that pass; a simulated bench has a clock of its own."""
Purpose = Literal["baseline", "trials", "race", "ablation", "batch", "failed", "other"]

FAILED_SHARE = 0.1
"""Recipes that break or are given up may take this share of the budget, as `redline tune` promises."""
RESERVE = 0.03
"""This share of the budget is kept for closing workers and writing the code, which come after all that is planned."""


class SearchKeeper(Protocol):
    """Saves the state of the search; `KeptSearches` does, others keep nothing."""

    def save(self, record: TuneRecord) -> None: ...


T = TypeVar("T")


def derived(*fields: str) -> Callable[[Callable[[Search], T]], Callable[[Search], T]]:
    """Computes what follows from these fields of the kept search once for the same values of them."""

    def decorate(make: Callable[[Search], T]) -> Callable[[Search], T]:
        def once(search: Search) -> T:
            as_of = [getattr(search.tune, name) for name in fields]
            known = search._derived.get(make.__name__)
            if known is None or any(one is not other for one, other in zip(known[0], as_of, strict=True)):
                known = search._derived[make.__name__] = (as_of, make(search))
            return cast("T", known[1])

        return once

    return decorate


@dataclass
class Search:
    """One search for the fastest recipe."""

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
    """Recipes that may be prepared at the same time."""
    before_s: float = 0.0
    """The seconds that were spent in this session before the search began."""
    kept_back_s: float = 0.0
    """The seconds of the budget that are kept for the batch, which comes last."""
    is_short: bool = False
    """More was left to do than this session's budget held."""
    given_up: set[Switches] = field(default_factory=set)
    """The recipes that were begun in this session and were not ready in time."""
    guess: Switches | None = None
    """Raced without a trial, where there was no time to try anything."""
    held: list[Pending] = field(default_factory=list)
    """Processes that are prepared beside a trial, for the last race."""
    _charged_s: float = 0.0
    """The time up to which all seconds are charged to a purpose."""
    _derived: dict[str, tuple[list[object], Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.started_s = self._charged_s = self.clock() - self.before_s
        self._spent_before_s, self._failed_before_s = self.tune.seconds, self.tune.spent.failed

    @property
    def asked(self) -> TuneSpec:
        return self.tune.tune

    @cached_property
    def on_cpu(self) -> bool:
        return self.asked.spec.device.partition(":")[0] == "cpu"

    @cached_property
    def fewest(self) -> int:
        """Replicates of the shortest race that gives an interval, which needs two."""
        return min(2, self.asked.replicates)

    @property
    def only(self) -> TimeKind | None:
        """The one kind of block to measure; a latency target needs both."""
        return None if self.asked.slo_p95_s is not None else self.asked.kind

    @cached_property
    def runner(self) -> Race:
        """Runs replicates in fresh processes, and remembers in which order it opened the last."""
        return Race(
            self.door,
            self.journal,
            self.observer,
            self.order,
            only=self.only,
            planned=self.asked.replicates,
            left_s=lambda: self.left_s,
        )

    # Time

    @property
    def elapsed_s(self) -> float:
        """In this session."""
        return self.clock() - self.started_s

    @property
    def left_s(self) -> float:
        """The seconds left of the budget, less what comes last: the batch, and writing the code."""
        return (1 - RESERVE) * self.budget_s - self.kept_back_s - self.elapsed_s

    @property
    def allowance_s(self) -> float:
        """The seconds that may still be lost on failures in this session."""
        return FAILED_SHARE * self.budget_s - (self.tune.spent.failed - self._failed_before_s)

    @contextmanager
    def spending(self, purpose: Purpose) -> Iterator[None]:
        """Charge the seconds inside to a purpose; what was charged to another one inside stays there."""
        self.charge("other")
        try:
            yield
        finally:
            self.charge(purpose)

    def charge(self, purpose: Purpose) -> None:
        """Charges all that passed since the last charge to a purpose."""
        now_s = self.clock()
        self._move({purpose: now_s - self._charged_s})
        self._charged_s = now_s

    def charge_as_failed(self, seconds: float) -> None:
        """Seconds that were charged to trials went into one that failed."""
        lost_s = min(seconds, self.tune.spent.trials)
        self._move({"trials": -lost_s, "failed": lost_s})

    def _move(self, seconds: Mapping[str, float]) -> None:
        spent = self.tune.spent
        changed = {purpose: getattr(spent, purpose) + more for purpose, more in seconds.items()}
        changed["left"] = max(self.budget_s - self.elapsed_s, 0.0)
        self.tune = msgspec.structs.replace(self.tune, spent=msgspec.structs.replace(spent, **changed))

    # Memory

    def has_memory_for(self, workers: int) -> bool:
        """Returns whether so many workers fit on the device beside each other, half as large again as the baseline, and one more on the host.

        By what the baseline needed; before it was timed, by what the facts say.
        """
        baseline, facts = self.baseline(), self.tune.facts
        if baseline is None:
            limits = [facts.limit_bytes, self.asked.spec.launch.memory_limit_bytes] if facts is not None else []
            known = [limit for limit in limits if limit is not None]
            return facts is not None and (not known or 1.5 * workers * (facts.peak_bytes or 0) <= min(known))
        record = self.records[baseline.record_id]
        context = record.prepared.memory.context_bytes if record.prepared is not None else None
        memory = memory_of(record) or Memory()
        needed, limit, resident = memory.needed_bytes or 0, memory.limit_bytes, memory.peak_rss_bytes
        fits_host = resident is None or psutil.virtual_memory().available > 2 * resident
        return fits_host and (not limit or 1.5 * workers * (needed + (context or 0)) <= limit)

    def held_of(self, switches: Switches) -> int:
        """How many processes of this recipe the last race will find prepared."""
        return sum(self.recipe_of(pending.record) == switches for pending in self.held)

    def drop_held(self) -> None:
        """End the processes that no race has taken."""
        for pending in self.held:
            pending.session.kill()
        self.held.clear()

    # What is kept

    def keep(self, **changes: Any) -> None:
        """Whatever is known is on disk before the next worker is opened."""
        seconds = self._spent_before_s + self.elapsed_s
        self.tune = msgspec.structs.replace(self.tune, seconds=seconds, budget_s=self.budget_s, **changes)
        self.keeper.save(self.tune)

    def tell(self, *notes: Note) -> None:
        self.keep(notes=(*self.tune.notes, *notes))

    def ran_short(self, note: Note) -> None:
        """The budget ended before something that is worth having."""
        self.is_short = True
        self.tell(note)

    def learn(self, lesson: Lesson) -> None:
        if lesson not in self.tune.lessons:
            self.keep(lessons=(*self.tune.lessons, lesson))

    # What is known

    @derived("trials", "lessons", "finals", "metrics")
    def standings(self) -> Standings:
        """Returns how the recipes stand against the baseline by now, at the first batch."""
        return Standings(self.tune, self.records)

    @derived("trials")
    def timed(self) -> dict[Switches, Estimate]:
        """Returns what was timed and kept its numbers in its trial, by its switches; also what the last race has rejected since."""
        return {self.space.switches_of(text): estimate for text, estimate in self.standings().trials.items()}

    @derived("trials", "lessons", "finals")
    def seen(self) -> dict[Switches, Estimate]:
        """Returns what was timed and is still believed to keep its numbers."""
        return {switches: each for switches, each in self.timed().items() if not self._is_doubted(switches)}

    def _is_doubted(self, switches: Switches) -> bool:
        """Returns whether a longer check has found its numbers wrong, or probably would, as it has found others like it wrong."""
        if overruled_by(switches, self.tune.lessons) is not None:
            return True
        overruling = any(lesson.overrules_trials for lesson in self.tune.lessons)
        return overruling and switches not in self.checked_long() and self.lessons().chance(switches) < 0.5

    def checked_long(self) -> set[Switches]:
        """Returns the recipes whose numbers held over as many steps as the last race looks at."""
        sound = (record for record in self.records.values() if is_checked_long(record))
        return {self.recipe_of(record) for record in sound if rejection(record, self.tune) is None}

    def tried(self) -> set[Switches]:
        """Returns what need not be tried again. What is doubted since may be looked at more closely."""
        ruled_out = self.lessons()
        tried = {self.space.switches_of(trial.recipe) for trial in self.tune.trials}
        doubted = self.timed().keys() - self.seen().keys()
        return tried - {switches for switches in doubted if not ruled_out.rules_out(switches)}

    @derived("lessons", "trials", "finals", "earlier")
    def lessons(self) -> Lessons:
        """Returns what is ruled out and what is suspected by now."""
        tune = self.tune
        overruling = any(lesson.overrules_trials for lesson in tune.lessons)
        sound = {*self.checked_long(), BASELINE} if overruling else self.timed().keys()
        doubted = [frozenset({choice.switch}) for choice in self.space.choices if choice.is_doubtful]
        doubted += [frozenset(part) for part in (tune.earlier.doubted if tune.earlier is not None else ())]
        return Lessons(tune.lessons, sound, self.timed().keys(), self.space.kin, doubted)

    def baseline(self) -> Estimate | None:
        return self.timed().get(BASELINE)

    def ranked(self) -> list[Switches]:
        """Returns what may be recommended for all that is known, the fastest first."""
        able = [switches for switches, estimate in self.seen().items() if self.may_win(estimate)]
        return sorted(able, key=lambda switches: self.seen()[switches].log_s)

    def leader(self) -> Switches | None:
        return next(iter(self.ranked()), None)

    def may_win(self, estimate: Estimate) -> bool:
        return estimate.too_late is None and unproven(estimate.recipe, self.tune) is None

    def is_only_shown(self, switches: Switches) -> bool:
        """Quantized without a check, or in a way that a check has found wanting: shown, never recommended."""
        quantizing = quantizing_of(switches, self.tune)
        if self.asked.check is None:
            return bool(quantizing)
        fallen = [metric.recipe for metric in self.tune.metrics if unproven(metric.recipe, self.tune) is not None]
        return any(switch in self.space.switches_of(recipe) for recipe in fallen for switch in quantizing)

    def fastest_log_s(self) -> float:
        """Returns the fastest time of all that may still win."""
        return min(each.log_s for switches, each in self.seen().items() if not self.is_only_shown(switches))

    # Questions to the bench

    def recipe_of(self, record: RunRecord) -> Switches:
        return self.space.switches_of(str(record.spec.recipe))

    def trial_spec(self, switches: Switches) -> RunSpec:
        """Once a recipe has lost its numbers in the last race, trials look as closely as that."""
        lost = any(lesson.overrules_trials and lesson.reason.about == "numerics" for lesson in self.tune.lessons)
        return self.spec_of(switches, trial_measure(on_cpu=self.on_cpu, checks_long=lost))

    def spec_of(self, switches: Switches, measure: MeasureSpec, batch: int | None = None) -> RunSpec:
        """A worker that has begun may take half a minute, however little is left of the budget."""
        spec = self.asked.spec
        patience_s = min(spec.launch.prepare_timeout_s, round(max(self.left_s, 30.0), 1))
        if self.asked.objective == "energy":  # a counter of joules moves every 20 to 100 ms
            measure = msgspec.structs.replace(measure, block_seconds=max(measure.block_seconds, 0.5))
        workload = spec.workload if batch is None else msgspec.structs.replace(spec.workload, batch=batch)
        return msgspec.structs.replace(
            spec,
            recipe=Recipe.parse(self.space.text(switches)),
            measure=measure,
            launch=msgspec.structs.replace(spec.launch, prepare_timeout_s=patience_s),
            workload=workload,
        )


def usual_jobs(spec: RunSpec) -> int:
    """Recipes that may be prepared at the same time on this machine.

    A worker that prepares for a GPU keeps about two processors busy, one for a CPU computes on all of them in between.
    """
    if spec.launch.door not in ("fork", "spawn"):
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(max(processors // (4 if spec.device.partition(":")[0] == "cpu" else 2), 1), 8)


def trial_measure(*, on_cpu: bool, checks_long: bool = False) -> MeasureSpec:
    """Short looks: what matters is which recipes are worth a longer one. `checks_long`: numbers as in the last race."""
    quick = MeasureSpec.for_effort("quick")
    return msgspec.structs.replace(
        quick,
        block_seconds=0.25 if on_cpu else 0.1,
        warmup_max_seconds=3.0,
        max_seconds=5.0,
        loss_path_steps=FULL_LOSS_PATH if checks_long else quick.loss_path_steps,
    )


def final_measure(*, on_cpu: bool, checks: bool, hurried: bool = False) -> MeasureSpec:
    """`hurried`: two short replicates say more than one long one."""
    return msgspec.structs.replace(
        MeasureSpec.for_effort("quick"),
        block_seconds=0.25 if on_cpu else 0.1,
        min_rounds=4 if hurried else 6,
        max_seconds=(15.0 if on_cpu else 10.0) * (0.4 if hurried else 1.0),
        warmup_max_seconds=2.0 if hurried else 5.0,
        loss_path_steps=FULL_LOSS_PATH,
        check_numerics=checks,
        sparing=not checks,
    )
