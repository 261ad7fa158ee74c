"""Run as one of several ranks: one training step of the ranks against one of a single process on the global batch.

Each rank prints one JSON object: for every case how far the two steps lie apart, relative to the length of the step.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from redline.bench.device import open_device
from redline.bench.micro import MicroBench
from redline.bench.recipe.compose import apply_recipe
from redline.bench.workload.build import build_workload
from redline.bench.workload.ranks import Rank, Ranks
from redline.bench.workload.step import LEARNING_RATE, make_step
from redline.model.spec import Recipe, RunSpec, WorkloadSpec

MODEL = f"{Path(__file__).with_name('ranks.py')}:sound"
CASES = {
    "even": ("baseline", 8),
    "uneven": ("baseline", 9),
    "compiled": ("compile", 9),
    "compiled-amp": ("amp-bf16+compile:backend=aot_eager", 8),
    "sharded-compiled": ("fsdp+compile:backend=aot_eager", 9),
    "amp": ("amp-bf16", 8),
    "sharded": ("fsdp", 9),
    "sharded-amp": ("fsdp+amp-bf16", 8),
}


def moved(recipe: str, batch: int, ranks: Ranks) -> torch.Tensor:
    """How one step moves the weights, all in a row."""
    spec = WorkloadSpec(model=MODEL, task="train", batch=batch, batch_axis=0)
    workload = build_workload(spec, seed=0)
    before = flat(workload.model)
    ranks.share(workload, batch, ask=True)
    setup = apply_recipe(Recipe.parse(recipe), workload, open_device("cpu"), ranks.distribute)
    step = make_step(setup, "sgd")
    with step.context():
        step()
    return flat(workload.model) - before


def flat(model: torch.nn.Module) -> torch.Tensor:
    whole = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in whole])


def accumulated(rank: Rank) -> tuple[torch.Tensor, torch.Tensor]:
    """Two micro-steps of each rank on its own items, and the mean gradient by hand."""
    bench = MicroBench(
        RunSpec(workload=WorkloadSpec(model=MODEL, task="train", batch=4), device="cpu", seed=rank.number),
        rank,
        accumulation=2,
    )
    bench.prepare()
    weights = flat(bench.setup.workload.model)
    with torch.enable_grad():
        for _ in range(2):
            bench._iterate()
    expected = torch.zeros_like(weights)
    first = build_workload(WorkloadSpec(model=MODEL, task="train", batch=4), seed=0)
    for seed in range(rank.world):
        own = build_workload(WorkloadSpec(model=MODEL, task="train", batch=4), seed=seed)
        own.model.load_state_dict(first.model.state_dict())
        gradients = torch.autograd.grad(own.loss(own.model(*own.args, **own.kwargs)), list(own.model.parameters()))
        expected -= LEARNING_RATE * torch.cat([each.flatten() for each in gradients]) / rank.world
    return flat(bench.setup.workload.model) - weights, expected


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def cases(rank: Rank) -> Iterator[tuple[str, float]]:
    for name, (recipe, batch) in CASES.items():
        alone = "+".join(switch for switch in recipe.split("+") if switch in ("amp-bf16",)) or "baseline"
        yield name, apart(moved(recipe, batch, Ranks(rank)), moved(alone, batch, Ranks()))
    yield "accumulated", apart(*accumulated(rank))


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = Rank.of_environment()
    rank.join(open_device("cpu"))
    print(json.dumps(dict(cases(rank))), flush=True)  # noqa: T201
    os._exit(0)  # see `redline.bench.workload.ranks.GLOO_JOINED`
