"""This module runs a training and stores it epoch by epoch, and searches for the number of loader workers that is enough."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from redline.analyze.train import DATA_BOUND_SHARE, cores_for_workers, is_data_bound, latest_feed
from redline.launch.door import Door, Session
from redline.model.note import note
from redline.model.protocol import (
    EpochReply,
    FedReply,
    Feed,
    Profile,
    Progress,
    TraceReply,
    TrainEpoch,
)
from redline.model.record import Block, Epoch, Fed, FedPart, RunRecord, StopReason
from redline.model.spec import RunSpec
from redline.search.group import OneRecord, failure_of
from redline.search.observer import Journal, Observer

FEED_SECONDS = 2.0
NO_GAIN = 1.05
"""Twice the workers must bring this much, or more of them will not either."""


@dataclass(frozen=True, kw_only=True)
class After:
    """It says what is asked of the same worker once the last epoch is done."""

    feeds: bool = False
    """Loader and model, apart and together, with a search for the number of workers."""
    profile: Profile | None = None
    """Its path is a name, below the record's id in the folder for traces."""
    traces: Path | None = None
    epochs: bool = True
    """If it is False, no epoch runs at all, and only what comes after."""


def train_spec(
    spec: RunSpec,
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    *,
    checkpoints: Path | None = None,
    going_on: RunRecord | None = None,
    after: After | None = None,
) -> RunRecord:
    """Returns one record with its epochs; what breaks is in its failure.

    `checkpoints`: the folder for the state after each epoch. `going_on`: the record of a training that was cut off,
    which gets the epochs it lacks.
    """
    run = _Training(spec, journal, observer or Observer(), checkpoints, going_on)
    return run.fill(door, lambda session: run.go(session, after or After()))


class _Training(OneRecord):
    """The record of a training on its way."""

    def __init__(
        self, spec: RunSpec, journal: Journal, observer: Observer, folder: Path | None, going_on: RunRecord | None
    ) -> None:
        super().__init__(spec, journal, observer, going_on)
        self._checkpoint = None if folder is None else folder / f"{self.record.id}.pt"

    def go(self, session: Session, after: After) -> None:
        number = self._last_epoch(session)
        if number is None:
            return None
        assert self.record.spec.train is not None
        patience_s = self.record.spec.train.data.loader_timeout_s
        self.stopped = "target" if not after.epochs else self._stop_reason()
        while self.stopped is None:
            number += 1
            reply = self.ask(session, TrainEpoch(number=number, loader_timeout_s=patience_s))
            if not isinstance(reply, EpochReply):
                return self.fail(reply)
            self._note_checkpoint(reply)
            self._keep(reply.epoch, reply.block)
            self.stopped = self._stop_reason()
        if after.feeds and not self._feed(session):
            return None
        if after.profile is not None:
            self.observer.progress(self.record, Progress(stage="profile"))
            reply = self.ask(session, self._named(after.profile, after.traces or Path()))
            if isinstance(reply, TraceReply):
                self.change(trace=reply.trace)
            else:  # the training itself is done, and stays
                missing = note("no-trace", f"no trace: {failure_of(reply).message}")
                self.change(notes=(*self.record.notes, missing))
        return None

    def finish(self, session: Session) -> None:
        super().finish(session)
        if self._checkpoint is not None and self.record.stopped in ("target", "ceiling"):
            with contextlib.suppress(OSError):  # where it could not be written, it cannot be removed either
                self._checkpoint.unlink(missing_ok=True)

    def _last_epoch(self, session: Session) -> int | None:
        """Prepare the session. Returns the last epoch that is done; None if there is nothing to go on with."""
        reply = self.prepare(session, checkpoint=None if self._checkpoint is None else str(self._checkpoint))
        if reply is None:
            return None
        for epoch in reply.epochs:
            self._keep(epoch, None)  # the checkpoint may be one epoch ahead of the history
        return len(reply.epochs)

    def _keep(self, epoch: Epoch, block: Block | None) -> None:
        """Write an epoch down, once: one that is done again after a resume is there already."""
        record = self.record
        if block is not None and all(block.round != known.round for known in record.blocks):
            self.journal.append(record.id, block)
            record = msgspec.structs.replace(record, blocks=(*record.blocks, block))
        if all(epoch.number != known.number for known in record.epochs):
            record = msgspec.structs.replace(record, epochs=(*record.epochs, epoch))
            self.journal.begin(record)
        self.record = record
        self.observer.epoch(record, epoch)

    def _note_checkpoint(self, reply: EpochReply) -> None:
        """Say once that a resume would not find the state after this epoch."""
        if reply.lost_checkpoint and all(known.code != "no-checkpoint" for known in self.record.notes):
            text = f"the state after epoch {reply.epoch.number} could not be kept ({reply.lost_checkpoint})"
            lost = note("no-checkpoint", f"{text}: --resume would begin before it")
            self.change(notes=(*self.record.notes, lost))

    def _stop_reason(self) -> StopReason | None:
        settings, epochs = self.record.spec.train, self.record.epochs
        assert settings is not None
        if not epochs:
            return None
        last = epochs[-1]
        if last.is_cut:
            return "ceiling"
        is_reached = settings.target_accuracy is not None and (last.val_accuracy or 0.0) >= settings.target_accuracy
        return "target" if is_reached or last.number >= settings.epochs else None

    def _feed(self, session: Session) -> bool:
        """Returns False if the worker broke."""
        assert self.record.spec.train is not None
        settings = self.record.spec.train.data
        wanted: list[tuple[FedPart, bool]] = [("model", True), ("loader", True), ("together", True)]
        wanted += [("together", False)]
        for part, prefetch in wanted:
            if self._fed(session, part, settings.workers, prefetch=prefetch) is None:
                return False
        if settings.on_device or ":" in settings.name:
            return True  # no workers of ours to choose
        return self._search_workers(session)

    def _search_workers(self, session: Session) -> bool:
        """Double the workers until the training does not wait for data, then narrow down to the fewest that suffice."""
        assert self.record.spec.train is not None
        own = self.record.spec.train.data.workers
        first = latest_feed(self.record, "together")
        assert first is not None
        if not is_data_bound(self.record):
            return True
        # One worker is no more than the thread that loads where there is none, so the first step is to two.
        too_few, rate, workers = own, first.per_s, max(2, 2 * own)
        while workers <= cores_for_workers(self.record):
            fed = self._fed(session, "together", workers)
            if fed is None:
                return False
            if fed.wait_share <= DATA_BOUND_SHARE:
                return self._close_in(session, too_few, workers)
            if fed.per_s < NO_GAIN * rate:
                return True
            too_few, rate, workers = workers, fed.per_s, 2 * workers
        return True

    def _close_in(self, session: Session, too_few: int, enough: int) -> bool:
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            fed = self._fed(session, "together", middle)
            if fed is None:
                return False
            if fed.wait_share <= DATA_BOUND_SHARE:
                enough = middle
            else:
                too_few = middle
        return True

    def _fed(self, session: Session, part: FedPart, workers: int, *, prefetch: bool = True) -> Fed | None:
        self.observer.progress(self.record, Progress(stage="feed", detail=f"{part}, {workers} workers"))
        reply = self.ask(session, Feed(part=part, seconds=FEED_SECONDS, workers=workers, prefetch=prefetch))
        if not isinstance(reply, FedReply):
            self.fail(reply)
            return None
        self.change(feeds=(*self.record.feeds, reply.fed))
        return reply.fed

    def _named(self, request: Profile, folder: Path) -> Profile:
        return msgspec.structs.replace(request, path=str((folder / self.record.id / request.path).absolute()))
