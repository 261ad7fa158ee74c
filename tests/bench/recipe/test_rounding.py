"""Numbers rounded to a format, and what is undone after a model was asked."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from redline.bench.recipe.rounding import (
    FP32_PERTURBATION,
    rounded_inputs,
    rounded_tensor,
    rounded_weights,
    unchanged_afterwards,
    unchanged_buffers,
)

pytestmark = pytest.mark.usefixtures("one_thread")


class Counts(nn.Module):
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return x


@pytest.mark.parametrize("undone", [unchanged_buffers, unchanged_afterwards])
def test_a_buffer_that_a_call_replaced_is_the_one_it_was(undone: Any) -> None:
    model = Counts()
    first = model.calls
    with undone(model), torch.inference_mode():
        model(torch.ones(1, 2))
        assert model.calls == 1
    assert model.calls is first
    assert first == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("undone", [unchanged_buffers, unchanged_afterwards])
def test_torchscript_has_its_buffers_back_too(undone: Any) -> None:
    """It holds them in a thing that is no dict: no TorchScript module could be measured."""
    model: Any = torch.jit.script(nn.BatchNorm1d(2))
    with undone(model):
        model(torch.randn(8, 2))
        assert model.num_batches_tracked == 1
    assert model.num_batches_tracked == 0


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
