"""The state of a search while it runs: what was tried, what it may still spend, and where it is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import msgspec

from redline.analyze.tune.estimates import Estimate, estimates, quantizing_of, unproven
from redline.analyze.tune.record import Trial, TuneRecord, TuneSpec
from redline.launch.session import Door
from redline.record import BlockKind, RunRecord
from redline.search.batch import BatchObserver
from redline.search.interleave import Journal
from redline.search.race import RaceObserver
from redline.search.tune.space import BASELINE, Space, Steps
from redline.spec import MeasureSpec, Recipe, RunSpec

Clock = Callable[[], float]
"""Seconds that pass; a simulated bench has a clock of its own."""

SHORTEST_PREPARE_S = 30.0
"""However little is left of the budget, a worker that has begun may take this long."""


class TuneLedger(Protocol):
    """Where the search itself is kept: `redline.store.TuneLedger`, or nothing."""

    def save(self, record: TuneRecord) -> None: ...


class NoLedger:
    """Keeps nothing."""

    def save(self, record: TuneRecord) -> None: ...


class TuneObserver(RaceObserver, BatchObserver):
    """Is told of trials and of the leader as well."""

    def planned(self, tune: TuneRecord, recipes: int, budget_s: float) -> None: ...

    def attempting(self, recipe: str, number: int, why: str) -> None: ...

    def attempted(self, recipe: str, said: str) -> None: ...

    def leads(self, recipe: str, ratio: float) -> None: ...

    def stage(self, words: str) -> None: ...


@dataclass
class Tuner:
    """One search."""

    tune: TuneRecord
    space: Space
    door: Door
    journal: Journal
    ledger: TuneLedger
    observer: TuneObserver
    clock: Clock
    budget_s: float
    order: random.Random
    records: dict[str, RunRecord] = field(default_factory=dict)
    spent_before_s: float = 0.0
    """By sessions before this one."""
    started_s: float = 0.0
    kept_back_s: float = 0.0
    """Of the budget, for what comes last."""
    is_short: bool = False
    """More was left to do than this session's budget held."""
    heat_scale: float = 1.0
    """What heats took over what they were expected to take."""
    _seen: tuple[tuple[Trial, ...], dict[Steps, Estimate]] | None = None

    def __post_init__(self) -> None:
        self.started_s = self.clock()
        self.spent_before_s = self.tune.seconds

    @property
    def asked(self) -> TuneSpec:
        return self.tune.tune

    @cached_property
    def on_cpu(self) -> bool:
        return self.asked.spec.device.partition(":")[0] == "cpu"

    @property
    def only(self) -> BlockKind | None:
        """A latency target needs both kinds of block."""
        return None if self.asked.slo_p95_s is not None else self.asked.kind

    @property
    def left_s(self) -> float:
        return self.budget_s - self.kept_back_s - (self.clock() - self.started_s)

    def keep(self, **changes: Any) -> None:
        """Whatever is known is on disk before the next worker is opened."""
        seconds = self.spent_before_s + self.clock() - self.started_s
        self.tune = msgspec.structs.replace(self.tune, seconds=seconds, **changes)
        self.ledger.save(self.tune)

    def ran_short(self, note: str) -> None:
        """The budget ended before something that is worth having."""
        self.is_short = True
        self.keep(notes=(*self.tune.notes, note))

    def seen(self) -> dict[Steps, Estimate]:
        """What was timed and kept its numbers, by its steps."""
        trials = self.tune.trials
        if self._seen is None or self._seen[0] is not trials:
            found = {self.space.steps_of(text): each for text, each in estimates(self.tune, self.records).items()}
            self._seen = (trials, found)
        return self._seen[1]

    def broken(self) -> list[Steps]:
        """What failed or lost its numbers."""
        return [steps for steps in self.tried() if steps not in self.seen()]

    def tried(self) -> set[Steps]:
        return {self.space.steps_of(trial.recipe) for trial in self.tune.trials}

    def leader(self) -> Estimate | None:
        """The fastest that may be recommended so far."""
        known = [each for each in self.seen().values() if self.may_win(each)]
        return min(known, key=lambda each: each.log_s, default=None)

    def may_win(self, each: Estimate) -> bool:
        return each.too_late is None and unproven(each.recipe, self.tune) is None

    def is_only_shown(self, steps: Steps) -> bool:
        """Quantized without a check, or in a way that a check has found wanting: shown, never recommended."""
        quantizing = quantizing_of(steps, self.tune)
        if self.asked.check is None:
            return bool(quantizing)
        fallen = [metric.recipe for metric in self.tune.metrics if unproven(metric.recipe, self.tune) is not None]
        return any(step in self.space.steps_of(recipe) for recipe in fallen for step in quantizing)

    def fastest_log_s(self) -> float:
        """Of all that may still win."""
        return min(each.log_s for steps, each in self.seen().items() if not self.is_only_shown(steps))

    def baseline(self) -> Estimate | None:
        return self.seen().get(BASELINE)

    def trial_spec(self, steps: Steps) -> RunSpec:
        return self.spec_of(steps, trial_measure(on_cpu=self.on_cpu))

    def spec_of(self, steps: Steps, measure: MeasureSpec, batch: int | None = None) -> RunSpec:
        spec = self.asked.spec
        patience_s = max(self.left_s, SHORTEST_PREPARE_S)
        launch = msgspec.structs.replace(
            spec.launch, prepare_timeout_s=min(spec.launch.prepare_timeout_s, round(patience_s, 1))
        )
        workload = spec.workload if batch is None else msgspec.structs.replace(spec.workload, batch=batch)
        recipe = Recipe.parse(self.space.text(steps))
        return msgspec.structs.replace(spec, recipe=recipe, measure=measure, launch=launch, workload=workload)


def trial_measure(*, on_cpu: bool) -> MeasureSpec:
    """Short looks: what matters is which recipes are worth a longer one."""
    return msgspec.structs.replace(
        MeasureSpec.for_effort("quick"),
        block_seconds=0.25 if on_cpu else 0.1,
        warmup_max_seconds=3.0,
        max_seconds=5.0,
    )
