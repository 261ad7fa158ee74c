"""This warms a step up to a steady state, times blocks with telemetry beside them, and finds the least memory a step can do with."""

from __future__ import annotations

import gc
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.device.process import ProcessorUse, on_one_processor
from redline.bench.workload.ranks import Ranks
from redline.bench.workload.step import Setup, TimedStep, TrainingStep
from redline.bench.workload.structure import WholeDispatchMode
from redline.model.note import note
from redline.model.protocol import Measure
from redline.model.record import Block, TelemetrySample, Warmup
from redline.model.spec import MeasureSpec

TELEMETRY_PERIOD_S = 0.1
"""During a block the device is asked for clocks, power and temperature once in this time."""
LOOKS = 3
"""The operators of a step are timed this often, and the shortest time counts: other processes only make it longer."""
LONG_STEP_S = 1.0
"""The operators of a longer step are timed once only."""
BARE_WARMUP_STEPS = 2
"""Under a profiler from outside, a step is run this often before it counts as warm."""
LONG_STEP_FACTOR = 10
"""A step longer than this many settling times is not disturbed by what settles."""
OVERRUN = 4.0
"""A block that takes this many times as long as asked (its estimate was stale) ends early, if the host can tell."""
MARK_EVERY_S = 0.5e-3
"""A GPU takes one or two microseconds for a mark, and so does the host: one mark in this time stays below half a percent."""
STEPS_PER_PHASED = 10
"""For this many timed steps there is one further step whose phases are marked."""
SQUEEZE_PRECISION = 0.005
"""The search for the least memory ends at this share of it. The allocator's own rounding hides anything finer."""
SQUEEZE_STEPS = 2
"""Two steps must fit under a cap: the first fills the empty cache, and the second must live with what the first left behind."""
SQUEEZE_SECONDS = 10.0
"""The search for the least memory takes at most this long, and then answers with the best it has found."""
MEDIAN_AGREEMENT, QUARTILE_AGREEMENT = 0.01, 0.05
"""Two windows agree on an accelerator if their medians and their quartiles differ by at most these shares."""
CPU_MEDIAN_AGREEMENT, CPU_QUARTILE_AGREEMENT = 0.05, 0.15
"""On a CPU the shares are larger, because windows on a shared CPU never agree to 1 %."""
LOOK_PERIOD_S = 0.02
"""Windows are compared this often at most. Those of short steps are long lists, which need not be sorted after every step."""
TELL_PERIOD_S = 1.0
"""The progress of a warm-up is told this often."""
GO_ON, SETTLED, LATE = 0, 1, 2
"""These are the verdicts on a warm-up. They are numbers, because ranks agree on them by a collective."""


