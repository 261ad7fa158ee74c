"""Epochs: what each took, what the device waited for, and what was learned."""

from __future__ import annotations

import math
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from redline.bench.data.feed import loader_errors
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.device.process import ProcessorUse
from redline.bench.measure.blocks import STEPS_PER_PHASED, Sampling, quiet_collector
from redline.bench.train.steps import WHOLE_STEP, Stepper, Timeline, phase_seconds
from redline.bench.workload.losses import Answers
from redline.model.errors import BenchError
from redline.model.protocol import TrainingProgress
from redline.model.record import DATA_PHASE, Block, Epoch, Memory
from redline.model.spec import Schedule, TrainSpec

TELL_EVERY_S = 1.0
KEPT_STEPS = 2_000
"""At most this many steps of an epoch are kept one by one, evenly spread; sums are over all."""
KEPT_LOOKS = 60
DRIVER_LOOKS_BACK_S = 1.0
"""A GPU's driver tells the utilisation of up to this long ago: earlier looks see what was before the epoch."""
ISSUED = 8
"""Steps whose time to issue is kept: only the first of an epoch are issued without waiting for those before."""
WARM_SHARE: dict[Schedule, float] = {"one-cycle": 0.2, "cosine": 0.05, "constant": 0.0}
"""The learning rate rises over this share of all steps."""

Tell = Callable[[TrainingProgress], None]


@dataclass
class _Passed:
    """The steps of an epoch, or of as much of it as there was time for."""

    timeline: Timeline
    whole: list[bool]
    """It says of each step whether its batch was a whole one."""
    issue_s: list[float]
    """Host seconds to issue each step."""
    samples: int = 0
    host_wait_s: float = 0.0
    rate: float = 0.0
    is_cut: bool = False
    loss: float | None = None
    seconds: float = 0.0
    """It is wall-clock time from the first word to the loader to the last step."""

    @property
    def steps(self) -> int:
        return len(self.whole)


