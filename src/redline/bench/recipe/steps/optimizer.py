"""The optimizer's step as one kernel over all parameters, instead of some per parameter group."""

from __future__ import annotations

from redline.bench.recipe.base import FLAGS, STEPS, RecipeStep, Setup
from redline.bench.recipe.code import RecipeCode


@STEPS.register("fused-optimizer")
class FusedOptimizer(RecipeStep):
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
