"""The loader alone, the model alone on a batch that is there already, and both together: who waits for whom?"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count
from typing import Any

from redline.bench.data.batches import Batches
from redline.bench.data.feed import loader_errors
from redline.bench.measure.blocks import quiet_collector
from redline.bench.train.steps import Stepper, Timeline, sums
from redline.errors import BenchError
from redline.training import DATA_PHASE, Fed, FedPart


def feed_for(stepper: Stepper, part: FedPart, seconds: float, workers: int, prefetch: bool) -> Fed:
    with loader_errors(), quiet_collector(), stepper.step.context():
        if part == "model":
            samples, took = _model_alone(stepper, seconds)
            return Fed(part=part, samples=samples, seconds=took, workers=workers, prefetch=prefetch)
        batches = stepper.supply.train(workers)
        ready = 1 + workers * stepper.data.prefetch_factor  # those that lie ready before anybody looks
        try:
            if part == "loader":
                samples, took = _loader_alone(stepper, _endless(batches), seconds, ready)
                return Fed(part=part, samples=samples, seconds=took, workers=workers, prefetch=prefetch)
            samples, took, waited = _together(stepper, _endless(batches), seconds, ready, prefetch)
            return Fed(part=part, samples=samples, seconds=took, wait_s=waited, workers=workers, prefetch=prefetch)
        finally:
            batches.close()


def _loader_alone(stepper: Stepper, batches: Iterator[Any], seconds: float, ready: int) -> tuple[int, float]:
    # What lies on the device has no loader: its batches are made where they are used.
    made = (
        (lambda batch: stepper.supply.arrive(batch).count) if stepper.data.on_device else (lambda batch: len(batch[1]))
    )
    for _ in range(ready):
        next(batches)
    samples, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds or not samples:
        samples += made(next(batches))
    stepper.device.synchronize()
    return samples, time.perf_counter() - started


def _model_alone(stepper: Stepper, seconds: float) -> tuple[int, float]:
    steps, device = 0, stepper.device
    stepper.step()
    device.synchronize()
    started = time.perf_counter()
    while time.perf_counter() - started < seconds or not steps:
        stepper.step()
        stepper.stay_near(device.mark(), prefetch=True)
        steps += 1
    device.synchronize()
    return steps * stepper.supply.batch, time.perf_counter() - started


def _together(
    stepper: Stepper, batches: Iterator[Any], seconds: float, ready: int, prefetch: bool
) -> tuple[int, float, float]:
    timeline, device = Timeline(stepper.device), stepper.device
    samples, started = 0, 0.0
    with stepper.feed(batches, prefetch=prefetch) as feed:
        for number in count():
            if number == ready:
                device.synchronize()
                timeline.begin()
                started = time.perf_counter()
            elif number > ready and time.perf_counter() - started >= seconds:
                break
            batch = feed.next()
            assert batch is not None
            timeline.data()
            stepper.take(batch, timeline)
            feed.ahead()
            stepper.stay_near(timeline.marks[-1], prefetch=prefetch)
            samples += batch.count if number >= ready else 0
        device.synchronize()
        took = time.perf_counter() - started
    return samples, took, sums(timeline.seconds()).get(DATA_PHASE, 0.0)


def _endless(batches: Batches) -> Iterator[Any]:
    for epoch in count(1):
        number = -1
        for number, batch in enumerate(batches.begin(epoch)):  # noqa: B007  (whether there was one is asked below)
            yield batch
        if number < 0:
            raise BenchError("user", "the loader gave no batch")