class Sampling:
    """This context manager watches a device from a thread. `samples` and `energy_j` are complete once it has been left."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="redline-telemetry", daemon=True)
        self.samples: list[TelemetrySample] = []
        self.energy_j: float | None = None

    def __enter__(self) -> Sampling:
        self._started = time.perf_counter()
        self._energy_before = self._device.energy_j()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.samples.append(self._device.look(time.perf_counter() - self._started, neighbours=True))
        after = self._device.energy_j()
        if after is not None and self._energy_before is not None and after >= self._energy_before:
            # A window shorter than the counter's period reads 0, and the next one reads what both used. Their sum is right.
            self.energy_j = after - self._energy_before

    def _watch(self) -> None:
        while not self._stop.wait(TELEMETRY_PERIOD_S):
            self.samples.append(self._device.look(time.perf_counter() - self._started))


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Within this context Python collects no garbage. What lives by then was frozen when the session was prepared."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def watched(device: Device, turn: int | None = None) -> Iterator[dict[str, Any]]:
    """Every block is timed in this context. It yields a dict. Once the context has been left, the dict holds what was seen beside
    the steps, as fields of a `Block`."""
    device.synchronize()
    device.reset_peaks()
    before, seen = ProcessorUse.now(), dict[str, Any]()
    # Sampling begins before the thread is bound: the sampling thread would otherwise have the same processor.
    with quiet_collector(), Sampling(device) as sampling, on_one_processor(turn):
        started_at, started = time.time(), time.perf_counter()
        yield seen
        wall_s = time.perf_counter() - started
        seen |= ProcessorUse.now().since(before, wall_s)
    seen |= {"started_at": started_at, "wall_s": wall_s, "memory": device.memory(), "energy_j": sampling.energy_j}
    seen["telemetry"] = tuple(sampling.samples)


def measure_block(
    step: TimedStep, device: Device, request: Measure, step_estimate_s: float, ranks: Ranks | None = None
) -> Block:
    """Measures one block of the kind asked for. Latency waits for the device after every step, throughput only at the end.

    A timed step is what a plain loop runs. Further steps behind the timed ones show what its phases take.
    """
    ranks = ranks or Ranks()
    settling, timed = ranks.agreed(*plan_steps(request, step_estimate_s))
    ranks.meet()
    runs_ahead = device.is_accelerator and request.kind == "throughput"
    stride = min(timed, math.ceil(MARK_EVERY_S / max(step_estimate_s, 1e-7))) if not ranks.several else 1
    # A rank that ended earlier than the others would leave them waiting.
    longest_s = math.inf if ranks.several else OVERRUN * (request.settle_seconds + request.seconds)
    with step.context():
        run = step.plain()
        with watched(device, None if ranks.several else request.turn) as seen:
            if runs_ahead:
                block = _in_a_row(run, device, settling, timed, stride)
            else:
                block = _one_by_one(run, device, settling, timed, longest_s)
    phased = block["steps_per_sample"] * len(block["samples"]) // STEPS_PER_PHASED or int(request.round == 0)
    parts: dict[str, Any] = {}
    if request.kind == "throughput":
        parts["phases"] = _phases(step, step.plain, step.phases, device, phased)
        if ranks.several and isinstance(step, TrainingStep):
            ranks.meet()  # so that all of them compute at the same time, as in any other step
            parts["alone"] = _phases(step, step.alone, step.phases[:2], device, max(phased, 1))
    return Block(**block, **seen, **parts, kind=request.kind, round=request.round)


def plan_steps(request: Measure, step_estimate_s: float) -> tuple[int, int]:
    """Returns how many steps to let pass and how many to time. It is fixed beforehand, because a host that runs ahead sees no times."""
    estimate = max(step_estimate_s, 1e-7)
    settles = estimate < LONG_STEP_FACTOR * request.settle_seconds
    settling = math.ceil(request.settle_seconds / estimate) if settles else 0
    timed = max(1, round(request.seconds / estimate))
    return settling, min(timed, request.max_steps) if request.max_steps else timed


def _one_by_one(run: Callable[[], Any], device: Device, settling: int, timed: int, longest_s: float) -> dict[str, Any]:
    """Runs steps one by one, each to its end, and times them by the host's clock."""
    clock, synchronize = time.perf_counter, device.synchronize
    ends = [clock()]
    deadline = ends[0] + longest_s
    for _ in range(settling + timed):
        run()
        synchronize()
        ends.append(clock())
        if ends[-1] > deadline:
            if len(ends) > settling + 1:
                break
            settling = len(ends) - 1  # enough time to settle has passed, so the next step counts and is the last
    samples = _between(ends)
    return {"clock": "host", "samples": samples[settling:], "settling": samples[:settling], "steps_per_sample": 1}


def _in_a_row(run: Callable[[], Any], device: Device, settling: int, timed: int, stride: int) -> dict[str, Any]:
    """Runs steps without waiting in between, and times them by the device's clock. One sample is the mean of `stride` steps."""
    settling, timed = (math.ceil(count / stride) for count in (settling, timed))
    clock, mark = time.perf_counter, device.marker(settling + timed + 1)
    marks, issued = [mark()], [clock()]
    for _ in range(settling + timed):
        for _ in range(stride):
            run()
            issued.append(clock())
        marks.append(mark())
    device.synchronize()
    samples = tuple(seconds / stride for seconds in device.seconds_between(marks))
    return {
        "clock": device.clock,
        "samples": samples[settling:],
        "settling": samples[:settling],
        "steps_per_sample": stride,
        "issue_s": _between(issued),
    }


def _between(moments: Sequence[float]) -> tuple[float, ...]:
    return tuple(later - earlier for earlier, later in pairwise(moments))


def _phases(
    step: TimedStep,
    body: Callable[[Callable[[], None]], Callable[[], Any] | None],
    names: Sequence[str],
    device: Device,
    steps: int,
) -> dict[str, tuple[float, ...]]:
    """Returns the seconds of each phase in this many further steps. `body` makes a step that calls a mark after each phase.

    It returns nothing for a step of one phase, whose time is the step's.
    """
    if len(names) == 1 or not steps:
        return {}
    marks: list[Any] = []
    with step.context(), quiet_collector():
        run = body(lambda: marks.append(device.mark()))
        if run is None:
            return {}
        skipped = int(device.is_accelerator)  # the first waits for the host, which no step in a row does
        for _ in range(skipped + steps):
            marks.append(device.mark())
            run()
        device.synchronize()
        per_step = len(names) + 1
        between = device.seconds_between(marks)[skipped * per_step :]
    return {name: tuple(between[position::per_step]) for position, name in enumerate(names)}


