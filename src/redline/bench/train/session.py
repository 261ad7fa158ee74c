"""This module makes a training of a spec and its data, between `Prepare` and `Close`. It fits model and data to each other,
and runs the epochs."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor

from redline.bench.data.batches import Batches, DeviceBatches, LoadedBatches, Order, Reader, UserBatches
from redline.bench.data.feed import TARGETS, Arrived, ImageArrival, UserArrival, next_of, part_batch
from redline.bench.data.source import Data, ImageData, LoaderData, Samples
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
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
from redline.model.record import DataInfo, LastBatchFate
from redline.model.spec import OptimizerName, RunSpec

DEFAULT_BATCH = 128
"""This batch is used if none is given. It is smaller if the training part is."""
CIFAR_STEM_UP_TO = 32
"""A ResNet gets the CIFAR stem for images of up to this many pixels per side, because the ImageNet stem would leave 8 or fewer of them."""
RATE_AT_256: dict[OptimizerName, float] = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3}
"""These are the learning rates if none is given. That of SGD is for a batch of 256 and grows with the batch."""
HIGHEST_RATE = 0.8
"""The rate of SGD grows with the batch. It goes no higher than this."""


class TrainingSession:
    """This is a training of a spec that fits the data. It has a workload that was built for it and, later, a recipe."""

    def __init__(
        self, spec: RunSpec, data: Data, size: int | None, workload: Workload, device: Device, tell: Tell
    ) -> None:
        assert spec.train is not None
        assert spec.workload.batch is not None
        self._spec, self._train, self._data, self._workload, self._tell = spec, spec.train, data, workload, tell
        self._device, self._batch = device, spec.workload.batch
        if self._train.deterministic:
            be_deterministic()
        if self._train.target_accuracy is not None and data.validation is None:
            raise SpecError("target_accuracy cannot be reached without a validation loader: there is no accuracy")
        self._supply = self._image_supply(data, size) if isinstance(data, ImageData) else self._user_supply(data)
        workload.loss.start_on_data(self._supply.first.targets)
        if isinstance(data, LoaderData) or source_of(spec.workload).is_built_elsewhere:
            self._settle_loss()
        first = self._supply.first
        workload.put((first.args, first.kwargs))
        workload.batch, workload.batch_from, workload.items, workload.axes = first.count, "asked", None, None
        workload.input_hash = short_hash(f"{data.fingerprint} {describe((first.args, first.kwargs))}")
        workload.notes += data.notes

    def make_ready(self, setup: Setup) -> None:
        """Gives the recipe the data, and the optimizer its settings, before the first call."""
        plain = self._supply.arrive

        def arrive(batch: Any) -> Arrived:
            """Brings a batch as the recipe wants it."""
            arrived = plain(batch)
            args, kwargs = setup.prepared_inputs(arrived.args, arrived.kwargs)
            return replace(arrived, args=args, kwargs=kwargs)

        first = replace(self._supply.first, args=setup.args, kwargs=setup.kwargs)
        self._supply = replace(self._supply, first=first, arrive=arrive if setup.input_changes else plain)
        # A `GraphedTraining` may replay the whole step, optimizer included, from a graph.
        is_recorded = setup.step_class is not None and issubclass(setup.step_class, GraphedTraining)
        loss, optimizer = setup.workload.loss, self._spec.workload.optimizer
        loss.is_static = is_recorded
        loss.put(first.targets)
        usual = RATE_AT_256[optimizer]
        if optimizer == "sgd":
            usual = min(HIGHEST_RATE, usual * self._batch / 256)
        self._rate = self._train.learning_rate or usual
        # A graph repeats the numbers it was recorded with, but it reads a tensor anew at every replay. So a recorded step gets a tensor.
        rate = torch.tensor(self._rate, device=self._device.torch_device) if is_recorded else self._rate
        setup.optimizer_options |= {"weight_decay": self._train.weight_decay, "lr": rate}
        if is_recorded and optimizer == "sgd" and not setup.optimizer_options.get("fused"):
            setup.optimizer_options["fused"] = True
            setup.notes["graphs"] = "SGD runs fused: only so does it read its learning rate on the device"

    def begin(self, setup: Setup, step: TrainingStep) -> None:
        """Begins the training after the first call, before anything is learned. A graph is recorded now, so that the
        first epoch does not include it."""
        if isinstance(step, GraphedTraining):
            with step.context():
                step.record()
        self._stepper = Stepper(setup, step, self._supply, self._train.data)
        self._training = Training(self._train, self._stepper, self._spec.seed, self._rate, self._tell)

    @property
    def info(self) -> DataInfo:
        data, first, steps = self._data, self._supply.first, self._training.steps_per_epoch
        train, validation = (len(part) if isinstance(part, Samples) else 0 for part in (data.train, data.validation))
        left = train % self._batch
        fate: LastBatchFate = "run eagerly" if needs_whole_batches(self._stepper.setup) else "run"
        if not left or steps * self._batch <= train:
            fate = "dropped" if left else "none"
        image = next(iter((*first.args, *first.kwargs.values())), None)
        return DataInfo(
            name=data.name,
            train_samples=train,
            val_samples=validation,
            classes=data.classes,
            shape=tuple(image.shape[1:]) if isinstance(image, Tensor) else (),
            fingerprint=data.fingerprint,
            stem=self._spec.workload.stem,
            steps_per_epoch=steps,
            last_batch=left,
            last_batch_fate=fate,
            learning_rate=self._rate,
            workers=data.workers if isinstance(data, LoaderData) else self._train.data.workers,
            augment=self._train.data.augment,
            random_labels=isinstance(data, ImageData) and data.random_labels,
        )

    def epoch(self, number: int) -> EpochReply:
        epoch, block = self._training.epoch(number)
        return EpochReply(epoch=epoch, block=block)

    def feed(self, request: Feed) -> FedReply:
        fed = feed_for(self._stepper, request.part, request.seconds, request.workers, request.prefetch)
        return FedReply(fed=fed)

    def close(self) -> None:
        self._training.close()

    def _form(self, inputs: Any) -> Inputs:
        """Returns inputs as this model takes them, which is by position or by the names of its own inputs."""
        named, takes = {} if self._workload.args else self._workload.kwargs, self._takes
        name = next((name for name in named if takes is None or name in takes), None)
        return ((), {name: inputs}) if name and isinstance(inputs, Tensor) else sort_inputs(inputs)

    @cached_property
    def _takes(self) -> list[str] | None:
        """Returns the names that `forward` may be given. None means that it takes any."""
        parameters = parameters_of(self._workload.model.forward).values()
        if not parameters or any(one.kind is one.VAR_KEYWORD for one in parameters):
            return None
        return [one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]

    def _user_supply(self, data: LoaderData) -> Supply:
        arrive = UserArrival(self._device, self._form, self._takes)
        return Supply(
            train=lambda workers: UserBatches(data.train),
            validation=None if data.validation is None else UserBatches(data.validation),
            arrive=arrive,
            first=arrive(data.first),
            batch=self._batch,
            threaded=data.has_workers,
            queued=data.queued,
        )

    def _image_supply(self, data: ImageData, size: int | None) -> Supply:
        settings, batch, device = self._train.data, self._batch, self._device
        arrive = ImageArrival(data, device, size or data.size, self._form)
        # BatchNorm cannot train on one sample, so a last batch of one is dropped.
        drop = self._train.last_batch == "drop" or len(data.train) % batch == 1
        there: dict[Samples, tuple[Tensor, ...]] = {}
        for part in (data.train, data.validation) if settings.on_device else ():
            there[part] = tuple(tensor.to(device.torch_device) for tensor in part.fetch(range(len(part))))

        def batches(samples: Samples, workers: int, *, train: bool) -> Batches:
            order = Order(len(samples), batch, seed=self._spec.seed, shuffle=train, drop_last=train and drop)
            augment = settings.augment if train else "none"
            if settings.on_device:
                return DeviceBatches(there[samples], order, augment=augment != "none")
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

    def _settle_loss(self) -> None:
        """Gives the targets to a model that takes them, and looks at what the unchanged model answers.

        The contract is: a model whose `forward` names its targets gets them, unless there is a loss and it can do without.
        """
        model, loss, first = self._workload.model, self._workload.loss, self._supply.first
        takes = parameters_of(model.forward)
        name = next((name for name in TARGETS if name in takes), "")
        is_given = not name or name in first.kwargs or name in list(takes)[: len(first.args)]
        if not is_given and (loss.given is None or takes[name].default is inspect.Parameter.empty):

            def with_targets(batch: Arrived) -> Arrived:
                return replace(batch, kwargs={**batch.kwargs, name: batch.targets})

            plain, first = self._supply.arrive, with_targets(first)
            self._supply = replace(self._supply, arrive=lambda batch: with_targets(plain(batch)), first=first)
        with unchanged_afterwards(model), torch.enable_grad():
            torch.manual_seed(0)  # the epochs are seeded by themselves
            try:
                output = model(*first.args, **first.kwargs)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                # The first call will raise the same error and say why.
                return
        logits = main_logits(output)
        if logits is not None and logits.ndim > 1:
            # We ask this before we compute the loss, because on a GPU a target beyond the last class ends the process.
            answers, data = logits.shape[class_axis(logits)], self._data
            if data.classes is not None and answers < data.classes:
                raise SpecError(f"the model answers with {answers} classes, and {data.name} has {data.classes}")
            if (wrong := loss.class_beyond(logits)) is not None:
                raise SpecError(
                    f"a target is {wrong}, and the model answers with {answers} classes: 0 to {answers - 1}"
                )
        loss.learn(output)


def fitted(spec: RunSpec, data: Data) -> tuple[RunSpec, int | None, Inputs]:
    """Returns the spec with the batch, image size, classes and stem that the data ask for, if the spec names none.

    It also returns the pixels per side that the model will see, and inputs as the data give them. A model that is built
    elsewhere is not told of sizes, because it takes what comes.
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
        elif isinstance(inputs, Tensor) and inputs.ndim == 2:  # these are tokens by sample and position
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
