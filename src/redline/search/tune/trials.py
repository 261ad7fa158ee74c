"""The state of a search while it runs: what was tried, what it may still spend, and where it is kept."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import TracebackType
from typing import Any, Protocol

import msgspec

from redline.analyze.race import log_ratio
from redline.launch.door import Door
from redline.note import Note
from redline.record import BlockKind, RunRecord
from redline.search.group import FEWEST_SOLO_BLOCKS, Entry, Group, StopRule
from redline.search.observer import Journal, Observer
from redline.search.tune.estimates import (
    Estimate,
    accepts,
    estimates,
    numerics_reason,
    quantizing_of,
    rejection,
    unproven,
)
from redline.search.tune.record import Trial, TuneRecord, TuneSpec
from redline.search.tune.space import BASELINE, Space, Switches
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


@dataclass
class Tuner:
    """One search."""

    tune: TuneRecord
    space: Space
    door: Door
    journal: Journal
    ledger: TuneLedger
    observer: Observer
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
    replicate_scale: float = 1.0
    """What replicates took over what they were expected to take."""
    _seen: tuple[tuple[Trial, ...], dict[Switches, Estimate]] | None = None

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

    def ran_short(self, why: Note) -> None:
        """The budget ended before something that is worth having."""
        self.is_short = True
        self.keep(notes=(*self.tune.notes, why))

    def seen(self) -> dict[Switches, Estimate]:
        """What was timed and kept its numbers, by its switches."""
        trials = self.tune.trials
        if self._seen is None or self._seen[0] is not trials:
            found = {self.space.switches_of(text): each for text, each in estimates(self.tune, self.records).items()}
            self._seen = (trials, found)
        return self._seen[1]

    def broken(self) -> list[Switches]:
        """What failed or lost its numbers."""
        return [switches for switches in self.tried() if switches not in self.seen()]

    def tried(self) -> set[Switches]:
        return {self.space.switches_of(trial.recipe) for trial in self.tune.trials}

    def leader(self) -> Estimate | None:
        """The fastest that may be recommended so far."""
        known = [each for each in self.seen().values() if self.may_win(each)]
        return min(known, key=lambda each: each.log_s, default=None)

    def may_win(self, each: Estimate) -> bool:
        return each.too_late is None and unproven(each.recipe, self.tune) is None

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

    def baseline(self) -> Estimate | None:
        return self.seen().get(BASELINE)

    def trial_spec(self, switches: Switches) -> RunSpec:
        return self.spec_of(switches, trial_measure(on_cpu=self.on_cpu))

    def spec_of(self, switches: Switches, measure: MeasureSpec, batch: int | None = None) -> RunSpec:
        spec = self.asked.spec
        patience_s = max(self.left_s, SHORTEST_PREPARE_S)
        launch = msgspec.structs.replace(
            spec.launch, prepare_timeout_s=min(spec.launch.prepare_timeout_s, round(patience_s, 1))
        )
        workload = spec.workload if batch is None else msgspec.structs.replace(spec.workload, batch=batch)
        recipe = Recipe.parse(self.space.text(switches))
        return msgspec.structs.replace(spec, recipe=recipe, measure=measure, launch=launch, workload=workload)


def trial_measure(*, on_cpu: bool) -> MeasureSpec:
    """Short looks: what matters is which recipes are worth a longer one."""
    return msgspec.structs.replace(
        MeasureSpec.for_effort("quick"),
        block_seconds=0.25 if on_cpu else 0.1,
        warmup_max_seconds=3.0,
        max_seconds=5.0,
    )


FEWEST_ROUNDS = 3
MOST_ROUNDS = 8
CONTENT_ERROR = 0.004
CLEARLY = 2.5
"""Standard errors by which a recipe must be behind before it is given up early."""
BEHIND = 0.02


@dataclass
class UntilPlaced(StopRule):
    """A candidate in turns with the fastest so far: more rounds for those who may win than for those clearly behind."""

    candidate: Entry
    kind: BlockKind

    def visited(self, entries: Sequence[Entry]) -> list[Entry]:
        return super().visited(entries) if self.candidate.stopped is None else []

    def after_round(self, entries: Sequence[Entry], rounds: int) -> None:
        if self.candidate.is_sound and self._has_seen_enough(entries):
            self.candidate.stopped = "target"

    def _has_seen_enough(self, entries: Sequence[Entry]) -> bool:
        entry = self.candidate
        rounds = max((len(blocks) for blocks in entry.blocks.values()), default=0)
        if entry.timed_s >= entry.spec.measure.max_seconds:
            return True
        if rounds < FEWEST_ROUNDS:
            return False
        anchor = next((each for each in entries if each is not entry and each.is_sound), None)
        log = log_ratio(anchor.record, entry.record, self.kind) if anchor is not None else None
        if log is None or rounds >= MOST_ROUNDS:
            return rounds >= MOST_ROUNDS
        is_behind = log.mean + CLEARLY * max(log.error, CONTENT_ERROR) < -BEHIND
        return is_behind or (log.error <= CONTENT_ERROR and rounds > FEWEST_ROUNDS)


class Trials:
    """Context manager: the worker of the fastest recipe so far lives as long as it does."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._anchor: Entry | None = None
        self._group = Group(
            tuner.door,
            tuner.journal,
            tuner.observer,
            tuner.order,
            only=tuner.only,
            solo_blocks=FEWEST_SOLO_BLOCKS,
        )

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()
        self._group.__exit__(kind, error, trace)
        self._tuner.records.update((record.id, record) for record in self._group.done.values())

    def attempt(self, switches: Switches) -> None:
        """Open, check the numbers, and only then time; the trial is kept, whatever became of it."""
        tuner, text = self._tuner, self._tuner.space.text(switches)
        started_s, position = tuner.clock(), len(tuner.tune.trials)
        entry = self._open(switches, position)
        anchor_id = None
        if entry is not None and self._is_right(entry):
            anchor_id = self._anchor.record.id if self._anchor is not None else None
            self._measure(entry)
        cost_s = tuner.clock() - started_s
        record = self._group.done[position] if entry is None else entry.record
        trial = Trial(recipe=text, record_id=record.id, anchor_id=anchor_id, cost_s=cost_s)
        tuner.records[record.id] = record
        said = self._settle(entry) if entry is not None else rejection(record, tuner.tune)
        tuner.keep(trials=(*tuner.tune.trials, trial))
        tuner.observer.attempted(text, str(said or ""))
        self._tell_leader()

    def _open(self, switches: Switches, position: int) -> Entry | None:
        spec = self._tuner.trial_spec(switches)
        entry = self._group.open(spec, position)
        if entry is None and position in self._group.crowded:
            self._let_go()  # alone it may still fit
            entry = self._group.open(spec, position)
        return entry

    def _is_right(self, entry: Entry) -> bool:
        prepared = entry.record.prepared
        return prepared is not None and accepts(prepared.numerics, self._tuner.asked.tolerance)

    def _measure(self, entry: Entry) -> None:
        is_first = self._anchor is None
        if is_first:
            self._group.keep_still(entry)
        else:
            self._group.measure_solo(entry)
        self._group.measure(UntilPlaced(entry, self._tuner.asked.kind), solo=is_first)
        if self._anchor is not None and not self._anchor.is_sound:
            self._let_go()

    def _settle(self, entry: Entry) -> str:
        """The faster of the two stays open; what is to be said of the other."""
        tuner = self._tuner
        if self._anchor is not None:
            tuner.records[self._anchor.record.id] = self._anchor.record
        why, prepared = rejection(entry.record, tuner.tune), entry.record.prepared
        log = log_ratio(self._anchor.record, entry.record, tuner.asked.kind) if self._anchor is not None else None
        is_faster = self._anchor is None or (log is not None and log.mean > 0)
        if why is None and is_faster:
            self._let_go()
            entry.stopped = None  # it goes on being measured
            self._anchor = entry
        else:
            self._close(entry)
        if why is not None:
            return str(why)
        if log is not None:
            return f"{math.exp(log.mean):.3f}× the fastest so far"
        assert prepared is not None
        return str(numerics_reason(prepared.numerics, tuner.asked.tolerance))

    def _tell_leader(self) -> None:
        leader, baseline = self._tuner.leader(), self._tuner.baseline()
        if leader is not None and baseline is not None:
            self._tuner.observer.leads(leader.recipe, math.exp(baseline.log_s - leader.log_s))

    def _let_go(self) -> None:
        if self._anchor is not None:
            anchor, self._anchor = self._anchor, None
            self._close(anchor)

    def _close(self, entry: Entry) -> None:
        entry.stopped = entry.stopped or ("target" if entry.record.blocks else "interrupted")
        self._tuner.records[entry.record.id] = self._group.close(entry)
