"""One training between `Prepare` and `Close`: the data taken over, the first call, epochs, checkpoints."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from redline.bench.data.feed import WATCH
from redline.bench.data.source import Data
from redline.bench.device.base import Device
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.recipe.switches.graphs import GraphedTraining
from redline.bench.train.epochs import Tell, Training
from redline.bench.train.feeding import feed_for
from redline.bench.train.loss import BatchLoss
from redline.bench.train.prepare import (
    Checkpoint,
    be_deterministic,
    check_answers,
    info_of,
    is_recorded,
    learning_rate_of,
    set_optimizer,
    supply_of,
    take_over,
)
from redline.bench.train.steps import Stepper
from redline.bench.workload.step import Setup, TrainingStep, make_step
from redline.bench.workload.workload import Workload
from redline.protocol import EpochReply, FedReply, Feed
from redline.spec import RunSpec
from redline.training import DataInfo, Epoch


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
        self._loss = BatchLoss(workload.loss)
        self._loss.put(self._supply.first.targets)
        workload.loss = self._loss
        take_over(workload, self._supply.first, data)
        WATCH.begin()
        self._checkpoint: Checkpoint | None = None
        self.epochs: list[Epoch] = []

    def start(self, setup: Setup) -> float:
        """The first call under the recipe, after which nothing is learned yet; seconds it took."""
        self._recipes_changes.extend(setup.input_changes)
        self._supply = replace(self._supply, first=replace(self._supply.first, args=setup.args, kwargs=setup.kwargs))
        self._loss.is_static = is_recorded(setup)
        self._loss.put(self._supply.first.targets)
        check_answers(setup, self._data)
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

    def epoch(self, number: int) -> EpochReply:
        epoch, block = self._training.epoch(number)
        self.epochs.append(epoch)
        if self._checkpoint is not None:
            # Before it is told: what the history has, the checkpoint has too.
            self._checkpoint.save(self._workload.model, self.step, self.epochs)
        return EpochReply(epoch=epoch, block=block)

    def feed(self, request: Feed) -> FedReply:
        fed = feed_for(self._stepper, request.part, request.seconds, request.workers, request.prefetch)
        return FedReply(fed=fed)

    def close(self) -> None:
        self._training.close()
        WATCH.end()


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
