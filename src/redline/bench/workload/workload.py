"""A model with everything one step needs: inputs of any structure, a loss, and how to count what it did."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from redline.bench.device.failure import one_line
from redline.bench.workload.batch import Axes, resize
from redline.bench.workload.called import CallsFunction, OwnStep, TrainsItself, name_of
from redline.bench.workload.fingerprint import input_hash, model_hash
from redline.bench.workload.inputs import (
    Inputs,
    changed_slightly,
    copied,
    input_shapes,
    input_tensors,
    redraw,
    same_values,
)
from redline.bench.workload.losses import TrainingLoss, training_loss
from redline.bench.workload.state import Untouched
from redline.bench.workload.structure import WholeDispatchMode, describe, map_leaves, parameter_count
from redline.model.errors import SpecError
from redline.model.note import Note, note
from redline.model.record import BatchOrigin, SecondInputs, WorkloadInfo
from redline.model.spec import Task

DEFAULT_BATCH: dict[Task, int] = {"infer": 1, "train": 8, "step": 8, "generate": 1}
"""For models by name, and for factories that must be told: one request at a time, and a small training step."""

INPUTS_ARE_RESTORED = "the model writes into its inputs: they are restored before every step"

Gradients = Literal["inference", "off", "on"]


class Second(NamedTuple):
    """Inputs to compare outputs on, beside those that are timed."""

    inputs: Inputs
    how: SecondInputs


@dataclass(kw_only=True)
class Workload:
    model: nn.Module
    args: Untouched[tuple[Any, ...]] = Untouched()  # noqa: RUF009  (a descriptor, which keeps a value per object)
    kwargs: Untouched[dict[str, Any]] = Untouched()  # noqa: RUF009  (a descriptor, which keeps a value per object)
    loss: TrainingLoss
    """Of the output alone, for training."""
    task: Task
    batch: int | None
    """None: not known (yet); see `settle_batch`."""
    batch_from: BatchOrigin
    item: str
    """What is counted: img, seq or item."""
    axes: Axes | None
    """Where the inputs hold their items; None where that is not known, and they cannot be resized."""
    source: str
    model_hash: str
    input_hash: str
    items: int | None = None
    """What one step was declared to count as, where that is not the batch."""
    inputs_are_free: bool = True
    """Any values of these shapes would do: Redline made them. The user's own inputs may have a structure."""
    again: Callable[[int, int | None], Inputs] | None = None
    """Other inputs of the same kind on the CPU, from the user's factory: of a seed and a batch, where it takes one."""
    gradients: Gradients = "inference"
    """What inference runs under: a model that differentiates inside its forward pass cannot do so in inference mode."""
    originals: Inputs | None = None
    """The inputs as they were, where the model writes into them: every step then begins with these."""
    device: torch.device | str = "cpu"
    is_cpu_only: bool = False
    """Torch has its operators for no other device."""
    weights_are_random: bool = True
    """Numerics then need a model that carries signal: see `signal.py`."""
    notes: list[Note] = field(default_factory=list)
    step: OwnStep | None = None
    """A function of the user's, which `model` stands for; it is timed as it is."""
    seed: int = 0
    """Of `step`."""
    vocabulary: dict[str, int] = field(default_factory=dict)
    """How many values an integer input may take, by its place in the inputs (`0`, `input_ids`)."""

    @property
    def items_per_step(self) -> int:
        """1 where nothing is known: then steps are counted."""
        return self.items or self.batch or 1

    def to(self, device: torch.device | str) -> Workload:
        """Move model, inputs and the user's own targets; random ones are made where the output is.

        A function of the user's stays as it is: its `setup` is told the device.
        """
        if self.is_cpu_only and torch.device(device).type != "cpu":
            raise SpecError("torch computes quantized models like this one on a CPU alone: give --device cpu")
        self.device = device
        if self.step is not None:
            self.step.start(device, self.batch, self.seed)
            return self
        self.loss.to(device)
        self.model.to(device)
        self.args, self.kwargs = self.moved((self.args, self.kwargs))
        return self

    def context(self) -> AbstractContextManager[Any]:
        """To be held around forward passes of inference."""
        modes = {"inference": torch.inference_mode, "off": torch.no_grad, "on": torch.enable_grad}
        return modes[self.gradients]()

    def keep_originals(self) -> None:
        """Of inputs that the model was seen writing into."""
        self.originals = copied((self.args, self.kwargs))
        self.notes.append(note("input", INPUTS_ARE_RESTORED))

    def differentiates(self, call: Callable[[], Any]) -> bool:
        """Whether `call`, which failed in inference mode, does not with gradients possible; they then are from now on."""
        words = {"off": "torch.no_grad()", "on": "gradients on"}
        if self.gradients != "inference" or self.task != "infer":
            return False
        for mode in words:
            self.gradients = mode  # type: ignore[assignment]
            try:
                with _SeesBackward() as seen:
                    call()
            except Exception:
                continue
            why = (
                "differentiates in its forward pass, which inference mode forbids"
                if seen.found
                else f"fails in inference mode{' and under torch.no_grad()' if mode == 'on' else ''}"
            )
            text = f"measured with {words[mode]}: the model {why}"
            self.notes.append(note("model", text))
            return True
        self.gradients = "inference"
        return False

    def moved(self, inputs: Inputs) -> Inputs:
        """The inputs where the model is."""

        def move(_: str, leaf: Any) -> Any:
            # Graph batches and the like are no tensors, but know how to move.
            return leaf.to(self.device) if isinstance(leaf, Tensor) or callable(getattr(leaf, "to", None)) else leaf

        args, kwargs = inputs
        return map_leaves(args, move), map_leaves(kwargs, move)

    def put(self, inputs: Inputs) -> None:
        """Take these inputs from now on."""
        self.args, self.kwargs = inputs
        self.input_hash = input_hash(*inputs)

    def second_inputs(self, seed: int) -> Second | None:
        """Other inputs of the same structure, shapes and dtypes, and how they were had; None where there are none.

        Free ones are drawn. The user's own come from the factory again; where that is impossible, floating tensors get a
        little noise.
        """
        own = self.args, self.kwargs
        if self.inputs_are_free:
            return Second(redraw(own, seed, self.vocabulary), "drawn")
        other = self._from_factory(seed)
        if other is not None and describe(other) == describe(own) and not same_values(other, own):
            return Second(other, "factory")
        changed = changed_slightly(own, seed)
        return None if same_values(changed, own) else Second(changed, "noise")

    def _from_factory(self, seed: int) -> Inputs | None:
        if self.again is None:
            return None
        try:
            other = self.moved(self.again(seed, self.batch))
            return other if self.axes is None or self.batch is None else resize(other, self.axes, self.batch)
        except Exception as error:
            self.notes.append(note("one-input-set", f"no second inputs from the factory: {one_line(error)}"))
            return None

    def _made(self, item: str) -> int | None:
        """How large Redline made one picture or sequence; None for anything else."""
        if not self.inputs_are_free or self.item != item:
            return None
        shapes = [tensor.shape for _, tensor in input_tensors((self.args, self.kwargs))]
        if item == "img":
            return next((shape[-1] for shape in shapes if len(shape) >= 4 and shape[-1] == shape[-2]), None)
        return next((shape[1] for shape in shapes if len(shape) == 2), None)

    def _name(self) -> str:
        if self.step is not None:
            return self.step.name
        model = self.model.module if isinstance(self.model, TrainsItself) else self.model
        known = getattr(model, "written_by", model)
        return name_of(known) if isinstance(known, CallsFunction) else type(known).__qualname__

    def _parts(self) -> list[nn.Module]:
        return [self.model] if self.step is None else list(self.step.modules().values())

    def _own_optimizer(self) -> str:
        if not isinstance(self.model, TrainsItself) or any(one.is_meta for one in self.model.parameters()):
            return ""
        return f"{type(self.model.optimizer()).__name__} of its own"

    def info(self) -> WorkloadInfo:
        return WorkloadInfo(
            source=self.source,
            class_name=self._name(),
            parameters=parameter_count(*self._parts()),
            items_per_step=self.items_per_step,
            item=self.item if self.items or self.batch else "step",
            batch=self.batch,
            batch_from=self.batch_from,
            input_shapes=input_shapes((self.args, self.kwargs)),
            image_size=self._made("img"),
            sequence_length=self._made("seq"),
            loss=self.loss.name if self.task == "train" else "",
            optimizer=self._own_optimizer(),
            model_hash=self.model_hash,
            input_hash=self.input_hash,
            notes=tuple(self.notes),
        )


