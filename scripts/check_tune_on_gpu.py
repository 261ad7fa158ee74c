"""`redline tune` against the best recipes a careful hand found, on the GPU at hand.

    python scripts/check_tune_on_gpu.py [--budget 5m] [--only NAME]… [--out FOLDER]

For each workload: the by-hand recipe as a plain loop, `redline.tune`, and the snippet of the winner run alone, all in
this one call. The winner must be at least 0.95 times as fast as the hand's recipe, and its snippet within 5 % of what
tune measured. The reports go to the folder.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import redline
from redline.api.workspace import Workspace
from redline.cli.progress import LiveTune
from redline.launch import Door, open_door
from redline.spec import LaunchSpec

WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50": {"model": "resnet50", "batch": 32},
    "vit_b_16": {"model": "vit_b_16", "batch": 32},
    "resnet50-train": {"model": "resnet50", "task": "train", "batch": 32},
    "resnet18-cifar-train": {"model": "resnet18", "task": "train", "batch": 256, "image_size": 32, "classes": 10},
}
AT_LEAST, WITHIN = 0.95, 0.05

BY_HAND = """
import statistics, sys
import torch, torchvision
name = sys.argv[1]
torch.backends.cudnn.benchmark = True

def graphed(work):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay

def infer(name):
    images = torch.randn(32, 3, 224, 224, device="cuda", dtype=torch.float16)
    model = torchvision.models.get_model(name).cuda().half().eval()
    if name == "resnet50":
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        model = torch.compile(model, mode="reduce-overhead", dynamic=False)
        return lambda: model(images)
    return graphed(lambda: model(images))

def train(name):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    batch, size, classes = (256, 32, 10) if "cifar" in name else (32, 224, 1000)
    model = torchvision.models.get_model(name.split("-")[0], num_classes=classes).cuda()
    model = model.to(memory_format=torch.channels_last)
    images = torch.randn(batch, 3, size, size, device="cuda").to(memory_format=torch.channels_last)
    targets = torch.randint(0, classes, (batch,), device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    fast = torch.compile(model, dynamic=False)
    def step():
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(fast(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return graphed(step)

def seconds_per_step(step):
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(301)]
    for event in events[:-1]:
        event.record()
        step()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:])) / 1e3

if "train" in name:
    print(seconds_per_step(train(name)))
else:
    with torch.inference_mode():
        print(seconds_per_step(infer(name)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="again for more; all when left out")
    parser.add_argument("--out", type=Path, default=Path("tune"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    lines = []
    with contextlib.closing(open_door(LaunchSpec())) as door:
        for name in given.only or WORKLOADS:
            lines.append(checked(name, given.budget, given.out, door))
            print(lines[-1], flush=True)
    summary = "\n".join(lines)
    (given.out / "tune_on_gpu.txt").write_text(summary + "\n")
    print(f"\n== summary\n{summary}")


def checked(name: str, budget: str, out: Path, door: Door) -> str:
    workload = WORKLOADS[name]
    started = time.perf_counter()
    by_hand = workload["batch"] / float(python("-c", BY_HAND, name))
    hand_s = time.perf_counter() - started
    print(f"{name}: {by_hand:,.0f}/s by hand, {hand_s:.0f} s", flush=True)
    with LiveTune() as observer:
        result = redline.tune(
            **workload, device="cuda", budget=budget, workspace=Workspace(observer=observer, door=door)
        )
    print(str(result).partition("without Redline")[0], flush=True)
    document = result.document()
    (out / f"{name}.txt").write_text(str(result))
    (out / f"{name}.json").write_text(json.dumps(document, indent=1))
    snippet = out / f"{name}_snippet.py"
    snippet.write_text(document["snippet"])
    alone = float(python(str(snippet)).split()[0])
    return verdict(name, document, by_hand, hand_s, alone)


def python(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return done.stdout.splitlines()[-1]


def verdict(name: str, document: dict[str, Any], by_hand: float, hand_s: float, alone: float) -> str:
    winner = document["winner"]
    found = winner["throughput_per_s"]
    fine = found >= AT_LEAST * by_hand and abs(alone / found - 1) <= WITHIN
    return (
        f"{'ok ' if fine else 'NOT'} {name:<21} {winner['recipe']}: {found:,.0f}/s, {winner['ratio']:.2f}x baseline, "
        f"{found / by_hand:.3f} of by hand ({by_hand:,.0f}/s, {hand_s:.0f} s), snippet alone {alone:,.0f}/s "
        f"({alone / found:.3f}), {document['seconds']:.0f} s"
    )


if __name__ == "__main__":
    main()
