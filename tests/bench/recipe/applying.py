"""A recipe applied to a small model, and the same recipe as the code it writes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.base import RecipeCode
from redline.bench.recipe.compose import apply_recipe, number_format_of, switches_of
from redline.bench.recipe.numerics import LossReference, OutputReference
from redline.bench.workload.build import build_workload
from redline.bench.workload.ranks import Ranks
from redline.bench.workload.signal import give_signal
from redline.bench.workload.step import InferenceStep, Setup
from redline.bench.workload.workload import Workload, assemble
from redline.model.record import Numerics
from redline.model.spec import OptimizerName, Recipe, Task, WorkloadSpec
from redline.model.spec_table import specs_from_table


class Model(nn.Module):
    """A model that is a function of itself, which holds these parts, and of its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def workload_of(model: nn.Module, *args: Any, task: Task = "infer", **kwargs: Any) -> Workload:
    return assemble(model, (args, kwargs), task=task, source="test", identity="test", seed=0)


def named(model: str, **options: Any) -> Workload:
    workload = build_workload(WorkloadSpec(model=model, **options), seed=0)
    give_signal(workload)
    return workload


def copied(workload: Workload) -> Workload:
    return replace(workload, model=copy.deepcopy(workload.model))


def applied(
    recipe: str, model: nn.Module, *args: Any, task: Task = "infer", device: Device | None = None, **kwargs: Any
) -> Setup:
    workload = workload_of(model, *args, task=task, **kwargs)
    return apply_recipe(Recipe.parse(recipe), workload, device or CpuDevice())


def output_of(setup: Setup) -> Any:
    step = InferenceStep(setup)
    with step.context():
        return step()


def judged(recipe: str, model: nn.Module, *args: Any) -> Numerics:
    """What the numerics check says of a recipe, reference first as in a session."""
    parsed, device, workload = Recipe.parse(recipe), CpuDevice(), workload_of(model, *args)
    reference = OutputReference.of(workload, device, number_format_of(parsed, "infer"), seed=0)
    setup = apply_recipe(parsed, workload, device)
    return reference.judge(InferenceStep(setup), setup)


def loss_reference(
    workload: Workload, number_format: str, steps: int, optimizer: OptimizerName = "sgd", device: Device | None = None
) -> LossReference:
    measure = {"loss_path_steps": steps}
    (spec,) = specs_from_table({"model": "test", "task": "train", "optimizer": optimizer, "measure": measure})
    return LossReference.of(spec, workload, device or CpuDevice(), number_format, Ranks())


def code_of(recipe: str, task: Task = "infer", device: str = "cpu") -> RecipeCode:
    code = RecipeCode(task=task, device=device)
    for step in switches_of(Recipe.parse(recipe), task):
        step.write(code)
    return code


def output_of_code(recipe: str, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What the model says once the written code, and nothing of Redline, has been run over a copy of it."""
    code = code_of(recipe)
    helpers = "\n\n\n".join(code.helpers)
    text = "\n".join([*code.imports, "import torch", "", helpers, "", *code.flags, *code.model_lines])
    assert "redline" not in text
    names: dict[str, Any] = {"model": copy.deepcopy(model).eval(), "args": args, "kwargs": kwargs}
    exec(compile(text, "<snippet>", "exec", dont_inherit=True), names)
    with torch.inference_mode():
        return names["model"](*args, **kwargs)
