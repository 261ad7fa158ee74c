"""The loss of a training on data: the user's, the model's own, or the one that fits the targets; and how many answers are right.

Whether a model returns its own loss, and under which name, is asked of the model itself: it runs once as it is, before any
compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.bench.workload.losses import (
    DefaultLoss,
    RandomTargetLoss,
    TargetLoss,
    TrainingLoss,
    own_loss,
    sum_of_losses,
    weighted_logits,
)
from redline.bench.workload.structure import float_tensors
from redline.model.errors import BenchError
from redline.model.note import Note, note

TargetKind = Literal["shares", "labels", "values"]
"""Of targets with a value for each output: shares of the classes, one-hot ones too; labels that hold or do not; or values."""
IGNORED = -100
"""The class that torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Answers:
    right: Tensor
    judged: Tensor
    classes: Tensor
    """The targets that were judged; where one was not, the number of classes, which no target has."""
    known: int
    """How many classes there are."""


class BatchLoss(TrainingLoss):
    """The user's `loss(output, target)`, else the output's own, else the one that fits the targets of the batch at hand."""

    def __init__(self, of: TrainingLoss) -> None:
        super().__init__()
        if not isinstance(of, DefaultLoss | TargetLoss | RandomTargetLoss):
            raise BenchError("user", f"the loss {of.name} takes no targets: on data it must be loss(output, target)")
        self._given = None if isinstance(of, DefaultLoss) else of.given
        self.name = "of the data" if self._given is None else of.name
        self.is_static = False
        """A graph reads its targets from where they were when it was recorded: they are then copied there."""
        self._held: dict[tuple[int, ...], Tensor] = {}
        self._kind: TargetKind | None = None
        self._own: tuple[str, ...] = ()
        """Where in the output the model's own loss is, or the parts of it; names as `float_tensors` gives them."""
        self._has_own = False
        self._can_judge = False
        """The model has a loss of its own, and its answers can be compared with the targets all the same."""

    def put(self, targets: Any) -> None:
        if self._kind is None:
            self._kind = kind_of_targets(targets)  # of the first batch: looking at values waits for the device
        if not self.is_static or not isinstance(targets, Tensor):
            self.targets = targets
            return
        held = self._held.setdefault(tuple(targets.shape), torch.empty_like(targets))
        self.targets = held.copy_(targets)

    def learn(self, output: Any, other: Any = None) -> list[Note]:
        """Find the model's own loss in an output of the model as it is; `other` is its output for other targets.

        Numbers it returned that are no part of the loss are named in a note.
        """
        if self._given is not None or self._own_of(output) is not None:
            untold = []
        else:
            self._own = own_losses(output, other)
            untold = [name for name, each in float_tensors(output) if not each.ndim and name not in self._own]
        own = self._own_of(output) if self._given is None else None
        if own is not None:
            logits = main_logits(output) if weighted_logits(output) else None
            self._can_judge = logits is not None and self._fits_own(logits, own)
            self._has_own, self.name = True, "the model's own"
        if not untold:
            return []
        told = f"the model also returns a single number ({', '.join(untold)}) that is not trained on"
        return [note("unused-number", f"{told}: give a loss of your own, as loss(output, target), to use it")]

    def takes(self, output: Any) -> bool:
        """Whether there is a loss for such an output and the targets at hand."""
        classes = self._given is None and self._own_of(output) is None and isinstance(self.targets, Tensor)
        logits = [each for _, _, each in weighted_logits(output)] if classes else []
        if any(_are_whole(fit(self.targets, each), each) and not are_classes_of(each, self.targets) for each in logits):
            return False  # on a GPU, asking for the loss would end the process
        try:
            self(output)
        except Exception:  # whatever a loss says to a shape that it does not expect
            return False
        return True

    def choose(self, output: Any) -> Callable[[Any], Tensor]:
        return self.of

    def of(self, output: Any) -> Tensor:
        if self._given is not None:
            return self._given(output, self.targets)
        if (own := self._own_of(output)) is not None:
            return own
        terms = [weight * self._term(logits) for weight, _, logits in weighted_logits(output)]
        if not terms:
            raise BenchError(
                "user", f"no loss to train on: the model returned {type(output).__name__} without a tensor"
            )
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def held_out(self, output: Any) -> Tensor | None:
        """The loss of a held-out batch; None where the model has a loss of its own but returns none in eval mode."""
        return None if self._has_own and self._own_of(output) is None else self(output)

    def answers(self, output: Any) -> Answers | None:
        """How many of the batch's targets the output has right; None where there are no classes to be right about."""
        if not isinstance(self.targets, Tensor):
            return None
        if not self._can_judge and (self._has_own or own_loss(output) is not None):
            return None  # a model with a loss of its own may compare other positions than these
        logits = main_logits(output)
        targets = fit(self.targets, logits)
        axis = class_axis(logits)
        if targets.shape == logits.shape:
            if self._kind != "shares":
                return None
            targets = targets.argmax(axis)
        elif targets.is_floating_point():
            return None
        counted = targets != IGNORED
        right, known = (logits.argmax(axis) == targets) & counted, logits.shape[axis]
        return Answers(right.sum(), counted.sum(), torch.where(counted, targets, known).flatten(), known)

    def class_beyond(self, logits: Tensor) -> int | None:
        """A target of this batch that names no class of the output; None where all do, or the loss is not chosen here."""
        if self._given is not None or self._has_own or not isinstance(self.targets, Tensor):
            return None
        targets = fit(self.targets, logits)
        if not _are_whole(targets, logits):
            return None
        wrong = targets[(targets != IGNORED) & ((targets < 0) | (targets >= logits.shape[class_axis(logits)]))]
        return int(wrong[0]) if len(wrong) else None

    def _own_of(self, output: Any) -> Tensor | None:
        if (own := own_loss(output)) is not None:
            return own
        found = dict(float_tensors(output)) if self._own else {}
        parts = [found[name].reshape(()) for name in self._own if name in found]
        if parts:
            return torch.stack(parts).sum() if len(parts) > 1 else parts[0]
        return sum_of_losses(output)

    def _fits_own(self, logits: Tensor, own: Tensor) -> bool:
        """Whether accuracy has a meaning: one class per sample, or a loss that compares the positions that are compared here."""
        if not isinstance(self.targets, Tensor) or not are_classes_of(logits, self.targets):
            return False
        return logits.ndim == 2 or torch.isclose(self._term(logits).float(), own.float(), rtol=1e-3).item() is True

    def _term(self, logits: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(logits.device.type):
            logits = logits.float()
        if not isinstance(self.targets, Tensor):
            kind = type(self.targets).__name__
            raise BenchError("user", f"targets in a {kind} need a loss of their own: give loss(output, target)")
        targets = fit(self.targets, logits)
        if targets.is_floating_point() or targets.shape == logits.shape:
            if targets.shape != logits.shape:
                shapes = f"targets of {list(targets.shape)} do not fit the output of {list(logits.shape)}"
                raise BenchError("user", f"{shapes}: give a loss of your own, as loss(output, target)")
            values = targets.to(logits.dtype)
            if self._kind == "labels":
                self.name = "binary_cross_entropy_with_logits"
                return F.binary_cross_entropy_with_logits(logits, values)
            self.name = "cross_entropy" if self._kind == "shares" else "mse_loss"
            return F.cross_entropy(logits, values) if self._kind == "shares" else F.mse_loss(logits, values)
        self.name = "cross_entropy"
        if logits.ndim == 3 and logits.shape[:2] == targets.shape:
            return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return F.cross_entropy(logits, targets)


def kind_of_targets(targets: Any) -> TargetKind:
    """What the values of a first batch look like; whether there is one for each output is not known yet."""
    if not isinstance(targets, Tensor):
        return "values"
    values = targets.float()
    if values.ndim == 2 and values.shape[1] > 1 and (values >= 0).all() and ((values.sum(1) - 1).abs() < 1e-3).all():
        return "shares"
    zeros, ones = (values == 0).sum(), (values == 1).sum()
    is_mixed = bool(zeros and ones) or not targets.is_floating_point()  # a first batch may have but one of them
    return "labels" if is_mixed and int(zeros + ones) == values.numel() else "values"


def fit(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets in the shape of the output where they have a value for each of its numbers, else classes as torch wants them."""
    if targets.numel() == logits.numel():
        return targets.reshape(logits.shape)
    axis = class_axis(logits)
    if targets.ndim == logits.ndim > 1 and targets.shape[axis] == 1:
        targets = targets.squeeze(axis)
    return targets if targets.is_floating_point() else targets.long()


def main_logits(output: Any) -> Tensor:
    """The part of the output that answers."""
    found = weighted_logits(output)
    if not found:
        raise BenchError("user", f"the model returned {type(output).__name__} without a floating tensor")
    return max(found, key=lambda each: each[0])[2]


def class_axis(logits: Tensor) -> int:
    return 2 if logits.ndim == 3 else 1


def are_classes_of(logits: Tensor, targets: Tensor) -> bool:
    """Whether the targets name a class of the output for each sample, position or pixel. Waits for the device."""
    if logits.ndim < 2 or targets.is_floating_point():
        return False
    axis, fitted = class_axis(logits), fit(targets, logits)
    if fitted.shape != (*logits.shape[:axis], *logits.shape[axis + 1 :]):
        return False
    counted = fitted[fitted != IGNORED]
    return bool(((counted >= 0) & (counted < logits.shape[axis])).all())


def _are_whole(targets: Tensor, logits: Tensor) -> bool:
    """Whether these can only be classes: whole numbers, and not one for each number of the output."""
    return not targets.is_floating_point() and targets.shape != logits.shape


def own_losses(output: Any, other: Any = None) -> tuple[str, ...]:
    """Where an output of the model as it is has its loss: by the names of `float_tensors`; several are summed.

    A single number is the loss where it changes with the targets (`other` is the output for other ones) or where it is
    computed from the answer beside it. An auxiliary loss of hidden layers is neither.
    """
    floating = float_tensors(output)
    numbers = {name: each for name, each in floating if not each.ndim and each.grad_fn is not None}
    if other is not None:
        others = dict(float_tensors(other))
        found = [name for name, each in numbers.items() if name in others and not torch.equal(each, others[name])]
    else:
        answers = _last_of([each for _, each in floating if each.ndim and each.grad_fn is not None])
        found = [name for name, each in numbers.items() if answers & _nodes(each)]
    whole = [name for name in found if all(numbers[each].grad_fn in _nodes(numbers[name]) for each in found)]
    return tuple(whole[:1] or found)


def _last_of(tensors: Sequence[Tensor]) -> set[Any]:
    """The nodes of those that no other is computed from: answers, not the hidden layers returned beside them."""
    return {
        each.grad_fn
        for each in tensors
        if not any(each.grad_fn in _nodes(other) for other in tensors if other.grad_fn is not each.grad_fn)
    }


def _nodes(tensor: Tensor) -> set[Any]:
    """All of autograd's nodes that a tensor is computed by, its own too."""
    seen: set[Any] = set()
    left = [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [each for each, _ in node.next_functions]
    return seen


def other_targets(targets: Tensor) -> Tensor:
    """Targets that are as valid as these and not the same."""
    if targets.is_floating_point():
        turned = targets.roll(1, 0)
        return turned if not torch.equal(turned, targets) else 0.5 * targets
    valid = targets >= 0
    first = int(targets[valid][0]) if valid.any() else 0
    alike = torch.where(valid, first, targets)
    return alike if not torch.equal(alike, targets) else torch.where(valid, 0 if first else 1, targets)
