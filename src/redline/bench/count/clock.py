"""How long a plain step takes, and what of it is the host's and the device's."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

from redline.bench.device.process import page_faults
from redline.bench.workload.step import Setup, make_step
from redline.model.spec import OptimizerName

TIMED_STEPS = 8
TIMED_SECONDS = 0.5
LONGEST_HOLD_S = 0.5
"""For which a device is held back, so that it need not wait for the host."""


@dataclass(frozen=True)
class Clock:
    step_s: float
    issue_s: float
    """Until the host has issued a step; on a CPU the whole step."""
    device_s: float | None
    synchronises: bool | None
    page_faults: float
    """Of one step."""


def clocked(setup: Setup, optimizer: OptimizerName) -> Clock:
    """A few plain steps: how long one takes, how long the host needs to issue it, and how long the device to do it."""
    device, step = setup.device, make_step(setup, optimizer)
    whole: list[float] = []
    issued: list[float] = []
    with step.context():
        step()  # libraries load, algorithms are picked, the optimizer makes its state
        device.synchronize()
        deadline, faults = time.perf_counter() + TIMED_SECONDS, page_faults()
        while len(whole) < TIMED_STEPS and (not whole or time.perf_counter() < deadline):
            started = time.perf_counter()
            step()
            issued.append(time.perf_counter() - started)
            device.synchronize()
            whole.append(time.perf_counter() - started)
        faults_per_step = (page_faults() - faults) / len(whole)
        synchronises = device.synchronises(step)
        device_s = None
        if device.is_accelerator and not synchronises:
            # Held back until all is issued, the device then works without waiting for the host.
            device.hold(min(2 * median(issued), LONGEST_HOLD_S))
            marks = [device.mark()]
            step()
            marks.append(device.mark())
            device_s = device.seconds_between(marks)[0]
    return Clock(median(whole), median(issued), device_s, synchronises, faults_per_step)
