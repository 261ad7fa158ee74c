"""Training on data: accuracy over recipes and seeds, prefetching, and the speed of a bare step."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from asking import Ask, Outcome

import redline

RECIPES = ["baseline", "amp", "amp-bf16", "amp-bf16+channels-last+graphs", "amp-bf16+channels-last+compile"]
FAST = "amp-bf16+channels-last+fused-optimizer+graphs"
BEST = "amp-bf16+channels-last+compile+fused-optimizer+graphs+cudnn-benchmark"
LEAST_ACCURACY, MOST_OF_EPOCH, LEAST_OF_STEP = 0.6, 0.7, 0.9
SEED_NOISE = 0.03
"""Accuracies may differ by this much more than seeds do: 1 000 held-out samples have a standard error of 0.015."""
SLOW_LOADERS = """
import time, torch

class Slow:
    def __init__(self, count):
        self.count = count
    def __len__(self):
        return self.count
    def __iter__(self):
        drawn = torch.Generator().manual_seed(0)
        for _ in range(self.count):
            images, classes = torch.randn({batch}, 3, 32, 32, generator=drawn), torch.randint(10, ({batch},), generator=drawn)
            time.sleep({load_s})
            yield images, classes

def loaders():
    return Slow({steps}), Slow(1)
"""


def train(ask: Ask, row: str, check: Any) -> Outcome:
    """Every recipe learns as fp32 does; prefetching hides a loader; an epoch runs at 90 % of the bare step's speed."""
    outcome: Outcome = check(ask)
    return outcome


def trained(ask: Ask, recipes: str | list[str], **settings: Any) -> Any:
    model = ask.sized("resnet18", "simple_cnn")
    with ask.workspace() as workspace:
        result = redline.train(model, recipes=recipes, device=ask.device, workspace=workspace, **settings)
    rows = result.table("trainings").rows
    if failed := [f"{row['recipe']}: {row.failure}" for row in rows if row.failure]:
        raise RuntimeError("; ".join(failed))
    return result


def accuracy(ask: Ask) -> Outcome:
    recipes = ask.sized(RECIPES, RECIPES[:1])
    sizes = ask.sized({}, {"train_samples": 128, "val_samples": 32, "batch": 16})
    reached: dict[str, list[float]] = {}
    for seed in range(3):
        for row in trained(ask, recipes, seed=seed, on_device=True, epochs=3, **sizes).table("trainings").rows:
            reached.setdefault(row["recipe"], []).append(row.value("accuracy"))
    spread = max(max(values) - min(values) for values in reached.values())
    middles = {recipe: fmean(values) for recipe, values in reached.items()}
    apart, least = max(middles.values()) - min(middles.values()), min(map(min, reached.values()))
    figures = {"least": least, "recipes_apart": apart, "seeds_apart": spread, "accuracy": reached}
    return least > LEAST_ACCURACY and apart <= spread + SEED_NOISE, figures


def prefetch(ask: Ask) -> Outcome:
    """With a loader that costs as much as a step."""
    _, epoch = epochs(ask, 0.0, prefetch=True)
    load_s = max(round(epoch["step_s"], 4), 0.002)
    alone, ahead = (epochs(ask, load_s, prefetch=is_ahead) for is_ahead in (False, True))
    ratio = ahead[1]["train_s"] / alone[1]["train_s"]
    is_same = [each["loss"] for each in alone] == [each["loss"] for each in ahead]
    return ratio <= MOST_OF_EPOCH and is_same, {"load_ms": load_s * 1e3, "ratio": ratio, "same_losses": is_same}


def epochs(ask: Ask, load_s: float, *, prefetch: bool) -> list[dict[str, float]]:
    batch, steps = ask.sized((256, 60), (16, 9))
    file = ask.out / f"slow_loaders_{round(load_s * 1e6)}.py"
    file.write_text(SLOW_LOADERS.format(batch=batch, steps=steps, load_s=load_s))
    shape = {"image_size": 32, "classes": 10, "epochs": 2, "deterministic": True}
    result = trained(ask, "baseline", data=f"{file}:loaders", prefetch=prefetch, **shape)
    return [
        {
            "loss": epoch.value("train_loss"),
            "train_s": batch * steps / epoch.value("throughput"),
            "step_s": sum(epoch.value(f"{name}_time") for name in ("forward", "backward", "optimizer", "step")) / steps,
        }
        for epoch in result.table("epochs").rows
    ]


def speed(ask: Ask, recipe: str) -> Outcome:
    model, batch, stem = ask.sized(("resnet18", 256, "cifar"), ("simple_cnn", 16, None))
    bare = ask.run(model, task="train", batch=batch, image_size=32, classes=10, stem=stem, recipes=recipe)
    sizes = {"batch": batch, "train_samples": 100 * batch, "val_samples": 4 * batch}
    (row,) = trained(ask, recipe, epochs=3, on_device=True, augment="device", **sizes).table("trainings").rows
    share = row.value("throughput") / bare.throughput_per_s
    phases = {name: row.value(f"{name}_share") for name in ("data", "forward", "backward", "optimizer", "step")}
    figures = {"bare_per_s": bare.throughput_per_s, "train_per_s": row.value("throughput"), "share": share}
    return share >= LEAST_OF_STEP, {**figures, "phases": phases}


ROWS = {
    "accuracy": accuracy,
    "prefetch": prefetch,
    "speed": lambda ask: speed(ask, ask.sized(FAST, "channels-last")),
    "speed compiled": lambda ask: speed(ask, ask.sized(BEST, "channels-last")),
}
