"""The state of a search while it runs: what was tried, what it may still spend, and where it is kept."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Protocol

import msgspec
import psutil

from redline.analyze.blocks import limit_bytes, needed_bytes, peak
from redline.launch.door import Door
from redline.model.note import Note
from redline.model.record import Failure, Numerics, RunRecord, TimeKind
from redline.model.spec import MeasureSpec, Recipe, RunSpec
from redline.search.group import Pending
from redline.search.observer import Journal, Observer
from redline.search.tune.estimates import Estimate, estimates
from redline.search.tune.lessons import Lessons, is_exact, overruled_by, quantizing_of, unproven
from redline.search.tune.record import Lesson, Trial, TuneRecord, TuneSpec
from redline.search.tune.space import BASELINE, Space, Switches
from redline.search.tune.winner import fallen_in_race

Clock = Callable[[], float]
"""Seconds that pass; a simulated bench has a clock of its own."""

Purpose = Literal["baseline", "trials", "race", "ablation", "batch", "failed", "other"]

SHORTEST_PREPARE_S = 30.0
"""However little is left of the budget, a worker that has begun may take this long."""
PROCESSORS_PER_GPU_JOB = 2
PROCESSORS_PER_CPU_JOB = 4
MOST_JOBS = 8
MEMORY_MARGIN = 1.5
"""A recipe may need this many times the memory of the baseline."""
METERED_BLOCK_S = 0.5
"""A counter of joules moves every 20 to 100 ms: blocks must be long enough for it."""
CLEARLY_SLOWER = 0.05
FULL_LOSS_PATH = 20
FAILED_SHARE = 0.1
"""Of the budget: what finding out why recipes break, and trying suspects, may take."""


class SearchKeeper(Protocol):
    """Where the state of the search is saved: `KeptSearches`, or nothing."""

    def save(self, record: TuneRecord) -> None: ...


@dataclass
class Tuner:
    """One search."""

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
    spent_before_s: float = 0.0
    """By sessions before this one."""
    before_s: float = 0.0
    """Spent in this session before the search began."""
    kept_back_s: float = 0.0
    """Of the budget, for what comes last."""
    is_short: bool = False
    """More was left to do than this session's budget held."""
    given_up: set[Switches] = field(default_factory=set)
    """Took too long to prepare in this session."""
    overdue: dict[Switches, float] = field(default_factory=dict)
    """Given up in this session after so many seconds, which is far more than others like it took."""
    twins: list[Pending] = field(default_factory=list)
    """Processes for the last race that are prepared together with the trial of their recipe."""
    lent: Switches | None = None
    """The recipe with twins whose process on trial will go on into the last race."""
    replicate_scale: float = 1.0
    """What replicates took over what they were expected to take."""
    _failed_before_s: float = 0.0
    _charged_s: float = 0.0
    """Of the clock, up to where all seconds are charged to a purpose."""
    _timed: tuple[tuple[Trial, ...], dict[Switches, Estimate]] | None = None
    _seen: tuple[object, tuple[Lesson, ...], dict[Switches, Estimate]] | None = None
    _fallen: tuple[tuple[object, ...], Collection[str]] | None = None
    _leader: tuple[tuple[object, ...], Estimate | None] | None = None
    """As of what was seen, checked and raced then."""
    _lessons: tuple[tuple[object, ...], Lessons] | None = None

    def __post_init__(self) -> None:
        self.started_s = self._charged_s = self.clock() - self.before_s
        self.spent_before_s = self.tune.seconds
        self._failed_before_s = self.tune.spent.failed

    @property
    def asked(self) -> TuneSpec:
        return self.tune.tune

    @cached_property
    def on_cpu(self) -> bool:
        return self.asked.spec.device.partition(":")[0] == "cpu"

    @property
    def only(self) -> TimeKind | None:
        """A latency target needs both kinds of block."""
        return None if self.asked.slo_p95_s is not None else self.asked.kind

    # Time

    @property
    def elapsed_s(self) -> float:
        """In this session."""
        return self.clock() - self.started_s

    @property
    def left_s(self) -> float:
        return self.budget_s - self.kept_back_s - self.elapsed_s

    @property
    def allowance_s(self) -> float:
        """What may still be spent on failures in this session."""
        return FAILED_SHARE * self.budget_s - (self.tune.spent.failed - self._failed_before_s)

    @contextmanager
    def spending(self, purpose: Purpose) -> Iterator[None]:
        """Charge the seconds inside to a purpose; what was charged to another one inside stays there."""
        self.charge("other")
        try:
            yield
        finally:
            self.charge(purpose)

    def charge(self, purpose: Purpose, seconds: float | None = None) -> None:
        """Charge seconds, or else all that passed since the last charge, to a purpose."""
        passed_s = self.clock() - self._charged_s
        seconds = passed_s if seconds is None else min(seconds, passed_s)
        self._charged_s += seconds
        spent = self.tune.spent
        changed = {purpose: getattr(spent, purpose) + seconds, "left": max(self.budget_s - self.elapsed_s, 0.0)}
        self.tune = msgspec.structs.replace(self.tune, spent=msgspec.structs.replace(spent, **changed))

    def charge_as_failed(self, seconds: float) -> None:
        """Seconds that were charged to trials went into one that failed."""
        spent = self.tune.spent
        moved_s = min(seconds, spent.trials)
        changed = msgspec.structs.replace(spent, trials=spent.trials - moved_s, failed=spent.failed + moved_s)
        self.tune = msgspec.structs.replace(self.tune, spent=changed)

    def has_memory_for(self, workers: int) -> bool:
        """Whether this many workers fit on the device at the same time, and one more on the host.

        By what the baseline needed; before it was timed, by what the facts say.
        """
        baseline, facts = self.baseline(), self.tune.facts
        record = self.records[baseline.record_id] if baseline is not None else None
        if record is None:
            if facts is None:
                return False
            limits = (facts.limit_bytes, self.asked.spec.launch.memory_limit_bytes)
            limit = min((each for each in limits if each is not None), default=None)
            return self._fits(facts.peak_bytes or 0, limit, workers)
        context = record.prepared.memory.context_bytes if record.prepared is not None else None
        needed, worker_bytes = (needed_bytes(record) or 0) + (context or 0), peak(record, "peak_rss_bytes")
        fits_host = worker_bytes is None or psutil.virtual_memory().available > 2 * worker_bytes
        return fits_host and self._fits(needed, limit_bytes(record), workers)

    @staticmethod
    def _fits(needed: int, limit: int | None, workers: int) -> bool:
        return not limit or MEMORY_MARGIN * needed * workers <= limit

    def twins_of(self, switches: Switches) -> int:
        """How many processes of this recipe the last race will find prepared."""
        return sum(self.recipe_of(each.record) == switches for each in self.twins) + (switches == self.lent)

    def recipe_of(self, record: RunRecord) -> Switches:
        return self.space.switches_of(str(record.spec.recipe))

    def drop_twins(self) -> None:
        """End those that no race has taken."""
        for pending in self.twins:
            pending.session.kill()
        self.twins.clear()
        self.lent = None

    # What is kept

    def keep(self, **changes: Any) -> None:
        """Whatever is known is on disk before the next worker is opened."""
        seconds = self.spent_before_s + self.elapsed_s
        self.tune = msgspec.structs.replace(self.tune, seconds=seconds, budget_s=self.budget_s, **changes)
        self.keeper.save(self.tune)

    def ran_short(self, note: Note) -> None:
        """The budget ended before something that is worth having."""
        self.is_short = True
        self.keep(notes=(*self.tune.notes, note))

    def learn(self, lesson: Lesson) -> None:
        if lesson not in self.tune.lessons:
            self.keep(lessons=(*self.tune.lessons, lesson))

    # What is known

    def timed(self) -> dict[Switches, Estimate]:
        """What was timed and kept its numbers in its trial, by its switches; also what the last race has rejected since."""
        trials = self.tune.trials
        if self._timed is None or self._timed[0] is not trials:
            found = {self.space.switches_of(text): each for text, each in estimates(self.tune, self.records).items()}
            self._timed = (trials, found)
        return self._timed[1]

    def seen(self) -> dict[Switches, Estimate]:
        """What was timed and kept its numbers, as far as is known."""
        timed, lessons = self.timed(), self.tune.lessons
        if self._seen is None or self._seen[0] is not timed or self._seen[1] is not lessons:
            found = {each: timed[each] for each in timed if overruled_by(each, lessons) is None}
            self._seen = (timed, lessons, found)
        return self._seen[2]

    def tried(self) -> set[Switches]:
        return {self.space.switches_of(trial.recipe) for trial in self.tune.trials}

    def broken(self) -> list[Switches]:
        """What failed or lost its numbers."""
        return [switches for switches in self.tried() if switches not in self.seen()]

    def lessons(self) -> Lessons:
        """What is ruled out and what is suspected by now."""
        tune = self.tune
        told = (tune.lessons, tune.probes, tune.trials, tune.earlier, tuple(self.overdue))
        if self._lessons is None or self._lessons[0] != told:
            ran = [self.space.switches_of(probe.recipe) for probe in tune.probes if probe.runs]
            broken = [(each, self._failure_of(each)) for each in self.tried() if each not in self.timed()]
            accused = [
                (switches, frozenset(failure.switches) & switches if failure is not None else frozenset())
                for switches, failure in broken
                if failure is None or (failure.kind != "oom" and failure.scope == "recipe")
            ]
            accused += [(switches, BASELINE) for switches in self.overdue]
            accused += [
                (frozenset(lesson.switches), BASELINE)
                for lesson in tune.lessons
                if lesson.overrules_trials and lesson.scope == "recipe" and not is_exact(lesson)
            ]
            doubted = [frozenset({choice.switch}) for choice in self.space.choices if choice.is_doubtful]
            doubted += [frozenset(part) for part in (tune.earlier.doubted if tune.earlier is not None else ())]
            compilers = [choice.switch for choice in self.space.choices if choice.capabilities.compiles]
            found = Lessons(tune.lessons, [*self.seen(), *ran], accused, self.space.kin, doubted, compilers)
            self._lessons = (told, found)
        return self._lessons[1]

    def _failure_of(self, switches: Switches) -> Failure | None:
        text = self.space.text(switches)
        record = next((self.records.get(each.record_id) for each in self.tune.trials if each.recipe == text), None)
        return record.failure if record is not None else None

    def baseline(self) -> Estimate | None:
        return self.seen().get(BASELINE)

    def silent_reference(self) -> Numerics | None:
        """What the baseline says of its outputs or losses, where nothing can be compared with them."""
        baseline = self.baseline()
        prepared = self.records[baseline.record_id].prepared if baseline is not None else None
        return prepared.numerics if prepared is not None and prepared.numerics.degenerate else None

    def leader(self) -> Estimate | None:
        """The fastest that may be recommended so far."""
        as_of = (self.seen(), self.tune.metrics, self.tune.finals)
        if self._leader is None or not _are_same(self._leader[0], as_of):
            known = [each for each in self.seen().values() if self.may_win(each)]
            self._leader = (as_of, min(known, key=lambda each: each.log_s, default=None))
        return self._leader[1]

    def is_slow_without_compiler(self, switches: Switches) -> bool:
        """Whether a recipe that compiles was slower than the baseline without its compiler, and not for the host's sake.

        Compiled it will hardly be the fastest. Where the step waits for the device by itself, nobody knows for whose sake.
        """
        choices = self.space.choices
        compilers = {choice.switch for choice in choices if choice.capabilities.compiles}
        graphs = {choice.switch for choice in choices if choice.relieves == "host"}
        plain, baseline = self.seen().get(switches - compilers - graphs), self.baseline()
        if plain is None or baseline is None or not compilers & switches or plain.is_host_bound:
            return False
        prepared = self.records[plain.record_id].prepared
        if prepared is not None and prepared.step_synchronises and not self.on_cpu:
            return False
        return plain.log_s > baseline.log_s + CLEARLY_SLOWER

    def may_win(self, each: Estimate) -> bool:
        return each.too_late is None and unproven(each.recipe, self.tune) is None and each.recipe not in self.fallen()

    def fallen(self) -> Collection[str]:
        """What the last race has rejected so far."""
        as_of = (self.tune.trials, self.tune.finals, self.tune.lessons)
        if self._fallen is None or not _are_same(self._fallen[0], as_of):
            self._fallen = (as_of, fallen_in_race(self.tune, self.records).keys())
        return self._fallen[1]

    def is_only_shown(self, switches: Switches) -> bool:
        """Quantized without a check, or in a way that a check has found wanting: shown, never recommended."""
        quantizing = quantizing_of(switches, self.tune)
        if self.asked.check is None:
            return bool(quantizing)
        fallen = [metric.recipe for metric in self.tune.metrics if unproven(metric.recipe, self.tune) is not None]
        return any(switch in self.space.switches_of(recipe) for recipe in fallen for switch in quantizing)

    def fastest_log_s(self) -> float:
        """Of all that may still win."""
        return min(each.log_s for switches, each in self.seen().items() if not self.is_only_shown(switches))

    # What is asked of the bench

    def trial_spec(self, switches: Switches) -> RunSpec:
        """Once a recipe has lost its numbers in the last race, trials look as closely as that."""
        checks_long = any(each.overrules_trials and each.reason.about == "numerics" for each in self.tune.lessons)
        return self.spec_of(switches, trial_measure(on_cpu=self.on_cpu, checks_long=checks_long))

    def spec_of(self, switches: Switches, measure: MeasureSpec, batch: int | None = None) -> RunSpec:
        spec = self.asked.spec
        patience_s = max(self.left_s, SHORTEST_PREPARE_S)
        launch = msgspec.structs.replace(
            spec.launch, prepare_timeout_s=min(spec.launch.prepare_timeout_s, round(patience_s, 1))
        )
        workload = spec.workload if batch is None else msgspec.structs.replace(spec.workload, batch=batch)
        recipe = Recipe.parse(self.space.text(switches))
        if self.asked.objective == "energy":
            measure = msgspec.structs.replace(measure, block_seconds=max(measure.block_seconds, METERED_BLOCK_S))
        return msgspec.structs.replace(spec, recipe=recipe, measure=measure, launch=launch, workload=workload)


def _are_same(ones: tuple[object, ...], others: tuple[object, ...]) -> bool:
    """The very same objects: what is kept of a search is replaced, never changed."""
    return all(one is other for one, other in zip(ones, others, strict=True))


def usual_jobs(spec: RunSpec) -> int:
    """Recipes that may be prepared at the same time on this machine.

    A worker that prepares for a GPU keeps about two processors busy, one for a CPU computes on all of them in between.
    """
    if spec.launch.door not in ("fork", "spawn"):
        return 1
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    each = PROCESSORS_PER_CPU_JOB if spec.device.partition(":")[0] == "cpu" else PROCESSORS_PER_GPU_JOB
    return min(max(processors // each, 1), MOST_JOBS)


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
