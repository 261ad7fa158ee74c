"""This module runs epochs: batch after batch goes through the training step. It records what each step waited for, how
long it took and what was learned.

The host stays a few steps ahead of the device and waits for a loss once a second at most, so that watching a training does
not slow it down.
"""

from __future__ import annotations

import math
import os
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.bench.data.batches import Batches
from redline.bench.data.feed import Arrive, Arrived, Feed, loader_errors, part_batch
from redline.bench.device.base import Device
from redline.bench.measure.blocks import STEPS_PER_PHASED, quiet_collector, watched
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.losses import Answers
from redline.bench.workload.step import Setup, TrainingStep
from redline.model.errors import BenchError
from redline.model.protocol import TrainingProgress
from redline.model.record import DATA_PHASE, Block, Epoch, Fed, FedPart
from redline.model.spec import DataSpec, Schedule, TrainSpec

WHOLE_STEP = "step"
"""This name stands for all phases together where they were not timed one by one."""
STEPS_AHEAD = 4
"""The host waits for the device once it is this many steps ahead, because batches that are not used yet take memory."""
TELL_EVERY_S = 1.0
KEPT_STEPS = 2_000
"""A record keeps at most this many steps of an epoch, evenly spread. The sums are over all steps."""
KEPT_LOOKS = 60
"""A record keeps at most this many readings of an epoch's telemetry, evenly spread."""
DRIVER_LOOKS_BACK_S = 1.0
"""A GPU's driver reports the utilisation of up to this long ago, so earlier samples describe what ran before the epoch."""
ISSUED = 8
"""We keep the time to issue this many steps, because only the first of an epoch are issued without waiting for earlier ones."""
WARM_SHARE: dict[Schedule, float] = {"one-cycle": 0.2, "cosine": 0.05, "constant": 0.0}
"""A training begins with this share of its steps, over which the learning rate rises."""
FEW_BATCHES, LONGEST_FACTOR = 20, 3
"""A loader is measured for at least 20 batches, unless that takes three times the seconds that were asked for."""

Tell = Callable[[TrainingProgress], None]


@dataclass(frozen=True, kw_only=True)
class Supply:
    """It holds the batches of both parts, and knows how to turn them into what the model takes."""

    train: Callable[[int], Batches]
    """Returns the batches of a training with this many loader workers."""
    validation: Batches | None
    """It is None if the user has no validation loader."""
    arrive: Arrive
    first: Arrived
    """The training begins with this batch, which is in fp32 and not augmented."""
    batch: int
    threaded: bool
    """It is true if a thread may ask for batches."""
    queued: int = 0
    """The workers of the user's own loader keep this many batches ready."""


class Timeline:
    """It reads from the device's clock when each step had its batch and when it ended, and for some steps when each phase ended.

    Every step gets the same two marks. The others would make a step longer, so they are set in one step of
    `STEPS_PER_PHASED` only: waiting for data comes and goes, but the phases of a step take equally long each time.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        self._names: list[str] = []
        self.marks: list[Any] = [self._device.mark()]

    def note(self, name: str) -> None:
        """Marks the end of a phase. The phase `data` ends when the batch is there."""
        self._names.append(name)
        self.marks.append(self._device.mark())

    def steps(self) -> list[dict[str, float]]:
        """Returns the seconds of each part of each step: `data`, then its phases or the whole `step`. The device must have finished."""
        steps: list[dict[str, float]] = []
        for name, seconds in zip(self._names, self._device.seconds_between(self.marks), strict=True):
            if name == DATA_PHASE:
                steps.append({})
            steps[-1][name] = seconds
        return steps


def phase_seconds(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Returns the seconds of all steps together, by phase. Steps without timed phases are divided in the proportions of the timed ones."""
    waited = sum(step[DATA_PHASE] for step in steps)
    worked = sum(sum(step.values()) for step in steps) - waited
    phased = [step for step in steps if WHOLE_STEP not in step]
    sums = {name: sum(step[name] for step in phased) for name in TrainingStep.phases} if phased else {}
    whole = sum(sums.values())
    shares = {name: seconds / whole for name, seconds in sums.items()} if whole > 0 else {WHOLE_STEP: 1.0}
    return {DATA_PHASE: waited, **{name: worked * share for name, share in shares.items()}}


