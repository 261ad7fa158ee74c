"""The user's own check of a recipe: a number the model earns with it, and the one it earns without.

For what random inputs cannot show: int8 and fp8 above all, and whatever else the user holds dear. The check gets a function to call in
place of the model, on inputs as the model itself would take them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from redline.bench.device import open_device, resolve_device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.compose import apply_recipe
from redline.bench.workload.build import build_workload
from redline.bench.workload.sources.user import load_function
from redline.bench.workload.step import InferenceStep, Setup
from redline.errors import BenchError, SpecError
from redline.questions import MetricAnswer
from redline.spec import Recipe, RunSpec

Check = Callable[[Callable[..., Any]], Any]


def metric_of(spec: RunSpec, check: str, baseline: float | None = None) -> MetricAnswer:
    if spec.workload.task != "infer":
        raise SpecError("check needs the outputs of a model: it works with inference only")
    judge = load_function(check, "check")
    if baseline is None:
        baseline = _judged(spec, Recipe(), judge, check)
    value = _judged(spec, spec.recipe, judge, check) if spec.recipe.switches else baseline
    return MetricAnswer(value=value, baseline=baseline)


def _judged(spec: RunSpec, recipe: Recipe, judge: Check, name: str) -> float:
    device = open_device(resolve_device(spec.device))
    torch.manual_seed(spec.seed)
    workload = build_workload(spec.workload, spec.seed)
    workload.to(device.torch_device)
    # As the person made it: calibrating on random inputs would undo what training taught.
    setup = apply_recipe(recipe, workload, device)
    try:
        value = float(judge(_as_a_function(InferenceStep(setup), setup)))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BenchError("user", f"check {name} raised {one_line(error)}") from error
    if not math.isfinite(value):
        raise BenchError("user", f"check {name} gave {value}")
    return value


def _as_a_function(step: InferenceStep, setup: Setup) -> Callable[..., Any]:
    """On inputs as the model itself takes them, wherever they lie."""

    def model(*args: Any, **kwargs: Any) -> Any:
        place = setup.device.torch_device
        args, kwargs = pytree.tree_map_only(torch.Tensor, lambda leaf: leaf.to(place), (args, kwargs))
        return step.on(*setup.prepared_inputs(args, kwargs))

    return model
