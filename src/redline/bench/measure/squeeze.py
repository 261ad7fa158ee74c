"""How little memory would do? Steps under ever tighter caps of the allocator.

torch's allocator keeps what it has freed for later, as long as there is room: at its ease a training step may reserve
a fifth more than it could live with, while an inference step may need all that it reserved. Which of the two it is
decides how large a batch fits, and only trying tells.
"""

from __future__ import annotations

import time

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.workload.step import TimedStep

PRECISION = 0.005
"""Of the memory needed: finer than that the allocator's own rounding shows."""
SWITCHES = 2
"""The first fills the empty cache, the second must live with what the first left behind."""
MAX_SECONDS = 10.0


def least_memory(step: TimedStep, device: Device, limit_bytes: int | None) -> int | None:
    """Bytes reserved at the tightest cap under which the step still runs; None where no cap can be set.

    Running out of memory here is on purpose and inside a cap, so it disturbs nobody. Afterwards `limit_bytes`, the cap
    of the session, holds again.
    """
    memory = device.memory()
    low, high = memory.peak_allocated_bytes, memory.peak_reserved_bytes
    if low is None or high is None:
        return None
    deadline = time.perf_counter() + MAX_SECONDS
    try:
        while high - low > PRECISION * high and time.perf_counter() < deadline:
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
            for _ in range(SWITCHES):
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
