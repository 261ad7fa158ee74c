"""Faults planted in steps on a CPU: is each the first finding of its trace, and does mending it bring no more than the bound?

Every fault is a step with it and a step without it. Both are timed without a profiler, interleaved, and the faulty step is recorded in
several short traces, of which the one that other programs disturbed least is judged.

    python benchmarks/cpu_faults.py [NAME …] [--seconds 3]
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from redline.analyze.profile import Profile, profile_of
from redline.trace.decode import read_traces

STEPS = 4
TRACES = 10
NOISE = 0.9
"""A gain may be this much below what was measured: a shared machine is not quieter."""

Step = Callable[[], object]
FAULTS: dict[str, Callable[[], tuple[Step, Step]]] = {}


def fault(code: str) -> Callable[[Callable[[], tuple[Step, Step]]], Callable[[], tuple[Step, Step]]]:
    def add(make: Callable[[], tuple[Step, Step]]) -> Callable[[], tuple[Step, Step]]:
        FAULTS[f"{code}: {make.__name__}"] = make
        return make

    return add


@fault("sync-in-loop")
def reading_rows() -> tuple[Step, Step]:
    layer, x = nn.Linear(256, 256), torch.randn(64, 256)
    return (
        lambda: [row.item() for row in layer(x).relu().sum(1)],
        lambda: layer(x).relu().sum(1).tolist(),
    )


@fault("sync-in-loop")
def deciding_in_python() -> tuple[Step, Step]:
    layer, x = nn.Linear(512, 160), torch.randn(16, 512)
    return (
        lambda: sum(1 for value in layer(x)[0] if value > 0),
        lambda: int((layer(x)[0] > 0).sum()),
    )


@fault("host-bound")
def looping_over_rows() -> tuple[Step, Step]:
    x, weight = torch.randn(256, 64), torch.randn(128, 64)
    return (
        lambda: torch.stack([(row * 2 + 1).tanh() for row in x]) @ weight.T,
        lambda: (x * 2 + 1).tanh() @ weight.T,
    )


class Images(Dataset[torch.Tensor]):
    def __init__(self, work: int) -> None:
        self.work, self.image = work, torch.randn(512)

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.image + sum(number * number for number in range(self.work))


@fault("data-wait")
def decoding_slowly() -> tuple[Step, Step]:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    slow, fast = (iter(DataLoader(Images(work), batch_size=32)) for work in (3000, 0))
    return lambda: model(next(slow)), lambda: model(next(fast))


@fault("copies")
def copying_what_nobody_changes() -> tuple[Step, Step]:
    x, large = torch.randn(512, 512), torch.randn(2048, 512)
    kept = [torch.empty_like(large) for _ in range(8)]
    return lambda: (x @ x, [buffer.copy_(large) for buffer in kept]), lambda: (x @ x, [large for _ in kept])


@fault("recompute")
def checkpointing_every_layer() -> tuple[Step, Step]:
    layers = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(6)])
    x = torch.randn(128, 512, requires_grad=True)

    def step(call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        y = x
        for layer in layers:
            y = call(layer, y)
        y.sum().backward()
        layers.zero_grad()

    return lambda: step(lambda layer, y: checkpoint(layer, y, use_reentrant=False)), lambda: step(
        lambda layer, y: layer(y)
    )


@fault("batch-norm-eval")
def normalising_with_fixed_statistics() -> tuple[Step, Step]:
    model = nn.Sequential(
        *[nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)) for _ in range(6)]
    ).eval()
    folded, x = fuse(model), torch.randn(8, 16, 64, 64)
    return torch.no_grad()(lambda: model(x)), torch.no_grad()(lambda: folded(x))


@fault("host-stall")
def logging_in_every_step() -> tuple[Step, Step]:
    model, x = nn.Linear(512, 512), torch.randn(256, 512)

    def log() -> float:
        loss = model(x).sum()
        return float(loss) + sum(number * number for number in range(100_000))

    return log, lambda: float(model(x).sum())


@fault("slow-kernel")
def pooling_in_the_wrong_layout() -> tuple[Step, Step]:
    pool, x = nn.MaxPool2d(3, 1, 1), torch.randn(8, 16, 96, 96)
    last = x.to(memory_format=torch.channels_last)
    return lambda: (pool(x), x + x), lambda: (pool(last), x + x)


def usual_s(steps: tuple[Step, Step], seconds: float) -> list[float]:
    """The lower quartile of each step, interleaved."""
    samples: list[list[float]] = [[], []]
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(samples[0]) < 12:
        for own, step in zip(samples, steps, strict=True):
            begin = time.perf_counter()
            step()
            own.append(time.perf_counter() - begin)
    return [sorted(own)[len(own) // 4] for own in samples]


def recorded(step: Step, folder: Path) -> Profile:
    """The least disturbed of several traces."""
    found: list[Profile] = []

    def keep(profiler: profile) -> None:
        profiler.export_chrome_trace(str(folder / "trace.json"))
        found.append(profile_of(read_traces([folder / "trace.json"])))

    plan = schedule(wait=0, warmup=1, active=STEPS, repeat=TRACES)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=keep, record_shapes=True) as profiler:
        for _ in range((STEPS + 1) * TRACES):
            step()
            profiler.step()
    return min(found, key=lambda one: one.timeline.span_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    wrong = 0
    for name, make in FAULTS.items():
        if given.names and not any(part in name for part in given.names):
            continue
        steps = make()
        with TemporaryDirectory() as folder:
            findings = recorded(steps[0], Path(folder)).findings
        faulty_s, mended_s = usual_s(steps, given.seconds)
        gain = faulty_s / mended_s
        first = findings[0] if findings else None
        is_right = first is not None and first.code == name.partition(":")[0] and first.gain_bound >= NOISE * gain
        wrong += not is_right
        told = "nothing" if first is None else f"{first.code}, at most {first.gain_bound:.2f}×"
        print(f"{'right' if is_right else 'WRONG'}  {name}: found {told}; mending it brings {gain:.2f}×", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
