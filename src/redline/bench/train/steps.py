"""One batch after the other through the training step, with its loss and with what each waited for.

The host stays a few steps ahead of the device and never waits for a loss, so that watching a training does not slow it
down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from redline.bench.data.batches import Batches
from redline.bench.data.feed import Arrive, Arrived, Feed
from redline.bench.device.base import Device
from redline.bench.workload.losses import (
    DefaultLoss,
    RandomTargetLoss,
    TargetLoss,
    TrainingLoss,
    own_loss,
    weighted_logits,
)
from redline.bench.workload.step import Setup, TrainingStep
from redline.errors import BenchError
from redline.spec import DataSpec
from redline.training import DATA_PHASE

TargetKind = Literal["shares", "labels", "values"]
"""Of targets with a value for each output: shares of the classes, one-hot ones too; labels that hold or do not; or values."""
IGNORED = -100
"""The class that torch's cross-entropy leaves out."""


@dataclass(frozen=True)
class Answers:
    right: Tensor
    judged: Tensor


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

    def put(self, targets: Any) -> None:
        if self._kind is None:
            self._kind = kind_of_targets(targets)  # of the first batch: looking at values waits for the device
        if not self.is_static or not isinstance(targets, Tensor):
            self.targets = targets
            return
        held = self._held.setdefault(tuple(targets.shape), torch.empty_like(targets))
        self.targets = held.copy_(targets)

    def of(self, output: Any) -> Tensor:
        if self._given is not None:
            return self._given(output, self.targets)
        if (own := own_loss(output)) is not None:
            return own
        terms = [weight * self._term(logits) for weight, _, logits in weighted_logits(output)]
        if not terms:
            raise BenchError(
                "user", f"no loss to train on: the model returned {type(output).__name__} without a tensor"
            )
        return torch.stack(terms).sum() if len(terms) > 1 else terms[0]

    def answers(self, output: Any) -> Answers | None:
        """How many of the batch's targets the output has right; None where there are no classes to be right about."""
        if not isinstance(self.targets, Tensor) or own_loss(output) is not None:
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
        return Answers(((logits.argmax(axis) == targets) & counted).sum(), counted.sum())

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
            if self._kind == "shares":
                return F.cross_entropy(logits, values)
            if self._kind == "labels":
                return F.binary_cross_entropy_with_logits(logits, values)
            return F.mse_loss(logits, values)
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
    return "labels" if zeros and ones and int(zeros + ones) == values.numel() else "values"


def fit(targets: Tensor, logits: Tensor) -> Tensor:
    """Targets in the shape of the output where they have a value for each of its numbers, else classes as torch wants them."""
    if targets.numel() == logits.numel():
        return targets.view_as(logits)
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


STEPS_AHEAD = 4
"""The host waits for the device once it is this many steps ahead: unread batches take memory."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The batches of both parts, and how they become what the model takes."""

    train: Callable[[int], Batches]
    """For a number of loader workers."""
    validation: Batches
    arrive: Arrive
    arrive_held_out: Arrive
    first: Arrived
    """A batch to begin with, in fp32 and without augmentation."""
    batch: int
    threaded: bool
    """Whether a thread may ask for batches."""


class Timeline:
    """When each phase of each step ended, by the device's clock."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        self.names: list[str] = []
        self.marks: list[Any] = [self._device.mark()]

    def data(self) -> None:
        """The batch is there."""
        self._note(DATA_PHASE)

    def phases(self, names: tuple[str, ...]) -> Callable[[], None]:
        """What a step is to call at the end of each of its phases."""
        left = iter(names)
        return lambda: self._note(next(left))

    def seconds(self) -> list[tuple[str, float]]:
        """Each phase with its length. The device must have come to the end."""
        return list(zip(self.names, self._device.seconds_between(self.marks), strict=True))

    def _note(self, name: str) -> None:
        self.names.append(name)
        self.marks.append(self._device.mark())


@dataclass
class Stepper:
    """Takes batches and makes steps of them."""

    setup: Setup
    step: TrainingStep
    loss: BatchLoss
    supply: Supply
    data: DataSpec
    _ends: deque[Any] = field(default_factory=deque)

    @property
    def device(self) -> Device:
        return self.setup.device

    @property
    def needs_whole_batches(self) -> bool:
        """Compiled or recorded for one size: a smaller batch runs eagerly."""
        return needs_whole_batches(self.setup)

    def feed(self, batches: Iterator[Any], *, prefetch: bool | None = None, held_out: bool = False) -> Feed:
        return Feed(
            batches,
            self.supply.arrive_held_out if held_out else self.supply.arrive,
            self.device,
            prefetch=self.data.prefetch if prefetch is None else prefetch,
            threaded=self.supply.threaded,
            timeout_s=self.data.loader_timeout_s,
        )

    def is_whole(self, batch: Arrived) -> bool:
        return batch.count == self.supply.batch

    def take(self, batch: Arrived, timeline: Timeline) -> Tensor:
        """One step on this batch; its loss, which the next step may overwrite."""
        self.put(batch)
        if self.is_whole(batch) or not self.needs_whole_batches:
            return self.step(timeline.phases(self.step.phases))
        return self.step.eagerly(timeline.phases(TrainingStep.phases))

    def put(self, batch: Arrived) -> None:
        self.setup.args, self.setup.kwargs = batch.args, batch.kwargs
        self.loss.put(batch.targets)

    def stay_near(self, end: Any, *, prefetch: bool) -> None:
        if not prefetch:
            self.device.synchronize()  # one thing after the other, as a loop does that reads its loss in every step
            return
        self._ends.append(end)
        if len(self._ends) > STEPS_AHEAD:
            self.device.wait_for(self._ends.popleft())


def needs_whole_batches(setup: Setup) -> bool:
    return setup.step_class is not None or setup.model is not setup.workload.model


def sums(phases: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Seconds of all phases of one name."""
    found: dict[str, float] = {}
    for name, seconds in phases:
        found[name] = found.get(name, 0.0) + seconds
    return found
