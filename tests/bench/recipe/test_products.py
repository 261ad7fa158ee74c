"""Programs in better forms: patches as products, linear layers that do the activation behind them, and weight gradients of
convolutions beside the rest of the backward.
"""

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
from redline.bench.recipe.compose import switch_choices, switches_of
from redline.bench.recipe.plain import (
    FusedActivations,
    OverlappedGradients,
    fuse_activations,
    overlap_gradients,
    patch_convolutions,
    patches_as_products,
)
from redline.bench.workload.workload import assemble
from redline.model.errors import BenchError
from redline.model.spec import Recipe, Switch, Task
from redline.model.work import Facts, LayerShare

pytestmark = [pytest.mark.usefixtures("torch_as_it_was")]


class TestPatches:
    @pytest.mark.parametrize("is_channels_last", [False, True])
    def test_give_what_the_convolution_gives_laid_out_alike(self, is_channels_last: bool) -> None:
        model, images = nn.Sequential(nn.Conv2d(3, 8, 4, 4)), torch.randn(2, 3, 17, 17)
        if is_channels_last:
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        wanted = model(images)
        assert patches_as_products(model) == 1
        found = model(images)
        torch.testing.assert_close(found, wanted)
        assert found.stride() == wanted.stride()
        torch.testing.assert_close(model(images[0]), wanted[0])  # one item without a batch

    def test_of_unequal_sides_and_without_a_bias(self) -> None:
        model, images = (
            nn.Sequential(nn.Conv2d(2, 5, (2, 3), (2, 3), padding="valid", bias=False)),
            torch.randn(1, 2, 8, 9),
        )
        wanted = model(images)
        assert patches_as_products(model) == 1
        torch.testing.assert_close(model(images), wanted)

    @pytest.mark.parametrize(
        "layer",
        [
            nn.Conv2d(4, 8, 3, 2),
            nn.Conv2d(4, 8, 2, 2, padding=1),
            nn.Conv2d(4, 8, 2, 2, groups=2),
            nn.Conv2d(4, 8, 2, 2, dilation=2),
            nn.Conv2d(4, 8, 1, 1),
            nn.ConvTranspose2d(4, 8, 2, 2),
        ],
        ids=str,
    )
    def test_other_convolutions_stay_as_they_are(self, layer: nn.Module) -> None:
        assert patch_convolutions(nn.Sequential(layer)) == []


