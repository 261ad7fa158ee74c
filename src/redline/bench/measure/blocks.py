"""Timed blocks with telemetry beside them, and the least memory a step can do with."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.device.process import ProcessorUse
from redline.bench.workload.ranks import Ranks
from redline.bench.workload.step import TimedStep
from redline.protocol import Measure
from redline.record import Block, TelemetrySample

PERIOD_S = 0.1


class Sampling:
    """Context manager: `samples` and `energy_j` are there once it has been left."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redline-telemetry", daemon=True)
        self._samples: list[TelemetrySample] = []
        self.energy_j: float | None = None

    @property
    def samples(self) -> tuple[TelemetrySample, ...]:
        return tuple(self._samples)

    def __enter__(self) -> Sampling:
        self._started = time.perf_counter()
        self._energy_before = self._device.energy_j()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._samples.append(self._device.look(time.perf_counter() - self._started, neighbours=True))
        after = self._device.energy_j()
        if after is not None and self._energy_before is not None and after >= self._energy_before:
            # A window shorter than the counter's period reads 0, and the next one what both used: together they are right.
            self.energy_j = after - self._energy_before

    def _watch(self) -> None:
        while not self._stop.wait(PERIOD_S):
            self._samples.append(self._device.look(time.perf_counter() - self._started))


LONG_STEP_FACTOR = 10
"""A step longer than so many settling times is not disturbed by what settles."""

OVERRUN = 4.0
"""A block that takes this many times as long as asked (its estimate was stale) ends early, where the host can tell."""


def measure_block(
    step: TimedStep, device: Device, request: Measure, step_estimate_s: float, ranks: Ranks | None = None
) -> Block:
    """One block of the kind asked for: latency waits after every step, throughput only at the end."""
    ranks = ranks or Ranks()
    settling, timed = ranks.agreed(*plan_steps(request, step_estimate_s))
    ranks.meet()
    device.synchronize()
    device.reset_peaks()
    before = ProcessorUse.now()
    with step.context(), quiet_collector(), Sampling(device) as sampling:
        started_at, started = time.time(), time.perf_counter()
        # A rank that ended earlier than the others would leave them waiting.
        deadline = started + (math.inf if ranks.several else OVERRUN * (request.settle_seconds + request.seconds))
        take = _latency if request.kind == "latency" else _throughput
        block = take(step, device, settling, timed, deadline)
        wall_s = time.perf_counter() - started
        block |= ProcessorUse.now().since(before, wall_s)
    return Block(
        **block,
        kind=request.kind,
        wall_s=wall_s,
        started_at=started_at,
        round=request.round,
        memory=device.memory(),
        energy_j=sampling.energy_j,
        telemetry=sampling.samples,
    )


def plan_steps(request: Measure, step_estimate_s: float) -> tuple[int, int]:
    """How many steps to let pass and how many to time, fixed beforehand: a host running ahead has no sense of time."""
    estimate = max(step_estimate_s, 1e-7)
    settling = 0
    if request.settle_seconds > 0 and estimate < LONG_STEP_FACTOR * request.settle_seconds:
        settling = math.ceil(request.settle_seconds / estimate)
    timed = max(1, round(request.seconds / estimate))
    return settling, min(timed, request.max_steps) if request.max_steps else timed


def _latency(step: TimedStep, device: Device, settling: int, timed: int, deadline: float) -> dict[str, Any]:
    clock, synchronize = time.perf_counter, device.synchronize
    samples = []
    for _ in range(settling + timed):
        started = clock()
        step()
        synchronize()
        ended = clock()
        samples.append(ended - started)
        if ended > deadline:
            if len(samples) > settling:
                break
            settling = len(samples)  # time enough to settle has passed: the next step counts, and is the last
    return {"clock": "host", "samples": tuple(samples[settling:]), "settling": tuple(samples[:settling])}


def _throughput(step: TimedStep, device: Device, settling: int, timed: int, deadline: float) -> dict[str, Any]:
    clock, mark, runs_ahead = time.perf_counter, device.mark, device.is_accelerator
    marks = [mark()]
    keep = marks.append
    issue = []
    for _ in range(settling + timed):
        started = clock()
        step(lambda: keep(mark()))
        ended = clock()
        issue.append(ended - started)
        if ended > deadline and not runs_ahead:
            if len(issue) > settling:
                break
            settling = len(issue)
    device.synchronize()
    phases = len(step.phases)
    between = device.seconds_between(marks)
    whole = [sum(between[first : first + phases]) for first in range(0, len(between), phases)]
    return {
        "clock": device.clock,
        "samples": tuple(whole[settling:]),
        "settling": tuple(whole[:settling]),
        "issue_s": tuple(issue) if device.is_accelerator else (),
        "phases": {
            name: tuple(between[settling * phases + position :: phases]) for position, name in enumerate(step.phases)
        }
        if phases > 1
        else {},
    }


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside a block. What lives by then was frozen when the session was prepared."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


SQUEEZE_PRECISION = 0.005
"""Of the memory needed: finer than that the allocator's own rounding shows."""
SQUEEZE_STEPS = 2
"""The first fills the empty cache, the second must live with what the first left behind."""
SQUEEZE_SECONDS = 10.0


def least_memory(step: TimedStep, device: Device, limit_bytes: int | None) -> int | None:
    """Bytes reserved at the tightest cap under which the step still runs; None where no cap can be set.

    torch's allocator keeps what it has freed as long as there is room: a training step may reserve a fifth more than it
    needs, an inference step may need all of it. That decides how large a batch fits, and only trying tells.

    Running out of memory here is on purpose and inside a cap, so it disturbs nobody. Afterwards `limit_bytes`, the cap
    of the session, holds again.
    """
    memory = device.memory()
    low, high = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    if low is None or high is None:
        return None
    deadline = time.perf_counter() + SQUEEZE_SECONDS
    try:
        while high - low > SQUEEZE_PRECISION * high and time.perf_counter() < deadline:
            middle = (low + high) // 2
            reserved = _reserved_under(step, device, middle)
            if reserved is None:
                low = middle
            else:
                high = min(high, reserved)
                if reserved > middle:
                    break  # a graph's private pool stays reserved whatever the cap: less cannot be had
    finally:
        device.cap_allocator(limit_bytes)
    return high


def _reserved_under(step: TimedStep, device: Device, cap_bytes: int) -> int | None:
    """The most that was reserved while some steps ran under the cap; None where they ran out of memory."""
    device.release_cache()
    device.reset_peaks()
    device.cap_allocator(cap_bytes)
    try:
        with step.context():
            for _ in range(SQUEEZE_STEPS):
                step()
            device.synchronize()
        return device.memory().peak_reserved_bytes
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the handler, whose traceback would keep the failed step's tensors alive.
    step.recover()
    device.release_cache()
    return None
