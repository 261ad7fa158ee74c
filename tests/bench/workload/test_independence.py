"""Which axis of the inputs holds items that a model treats one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from redline.bench.workload.independence import LIST, find_axes


class OneByOne(nn.Module):
    """Takes a list of pictures and returns a list of finds, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"boxes": self.layer(picture.softmax(0)), "scores": picture.softmax(0)[:, 0]} for picture in pictures]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_list_of_any_length_may_hold_them(count: int) -> None:
    torch.manual_seed(0)
    found = find_axes(OneByOne().eval(), (([torch.randn(3, 4) for _ in range(count)],), {}))
    assert isinstance(found, dict), found
    assert list(found.values()) == [LIST]


class FindsNothing(nn.Module):
    def forward(self, pictures: list[Tensor]) -> list[dict[str, Tensor]]:
        return [{"boxes": picture[:0], "scores": picture[:0, 0]} for picture in pictures]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_finds_that_are_all_alike_tell_nothing(count: int) -> None:
    """One picture is put beside another like it, and then asked for twice: the list was looked at beyond its end."""
    found = find_axes(FindsNothing(), (([torch.randn(3, 4) for _ in range(count)],), {}))
    assert found == "no axis of the inputs holds items that the model treats one by one"
