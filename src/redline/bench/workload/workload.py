"""A model with everything one step needs: inputs of any structure, a loss, and how to count what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.workload.fingerprint import input_hash, model_hash
from redline.bench.workload.inputs import Inputs, input_shapes, leading_size, redraw
from redline.bench.workload.losses import Loss, training_loss
from redline.bench.workload.structure import map_leaves
from redline.note import Note, note
from redline.record import WorkloadInfo
from redline.spec import Task

DEFAULT_BATCH: dict[Task, int] = {"infer": 1, "train": 8}
"""For models by name, and for factories that must be told: one request at a time, and a small training step."""


@dataclass(kw_only=True)
class Workload:
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss: Loss
    """Of the output alone, for training."""
    task: Task
    items_per_step: int
    item: str
    """What is counted: img, seq or item."""
    source: str
    model_hash: str
    input_hash: str
    weights_are_random: bool = True
    """Numerics then need a model that carries signal: see `signal.py`."""
    notes: list[Note] = field(default_factory=list)
    vocabulary: dict[str, int] = field(default_factory=dict)
    """How many values an integer input may take, by its place in the inputs (`0`, `input_ids`)."""

    def to(self, device: torch.device | str) -> Workload:
        """Move model and inputs; the loss makes its targets where the output is."""

        def move(_: str, leaf: Any) -> Any:
            # Graph batches and the like are no tensors, but know how to move.
            return leaf.to(device) if isinstance(leaf, Tensor) or callable(getattr(leaf, "to", None)) else leaf

        self.model.to(device)
        self.args = map_leaves(self.args, move)
        self.kwargs = map_leaves(self.kwargs, move)
        return self

    def fresh_inputs(self, seed: int) -> Inputs:
        """Inputs of the same structure, shapes, dtypes and device, drawn anew."""
        return redraw((self.args, self.kwargs), seed, self.vocabulary)

    def info(self) -> WorkloadInfo:
        return WorkloadInfo(
            source=self.source,
            class_name=type(self.model).__qualname__,
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            items_per_step=self.items_per_step,
            item=self.item,
            input_shapes=input_shapes((self.args, self.kwargs)),
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
    item: str = "item",
    loss: Callable[..., Tensor] | None = None,
    weights_are_random: bool = True,
    vocabulary: dict[str, int] | None = None,
    notes: list[Note] | None = None,
) -> Workload:
    """What every source ends with: the mode set by the task, the loss settled, the hashes taken."""
    args, kwargs = inputs
    return Workload(
        model=model.train(task == "train"),
        args=args,
        kwargs=kwargs,
        loss=training_loss(loss, seed),
        task=task,
        items_per_step=leading_size(inputs) or 1,
        item=item,
        source=source,
        model_hash=model_hash(model, identity),
        input_hash=input_hash(args, kwargs),
        weights_are_random=weights_are_random,
        notes=list(notes or []),
        vocabulary=vocabulary or {},
    )


def choose_batch(batch: int | None, task: Task, notes: list[Note]) -> int:
    """The batch asked for, or the default with a note that says so."""
    if batch is not None:
        return batch
    text = f"batch {DEFAULT_BATCH[task]} by default for {'inference' if task == 'infer' else 'training'}"
    notes.append(note("default-batch", text))
    return DEFAULT_BATCH[task]
