"""What a person hands over, by a factory or alive: a module, its inputs, a loss, and what is to be known about them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.device.failure import one_line
from redline.bench.workload.batch import declared_axes, size_along
from redline.bench.workload.called import CallsFunction, OwnStep, StepModule, TrainsItself, trains_itself
from redline.bench.workload.fingerprint import code_of, forward_code
from redline.bench.workload.inputs import Inputs, copied
from redline.bench.workload.source import refuse_options
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import BenchError, SpecError, closest
from redline.model.note import Note, note
from redline.model.record import BatchOrigin
from redline.model.spec import WorkloadSpec

EXPECTED = "expected a module, (module, inputs), (module, inputs, loss), (module, inputs, loss, targets) or a dict"
PARTS = ("model", "inputs", "loss", "targets", "batch_axis", "items", "item")
"""What a dict may hold."""


@dataclass(frozen=True, kw_only=True)
class Handed:
    model: nn.Module
    inputs: Inputs | None = None
    loss: Callable[..., Tensor] | None = None
    targets: Any = None
    """For `loss(output, target)`."""
    batch_axis: Any = None
    """As `WorkloadSpec.batch_axis`."""
    items: int | None = None
    item: str = "item"
    """What one of them is called: token, node, frame."""


@dataclass(frozen=True, kw_only=True)
class KnownBatch:
    """The batch a factory was called with."""

    size: int
    origin: BatchOrigin


def sort_out(returned: Any, whose: str) -> Handed:
    """Read what was handed over; `whose` begins the sentence when it makes no sense."""
    parts = _parts(returned, whose)
    model, loss, items = _as_module(parts.get("model")), parts.get("loss"), parts.get("items")
    if not isinstance(model, nn.Module):
        hint = " (to time the function itself: --task step)" if returned is None else ""
        raise BenchError(
            "user", f"{whose} gave {type(model).__name__} where a torch.nn.Module belongs{hint}; {EXPECTED}"
        )
    if loss is not None and not callable(loss):
        raise BenchError("user", f"{whose} gave {type(loss).__name__} where the loss belongs, which must be callable")
    if items is not None and (not isinstance(items, int) or isinstance(items, bool) or items < 1):
        raise BenchError("user", f"{whose} gave items {items!r}: a whole number of 1 or more belongs there")
    inputs = parts.get("inputs")
    return Handed(
        model=model,
        inputs=None if inputs is None else sort_inputs(inputs),
        loss=loss,
        targets=parts.get("targets"),
        batch_axis=parts.get("batch_axis"),
        items=items,
        item=str(parts.get("item", "item")),
    )


def _as_module(model: Any) -> Any:
    """An exported program as the module it holds, a function as a module that calls it; anything else as it is."""
    if isinstance(model, torch.export.ExportedProgram):
        return model.module()
    return CallsFunction(model) if callable(model) and not isinstance(model, nn.Module | type) else model


def _parts(returned: Any, whose: str) -> dict[str, Any]:
    if isinstance(returned, Mapping):
        unknown = next((key for key in returned if key not in PARTS), None)
        if unknown is not None:
            near = closest(str(unknown), PARTS)
            hint = f"; did you mean {near[0]}?" if near else f"; it may hold {', '.join(PARTS)}"
            raise BenchError("user", f"{whose} gave a dict with {unknown!r}{hint}")
        return dict(returned)
    parts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if not 1 <= len(parts) <= 4:
        raise BenchError("user", f"{whose} gave {len(parts)} things; {EXPECTED}")
    return dict(zip(PARTS, parts, strict=False))


def sort_inputs(inputs: Any) -> Inputs:
    """A mapping goes in by keyword, a tuple or list by position, anything else is the one argument."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    # A named tuple is one thing with a shape of its own.
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def batch_to_ask(parameter: inspect.Parameter | None, spec: WorkloadSpec, notes: list[Note]) -> KnownBatch | None:
    """The batch for a function that takes one: the one asked for, its own default, else ours."""
    if parameter is None:
        return None
    if spec.batch is None and isinstance(parameter.default, int) and not isinstance(parameter.default, bool):
        return KnownBatch(size=parameter.default, origin="declared")
    return KnownBatch(size=choose_batch(spec.batch, spec.task, notes), origin="asked")


