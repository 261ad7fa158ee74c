"""Energy, power, neighbours and memory on the GPU at hand, against nvidia-smi and the allocator.

    python scripts/check_energy_on_gpu.py [--out FOLDER] [--only energy smi shared memory] [--recipe [MODEL=]RECIPE …]

- energy: joules per image of ResNet-50 and ViT-B/16 at batch 32: baseline, a fast recipe that needs no compiler, and the best
  recipe that `redline tune` has found, read from docs/results/h200/tune (about 100 s, 60 s of that compiling; allow 150 s).
  `--recipe` names another one, for both models or, as `vit_b_16=bf16+compile`, for one; `--recipe none` leaves it out (30 s).
- smi: `redline monitor` and nvidia-smi side by side while a process computes: power, clock, utilisation and energy within 5 %
  (18 s).
- shared: a second process on the card turns the verdict to `shared-gpu`, and without it there is none (15 s).
- memory: the categories of `redline memory` add up to the allocator's peak within 2 %: ResNet-50 and ViT-B/16, inference and
  training (25 s).

Each result is written to the folder as soon as it is there.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from raw_records import RawRecords

import redline
from redline.api.workspace import Workspace
from redline.system.telemetry.nvml import open_cards

MODELS = ("resnet50", "vit_b_16")
FAST = "fp16+channels-last+graphs"
TUNED = Path(__file__).parent.parent / "docs" / "results" / "h200" / "tune"
METERED: dict[str, Any] = {
    "effort": "quick",
    "measure": {"check_numerics": False, "block_seconds": 0.4, "min_rounds": 6},
}
SMI_S, SMI_AGREEMENT, MEMORY_AGREEMENT = 12.0, 0.05, 0.02
BUSY = """
import sys, time, torch
left = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
torch.cuda.synchronize()
print("ready", flush=True)
ends = time.monotonic() + float(sys.argv[1])
while time.monotonic() < ends:
    for _ in range(20):
        left @ left
    torch.cuda.synchronize()
