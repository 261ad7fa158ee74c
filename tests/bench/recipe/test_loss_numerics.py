"""The numerics check of training: sound steps keep the path of their loss, and wrong ones are caught."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torchvision
from applying import copied, loss_reference, named, workload_of
from torch import Tensor, nn

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import apply_recipe, number_format_of
from redline.bench.recipe.numerics import SMALLEST_LOSS_TOLERANCE
from redline.bench.workload.losses import TrainingLoss
from redline.bench.workload.step import Setup, TrainingStep
from redline.bench.workload.workload import Workload
from redline.model.record import Numerics
from redline.model.spec import Recipe

pytestmark = pytest.mark.usefixtures("one_thread")
LOSS_STEPS = 20

Plant = Callable[[Setup, TrainingStep], None]


def judge_training(recipe: str, workload: Workload, plant: Plant | None = None, steps: int = LOSS_STEPS) -> Numerics:
    parsed, device = Recipe.parse(recipe), CpuDevice()
    reference = loss_reference(workload, number_format_of(parsed, "train"), steps)
    setup = apply_recipe(parsed, copied(workload), device)
    step = TrainingStep(setup, "sgd")
    if plant:
        plant(setup, step)
    return reference.judge(step, setup)


def trains() -> Workload:
    return named("simple_cnn", task="train", batch=8, image_size=8)


class Drops(nn.Module):
    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def drops(p: float = 0.5) -> Workload:
    return workload_of(Drops(p), torch.randn(16, 16), task="train")


def never_steps(setup: Setup, step: TrainingStep) -> None:
    step._optimizer.step = lambda *args, **kwargs: None


def wrong_loss(setup: Setup, step: TrainingStep) -> None:
    right = setup.workload.loss
    setup.workload.loss = TrainingLoss(lambda output: 0.5 * right(output))


def steps_half_as_far(setup: Setup, step: TrainingStep) -> None:
    for group in step._optimizer.param_groups:
        group["lr"] /= 2


def spoils_the_loss(setup: Setup, step: TrainingStep) -> None:
    right = setup.workload.loss
    setup.workload.loss = TrainingLoss(lambda output: right(output) * torch.nan)


def other_random_order(setup: Setup, step: TrainingStep) -> None:
    """As a compiler does: the same kind of numbers, drawn in another order."""
    setup.before_step.append(lambda: torch.rand(1))


@pytest.mark.parametrize("recipe", ["channels-last", "amp-bf16", "amp", "bf16"])
def test_sound_training_keeps_its_loss_path(recipe: str) -> None:
    # A convolution's backward in fp16 takes seconds on most CPUs.
    numerics = judge_training(recipe, drops(p=0.0) if recipe == "amp" else trains())
    assert numerics.passed, numerics
    assert numerics.method == "loss-path"
    assert numerics.steps == len(numerics.losses) == len(numerics.reference_losses) == LOSS_STEPS
    assert numerics.losses[-1] < numerics.losses[0], "something was learnt"


@pytest.mark.parametrize("recipe", ["baseline", "amp-bf16"])
@pytest.mark.parametrize("plant", [never_steps, steps_half_as_far, wrong_loss, spoils_the_loss])
def test_training_gone_wrong_is_caught(recipe: str, plant: Plant) -> None:
    for workload in (trains(), drops(p=0.0)):
        numerics = judge_training(recipe, workload, plant)
        assert not numerics.passed, numerics
        assert numerics.finite == (plant is not spoils_the_loss)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_dropout_in_another_order_is_still_sound(p: float) -> None:
    workload = drops(p)
    for recipe in ("baseline", "amp-bf16"):
        same = judge_training(recipe, workload)
        other = judge_training(recipe, workload, other_random_order)
        assert same.passed
        assert same.tolerance == SMALLEST_LOSS_TOLERANCE, "with the same masks it is held to what rounding does"
        assert other.passed, other
        assert other.rel_l2 > 0.02, "the masks really were others"
        for plant in (never_steps, wrong_loss):
            assert not judge_training(recipe, workload, plant).passed


def test_a_short_path_with_dropout_still_passes_what_draws_the_same_masks() -> None:
    """A few steps are not enough to tell two seeds from two recipes, but the same masks leave nothing to doubt."""
    workload = drops()
    assert judge_training("amp-bf16", workload, steps=5).passed
    unclear = judge_training("baseline", workload, other_random_order, steps=5)
    assert not unclear.passed
    assert "another seed alone moves it" in str(unclear.reason)


def test_a_model_without_dropout_gets_no_leave_from_it() -> None:
    workload = drops(p=0.0)
    assert judge_training("baseline", workload, other_random_order).passed
    assert loss_reference(workload, "fp32", 2).seed_floor is None


@pytest.mark.parametrize(
    "thinned",
    [
        lambda x: nn.functional.dropout(x, 0.5),
        lambda x: torchvision.ops.stochastic_depth(x, 0.5, "row"),
        lambda x: x + 0.1 * torch.randn_like(x),
    ],
    ids=["functional", "stochastic-depth", "noise"],
)
def test_randomness_is_noticed_whatever_it_is_called(thinned: Callable[[Tensor], Tensor]) -> None:
    class Thinned(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(thinned(input))

    workload = workload_of(Thinned(16, 10), torch.randn(16, 16), task="train")
    reference = loss_reference(workload, "fp32", LOSS_STEPS)
    assert reference.seed_floor > reference.floor
    assert judge_training("baseline", workload, other_random_order).passed


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_of_ones_own_is_told_in_the_models_bits_and_that_is_allowed_for(seed: int) -> None:
    """Over a few steps a loss hardly moves by more than bf16 can tell."""
    torch.manual_seed(seed)
    workload = workload_of(nn.Linear(16, 10), torch.randn(6, 16), task="train")
    workload.loss = TrainingLoss(lambda output: output.pow(2).mean())
    assert judge_training("bf16", workload, steps=5).passed
    assert judge_training("fp16", workload, steps=5).passed
    assert not judge_training("bf16", workload, never_steps, steps=5).passed


def test_a_loss_told_in_too_few_bits_is_what_hides_the_signal_and_not_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 128))
    workload = workload_of(model, torch.randn(32, 256), task="train")
    workload.loss = TrainingLoss(lambda output: output.pow(2).mean())
    verdict = judge_training("amp-bf16", workload, steps=5)
    assert not verdict.passed
    assert "the loss comes in 16 bits" in str(verdict.reason)
    assert "loss(output.float())" in str(verdict.reason)
    workload.loss = TrainingLoss(lambda output: output.float().pow(2).mean())
    assert judge_training("amp-bf16", workload, steps=5).passed


def test_the_reference_leaves_the_model_as_it_was() -> None:
    workload = trains()
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    loss_reference(workload, "bf16", 3, "adamw")
    after = workload.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_a_baseline_whose_loss_is_not_finite_does_not_pass() -> None:
    workload = trains()
    workload.loss = TrainingLoss(lambda output: output.sum() * torch.nan)
    baseline = loss_reference(workload, "fp32", 3).as_numerics()
    assert not baseline.passed
    assert baseline.losses == (None, None, None)


class Crawls(nn.Module):
    """Its output is a loss that moves by this much in the first step, and faster later."""

    def __init__(self, slope: float) -> None:
        super().__init__()
        self.weight, self.slope = nn.Parameter(torch.zeros(())), slope

    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean() * 0 + 1 + self.slope * self.weight


def test_a_loss_that_hardly_moves_is_followed_for_longer() -> None:
    slow = judge_training("baseline", workload_of(Crawls(0.005), torch.randn(4, 4), task="train"), steps=5)
    assert slow.steps == 20
    assert slow.passed, slow
    still = judge_training("baseline", workload_of(Crawls(0.0), torch.randn(4, 4), task="train"), steps=5)
    assert still.degenerate
    assert str(still.reason) == "the reference carries no signal: its loss stands still"