class Stepper:
    """It takes batches and makes a training step of each."""

    def __init__(self, setup: Setup, step: TrainingStep, supply: Supply, data: DataSpec) -> None:
        self.setup, self.step, self.supply, self.data = setup, step, supply, data
        self.device, self.loss = setup.device, setup.workload.loss
        self._batch, self._ends = supply.first, deque[Any]()
        self._timeline, self._phases = Timeline(self.device), iter(step.phases)
        self._plain = step.over(self._inputs)
        self._phased = step.over(self._inputs, lambda: self._timeline.note(next(self._phases)))

    def _inputs(self) -> Inputs:
        return self._batch.args, self._batch.kwargs

    def feed(self, batches: Iterator[Any], *, prefetch: bool | None = None) -> Feed:
        return Feed(
            batches,
            self.supply.arrive,
            self.device,
            prefetch=self.data.prefetch if prefetch is None else prefetch,
            threaded=self.supply.threaded,
            timeout_s=self.data.loader_timeout_s,
        )

    def take(self, batch: Arrived, timeline: Timeline, *, with_phases: bool = False) -> Tensor:
        """Runs one step on this batch. Returns its loss, which the next step may overwrite."""
        self._batch = batch
        self.loss.put(batch.targets)
        # The step was compiled or recorded for one batch size.
        if batch.count != self.supply.batch and needs_whole_batches(self.setup):
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
        """Leaves a whole batch in place, because the step may be profiled or measured alone afterwards."""
        first = self._batch = self.supply.first
        self.setup.args, self.setup.kwargs = first.args, first.kwargs
        self.loss.put(first.targets)

    def stay_near(self, end: Any, *, prefetch: bool) -> None:
        if not prefetch:
            # One thing happens after the other here, as in a loop that reads its loss in every step.
            self.device.synchronize()
            return
        self._ends.append(end)
        if len(self._ends) > STEPS_AHEAD:
            self.device.wait_for(self._ends.popleft())


def needs_whole_batches(setup: Setup) -> bool:
    return setup.step_class is not None or setup.model is not setup.workload.model


@dataclass
class _Passed:
    """These are the steps of an epoch, or of as much of it as there was time for."""

    timeline: Timeline
    counts: list[int] = field(default_factory=list)
    """It holds the number of samples of each step."""
    issue_s: list[float] = field(default_factory=list)
    """It holds the seconds that the host needed to issue each step."""
    host_wait_s: float = 0.0
    rate: float = 0.0
    is_cut: bool = False
    loss: float = 0.0
    seconds: float = 0.0
    """This is wall-clock time, from when the loader was asked for its first batch to the end of the last step."""


