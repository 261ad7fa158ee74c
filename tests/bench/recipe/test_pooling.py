"""The backward of max pooling by places in windows: the same gradients, whatever the windows."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from applying import code_of
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from redline.bench.count.facts import facts_of
from redline.bench.device.cpu import CpuDevice
from redline.bench.environment import remember_flags
from redline.bench.recipe.base import SWITCHES
from redline.bench.recipe.compose import switches_of
from redline.bench.recipe.overlap import overlap_gradients
from redline.bench.recipe.plain import add_pass
from redline.bench.recipe.pooling import pool_by_places
from redline.bench.workload.workload import assemble
from redline.model.errors import BenchError, SpecError
from redline.model.spec import Recipe

pytestmark = [pytest.mark.usefixtures("torch_as_it_was")]


class Pools(nn.Module):
    """Several kinds of windows at once, so that one compilation tells of all of them."""

    WINDOWS: tuple[dict[str, Any], ...] = (
        {"kernel_size": 3, "stride": 2, "padding": 1},
        {"kernel_size": 2},
        {"kernel_size": 3, "stride": 1, "padding": 1},
        {"kernel_size": 3, "stride": 2, "ceil_mode": True},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (1, 0)},
        {"kernel_size": 2, "stride": 3},
        {"kernel_size": 4, "stride": 3, "padding": 2},
    )

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, images: Tensor) -> Tensor:
        pooled = [
            F.max_pool2d(images * (1 + place), **window) for place, window in enumerate(self.WINDOWS[: self.count])
        ]
        return torch.stack([each.sin().square().sum() for each in pooled]).sum()


class Unpools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2, return_indices=True)

    def forward(self, images: Tensor) -> Tensor:
        pooled, indices = self.pool(self.layer(images))
        return F.max_unpool2d(pooled, indices, 2)


UNSUITED = "the max pooling of this model hands out indices, or its windows are large or have gaps"


@pytest.fixture(autouse=True)
def nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else no pass would look at what another run of these tests has compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("layout", "count"),
    [(torch.contiguous_format, 1), (torch.channels_last, len(Pools.WINDOWS))],
    ids=["rows", "channels-last"],
)
def test_every_gradient_is_the_same(layout: torch.memory_format, count: int) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 13, 11).relu().to(memory_format=layout)  # relu: many maxima are shared
    plain, compiled = (images.detach().clone().requires_grad_() for _ in range(2))
    pooled = pool_by_places()
    Pools(count)(plain).backward()
    _, programs = run_and_get_code(lambda: torch.compile(Pools(count), dynamic=False)(compiled).backward())
    torch.testing.assert_close(compiled.grad, plain.grad)
    assert pooled.changed == count
    made = re.findall(r"empty_strided_cpu\(\(2, 3, 13, 11\), (\(.*?\))", programs[-1])
    assert set(made) == {str(images.stride())}, "they lie in memory as the images do"


def test_windows_with_gaps_are_left_to_the_compiler() -> None:
    pooled = pool_by_places()
    images = torch.randn(1, 2, 9, 9, requires_grad=True)
    torch.compile(lambda given: F.max_pool2d(given, 2, 2, dilation=2).sum(), dynamic=False)(images).backward()
    assert (pooled.graphs > 0, pooled.changed) == (True, 0)


def test_both_passes_stand_side_by_side_and_each_once() -> None:
    from torch._inductor import config

    pool_by_places()
    overlapped, pooled = overlap_gradients(), pool_by_places()
    held: Any = config.post_grad_custom_post_pass
    assert held.passes == (overlapped, pooled)
    assert held.uuid() == [overlapped.uuid(), pooled.uuid()]


def test_a_pass_of_somebody_else_stays() -> None:
    from torch._inductor import config

    called: list[str] = []

    class Theirs:
        def __call__(self, graph: Any) -> None:
            called.append("theirs")

        def uuid(self) -> str:
            return "theirs"

    class Ours(Theirs):
        def __call__(self, graph: Any) -> None:
            called.append("ours")

    config.post_grad_custom_post_pass = Theirs()  # type: ignore[assignment]
    add_pass(Ours())
    held: Any = config.post_grad_custom_post_pass
    held(None)
    assert called == ["theirs", "ours"]


def test_the_compiler_is_as_it_was_afterwards() -> None:
    from torch._inductor.decomposition import decompositions

    before, restore = dict(decompositions), remember_flags()
    pool_by_places()
    assert torch.ops.aten.max_pool2d_with_indices_backward.default not in decompositions
    restore()
    assert decompositions == before


def test_a_program_without_it_is_not_timed_under_its_name() -> None:
    class Setup:
        def __init__(self) -> None:
            self.after_first_call: list[Any] = []

    setup: Any = Setup()
    (switch,) = switches_of(Recipe.parse("pool-gradients"), "train")
    switch.apply(setup)
    (look,) = setup.after_first_call
    look()  # no graph was looked at: the program came out of a cache, where another process put it
    given = torch.randn(2, 2, requires_grad=True)
    torch.compile(lambda each: each.sin().sum(), dynamic=False)(given).backward()
    with pytest.raises(BenchError, match="saw no backward of max pooling that can be done so"):
        look()


def test_needs_a_compiler_that_sees_the_whole_model() -> None:
    (switch,) = switches_of(Recipe.parse("pool-gradients"), "train")
    assert not any(need.is_met({"pool-gradients"}) for need in switch.needs["train"])
    with pytest.raises(SpecError, match="compile:regional and pool-gradients exclude each other"):
        switches_of(Recipe.parse("pool-gradients+compile:regional"), "train")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2)), None),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AvgPool2d(2)), "no max pooling over images runs in this model"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.MaxPool2d(2, dilation=2)), UNSUITED),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=3), nn.MaxPool2d(6)), UNSUITED),
        (nn.Sequential(nn.MaxPool2d(2, dilation=2), nn.Conv2d(3, 4, 1), nn.MaxPool2d(2)), None),
        (Unpools(), UNSUITED),
    ],
    ids=["max", "mean", "gaps", "large", "one of two", "indices"],
)
def test_relevance_follows_from_what_ran(model: nn.Module, told: str | None) -> None:
    images = torch.randn(2, 3, 8, 8)
    workload = assemble(model, ((images,), {}), task="train", source="test", identity="test", seed=0)
    facts = facts_of(workload, CpuDevice(), "sgd", seed=0)
    switch = SWITCHES.get("pool-gradients")(Recipe.parse("pool-gradients").switches[0])
    assert switch.irrelevance(model, "train", facts) == told


def test_the_written_code_does_it_too() -> None:
    code = code_of("overlap-gradients+pool-gradients+compile", "train", device="cpu")
    assert sum("def add_pass" in helper for helper in code.helpers) == 1
    names: dict[str, Any] = {"torch": torch}
    exec("\n".join([*code.imports, *code.helpers, "pooled = pool_by_places()"]), names)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.MaxPool2d(3, 2, 1))
    images, expected = torch.randn(2, 3, 9, 9), copy.deepcopy(model)
    expected(images).square().sum().backward()
    torch.compile(model, dynamic=False)(images).square().sum().backward()
    torch.testing.assert_close(model[0].weight.grad, expected[0].weight.grad)
    assert names["pooled"].changed == 1
