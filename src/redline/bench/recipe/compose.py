"""From a recipe's text to a workload it has been applied to: names, exclusions, refusals, order."""

from __future__ import annotations

from torch import nn

from redline.bench.device.base import Device
from redline.bench.recipe.base import STEPS, RecipeStep, Setup
from redline.bench.recipe.choices import exclude_each_other, unmet_need
from redline.bench.workload.workload import Workload
from redline.errors import BenchError, SpecError
from redline.spec import Recipe, Task

_COARSENESS = ("fp32", "tf32", "fp16", "bf16", "int8-weights", "fp8", "int8")


def steps_of(recipe: Recipe, task: Task) -> list[RecipeStep]:
    """The recipe's steps in the order of application. A mistake in the recipe itself is a `UsageError`."""
    steps = [STEPS.get(step.name)(step) for step in recipe.steps]
    for step in steps:
        if task not in step.tasks:
            raise SpecError(f"step {step.name} is for {' and '.join(step.tasks)}, not for {task}")
        clash = next((other for other in steps if other is not step and exclude_each_other(step, other)), None)
        if clash is not None:
            one, other = sorted((str(step.step), str(clash.step)))
            raise SpecError(f"recipe {recipe}: {one} and {other} exclude each other")
    return sorted(steps, key=lambda step: step.stage)


def number_format_of(recipe: Recipe, task: Task) -> str:
    """The coarsest number format any step computes in."""
    formats = [step.computes_in() for step in steps_of(recipe, task)]
    return max((name for name in formats if name), key=_COARSENESS.index, default="fp32")


def refuse_impossible(steps: list[RecipeStep], task: Task, device: Device, model: nn.Module | None) -> None:
    """Raise why the first step that cannot be had here cannot; without a model, what can be said without one."""
    for step in steps:
        reason = (
            step.refusal(device, task)
            or (step.irrelevance(model, task) if model is not None else None)
            or unmet_need(step, steps, task)
        )
        if reason:
            raise BenchError("unsupported", f"{step.name}: {reason}")


def apply_recipe(recipe: Recipe, workload: Workload, device: Device) -> Setup:
    """Strict fp32 first, then each step in its turn; a step the device cannot do is refused with the reason."""
    steps = steps_of(recipe, workload.task)
    refuse_impossible(steps, workload.task, device, workload.model)
    device.allow_tf32(False)
    setup = Setup(workload=workload, device=device, model=workload.model, args=workload.args, kwargs=workload.kwargs)
    for step in steps:
        step.apply(setup)
    return setup
