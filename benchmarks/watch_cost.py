"""What watching costs per step: processor time of the training thread, with and without it, in short blocks that take turns.

    python benchmarks/watch_cost.py [--pairs 60]

Aim: 35 µs, which is 0.7 % of a step of 5 ms. First what the hooks take by themselves, around calls that do nothing: the least of many
loops, which neighbours on the machine hardly move; once in a row, once with the processor's caches emptied before each call, as a
real step leaves them. Then a real loop with and without them; the median over pairs and its interval say what is left of the noise.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from redline.analyze.statistics import median_interval
from redline.bench.watch.hooks import Watch, install

STEP_S = 5e-3
STEPS = 100


def block(model: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> float:
    """The median step, in seconds of this thread's processor time."""
    taken = []
    mark = time.thread_time()
    for features, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), targets).backward()
        optimizer.step()
        now = time.thread_time()
        taken.append(now - mark)
        mark = now
    return median(taken)


def costs(watch: Watch, pairs: int) -> list[float]:
    """Seconds per step of each pair. Without its recorder the watch lets every call through."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(TensorDataset(torch.randn(STEPS * 4, 8), torch.randint(0, 8, (STEPS * 4,))), batch_size=4)
    block(model, optimizer, loader)  # its first look at the model
    log, found = watch.log, []
    for number in range(pairs):
        times = {}
        for is_watched in (True, False) if number % 2 else (False, True):
            watch.log = log if is_watched else None
            times[is_watched] = block(model, optimizer, loader)
        found.append(times[True] - times[False])
    watch.log = log
    return found


def calls_of(watch: Watch, is_watched: bool) -> list[tuple[Callable[..., object], tuple[object, ...]]]:
    """The hooks of a step around calls that do nothing, or those calls: a batch, zero_grad, forward, backward, optimizer."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch, loss = [torch.randn(4, 8), torch.zeros(4)], torch.tensor(1.0, requires_grad=True)
    batches = iter(DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4))

    def nothing(*_: object) -> list[torch.Tensor]:
        return batch

    def backward(*_: object) -> None: ...

    hooks = (watch._next_batch, watch._zero_grad, watch._forward, watch._backward)
    plain = (nothing, nothing, nothing, backward)
    around = [hook(call) for hook, call in zip(hooks, plain, strict=True)] if is_watched else list(plain)
    around += [watch._before_optimizer, watch._after_optimizer] if is_watched else [nothing, nothing]
    arguments = ((batches,), (optimizer,), (model, batch[0]), (loss,), (optimizer, (), {}), (optimizer, (), {}))
    return list(zip(around, arguments, strict=True))


def own_cost(watch: Watch, steps: int = 500, loops: int = 20) -> float:
    """Seconds per step of the hooks alone, one step after the other."""
    calls = calls_of(watch, True)

    def loop() -> float:
        began = time.thread_time()
        for _ in range(steps):
            for call, arguments in calls:
                call(*arguments)
        return (time.thread_time() - began) / steps

    return min(loop() for _ in range(loops))


def cold_cost(watch: Watch, steps: int = 600) -> float:
    """The same with other memory walked through before each call, less what calls without hooks take then."""
    other = torch.ones(750_000)
    taken = {}
    for is_watched in (True, False):
        calls, times = calls_of(watch, is_watched), []
        for _ in range(steps):
            step_s = 0.0
            for call, arguments in calls:
                other.sum()
                began = time.perf_counter()
                call(*arguments)
                step_s += time.perf_counter() - began
            times.append(step_s)
        # In groups of twelve, as notes are worked through; a low one, as neighbours only make it longer.
        groups = sorted(sum(times[at : at + 12]) / 12 for at in range(60, steps - 12, 12))
        taken[is_watched] = groups[len(groups) // 5]
    return taken[True] - taken[False]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=60)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        watch = install(folder)
        own = own_cost(watch)
        print(f"the hooks alone: {own * 1e6:.1f} µs per step, {own / STEP_S:.2%} of a step of 5 ms", flush=True)
        cold = cold_cost(watch)
        print(f"with cold caches: {cold * 1e6:.1f} µs per step, {cold / STEP_S:.2%} of a step of 5 ms", flush=True)
        found = costs(watch, asked.pairs)
        watch.remove()
    cost = median(found)
    interval = median_interval([[each] for each in found])
    between = f" ({interval.low * 1e6:.1f}–{interval.high * 1e6:.1f})" if interval is not None else ""
    print(
        f"in a real loop: {cost * 1e6:.1f} µs{between} per step, {cost / STEP_S:.2%} of a step of 5 ms, over {len(found)} pairs of blocks"
    )


if __name__ == "__main__":
    main()