class Training:
    """This takes a model under its recipe through epochs."""

    def __init__(self, spec: TrainSpec, stepper: Stepper, seed: int, learning_rate: float, tell: Tell) -> None:
        self._spec, self._stepper, self._seed, self._tell = spec, stepper, seed, tell
        self._device, self._model = stepper.device, stepper.setup.workload.model
        self._highest_rate = learning_rate
        self._train, self._validation = stepper.supply.train(spec.data.workers), stepper.supply.validation
        self.steps_per_epoch = self._train.steps
        """It is 0 if the user's loader does not say."""
        self.spent_s = 0.0
        """The epochs so far have trained for this long. `max_seconds` limits it."""

    def close(self) -> None:
        """Ends the loaders' workers."""
        self._train.close()
        if self._validation is not None:
            self._validation.close()

    def epoch(self, number: int) -> tuple[Epoch, Block]:
        seed_everything(self._seed, number)
        device, clock, before = self._device, time.perf_counter, self._sizes()
        with loader_errors():
            # This comes first, because workers are forked here, and a fork is safest while there is no other thread.
            started = clock()
            batches = self._train.begin(number)
            begun_s = clock() - started
            # Looking at the device takes milliseconds before and after. They do not count as training.
            with watched(device) as seen, self._stepper.step.context():
                passed = self._pass(batches, number, clock() - begun_s)
            self._require_finite(passed.loss, number, len(passed.counts))
            started = clock()
            held_out = self._validate(number)
            validation_s = clock() - started
        self._stepper.rest()
        steps, memory = passed.timeline.steps(), seen["memory"]
        since_s = DRIVER_LOOKS_BACK_S if device.is_accelerator else 0.0
        used = [look.utilisation for look in seen["telemetry"] if look.at_s >= since_s and look.utilisation is not None]
        epoch = Epoch(
            number=number,
            seconds=passed.seconds + validation_s,
            train_s=passed.seconds,
            validation_s=validation_s,
            steps=len(passed.counts),
            samples=sum(passed.counts),
            train_loss=passed.loss,
            trainable=len(before),
            unchanged=int((self._sizes() == before).sum()),
            learning_rate=passed.rate,
            phases_s=phase_seconds(steps),
            host_wait_s=passed.host_wait_s,
            gradient_scale=self._stepper.step.gradient_scale,
            peak_bytes=memory.peak_rss_bytes if memory.peak_reserved_bytes is None else memory.peak_reserved_bytes,
            utilisation=fmean(used) if used else None,
            energy_j=seen["energy_j"],
            is_cut=passed.is_cut,
            **held_out.results(),
        )
        return epoch, self._block(passed, steps, number, seen)

    def _pass(self, batches: Iterator[Any], number: int, started: float) -> _Passed:
        """Trains on all batches of an epoch, or on fewer if the time is over."""
        stepper, clock, steps = self._stepper, time.perf_counter, self._train.steps
        passed, total = _Passed(Timeline(self._device)), torch.zeros((), device=self._device.torch_device)
        timeline, reported_at, samples = passed.timeline, started, 0
        phased_at = 0 if steps == 1 else 1  # the first step of an epoch follows a validation
        with stepper.feed(batches) as feed:
            while not passed.is_cut:
                asked = clock()
                batch = feed.next()
                now = clock()
                passed.host_wait_s += now - asked
                if batch is None:
                    break
                timeline.note(DATA_PHASE)
                step = len(passed.counts)
                passed.rate = rate_of_epochs(self._spec, self._highest_rate, number, step, steps)
                stepper.step.learn_at(passed.rate)
                loss = stepper.take(batch, timeline, with_phases=step % STEPS_PER_PHASED == phased_at)
                issued = clock()
                total.add_(loss.float(), alpha=batch.count)
                stepper.stay_near(timeline.marks[-1], prefetch=self._spec.data.prefetch)
                samples += batch.count
                passed.counts.append(batch.count)
                passed.issue_s.append(issued - now)
                if now - reported_at > TELL_EVERY_S:
                    # Reading the loss waits for the device, so it is done once a second.
                    reported_at, mean = now, float(total) / samples
                    self._require_finite(mean, number, step + 1)
                    self._report(number, step + 1, loss=mean, samples_per_s=samples / (now - started))
                is_over = self.spent_s + now - started > (self._spec.max_seconds or math.inf)
                passed.is_cut = is_over and step + 1 != steps
            self._device.synchronize()
        passed.seconds = clock() - started
        self.spent_s += passed.seconds
        if not samples:
            raise BenchError("user", "the training loader gave no batch")
        passed.loss = float(total) / samples
        return passed

    def _report(self, number: int, step: int, **more: Any) -> None:
        steps = self._train.steps
        self._tell(TrainingProgress(epoch=number, epochs=self._spec.epochs, step=step, steps=steps, **more))

    def _require_finite(self, mean: float, number: int, steps: int) -> None:
        if not math.isfinite(mean):
            raise BenchError(
                "numerics",
                f"the loss was no longer a number in epoch {number}, by step {steps} (highest learning rate "
                f"{self._highest_rate:g}): lower the learning rate, use another number format, or look for inputs that are no numbers",
            )

    def _sizes(self) -> Tensor:
        """Returns the norm of every tensor that is trained. A tensor that was changed has another norm."""
        trained = [weight.detach() for weight in self._model.parameters() if weight.requires_grad]
        return torch.stack([torch.linalg.vector_norm(weight, dtype=torch.float64) for weight in trained])

    def _validate(self, number: int) -> HeldOut:
        """Measures loss and accuracy on the held-out part, eagerly and in the recipe's number format."""
        stepper, model = self._stepper, self._model
        held_out, reported_at = HeldOut(self._device), time.perf_counter()
        if self._validation is None:
            return held_out
        model.eval()
        try:
            with torch.no_grad(), stepper.feed(self._validation.begin(1)) as feed:
                while (batch := feed.next()) is not None:
                    with stepper.setup.autocast():
                        output = model(*batch.args, **batch.kwargs)
                        stepper.loss.targets = batch.targets
                        loss = stepper.loss.held_out(output)
                    held_out.add(loss, stepper.loss.answers(output), batch.count)
                    if time.perf_counter() - reported_at > TELL_EVERY_S:
                        reported_at = time.perf_counter()
                        self._report(number, self._train.steps)
        except BenchError as error:
            raise BenchError(error.kind, f"in validation: {error}") from error
        finally:
            model.train()
        return held_out

    def _block(self, passed: _Passed, steps: list[dict[str, float]], number: int, seen: dict[str, Any]) -> Block:
        """Returns the steps with whole batches one by one. The smaller batch at the end of an epoch is left out, because it
        takes less time."""
        is_whole = [count == self._stepper.supply.batch for count in passed.counts]
        whole = [step for step, is_kept in zip(steps, is_whole, strict=True) if is_kept]
        kept = _spread(whole, KEPT_STEPS)
        names = dict.fromkeys(name for step in whole for name in step if name != DATA_PHASE)
        if len(names) > 1:
            names.pop(WHOLE_STEP, None)
        phases = {name: tuple(step[name] for step in whole if name in step) for name in names}
        return Block(
            kind="throughput",
            clock=self._device.clock,
            issue_s=tuple(passed.issue_s[:ISSUED]) if self._device.is_accelerator else (),
            samples=tuple(sum(step.values()) for step in kept),
            phases={DATA_PHASE: tuple(step[DATA_PHASE] for step in kept), **phases} if kept else {},
            round=number,
            **{**seen, "wall_s": passed.seconds, "telemetry": tuple(_spread(list(seen["telemetry"]), KEPT_LOOKS))},
        )