def reach_steady_state(
    step: Callable[[], object],
    spec: MeasureSpec,
    *,
    compilations: Callable[[], int],
    is_accelerator: bool,
    tell: Callable[[str], None] = lambda text: None,
    agreed: Callable[[int], list[int]] = lambda verdict: [verdict],
    clock: Callable[[], float] = time.perf_counter,
) -> Warmup:
    """Runs `step`, which returns when its work is done, until it settles or the time is up. Returns the warm-up with the reason.

    `tell` is called once a second with the progress. Among several ranks, `agreed` returns the verdict of the one that decides.
    """
    median, quartile = MEDIAN_AGREEMENT, QUARTILE_AGREEMENT
    if not is_accelerator:
        median, quartile = CPU_MEDIAN_AGREEMENT, CPU_QUARTILE_AGREEMENT
    samples: list[float] = []
    settled_from, compiled, agree = 0, compilations(), False
    started = look_again_at = told_at = clock()
    while True:
        before = clock()
        step()
        now = clock()
        samples.append(now - before)
        if now - told_at > TELL_PERIOD_S:
            told_at = now
            tell(f"{len(samples)} steps, {now - started:.0f} s")
        if compilations() != compiled:
            compiled, settled_from = compilations(), len(samples)
        long_enough = now - started >= spec.warmup_min_seconds and len(samples) >= spec.warmup_min_steps
        if long_enough and now >= look_again_at:
            look_again_at = now + LOOK_PERIOD_S
            settled = samples[settled_from:]
            window = _window_length(settled, spec.warmup_window, spec.warmup_window_seconds)
            agree = windows_agree(settled, window, median, quartile)
        is_late = now - started >= spec.warmup_max_seconds
        [verdict] = agreed(SETTLED if agree else LATE if is_late else GO_ON)
        if verdict == GO_ON:
            continue
        reason = note("steady", "two windows of steps agree")
        if verdict == LATE:
            late = f"no two windows of steps agreed within {spec.warmup_max_seconds:g} s of warm-up"
            reason = note("not-steady", late)
        return Warmup(samples=tuple(samples), seconds=now - started, steady=verdict == SETTLED, reason=reason)


def few_steps(step: Callable[[], object]) -> Warmup:
    """Returns a warm-up that waits for no steady state, because a profiler from outside makes every step slow."""
    ends = [time.perf_counter()]
    for _ in range(BARE_WARMUP_STEPS):
        step()
        ends.append(time.perf_counter())
    why = note("not-waited-for", "a steady state was not waited for")
    return Warmup(samples=_between(ends), seconds=ends[-1] - ends[0], steady=False, reason=why)


def _window_length(samples: Sequence[float], fewest: int, seconds: float) -> int:
    """Returns how many of the last steps make a window. It also spans some time: ten steps of a microsecond see no drifting clock."""
    elapsed, count = 0.0, 0
    for sample in reversed(samples):
        if elapsed >= seconds and count >= fewest:
            break
        elapsed += sample
        count += 1
    return max(count, fewest)


def windows_agree(samples: Sequence[float], window: int, median: float, quartile: float) -> bool:
    """True if the last two windows have the same median and quartiles, each within its share."""
    if len(samples) < 2 * window:
        return False
    earlier, later = np.quantile(np.reshape(samples[-2 * window :], (2, window)), (0.25, 0.5, 0.75), axis=1).T
    return bool((np.abs(later - earlier) <= np.array((quartile, median, quartile)) * earlier).all())


class _TimesOperators(WholeDispatchMode):
    """This adds up the time that is spent in operators."""

    seconds = 0.0

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        started = time.perf_counter()
        try:
            return func(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - started


def operators_share(step: TimedStep, setup: Setup, spec: MeasureSpec, warmup: Warmup) -> float | None:
    """Returns the share of a step on a CPU that is spent in operators; the rest is Python and what it waits for.

    The shortest of several looks and the shortest undisturbed step count, because other processes make either longer. It returns
    None if operators do not run one by one, if no step may be added, and for tensors that cannot be looked at in this way.
    """
    shortest = min(warmup.samples[-spec.warmup_window :], default=0.0)
    if spec.sparing or not shortest or not setup.runs_one_by_one or setup.device.is_accelerator:
        return None
    looks = []
    try:
        for _ in range(LOOKS if shortest < LONG_STEP_S else 1):
            with step.context(), _TimesOperators() as times:
                step()
            looks.append(times.seconds)
    except Exception:
        step.recover()
        return None
    return min(1.0, min(looks) / shortest)


def least_memory(step: TimedStep, device: Device, limit_bytes: int | None) -> int | None:
    """Returns the bytes reserved at the tightest cap under which the step still runs; None if no cap can be set.

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
                continue
            high = min(high, reserved)
            if reserved > middle:
                break  # a graph's private pool stays reserved whatever the cap is, so less is impossible
    finally:
        device.cap_allocator(limit_bytes)
    return high


def _reserved_under(step: TimedStep, device: Device, cap_bytes: int) -> int | None:
    """Returns the most that was reserved while some steps ran under the cap; None if they ran out of memory."""
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
    # This stands outside the handler, whose traceback would keep the failed step's tensors alive.
    step.recover()
    device.release_cache()
    return None
