"""A fused optimizer that gets large parameters first, against one that gets them as the model lists them.

    python benchmarks/fused_order.py [--model resnet50]

Ten SGD updates in one CUDA graph, replayed; both orders are timed in turns. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torchvision

from redline.bench.workload.step import make_optimizer

UPDATES, REPLAYS, ROUNDS = 10, 20, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet50")
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: parameters keep their order")
        return
    model = torchvision.models.get_model(given.model).cuda()
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    options = {"lr": 1e-6, "momentum": 0.9, "fused": True}
    replays = {
        "as listed": recorded(torch.optim.SGD(model.parameters(), **options)),
        "large first": recorded(make_optimizer("sgd", model, **options)),
    }
    times: dict[str, list[float]] = {name: [] for name in replays}
    for _ in range(ROUNDS):
        for name, replay in replays.items():
            times[name].append(update_us(replay))
    medians = {name: statistics.median(each) for name, each in times.items()}
    for name, median in medians.items():
        print(f"{name}: {median:.1f} µs an update")
    print(f"ratio: {medians['as listed'] / medians['large first']:.3f}× ({given.model})")


def recorded(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    for _ in range(3):
        optimizer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(UPDATES):
            optimizer.step()

    def replay(_keeps_its_state: torch.optim.Optimizer = optimizer) -> None:
        graph.replay()

    return replay


def update_us(replay: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    begin.record()
    for _ in range(REPLAYS):
        replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * begin.elapsed_time(end) / (REPLAYS * UPDATES)


if __name__ == "__main__":
    main()
