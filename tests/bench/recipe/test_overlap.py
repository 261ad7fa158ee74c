"""Weight gradients of convolutions beside the rest of the backward: which are moved, and that all gradients stay as they were."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from applying import code_of
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from redline.bench.count.facts import facts_of
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.base import SWITCHES
from redline.bench.recipe.compose import switches_of
from redline.bench.recipe.overlap import OverlappedGradients, overlap_gradients
from redline.bench.workload.workload import assemble
from redline.model.errors import BenchError
from redline.model.spec import Recipe

pytestmark = [pytest.mark.usefixtures("torch_as_it_was")]


def small(width: int = 4, **settings: Any) -> nn.Module:
    layers = [nn.Conv2d(width, width, 3, padding=1, **settings) for _ in range(4)]
    return nn.Sequential(*(each for layer in layers for each in (layer, nn.BatchNorm2d(width), nn.ReLU())))


def trained(model: nn.Module, changed: Any, *inputs: Tensor) -> list[Tensor]:
    """Gradients of a compiled step whose graphs this pass has changed, and nobody else."""

    def compiler(program: torch.fx.GraphModule, _: Any) -> Any:
        if changed is not None:
            getattr(changed, "change", changed)(program.graph)
            program.recompile()
        return make_boxed_func(program.forward)

    model = copy.deepcopy(model)
    torch._dynamo.reset()
    called: Any = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), dynamic=False)
    called(*inputs).float().square().mean().backward()
    return [weight.grad for weight in model.parameters() if weight.grad is not None]


def assert_equal_gradients(model: nn.Module, changed: Any, images: Tensor) -> None:
    torch.testing.assert_close(trained(model, changed, images), trained(model, None, images), rtol=0, atol=0)


def test_all_but_the_first_convolution_are_moved_and_every_gradient_is_the_same() -> None:
    model, images, overlapped = small(bias=False), torch.randn(2, 4, 8, 8), OverlappedGradients()
    assert_equal_gradients(model, overlapped, images)
    assert overlapped.changed == 3, "nothing runs beside the last weight gradient of a backward"


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.Conv2d(4, 4, 3, padding=1, groups=2),
        lambda: nn.Conv2d(4, 4, 3, stride=2, dilation=2, padding=2),
        lambda: nn.ConvTranspose2d(4, 4, 3, stride=2, output_padding=1),
    ],
)
@pytest.mark.parametrize("is_channels_last", [False, True])
def test_of_any_kind_of_convolution_and_layout(layer: Callable[[], nn.Module], is_channels_last: bool) -> None:
    model, images, overlapped = nn.Sequential(layer(), layer(), layer()), torch.randn(2, 4, 9, 9), OverlappedGradients()
    if is_channels_last:
        model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
    assert_equal_gradients(model, overlapped, images)
    assert overlapped.changed == 2


def test_what_is_held_in_memory_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images, overlapped = small(), torch.randn(2, 4, 8, 8), OverlappedGradients()
    seen: list[list[str]] = []

    def watched(graph: torch.fx.Graph) -> None:
        overlapped.change(graph)
        operators = (overlapped.operators.begin.default, overlapped.operators.finish.default)
        seen.append([str(node.target).split(".")[-2] for node in graph.nodes if node.target in operators])

    assert_equal_gradients(model, watched, images)
    assert seen[-1] == ["begin", "begin", "begin", "finish"]
    monkeypatch.setattr(OverlappedGradients, "HELD", 2 * images.numel() * images.element_size())
    assert_equal_gradients(model, watched, images)
    assert seen[-1] == ["begin", "finish", "begin", "finish", "begin", "finish"]


class Shared(nn.Module):
    """One weight for several convolutions, and one that a convolution makes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.maker, self.seed = nn.Conv2d(4, 4, 3, padding=1), nn.Parameter(torch.randn(4, 4, 3, 3))

    def forward(self, images: Tensor) -> Tensor:
        images = self.shared(self.shared(self.first(images)))
        made = self.maker(self.maker(self.seed))
        return F.conv2d(images, made, padding=1)


def test_a_gradient_that_the_backward_waits_for_stays_where_it_is() -> None:
    model, images, overlapped = Shared(), torch.randn(2, 4, 8, 8), OverlappedGradients()
    assert_equal_gradients(model, overlapped, images)
    assert overlapped.changed == 4, "both of the shared weight and of the maker, and not the one that they make"


def test_frozen_weights_are_left_alone() -> None:
    model, images, overlapped = small(), torch.randn(2, 4, 8, 8), OverlappedGradients()
    model.requires_grad_(False)[-2].requires_grad_(True)
    assert_equal_gradients(model, overlapped, images)
    assert overlapped.changed == 0


@pytest.mark.slow
def test_inductor_runs_it_and_finds_it_in_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model, images = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))), torch.randn(2, 4, 8, 8)

    def gradients(is_compiled: bool = True) -> list[Tensor]:
        called: Any = copy.deepcopy(model)
        torch._dynamo.reset()
        (torch.compile(called, dynamic=False) if is_compiled else called)(images).square().mean().backward()
        return [weight.grad for weight in called.parameters() if weight.grad is not None]

    expected, overlapped = gradients(is_compiled=False), overlap_gradients()
    torch.testing.assert_close(gradients(), expected)
    assert overlapped.changed == 3
    overlapped = overlap_gradients()
    torch.testing.assert_close(gradients(), expected)
    assert not overlapped.graphs, "it was found"


def test_a_program_in_which_nothing_was_moved_is_not_timed_under_its_name() -> None:
    from torch._inductor import config

    after: list[Any] = []
    setup: Any = SimpleNamespace(after_first_call=after, notes={})
    (switch,) = switches_of(Recipe.parse("overlap-gradients"), "train")
    switch.apply(setup)
    after[0]()  # no graph was looked at: the program came out of a cache, where another process put it
    changed: Any = config.post_grad_custom_post_pass
    trained(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), changed, torch.randn(2, 2))
    with pytest.raises(BenchError, match="saw no convolution with a weight gradient that can be computed apart"):
        after[0]()


def test_the_written_code_moves_them_too() -> None:
    code = code_of("overlap-gradients+compile", "train")
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join([*code.imports, *code.helpers, "overlapped = overlap_gradients()"]), names)
    model, images = small(), torch.randn(2, 4, 8, 8)
    assert_equal_gradients(model, names["overlapped"], images)
    assert names["overlapped"].changed == 3


@pytest.mark.parametrize(
    ("model", "inputs", "told"),
    [
        (small(), torch.randn(2, 4, 8, 8), None),
        (nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), torch.randn(2, 4, 8, 8), "it has too few convolutions"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4), "no convolution runs in this model"),
    ],
    ids=["four", "one", "none"],
)
def test_relevance_follows_from_what_ran(model: nn.Module, inputs: Tensor, told: str | None) -> None:
    workload = assemble(model, ((inputs,), {}), task="train", source="test", identity="test", seed=0)
    facts = facts_of(workload, CpuDevice(), "sgd", seed=0)
    switch = SWITCHES.get("overlap-gradients")(Recipe.parse("overlap-gradients").switches[0], "train")
    assert switch.irrelevance(model, facts) == told
