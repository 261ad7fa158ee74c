"""This module runs a training and stores it epoch by epoch, and searches for the number of loader workers that is enough."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import msgspec

from redline.analyze.train import DATA_BOUND_SHARE, cores_for_workers, is_data_bound
from redline.launch.door import Door, Session
from redline.model.note import note
from redline.model.protocol import EpochReply, FedReply, Feed, Profile, Progress, TraceReply, TrainEpoch
from redline.model.record import Epoch, FedPart, RunRecord, StopReason
from redline.model.spec import RunSpec
from redline.search.group import OneRecord, failure_of
from redline.search.observer import Journal, Observer

FEED_SECONDS = 2.0
"""The loader, the model and both together are each measured for this long."""
NO_GAIN = 1.05
"""Twice the workers must bring this factor of speed, or even more of them are taken to bring nothing."""


class WorkerBroke(Exception):
    """A worker broke, and the record has its failure already."""


@dataclass(frozen=True, kw_only=True)
class After:
    """It says what is asked of the same worker once the last epoch is done."""

    feeds: bool = False
    """If it is True, loader and model are measured apart and together, and the number of workers that is enough is searched."""
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
    after: After | None = None,
) -> RunRecord:
    """Returns one record with its epochs; if something breaks, the record has its failure."""
    run = _Training(spec, journal, observer or Observer())
    return run.fill(door, lambda session: run.go(session, after or After()))


class _Training(OneRecord):
    """This is the record of a training, which grows with every epoch."""

    def __init__(self, spec: RunSpec, journal: Journal, observer: Observer) -> None:
        super().__init__(spec, journal, observer)
        assert spec.train is not None
        self._settings = spec.train

    def go(self, session: Session, after: After) -> None:
        if self.prepare(session) is None:
            return
        patience_s = self._settings.data.loader_timeout_s
        self.stopped = None if after.epochs else "target"
        with contextlib.suppress(WorkerBroke):
            while self.stopped is None:
                number = len(self.record.epochs) + 1
                trained = self.ask(session, TrainEpoch(number=number, loader_timeout_s=patience_s))
                if not isinstance(trained, EpochReply):
                    self.fail(trained)
                    return
                if trained.block is not None:
                    self.journal.append(self.record.id, trained.block)
                    self.change(blocks=(*self.record.blocks, trained.block))
                self.change(epochs=(*self.record.epochs, trained.epoch))
                self.journal.begin(self.record)
                self.observer.epoch(self.record, trained.epoch)
                self.stopped = self._stop_reason(trained.epoch)
            if after.feeds:
                self._feed(session)
            if after.profile is not None:
                self._profile(session, after.profile, (after.traces or Path()) / self.record.id)

    def _stop_reason(self, last: Epoch) -> StopReason | None:
        target = self._settings.target_accuracy
        is_reached = target is not None and (last.val_accuracy or 0.0) >= target
        is_done = is_reached or last.number >= self._settings.epochs
        return "ceiling" if last.is_cut else "target" if is_done else None

    def _profile(self, session: Session, request: Profile, folder: Path) -> None:
        self.observer.progress(self.record, Progress(stage="profile"))
        path = str((folder / request.path).absolute())
        reply = self.ask(session, msgspec.structs.replace(request, path=path))
        if isinstance(reply, TraceReply):
            self.change(trace=reply.trace)
        else:  # the training itself is done, and stays
            missing = note("no-trace", f"no trace: {failure_of(reply).message}")
            self.change(notes=(*self.record.notes, missing))

    def _feed(self, session: Session) -> None:
        """Measures loader and model apart and together, and searches for the number of workers with which the training does not wait."""
        data = self._settings.data
        for part in ("model", "loader"):
            self._fed(session, part, data.workers)
        first, _ = self._fed(session, "together", data.workers)
        self._fed(session, "together", data.workers, prefetch=False)
        if data.on_device or ":" in data.name or not is_data_bound(self.record):
            return  # there are no workers of ours to choose, or there are enough of them
        # One worker is no more than the thread that loads where there is none, so the first step is to two.
        too_few, enough, rate = data.workers, max(2, 2 * data.workers), first
        while True:
            if enough > cores_for_workers(self.record):
                return
            faster, waits = self._fed(session, "together", enough)
            if not waits:
                break
            if faster < NO_GAIN * rate:
                return
            too_few, enough, rate = enough, 2 * enough, faster
        while enough - too_few > 1:
            middle = (enough + too_few) // 2
            _, waits = self._fed(session, "together", middle)
            too_few, enough = (middle, enough) if waits else (too_few, middle)

    def _fed(self, session: Session, part: FedPart, workers: int, *, prefetch: bool = True) -> tuple[float, bool]:
        """Returns how many samples per second there were, and whether the training waits for its data."""
        self.observer.progress(self.record, Progress(stage="feed", detail=f"{part}, {workers} workers"))
        reply = self.ask(session, Feed(part=part, seconds=FEED_SECONDS, workers=workers, prefetch=prefetch))
        if not isinstance(reply, FedReply):
            self.fail(reply)
            raise WorkerBroke
        self.change(feeds=(*self.record.feeds, reply.fed))
        return reply.fed.per_s, reply.fed.wait_share > DATA_BOUND_SHARE
