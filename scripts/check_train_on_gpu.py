"""Training on data on the GPU at hand: accuracy over recipes and seeds, prefetching, the speed of the bare step, the ladder.

    python scripts/check_train_on_gpu.py [--short] [--only accuracy prefetch speed ladder] [--out FOLDER]

- accuracy: `resnet18` on `synthetic-learnable` is above 60 % on held-out samples with every recipe and seed, and no recipe is
  further from fp32 than its seeds are apart.
- prefetch: with a loader that costs as much as a step, an epoch takes at most 0.7 times what it takes without prefetching, and
  the losses are the same bit for bit.
- speed: CIFAR-shaped `resnet18` at batch 256 trains at 90 % or more of the speed of its bare step in `run --task train`.
- ladder: from one CPU thread to the best recipe in less than 8 minutes.

`--short` takes about a minute and a half: one seed, nothing that compiles, no ladder. Each check writes its result to the
folder as soon as it is done.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redline
from redline.api.workspace import Workspace
from redline.launch import open_door
from redline.spec import LaunchSpec

RECIPES = ("baseline", "amp", "amp-bf16", "amp-bf16+channels-last+compile", "amp-bf16+channels-last+graphs")
FAST = "amp-bf16+channels-last+fused-optimizer+graphs"
LEAST_ACCURACY, MOST_OF_EPOCH, LEAST_OF_STEP, LADDER_S = 0.6, 0.7, 0.9, 480.0
SEED_NOISE = 0.03
"""Accuracy may differ by this much more than seeds do: 1 000 held-out samples have a standard error of 0.015."""
SLOW_LOADERS = '''"""A loader that takes {load_s} s for each batch."""

import time

import torch


class Slow:
    def __init__(self, batches, seed):
        drawn = torch.Generator().manual_seed(seed)
        self.batches = [
            (torch.randn({batch}, 3, 32, 32, generator=drawn), torch.randint(10, ({batch},), generator=drawn))
            for _ in range(batches)
        ]

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        for each in self.batches:
            time.sleep({load_s})
            yield each


def loaders():
    return Slow({steps}, 0), Slow(1, 1)
'''
Check = Callable[[Workspace, argparse.Namespace], dict[str, Any]]


def accuracy(workspace: Workspace, given: argparse.Namespace) -> dict[str, Any]:
    """By recipe, the accuracy of each seed."""
    recipes = [each for each in RECIPES if "compile" not in each] if given.short else list(RECIPES)
    sizes = {"train_samples": 5120, "val_samples": 1000} if given.short else {}
    reached: dict[str, list[float | None]] = {}
    for recipe in recipes:
        for seed in range(1 if given.short else 3):
            (row,) = redline.train(
                "resnet18", epochs=3, recipes=recipe, seed=seed, device=given.device, on_device=True, **sizes,
                workspace=workspace,
            )  # fmt: skip
            reached.setdefault(recipe, []).append(None if row.failure else row.accuracy)
            print(f"accuracy: {recipe}, seed {seed}: {row.failure or row.accuracy}", flush=True)
    known = {recipe: [each or 0.0 for each in values] for recipe, values in reached.items()}
    spread = max(max(values) - min(values) for values in known.values())
    middles = {recipe: statistics.mean(values) for recipe, values in known.items()}
    apart = max(middles.values()) - min(middles.values())
    fine = min(min(values) for values in known.values()) > LEAST_ACCURACY and apart <= spread + SEED_NOISE
    return {"fine": fine, "accuracy": reached, "apart": apart, "spread_of_seeds": spread}


def prefetch(workspace: Workspace, given: argparse.Namespace) -> dict[str, Any]:
    """Epoch times with and without prefetching, with a loader that takes as long as a step."""
    step_s = _epochs(workspace, given, load_s=0.0, prefetch=True, steps=20)[1]["step_s"]
    load_s = max(round(step_s, 4), 0.002)
    steps = 60 if given.short else 200
    alone, ahead = (_epochs(workspace, given, load_s=load_s, prefetch=on, steps=steps) for on in (False, True))
    ratio = ahead[1]["train_s"] / alone[1]["train_s"]
    same = [each["loss"] for each in alone] == [each["loss"] for each in ahead]
    return {"fine": ratio <= MOST_OF_EPOCH and same, "ratio": ratio, "same_losses": same, "load_s": load_s, "step_s": step_s,
            "without": alone, "with": ahead}  # fmt: skip


def _epochs(
    workspace: Workspace, given: argparse.Namespace, *, load_s: float, prefetch: bool, steps: int
) -> list[dict[str, Any]]:
    file = given.scratch / f"slow_loaders_{steps}_{round(load_s * 1e6)}.py"
    file.write_text(SLOW_LOADERS.format(load_s=load_s, batch=given.batch, steps=steps))
    (row,) = redline.train(
        "resnet18", data=f"{file.absolute()}:loaders", epochs=2, image_size=32, classes=10, prefetch=prefetch,
        deterministic=True, device=given.device, workspace=workspace,
    )  # fmt: skip
    if row.failure:
        raise SystemExit(f"prefetch: {row.failure}")
    return [
        {
            "loss": epoch.train_loss,
            "train_s": epoch.train_s,
            "step_s": sum(seconds for name, seconds in epoch.phases_s.items() if name != "data") / max(epoch.steps, 1),
        }
        for epoch in row.epochs
    ]


def speed(workspace: Workspace, given: argparse.Namespace) -> dict[str, Any]:
    """Samples per second of a training with the data on the device, over those of its bare step."""
    recipe = given.recipe
    (bare,) = redline.run(
        "resnet18", task="train", batch=given.batch, image_size=32, classes=10, stem="cifar", recipes=recipe, device=given.device,
        effort="quick", workspace=workspace,
    )  # fmt: skip
    (row,) = redline.train(
        "resnet18", epochs=3, batch=given.batch, recipes=recipe, device=given.device, on_device=True, augment="device",
        train_samples=100 * given.batch, val_samples=1024, workspace=workspace,
    )  # fmt: skip
    share = (row.samples_per_s or 0.0) / (bare.throughput_per_s or float("inf"))
    return {"fine": share >= LEAST_OF_STEP, "share": share, "recipe": recipe, "bare_per_s": bare.throughput_per_s,
            "train_per_s": row.samples_per_s, "where_the_time_goes": row.phase_shares, "failure": row.failure}  # fmt: skip


def ladder(workspace: Workspace, given: argparse.Namespace) -> dict[str, Any]:
    started = time.perf_counter()
    result = redline.ladder("resnet18", device=given.device, workspace=workspace)
    seconds = time.perf_counter() - started
    (given.out / "ladder.txt").write_text(str(result))
    result.plot(given.out / "ladder.png")
    print(result, flush=True)
    return {"fine": seconds < LADDER_S and not result.failed, "seconds": seconds, **json.loads(str(result.to_json()))}


CHECKS: dict[str, Check] = {"accuracy": accuracy, "prefetch": prefetch, "speed": speed, "ladder": ladder}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="about a minute and a half, without the ladder")
    parser.add_argument("--only", nargs="+", choices=CHECKS, metavar="NAME", help=f"of {', '.join(CHECKS)}")
    parser.add_argument("--recipe", default=FAST, help=f"of the check of speed; {FAST} by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--batch", type=int, default=256, help="of prefetch and speed")
    parser.add_argument("--out", type=Path, default=Path("train"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    names = given.only or [name for name in CHECKS if not (given.short and name == "ladder")]
    fine = 0
    with contextlib.closing(open_door(LaunchSpec())) as door, tempfile.TemporaryDirectory() as scratch:
        given.scratch = Path(scratch)
        workspace = Workspace(door=door, history=given.scratch / "history.sqlite")
        for name in names:
            started = time.perf_counter()
            found = CHECKS[name](workspace, given)
            found["took_s"] = time.perf_counter() - started
            (given.out / f"{name}.json").write_text(json.dumps(found, indent=1))
            fine += found["fine"]
            told = {key: value for key, value in found.items() if isinstance(value, int | float | str)}
            print(f"{'ok ' if found['fine'] else 'NOT'} {name}: {told}", flush=True)
    print(f"{fine} of {len(names)} fine")


if __name__ == "__main__":
    main()
