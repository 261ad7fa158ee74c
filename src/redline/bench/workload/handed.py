"""This module reads what a person hands over, by a factory or as a live object: a module, its inputs, a loss, and what is
known about them.

The contract is `module`, `(module, inputs)`, `(module, inputs, loss)`, `(module, inputs, loss, targets)`, or a dict with
these and `batch_axis`, `items` and `item`. A factory makes it, given the batch and the seed if it takes them.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.device.failure import one_line
from redline.bench.workload.batch import contract_axes, declared_axes, size_along
from redline.bench.workload.build import Source, refuse_options
from redline.bench.workload.called import OwnStep, StepModule, TrainsItself, call_with, trains_itself
from redline.bench.workload.decoder import generator_workload, own_decoder
from redline.bench.workload.fingerprint import code_of, forward_code
from redline.bench.workload.inputs import Inputs, copied, input_shapes, input_tensors, seeded
from redline.bench.workload.structure import describe
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import BenchError, SpecError, closest
from redline.model.note import Note, note
from redline.model.record import BatchOrigin
from redline.model.spec import WorkloadSpec

EXPECTED = "expected a module, (module, inputs), (module, inputs, loss), (module, inputs, loss, targets) or a dict"
PARTS = ("model", "inputs", "loss", "targets", "batch_axis", "items", "item")
"""A dict may hold these keys."""
KnownBatch = tuple[int, BatchOrigin]
"""This is the batch that a factory was called with, and who chose it."""


@dataclass(frozen=True, kw_only=True)
class Handed:
    model: nn.Module
    inputs: Inputs | None = None
    loss: Callable[..., Tensor] | None = None
    targets: Any = None
    batch_axis: Any = None
    items: int | None = None
    item: str = "item"
    """One item is called by this word, which may be a token, a node or a frame."""


@dataclass(frozen=True)
class Factory:
    """It makes a model by calling the user's function with the batch and the seed, if the function takes them."""

    function: Callable[..., Any]
    parameter: inspect.Parameter | None
    """The batch is given as this parameter."""
    whose: str
    """Messages about the factory begin with this."""

    def __call__(self, batch: int | None, seed: int) -> Handed:
        return sort_out(call_with(self.function, self.parameter, batch, seed, self.whose), self.whose)

    def inputs(self, seed: int, batch: int | None) -> Inputs:
        """Returns only the inputs, made with another seed. The model that comes with them is dropped."""
        with seeded(seed):
            inputs = self(batch, seed).inputs
        if inputs is None:
            raise BenchError("user", f"{self.whose} gave no inputs this time")
        return inputs


class OwnSource(Source):
    """This is the base of the sources of what people bring themselves."""

    is_built_elsewhere = True
    writes_text = True
    name = ""

    @abstractmethod
    def factory(self, spec: WorkloadSpec) -> Factory: ...

    @abstractmethod
    def step(self, spec: WorkloadSpec) -> OwnStep: ...

    @abstractmethod
    def identity(self, spec: WorkloadSpec) -> str:
        """Returns text that tells this model from another of the same class."""

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        return self.build_for(spec, seed, None)

    def build_for(self, spec: WorkloadSpec, seed: int, inputs: Inputs | None) -> Workload:
        notes: list[Note] = []
        if spec.task == "step":
            return workload_of_step(self.step(spec), spec, source=self.name, identity=self.identity(spec), seed=seed)
        factory = self.factory(spec)
        if spec.task == "generate":
            batch = choose_batch(spec.batch, "generate", notes)
            decoder = own_decoder(factory(batch, seed).model, spec, batch, seed, factory.whose)
            return generator_workload(decoder, source=self.name, identity=self.identity(spec), seed=seed, notes=notes)
        known = batch_to_ask(factory.parameter, spec, notes)
        handed = factory(known[0] if known else None, seed)
        if known is not None and handed.inputs is not None:
            refuse_another_batch(factory, handed.inputs, known[0], seed)
        workload = workload_of(
            handed,
            spec,
            whose=factory.whose,
            source=self.name,
            identity=self.identity(spec),
            seed=seed,
            notes=notes,
            known=known,
            data=inputs,
        )
        workload.again = factory.inputs if self.name == "user" else None
        return workload


def refuse_another_batch(factory: Factory, inputs: Inputs, batch: int, seed: int) -> None:
    """Refuses a factory that makes the same inputs for whatever batch it is told.

    By the contract the size of the first input shows it. Packed and ragged inputs and graphs do not show it. Then the
    factory is asked for twice as many, and must give other shapes. A factory that takes no other batch is believed.
    """
    axes = contract_axes(inputs)
    if axes and size_along(inputs, axes) == batch:
        return
    try:
        other = factory.inputs(seed, 2 * batch)
    except Exception:
        return
    if (describe(other), input_shapes(other)) == (describe(inputs), input_shapes(inputs)):
        name = factory.parameter.name if factory.parameter else "batch"
        raise SpecError(
            f"{factory.whose} takes {name} but gives the same inputs for {batch} and {2 * batch}: make the inputs with "
            "it, or leave it out"
        )