"""


class Results:
    def __init__(self, out: Path | None, raw: RawRecords) -> None:
        self._out, self.raw = out, raw
        self.lines: list[dict[str, Any]] = []

    def tell(self, part: str, is_good: bool, **figures: Any) -> None:
        line = {"part": part, "good": bool(is_good), **figures}
        self.lines.append(line)
        text = f"{'ok  ' if is_good else 'MISS'} {json.dumps(line)}"
        print(text, flush=True)
        if self._out is not None:
            with (self._out / "energy.txt").open("a") as file:
                file.write(text + "\n")
            (self._out / "energy.json").write_text(json.dumps(self.lines, indent=1))


def best_recipes(named: list[str]) -> dict[str, str | None]:
    """By model: what the command line names, else the winner that the kept output of `redline tune` tells."""
    best = {model: tuned_winner(TUNED / f"{model}.txt") for model in MODELS}
    for word in named:
        model, _, recipe = word.rpartition("=") if word.partition("=")[0] in MODELS else ("", "", word)
        best.update(dict.fromkeys([model] if model else MODELS, None if recipe == "none" else recipe))
    return best


def tuned_winner(report: Path) -> str | None:
    found = (
        re.search(r"^winner: (\S+),", report.read_text(encoding="utf-8"), re.MULTILINE) if report.is_file() else None
    )
    return found.group(1) if found else None


def check_energy(results: Results, best: dict[str, str | None]) -> None:
    for model in MODELS:
        recipes = list(dict.fromkeys(["baseline", FAST, *([best[model]] if best[model] else [])]))
        with Workspace(journal=results.raw.journal) as kept:
            rows = redline.run(model, batch=32, recipes=recipes, workspace=kept, **METERED)
        for row in rows:
            results.tell(
                "energy",
                row.energy_per_item_j is not None,
                model=model,
                recipe=row.recipe,
                is_best=row.recipe == best[model],
                images_per_s=row.throughput_per_s,
                joules_per_image=row.energy_per_item_j,
                images_per_joule=row.items_per_j,
                power_w=row.power_w,
                utilisation=row.utilisation,
                too_short=row.energy_too_short,
                failure=row.failure.message if row.failure else None,
            )


def check_smi(results: Results) -> None:
    """The GPU is kept busy all the time; both look five times per second for the same twelve seconds."""
    busy = subprocess.Popen([sys.executable, "-c", BUSY, str(SMI_S + 8)], stdout=subprocess.PIPE, text=True)
    assert busy.stdout is not None
    busy.stdout.readline()
    time.sleep(3)  # clocks and the driver's running mean settle
    query = "power.draw,clocks.sm,utilization.gpu"
    smi = subprocess.Popen(
        ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "-lms", "200", "-i", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    rows: list[list[str]] = []
    assert smi.stdout is not None
    reader = threading.Thread(target=lambda: rows.extend(csv.reader(smi.stdout or ())))
    reader.start()
    monitored = redline.monitor(seconds=SMI_S, interval_s=0.2)
    smi.terminate()
    reader.join(10)
    busy.terminate()
    busy.wait()
    total = next(each for each in monitored.totals if each.device == "gpu0")
    power, clock, used = (mean([float(row[at]) for row in rows if len(row) == 3]) for at in range(3))
    beside = {"power_w": power, "clock_hz": clock * 1e6, "utilisation": used / 100, "energy_j": power * total.seconds}
    ours = {
        "power_w": total.mean_power_w,
        "clock_hz": total.mean_clock_hz,
        "utilisation": total.mean_utilisation,
        "energy_j": total.energy_j,
    }
    off = {name: None if ours[name] is None else (ours[name] or 0.0) / beside[name] - 1 for name in beside}
    is_good = all(each is not None and abs(each) <= SMI_AGREEMENT for each in off.values())
    results.tell("smi", is_good, off=off, ours=ours, nvidia_smi=beside, looks=[total.looks, len(rows)])


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def check_shared(results: Results) -> None:
    for company in (False, True):
        busy = None
        if company:
            busy = subprocess.Popen([sys.executable, "-c", BUSY, "30"], stdout=subprocess.PIPE, start_new_session=True)
            assert busy.stdout is not None
            busy.stdout.readline()
        with Workspace(journal=results.raw.journal) as kept:
            (row,) = redline.run(
                "resnet18", batch=32, workspace=kept, effort="quick", measure={"check_numerics": False}
            )
        running = [card.processes() for card in open_cards()]
        if busy is not None:
            busy.kill()
            busy.wait()
        labels = list(row.verdict.labels)
        results.tell(
            "shared",
            ("shared-gpu" in labels) == company,
            company=company,
            labels=labels,
            neighbour=busy.pid if busy is not None else None,
            driver_says=[None if one is None else sorted(one) for one in running],
        )


def check_memory(results: Results) -> None:
    for model in MODELS:
        for task in ("infer", "train"):
            with Workspace(journal=results.raw.journal) as kept:
                (row,) = redline.memory(model, task=task, batch=32, workspace=kept)
            use = row.use
            whole = sum(use.categories.values())
            allocated = None
            if use.reserved_bytes is not None and use.fragments_bytes is not None:
                allocated = use.reserved_bytes - use.fragments_bytes
            off = whole / allocated - 1 if allocated else None
            results.tell(
                "memory",
                off is not None and abs(off) <= MEMORY_AGREEMENT,
                model=model,
                task=task,
                off=off,
                allocated_bytes=allocated,
                categories=dict(use.categories),
                unattributed=use.categories.get("workspace", 0) / whole,
                first_holder=[use.holders[0].module, use.holders[0].bytes] if use.holders else None,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parts = ["smi", "shared", "energy", "memory"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--recipe", nargs="+", default=[], metavar="[MODEL=]RECIPE")
    asked = parser.parse_args()
    if asked.out is not None:
        asked.out.mkdir(parents=True, exist_ok=True)
    with RawRecords(asked.out) as raw:
        check(asked, Results(asked.out, raw))


def check(asked: argparse.Namespace, results: Results) -> None:
    checks = {"smi": check_smi, "shared": check_shared, "memory": check_memory}
    began = time.monotonic()
    for part in asked.only:
        try:
            check_energy(results, best_recipes(asked.recipe)) if part == "energy" else checks[part](results)
        except Exception as error:  # the other parts are worth having all the same
            results.tell(part, False, error=repr(error))
        print(f"     {part} done after {time.monotonic() - began:.0f} s", flush=True)
    good = sum(line["good"] for line in results.lines)
    print(f"{good} of {len(results.lines)} as they should be, {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