class _SeesBackward(WholeDispatchMode):
    """Whether anything ran in a backward pass. Some tensors, ragged ones among them, fail in inference mode without one."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or torch._C._current_graph_task_id() >= 0
        if isinstance(func, HigherOrderOperator):
            return self.opened(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def assemble(
    model: nn.Module,
    inputs: Inputs,
    *,
    task: Task,
    source: str,
    identity: str,
    seed: int,
    batch: int | None = None,
    batch_from: BatchOrigin = "source",
    axes: Axes | None = None,
    item: str = "item",
    loss: Callable[..., Tensor] | None = None,
    targets: Any = None,
    weights_are_random: bool = True,
    inputs_are_free: bool = True,
    vocabulary: dict[str, int] | None = None,
    notes: list[Note] | None = None,
) -> Workload:
    """What every source ends with: the mode set by the task, the loss settled, the hashes taken.

    A source that makes its inputs names their `batch`, and has put it first in every tensor that has it.
    """
    args, kwargs = inputs
    if batch is not None and batch_from == "source" and axes is None:
        axes = {path: 0 for path, tensor in input_tensors(inputs) if tensor.ndim and tensor.shape[0] == batch}
    return Workload(
        model=model.train(task == "train"),
        args=args,
        kwargs=kwargs,
        loss=training_loss(loss, seed, targets),
        task=task,
        batch=batch,
        batch_from="unknown" if batch is None else batch_from,
        item=item,
        axes=axes,
        source=source,
        model_hash=model_hash(model, identity),
        input_hash=input_hash(args, kwargs),
        inputs_are_free=inputs_are_free,
        weights_are_random=weights_are_random,
        notes=list(notes or []),
        vocabulary=vocabulary or {},
    )


def choose_batch(batch: int | None, task: Task, notes: list[Note]) -> int:
    """The batch asked for, or the default with a note that says so."""
    if batch is not None:
        return batch
    what = {"infer": "inference", "train": "training", "step": "a step", "generate": "generation"}[task]
    text = f"batch {DEFAULT_BATCH[task]} by default for {what}"
    notes.append(note("default-batch", text))
    return DEFAULT_BATCH[task]
