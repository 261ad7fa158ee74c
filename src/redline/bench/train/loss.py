"""The loss of a training on data: of an output and the targets that came with the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.bench.workload.losses import DefaultLoss, RandomTargetLoss, TargetLoss, TrainingLoss, weighted_logits
from redline.errors import BenchError


class BatchLoss(TrainingLoss):
    """The user's `loss(output, target)`, else cross-entropy or squared distance, against the batch at hand."""

    def __init__(self, of: TrainingLoss) -> None:
        super().__init__()
        if not isinstance(of, DefaultLoss | TargetLoss | RandomTargetLoss):
            raise BenchError("user", f"the loss {of.name} takes no targets: on data it must be loss(output, target)")
        self._given = None if isinstance(of, DefaultLoss) else of.given
        self.name = "of the data" if self._given is None else of.name
        self.is_static = False
        """A graph reads its targets from where they were when it was recorded: they are then copied there."""
        self._held: dict[tuple[int, ...], Tensor] = {}

    def put(self, targets: Any) -> None:
        if not self.is_static or not isinstance(targets, Tensor):
            self.targets = targets
            return
        held = self._held.setdefault(tuple(targets.shape), torch.empty_like(targets))
        self.targets = held.copy_(targets)

    def of(self, output: Any) -> Tensor:
        if self._given is not None:
            return self._given(output, self.targets)
        terms = [weight * _loss(logits, self.targets) for weight, _, logits in weighted_logits(output)]
        if not terms:
            raise BenchError(
                "user", f"no loss to train on: the model returned {type(output).__name__} without a tensor"
            )
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    if not torch.is_autocast_enabled(logits.device.type):
        logits = logits.float()
    if targets.is_floating_point():
        return F.mse_loss(logits, targets.to(logits.dtype).view_as(logits))
    if logits.ndim == 3:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    return F.cross_entropy(logits, targets)


def main_logits(output: Any) -> Tensor:
    """The part of the output that answers."""
    found = weighted_logits(output)
    if not found:
        raise BenchError("user", f"the model returned {type(output).__name__} without a floating tensor")
    return max(found, key=lambda each: each[0])[2]


def class_axis(logits: Tensor) -> int:
    return 2 if logits.ndim == 3 else 1
