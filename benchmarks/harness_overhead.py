"""What Redline's timed block adds to a step of about one millisecond on the CPU, against a bare loop.

Both run the same step in turns within one process; the ratio is that of the wall time per step, so everything the
harness does between two steps counts.
"""

from __future__ import annotations

import statistics
import time

import torch

from redline.bench.device.cpu import CpuDevice
from redline.bench.measure.blocks import measure_block
from redline.model.protocol import Measure

ROUNDS = 30
SWITCHES = 200
STEP_S = 1e-3


class MatrixStep:
    """One thread, one matrix product, sized to about a millisecond."""

    phases = ("forward",)

    def __init__(self, size: int) -> None:
        self._matrix = torch.randn(size, size)

    def __call__(self, mark=lambda: None) -> torch.Tensor:
        product = self._matrix @ self._matrix
        mark()
        return product

    def context(self):
        return torch.inference_mode()


def bare_seconds_per_step(step: MatrixStep) -> float:
    with step.context():
        started = time.perf_counter()
        for _ in range(SWITCHES):
            step()
        return (time.perf_counter() - started) / SWITCHES


def redline_seconds_per_step(step: MatrixStep, device: CpuDevice, estimate_s: float) -> float:
    request = Measure(kind="throughput", seconds=SWITCHES * estimate_s, max_steps=SWITCHES, settle_seconds=0.0)
    block = measure_block(step, device, request, estimate_s)
    return block.wall_s / len(block.samples)


def sized_step() -> MatrixStep:
    size = 64
    while bare_seconds_per_step(MatrixStep(size)) < STEP_S:
        size = int(size * 1.2)
    return MatrixStep(size)


def main() -> None:
    torch.set_num_threads(1)
    device, step = CpuDevice(), sized_step()
    estimate_s = bare_seconds_per_step(step)
    pairs = [(bare_seconds_per_step(step), redline_seconds_per_step(step, device, estimate_s)) for _ in range(ROUNDS)]
    bare_s, redline_s = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(own / bare for bare, own in pairs)
    print(f"bare loop       {bare_s * 1e6:9.1f} µs per step")
    print(f"redline block   {redline_s * 1e6:9.1f} µs per step")
    print(f"ratio           {ratio:9.4f}  (median of {ROUNDS} pairs; 1.0 is free)")


if __name__ == "__main__":
    main()
