"""One batch after the other through the training step, with what each waited for.

The host stays a few steps ahead of the device and never waits for a loss, so that watching a training does not slow it
down.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from redline.bench.data.batches import Batches
from redline.bench.data.feed import Arrive, Arrived, Feed
from redline.bench.device.base import Device
from redline.bench.train.loss import BatchLoss
from redline.bench.workload.step import Setup, TrainingStep
from redline.model.training import DATA_PHASE, DataSpec

STEPS_AHEAD = 4
"""The host waits for the device once it is this many steps ahead: unread batches take memory."""


@dataclass(frozen=True, kw_only=True)
class Supply:
    """The batches of both parts, and how they become what the model takes."""

    train: Callable[[int], Batches]
    """For a number of loader workers."""
    validation: Batches | None
    """None: the user has none."""
    arrive: Arrive
    arrive_held_out: Arrive
    first: Arrived
    """A batch to begin with, in fp32 and without augmentation."""
    batch: int
    threaded: bool
    """Whether a thread may ask for batches."""
    queued: int = 0
    """Batches that workers of the user's own loader keep ready."""


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
