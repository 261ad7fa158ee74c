"""Memory layout: channels last, which convolutions on tensor cores and oneDNN prefer."""

from __future__ import annotations

import torch

from redline.bench.recipe.base import LAYOUT, SWITCHES, RecipeSwitch, Setup
from redline.bench.recipe.code import RecipeCode
from redline.spec import Task

_FORMAT_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}


@SWITCHES.register("channels-last")
class ChannelsLast(RecipeSwitch):
    name = "channels-last"
    summary = "images and convolution weights with the channel innermost"
    stage = LAYOUT
    family = "layout"

    def irrelevance(self, model: torch.nn.Module, task: Task) -> str | None:
        return None if _ranks(model) else "the model has no convolution weights to lay out anew"

    def apply(self, setup: Setup) -> None:
        for rank in _ranks(setup.workload.model):
            setup.workload.model.to(memory_format=_FORMAT_BY_RANK[rank])
        setup.change_inputs(_channels_last)

    def write(self, code: RecipeCode) -> None:
        code.model_lines.append("model = model.to(memory_format=torch.channels_last)")
        code.input_changes.append(
            "tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor"
        )


def _ranks(model: torch.nn.Module) -> set[int]:
    return {parameter.dim() for parameter in model.parameters()} & _FORMAT_BY_RANK.keys()


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    layout = _FORMAT_BY_RANK.get(tensor.dim())
    return tensor.contiguous(memory_format=layout) if layout else tensor
