"""Memory layout: channels last, which convolutions on tensor cores and oneDNN prefer."""

from __future__ import annotations

import torch

from redline.bench.recipe.base import LAYOUT, STEPS, RecipeStep, Setup
from redline.errors import BenchError

_FORMAT_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}


@STEPS.register("channels-last")
class ChannelsLast(RecipeStep):
    name = "channels-last"
    summary = "images and convolution weights with the channel innermost"
    stage = LAYOUT

    def apply(self, setup: Setup) -> None:
        ranks = {parameter.dim() for parameter in setup.workload.model.parameters()} & _FORMAT_BY_RANK.keys()
        if not ranks:
            raise BenchError("unsupported", "channels-last: the model has no convolution weights to lay out anew")
        for rank in ranks:
            setup.workload.model.to(memory_format=_FORMAT_BY_RANK[rank])
        setup.change_inputs(_channels_last)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    layout = _FORMAT_BY_RANK.get(tensor.dim())
    return tensor.contiguous(memory_format=layout) if layout else tensor