class HeldOut:
    """It adds up validation results on the device. Reading the results waits for the device."""

    def __init__(self, device: Device) -> None:
        self._losses = torch.zeros((), device=device.torch_device)
        self._right, self._not_finite = (self._losses.long() for _ in range(2))
        self._samples = self._batches = 0
        self._classes = self._losses.new_zeros(1, dtype=torch.long)
        """It counts how often each class was a target. The last entry counts targets that were not judged."""

    def add(self, loss: Tensor | None, answers: Answers | None, count: int) -> None:
        self._batches += 1
        if loss is not None:
            self._losses.add_(loss.float(), alpha=count)
            self._not_finite.add_(~loss.isfinite())
            self._samples += count
        if answers is not None:
            if len(self._classes) == 1:
                self._classes = self._classes.new_zeros(answers.known + 1)
            self._right.add_(answers.right)
            self._classes.index_add_(0, answers.classes, torch.ones_like(answers.classes))

    def results(self) -> dict[str, Any]:
        """Returns the fields of an `Epoch`. A loss or an accuracy is None if there was none, or if it is not a number."""
        judged, mean = self._classes[:-1].tolist(), float(self._losses) / self._samples if self._samples else math.nan
        many = sum(judged)
        return {
            "val_loss": mean if math.isfinite(mean) else None,
            "val_accuracy": float(self._right) / many if many else None,
            "val_judged": many,
            "val_most_frequent": max(judged) / many if many else None,
            "val_batches": self._batches,
            "val_batches_not_finite": int(self._not_finite),
        }


