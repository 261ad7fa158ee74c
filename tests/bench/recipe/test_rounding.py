"""What is undone after a model was asked."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from redline.bench.recipe.rounding import unchanged_afterwards, unchanged_buffers


class Counts(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("undone", [unchanged_buffers, unchanged_afterwards])
@pytest.mark.parametrize("scripted", [True, False])
def test_a_buffer_that_a_call_replaced_is_the_one_it_was(undone: object, scripted: bool) -> None:
    """TorchScript holds its buffers in a thing that is no dict."""
    model = torch.jit.script(Counts()) if scripted else Counts()
    assert callable(undone)
    with undone(model), torch.inference_mode():
        model(torch.ones(1, 2))
        assert model.calls == 1
    assert model.calls == 0
    with undone(model):
        model.calls.add_(1)
    assert model.calls == 0
