"""The numerics check of inference lets sound recipes pass and catches wrong ones, on weights that are random."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

import planted_faults
from applying import Model, copied, named, workload_of

from redline.analyze.trust import error_text
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.compose import apply_recipe, number_format_of
from redline.bench.recipe.difference import Difference, path_difference
from redline.bench.recipe.numerics import (
    LARGEST_TOLERANCE,
    SMALLEST_TOLERANCE,
    TOLERANCE_OVER_FLOOR,
    OutputReference,
    Reference,
)
from redline.bench.workload.build import build_workload
from redline.bench.workload.signal import give_signal
from redline.bench.workload.step import InferenceStep, Setup
from redline.bench.workload.workload import Workload
from redline.model.record import Numerics
from redline.model.spec import Recipe, WorkloadSpec

SAMPLE = ("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "squeezenet1_1", "vit_b_32", "convnext_tiny")
pytestmark = pytest.mark.usefixtures("one_thread")


def judge(
    recipe: str,
    workload: Workload,
    reference: OutputReference | None = None,
    change: Callable[[Setup], object] = lambda setup: None,
) -> Numerics:
    """What the check says of a recipe on a copy of the model, after something was changed about it."""
    parsed, device = Recipe.parse(recipe), CpuDevice()
    if reference is None:
        reference = OutputReference.of(workload, device, number_format_of(parsed, "infer"), seed=0)
    setup = apply_recipe(parsed, copied(workload), device)
    change(setup)
    return reference.judge(InferenceStep(setup), setup)


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


def test_a_model_that_ignores_its_input_has_nothing_to_judge_by() -> None:
    ignores = Model(lambda own, x: own.layer.bias.expand(len(x), -1), layer=nn.Linear(8, 4))
    for recipe in ("bf16", "fault-ignores-input"):
        numerics = judge(recipe, workload_of(ignores, torch.randn(2, 8)))
        assert numerics.degenerate
        assert not numerics.passed
        assert numerics.reason.code == "no-signal"


def test_an_output_that_hardly_moves_is_judged_by_what_moves() -> None:
    """Of the whole output the error would be one in a thousand; of what depends on the input it is everything."""
    hardly = Model(lambda own, x: 1.0 + 1e-3 * own.layer(x), layer=nn.Linear(8, 4))
    workload = workload_of(hardly, torch.randn(2, 8))
    wrong = judge("fault-ignores-input", workload)
    assert not wrong.degenerate
    assert not wrong.passed
    assert wrong.rel_l2 > 0.5


def test_a_signal_finer_than_the_number_format_cannot_be_judged() -> None:
    """Two weights that differ in the fourth digit, of which bf16 has three."""
    cancels = Model(lambda own, x: x * (own.weight - 1), weight=nn.Parameter(1 + 1e-3 * torch.rand(8)))
    numerics = judge("bf16", workload_of(cancels, torch.randn(2, 8)))
    assert numerics.degenerate
    assert not numerics.passed
    assert "bf16 cannot resolve this model's signal: rounding alone moves it by 1" in str(numerics.reason)


def test_a_model_that_answers_otherwise_each_time_is_not_blamed_on_the_number_format() -> None:
    class Counts(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) + 10 * self.calls

    verdict = judge("bf16", workload_of(Counts(8, 8), torch.randn(4, 8)))
    assert not verdict.passed
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
    not_finite = Model(lambda own, x: own.layer(x) / 0.0 * 0.0, layer=nn.Linear(8, 4))
    workload = workload_of(not_finite, torch.randn(2, 8))
    baseline = OutputReference.of(workload, CpuDevice(), "fp32", 0).as_numerics()
    assert not baseline.passed
    assert not baseline.finite
    assert str(baseline.reason) == "the fp32 output is not finite"
    assert baseline.rel_l2 is None, "records hold no NaN"
    numerics = judge("fp16", workload)
    assert not numerics.passed
    assert numerics.rel_l2 is None
    assert numerics.floor is None


def test_a_recipe_in_fp32_is_held_to_fp32() -> None:
    """Another layout may change the order of sums and no more: an error of one in ten thousand is caught."""

    def spoil(setup: Setup) -> None:
        setup.workload.model.head.weight.data.mul_(1 + 1e-4)

    workload = named("simple_cnn", batch=2)
    sound = judge("channels-last", workload)
    assert sound.passed
    assert sound.tolerance < 1e-4
    assert not judge("channels-last", workload, change=spoil).passed


@pytest.mark.parametrize(
    ("otherwise", "code"), [(lambda out: (out, out), "other-structure"), (lambda out: out[:, :-1], "above-tolerance")]
)
def test_an_output_built_otherwise_is_told_apart(otherwise: Callable[[Tensor], Any], code: str) -> None:
    def wrap(setup: Setup) -> None:
        model = setup.model
        setup.model = lambda x: otherwise(model(x))

    numerics = judge("baseline", workload_of(nn.Linear(8, 4), torch.randn(2, 8)), change=wrap)
    assert not numerics.passed
    assert numerics.reason.code == code


def test_every_part_of_a_structured_output_counts() -> None:
    def heads(own: Any, x: Tensor) -> dict[str, Tensor]:
        return {"left": own.left(x), "right": own.right(x), "loss": own.left(x).mean()}

    workload = workload_of(Model(heads, left=nn.Linear(8, 4), right=nn.Linear(8, 4)), torch.randn(2, 8))
    assert judge("bf16", workload).passed
    for head in ("left", "right"):
        wrong = judge(
            "baseline", workload, change=lambda setup, head=head: nn.init.normal_(getattr(setup.model, head).weight)
        )
        assert not wrong.passed


# Floors, tolerances and distances


def judged(found: Difference, floor: float, number_format: str) -> Numerics:
    return Reference(number_format=number_format, floor=floor).verdict(found)


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
    assert path_difference(path, path).rel_l2 == 0.0
    assert path_difference([3.0, 3.0, 3.0], path).rel_l2 == pytest.approx(1.0), (
        "one that never moves is off by all of it"
    )
    assert not path_difference([3.0, math.nan, 1.0], path).finite
    assert path_difference([1.0, 1.0], [2.0, 2.0]).rel_l2 == math.inf, "a reference that does not move cannot be met"