def workload_of_step(step: OwnStep, spec: WorkloadSpec, *, source: str, identity: str, seed: int) -> Workload:
    """A workload that calls a function as it is; `setup` is called when the device is known."""
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
        batch=known.size if known else None,
        batch_from=known.origin if known else "unknown",
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
    again: Callable[[int, int | None], Inputs] | None = None,
    data: Inputs | None = None,
) -> Workload:
    """A workload of what was handed over, with the batch that is known so far; `settle_batch` does the rest.

    `data`: inputs of the data it is to be trained on, which stand in for those that were not given.
    """
    model = handed.model
    if handed.inputs is None and data is not None:
        inputs = data
    elif handed.inputs is None:
        inputs, known = _images(spec, whose, notes)
    else:
        inputs = handed.inputs
        _refuse_image_size(spec, whose)
    _settle_mode(model, spec.task)
    _settle_lazy_layers(model, inputs)
    model, inputs = _outside_inference_mode(model), copied(inputs) if _are_of_inference(inputs) else inputs
    if spec.task == "train" and handed.loss is None and handed.targets is None and trains_itself(model):
        model = _training_itself(model, spec, notes)
    declared = spec.batch_axis if spec.batch_axis is not None else handed.batch_axis
    axes = None if declared is None else declared_axes(declared, inputs)
    if axes is not None and known is None:
        known = KnownBatch(size=size_along(inputs, axes), origin="declared")
    workload = assemble(
        model,
        inputs,
        task=spec.task,
        source=source,
        identity=f"{identity} {forward_code(model)}",
        seed=seed,
        batch=known.size if known else None,
        batch_from=known.origin if known else "unknown",
        axes=axes,
        item=handed.item,
        loss=handed.loss,
        targets=handed.targets,
        weights_are_random=source != "live",
        notes=notes,
    )
    workload.items = spec.items or handed.items
    workload.inputs_are_free, workload.again = handed.inputs is None, again
    workload.notes.extend(_other_formats(model))
    # Built without memory, for counting alone, there is nothing to move.
    return workload if any(one.is_meta for one in model.parameters()) else workload.to("cpu")


def _settle_lazy_layers(model: nn.Module, inputs: Inputs) -> None:
    """Lazy layers take their shape from the first call."""
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        with torch.no_grad():
            model.eval()(*inputs[0], **inputs[1])


def _other_formats(model: nn.Module) -> Iterator[Note]:
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {torch.float32}
    if dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        yield note("model", f"the model holds {names} parameters: its reference is not strict fp32")


def _are_of_inference(inputs: Inputs) -> bool:
    return any(tensor.is_inference() for _, tensor in named_tensors(inputs))


def _outside_inference_mode(model: nn.Module) -> nn.Module:
    """The model with weights that may be written: those made under torch.inference_mode() may not."""
    copies: dict[Tensor, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or not tensor.is_inference():
                    continue
                if tensor not in copies:
                    plain = tensor.clone()
                    copies[tensor] = nn.Parameter(plain, tensor.requires_grad) if held is module._parameters else plain
                held[name] = copies[tensor]  # type: ignore[assignment]
    return model


def _settle_mode(model: nn.Module, task: str) -> None:
    """Let a module that refuses to change its mode, as those of torch.export do, stay as it is."""
    try:
        model.train(task == "train")
    except NotImplementedError as error:
        if task == "train":
            raise BenchError("unsupported", f"{type(model).__name__} cannot be trained: {one_line(error)}") from error
        for name in ("train", "eval"):
            setattr(model, name, MethodType(_stay, model))
        for module in model.modules():
            module.training = False  # it has no other mode, and a compiler looks at this flag


def _stay(model: nn.Module, mode: bool = True) -> nn.Module:
    return model


def _training_itself(module: nn.Module, spec: WorkloadSpec, notes: list[Note]) -> TrainsItself:
    name = type(module).__name__
    if spec.optimizer != "sgd":
        raise SpecError(f"optimizer {spec.optimizer} cannot be honoured: {name} brings its own")
    model = TrainsItself(module)
    if unused := model.unused_hooks():
        notes.append(note("model", f"{', '.join(unused)} of {name} not called: a bare step has no trainer"))
    return model


def _refuse_image_size(spec: WorkloadSpec, whose: str) -> None:
    if spec.image_size is not None:
        raise SpecError(f"image_size {spec.image_size} cannot be honoured: {whose} brings its own inputs")


def _images(spec: WorkloadSpec, whose: str, notes: list[Note]) -> tuple[Inputs, KnownBatch]:
    """Pictures for a module that came without inputs."""
    if spec.image_size is None:
        raise BenchError(
            "user",
            f"{whose} gave a module without inputs: give (module, inputs), or image_size if it takes images",
        )
    notes.append(note("input", f"random images of {spec.image_size}×{spec.image_size} as inputs, as asked"))
    batch = spec.batch or 1
    return ((torch.randn(batch, 3, spec.image_size, spec.image_size),), {}), KnownBatch(size=batch, origin="source")
