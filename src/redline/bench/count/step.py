"""The work of a step as a recipe has set it up: its casts, its autocast, its TF32; the model as written, not as compiled."""

from __future__ import annotations

from redline.bench.count.count import Task, count_work
from redline.bench.count.formats import Tf32
from redline.bench.recipe.base import Setup
from redline.spec import OptimizerName
from redline.work import WorkCount


def count_step(setup: Setup, optimizer: OptimizerName, *, modules: bool = False) -> WorkCount:
    trains = setup.task == "train"
    return count_work(
        Task(
            model=setup.workload.model,
            inputs=(setup.args, setup.kwargs),
            loss=setup.workload.loss if trains else None,
            autocast=setup.autocast,
            optimizer=optimizer if trains else None,
            tf32=Tf32.of(setup.device),
            modules=modules,
        )
    )
