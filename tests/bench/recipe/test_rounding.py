"""What is undone after a model was asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.bench.recipe.rounding import unchanged_afterwards, unchanged_buffers


class Counts(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


@pytest.mark.parametrize("undone", [unchanged_buffers, unchanged_afterwards])
def test_a_buffer_that_a_call_replaced_is_the_one_it_was(undone: Any) -> None:
    model = Counts()
    first = model.calls
    with undone(model), torch.inference_mode():
        model(torch.ones(1, 2))
        assert model.calls == 1
    assert model.calls is first
    assert first == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("undone", [unchanged_buffers, unchanged_afterwards])
def test_torchscript_has_its_buffers_back_too(undone: Any) -> None:
    """It holds them in a thing that is no dict: no TorchScript module could be measured."""
    model: Any = torch.jit.script(nn.BatchNorm1d(2))
    with undone(model):
        model(torch.randn(8, 2))
        assert model.num_batches_tracked == 1
    assert model.num_batches_tracked == 0
