"""Build every torchvision classification and segmentation model and run one step of each.

Classification models infer; segmentation models infer and train. Images are small where the model allows it, so that
the whole round takes minutes on a CPU. One line per model, a closing count, exit code 1 if any failed.

    python scripts/build_all_models.py [PATTERN] [--published-size]
"""

from __future__ import annotations

import argparse
import gc
import re
import sys
import time

import torch

from redline.bench.workload.build import build_workload, list_models
from redline.bench.workload.structure import float_tensors
from redline.bench.workload.workload import Workload
from redline.model.questions import ModelName
from redline.model.spec import Task, WorkloadSpec

SMALL = 64
LEAST = {"inception_v3": 96, "maxvit_t": 224}


def main() -> int:
    options = parse_arguments()
    models = [model for model in list_models(options.pattern)[0] if model.source == "torchvision"]
    failures = []
    for model in models:
        tasks: tuple[Task, ...] = ("infer", "train") if model.kind == "segmentation" else ("infer",)
        for task in tasks:
            try:
                print(line_for(model, task, options.published_size), flush=True)
            except Exception as error:
                failures.append(f"{model.name} {task}")
                print(f"{model.name:32} {task:6} FAILED {type(error).__name__}: {error}", flush=True)
            gc.collect()  # one model at a time: the largest take gigabytes
    print(f"{len(models)} models, {len(failures)} failed{': ' if failures else ''}{', '.join(failures)}")
    return 1 if failures or not models else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Build every torchvision model and run one step of each.")
    parser.add_argument("pattern", nargs="?", help="part of a name, or a pattern with *")
    parser.add_argument("--published-size", action="store_true", help="images as large as the published weights take")
    return parser.parse_args()


def line_for(model: ModelName, task: Task, published_size: bool) -> str:
    size = None if published_size else small_size(model.name)
    spec = WorkloadSpec(model=model.name, task=task, batch=2 if task == "train" else 1, image_size=size)
    started = time.perf_counter()
    workload = build_workload(spec, seed=0)
    built = time.perf_counter()
    said = train_once(workload) if task == "train" else infer_once(workload)
    stepped = time.perf_counter()
    info = workload.info()
    return (
        f"{model.name:32} {task:6} {info.parameters / 1e6:7.1f} M  {info.input_shapes[0]:22} "
        f"build {built - started:6.2f} s  step {stepped - built:6.2f} s  {said}"
    )


def small_size(name: str) -> int:
    """The smallest image worth trying: four patches a side for ViT, what the others need at least."""
    patch = re.fullmatch(r"vit_[a-z]_(\d+)", name)
    return 4 * int(patch.group(1)) if patch else LEAST.get(name, SMALL)


def infer_once(workload: Workload) -> str:
    with torch.inference_mode():
        outputs = float_tensors(workload.model(*workload.args, **workload.kwargs))
    if not outputs:
        raise RuntimeError("the output holds no floating tensor")
    for name, tensor in outputs:
        if not bool(tensor.isfinite().all()):
            raise RuntimeError(f"{name} is not finite")
    return "  ".join(f"{name} {'×'.join(map(str, tensor.shape))}" for name, tensor in outputs)


def train_once(workload: Workload) -> str:
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.01)
    loss = workload.loss(workload.model(*workload.args, **workload.kwargs))
    loss.backward()
    idle = [name for name, parameter in workload.model.named_parameters() if parameter.grad is None]
    if idle:
        raise RuntimeError(f"{len(idle)} parameters got no gradient, such as {idle[0]}")
    optimizer.step()
    return f"loss {loss.item():.3f}"


if __name__ == "__main__":
    sys.exit(main())
