"""The numerics check lets sound recipes pass and catches wrong ones, on weights that are random."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchvision
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import planted_faults

from redline.analyze.trust import error_text
from redline.bench.device.cpu import CpuDevice
from redline.bench.environment import remember_flags
from redline.bench.recipe.compose import apply_recipe, number_format_of
from redline.bench.recipe.judging import (
    LARGEST_TOLERANCE,
    SMALLEST_LOSS_TOLERANCE,
    SMALLEST_TOLERANCE,
    TOLERANCE_OVER_FLOOR,
    judged,
)
from redline.bench.recipe.numerics import LossReference, OutputReference
from redline.bench.recipe.outputs import Difference, path_difference
from redline.bench.recipe.rounding import (
    FP32_PERTURBATION,
    rounded_inputs,
    rounded_tensor,
    rounded_weights,
    unchanged_afterwards,
)
from redline.bench.workload.build import build_workload
from redline.bench.workload.signal import give_signal
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep
from redline.bench.workload.workload import Workload, assemble
from redline.record import Numerics
from redline.spec import Recipe, Task, WorkloadSpec

SAMPLE = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "vit_b_32", "convnext_tiny")
LOSS_STEPS = 20

Plant = Callable[[Setup, TrainingStep], None]


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    restore = remember_flags()
    # Two threads that wait for each other on a busy machine take ten times as long as one.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    restore()


def workload_of(model: nn.Module, *inputs: Any, task: Task = "infer") -> Workload:
    return assemble(model, (inputs, {}), task=task, source="test", identity="test", seed=0)


def named(model: str, **options: Any) -> Workload:
    workload = build_workload(WorkloadSpec(model=model, **options), seed=0)
    give_signal(workload)
    return workload


def copied(workload: Workload) -> Workload:
    return replace(workload, model=copy.deepcopy(workload.model))


def judge(recipe: str, workload: Workload, reference: OutputReference | None = None) -> Numerics:
    parsed, device = Recipe.parse(recipe), CpuDevice()
    if reference is None:
        reference = OutputReference.of(workload, device, number_format_of(parsed, "infer"), seed=0)
    setup = apply_recipe(parsed, copied(workload), device)
    return reference.judge(InferenceStep(setup), setup)


def judge_training(recipe: str, workload: Workload, plant: Plant | None = None, steps: int = LOSS_STEPS) -> Numerics:
    parsed, device = Recipe.parse(recipe), CpuDevice()
    reference = LossReference.of(workload, device, number_format_of(parsed, "train"), 0, steps, "sgd")
    setup = apply_recipe(parsed, copied(workload), device)
    step = TrainingStep(setup, "sgd")
    if plant:
        plant(setup, step)
    return reference.judge(step, setup)


# Inference, on real architectures


@pytest.mark.slow
@pytest.mark.parametrize("model", SAMPLE)
def test_sound_recipes_pass_and_planted_faults_are_caught(model: str) -> None:
    workload = named(model, batch=2, image_size=64)
    device = CpuDevice()
    for number_format in ("fp32", "fp16", "bf16"):
        reference = OutputReference.of(workload, device, number_format, seed=0)
        cast = "" if number_format == "fp32" else number_format
        if cast:
            sound = judge(cast, workload, reference)
            assert sound.passed, (model, sound)
            assert not sound.degenerate
            assert 0 < sound.rel_l2 <= sound.tolerance < 1
        for fault in planted_faults.FAULTS:
            wrong = judge("+".join(filter(None, (cast, fault))), workload, reference)
            assert not wrong.passed, (model, cast, fault, wrong)
            assert wrong.reason
            assert wrong.finite == (fault != "fault-returns-nan")


@pytest.mark.slow
def test_the_zero_head_of_a_vit_is_handled() -> None:
    raw = build_workload(WorkloadSpec(model="vit_b_32", batch=2, image_size=64), seed=0)
    device = CpuDevice()
    assert OutputReference.of(raw, device, "bf16", 0).as_numerics().degenerate, "as torchvision makes it: all zero"
    notes = give_signal(raw)
    assert any("heads.head.weight" in str(each) for each in notes)
    assert not OutputReference.of(raw, device, "bf16", 0).as_numerics().degenerate
    numerics = judge("bf16", raw)
    assert numerics.passed
    assert 0 < numerics.rel_l2 < 0.1


# Inference, on models whose truth is known


class Constant(nn.Linear):
    """Its answer has nothing to do with the question."""

    def forward(self, input: Tensor) -> Tensor:
        return self.bias.expand(input.shape[0], -1)


class Hardly(nn.Linear):
    """A large constant and, some digits below, an answer."""

    def __init__(self, share: float) -> None:
        super().__init__(8, 4)
        self.share = share

    def forward(self, input: Tensor) -> Tensor:
        return 1.0 + self.share * super().forward(input)


class NotFinite(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) / 0.0 * 0.0


def test_a_model_that_ignores_its_input_has_nothing_to_judge_by() -> None:
    for recipe in ("bf16", "fault-ignores-input"):
        numerics = judge(recipe, workload_of(Constant(8, 4), torch.randn(2, 8)))
        assert numerics.degenerate
        assert not numerics.passed
        assert numerics.reason.code == "no-signal"


def test_an_output_that_hardly_moves_is_judged_by_what_moves() -> None:
    """Of the whole output the error would be one in a thousand; of what depends on the input it is everything."""
    workload = workload_of(Hardly(1e-3), torch.randn(2, 8))
    wrong = judge("fault-ignores-input", workload)
    assert not wrong.degenerate
    assert not wrong.passed
    assert wrong.rel_l2 > 0.5


def test_a_signal_finer_than_the_number_format_cannot_be_judged() -> None:
    """Two weights that differ in the fourth digit, of which bf16 has three."""

    class Cancels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(1 + 1e-3 * torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * (self.weight - 1)

    numerics = judge("bf16", workload_of(Cancels(), torch.randn(2, 8)))
    assert numerics.degenerate
    assert not numerics.passed
    assert "bf16 cannot resolve this model's signal: rounding alone moves it by 1" in str(numerics.reason)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: (torch.Generator().manual_seed(0), lambda own, x: torch.randn(x.shape, generator=own)),
        lambda: (np.random.default_rng(0), lambda own, x: torch.from_numpy(own.standard_normal(x.shape)).to(x)),
        lambda: (np.random.RandomState(0), lambda own, x: torch.from_numpy(own.randn(*x.shape)).to(x)),
        lambda: (random.Random(0), lambda own, x: own.gauss(0, 1)),
    ],
)
def test_random_numbers_of_a_generator_of_its_own_are_the_same_ones_each_time(draw: Callable[[], Any]) -> None:
    class Noisy(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.own, self.draw = draw()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.draw(self.own, x)

    model = Noisy()
    before = model.draw(model.own, torch.ones(1))
    model.own = draw()[0]
    verdict = judge("bf16", workload_of(model, torch.randn(4, 8)))
    assert verdict.passed, verdict.reason
    assert verdict.floor is not None
    assert verdict.floor < 0.1
    assert torch.equal(torch.as_tensor(model.draw(model.own, torch.ones(1))), torch.as_tensor(before)), "left alone"


def test_a_model_that_answers_otherwise_each_time_is_not_blamed_on_the_number_format() -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + 10 * self.calls

    verdict = judge("bf16", workload_of(Counts(8, 8), torch.randn(4, 8)))
    assert not verdict.passed
    assert verdict.reason is not None
    assert verdict.reason.code == "not-repeatable"


@pytest.mark.parametrize(
    ("dtype", "told"), [(torch.float64, "fp64"), (torch.float32, "fp32"), (torch.bfloat16, "bf16")]
)
def test_the_reference_says_what_it_computes_in(dtype: torch.dtype, told: str) -> None:
    workload = workload_of(nn.Linear(8, 8).to(dtype), torch.randn(4, 8, dtype=dtype))
    numerics = OutputReference.of(workload, CpuDevice(), "fp32", seed=0).as_numerics()
    assert error_text(numerics) == told
    assert told in str(numerics.reason)


def test_a_reference_that_is_not_finite_lets_nothing_pass() -> None:
    workload = workload_of(NotFinite(8, 4), torch.randn(2, 8))
    baseline = OutputReference.of(workload, CpuDevice(), "fp32", 0).as_numerics()
    assert not baseline.passed
    assert not baseline.finite
    assert str(baseline.reason) == "the fp32 output is not finite"
    assert baseline.rel_l2 is None, "records hold no NaN"
    numerics = judge("fp16", workload)
    assert not numerics.passed
    assert numerics.rel_l2 is None
    assert numerics.floor is None


def test_the_baseline_is_its_own_reference() -> None:
    baseline = OutputReference.of(named("simple_cnn", batch=2), CpuDevice(), "fp32", 0).as_numerics()
    assert baseline.method == "reference"
    assert baseline.passed
    assert (baseline.rel_l2, baseline.top1_agreement) == (0.0, 1.0)
    assert baseline.cosine == pytest.approx(1.0)


def test_a_recipe_in_fp32_is_held_to_fp32() -> None:
    """Another layout may change the order of sums and no more: an error of one in ten thousand is caught."""
    workload = named("simple_cnn", batch=2)
    sound = judge("channels-last", workload)
    assert sound.passed
    assert sound.tolerance < 1e-4
    reference = OutputReference.of(workload, CpuDevice(), "fp32", 0)
    wrong = copied(workload)
    with torch.no_grad():
        wrong.model.head.weight.mul_(1 + 1e-4)
    setup = apply_recipe(Recipe.parse("channels-last"), wrong, CpuDevice())
    assert not reference.judge(InferenceStep(setup), setup).passed


def test_an_output_built_otherwise_is_told_apart() -> None:
    workload = workload_of(nn.Linear(8, 4), torch.randn(2, 8))
    reference = OutputReference.of(workload, CpuDevice(), "fp32", 0)
    setup = apply_recipe(Recipe.parse("baseline"), copied(workload), CpuDevice())
    model = setup.model
    setup.model = lambda x: (model(x), model(x))
    numerics = reference.judge(InferenceStep(setup), setup)
    assert not numerics.passed
    assert numerics.reason.code == "other-structure"
    setup.model = lambda x: model(x)[:, :-1]
    assert not reference.judge(InferenceStep(setup), setup).passed


def test_every_part_of_a_structured_output_counts() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 4), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"left": self.left(x), "right": self.right(x), "loss": self.left(x).mean()}

    workload = workload_of(TwoHeads(), torch.randn(2, 8))
    assert judge("bf16", workload).passed
    reference = OutputReference.of(workload, CpuDevice(), "fp32", 0)
    for head in ("left", "right"):
        wrong = copied(workload)
        nn.init.normal_(getattr(wrong.model, head).weight)
        setup = apply_recipe(Recipe.parse("baseline"), wrong, CpuDevice())
        assert not reference.judge(InferenceStep(setup), setup).passed


# Floors, tolerances and distances


def difference_of(rel_l2: float, *, finite: bool = True, degenerate: bool = False) -> Difference:
    return Difference(rel_l2=rel_l2, cosine=None, top1_agreement=None, finite=finite, degenerate=degenerate)


@pytest.mark.parametrize(
    ("floor", "tolerance"),
    [
        (0.0, SMALLEST_TOLERANCE),
        (1e-9, SMALLEST_TOLERANCE),
        (1e-3, TOLERANCE_OVER_FLOOR * 1e-3),
        (0.1, 0.4),
        (0.4, LARGEST_TOLERANCE),
    ],
)
def test_the_tolerance_is_four_floors_within_bounds(floor: float, tolerance: float) -> None:
    just_within, just_above = (
        judged(difference_of(tolerance), floor, "fp16"),
        judged(difference_of(tolerance * 1.01), floor, "fp16"),
    )
    assert just_within.tolerance == pytest.approx(tolerance)
    assert just_within.passed
    assert just_within.reason.code == "within-tolerance"
    assert not just_above.passed
    assert just_above.reason.code == "above-tolerance"


@pytest.mark.parametrize("floor", [0.51, 3.0, math.inf, math.nan])
def test_a_floor_too_high_judges_nothing(floor: float) -> None:
    verdict = judged(difference_of(0.0), floor, "bf16")
    assert not verdict.passed
    assert verdict.degenerate
    assert verdict.floor == (floor if math.isfinite(floor) else None)


def test_neither_infinity_nor_silence_passes() -> None:
    assert not judged(difference_of(0.0, finite=False), 1e-3, "fp16").passed
    assert not judged(difference_of(0.0, degenerate=True), 1e-3, "fp16").passed
    infinite = judged(difference_of(math.inf), 1e-3, "fp16")
    assert not infinite.passed
    assert infinite.rel_l2 is None


def test_paths_are_compared_over_how_far_they_came() -> None:
    path = [3.0, 2.0, 1.0]
    assert path_difference(path, path) == 0.0
    assert path_difference([3.0, 3.0, 3.0], path) == pytest.approx(1.0), "one that never moves is off by all of it"
    assert path_difference([3.0, math.nan, 1.0], path) == math.inf
    assert path_difference([1.0, 1.0], [2.0, 2.0]) == math.inf, "a reference that does not move cannot be met"


# Training


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
    setup.workload.loss = lambda output: 0.5 * right(output)


def steps_half_as_far(setup: Setup, step: TrainingStep) -> None:
    for group in step._optimizer.param_groups:
        group["lr"] /= 2


def spoils_the_loss(setup: Setup, step: TrainingStep) -> None:
    right = setup.workload.loss
    setup.workload.loss = lambda output: right(output) * torch.nan


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
    assert LossReference.of(workload, CpuDevice(), "fp32", 0, 2, "sgd").seed_floor is None


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
    reference = LossReference.of(workload, CpuDevice(), "fp32", 0, LOSS_STEPS, "sgd")
    assert reference.seed_floor > reference.floor
    assert judge_training("baseline", workload, other_random_order).passed


@pytest.mark.parametrize("seed", range(4))
def test_a_loss_of_ones_own_is_told_in_the_models_bits_and_that_is_allowed_for(seed: int) -> None:
    """Over a few steps a loss hardly moves by more than bf16 can tell."""
    torch.manual_seed(seed)
    workload = workload_of(nn.Linear(16, 10), torch.randn(6, 16), task="train")
    workload.loss = lambda output: output.pow(2).mean()
    assert judge_training("bf16", workload, steps=5).passed
    assert judge_training("fp16", workload, steps=5).passed
    assert not judge_training("bf16", workload, never_steps, steps=5).passed


def test_a_loss_told_in_too_few_bits_is_what_hides_the_signal_and_not_the_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 128))
    workload = workload_of(model, torch.randn(32, 256), task="train")
    workload.loss = lambda output: output.pow(2).mean()
    verdict = judge_training("amp-bf16", workload, steps=5)
    assert not verdict.passed
    assert "the loss comes in 16 bits" in str(verdict.reason)
    assert "loss(output.float())" in str(verdict.reason)
    workload.loss = lambda output: output.float().pow(2).mean()
    assert judge_training("amp-bf16", workload, steps=5).passed


def test_the_reference_leaves_the_model_as_it_was() -> None:
    workload = trains()
    before = {name: value.clone() for name, value in workload.model.state_dict().items()}
    LossReference.of(workload, CpuDevice(), "bf16", 0, 3, "adamw")
    after = workload.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(parameter.grad is None for parameter in workload.model.parameters())


def test_a_baseline_whose_loss_is_not_finite_does_not_pass() -> None:
    workload = trains()
    workload.loss = lambda output: output.sum() * torch.nan
    baseline = LossReference.of(workload, CpuDevice(), "fp32", 0, 3, "sgd").as_numerics()
    assert not baseline.passed
    assert baseline.losses == (None, None, None)


# Rounding


def tf32_by_numpy(values: np.ndarray) -> np.ndarray:
    """Ten bits behind the leading one, halves away from zero, computed in double precision."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    steps = np.floor(np.abs(mantissa) * 2**11 + 0.5)
    return np.ldexp(np.copysign(steps, mantissa) / 2**11, exponent).astype(np.float32)


