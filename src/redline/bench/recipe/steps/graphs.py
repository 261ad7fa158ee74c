"""CUDA graphs: the whole step recorded once and replayed, so that the GPU no longer waits for Python."""

from __future__ import annotations

from typing import ClassVar

from redline.bench.device.base import Device
from redline.bench.recipe.base import GRAPHS, STEPS, RecipeStep, Setup
from redline.bench.recipe.code import RecipeCode
from redline.bench.recipe.plain.calling import CallForm
from redline.protocol import StepNeed
from redline.spec import Task


@STEPS.register("graphs")
class Graphs(RecipeStep):
    name = "graphs"
    summary = "the whole step in one CUDA graph: the forward, or forward, loss, backward and optimizer"
    stage = GRAPHS
    relieves = "host"
    leaves_program = True
    # These make graphs of their own, and a graph cannot be recorded inside another.
    excludes = frozenset({"compile:reduce-overhead", "compile:max-autotune", "torchscript"})

    needs: ClassVar[dict[Task, tuple[StepNeed, ...]]] = {
        "train": (
            StepNeed(
                beside="amp",
                wants="fused-optimizer",
                reason="GradScaler asks the host whether to skip a step, which a graph cannot; add fused-optimizer, "
                "which decides on the GPU, or use amp-bf16, which needs no scaling",
            ),
        )
    }

    def refusal(self, device: Device, task: Task) -> str | None:
        return device.graph_refusal()

    def apply(self, setup: Setup) -> None:
        setup.is_graphed = True

    def write(self, code: RecipeCode) -> None:
        code.is_graphed = True
        code.bring_in("from torch.utils._pytree import tree_flatten")
        code.carry(CallForm)
