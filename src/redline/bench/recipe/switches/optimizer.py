"""The optimizer's switch as one kernel over all parameters, instead of some per parameter group."""

from __future__ import annotations

from redline.bench.recipe.base import FLAGS, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.workload.step import Setup


@SWITCHES.register("fused-optimizer")
class FusedOptimizer(RecipeSwitch):
    name = "fused-optimizer"
    summary = "SGD, Adam or AdamW as one fused kernel (fused=True)"
    stage = FLAGS
    family = "optimizer"
    relieves = "both"
    tasks = ("train",)
    leaves_program = True

    def apply(self, setup: Setup) -> None:
        setup.optimizer_options["fused"] = True

    def write(self, code: RecipeCode) -> None:
        code.optimizer_options["fused"] = "True"
