"""The backward of max pooling as `pool-gradients` has it compiled, against what torch.compile makes of it by itself.

    python benchmarks/pool_gradients.py [--shape 32,64,112,112] [--rows]

Windows of 3 with a stride of 2, in channels-last unless `--rows` is given: by its kernels on a GPU in bf16, by the clock on a CPU
in fp32.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from redline.bench.recipe.pooling import pool_by_places

REPEATS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", help="batch, channels, height and width")
    parser.add_argument("--rows", action="store_true", help="contiguous images")
    given = parser.parse_args()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()  # what is found in a cache is not compiled again
    on_gpu = torch.cuda.is_available()
    shape = tuple(map(int, (given.shape or ("32,64,112,112" if on_gpu else "8,64,112,112")).split(",")))
    plain_us = backward_us(shape, given.rows, on_gpu)
    pooled = pool_by_places()
    by_places_us = backward_us(shape, given.rows, on_gpu)
    assert pooled.changed, "torch.compile made no backward that can be changed"
    print(f"torch.compile: {plain_us:.1f} µs\npool-gradients: {by_places_us:.1f} µs")
    print(
        f"ratio: {plain_us / by_places_us:.2f}× ({'×'.join(map(str, shape))}, {'rows' if given.rows else 'channels-last'})"
    )


def backward_us(shape: tuple[int, ...], rows: bool, on_gpu: bool) -> float:
    torch._dynamo.reset()
    images = torch.randn(shape, device="cuda" if on_gpu else "cpu", dtype=torch.bfloat16 if on_gpu else torch.float32)
    images = images.relu().to(memory_format=torch.contiguous_format if rows else torch.channels_last).requires_grad_()
    pooled = torch.compile(lambda each: F.max_pool2d(each * 2, 3, 2, 1), dynamic=False)(images)
    gradient = torch.ones_like(pooled)

    def backward() -> None:
        torch.autograd.grad(pooled, images, gradient, retain_graph=True)

    backward()
    return kernels_us(backward) if on_gpu else median_us(backward)


def kernels_us(work: Callable[[], None]) -> float:
    """By the device's own clock: of a kernel this short, the host would be timed."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            work()
        torch.cuda.synchronize()
    return sum(each.device_time_total for each in profiled.key_averages()) / REPEATS


def median_us(work: Callable[[], None]) -> float:
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return 1e6 * statistics.median(times)


if __name__ == "__main__":
    main()
