"""Finding the largest batch: Redline's search against a bisecting one, on curves whose truth is known, and on a GPU.

    python benchmarks/batch_finder.py [--curves 200] [--max-memory 16GiB]

Simulated memory curves are everywhere; where there is a GPU and `lightning` is installed, ResNet-50 training with AMP
is searched by both in the same run, under the same cap. Target: 97 % of the truth in 8 trials with one OOM at most.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from random import Random
from statistics import mean

from worlds.memory import CURVES, MemoryOf, largest_batch

import redline
from redline.api.workspace import Workspace
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.units import parse_bytes
from redline.search.batch import MAX_TRIALS
from redline.search.largest import Room, Tried, next_batch

Finder = Callable[[MemoryOf, int], tuple[int, int, int]]
"""From a curve and a capacity to the batch found, the trials and the OOMs among them."""

LIGHTNING = """
import json, sys, time, warnings, logging
warnings.simplefilter("ignore"); logging.disable(logging.WARNING)
import torch, torchvision
import lightning.pytorch as pl
from lightning.pytorch.tuner import Tuner, batch_size_scaling
mode, cap = sys.argv[1], int(sys.argv[2])
_, total = torch.cuda.mem_get_info()
torch.cuda.set_per_process_memory_fraction(cap / total)
count = {"trials": 0, "ooms": 0}
is_oom = batch_size_scaling.is_oom_error
def counting(error):
    count["ooms"] += 1
    return is_oom(error)
batch_size_scaling.is_oom_error = counting
class Images(torch.utils.data.Dataset):
    def __len__(self): return 100_000
    def __getitem__(self, index): return torch.randn(3, 224, 224), index % 1000
class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.batch_size, self.model = 2, torchvision.models.resnet50()
    def training_step(self, batch, index):
        return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)
    def train_dataloader(self):
        count["trials"] += 1
        return torch.utils.data.DataLoader(Images(), batch_size=self.batch_size, num_workers=8)
trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=1, logger=False,
                     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
net = Net()
started = time.time()
found = Tuner(trainer).scale_batch_size(net, mode=mode, init_val=2, steps_per_trial=3, max_trials=25)
print(json.dumps({"found": found, "seconds": time.time() - started, **count}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", type=int, default=200, help="of each kind")
    parser.add_argument("--max-memory", default="16GiB")
    given = parser.parse_args()
    capacity = parse_bytes(given.max_memory)
    simulated(given.curves, capacity)
    if importlib.util.find_spec("lightning") and gpu_name():
        on_gpu(capacity)
    else:
        print("\nno GPU or no lightning here: the comparison with Lightning's finder was left out")


def simulated(curves: int, capacity: int) -> None:
    print(
        f"{'curve':<20}{'finder':<10}{'≥ 97 %':>8}{'worst':>8}{'trials':>8}{'most':>6}{'OOMs':>7}{'≤ 1 OOM':>9}{'all kept':>10}"
    )
    for kind, draw in CURVES.items():
        count = min(curves, 25) if kind == "caching allocator" else curves
        for name, finder in (("redline", redline_finder), ("bisecting", bisecting_finder)):
            chance = Random(1)
            report(kind, name, [judge(draw(chance, capacity), capacity, finder) for _ in range(count)])


def judge(memory: MemoryOf, capacity: int, finder: Finder) -> tuple[float, int, int] | None:
    truth = largest_batch(memory, spec_of, capacity)
    if not truth:
        return None
    found, trials, ooms = finder(memory, capacity)
    # Of few, the next smaller whole number is as near as can be asked.
    return (found + (1 if truth < 34 and found < truth else 0)) / truth, trials, ooms


def report(kind: str, name: str, judged: list[tuple[float, int, int] | None]) -> None:
    results = [result for result in judged if result is not None]
    near = mean(share >= 0.97 for share, _, _ in results)
    kept = mean(share >= 0.97 and trials <= MAX_TRIALS and ooms <= 1 for share, trials, ooms in results)
    worst, trials = min(share for share, _, _ in results), [trials for _, trials, _ in results]
    ooms = [ooms for _, _, ooms in results]
    print(
        f"{kind:<20}{name:<10}{near:>8.0%}{worst:>8.3f}{mean(trials):>8.1f}{max(trials):>6}{mean(ooms):>7.2f}"
        f"{mean(number <= 1 for number in ooms):>9.0%}{kept:>10.0%}",
        flush=True,
    )


def redline_finder(memory: MemoryOf, capacity: int) -> tuple[int, int, int]:
    tried: list[Tried] = []
    room = Room(capacity_bytes=capacity, resident_bytes=memory(spec_of(8)).resident)
    while len(tried) < MAX_TRIALS and (batch := next_batch(tried, room)) is not None:
        needed = memory(spec_of(batch)).needed
        tried.append(Tried(batch=batch, needed_bytes=needed if needed <= capacity else None))
    fitting = [trial.batch for trial in tried if trial.needed_bytes is not None]
    return max(fitting, default=0), len(tried), len(tried) - len(fitting)


def bisecting_finder(memory: MemoryOf, capacity: int) -> tuple[int, int, int]:
    """As trainers do: double from 2 until it breaks, then halve the gap, 25 trials at most."""
    low, high, trials, ooms, batch = 0, None, 0, 0, 2
    while trials < 25 and (high is None or high - low > 1):
        trials += 1
        if memory(spec_of(batch)).needed <= capacity:
            low = batch
        else:
            high, ooms = batch, ooms + 1
        batch = 2 * low if high is None else (low + high) // 2
    return low, trials, ooms


def on_gpu(capacity: int) -> None:
    print(f"\nResNet-50 training with AMP on {gpu_name()}, capped at {capacity / 2**30:.0f} GiB")
    print(f"{'finder':<24}{'found':>7}{'trials':>8}{'OOMs':>6}{'seconds':>9}")
    started = time.perf_counter()
    (found,) = redline.find_batch(
        "resnet50", task="train", recipes="amp", max_memory=capacity, workspace=Workspace(keep=False)
    )
    seconds = time.perf_counter() - started
    print(f"{'redline':<24}{found.max_batch or 0:>7}{len(found.trials):>8}{found.ooms:>6}{seconds:>9.0f}", flush=True)
    for mode in ("binsearch", "power"):
        command = [sys.executable, "-c", LIGHTNING, mode, str(capacity)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            print(f"lightning {mode}: {ran.stderr.strip().splitlines()[-1] if ran.stderr.strip() else 'failed'}")
            continue
        told = json.loads(ran.stdout.splitlines()[-1])
        name = f"lightning {mode}"
        print(f"{name:<24}{told['found']:>7}{told['trials']:>8}{told['ooms']:>6}{told['seconds']:>9.0f}", flush=True)


def gpu_name() -> str | None:
    with Workspace(keep=False) as workspace:
        device = workspace.environment("auto").device
    return None if device.kind == "cpu" else device.name


def spec_of(batch: int) -> RunSpec:
    return RunSpec(workload=WorkloadSpec(model="simulated", batch=batch))


if __name__ == "__main__":
    main()
