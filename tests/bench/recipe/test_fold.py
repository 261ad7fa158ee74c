"""Folding BatchNorm: exact where it happens, and left alone where it would not be the same function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from applying import applied, output_of
from torch import Tensor, nn

from redline.bench.recipe.plain import foldable_batchnorms
from redline.model.errors import BenchError

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


def seasoned(model: nn.Module) -> nn.Module:
    """BatchNorms as training leaves them: statistics, scales and shifts of their own."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for name, tensor in module.state_dict().items():
                if tensor.is_floating_point():
                    tensor.uniform_(0.1 if name == "running_var" else -1, 2)
    return model.eval()


class Block(nn.Module):
    """A convolution and a BatchNorm, joined as the function says."""

    def __init__(
        self, join: Callable[[Any, Tensor], Tensor] = lambda own, x: own.norm(own.convolution(x)).relu()
    ) -> None:
        super().__init__()
        self.convolution, self.norm, self.join = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(self, x)


def uses_output_twice(own: Any, x: Tensor) -> Tensor:
    y = own.convolution(x)
    return own.norm(y) + y


def shares_the_weight() -> nn.Module:
    block = Block(lambda own, x: own.other(own.norm(own.convolution(x))))
    block.other = nn.Conv2d(4, 4, 3, padding=1)
    block.other.weight = block.convolution.weight
    return block


def is_listened_to() -> nn.Module:
    block = Block()
    block.convolution.register_forward_hook(lambda module, inputs, output: output * 2)
    return block


class OwnForward(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


LEFT_ALONE: list[Callable[[], nn.Module]] = [
    lambda: Block(lambda own, x: own.norm(own.convolution(own.convolution(x)))),
    lambda: Block(lambda own, x: own.norm(own.norm(own.convolution(x)))),
    lambda: Block(uses_output_twice),
    lambda: Block(lambda own, x: own.norm(own.convolution(x).add_(1))),
    lambda: Block(lambda own, x: own.norm(own.convolution(x)) * own.convolution.weight.sum()),
    shares_the_weight,
    is_listened_to,
    lambda: nn.Sequential(nn.Conv2d(4, 4, 3), OwnForward(4)),
    lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, track_running_stats=False)),
    lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4)),
]
LAYERS = {
    "plain": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), (2, 4, 8, 8)),
    "no bias": (nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), (2, 4, 8, 8)),
    "grouped": (nn.Conv2d(4, 8, 3, groups=2), nn.BatchNorm2d(8), (2, 4, 8, 8)),
    "depthwise": (nn.Conv2d(4, 4, 3, groups=4, bias=False), nn.BatchNorm2d(4), (2, 4, 8, 8)),
    "not affine": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), (2, 4, 8, 8)),
    "1d": (nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), (2, 4, 8)),
    "3d": (nn.Conv3d(4, 6, 3), nn.BatchNorm3d(6), (2, 4, 5, 6, 7)),
    "transposed": (nn.ConvTranspose2d(4, 6, 3, stride=2), nn.BatchNorm2d(6), (2, 4, 8, 8)),
}  # fmt: skip


@pytest.mark.parametrize("kind", LAYERS)
def test_a_folded_layer_says_what_the_two_said(kind: str) -> None:
    layer, norm, shape = copy.deepcopy(LAYERS[kind])
    model, x = seasoned(nn.Sequential(layer, norm, nn.ReLU())), torch.randn(shape)
    expected = model(x).detach()
    setup = applied("fold-bn", model, x)
    assert isinstance(setup.workload.model[1], nn.Identity)
    torch.testing.assert_close(output_of(setup), expected, rtol=1e-4, atol=1e-5)
    assert setup.notes == {"fold-bn": "folded 1 of 1 BatchNorm layers"}


@pytest.mark.parametrize("kind", LEFT_ALONE)
def test_what_would_not_stay_the_same_function_is_left_alone(kind: Callable[[], nn.Module]) -> None:
    model = seasoned(kind())
    assert foldable_batchnorms(model) == []
    with pytest.raises(BenchError, match="fold-bn: no BatchNorm takes what one convolution") as caught:
        applied("fold-bn", model, torch.randn(2, 4, 8, 8))
    assert caught.value.kind == "unsupported"


def test_only_what_can_be_folded_is() -> None:
    model = seasoned(nn.Sequential(Block(), Block(uses_output_twice), Block()))
    x = torch.randn(2, 4, 8, 8)
    expected = model(x).detach()
    setup = applied("fold-bn", model, x)
    assert setup.notes["fold-bn"] == "folded 2 of 3 BatchNorm layers"
    torch.testing.assert_close(output_of(setup), expected, rtol=1e-4, atol=1e-5)


def decides(own: Any, x: Tensor) -> Tensor:
    return own.norm(own.convolution(x)) if x.sum() > 0 else x


def test_a_model_that_cannot_be_traced_is_refused_with_the_place() -> None:
    place = r"torch.fx cannot trace the model: TraceError: .* \(\S*test_fold.py:\d+ in decides\)"
    with pytest.raises(BenchError, match=place):
        applied("fold-bn", Block(decides), torch.randn(2, 4, 8, 8))


def test_tracing_leaves_nothing_on_the_model() -> None:
    model = seasoned(Block(lambda own, x: own.norm(own.convolution(x)) + torch.ones(4, 1, 1)))
    before = set(vars(model)), model.state_dict().keys()
    assert foldable_batchnorms(model) == [("convolution", "norm")]
    assert (set(vars(model)), model.state_dict().keys()) == before


@pytest.mark.slow
@pytest.mark.parametrize(("name", "folded"), [("resnet18", 20), ("mobilenet_v3_small", 34), ("densenet121", 59)])
def test_real_networks_are_folded_as_far_as_they_can_be(name: str, folded: int) -> None:
    from torchvision.models import get_model

    assert len(foldable_batchnorms(get_model(name, weights=None).eval())) == folded
