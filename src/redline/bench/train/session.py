"""One training between `Prepare` and `Close`: the data taken over, the first call, epochs, checkpoints; and loader and
model alone and together, to see which waits for the other."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import torch

from redline.bench.data.batches import Batches
from redline.bench.data.feed import WATCH, loader_errors, part_batch
from redline.bench.data.source import Data, LoaderData
from redline.bench.device.base import Device
from redline.bench.device.failure import one_line
from redline.bench.measure.blocks import quiet_collector
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.recipe.switches.graphs import GraphedTraining
from redline.bench.train.epochs import Tell, Training, be_deterministic
from redline.bench.train.prepare import (
    check_answers,
    info_of,
    is_recorded,
    learning_rate_of,
    note_what_stays,
    set_optimizer,
    settle_loss,
    supply_of,
    take_over,
)
from redline.bench.train.steps import Stepper, Timeline, phase_seconds
from redline.bench.workload.build import source_of
from redline.bench.workload.losses import loss_on_data
from redline.bench.workload.step import Setup, TrainingStep, make_step
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError
from redline.model.protocol import EpochReply, FedReply, Feed
from redline.model.record import DATA_PHASE, DataInfo, Epoch, Fed, FedPart
from redline.model.spec import RunSpec

FEW_BATCHES, LONGEST_FACTOR = 20, 3
"""A loader is watched for this many batches, or for so many times the seconds asked for."""


class TrainingSession:
    """For a spec that fits the data, a workload that was built for it, and the recipe once it is applied."""

    def __init__(
        self, spec: RunSpec, data: Data, size: int | None, workload: Workload, device: Device, tell: Tell
    ) -> None:
        assert spec.train is not None
        self._spec, self._train, self._data, self._workload, self._tell = spec, spec.train, data, workload, tell
        if self._train.deterministic:
            be_deterministic()
        self._supply, self._recipes_changes = supply_of(spec, data, size, device, workload)
        self._loss = loss_on_data(workload.loss)
        self._loss.put(self._supply.first.targets)
        if isinstance(data, LoaderData) or source_of(spec.workload).is_built_elsewhere:
            self._supply = settle_loss(workload, self._supply, self._loss)
        workload.loss = self._loss
        take_over(workload, self._supply.first, data)
        note_what_stays(workload)
        WATCH.begin()
        self._checkpoint: Checkpoint | None = None
        self.epochs: list[Epoch] = []

    def start(self, setup: Setup) -> float:
        """The first call under the recipe, after which nothing is learned yet; seconds it took."""
        self._recipes_changes.extend(setup.input_changes)
        self._supply = replace(self._supply, first=replace(self._supply.first, args=setup.args, kwargs=setup.kwargs))
        self._loss.is_static = is_recorded(setup)
        self._loss.put(self._supply.first.targets)
        check_answers(setup, self._data, self._supply.first, self._loss)
        self._rate = learning_rate_of(self._spec)
        set_optimizer(self._spec, setup, self._rate)
        started = time.perf_counter()
        self.step = _first_step(setup, self._spec)
        setup.device.synchronize()
        seconds = time.perf_counter() - started
        self._stepper = Stepper(setup, self.step, self._loss, self._supply, self._train.data)
        self._training = Training(self._train, self._stepper, self._spec.seed, self._rate, self._tell)
        return seconds

    @property
    def info(self) -> DataInfo:
        steps = self._training.steps_per_epoch
        return info_of(self._spec, self._data, self._supply, self._stepper.setup, steps, self._rate)

    def resume(self, checkpoint: str) -> None:
        """Keep the state there after each epoch, and take up the one that is there."""
        self._checkpoint = Checkpoint(Path(checkpoint), self._spec, self._workload)
        self.epochs = self._checkpoint.restore(self._workload.model, self.step)
        self._training.spent_s = sum(epoch.train_s for epoch in self.epochs)

    def epoch(self, number: int) -> EpochReply:
        epoch, block = self._training.epoch(number)
        self.epochs.append(epoch)
        lost = ""
        if self._checkpoint is not None:
            # Before it is told: what the history has, the checkpoint has too.
            lost = self._checkpoint.save(self._workload.model, self.step, self.epochs)
        return EpochReply(epoch=epoch, block=block, lost_checkpoint=lost)

    def feed(self, request: Feed) -> FedReply:
        fed = feed_for(self._stepper, request.part, request.seconds, request.workers, request.prefetch)
        return FedReply(fed=fed)

    def close(self) -> None:
        self._training.close()
        WATCH.end()


class Checkpoint:
    """This keeps what a training needs to go on after an epoch, in one file that is replaced whole."""

    def __init__(self, path: Path, spec: RunSpec, workload: Workload) -> None:
        self._path = path
        what = msgspec.json.encode([spec.workload, spec.train, str(spec.recipe), spec.seed], order="deterministic")
        self._identity = hashlib.sha256(what + workload.model_hash.encode() + workload.input_hash.encode()).hexdigest()

    def save(self, model: torch.nn.Module, step: TrainingStep, epochs: list[Epoch]) -> str:
        """Returns why it could not be kept, such as a full disk, which is no reason to end a training. It is empty if it was kept."""
        state = {
            "identity": self._identity + step.order,
            "epochs": [msgspec.to_builtins(epoch) for epoch in epochs],
            "model": model.state_dict(),
            "step": step.state(),
        }
        partial = self._path.with_suffix(".partial")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with partial.open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, self._path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            # torch's writer trips over its own position after a write that failed: the cause is what helps.
            cause = error.__context__ if isinstance(error.__context__, OSError) else error
            return one_line(cause)
        return ""

    def restore(self, model: torch.nn.Module, step: TrainingStep) -> list[Epoch]:
        """The epochs that are done; none where there is no checkpoint yet."""
        if not self._path.is_file():
            return []
        try:
            state = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception as error:  # whatever a damaged file makes torch raise
            raise BenchError(
                "user", f"the checkpoint {self._path} cannot be read: {one_line(error)}; delete it to start over"
            ) from error
        if state["identity"] != self._identity + step.order:
            differ = "model, data, spec or version of Redline differ"
            raise BenchError("user", f"the checkpoint {self._path} is of another training: {differ}")
        model.load_state_dict(state["model"])
        step.restore(state["step"])
        return [msgspec.convert(epoch, Epoch) for epoch in state["epochs"]]


def _first_step(setup: Setup, spec: RunSpec) -> TrainingStep:
    step = make_step(setup, spec.workload.optimizer)
    assert isinstance(step, TrainingStep)
    if isinstance(step, GraphedTraining):
        with step.context():
            step.record()
        return step
    with unchanged_afterwards(setup.workload.model), step.context():
        step()
        setup.device.synchronize()
    again = make_step(setup, spec.workload.optimizer)  # with an optimizer that has seen nothing
    assert isinstance(again, TrainingStep)
    return again


def feed_for(stepper: Stepper, part: FedPart, seconds: float, workers: int, prefetch: bool) -> Fed:
    with loader_errors(), quiet_collector(), stepper.step.context():
        if part == "model":
            samples, took = _model_alone(stepper, seconds)
            return Fed(part=part, samples=samples, seconds=took, workers=workers, prefetch=prefetch)
        batches = stepper.supply.train(workers)
        # Those that lie ready before anybody looks.
        ready = 1 + workers * stepper.data.prefetch_factor + stepper.supply.queued
        try:
            if part == "loader":
                samples, took = _loader_alone(stepper, _endless(batches), seconds, ready)
                return Fed(part=part, samples=samples, seconds=took, workers=workers, prefetch=prefetch)
            samples, took, waited = _together(stepper, _endless(batches), seconds, ready, prefetch)
            return Fed(part=part, samples=samples, seconds=took, wait_s=waited, workers=workers, prefetch=prefetch)
        finally:
            batches.close()


def _loader_alone(stepper: Stepper, batches: Iterator[Any], seconds: float, ready: int) -> tuple[int, float]:
    def count_of(batch: Any) -> int:
        if stepper.data.on_device:  # it has no loader: its batches are made where they are used
            return stepper.supply.arrive(batch).count
        return part_batch(batch).count if isinstance(batch, Mapping) else len(batch[1])

    for _ in range(ready):
        next(batches)
    samples, started = 0, time.perf_counter()
    for number in count():
        if _is_enough(number, time.perf_counter() - started, seconds):
            break
        samples += count_of(next(batches))
    stepper.device.synchronize()
    return samples, time.perf_counter() - started


def _model_alone(stepper: Stepper, seconds: float) -> tuple[int, float]:
    steps, device = 0, stepper.device
    stepper.step()
    device.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or not steps:
        stepper.step()
        stepper.stay_near(device.mark(), prefetch=True)
        steps += 1
    device.synchronize()
    return steps * stepper.supply.batch, time.perf_counter() - started


def _together(
    stepper: Stepper, batches: Iterator[Any], seconds: float, ready: int, prefetch: bool
) -> tuple[int, float, float]:
    timeline, device = Timeline(stepper.device), stepper.device
    samples, started = 0, 0.0
    with stepper.feed(batches, prefetch=prefetch) as feed:
        for number in count():
            if number == ready:
                device.synchronize()
                timeline.begin()
                started = time.perf_counter()
            elif number > ready and _is_enough(number - ready, time.perf_counter() - started, seconds):
                break
            batch = feed.next()
            assert batch is not None
            timeline.note(DATA_PHASE)
            stepper.take(batch, timeline)
            feed.ahead()
            stepper.stay_near(timeline.marks[-1], prefetch=prefetch)
            samples += batch.count if number >= ready else 0
        device.synchronize()
        took = time.perf_counter() - started
    return samples, took, phase_seconds(timeline.steps())[DATA_PHASE]


def _is_enough(batches: int, passed_s: float, seconds: float) -> bool:
    """Long enough to have seen a batch that is slow now and then, unless that takes too long."""
    return batches > 0 and passed_s >= (seconds if batches >= FEW_BATCHES else LONGEST_FACTOR * seconds)


def _endless(batches: Batches) -> Iterator[Any]:
    for epoch in count(1):
        number = -1
        for number, batch in enumerate(batches.begin(epoch)):  # noqa: B007  (whether there was one is asked below)
            yield batch
        if number < 0:
            raise BenchError("user", "the loader gave no batch")
