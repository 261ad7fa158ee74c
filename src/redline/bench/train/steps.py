"""This module takes one batch after the other through the training step, and notes what each waited for.

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
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.losses import TargetLoss
from redline.bench.workload.step import Setup, TrainingStep
from redline.model.record import DATA_PHASE
from redline.model.spec import DataSpec

WHOLE_STEP = "step"
"""Stands for all phases together where they were not timed apart."""
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
    """The training begins with this batch, which is in fp32 and not augmented."""
    batch: int
    threaded: bool
    """True if a thread may ask for batches."""
    queued: int = 0
    """Batches that workers of the user's own loader keep ready."""


class Timeline:
    """When each step had its batch and when it ended, by the device's clock; of some steps also when each phase ended.

    Every step gets the same two marks. The others, which would make a step longer, are set in one step of
    `STEPS_PER_PHASED`: waiting for data comes and goes, but the phases of a step take equally long each time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        self._names: list[str] = []
        self.marks: list[Any] = [self._device.mark()]

    def note(self, name: str) -> None:
        """Mark the end of a phase; `data` ends when the batch is there."""
        self._names.append(name)
        self.marks.append(self._device.mark())

    def steps(self) -> list[dict[str, float]]:
        """Seconds of each part of each step: `data`, then either its phases or the whole `step`. The device must be done."""
        steps: list[dict[str, float]] = []
        for name, seconds in zip(self._names, self._device.seconds_between(self.marks), strict=True):
            if name == DATA_PHASE:
                steps.append({})
            steps[-1][name] = seconds
        return steps


def phase_seconds(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Seconds of all steps together, by phase. The time of all steps is divided as in those whose phases were timed."""
    waited = sum(step[DATA_PHASE] for step in steps)
    worked = sum(sum(step.values()) for step in steps) - waited
    sums: dict[str, float] = {}
    for step in steps:
        for name in step.keys() - {DATA_PHASE} if WHOLE_STEP not in step else ():
            sums[name] = sums.get(name, 0.0) + step[name]
    phased = sum(sums.values())
    shares = {name: sums[name] / phased for name in TrainingStep.phases if name in sums} if phased > 0 else {}
    return {DATA_PHASE: waited, **{name: worked * share for name, share in (shares or {WHOLE_STEP: 1.0}).items()}}


@dataclass
class Stepper:
    """Takes batches and makes steps of them."""

    setup: Setup
    step: TrainingStep
    loss: TargetLoss
    supply: Supply
    data: DataSpec
    _ends: deque[Any] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._batch = self.supply.first
        self._timeline = Timeline(self.device)
        self._phases: Iterator[str] = iter(())
        self._plain = self.step.over(self._inputs)
        self._phased = self.step.over(self._inputs, lambda: self._timeline.note(next(self._phases)))

    def _inputs(self) -> Inputs:
        return self._batch.args, self._batch.kwargs

    @property
    def device(self) -> Device:
        return self.setup.device

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

    def take(self, batch: Arrived, timeline: Timeline, *, with_phases: bool = False) -> Tensor:
        """One step on this batch; its loss, which the next step may overwrite."""
        self._batch = batch
        self.loss.put(batch.targets)
        if not self.is_whole(batch) and needs_whole_batches(self.setup):  # compiled or recorded for one size
            self.setup.args, self.setup.kwargs = batch.args, batch.kwargs
            loss = self.step.eagerly()
        elif with_phases and len(self.step.phases) > 1:
            self._timeline, self._phases = timeline, iter(self.step.phases)
            return self._phased().detach()
        else:
            loss = self._plain().detach()
        timeline.note(WHOLE_STEP)
        return loss

    def rest(self) -> None:
        """Leave a whole batch in place, for what is profiled or measured alone afterwards."""
        first = self._batch = self.supply.first
        self.setup.args, self.setup.kwargs = first.args, first.kwargs
        self.loss.put(first.targets)

    def stay_near(self, end: Any, *, prefetch: bool) -> None:
        if not prefetch:
            self.device.synchronize()  # one thing after the other, as a loop does that reads its loss in every step
            return
        self._ends.append(end)
        if len(self._ends) > STEPS_AHEAD:
            self.device.wait_for(self._ends.popleft())


def needs_whole_batches(setup: Setup) -> bool:
    return setup.step_class is not None or setup.model is not setup.workload.model
