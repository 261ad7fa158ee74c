"""One recipe after the other, each measured in turns with the fastest so far, whose worker stays open for that."""

from __future__ import annotations

import math
from types import TracebackType

from redline.analyze.race import log_ratio
from redline.analyze.statistics import PairedLog
from redline.analyze.tune.estimates import accepts, numerics_reason, rejection
from redline.analyze.tune.record import Trial
from redline.record import new_id
from redline.search.interleave import (
    FEWEST_ALONE,
    Entry,
    finish_entry,
    in_random_order,
    keep_still,
    measure_alone_first,
    measure_round,
    open_entry,
)
from redline.search.tune.space import Steps
from redline.search.tune.tuner import Tuner

FEWEST_ROUNDS = 3
MOST_ROUNDS = 8
CONTENT_ERROR = 0.004
CLEARLY = 2.5
"""Standard errors by which a recipe must be behind before it is given up early."""
BEHIND = 0.02


class Trials:
    """Context manager: the worker of the fastest recipe so far lives as long as it does."""

    def __init__(self, tuner: Tuner) -> None:
        self._tuner = tuner
        self._anchor: Entry | None = None
        self._group = new_id()
        self._round = 0

    def __enter__(self) -> Trials:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._let_go()

    def attempt(self, steps: Steps) -> None:
        """Open, check the numbers, and only then time; the trial is kept, whatever became of it."""
        tuner, text = self._tuner, self._tuner.space.text(steps)
        started_s = tuner.clock()
        entry = self._open(steps)
        anchor_id = None
        try:
            if self._may_be_timed(entry):
                anchor_id = self._anchor.record.id if self._anchor is not None else None
                self._measure(entry)
        except BaseException:
            self._finish(entry)
            raise
        trial = Trial(recipe=text, record_id=entry.record.id, anchor_id=anchor_id, cost_s=tuner.clock() - started_s)
        said = self._settle(entry)
        tuner.keep(trials=(*tuner.tune.trials, trial))
        tuner.observer.attempted(text, said)
        self._tell_leader()

    def _open(self, steps: Steps) -> Entry:
        entry = self._opened(steps)
        failure = entry.record.failure
        if failure is not None and failure.kind == "oom" and self._anchor is not None:
            entry.session.close()
            self._let_go()  # alone it may still fit
            entry = self._opened(steps)
        return entry

    def _opened(self, steps: Steps) -> Entry:
        tuner = self._tuner
        spec, position = tuner.trial_spec(steps), len(tuner.tune.trials)
        entry = open_entry(spec, self._group, position, tuner.door, tuner.journal, tuner.observer)
        entry.only = tuner.only
        return entry

    def _may_be_timed(self, entry: Entry) -> bool:
        prepared = entry.record.prepared
        return (
            entry.record.failure is None
            and prepared is not None
            and accepts(prepared.numerics, self._tuner.asked.tolerance)
        )

    def _measure(self, entry: Entry) -> None:
        is_alone = self._anchor is None
        if is_alone:
            keep_still(entry, 2)
        else:
            measure_alone_first(entry, self._tuner.journal, 2, blocks=FEWEST_ALONE)
        newest: Entry | None = entry
        while entry.stopped is None:
            both = [each for each in (entry, self._anchor) if each is not None]
            for each in in_random_order(both, self._tuner.order, newest=newest):
                measure_round(each, self._round, self._tuner.journal, 2, alone=is_alone)
            self._round, newest = self._round + 1, None
            if self._anchor is not None and self._anchor.record.failure is not None:
                self._let_go()
            if self._has_seen_enough(entry):
                entry.stopped = "target"

    def _has_seen_enough(self, entry: Entry) -> bool:
        """More looks for those who may win: a recipe clearly behind is not worth them."""
        rounds = max((len(blocks) for blocks in entry.blocks.values()), default=0)
        log = self._against_anchor(entry)
        if rounds < FEWEST_ROUNDS:
            return entry.timed_s >= entry.spec.measure.max_seconds
        if log is None:
            return rounds >= MOST_ROUNDS or entry.timed_s >= entry.spec.measure.max_seconds
        is_behind = log.mean + CLEARLY * max(log.error, CONTENT_ERROR) < -BEHIND
        is_known = log.error <= CONTENT_ERROR and rounds > FEWEST_ROUNDS
        return is_behind or is_known or rounds >= MOST_ROUNDS or entry.timed_s >= entry.spec.measure.max_seconds

    def _against_anchor(self, entry: Entry) -> PairedLog | None:
        """Above 0 the candidate is faster."""
        if self._anchor is None:
            return None
        return log_ratio(self._anchor.record, entry.record, self._tuner.asked.kind)

    def _settle(self, entry: Entry) -> str:
        """The faster of the two stays open."""
        tuner = self._tuner
        tuner.records[entry.record.id] = entry.record
        if self._anchor is not None:
            tuner.records[self._anchor.record.id] = self._anchor.record
        why = rejection(entry.record, tuner.tune)
        prepared = entry.record.prepared
        if why is not None and not entry.record.blocks:
            self._finish(entry)
            return why
        log = self._against_anchor(entry)
        if why is None and (self._anchor is None or (log is not None and log.mean > 0)):
            self._let_go()
            entry.stopped = None  # it goes on being measured
            self._anchor = entry
        else:
            self._finish(entry)
        if why is not None:
            return why
        assert prepared is not None
        return (
            f"{math.exp(log.mean):.3f}× the fastest so far"
            if log is not None
            else numerics_reason(prepared.numerics, tuner.asked.tolerance)
        )

    def _tell_leader(self) -> None:
        leader, baseline = self._tuner.leader(), self._tuner.baseline()
        if leader is not None and baseline is not None:
            self._tuner.observer.leads(leader.recipe, math.exp(baseline.log_s - leader.log_s))

    def _let_go(self) -> None:
        if self._anchor is not None:
            anchor, self._anchor = self._anchor, None
            self._finish(anchor)

    def _finish(self, entry: Entry) -> None:
        entry.stopped = entry.stopped or ("target" if entry.record.blocks else "interrupted")
        self._tuner.records[entry.record.id] = finish_entry(entry, self._tuner.journal, self._tuner.observer)