class Training:
    """This takes a model under its recipe through epochs."""

    def __init__(self, spec: TrainSpec, stepper: Stepper, seed: int, learning_rate: float, tell: Tell) -> None:
        self._spec, self._stepper, self._seed, self._tell = spec, stepper, seed, tell
        self._device = stepper.device
        self._highest_rate = learning_rate
        self._train = stepper.supply.train(spec.data.workers)
        self._looks_back_s = DRIVER_LOOKS_BACK_S if stepper.device.is_accelerator else 0.0
        self.spent_s = 0.0
        """So much of the time that all epochs may take together is gone, also in those before a resume."""
        self._sum = torch.zeros((), device=self._device.torch_device)

    @property
    def steps_per_epoch(self) -> int:
        """0: the user's loader does not say."""
        return self._train.steps

    def close(self) -> None:
        """End the loaders' workers."""
        self._train.close()
        if self._stepper.supply.validation is not None:
            self._stepper.supply.validation.close()

    def epoch(self, number: int) -> tuple[Epoch, Block]:
        seed_everything(self._seed, number)
        device, before = self._device, self._sizes()
        device.synchronize()
        device.reset_peaks()
        clock, started_at = time.perf_counter, time.time()
        with loader_errors(), quiet_collector():
            # First: workers are forked here, and a fork is safest while there is no other thread.
            started = clock()
            batches = self._train.begin(number)
            begun_s = clock() - started
            processors = ProcessorUse.now()
            with Sampling(device) as sampling, self._stepper.step.context():
                # Looking at the device takes milliseconds before and after: they are no part of the training.
                passed = self._pass(batches, number, clock() - begun_s)
            used = ProcessorUse.now().since(processors, passed.seconds)
            memory = device.memory()
            self._require_finite(passed.loss, number, passed.steps)
            started = clock()
            held_out = self._validate(number)
            validation_s = clock() - started
        self._stepper.rest()
        steps = passed.timeline.steps()
        epoch = Epoch(
            number=number,
            seconds=passed.seconds + validation_s,
            train_s=passed.seconds,
            validation_s=validation_s,
            steps=passed.steps,
            samples=passed.samples,
            train_loss=passed.loss,
            val_loss=held_out.loss,
            val_accuracy=held_out.accuracy,
            val_judged=held_out.judged,
            val_most_frequent=held_out.most_frequent,
            val_batches=held_out.batches,
            val_batches_not_finite=held_out.not_finite,
            trainable=len(before),
            unchanged=int((self._sizes() == before).sum()),
            learning_rate=passed.rate,
            phases_s=phase_seconds(steps),
            host_wait_s=passed.host_wait_s,
            gradient_scale=self._stepper.step.gradient_scale,
            peak_bytes=memory.peak_rss_bytes if memory.peak_reserved_bytes is None else memory.peak_reserved_bytes,
            utilisation=_mean([look.utilisation for look in sampling.samples if look.at_s >= self._looks_back_s]),
            energy_j=sampling.energy_j,
            is_cut=passed.is_cut,
        )
        return epoch, _block(passed, steps, device, sampling, started_at, memory, number, used)

    def _pass(self, batches: Iterator[Any], number: int, started: float) -> _Passed:
        """All batches of an epoch; fewer where the time is over."""
        stepper, clock = self._stepper, time.perf_counter
        passed, watched = _Passed(Timeline(self._device), [], []), RunningLoss(self._sum)
        timeline, told = passed.timeline, started
        phased_at = 0 if self._train.steps == 1 else 1  # the first step of an epoch follows a validation
        with stepper.feed(batches) as feed:
            while not passed.is_cut:
                asked = clock()
                batch = feed.next()
                now = clock()
                passed.host_wait_s += now - asked
                if batch is None:
                    break
                timeline.note(DATA_PHASE)
                passed.rate = self._rate(number, passed.steps)
                stepper.step.learn_at(passed.rate)
                try:
                    is_phased = passed.steps % STEPS_PER_PHASED == phased_at
                    loss = stepper.take(batch, timeline, with_phases=is_phased)
                except Exception as error:
                    self._explain(error, batch.count, passed.steps)
                    raise
                issued = clock()
                self._sum.add_(loss.float(), alpha=batch.count)
                feed.ahead()
                stepper.stay_near(timeline.marks[-1], prefetch=self._spec.data.prefetch)
                passed.samples += batch.count
                passed.whole.append(stepper.is_whole(batch))
                passed.issue_s.append(issued - now)
                if now - told > TELL_EVERY_S:
                    told = now
                    self._report(number, passed, watched.peek(passed.samples), now - started)
                passed.is_cut = self._is_over(now - started) and passed.steps != self._train.steps
            self._device.synchronize()
        passed.seconds = clock() - started
        self.spent_s += passed.seconds
        if not passed.samples:
            raise BenchError("user", "the training loader gave no batch")
        passed.loss = float(self._sum) / passed.samples
        return passed

    def _explain(self, error: Exception, count: int, steps: int) -> None:
        """Raise what to do about it, where the size of the batch may be the cause."""
        if count != 1 or self._stepper.supply.batch == 1 or isinstance(error, BenchError) or is_out_of_memory(error):
            return
        told = f"step {steps + 1} of the epoch failed on a batch of one sample, as BatchNorm does: {one_line(error)}"
        raise BenchError("user", f"{told}; let your loader drop it (drop_last=True)") from error

    def _is_over(self, seconds: float) -> bool:
        return self._spec.max_seconds is not None and self.spent_s + seconds > self._spec.max_seconds

    def _rate(self, epoch: int, step: int) -> float:
        steps = max(1, self._train.steps)
        done = (epoch - 1) * steps + min(step, steps - 1)
        return rate_at(self._spec.schedule, self._highest_rate, done, self._spec.epochs * steps)

    def _report(self, number: int, passed: _Passed, mean: float | None, seconds: float) -> None:
        self._require_finite(mean, number, passed.steps)
        rate = passed.samples / seconds if seconds > 0 else None
        self._tell_where(number, passed.steps, loss=mean, samples_per_s=rate)

    def _tell_where(self, number: int, step: int, **more: Any) -> None:
        steps = self._train.steps
        self._tell(TrainingProgress(epoch=number, epochs=self._spec.epochs, step=step, steps=steps, **more))

    def _require_finite(self, mean: float | None, number: int, steps: int) -> None:
        if mean is not None and not math.isfinite(mean):
            raise BenchError(
                "numerics",
                f"the loss was no longer a number in epoch {number}, by step {steps} (highest learning rate "
                f"{self._highest_rate:g}): lower the learning rate, use another number format, or look for inputs that are no numbers",
            )

    def _sizes(self) -> Tensor:
        """The norm of every tensor that is trained: one that was changed has another."""
        parameters = [each.detach() for each in self._stepper.setup.workload.model.parameters() if each.requires_grad]
        return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in parameters])

    def _validate(self, number: int) -> HeldOut:
        """Measures loss and accuracy on the held-out part, eagerly and in the recipe's number format."""
        stepper, batches = self._stepper, self._stepper.supply.validation
        held_out, told = HeldOut(self._device), time.perf_counter()
        if batches is None:
            return held_out
        model = stepper.setup.workload.model
        model.eval()
        try:
            with torch.no_grad(), stepper.feed(batches.begin(1), held_out=True) as feed:
                while (batch := feed.next()) is not None:
                    with stepper.setup.autocast():
                        output = model(*batch.args, **batch.kwargs)
                        stepper.loss.targets = batch.targets
                        loss = stepper.loss.held_out(output)
                    held_out.add(loss, stepper.loss.answers(output), batch.count)
                    feed.ahead()
                    if time.perf_counter() - told > TELL_EVERY_S:
                        told = time.perf_counter()
                        self._tell_where(number, self._train.steps)
        except BenchError as error:
            raise BenchError(error.kind, f"in validation: {error}") from error
        finally:
            model.train()
        return held_out


