"""Which steps a tuner may put into recipes for one workload: what each is, and why some cannot be had."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import STEPS, RecipeStep
from redline.protocol import StepChoice
from redline.spec import Step, Task


def step_choices(model: torch.nn.Module, device: Device, task: Task) -> list[StepChoice]:
    """Every step with each argument it offers. A step for another task is no choice at all."""
    kinds = [kind for kind in map(STEPS.get, STEPS) if task in kind.tasks]
    steps = [kind(Step(name=kind.name, argument=argument)) for kind in kinds for argument in kind.offered]
    return [_choice(step, steps, model, device, task) for step in steps]


def _choice(
    step: RecipeStep, among: list[RecipeStep], model: torch.nn.Module, device: Device, task: Task
) -> StepChoice:
    argument = step.step.argument
    return StepChoice(
        step=str(step.step),
        family=step.family or step.name,
        relieves=step.relieves,
        excludes=tuple(sorted(str(other.step) for other in among if exclude_each_other(step, other))),
        needs=step.needs.get(task, ()),
        refusal=step.refusal(device, task) or step.irrelevance(model, task) or step.caution(task),
        quantizes=step.quantizes,
        leaves_program=step.leaves_program,
        is_slow_to_prepare=argument in step.slow_to_prepare,
    )


def exclude_each_other(one: RecipeStep, other: RecipeStep) -> bool:
    """One name stands in a recipe once."""
    return one.name == other.name or bool(names_of(one) & other.excludes or names_of(other) & one.excludes)


def unmet_need(step: RecipeStep, recipe: Sequence[RecipeStep], task: Task) -> str | None:
    """Why this step cannot stand in this recipe, with what is missing; None where nothing is."""
    names = {name for other in recipe for name in names_of(other)}
    return next((need.reason for need in step.needs.get(task, ()) if not need.is_met(names)), None)


def names_of(step: RecipeStep) -> set[str]:
    """By which an exclusion may mean it: its name, or its name with the argument it has."""
    return {step.name, f"{step.name}:{step.step.argument or 'default'}"}