def test_tf32_rounding_is_what_numpy_computes() -> None:
    random = np.random.default_rng(0)
    values = (random.standard_normal(10_000) * 10.0 ** random.uniform(-30, 30, 10_000)).astype(np.float32)
    ties = np.array([1 + 2.0**-11, -1 - 2.0**-11, 1 + 3 * 2.0**-11, 2 - 2.0**-11, 0.0, 1.0, -3.5], dtype=np.float32)
    for given in (values, ties):
        found = rounded_tensor(torch.from_numpy(given), "tf32").numpy()
        np.testing.assert_array_equal(found, tf32_by_numpy(given))
        assert (np.abs(found - given) <= 2.0**-11 * np.abs(given)).all()
    assert (rounded_tensor(torch.from_numpy(values), "tf32").numpy() != values).mean() > 0.9


def test_what_is_not_a_number_stays_so() -> None:
    # Arithmetic on NVIDIA GPUs makes NaNs with every bit set, where a carry would run into the sign.
    bits = torch.tensor([0x7FFFFFFF, 0x7FC00000, 0x7F800000, -0x800000], dtype=torch.int32)
    given = bits.view(torch.float32)
    for number_format in ("fp32", "tf32", "fp16", "bf16"):
        found = rounded_tensor(given, number_format)
        assert torch.equal(torch.isnan(found), torch.tensor([True, True, False, False]))
        assert found[2:].tolist() == [math.inf, -math.inf]


