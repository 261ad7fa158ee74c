"""The batch finder against the truth, on the GPU at hand: ResNet-50 training with AMP, a transformer, inference of two.

    python scripts/check_batch_on_gpu.py [--max-memory 16GiB] [--out FOLDER] [--only NAME]

For each workload: `redline.find_batch` under the cap, then the true maximum around what it found, by plain PyTorch
loops in fresh processes under the same cap (one warm interpreter forks them; none shares a CUDA context). Prints
trials, OOMs, what was found against the truth, and the seconds of each. Some four minutes on an H200.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raw_records import RawRecords

import redline
from redline.analyze.batch import BatchSummary, BatchTrial
from redline.api.workspace import Workspace
from redline.model.units import parse_bytes
from redline.report.batch import trial_header, trial_line
from redline.search.observer import Observer

WORKLOADS: dict[str, dict[str, Any]] = {
    "resnet50-train": {"model": "resnet50", "task": "train", "recipes": "amp"},
    "transformer-train": {"model": "transformer", "task": "train", "recipes": "amp-bf16"},
    "vit_b_16-infer": {"model": "vit_b_16", "task": "infer", "recipes": "fp16"},
    "resnet50-infer": {"model": "resnet50", "task": "infer", "recipes": "fp16"},
}

NEAR = 0.97
TRUTH_WITHIN = 0.005
"""The truth is bisected to this share of itself."""
LOOK_ABOVE = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
"""How far above the first break to look for batches that run again: fragments make fitting a matter of luck."""

PLAIN_LOOP = """
import os, sys
import torch, torchvision
from redline.bench.device.failure import is_out_of_memory
from redline.bench.workload.sources.builtin import Transformer
assert not torch.cuda.is_initialized()
workload, cap = sys.argv[1], int(sys.argv[2])

def steps(batch):
    device = torch.device("cuda", 0)
    _, total = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(cap / total, device)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    trains = workload.endswith("train")
    name = workload.partition("-")[0]
    if name != "transformer":
        model, inputs = torchvision.models.get_model(name), torch.randn(batch, 3, 224, 224, device=device)
        targets = torch.randint(0, 1000, (batch,), device=device)
    else:
        model, inputs = Transformer(), torch.randint(0, 8192, (batch, 128), device=device)
        targets = torch.randint(0, 8192, (batch, 128), device=device)
    model = model.to(device).train(trains)
    if not trains:
        model, inputs = model.half(), inputs.half()  # as the recipe does
        with torch.inference_mode():
            for _ in range(5):
                model(inputs)
        return torch.cuda.synchronize()
    dtype = torch.float16 if name == "resnet50" else torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(5):
        with torch.autocast("cuda", dtype=dtype):
            # The output in no variable: that would keep it alive through the backward.
            loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        del loss
    torch.cuda.synchronize()

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            steps(int(line))
        except BaseException as error:
            if is_out_of_memory(error):
                os._exit(3)
            print(f"error: {error}", file=sys.stderr, flush=True)
            os._exit(4)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass(frozen=True)
class Truth:
    batch: int
    """The largest before the first that breaks."""
    fits_again: tuple[int, ...]
    """Of those looked at above the break."""
    runs: int
    seconds: float


class Printer(Observer):
    def tried(self, trial: BatchTrial) -> None:
        held = trial.peak_reserved_bytes
        reserved = f"  reserved {held / 2**30:.2f} GiB" if held else ""
        print(f"{trial_line(trial).plain}{reserved}  ({trial.purpose})", flush=True)


class PlainLoops:
    """Whether a plain loop runs at a batch, each in a fresh process."""

    def __init__(self, workload: str, cap_bytes: int) -> None:
        command = [sys.executable, "-c", PLAIN_LOOP, workload, str(cap_bytes)]
        self._server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.runs = 0

    def fits(self, batch: int) -> bool:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self.runs += 1
        self._server.stdin.write(f"{batch}\n")
        self._server.stdin.flush()
        code = int(self._server.stdout.readline())
        if code not in (0, 3):
            raise SystemExit(f"the plain loop broke at batch {batch} (exit {code})")
        return code == 0

    def close(self) -> None:
        self._server.communicate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--max-memory", default="16GiB")
    parser.add_argument("--only", choices=WORKLOADS, action="append", help="again for more; all when left out")
    parser.add_argument("--out", type=Path, help="a folder for the result as JSON, and the plots")
    given = parser.parse_args()
    with RawRecords(given.out) as raw:
        check(given, raw)


def check(given: argparse.Namespace, raw: RawRecords) -> None:
    cap = parse_bytes(given.max_memory)
    lines, documents = [], {}
    for name in given.only or WORKLOADS:
        print(f"\n== {name}, capped at {given.max_memory}\n{trial_header()}", flush=True)
        started = time.perf_counter()
        with Workspace(journal=raw.journal, observer=Printer()) as workspace:
            result = redline.find_batch(**WORKLOADS[name], max_memory=cap, workspace=workspace)
        found_s = time.perf_counter() - started
        print(result, flush=True)
        truth = true_maximum(name, result[0], cap)
        lines.append(summary(name, result[0], truth, found_s))
        print(lines[-1], flush=True)
        documents[name] = {**json.loads(result.to_json()), "seconds": found_s, "truth": asdict(truth)}
        if given.out:
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / "batch_on_gpu.json").write_text(json.dumps(documents, indent=1))
            result.plot(given.out / f"{name}.png")
            raw.write()
    print("\n== summary", *lines, sep="\n")


def true_maximum(name: str, found: BatchSummary, cap: int) -> Truth:
    """By plain loops: the largest batch before the first that breaks, and which larger ones run all the same."""
    assert found.max_batch is not None
    started = time.perf_counter()
    loops = PlainLoops(name, cap)
    low, step = found.max_batch, math.ceil(found.max_batch * (1 / NEAR - 1)) + 1
    if loops.fits(low):
        high = found.max_batch_below or low + step
        while loops.fits(high):
            low, high = high, high + step
    else:
        low, high = low - step, low
        while not loops.fits(low):
            low, high = low - step, low
    while high - low > max(1, TRUTH_WITHIN * low):
        middle = (low + high) // 2
        low, high = (middle, high) if loops.fits(middle) else (low, middle)
    above = [round(high * (1 + share)) for share in LOOK_ABOVE]
    again = [batch for batch in above if loops.fits(batch)]
    loops.close()
    return Truth(low, tuple(again), loops.runs, time.perf_counter() - started)


def summary(name: str, found: BatchSummary, truth: Truth, found_s: float) -> str:
    assert found.max_batch is not None
    share, trials = found.max_batch / truth.batch, len(found.trials)
    kept = share >= NEAR and trials <= 8 and found.ooms <= 1
    again = f"; plain loops run again at {', '.join(map(str, truth.fits_again))}" if truth.fits_again else ""
    return (
        f"{'ok ' if kept else 'NOT'} {name:<18} found {found.max_batch} of {truth.batch} true ({share:.1%}) in {trials} trials, "
        f"{found.ooms} OOMs, {found_s:.0f} s; knee {found.knee_batch}; truth by {truth.runs} plain loops in "
        f"{truth.seconds:.0f} s{again}"
    )


if __name__ == "__main__":
    main()
