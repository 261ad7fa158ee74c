"""Redline against a plain device-event loop over the same model, on the GPU at hand.

Runs `redline run` through the fork door, then, for every recipe, a bare PyTorch loop in fresh interpreters (several: a
process may sit a few percent from the next), and prints the medians with their ratio.

    python scripts/check_on_gpu.py [--model resnet50] [--batch 32] [--processes 3] [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import redline
from redline.cli.progress import LiveObserver
from redline.report.export import export_json

RECIPES = ["baseline", "amp+channels-last+compile", "fp16+channels-last+compile:reduce-overhead"]

PLAIN_LOOP = """
import json, statistics, sys, torch, torchvision
model_name, batch, recipe = sys.argv[1], int(sys.argv[2]), sys.argv[3].split("+")
torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
torch.manual_seed(0)
model = torchvision.models.get_model(model_name, weights=None).cuda().eval()
x = torch.randn(batch, 3, 224, 224, device="cuda")
for module in model.modules():
    if isinstance(module, torch.nn.BatchNorm2d):  # the same numbers flow as in Redline's calibrated model
        module.momentum = None
        torch.nn.init.ones_(module.bias)
with torch.no_grad():
    model.train()(x)
model.eval()
amp = "amp" in recipe
if "fp16" in recipe:
    model, x = model.half(), x.half()
if "channels-last" in recipe:
    model, x = model.to(memory_format=torch.channels_last), x.to(memory_format=torch.channels_last)
if "compile" in recipe:
    model = torch.compile(model, dynamic=False)
if "compile:reduce-overhead" in recipe:
    model = torch.compile(model, mode="reduce-overhead", dynamic=False)
def step():
    with torch.autocast("cuda", torch.float16, enabled=amp):
        model(x)
with torch.inference_mode():
    for _ in range(60):
        step()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(301)]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    torch.cuda.synchronize()
times = [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:])]
print(json.dumps(statistics.median(times[20:])))
"""


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--model", default="resnet50")
    arguments.add_argument("--batch", type=int, default=32)
    arguments.add_argument("--processes", type=int, default=3)
    arguments.add_argument("--out", type=Path)
    given = arguments.parse_args()
    with LiveObserver() as observer:
        result = redline.run(given.model, recipes=RECIPES, batch=given.batch, device="cuda", observer=observer)
    print(result)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "run.json").write_text(export_json(result.records))
        (given.out / "raw.json").write_text(export_json(result.records, raw=True))
        (given.out / "run.txt").write_text(str(result))
    print(f"{'recipe':<44} {'redline ms':>11} {'plain ms':>9} {'ratio':>7}  plain by process        bound")
    for row in result:
        by_process = sorted(plain_median_s(given.model, given.batch, row.recipe) for _ in range(given.processes))
        plain_s, own_s = statistics.median(by_process), row.batch / row.throughput_per_s
        told = ", ".join(f"{seconds * 1e3:.3f}" for seconds in by_process)
        print(
            f"{row.recipe:<44} {own_s * 1e3:>11.3f} {plain_s * 1e3:>9.3f} {own_s / plain_s:>7.4f}  {told:<22}  {row.bound.label}: {row.bound.evidence}"
        )


def plain_median_s(model: str, batch: int, recipe: str) -> float:
    command = [sys.executable, "-c", PLAIN_LOOP, model, str(batch), recipe]
    return float(
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    )


if __name__ == "__main__":
    main()