@pytest.mark.parametrize(("number_format", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_rounding_keeps_the_type_and_is_idempotent(number_format: str, dtype: torch.dtype) -> None:
    given = torch.randn(1000)
    rounded = rounded_tensor(given, number_format)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, given.to(dtype).float())
    assert torch.equal(rounded_tensor(rounded, number_format), rounded)
    assert not torch.equal(rounded, given)


def test_fp32_itself_moves_by_a_few_units_in_the_last_place() -> None:
    given = torch.randn(1000)
    moved = (rounded_tensor(given, "fp32") - given).abs() / given.abs()
    assert 0 < moved.max() <= FP32_PERTURBATION * 1.2


@pytest.mark.parametrize("number_format", ["fp32", "tf32", "fp16", "bf16"])
def test_only_floating_inputs_are_rounded_and_doubles_stay_doubles(number_format: str) -> None:
    inputs = {"ids": torch.arange(5), "mask": torch.ones(5, dtype=torch.bool), "x": torch.randn(5).double()}
    rounded = rounded_inputs(inputs, number_format)
    assert rounded["ids"] is inputs["ids"]
    assert rounded["mask"] is inputs["mask"]
    assert rounded["x"].dtype == torch.float64
    assert not torch.equal(rounded["x"], inputs["x"])


@pytest.mark.parametrize("number_format", ["fp32", "tf32", "fp16", "bf16"])
def test_weights_come_back_bit_by_bit(number_format: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model(torch.randn(2, 3, 8, 8))
    before = {name: value.clone() for name, value in model.state_dict().items()}

    def look_and_break() -> None:
        with rounded_weights(model, number_format):
            during = model.state_dict()
            assert not torch.equal(during["0.weight"], before["0.weight"])
            assert not torch.equal(during["1.running_mean"], before["1.running_mean"])
            assert torch.equal(during["1.num_batches_tracked"], before["1.num_batches_tracked"])
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        look_and_break()
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_training_step_is_undone_with_its_gradients() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with unchanged_afterwards(model):
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model[0].weight.grad is None


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
