"""A workload is a model with everything that one step needs: inputs of any structure, a loss, and what a step counts as."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from redline.bench.device.failure import one_line
from redline.bench.workload.batch import Axes, contract_axes, resize
from redline.bench.workload.called import OwnStep, TrainsItself, name_of
from redline.bench.workload.fingerprint import input_hash, model_hash
from redline.bench.workload.inputs import (
    Inputs,
    Untouched,
    changed_slightly,
    copied,
    input_shapes,
    input_tensors,
    redraw,
    same_values,
)
from redline.bench.workload.losses import TrainingLoss
from redline.bench.workload.structure import describe, map_leaves, parameter_count
from redline.model.errors import SpecError
from redline.model.note import Note, note
from redline.model.record import BatchOrigin, SecondInputs, WorkloadInfo
from redline.model.spec import Task

DEFAULT_BATCH: dict[Task, int] = {"infer": 1, "train": 8, "step": 8, "generate": 1}
"""This is the batch of models by name and of factories that must be told one: a single request, or a small training step."""

INPUTS_ARE_RESTORED = "the model writes into its inputs: they are restored before every step"

Gradients = Literal["inference", "off", "on"]


class Second(NamedTuple):
    """Outputs are compared on these inputs too, beside those that are timed."""

    inputs: Inputs
    how: SecondInputs


@dataclass(kw_only=True)
class Workload:
    model: nn.Module
    args: Untouched[tuple[Any, ...]] = Untouched()  # noqa: RUF009  (a descriptor, which keeps a value per object)
    kwargs: Untouched[dict[str, Any]] = Untouched()  # noqa: RUF009  (a descriptor, which keeps a value per object)
    loss: TrainingLoss
    """This is the loss of the output alone, which a training needs."""
    task: Task
    batch: int | None
    """A step has this many items. It is None until `settle_batch` has asked the model."""
    batch_from: BatchOrigin
    item: str
    """This is the word for what is counted: img, seq or item."""
    axes: Axes | None
    """Along these axes the inputs hold their items. If they are not known (None), the inputs cannot be resized."""
    source: str
    model_hash: str
    input_hash: str
    items: int | None = None
    """One step was declared to count as this many items, if that is not the batch."""
    inputs_are_free: bool = True
    """Redline made the inputs, so that any values of these shapes would do. The user's own may have a structure."""
    again: Callable[[int, int | None], Inputs] | None = None
    """It makes other inputs of the same kind on the CPU, from a seed and, if the user's factory takes one, a batch."""
    gradients: Gradients = "inference"
    """Inference runs under this mode. A model that differentiates inside its forward pass cannot do so in inference mode."""
    originals: Inputs | None = None
    """These are the inputs as they were, if the model writes into them. Every step then begins with these."""
    device: torch.device | str = "cpu"
    is_cpu_only: bool = False
    """It is true if torch computes this model on no other device."""
    weights_are_random: bool = True
    """If true, the numerics need a model that was made to carry signal. See `signal.py`."""
    notes: list[Note] = field(default_factory=list)
    step: OwnStep | None = None
    """This is a function of the user's, which `model` stands for. It is timed as it is."""
    seed: int = 0
    """This is the seed that `step` is given."""
    vocabulary: dict[str, int] = field(default_factory=dict)
    """An integer input may take this many values. The key is its path in the inputs (`0`, `input_ids`)."""

    @property
    def items_per_step(self) -> int:
        """Returns how many items one step counts as. It is 1 if nothing is known, because steps are counted then."""
        return self.items or self.batch or 1

    def to(self, device: torch.device | str) -> Workload:
        """Moves the model, the inputs and the user's own targets. The `setup` of a function is told the device instead."""
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
        """Returns a context that is held around forward passes of inference."""
        modes = {"inference": torch.inference_mode, "off": torch.no_grad, "on": torch.enable_grad}
        return modes[self.gradients]()

    def keep_originals(self) -> None:
        """Keeps a copy of the inputs, because the model was seen writing into them."""
        self.originals = copied((self.args, self.kwargs))
        self.notes.append(note("input", INPUTS_ARE_RESTORED))

    def differentiates(self, call: Callable[[], Any]) -> bool:
        """Returns whether `call`, which failed in inference mode, works under `no_grad` or with gradients on. The mode that
        works is kept."""
        if self.gradients != "inference" or self.task != "infer":
            return False
        for mode, where, fails in (
            ("off", "torch.no_grad()", "in inference mode"),
            ("on", "gradients on", "in inference mode and under torch.no_grad()"),
        ):
            self.gradients = mode  # type: ignore[assignment]
            try:
                call()
            except Exception:
                continue
            self.notes.append(note("model", f"measured with {where}: the model fails {fails}"))
            return True
        self.gradients = "inference"
        return False

    def moved(self, inputs: Inputs) -> Inputs:
        """Returns the inputs on the model's device."""

        def move(_: str, leaf: Any) -> Any:
            # Batches of graphs and the like are no tensors, but have a method to move them.
            return leaf.to(self.device) if isinstance(leaf, Tensor) or callable(getattr(leaf, "to", None)) else leaf

        args, kwargs = inputs
        return map_leaves(args, move), map_leaves(kwargs, move)

    def put(self, inputs: Inputs) -> None:
        """Takes these inputs from now on."""
        self.args, self.kwargs = inputs
        self.input_hash = input_hash(*inputs)

    def second_inputs(self, seed: int) -> Second | None:
        """Returns other inputs of the same structure, shapes and dtypes, and how they were made. Returns None if there are none.

        Free inputs are drawn. The user's own come from the factory again. If that is impossible, floating tensors get a little noise.
        """
        own = self.args, self.kwargs
        if self.inputs_are_free:
            return Second(redraw(own, seed, self.vocabulary), "drawn")
        if self.again is not None:
            try:
                other = self.moved(self.again(seed, self.batch))
                if self.axes is not None and self.batch is not None:
                    other = resize(other, self.axes, self.batch)
                if describe(other) == describe(own) and not same_values(other, own):
                    return Second(other, "factory")
            except Exception as error:
                self.notes.append(note("one-input-set", f"no second inputs from the factory: {one_line(error)}"))
        changed = changed_slightly(own, seed)
        return None if same_values(changed, own) else Second(changed, "noise")

    def _made(self, item: str, rank: int) -> int | None:
        """Returns how large Redline made one picture or sequence. Returns None for anything else."""
        if not self.inputs_are_free or self.item != item:
            return None
        return next((t.shape[-1] for _, t in input_tensors((self.args, self.kwargs)) if t.ndim >= rank), None)

    def _name(self) -> str:
        if self.step is not None:
            return self.step.name
        model: Any = self.model.module if isinstance(self.model, TrainsItself) else self.model
        return name_of(model.model if self.task == "generate" else model)

    def _own_optimizer(self) -> str:
        if not isinstance(self.model, TrainsItself) or any(one.is_meta for one in self.model.parameters()):
            return ""
        return f"{type(self.model.optimizer()).__name__} of its own"

    def info(self) -> WorkloadInfo:
        parts = [self.model] if self.step is None else self.step.modules().values()
        return WorkloadInfo(
            source=self.source,
            class_name=self._name(),
            parameters=parameter_count(*parts),
            items_per_step=self.items_per_step,
            item=self.item if self.items or self.batch else "step",
            batch=self.batch,
            batch_from=self.batch_from,
            input_shapes=input_shapes((self.args, self.kwargs)),
            image_size=self._made("img", 4),
            sequence_length=self._made("seq", 2),
            loss=self.loss.name if self.task == "train" else "",
            optimizer=self._own_optimizer(),
            model_hash=self.model_hash,
            input_hash=self.input_hash,
            notes=tuple(self.notes),
        )


