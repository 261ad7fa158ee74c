"""Steps with one planted fault beside the same steps without it: is it the first finding, and does mending it gain what was bounded?"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from asking import Ask, Outcome
from torch.nn import functional
from torch.profiler import ProfilerActivity, schedule
from torch.profiler import profile as recording

from redline.analyze.profile import profile_of
from redline.trace.decode import read_traces

NOISE = 1.05
STEPS = 4
Step = Callable[[], Any]


@dataclass(frozen=True)
class Planted:
    codes: tuple[str, ...]
    """Findings that name the fault."""
    build: Callable[[str], tuple[Step, Step]]
    """The step with the fault and the step without it, on a device."""


def network(device: str, *, compiled: bool = False) -> Step:
    width, batch = (2048, 512) if device != "cpu" else (256, 64)
    layers = [torch.nn.Linear(width, width, device=device) for _ in range(8)]
    model = torch.nn.Sequential(*[part for layer in layers for part in (layer, torch.nn.GELU())])
    inputs = torch.rand(batch, width, device=device)
    run = torch.compile(model) if compiled else model
    return lambda: run(inputs)


def reads_each(device: str, compiled: bool = False) -> tuple[Step, Step]:
    """Twenty times a step a number is read, and Python does a little with it."""
    step = network(device, compiled=compiled)
    count = 20 if device != "cpu" else 2000

    def reading() -> float:
        values = step()[0]
        return sum(values[number % len(values)].item() * 0.5 for number in range(count))

    return reading, lambda: step()[0][:count].sum() * 0.5


def sleeps(device: str, compiled: bool = False) -> tuple[Step, Step]:
    step = network(device, compiled=compiled)

    def sleeping() -> Any:
        time.sleep(0.004)
        return step()

    return sleeping, step


def copies_pageable(device: str, compiled: bool = False) -> tuple[Step, Step]:
    step = network(device, compiled=compiled)
    batch = torch.rand(16 << 20)

    def copying() -> Any:
        batch.to(device)
        return step()

    return copying, step


def many_small(device: str) -> tuple[Step, Step]:
    step, values = network(device), torch.rand(300, device=device)

    def one_by_one() -> Any:
        found = torch.empty_like(values)
        for number in range(len(values)):
            found[number] = values[number] * 2 + 1
        return step(), found

    return one_by_one, lambda: (step(), values * 2 + 1)


def attention(device: str) -> tuple[Step, Step]:
    dtype = torch.float16 if device != "cpu" else torch.float32
    query = torch.rand(8, 16, 1024 if device != "cpu" else 256, 64, device=device, dtype=dtype)

    def written_out() -> Any:
        return torch.softmax(query @ query.transpose(-1, -2) / 8.0, -1) @ query

    return written_out, lambda: functional.scaled_dot_product_attention(query, query, query)


def strict_fp32(device: str) -> tuple[Step, Step]:
    left = torch.rand(8192, 8192, device=device)

    def product(precision: str) -> Step:
        def run() -> Any:
            torch.set_float32_matmul_precision(precision)
            return left @ left

        return run

    return product("highest"), product("high")


def elementwise(device: str) -> tuple[Step, Step]:
    values = torch.rand(1 << (26 if device != "cpu" else 22), device=device)

    def chain() -> Any:
        return 0.5 * values * (1 + torch.tanh(0.79788 * (values + 0.044715 * values * values * values)))

    return chain, lambda: functional.gelu(values, approximate="tanh")


PLANTED = {
    "item": Planted(("sync-in-loop",), reads_each),
    "sleep": Planted(("host-stall",), sleeps),
    "small operators": Planted(("host-bound",), many_small),
    "attention": Planted(("attention",), attention),
    "elementwise": Planted(("elementwise",), elementwise),
    "pageable copy": Planted(("blocking-copy",), copies_pageable),
    "fp32": Planted(("fp32-matmul",), strict_fp32),
    "compiled item": Planted(("sync-in-loop",), lambda device: reads_each(device, compiled=True)),
    "compiled sleep": Planted(("host-stall",), lambda device: sleeps(device, compiled=True)),
    "compiled pageable copy": Planted(("blocking-copy",), lambda device: copies_pageable(device, compiled=True)),
}
ON_A_GPU = ("pageable copy", "fp32", "compiled item", "compiled sleep", "compiled pageable copy")


def planted(ask: Ask, row: str, fault: Planted) -> Outcome:
    """The first finding names a planted fault, and mending it gains no more than its bound and at least half of its seconds."""
    if not ask.is_gpu and row in ON_A_GPU:
        return None, {}
    if not ask.is_gpu:
        torch.set_num_threads(1)  # on a busy machine threads that wait for each other take most of the time
    with torch.inference_mode():
        slow, fast = fault.build(ask.device)
        gain = seconds_of(ask, slow) / seconds_of(ask, fast)
        path = Path(tempfile.mkdtemp(prefix="planted-")) / "trace.json"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if ask.is_gpu else [])]
        with recording(activities=activities, schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1)) as profiler:
            for _ in range(STEPS + 1):
                slow()
                profiler.step()
        profiler.export_chrome_trace(str(path))
    found = profile_of(read_traces([path]))
    first = next(iter(found.findings), None)
    listed = ", ".join(f"{each.code} {each.gain_bound:.2f}" for each in found.findings)
    if first is None:
        return False, {"gain": gain, "findings": listed}
    is_bounded = gain <= first.gain_bound * NOISE
    is_tight = 1 - 1 / first.gain_bound <= 2 * (1 - 1 / gain)
    figures = {"gain": gain, "bound": first.gain_bound, "label": found.bound.label, "findings": listed}
    return first.code in fault.codes and is_bounded and is_tight, figures


def seconds_of(ask: Ask, step: Step, steps: int = 10) -> float:
    """The median time of a step that runs by itself, after two that do not count."""
    taken = []
    for _ in range(steps + 2):
        started = time.perf_counter()
        step()
        if ask.is_gpu:
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[2:])
