"""BatchNorm folded into the convolution or linear layer before it: the same function with one layer fewer."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.failure import one_line
from redline.bench.recipe.base import SWITCHES, WEIGHTS, RecipeSwitch, Setup
from redline.bench.recipe.code import RecipeCode
from redline.bench.recipe.plain.folding import fold_batchnorms, foldable_batchnorms, symbolic_graph
from redline.errors import BenchError
from redline.spec import Task

_TORCH = Path(torch.__file__).parent


@SWITCHES.register("fold-bn")
class FoldBatchNorm(RecipeSwitch):
    name = "fold-bn"
    summary = "BatchNorm folded into the convolution or linear layer before it (inference)"
    stage = WEIGHTS
    relieves = "both"
    tasks = ("infer",)

    def irrelevance(self, model: torch.nn.Module, task: Task) -> str | None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if not norms:
            return "the model has no BatchNorm"
        if all(norm.training for norm in norms):
            return "BatchNorm in training mode follows each batch and cannot be folded; call model.eval() first"
        try:
            pairs = foldable_batchnorms(model)
        except Exception as error:  # what a model does to a tracer is anybody's guess
            return f"torch.fx cannot trace the model: {one_line(error)}{_place_of(error)}"
        return None if pairs else "no BatchNorm takes what one convolution or linear layer gives to it alone"

    def apply(self, setup: Setup) -> None:
        model = setup.workload.model
        norms = sum(isinstance(module, _BatchNorm) for module in model.modules())
        pairs = fold_batchnorms(model, setup.args, setup.kwargs)
        if not pairs:
            raise BenchError(
                "unsupported", "fold-bn: BatchNorm here scales another axis than the layer before it makes"
            )
        setup.notes[self.name] = f"folded {len(pairs)} of {norms} BatchNorm layers"

    def write(self, code: RecipeCode) -> None:
        code.bring_in(
            "from typing import Any", "import torch.fx", "from torch.nn.utils.fusion import fuse_conv_bn_weights"
        )
        code.carry(symbolic_graph, foldable_batchnorms, fold_batchnorms)
        code.model_lines.append("fold_batchnorms(model, args, kwargs)")


def _place_of(error: Exception) -> str:
    """Where in the model's own code it happened."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_the_model(Path(frame.filename))]
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_of_the_model(file: Path) -> bool:
    return not file.is_relative_to(_TORCH) and not file.is_relative_to(Path(__file__).parents[1])