class HeldOut:
    """This adds up validation on the device. To read a result waits for the device."""

    def __init__(self, device: Device) -> None:
        self._losses = torch.zeros((), device=device.torch_device)
        self._right, self._judged, self._not_finite = (self._losses.long() for _ in range(3))
        self._samples = self.batches = 0
        self._classes: Tensor | None = None

    def add(self, loss: Tensor | None, answers: Answers | None, count: int) -> None:
        self.batches += 1
        if loss is not None:
            self._losses.add_(loss.float(), alpha=count)
            self._not_finite.add_(~loss.isfinite())
            self._samples += count
        if answers is not None:
            self._right.add_(answers.right)
            self._judged.add_(answers.judged)
            if self._classes is None:
                self._classes = self._right.new_zeros(answers.known + 1)
            self._classes.index_add_(0, answers.classes, torch.ones_like(answers.classes))

    @property
    def loss(self) -> float | None:
        """None where there was none, or it is no number."""
        mean = float(self._losses) / self._samples if self._samples else math.nan
        return mean if math.isfinite(mean) else None

    @property
    def accuracy(self) -> float | None:
        return float(self._right) / self.judged if self.judged else None

    @property
    def judged(self) -> int:
        return int(self._judged)

    @property
    def most_frequent(self) -> float | None:
        return float(self._classes[:-1].max()) / self.judged if self._classes is not None and self.judged else None

    @property
    def not_finite(self) -> int:
        return int(self._not_finite)


class RunningLoss:
    """The sum of losses as it was a moment ago: read without waiting for the device."""

    def __init__(self, total: Tensor) -> None:
        self._total = total.zero_()
        self._copied = torch.zeros((), pin_memory=total.is_cuda)
        self._samples = 0

    def peek(self, samples: int) -> float | None:
        """The mean at the last look; starts the copy that the next look will read."""
        if not self._total.is_cuda:
            return float(self._total) / samples
        known = float(self._copied) / self._samples if self._samples else None
        self._copied.copy_(self._total, non_blocking=True)
        self._samples = samples
        return known


def rate_at(schedule: Schedule, highest: float, step: int, steps: int) -> float:
    """The learning rate of a step: up to the highest over the first ones, then down to nothing as the schedule says."""
    if schedule == "constant":
        return highest
    warm = max(1, round(WARM_SHARE[schedule] * steps))
    if step < warm:
        return highest * (step + 1) / warm
    left = (steps - step) / max(1, steps - warm)
    return highest * (left if schedule == "one-cycle" else 0.5 * (1 - math.cos(math.pi * left)))


def seed_everything(seed: int, epoch: int) -> None:
    """Seeds dropout and whatever the user's own loaders draw, so that an epoch begins with the same state, resumed or not."""
    mixed = (seed % 2**31 * 1_000_003 + epoch) % 2**63
    torch.manual_seed(mixed)
    random.seed(mixed)
    np.random.seed(mixed % 2**32)


def be_deterministic() -> None:
    """The same bits again. Operators that cannot say so in a warning, and run."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _block(
    passed: _Passed,
    steps: list[dict[str, float]],
    device: Device,
    sampling: Sampling,
    started_at: float,
    memory: Memory,
    number: int,
    used: dict[str, Any],
) -> Block:
    """Returns the steps with whole batches one by one. The smaller batch at the end of an epoch is no sample of them."""
    whole = [step for step, is_whole in zip(steps, passed.whole, strict=True) if is_whole]
    kept = _spread(whole, KEPT_STEPS)
    names = dict.fromkeys(name for step in whole for name in step if name != DATA_PHASE)
    if len(names) > 1:
        names.pop(WHOLE_STEP, None)
    phases = {name: tuple(step[name] for step in whole if name in step) for name in names}
    return Block(
        kind="throughput",
        clock=device.clock,
        issue_s=tuple(passed.issue_s[:ISSUED]) if device.is_accelerator else (),
        samples=tuple(sum(step.values()) for step in kept),
        phases={DATA_PHASE: tuple(step[DATA_PHASE] for step in kept), **phases} if kept else {},
        wall_s=passed.seconds,
        started_at=started_at,
        round=number,
        memory=memory,
        energy_j=sampling.energy_j,
        telemetry=tuple(_spread(list(sampling.samples), KEPT_LOOKS)),
        **used,
    )


def _spread(values: list[Any], most: int) -> list[Any]:
    return [values[number * len(values) // most] for number in range(most)] if len(values) > most else values


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
