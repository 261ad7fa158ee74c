"""Torch's own encoder: its fast path for inference, and positions that a mask of padding hides."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from applying import applied, code_of, judged, output_of, workload_of
from torch import Tensor, nn

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.base import OFF, without_fast_path
from redline.bench.recipe.compose import apply_recipe
from redline.bench.recipe.numerics import OutputReference
from redline.bench.workload.step import InferenceStep
from redline.model.spec import Recipe

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
LENGTHS = torch.tensor([3, 5, 8, 8])
EAGER = "compile:backend=eager"


class Padded(nn.Module):
    """An encoder over sequences of different lengths, and what is made of its output."""

    def __init__(self, after: Callable[[Tensor, Tensor], Tensor] = lambda out, mask: out) -> None:
        super().__init__()
        with warnings.catch_warnings(action="ignore"):
            layer = nn.TransformerEncoderLayer(16, 4, 32, activation="gelu", batch_first=True)
            self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(16, 5)
        self.after = after

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.arange(x.shape[1])[None] >= LENGTHS[:, None]
        return self.after(self.head(self.encoder(x, src_key_padding_mask=mask)), mask)


def mean_of_all(out: Tensor, mask: Tensor) -> Tensor:
    return out.mean(1)


def mean_of_what_counts(out: Tensor, mask: Tensor) -> Tensor:
    return out.masked_fill(mask[:, :, None], 0).sum(1)


def inputs() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 8, 16)


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return model().eval()


@pytest.mark.parametrize("recipe", [EAGER, "amp-bf16", "bf16", "sdpa:math"])
def test_positions_that_the_mask_hides_are_not_compared(recipe: str) -> None:
    """Compiled and under autocast they hold other numbers: every such recipe was rejected with an error of 1.3."""
    found = judged(recipe, seeded(Padded), inputs())
    assert found.passed, found.reason


def test_what_is_not_compared_is_told() -> None:
    workload = workload_of(seeded(Padded), inputs())
    OutputReference.of(workload, CpuDevice(), "fp32", seed=0)
    assert [each.code for each in workload.notes] == ["masked-positions"]


@pytest.mark.parametrize("number", [0, 2])
def test_a_fault_at_a_position_that_counts_is_caught(number: int) -> None:
    workload, device = workload_of(seeded(Padded), inputs()), CpuDevice()
    reference = OutputReference.of(workload, device, "fp32", seed=0)
    setup = apply_recipe(Recipe.parse(EAGER), workload, device)
    plain = setup.model

    def faulty(x: Tensor) -> Tensor:
        out = plain(x).clone()
        out[0, number] += 1
        return out

    setup.model = faulty
    assert not reference.judge(InferenceStep(setup), setup).passed


@pytest.mark.parametrize(
    ("after", "passes"),
    [(mean_of_all, False), (mean_of_what_counts, True)],
)
def test_an_answer_that_depends_on_hidden_positions_is_compared_whole(
    after: Callable[[Tensor, Tensor], Tensor], passes: bool
) -> None:
    """The two ways of the model give two answers then, and a recipe must give the one of the model as it is."""
    workload = workload_of(seeded(lambda: Padded(after)), inputs())
    OutputReference.of(workload, CpuDevice(), "fp32", seed=0)
    assert workload.notes == []
    assert judged(EAGER, seeded(lambda: Padded(after)), inputs()).passed is passes


@pytest.mark.parametrize("recipe", [EAGER, "amp-bf16"])
def test_recipes_that_it_would_pass_by_leave_it(recipe: str) -> None:
    setup = applied(recipe, seeded(Padded), inputs())
    assert "fast path" in setup.notes
    assert not torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(True)
    assert "fast path" not in applied(recipe, nn.Linear(16, 4), inputs()).notes
    assert torch.backends.mha.get_fastpath_enabled()


def test_half_precision_by_itself_keeps_it() -> None:
    assert applied("bf16", seeded(Padded), inputs()).notes == {}
    assert torch.backends.mha.get_fastpath_enabled()


def test_training_never_takes_it() -> None:
    assert "fast path" not in applied(EAGER, Padded(), inputs(), task="train").notes
    assert OFF not in code_of(EAGER, task="train").flags


@pytest.mark.parametrize(
    ("recipe", "model", "is_on"),
    [
        (f"{EAGER}+sdpa:math", nn.Linear(2, 2), True),
        (f"{EAGER}+sdpa:math", nn.MultiheadAttention(4, 2), False),
        ("graphs", nn.MultiheadAttention(4, 2), True),
        ("graphs", Padded(), False),
        ("compile+graphs", nn.MultiheadAttention(4, 2), False),
    ],
)
def test_the_code_leaves_it_only_where_there_is_one_in_the_way(recipe: str, model: nn.Module, is_on: bool) -> None:
    """One that waits for no mask can be recorded."""
    flags = code_of(recipe, device="cuda").flags
    assert sum(OFF in flag for flag in flags) == 1
    exec("\n".join(flags), {"torch": torch, "model": model})
    assert torch.backends.mha.get_fastpath_enabled() is is_on


def test_its_layers_are_compiled_one_by_one() -> None:
    """Before torch 2.15 nothing was: torch's own modules are compiled only as parts of something else."""
    setup = applied("compile:regional,backend=aot_eager", seeded(Padded), inputs())
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = output_of(setup)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    with without_fast_path():
        assert torch.allclose(found, output_of(applied("baseline", seeded(Padded), inputs())), atol=1e-5)
