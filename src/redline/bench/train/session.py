"""This module makes a training of a spec and its data, between `Prepare` and `Close`: it fits model and data to each other, runs
the epochs, and keeps the checkpoint that a resume goes on from."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from redline.bench.data.batches import Batches, DeviceBatches, LoadedBatches, Order, Reader, UserBatches
from redline.bench.data.feed import TARGETS, Arrived, ImageArrival, UserArrival, next_of, part_batch
from redline.bench.data.source import Data, ImageData, LoaderData, Samples
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.recipe.switches.graphs import GraphedTraining
from redline.bench.train.epochs import Stepper, Supply, Tell, Training, be_deterministic, feed_for, needs_whole_batches
from redline.bench.workload.build import source_of
from redline.bench.workload.called import parameters_of
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.handed import sort_inputs
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.losses import class_axis, main_logits
from redline.bench.workload.step import Setup, TrainingStep
from redline.bench.workload.structure import describe
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError
from redline.model.protocol import EpochReply, FedReply, Feed
from redline.model.record import DataInfo, Epoch, LastBatchFate
from redline.model.spec import OptimizerName, RunSpec

DEFAULT_BATCH = 128
CIFAR_STEM_UP_TO = 32
"""A ResNet gets the CIFAR stem for images of up to this many pixels per side, of which the ImageNet stem leaves 8 or fewer."""
RATE_AT_256: dict[OptimizerName, float] = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3}
HIGHEST_RATE = 0.8
"""The rate of SGD, which grows with the batch, goes no higher."""


class TrainingSession:
    """This is a training of a spec that fits the data, with a workload that was built for it and, later, a recipe."""

    def __init__(
        self, spec: RunSpec, data: Data, size: int | None, workload: Workload, device: Device, tell: Tell
    ) -> None:
        assert spec.train is not None
        self._spec, self._train, self._data, self._workload, self._tell = spec, spec.train, data, workload, tell
        if self._train.deterministic:
            be_deterministic()
        self._supply = supply_of(spec, data, size, device, workload)
        workload.loss.start_on_data(self._supply.first.targets)
        if isinstance(data, LoaderData) or source_of(spec.workload).is_built_elsewhere:
            self._supply = settle_loss(workload, self._supply, data)
        first = self._supply.first
        workload.put((first.args, first.kwargs))
        workload.batch, workload.batch_from, workload.items, workload.axes = first.count, "asked", None, None
        workload.input_hash = short_hash(f"{data.fingerprint} {describe((first.args, first.kwargs))}")
        workload.notes += data.notes
        self._checkpoint: Checkpoint | None = None
        self.epochs: list[Epoch] = []

    def make_ready(self, setup: Setup) -> None:
        """Give the recipe the data, and the optimizer its settings, before the first call."""
        plain = self._supply.arrive

        def arrive(batch: Any) -> Arrived:
            """Brings a batch as the recipe wants it."""
            arrived = plain(batch)
            args, kwargs = setup.prepared_inputs(arrived.args, arrived.kwargs)
            return replace(arrived, args=args, kwargs=kwargs)

        first = replace(self._supply.first, args=setup.args, kwargs=setup.kwargs)
        self._supply = replace(self._supply, first=first, arrive=arrive if setup.input_changes else plain)
        loss, self._rate = setup.workload.loss, learning_rate_of(self._spec)
        loss.is_static = is_recorded(setup)
        loss.put(first.targets)
        set_optimizer(self._spec, setup, self._rate)

    def begin(self, setup: Setup, step: TrainingStep) -> None:
        """The first call is over, and nothing is learned yet. What is recorded is recorded now, and not in the first epoch."""
        if isinstance(step, GraphedTraining):
            with step.context():
                step.record()
        self._step, self._stepper = step, Stepper(setup, step, self._supply, self._train.data)
        self._training = Training(self._train, self._stepper, self._spec.seed, self._rate, self._tell)

    @property
    def info(self) -> DataInfo:
        steps = self._training.steps_per_epoch
        return info_of(self._spec, self._data, self._supply, self._stepper.setup, steps, self._rate)

    def resume(self, checkpoint: str) -> None:
        """Go on from the checkpoint if there is one, and keep the state there after each epoch."""
        self._checkpoint = Checkpoint(Path(checkpoint), self._spec, self._workload)
        self.epochs = self._checkpoint.restore(self._workload.model, self._step)
        self._training.spent_s = sum(epoch.train_s for epoch in self.epochs)

    def epoch(self, number: int) -> EpochReply:
        epoch, block = self._training.epoch(number)
        self.epochs.append(epoch)
        lost = ""
        if self._checkpoint is not None:
            # Before it is told: what the history has, the checkpoint has too.
            lost = self._checkpoint.save(self._workload.model, self._step, self.epochs)
        return EpochReply(epoch=epoch, block=block, lost_checkpoint=lost)

    def feed(self, request: Feed) -> FedReply:
        fed = feed_for(self._stepper, request.part, request.seconds, request.workers, request.prefetch)
        return FedReply(fed=fed)

    def close(self) -> None:
        self._training.close()


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
        """Returns the epochs that are done; none if there is no checkpoint yet."""
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


# Data and model that fit each other


def fitted(spec: RunSpec, data: Data) -> tuple[RunSpec, int | None, Inputs]:
    """Returns the spec with the batch, image size, classes and stem that the data ask for, where it names none.

    And the pixels per side that the model will see, and inputs as the data give them. A model that is built elsewhere is
    not told of sizes: it takes what comes.
    """
    workload, source = spec.workload, source_of(spec.workload)
    size, length = workload.image_size, None
    if isinstance(data, ImageData):
        batch, size = workload.batch or min(DEFAULT_BATCH, len(data.train)), size or data.size
        if batch > len(data.train):
            raise SpecError(f"batch must be {len(data.train)} or less with so many training samples, got {batch}")
        inputs: Any = torch.zeros(batch, len(data.mean), size, size)
    else:
        if (first := next_of(data.first for _ in range(1))) is None:
            raise BenchError("user", "the training loader gave no batch")
        parted = part_batch(first)
        inputs, batch = parted.inputs, parted.count
        if isinstance(inputs, Tensor) and inputs.ndim == 4:
            size = size or inputs.shape[-1]
        elif isinstance(inputs, Tensor) and inputs.ndim == 2:  # tokens by sample and position
            length = inputs.shape[1]
    if source.is_built_elsewhere:
        changed = {"batch": batch, "image_size": None}
    elif size is None:
        changed = {"batch": batch, "sequence_length": workload.sequence_length or length}
    elif (classes := workload.classes or data.classes) is None:
        raise SpecError(f"{data.name} does not say how many classes there are: give --classes")
    else:
        changed = {"batch": batch, "image_size": size, "classes": classes}
    workload = msgspec.structs.replace(workload, **changed)
    source.check(workload)
    if size is not None and workload.stem is None and source.has_stem(workload):
        workload = msgspec.structs.replace(workload, stem="cifar" if size <= CIFAR_STEM_UP_TO else "imagenet")
    return msgspec.structs.replace(spec, workload=workload), size, sort_inputs(inputs)


def supply_of(spec: RunSpec, data: Data, size: int | None, device: Device, workload: Workload) -> Supply:
    """Returns the batches of a fitted spec."""
    assert spec.train is not None
    assert spec.workload.batch is not None
    # `forward` may be given these by name; None means any name.
    parameters = parameters_of(workload.model.forward).values()
    is_open = not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters)
    takes = (
        None
        if is_open
        else [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    )
    named = () if workload.args else workload.kwargs
    name = next((name for name in named if takes is None or name in takes), None)

    def form(inputs: Any) -> Inputs:
        """Returns inputs as this model takes them: by position, or by the name of its own inputs."""
        return ((), {name: inputs}) if name and isinstance(inputs, Tensor) else sort_inputs(inputs)

    if spec.train.target_accuracy is not None and data.validation is None:
        raise SpecError("target_accuracy cannot be reached without a validation loader: there is no accuracy")
    if isinstance(data, ImageData):
        return _image_supply(spec, data, ImageArrival(data, device, size or data.size, form), device)
    arrive = UserArrival(device, form, takes)
    return Supply(
        train=lambda workers: UserBatches(data.train),
        validation=None if data.validation is None else UserBatches(data.validation),
        arrive=arrive,
        first=arrive(data.first),
        batch=spec.workload.batch,
        threaded=data.has_workers,
        queued=data.queued,
    )


def _image_supply(spec: RunSpec, data: ImageData, arrive: ImageArrival, device: Device) -> Supply:
    assert spec.train is not None
    assert spec.workload.batch is not None
    settings, batch = spec.train.data, spec.workload.batch
    drop = spec.train.last_batch == "drop" or len(data.train) % batch == 1  # BatchNorm cannot train on one sample
    parts = (data.train, data.validation) if settings.on_device else ()
    there = {
        id(part): tuple(tensor.to(device.torch_device) for tensor in part.fetch(range(len(part)))) for part in parts
    }

    def batches(samples: Samples, workers: int, *, train: bool) -> Batches:
        order = Order(len(samples), batch, seed=spec.seed, shuffle=train, drop_last=train and drop)
        augment = settings.augment if train else "none"
        if settings.on_device:
            return DeviceBatches(there[id(samples)], order, augment=augment != "none")
        pin = settings.pin_memory and device.is_accelerator
        return LoadedBatches(samples, order, settings, augment=augment, pin=pin, workers=workers)

    return Supply(
        train=lambda workers: batches(data.train, workers, train=True),
        validation=batches(data.validation, settings.workers, train=False),
        arrive=arrive,
        first=arrive(Reader(data.train, "none")[list(range(batch)), 0]),
        batch=batch,
        threaded=True,
    )


def settle_loss(workload: Workload, supply: Supply, data: Data) -> Supply:
    """Hand the targets over to a model that takes them, and look at what it answers as it is.

    The contract: a model whose `forward` names its targets gets them, unless there is a loss and it can do without.
    """
    model, loss, first = workload.model, workload.loss, supply.first
    takes = parameters_of(model.forward)
    name = next((name for name in TARGETS if name in takes), "")
    is_given = not name or name in first.kwargs or name in list(takes)[: len(first.args)]
    if not is_given and (loss.given is None or takes[name].default is inspect.Parameter.empty):

        def with_targets(batch: Arrived) -> Arrived:
            return replace(batch, kwargs={**batch.kwargs, name: batch.targets})

        plain = supply.arrive
        supply = replace(supply, arrive=lambda batch: with_targets(plain(batch)), first=with_targets(first))
    with unchanged_afterwards(model), torch.enable_grad():
        torch.manual_seed(0)  # an epoch has a seed of its own
        try:
            output = model(*supply.first.args, **supply.first.kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return supply  # the first call will say why
    logits = main_logits(output)
    if logits is not None and logits.ndim > 1:
        # Asked before the loss: on a GPU a class too many ends the process.
        answers, wrong = logits.shape[class_axis(logits)], loss.class_beyond(logits)
        if data.classes is not None and answers < data.classes:
            raise SpecError(f"the model answers with {answers} classes, and {data.name} has {data.classes}")
        if wrong is not None:
            raise SpecError(f"a target is {wrong}, and the model answers with {answers} classes: 0 to {answers - 1}")
    loss.learn(output)
    return supply


def learning_rate_of(spec: RunSpec) -> float:
    assert spec.train is not None
    if spec.train.learning_rate is not None:
        return spec.train.learning_rate
    rate = RATE_AT_256[spec.workload.optimizer]
    if spec.workload.optimizer != "sgd":
        return rate
    return min(HIGHEST_RATE, rate * (spec.workload.batch or DEFAULT_BATCH) / 256)


def set_optimizer(spec: RunSpec, setup: Setup, rate: float) -> None:
    assert spec.train is not None
    setup.optimizer_options["weight_decay"] = spec.train.weight_decay
    setup.optimizer_options["lr"] = rate
    if not is_recorded(setup):
        return
    # A graph keeps the numbers it was recorded with; a tensor it reads anew at every replay.
    setup.optimizer_options["lr"] = torch.tensor(rate, device=setup.device.torch_device)
    if spec.workload.optimizer == "sgd" and not setup.optimizer_options.get("fused"):
        setup.optimizer_options["fused"] = True
        setup.notes["graphs"] = "SGD runs fused: only so does it read its learning rate on the device"


def is_recorded(setup: Setup) -> bool:
    """True if the whole step, optimizer included, is replayed from a graph."""
    return setup.step_class is not None and issubclass(setup.step_class, GraphedTraining)


def info_of(spec: RunSpec, data: Data, supply: Supply, setup: Setup, steps: int, rate: float) -> DataInfo:
    assert spec.train is not None
    counts = [len(part) if isinstance(part, Samples) else 0 for part in (data.train, data.validation)]
    left = counts[0] % supply.batch
    fate: LastBatchFate = "run eagerly" if needs_whole_batches(setup) else "run"
    if not left:
        fate = "none"
    elif steps * supply.batch <= counts[0]:
        fate = "dropped"
    image = supply.first.args[0] if supply.first.args else next(iter(supply.first.kwargs.values()), None)
    return DataInfo(
        name=data.name,
        train_samples=counts[0],
        val_samples=counts[1],
        classes=data.classes,
        shape=tuple(image.shape[1:]) if isinstance(image, Tensor) else (),
        fingerprint=data.fingerprint,
        stem=spec.workload.stem,
        steps_per_epoch=steps,
        last_batch=left,
        last_batch_fate=fate,
        learning_rate=rate,
        workers=data.workers if isinstance(data, LoaderData) else spec.train.data.workers,
        augment=spec.train.data.augment,
        random_labels=isinstance(data, ImageData) and data.random_labels,
    )
