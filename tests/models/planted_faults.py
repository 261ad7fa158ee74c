"""Recipe steps that are wrong on purpose: what the numerics check must catch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeSwitch
from redline.bench.workload.step import Setup

FAULTS = ("fault-ignores-input", "fault-drops-layer", "fault-returns-nan")


@SWITCHES.register("fault-ignores-input")
class IgnoresInput(RecipeSwitch):
    name = "fault-ignores-input"
    summary = "answers the first question for ever"
    stage = COMPILER + 1

    def apply(self, setup: Setup) -> None:
        model, first = setup.model, []

        def answer(*args: Any, **kwargs: Any) -> Any:
            if not first:
                first.append(model(*args, **kwargs))
            return first[0]

        setup.model = answer


@SWITCHES.register("fault-drops-layer")
class DropsLayer(RecipeSwitch):
    name = "fault-drops-layer"
    summary = "leaves out one layer in the middle"
    stage = COMPILER + 1

    def apply(self, setup: Setup) -> None:
        layer = middle_layer(setup)
        layer.register_forward_hook(skip)
        setup.notes[self.name] = type(layer).__name__


@SWITCHES.register("fault-returns-nan")
class ReturnsNan(RecipeSwitch):
    name = "fault-returns-nan"
    summary = "spoils one number of the output"
    stage = COMPILER + 1

    def apply(self, setup: Setup) -> None:
        model = setup.model

        def spoil(tensor: torch.Tensor) -> torch.Tensor:
            spoiled = tensor.clone()
            spoiled.view(-1)[-1] = torch.nan
            return spoiled

        setup.model = lambda *args, **kwargs: pytree.tree_map_only(torch.Tensor, spoil, model(*args, **kwargs))


def middle_layer(setup: Setup) -> nn.Module:
    """The middle one, in order of execution, of the layers that keep the shape; else of all layers."""
    seen: list[tuple[nn.Module, bool]] = []

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        seen.append((module, isinstance(output, torch.Tensor) and args[0].shape == output.shape))

    layers = [module for module in setup.workload.model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    handles = [layer.register_forward_hook(note) for layer in layers]
    with torch.inference_mode(), setup.autocast():
        setup.model(*setup.args, **setup.kwargs)
    for handle in handles:
        handle.remove()
    candidates = [module for module, same_shape in seen if same_shape] or [module for module, _ in seen]
    return candidates[len(candidates) // 2]


def skip(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    return args[0].to(output.dtype) if args[0].shape == output.shape else torch.zeros_like(output)