def sort_out(returned: Any, whose: str) -> Handed:
    """Reads what was handed over. `whose` begins the sentence of an error."""
    if isinstance(returned, Mapping):
        parts = dict(returned)
        if unknown := [str(key) for key in parts if key not in PARTS]:
            near = closest(unknown[0], PARTS)
            hint = f"did you mean {near[0]}?" if near else f"it may hold {', '.join(PARTS)}"
            raise BenchError("user", f"{whose} gave a dict with {unknown[0]!r}; {hint}")
    else:
        several = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
        if not 1 <= len(several) <= 4:
            raise BenchError("user", f"{whose} gave {len(several)} things; {EXPECTED}")
        parts = dict(zip(PARTS, several, strict=False))
    model, loss, items, inputs = (parts.get(name) for name in ("model", "loss", "items", "inputs"))
    if isinstance(model, torch.export.ExportedProgram):
        model = model.module()
    if not isinstance(model, nn.Module):
        is_function = returned is None or (callable(model) and not isinstance(model, type))
        hint = " (to time the function itself: --task step)" if is_function else ""
        raise BenchError(
            "user", f"{whose} gave {type(model).__name__} where a torch.nn.Module belongs{hint}; {EXPECTED}"
        )
    if loss is not None and not callable(loss):
        raise BenchError("user", f"{whose} gave {type(loss).__name__} where the loss belongs, which must be callable")
    if items is not None and (type(items) is not int or items < 1):
        raise BenchError("user", f"{whose} gave items {items!r}: a whole number of 1 or more belongs there")
    return Handed(**{**parts, "model": model, "inputs": None if inputs is None else sort_inputs(inputs)})


def sort_inputs(inputs: Any) -> Inputs:
    """Returns keywords for a mapping, positional arguments for a tuple or a list, and one argument for anything else."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    # A named tuple is one argument with a structure of its own.
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def batch_to_ask(parameter: inspect.Parameter | None, spec: WorkloadSpec, notes: list[Note]) -> KnownBatch | None:
    """Returns the batch for a function that takes one. It is the one asked for, else the function's own default, else ours."""
    if parameter is None:
        return None
    if spec.batch is None and type(parameter.default) is int:
        return parameter.default, "declared"
    return choose_batch(spec.batch, spec.task, notes), "asked"


def workload_of_step(step: OwnStep, spec: WorkloadSpec, *, source: str, identity: str, seed: int) -> Workload:
    """Returns a workload that calls a function as it is. `setup` is called when the device is known."""
    notes: list[Note] = []
    refuse_options(spec, "batch_axis", "image_size", why="a function is timed as it is")
    known = batch_to_ask(step.batch_parameter(), spec, notes)
    if known is None:
        refuse_options(spec, "batch", why="its setup takes no batch")
    workload = assemble(
        StepModule(step),
        step.inputs,
        task="step",
        source=source,
        identity=f"{identity} {code_of(step.function)}",
        seed=seed,
        known=known,
        weights_are_random=False,
        inputs_are_free=False,
        notes=notes,
    )
    workload.items, workload.step, workload.seed = spec.items, step, seed
    return workload


def workload_of(
    handed: Handed,
    spec: WorkloadSpec,
    *,
    whose: str,
    source: str,
    identity: str,
    seed: int,
    notes: list[Note],
    known: KnownBatch | None = None,
    data: Inputs | None = None,
) -> Workload:
    """Returns a workload of what was handed over, with the batch that is known so far. `settle_batch` does the rest.

    `data` are inputs of the data it is to be trained on, which stand in for those that were not given.
    """
    model, inputs = handed.model, handed.inputs or data
    refuse_options(spec, "image_size", why=f"{whose} brings its own inputs")
    if inputs is None:
        raise BenchError("user", f"{whose} gave a module without inputs: give (module, inputs)")
    _settle_mode(model, spec.task)
    weights = [*model.parameters(), *model.buffers()]
    if not weights or any(map(nn.parameter.is_lazy, weights)):
        args, kwargs = copied(inputs)
        # Lazy layers take their shape from the first call, and some models make their layers in it.
        with torch.no_grad():
            model.eval()(*args, **kwargs)
    if any(tensor.is_inference() for tensor in (*model.parameters(), *model.buffers())):
        raise BenchError(
            "user", f"{whose} made its weights under torch.inference_mode(), which nobody may change: make them outside"
        )
    if any(tensor.is_inference() for _, tensor in input_tensors(inputs)):
        inputs = copied(inputs)
    if spec.task == "train" and handed.loss is None and handed.targets is None and trains_itself(model):
        if spec.optimizer != "sgd":
            raise SpecError(f"optimizer {spec.optimizer} cannot be honoured: {type(model).__name__} brings its own")
        model = TrainsItself(model)
    declared = spec.batch_axis if spec.batch_axis is not None else handed.batch_axis
    axes = None if declared is None else declared_axes(declared, inputs)
    if axes is not None and known is None:
        known = size_along(inputs, axes), "declared"
    other = {str(one.dtype).removeprefix("torch.") for one in model.parameters() if one.is_floating_point()} - {
        "float32"
    }
    if other:
        held = ", ".join(sorted(other))
        notes.append(note("model", f"the model holds {held} parameters: its reference is not strict fp32"))
    workload = assemble(
        model,
        inputs,
        task=spec.task,
        source=source,
        identity=f"{identity} {forward_code(model)}",
        seed=seed,
        known=known,
        axes=axes,
        item=handed.item,
        loss=handed.loss,
        targets=handed.targets,
        weights_are_random=source != "live",
        inputs_are_free=handed.inputs is None,
        notes=notes,
    )
    workload.items = spec.items or handed.items
    # A model that was built without memory, for counting alone, cannot be moved.
    return workload if any(one.is_meta for one in model.parameters()) else workload.to("cpu")


def _settle_mode(model: nn.Module, task: str) -> None:
    """Sets the mode of the model. A module that refuses to change its mode, as those of torch.export do, stays as it is."""
    try:
        model.train(task == "train")
    except NotImplementedError as error:
        if task == "train":
            raise BenchError("unsupported", f"{type(model).__name__} cannot be trained: {one_line(error)}") from error
        for name in ("train", "eval"):
            setattr(model, name, MethodType(lambda own, mode=True: own, model))
        for module in model.modules():
            # This module has no other mode, and a compiler looks at this flag.
            module.training = False
