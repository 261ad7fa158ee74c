"""FLOPs against counts made by hand, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from applying import Model
from torch import Tensor, nn

from redline.bench.count.count import Task, count_work
from redline.bench.count.operators import FORMULAS
from redline.model.work import WorkCount


def summed(output: Any) -> Tensor:
    first = output[0] if isinstance(output, tuple) else output
    return first.float().sum()


def both(model: nn.Module, *args: Any) -> WorkCount:
    return count_work(Task(model=model, inputs=(args, {}), loss=summed))


def forward(model: nn.Module, *args: Any) -> WorkCount:
    return count_work(Task(model=model.eval(), inputs=(args, {})))


def calls(function: Any) -> Model:
    return Model(lambda _, *args: function(*args))


def moving(*shape: int) -> Tensor:
    """An input whose gradient is wanted too, as inside a network."""
    return torch.randn(*shape, requires_grad=True)


class TestConvolution:
    @pytest.mark.parametrize("groups", [1, 4, 32])
    def test_backward_is_twice_forward_however_many_groups(self, groups: int) -> None:
        work = both(nn.Conv2d(32, 32, 3, padding=1, groups=groups, bias=False), moving(2, 32, 10, 10))
        assert work.flops == 2 * (2 * 32 * 10 * 10) * (32 // groups * 9)
        assert work.backward_flops == 2 * work.flops

    def test_the_first_layer_needs_no_gradient_of_its_input(self) -> None:
        work = both(nn.Conv2d(3, 8, 3), torch.randn(1, 3, 10, 10))
        assert work.backward_flops == work.flops == 2 * (8 * 8 * 8) * 27

    def test_stride_dilation_and_one_or_three_dimensions(self) -> None:
        line = forward(nn.Conv1d(4, 6, 5, stride=2), torch.randn(1, 4, 21))
        assert line.flops == 2 * (6 * 9) * (4 * 5)
        cube = forward(nn.Conv3d(2, 3, 3, dilation=2), torch.randn(1, 2, 9, 9, 9))
        assert cube.flops == 2 * (3 * 5 * 5 * 5) * (2 * 27)

    def test_transposed_multiplies_per_input(self) -> None:
        work = both(nn.ConvTranspose2d(8, 6, 3, groups=2, stride=2), moving(1, 8, 5, 5))
        assert work.flops == 2 * (8 * 25) * (3 * 9)
        assert work.backward_flops == 2 * work.flops


class TestRecurrent:
    @pytest.mark.parametrize("bidirectional", [False, True])
    def test_lstm(self, bidirectional: bool) -> None:
        work = both(nn.LSTM(16, 32, 2, bidirectional=bidirectional), moving(7, 3, 16))
        directions = 2 if bidirectional else 1
        weights = directions * 4 * 32 * (16 + 32) + directions * 4 * 32 * (32 * directions + 32)
        assert work.flops == 2 * 7 * 3 * weights
        assert work.backward_flops == 2 * work.flops

    def test_gru_forward(self) -> None:
        assert forward(nn.GRU(16, 32), torch.randn(7, 3, 16)).flops == 2 * 7 * 3 * 3 * 32 * (16 + 32)

    def test_cudnn_s_layer_from_its_weights_alone(self) -> None:
        _, formula = FORMULAS["_cudnn_rnn"]
        weights = [torch.empty(128, 16), torch.empty(128, 32), torch.empty(128), torch.empty(128)]
        found = formula({"input": torch.empty(7, 3, 16), "weight": weights}, torch.empty(7, 3, 32))
        assert found == 2 * 7 * 3 * 128 * (16 + 32)


class TestAttention:
    def test_four_products_and_ten_backward(self) -> None:
        query, key = moving(2, 4, 10, 16), moving(2, 4, 30, 16)
        work = both(calls(F.scaled_dot_product_attention), query, key, moving(2, 4, 30, 16))
        assert work.flops == 4 * 2 * 4 * 10 * 30 * 16
        assert work.backward_flops == 5 * 2 * 2 * 4 * 10 * 30 * 16
        assert {one.kind for one in work.operators if one.flops and "attention" in one.name} == {"attention"}

    def test_causal_is_half(self) -> None:
        query = moving(1, 2, 64, 8)
        causal = both(Model(lambda _, q: F.scaled_dot_product_attention(q, q, q, is_causal=True)), query)
        full = both(Model(lambda _, q: F.scaled_dot_product_attention(q, q, q)), query)
        assert (causal.flops, causal.backward_flops) == (full.flops // 2, full.backward_flops // 2)

    def test_more_queries_than_keys_see_all_keys_in_the_end(self) -> None:
        _, formula = FORMULAS["_scaled_dot_product_flash_attention"]
        query, key = torch.empty(1, 1, 6, 8), torch.empty(1, 1, 4, 8)
        arguments = {"query": query, "key": key, "value": key, "is_causal": True}
        assert formula(arguments, query) == 4 * 8 * (4 * 4 // 2 + 2 * 4)

    def test_the_encoder_s_fast_path_counts_like_the_slow_one(self) -> None:
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
        tokens, width = 2 * 9, 32
        expected = 2 * tokens * (4 * width * width + 2 * width * 64) + 4 * 2 * 9 * 9 * width
        assert forward(layer, torch.randn(2, 9, 32)).flops == expected


class TestProducts:
    def test_matrix_vector_and_dot(self) -> None:
        assert forward(calls(torch.mv), torch.randn(5, 7), torch.randn(7)).flops == 2 * 5 * 7
        assert forward(calls(torch.dot), torch.randn(7), torch.randn(7)).flops == 2 * 7
        assert forward(calls(torch.addmv), torch.randn(5), torch.randn(5, 7), torch.randn(7)).flops == 2 * 5 * 7

    def test_many_products_into_one(self) -> None:
        inputs = torch.randn(4, 6), torch.randn(3, 4, 5), torch.randn(3, 5, 6)
        assert forward(calls(torch.addbmm), *inputs).flops == 2 * 3 * 4 * 5 * 6
        assert (
            forward(Model(lambda _, a, b, c: a.clone().addmm_(b, c)), torch.randn(4, 6), *_pair(4, 5, 6)).flops == 240
        )

    def test_int8(self) -> None:
        a, b = torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 24, dtype=torch.int8)
        work = forward(calls(torch._int_mm), a, b)
        assert work.flops_by_format() == {"int8": 2 * 32 * 16 * 24}

    def test_grouped(self) -> None:
        _, formula = FORMULAS["_grouped_mm"]
        tokens, experts = torch.empty(100, 16), torch.empty(4, 16, 24)
        assert formula({"self": tokens, "mat2": experts}, torch.empty(100, 24)) == 2 * 100 * 16 * 24
        flat = {"self": torch.empty(16, 100), "mat2": torch.empty(100, 24)}
        assert formula(flat, torch.empty(4, 16, 24)) == 2 * 100 * 16 * 24

    def test_einsum(self) -> None:
        work = forward(
            Model(lambda _, a, b: torch.einsum("bik,bkj->bij", a, b)), torch.randn(3, 4, 5), torch.randn(3, 5, 6)
        )
        assert work.flops == 2 * 3 * 4 * 5 * 6

    def test_under_inference_mode_what_is_made_of_others_is_taken_apart(self) -> None:
        with torch.inference_mode():
            assert forward(nn.Linear(5, 7), torch.randn(3, 5)).flops == 2 * 3 * 5 * 7

    def test_a_fourier_transform_has_its_own_line(self) -> None:
        work = forward(calls(torch.fft.fft), torch.randn(2, 64, dtype=torch.complex64))
        assert work.flops == 0
        assert work.other_flops() == 5 * 2 * 64 * 6

    def test_many_euclidean_distances_are_one_product(self) -> None:
        """With 30 vectors torch multiplies 30×(16+2) by (16+2)×40; backward is two products without the two columns."""
        work = both(calls(torch.cdist), moving(3, 30, 16), moving(3, 40, 16))
        assert work.flops == 2 * 3 * 30 * 40 * (16 + 2)
        assert work.backward_flops == 2 * (2 * 3 * 30 * 40 * 16)
        with torch.inference_mode():
            work = forward(calls(torch.cdist), torch.randn(30, 16), torch.randn(40, 16))
        assert work.flops == 2 * 30 * 40 * (16 + 2)
        assert work.uncounted == ()

    def test_few_distances_and_other_norms_are_taken_one_by_one(self) -> None:
        work = forward(Model(lambda _, a, b: torch.cdist(a, b, p=1.0)), torch.randn(30, 16), torch.randn(40, 16))
        assert (work.flops, work.other_flops()) == (0, 3 * 30 * 40 * 16)


class TestTheRest:
    def test_norms_and_elementwise_work_stand_apart(self) -> None:
        work = forward(nn.Sequential(nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 4, bias=False)), torch.randn(3, 8))
        assert work.flops == 2 * 3 * 8 * 4
        assert work.other_flops(["norm"]) == 5 * 3 * 8
        assert work.other_flops(["elementwise"]) == 3 * 8

    def test_what_nobody_can_count_is_named(self) -> None:
        work = forward(calls(torch.linalg.inv), torch.eye(4))
        assert [one.name for one in work.uncounted] == ["linalg_inv_ex"]
        assert any(one.name == "linalg_inv_ex" and one.bytes for one in work.operators)


def _pair(m: int, k: int, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(m, k), torch.randn(k, n)
