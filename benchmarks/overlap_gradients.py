"""A compiled training step with weight gradients on further streams, against the same step without them, both as one CUDA graph.

    python benchmarks/overlap_gradients.py [--model resnet18] [--batch 256] [--image-size 32] [--by-block] [--dtype bfloat16]

Plain loops around Redline's `overlap_gradients`, each in a process of its own; they compile at the same time and are timed one
after the other. Needs a GPU. ResNet-18 at 32 pixels by itself; others: `--model resnet50 --batch 32 --image-size 224`,
`--model regnet_y_400mf --batch 64 --image-size 224 --by-block`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
from typing import Any

import torch
import torchvision

from redline.bench.device.cuda import record_graph
from redline.bench.recipe.plain import compile_blocks, overlap_gradients

WARMUPS, STEPS, REPEATS = 3, 200, 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--image-size", type=int, default=32)
    parser.add_argument("--by-block", action="store_true", help="compile the repeated blocks only")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--side", choices=("plain", "overlapped"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here: nothing to overlap")
        return
    if given.side is not None:
        time_one(given)
        return
    sides = ("plain", "overlapped")
    begun = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--side", side],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for side in sides
    ]
    for each in begun:
        assert each.stdout is not None
        each.stdout.readline()  # it is recorded
    times = {}
    for side, each in zip(sides, begun, strict=True):
        said, _ = each.communicate("\n")
        times[side] = float(said)
        print(f"{side}: {times[side]:.4f} ms a step", flush=True)
    ratio = times["plain"] / times["overlapped"]
    print(f"ratio: {ratio:.3f}× ({given.model}, batch {given.batch} at {given.image_size} pixels, {given.dtype})")


def time_one(given: argparse.Namespace) -> None:
    """Record one side, say so, and time it when told: the median step of the median repeat, in milliseconds."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = torchvision.models.get_model(given.model, num_classes=10).cuda().train()
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(given.batch, 3, given.image_size, given.image_size, device="cuda")
    images, targets = images.to(memory_format=torch.channels_last), torch.arange(given.batch, device="cuda") % 10
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    if given.side == "overlapped":
        overlap_gradients()
    settings: dict[str, Any] = {"dynamic": False, "options": {"combo_kernels": True}}
    called = model
    if given.by_block:
        compile_blocks(model, **settings)
    else:
        called = torch.compile(model, **settings)

    def step() -> None:
        with torch.autocast("cuda", dtype=getattr(torch, given.dtype)):
            loss = torch.nn.functional.cross_entropy(called(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    replay, _ = record_graph(step, WARMUPS)
    torch.cuda.synchronize()
    print("recorded", flush=True)
    sys.stdin.readline()
    medians = []
    for _ in range(REPEATS):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(STEPS + 1)]
        for event in events[:-1]:
            event.record()
            replay()
        events[-1].record()
        torch.cuda.synchronize()
        medians.append(statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events)))
    print(statistics.median(medians), flush=True)


if __name__ == "__main__":
    main()