def assemble(
    model: nn.Module,
    inputs: Inputs,
    *,
    task: Task,
    source: str,
    identity: str,
    seed: int,
    batch: int | None = None,
    known: tuple[int, BatchOrigin] | None = None,
    axes: Axes | None = None,
    item: str = "item",
    loss: Callable[..., Tensor] | None = None,
    targets: Any = None,
    weights_are_random: bool = True,
    inputs_are_free: bool = True,
    vocabulary: dict[str, int] | None = None,
    notes: list[Note] | None = None,
) -> Workload:
    """Returns the workload of any source. It sets the mode by the task, chooses the loss and takes the hashes.

    A source that makes its inputs names their `batch`, and has put it first in every tensor that has it. Another one may
    know the batch, and who chose it.
    """
    args, kwargs = inputs
    notes = list(notes or [])
    if batch is not None:
        known = batch, "source"
    if known is not None and known[1] == "source" and axes is None:
        axes = contract_axes(inputs)
    return Workload(
        model=model.train(task == "train"),
        args=args,
        kwargs=kwargs,
        loss=TrainingLoss(loss, seed, targets, notes),
        task=task,
        batch=known[0] if known else None,
        batch_from=known[1] if known else "unknown",
        item=item,
        axes=axes,
        source=source,
        model_hash=model_hash(model, identity),
        input_hash=input_hash(args, kwargs),
        inputs_are_free=inputs_are_free,
        weights_are_random=weights_are_random,
        notes=notes,
        vocabulary=vocabulary or {},
    )


def choose_batch(batch: int | None, task: Task, notes: list[Note]) -> int:
    """Returns the batch that was asked for, or the default with a note that says so."""
    if batch is not None:
        return batch
    what = {"infer": "inference", "train": "training", "step": "a step", "generate": "generation"}[task]
    text = f"batch {DEFAULT_BATCH[task]} by default for {what}"
    notes.append(note("default-batch", text))
    return DEFAULT_BATCH[task]