class Activated(nn.Module):
    """Two activations right behind a linear layer, and three that are not, or cannot be joined with it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.shared = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 8)
        self.unbiased = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.gelu(self.first(x))).relu()
        x = F.relu(self.unbiased(x))
        y = self.shared(F.gelu(x + 1))
        return torch.relu(y) + y


def compiled(model: nn.Module, fused: FusedActivations) -> Any:
    """Through the pass and then eagerly, as nothing else of a compiler is in question here."""

    def backend(program: torch.fx.GraphModule, _: Any) -> Any:
        fused.change(program.graph)
        program.graph.lint()
        program.recompile()
        return program.forward

    return torch.compile(model, backend=backend)


def joined(model: nn.Module, fused: FusedActivations, x: Tensor) -> int:
    """How many activations the pass joined with their layers, once the answers have been compared."""
    with torch.inference_mode():
        torch.testing.assert_close(compiled(model, fused)(x), model(x), atol=1e-3, rtol=1e-3)
    return fused.changed


def passing(program: torch.fx.GraphModule, _: Any) -> Any:
    """A compiler that runs the pass inductor is set to run, and nothing else."""
    from torch._inductor import config

    config.pre_grad_custom_pass(program.graph)  # type: ignore[operator, misc]
    return program.forward


class TestFusedLinear:
    def test_joins_what_stands_right_behind_a_linear_layer_and_nothing_else(self) -> None:
        fused, model, x = FusedActivations(), Activated().eval(), torch.randn(2, 3, 8)
        assert joined(model, fused, x) == 2

    @pytest.mark.parametrize("activation", [nn.ReLU(), nn.ReLU(inplace=True), nn.GELU(), nn.GELU("tanh")], ids=str)
    def test_knows_both_activations_in_any_form(self, activation: nn.Module) -> None:
        fused, model, x = FusedActivations(), nn.Sequential(nn.Linear(8, 4), activation).eval(), torch.randn(5, 8)
        assert joined(model, fused, x) == 1

    def test_leaves_alone_what_autocast_casts_and_what_has_no_rows(self) -> None:
        fused, model = FusedActivations(), nn.Sequential(nn.Linear(8, 4), nn.ReLU()).eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            compiled(model, fused)(torch.randn(5, 8))
        with torch.inference_mode():
            compiled(model, fused)(torch.randn(8))
        assert fused.changed == 0

    @pytest.mark.slow
    def test_inductor_runs_it_once_it_is_told_to(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
        fused, model, x = fuse_activations(), nn.Sequential(nn.Linear(8, 4), nn.GELU()).eval(), torch.randn(5, 8)
        with torch.inference_mode():
            torch.testing.assert_close(torch.compile(model, dynamic=False)(x), model(x), atol=1e-3, rtol=1e-3)
        assert fused.changed == 1

    def test_a_program_in_which_nothing_was_joined_is_not_timed_under_its_name(self) -> None:
        after: list[Any] = []
        setup: Any = SimpleNamespace(after_first_call=after, notes={})
        (switch,) = switches_of(Recipe.parse("fused-linear"), "infer")
        switch.apply(setup)
        after[0]()  # no graph was looked at: the program came out of a cache, where another process put it
        torch.compile(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), backend=passing)(torch.randn(2, 2))
        with pytest.raises(BenchError, match=r"torch\.compile saw no ReLU or GELU right behind a linear layer"):
            after[0]()

    def test_the_written_code_joins_them_too(self) -> None:
        code = code_of("fused-linear+compile")
        names: dict[str, Any] = {"torch": torch}
        exec("\n".join([*code.imports, *code.helpers, "fused = fuse_activations()"]), names)
        model, x = Activated().eval(), torch.randn(2, 3, 8)
        assert joined(model, names["fused"], x) == 2


SHARED = LayerShare(calls=4, share=0.5)


@pytest.mark.parametrize(
    ("name", "task", "model", "seen", "told"),
    [
        ("fused-linear", "infer", nn.Linear(4, 4), Facts(), "no ReLU or GELU stands right behind a linear layer with a bias"),
        ("fused-linear", "infer", nn.Linear(4, 4), Facts(activated=SHARED), None),
        ("patch-products", "infer", nn.Conv2d(3, 8, 4, 4), Facts(layers={"convolution": SHARED}), None),
        ("overlap-gradients", "train", nn.Conv2d(3, 8, 4), Facts(layers={"convolution": SHARED}), None),
        ("overlap-gradients", "train", nn.Conv2d(3, 8, 4), Facts(layers={"convolution": LayerShare(calls=1, share=0.5)}),
         "it has too few convolutions"),
        ("overlap-gradients", "train", nn.Linear(4, 4), Facts(), "no convolution runs in this model"),
    ],
)  # fmt: skip
def test_relevance_follows_from_what_ran(
    name: str, task: Task, model: nn.Module, seen: Facts, told: str | None
) -> None:
    assert SWITCHES.get(name)(Switch(name=name), task).irrelevance(model, seen) == told


def test_an_activation_behind_a_linear_layer_is_seen() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(512, 256), nn.GELU(), nn.Tanh(), nn.ReLU())
    workload = assemble(model, ((torch.randn(8, 3, 32, 32),), {}), task="infer", source="test", identity="test", seed=0)
    activated = facts_of(workload, CpuDevice(), "sgd", seed=0).activated
    assert activated is not None
    assert activated.calls == 1
    assert 0 < activated.share < 1


def test_combined_kernels_are_doubted_where_random_numbers_are_drawn() -> None:
    facts = Facts(draws_random_numbers=True)
    choices = {each.switch: each for each in switch_choices(nn.Linear(2, 2), CpuDevice(), "train", facts)}
    assert choices["compile:combine"].is_doubtful
    assert choices["compile:coordinate-descent"].is_doubtful
    assert not choices["compile"].is_doubtful
    (switch,) = switches_of(Recipe.parse("compile:coordinate-descent,combo_kernels=false"), "train")
    assert switch.settings["options"] == {"coordinate_descent_tuning": True, "combo_kernels": False}  # type: ignore[attr-defined]


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


def test_the_written_code_moves_them_too() -> None:
    code = code_of("overlap-gradients+compile", "train")
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join([*code.imports, *code.helpers, "overlapped = overlap_gradients()"]), names)
    model, images = small(), torch.randn(2, 4, 8, 8)
    assert_equal_gradients(model, names["overlapped"], images)
    assert names["overlapped"].changed == 3
