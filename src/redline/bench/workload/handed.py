"""What a person hands over, by a factory or alive: a module, (module, inputs) or (module, inputs, loss)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.workload.fingerprint import forward_code
from redline.bench.workload.inputs import Inputs, leading_size, resize_leading
from redline.bench.workload.structure import named_tensors
from redline.bench.workload.workload import Workload, assemble
from redline.errors import BenchError, SpecError
from redline.note import Note, note
from redline.spec import WorkloadSpec

EXPECTED = "expected a module, (module, inputs) or (module, inputs, loss)"


@dataclass(frozen=True)
class Handed:
    model: nn.Module
    inputs: Inputs | None
    loss: Callable[..., Tensor] | None


def sort_out(returned: Any, whose: str) -> Handed:
    """Read what was handed over; `whose` begins the sentence when it makes no sense."""
    parts = tuple(returned) if isinstance(returned, tuple | list) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise BenchError("user", f"{whose} gave {len(parts)} things; {EXPECTED}")
    model = parts[0]
    inputs = parts[1] if len(parts) > 1 else None
    loss = parts[2] if len(parts) > 2 else None
    if not isinstance(model, nn.Module):
        raise BenchError("user", f"{whose} gave {type(model).__name__} where a torch.nn.Module belongs; {EXPECTED}")
    if loss is not None and not callable(loss):
        raise BenchError("user", f"{whose} gave {type(loss).__name__} where the loss belongs, which must be callable")
    return Handed(model, None if inputs is None else sort_inputs(inputs), loss)


def sort_inputs(inputs: Any) -> Inputs:
    """A mapping goes in by keyword, a tuple or list by position, anything else is the one argument."""
    if isinstance(inputs, Mapping):
        return (), {str(key): value for key, value in inputs.items()}
    # A named tuple is one thing with a shape of its own.
    if isinstance(inputs, tuple | list) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def workload_of(
    handed: Handed,
    spec: WorkloadSpec,
    *,
    whose: str,
    source: str,
    identity: str,
    seed: int,
    resize: bool,
    notes: list[Note],
) -> Workload:
    """A workload of what was handed over; `resize`: the batch is still to be given to the inputs."""
    inputs = _inputs_of(handed, spec, whose, notes)
    if resize and spec.batch is not None:
        inputs = _with_batch(inputs, spec.batch, seed, whose, notes)
    model = handed.model
    if any(nn.parameter.is_lazy(tensor) for tensor in (*model.parameters(), *model.buffers())):
        with torch.no_grad():
            model.eval()(*inputs[0], **inputs[1])  # lazy layers take their shape from the first call
    workload = assemble(
        model,
        inputs,
        task=spec.task,
        source=source,
        identity=f"{identity} {forward_code(model)}",
        seed=seed,
        loss=handed.loss,
        weights_are_random=source != "live",
        notes=notes,
    )
    dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()} - {torch.float32}
    if dtypes:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        text = f"the model holds {names} parameters: its reference is not strict fp32"
        workload.notes.append(note("model", text))
    # Built without memory, for counting alone, there is nothing to move.
    return workload if any(one.is_meta for one in model.parameters()) else workload.to("cpu")


def _inputs_of(handed: Handed, spec: WorkloadSpec, whose: str, notes: list[Note]) -> Inputs:
    if handed.inputs is not None:
        if spec.image_size is not None:
            raise SpecError(f"image_size {spec.image_size} cannot be honoured: {whose} brings its own inputs")
        return handed.inputs
    if spec.image_size is None:
        raise BenchError(
            "user",
            f"{whose} gave a module without inputs: give (module, inputs), or image_size if it takes images",
        )
    notes.append(note("input", f"random images of {spec.image_size}×{spec.image_size} as inputs, as asked"))
    return (torch.randn(spec.batch or 1, 3, spec.image_size, spec.image_size),), {}


def _with_batch(inputs: Inputs, batch: int, seed: int, whose: str, notes: list[Note]) -> Inputs:
    old = leading_size(inputs)
    if old is None:
        raise SpecError(f"batch {batch} cannot be honoured: no input of {whose} has a dimension 0")
    if old == batch:
        return inputs
    tensors = named_tensors(inputs)
    kept = [tensor for _, tensor in tensors if tensor.ndim == 0 or tensor.shape[0] != old]
    left = f"; {len(kept)} of {len(tensors)} inputs do not share that size and stay" if kept else ""
    notes.append(note("changed-batch", f"dimension 0 of the inputs changed from {old} to {batch}{left}"))
    return resize_leading(inputs, batch, seed)