def rate_of_epochs(spec: TrainSpec, highest: float, epoch: int, step: int, steps: int) -> float:
    """Returns the learning rate at a step of an epoch that has `steps` steps. If that number is not known (0), the rate
    changes once per epoch."""
    whole = max(1, steps)
    return rate_at(spec.schedule, highest, (epoch - 1) * whole + min(step, whole - 1), spec.epochs * whole)


def rate_at(schedule: Schedule, highest: float, step: int, steps: int) -> float:
    """Returns the learning rate of a step. It rises to the highest over the first steps, then falls as the schedule says."""
    if schedule == "constant":
        return highest
    warm = max(1, round(WARM_SHARE[schedule] * steps))
    if step < warm:
        return highest * (step + 1) / warm
    left = (steps - step) / max(1, steps - warm)
    return highest * (left if schedule == "one-cycle" else 0.5 * (1 - math.cos(math.pi * left)))


def seed_everything(seed: int, epoch: int) -> None:
    """Seeds dropout and whatever the user's own loaders draw. So an epoch begins with the same state however its batches come."""
    mixed = (seed % 2**31 * 1_000_003 + epoch) % 2**63
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def be_deterministic() -> None:
    """Makes torch use algorithms that give the same bits again. Operators that have none run with a warning."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _spread(values: list[Any], most: int) -> list[Any]:
    return [values[number * len(values) // most] for number in range(most)] if len(values) > most else values


# The rest of this file measures loader and model, apart and together.


def feed_for(stepper: Stepper, part: FedPart, seconds: float, workers: int, prefetch: bool) -> Fed:
    """Measures loading alone, the model alone on a batch that is there, or both together."""
    device, supply, timeline = stepper.device, stepper.supply, Timeline(stepper.device)
    with ExitStack() as held:
        for context in (loader_errors(), quiet_collector(), stepper.step.context()):
            held.enter_context(context)
        ready = 1
        if part == "model":
            stepper.step()
            run = stepper.step.plain()
        else:
            loader = supply.train(workers)
            held.callback(loader.close)
            batches = _endless(loader)
            # These batches were ready before the measurement began.
            ready += workers * stepper.data.prefetch_factor + supply.queued
        if part == "together":
            feed = held.enter_context(stepper.feed(batches, prefetch=prefetch))

        def work() -> int:
            """Does with one batch what is measured. Returns how many samples it had."""
            if part == "loader":
                return _count_of(next(batches), stepper)
            if part == "model":
                run()
                stepper.stay_near(device.mark(), prefetch=True)
                return supply.batch
            batch = feed.next()
            assert batch is not None
            timeline.note(DATA_PHASE)
            stepper.take(batch, timeline)
            stepper.stay_near(timeline.marks[-1], prefetch=prefetch)
            return batch.count

        for _ in range(ready):
            work()
        device.synchronize()
        timeline.begin()
        counts, started = list[int](), time.perf_counter()
        # A batch that is slow only now and then should have been seen, unless that takes too long.
        while time.perf_counter() - started < (seconds if len(counts) >= FEW_BATCHES else LONGEST_FACTOR * seconds):
            counts.append(work())
        device.synchronize()
        took = time.perf_counter() - started
    wait_s = phase_seconds(timeline.steps())[DATA_PHASE] if part == "together" else 0.0
    return Fed(part=part, samples=sum(counts), seconds=took, wait_s=wait_s, workers=workers, prefetch=prefetch)


def _count_of(batch: Any, stepper: Stepper) -> int:
    # Data that lie on the device have no loader: the batches are made where they are used.
    if stepper.data.on_device:
        return stepper.supply.arrive(batch).count
    return part_batch(batch).count if isinstance(batch, Mapping) else len(batch[1])


def _endless(batches: Batches) -> Iterator[Any]:
    for epoch in count(1):
        number = -1
        for number, batch in enumerate(batches.begin(epoch)):  # noqa: B007  (whether there was one is asked below)
            yield batch
        if number < 0:
            raise BenchError("user", "the loader gave no batch")
