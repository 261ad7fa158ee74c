"""Redline's MACs and parameters of every torchvision classification model against what torchvision publishes.

Each model is counted at the crop size of its V1 weights, batch 1, without memory where its code allows that, and set
against `weights.meta["_ops"]` (GMACs) and `weights.meta["num_params"]`. Nothing is downloaded. Exits 1 when a difference
above 1 % is not among those that `EXPLAINED` names.

    python benchmarks/published_counts.py [PATTERN]
"""

from __future__ import annotations

import fnmatch
import sys
import time
from typing import Any

import torch
import torchvision
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import get_model, get_model_weights, list_models

from redline.bench.count.count import Task, count_work
from redline.model.work import WorkCount

TOLERANCE = 0.01

EXPLAINED = {"shufflenet_v2_x0_5": "published rounded to two digits"}

OPTIONS: dict[str, dict[str, Any]] = {
    # The published parameters are those of the published weights: Inception's hold its auxiliary head, GoogLeNet's not.
    "inception_v3": {"init_weights": False, "aux_logits": True},
    "googlenet": {"init_weights": False, "aux_logits": False},
}


def published(name: str) -> tuple[int, float, int]:
    """Crop size, GMACs and parameters of the V1 weights; of the first ones where there are none by that name."""
    weights = list(get_model_weights(name))
    chosen = next((one for one in weights if one.name == "IMAGENET1K_V1"), weights[0])
    return int(chosen.transforms.keywords["crop_size"]), float(chosen.meta["_ops"]), int(chosen.meta["num_params"])


def counted(name: str, size: int) -> WorkCount:
    options = dict(OPTIONS.get(name, {}))
    if name.startswith("vit_"):
        options["image_size"] = size
    for without_memory in (torch.device("meta"), FakeTensorMode(allow_non_fake_inputs=True)):
        try:
            with without_memory:
                model = get_model(name, weights=None, **options).eval()
                image = torch.randn(1, 3, size, size)
            return count_work(Task(model=model, inputs=((image,), {})))
        except Exception:  # it reads a value while it is built
            continue
    model = get_model(name, weights=None, **options).eval()
    return count_work(Task(model=model, inputs=((torch.randn(1, 3, size, size),), {})))


def main() -> None:
    pattern = sys.argv[1] if len(sys.argv) > 1 else "*"
    names = [name for name in list_models(module=torchvision.models) if fnmatch.fnmatchcase(name, pattern)]
    wrong, within, started = [], 0, time.perf_counter()
    print(f"{'model':<24} {'crop':>5} {'GMACs':>9} {'published':>10} {'difference':>10} {'parameters':>12}  seconds")
    for name in names:
        size, gmacs, params = published(name)
        work = counted(name, size)
        difference = work.macs / 1e9 / gmacs - 1
        agrees, same = abs(difference) <= TOLERANCE, work.params == params
        within += agrees
        remark = "" if agrees else EXPLAINED.get(name, "NOT EXPLAINED")
        left_out = f" uncounted: {', '.join(one.name for one in work.uncounted)}" if work.uncounted else ""
        print(
            f"{name:<24} {size:>5} {work.macs / 1e9:>9.3f} {gmacs:>10.3f} {difference:>+10.2%} "
            f"{work.params:>12,}{'' if same else f' NOT {params:,}'}  {work.seconds:.2f} {remark}{left_out}",
            flush=True,
        )
        if not same or (not agrees and name not in EXPLAINED):
            wrong.append(name)
    print(
        f"{within} of {len(names)} within {TOLERANCE:.0%}, {time.perf_counter() - started:.0f} s; wrong: {wrong or 'none'}"
    )
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
