"""From a spec and its data to a training that can begin, or go on from a checkpoint."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from redline.bench.data.batches import Batches, DeviceBatches, LoadedBatches, Order, Reader, UserBatches
from redline.bench.data.feed import (
    TARGETS,
    Arrived,
    HandedOver,
    ImageArrival,
    Parted,
    UserArrival,
    next_of,
    part_batch,
)
from redline.bench.data.source import Data, ImageData, LoaderData, Samples
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.recipe.switches.graphs import GraphedTraining
from redline.bench.train.steps import Supply, needs_whole_batches
from redline.bench.workload.build import source_of
from redline.bench.workload.fingerprint import short_hash
from redline.bench.workload.handed import sort_inputs
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.losses import IGNORED, TargetLoss, class_axis, main_logits, other_targets, weighted_logits
from redline.bench.workload.step import Setup
from redline.bench.workload.structure import describe
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, SpecError
from redline.model.note import Note, note
from redline.model.record import DataInfo, LastBatchFate
from redline.model.spec import OptimizerName, RunSpec, WorkloadSpec
from redline.model.units import format_count

InputChange = Callable[[Tensor], Tensor]

DEFAULT_BATCH = 128
CIFAR_STEM_UP_TO = 32
"""Pixels: of so small an image the ImageNet stem leaves next to nothing."""
RATE_AT_256: dict[OptimizerName, float] = {"sgd": 0.1, "adam": 1e-3, "adamw": 1e-3}
SAME_ANSWER = 0.01
"""Relative distance up to which two answers to a sample are the same: rounding is below it, dropout far above."""
HIGHEST_RATE = 0.8
"""The rate of SGD, which grows with the batch, goes no higher."""


def fitted(spec: RunSpec, data: Data) -> tuple[RunSpec, int | None, Inputs]:
    """Returns the spec with the batch, image size, classes and stem that the data ask for, where it names none.

    And the pixels per side that the model will see, and inputs as the data give them. A model that is built elsewhere is
    not told of sizes: it takes what comes.
    """
    workload = spec.workload
    size: int | None
    classes: int | None
    if isinstance(data, ImageData):
        batch = workload.batch or min(DEFAULT_BATCH, len(data.train))
        if batch > len(data.train):
            raise SpecError(f"batch must be {len(data.train)} or less with so many training samples, got {batch}")
        size, classes = workload.image_size or data.size, workload.classes or data.classes
        inputs: Any = torch.zeros(batch, len(data.mean), size, size)
    else:
        assert spec.train is not None
        first = _first_of(data, spec.train.data.loader_timeout_s)
        inputs, batch = first.inputs, first.count
        size, classes = _image_size(inputs, workload), workload.classes or data.classes
    source = source_of(workload)
    if source.is_built_elsewhere:
        workload = msgspec.structs.replace(workload, batch=batch, image_size=None)
        return msgspec.structs.replace(spec, workload=workload), size, sort_inputs(inputs)
    if size is None:
        workload = msgspec.structs.replace(workload, sequence_length=workload.sequence_length or _length(inputs))
    elif classes is None:
        raise SpecError(f"{data.name} does not say how many classes there are: give --classes")
    workload = msgspec.structs.replace(workload, batch=batch, image_size=size, classes=classes)
    source.check(workload)
    if workload.stem is None and size is not None and source.has_stem(workload):
        workload = msgspec.structs.replace(workload, stem="cifar" if size <= CIFAR_STEM_UP_TO else "imagenet")
    return msgspec.structs.replace(spec, workload=workload), size, sort_inputs(inputs)


def _first_of(data: LoaderData, timeout_s: float) -> Parted:
    batch = next_of((data.first for _ in range(1)), timeout_s)
    if batch is None:
        raise BenchError("user", "the training loader gave no batch")
    return part_batch(batch)


def _length(inputs: Any) -> int | None:
    """Returns the length of token sequences among the inputs, which are whole numbers by sample and position."""
    tensors = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    tokens = [each for each in tensors if each.ndim == 2 and not each.is_floating_point()]
    return int(tokens[0].shape[1]) if tokens else None


def _image_size(inputs: Any, workload: WorkloadSpec) -> int | None:
    is_image = isinstance(inputs, Tensor) and inputs.ndim == 4
    return workload.image_size or (int(inputs.shape[-1]) if is_image else None)


def supply_of(
    spec: RunSpec, data: Data, size: int | None, device: Device, workload: Workload
) -> tuple[Supply, list[InputChange]]:
    """Batches for a fitted spec, and the list for what the recipe, once it is applied, does to every input."""
    assert spec.train is not None
    assert spec.workload.batch is not None
    changes: list[InputChange] = []
    form = _form(workload, changes)
    if spec.train.target_accuracy is not None and data.validation is None:
        raise SpecError("target_accuracy cannot be reached without a validation loader: there is no accuracy")
    if isinstance(data, LoaderData):
        arrive = UserArrival(device, form, _names_taken(workload.model))
        supply = Supply(
            train=lambda workers: UserBatches(data.train),
            validation=None if data.validation is None else UserBatches(data.validation),
            arrive=arrive,
            arrive_held_out=arrive,
            first=arrive(data.first),
            batch=spec.workload.batch,
            threaded=data.has_workers,
            queued=data.queued,
        )
        return supply, changes
    return _image_supply(spec, data, size or data.size, device, form), changes


def _image_supply(spec: RunSpec, data: ImageData, size: int, device: Device, form: Callable[[Any], Inputs]) -> Supply:
    assert spec.train is not None
    assert spec.workload.batch is not None
    settings, batch = spec.train.data, spec.workload.batch
    drop = spec.train.last_batch == "drop" or len(data.train) % batch == 1  # BatchNorm cannot train on one sample
    arrive, held_out = (ImageArrival(data, device, size, form) for _ in range(2))
    if settings.on_device:
        arrive.keep(data.train)
        held_out.keep(data.validation)

    def batches(samples: Samples, workers: int, *, train: bool) -> Batches:
        order = Order(len(samples), batch, seed=spec.seed, shuffle=train, drop_last=train and drop)
        if settings.on_device:
            return DeviceBatches(order, device, data.size, augment=train and settings.augment != "none")
        pin = settings.pin_memory and device.is_accelerator
        augment = settings.augment if train else "none"
        return LoadedBatches(samples, order, settings, augment=augment, pin=pin, workers=workers)

    first = Reader(data.train, "none")[list(range(batch)), 0]
    return Supply(
        train=lambda workers: batches(data.train, workers, train=True),
        validation=batches(data.validation, settings.workers, train=False),
        arrive=arrive,
        arrive_held_out=held_out,
        first=ImageArrival(data, device, size, form)(first),
        batch=batch,
        threaded=True,
    )


def _form(workload: Workload, changes: list[InputChange]) -> Callable[[Any], Inputs]:
    """Inputs as this model takes them: by position, or by the name it gave its own."""
    takes = _names_taken(workload.model)
    given = () if workload.args else workload.kwargs
    name = next((name for name in given if takes is None or name in takes), None)

    def form(inputs: Any) -> Inputs:
        args, kwargs = ((), {name: inputs}) if name and isinstance(inputs, Tensor) else sort_inputs(inputs)
        for change in changes:
            args, kwargs = pytree.tree_map_only(Tensor, change, (args, kwargs))
        return args, kwargs

    return form


def _names_taken(model: torch.nn.Module) -> list[str] | None:
    """Returns what `forward` may be given by name, or None if it takes any name."""
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY)
    return [each.name for each in parameters if each.kind not in variable]


def settle_loss(workload: Workload, supply: Supply, loss: TargetLoss) -> Supply:
    """Ask the model as it is whether it wants its targets, and which of what it returns is its loss.

    Targets are handed over where `forward` must have them, where they are the inputs themselves (the model then shifts
    them), and where the model answers something else without them.
    """
    model, first = workload.model, supply.first
    name = _name_of_targets(model)
    is_given = name is None or name in first.kwargs
    output = None if name and not is_given and _must_have(model, name, first) else _tried(model, first)
    if name and not is_given and (output is None or _are_copies(first) or not loss.takes(output)):
        arrive, held_out = (HandedOver(each, name) for each in (supply.arrive, supply.arrive_held_out))
        given = arrive.with_targets(first)
        if (answer := _tried(model, given)) is not None:
            supply = replace(supply, arrive=arrive, arrive_held_out=held_out, first=given)
            output, first = answer, given
    if output is None:
        return supply  # the first call will say why
    other = None
    if name in first.kwargs and isinstance(first.targets, Tensor):
        other = _tried(model, replace(first, kwargs={**first.kwargs, name: other_targets(first.targets)}))
    workload.notes += loss.learn(output, other)
    loss.takes(output)  # the loss learns its name
    return supply


def _tried(model: torch.nn.Module, batch: Arrived) -> Any:
    """Returns what the model answers for a batch in training, with dropout always alike, or None if it raises."""
    with unchanged_afterwards(model), torch.enable_grad():
        torch.manual_seed(0)  # an epoch has a seed of its own
        try:
            return model(*batch.args, **batch.kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            return None


def _name_of_targets(model: torch.nn.Module) -> str | None:
    """Under which of the usual names `forward` takes targets."""
    try:
        names = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return None
    return next((name for name in TARGETS if name in names), None)


def _must_have(model: torch.nn.Module, name: str, batch: Arrived) -> bool:
    parameters = list(inspect.signature(model.forward).parameters.values())
    given = {each.name for each in parameters[: len(batch.args)]}
    return name not in given and inspect.signature(model.forward).parameters[name].default is inspect.Parameter.empty


def _are_copies(batch: Arrived) -> bool:
    """True if the targets are the inputs themselves, apart from positions that are left out."""
    if not isinstance(targets := batch.targets, Tensor) or targets.is_floating_point():
        return False
    inputs = [each for each in (*batch.args, *batch.kwargs.values()) if isinstance(each, Tensor)]
    alike = [each for each in inputs if each.shape == targets.shape and each.dtype == targets.dtype]
    return any(bool(((each == targets) | (targets == IGNORED)).all()) for each in alike)


def take_over(workload: Workload, first: Arrived, data: Data) -> None:
    """Let the workload stand on a batch of the data instead of the inputs it was built with."""
    workload.put((first.args, first.kwargs))
    workload.batch, workload.batch_from, workload.items, workload.axes = first.count, "asked", None, None
    workload.input_hash = short_hash(f"{data.fingerprint} {describe((first.args, first.kwargs))}")
    workload.notes += data.notes
    if isinstance(data, LoaderData) and data.repeats:
        told = "the first batches of two loader workers are the same: each worker gives the whole set"
        workload.notes.append(note("repeated-samples", f"{told}; let the data set split itself by get_worker_info()"))


def note_what_stays(workload: Workload) -> None:
    """Note what training will not change: frozen parameters, and modules that stay in eval mode."""
    model = workload.model
    frozen = sum(each.numel() for each in model.parameters() if not each.requires_grad)
    if frozen:
        whole = sum(each.numel() for each in model.parameters())
        told = f"{format_count(frozen)} of {format_count(whole)} parameters are frozen"
        workload.notes.append(note("frozen", f"{told}: they get no gradient"))
    model.train()
    still = [name or type(model).__name__ for name, each in model.named_modules() if not each.training]
    if still:
        told = f"{still[0]} stays" if len(still) == 1 else f"{still[0]} and {len(still) - 1} more modules stay"
        workload.notes.append(note("stays-in-eval", f"{told} in eval mode, though the model was put in training mode"))


def check_answers(setup: Setup, data: Data, first: Arrived, loss: TargetLoss) -> None:
    """Checks that the model answers with as many classes as the data have: on a GPU one too few ends the process. It also notes whether
    what it answers in eval mode can be judged sample by sample."""
    model = setup.workload.model
    model.eval()
    try:
        with torch.no_grad(), setup.autocast(), unchanged_afterwards(model):
            output = model(*setup.args, **setup.kwargs)
            setup.workload.notes += _doubts_of_validation(model, setup, first.count, output)
    finally:
        model.train()
    logits = main_logits(output) if weighted_logits(output) else None
    if logits is None or logits.ndim < 2:
        return
    answers = logits.shape[class_axis(logits)]
    if data.classes is not None and answers < data.classes:
        raise SpecError(f"the model answers with {answers} classes, and {data.name} has {data.classes}")
    if (wrong := loss.class_beyond(logits)) is not None:
        raise SpecError(f"a target is {wrong}, and the model answers with {answers} classes: 0 to {answers - 1}")


def _doubts_of_validation(model: torch.nn.Module, setup: Setup, count: int, output: Any) -> Iterator[Note]:
    """Yields what makes held-out accuracy depend on more than the weights and the sample. It asks the model again."""
    if _apart(output, model(*setup.args, **setup.kwargs), count) > SAME_ANSWER:
        told = "in eval mode the model answers the same batch differently each time"
        yield note("random-in-eval", f"{told}: dropout or noise is still on, and validation measures the model with it")
        return

    def of_first(leaf: Tensor) -> Tensor:
        return leaf[:1].expand_as(leaf).contiguous() if leaf.ndim and len(leaf) == count else leaf

    args, kwargs = pytree.tree_map_only(Tensor, of_first, (setup.args, setup.kwargs))
    try:
        alone = model(*args, **kwargs)
    except Exception:  # on one sample again and again, which no training has: that says nothing
        return
    if _apart(output, alone, count, rows=1) > SAME_ANSWER:
        still = next((name or type(each).__name__ for name, each in model.named_modules() if each.training), None)
        why = f"{still} stays in training mode" if still else "as BatchNorm without running statistics does"
        told = "in eval mode the answer to a sample depends on the others in its batch"
        yield note("mixes-samples", f"{told} ({why}): accuracy changes with the batch")


def _apart(one: Any, other: Any, count: int, rows: int | None = None) -> float:
    """How far the answers to the first rows are from each other, relative to their size."""
    pairs = [
        (a[:rows].double(), b[:rows].double())
        for a, b in zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=False)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and a.is_floating_point() and a.ndim and len(a) == count
    ]
    sizes = [(float((a - b).norm()), float(a.norm())) for a, b in pairs if a.shape == b.shape]
    return max((apart / size for apart, size in sizes if size > 0 and math.isfinite(apart)), default=0.0)


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
    fate: LastBatchFate = "none"
    if left:
        dropped = steps * supply.batch <= counts[0]
        fate = "dropped" if dropped else "run eagerly" if needs_whole_batches(setup) else "run"
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
