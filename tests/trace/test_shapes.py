"""FLOPs and bytes of operators from their shapes, and collectives: each against a count by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from kineto import GEMM, REDUCE, TraceMaker

from redline.analyze.profile import Profile, profile_of
from redline.trace.columns import Shape
from redline.trace.shapes import work_of

US = 1000
BF16, FP32, LONG = "c10::BFloat16", "float", "long int"


def shape(dims: list[Any], types: str | list[str], values: list[str] | None = None) -> Shape:
    """`types`: of each argument, or of all tensors."""
    listed = [types if size else "Scalar" for size in dims] if isinstance(types, str) else types
    return Shape(*(msgspec.json.encode(one).decode() for one in (dims, listed, values or [])))


QKV = [[2, 16, 128, 64], [2, 4, 256, 64], [2, 4, 256, 64]]
"""16 query heads share 4 of keys and values."""
PAIRS = 2 * 16 * 128 * 256
CAUSAL_PAIRS = 2 * 16 * (128 * 128 // 2)
ELEMENTS = [2 * 16 * 128 * 64, 2 * 4 * 256 * 64, 2 * 4 * 256 * 64]
INSIDE = [[2, 128, 16, 64], [2, 256, 4, 64], [2, 256, 4, 64]]


def attention(*more: str) -> list[str]:
    return ["", "", "", *more]


CASES: dict[str, tuple[str, Shape, int, int]] = {
    "a strided convolution in groups": (
        "aten::cudnn_convolution",
        shape([[2, 8, 20, 20], [16, 4, 3, 3], [], [], [], []], FP32,
              ["", "", "[1, 1]", "[2, 2]", "[1, 1]", "2"]),
        2 * (2 * 16 * 10 * 10) * 4 * 9,
        4 * (2 * 8 * 400 + 16 * 4 * 9 + 2 * 16 * 100),
    ),
    "a transposed convolution": (
        "aten::cudnn_convolution_transpose",
        shape([[2, 8, 10, 10], [8, 16, 2, 2], [], [], [], [], []], FP32,
              ["", "", "[0, 0]", "[0, 0]", "[2, 2]", "[1, 1]", "1"]),
        2 * (2 * 8 * 100) * 16 * 4,
        4 * (2 * 8 * 100 + 8 * 16 * 4 + 2 * 16 * 400),
    ),
    "any convolution, transposed": (
        "aten::convolution",
        shape([[2, 8, 10, 10], [8, 16, 2, 2]] + [[]] * 7, FP32,
              ["", "", "", "[2, 2]", "[0, 0]", "[1, 1]", "True", "[0, 0]", "1"]),
        2 * (2 * 8 * 100) * 16 * 4,
        4 * (2 * 8 * 100 + 8 * 16 * 4 + 2 * 16 * 400),
    ),
    "both gradients of a convolution": (
        "aten::convolution_backward",
        shape([[2, 16, 10, 10], [2, 8, 10, 10], [16, 8, 3, 3]] + [[]] * 8, FP32,
              ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]),
        2 * 2 * (2 * 16 * 100) * 8 * 9,
        4 * (2 * 16 * 100 + 2 * (2 * 8 * 100) + 2 * (16 * 8 * 9)),
    ),
    "flash": (
        "aten::_flash_attention_forward",
        shape(INSIDE + [[]] * 6, BF16, attention("", "", "128", "256", "0.", "False")),
        2 * PAIRS * 128,
        2 * (sum(ELEMENTS) + ELEMENTS[0]),
    ),
    "flash, causal": (
        "aten::_scaled_dot_product_flash_attention",
        shape(QKV + [[]] * 3, BF16, attention("0.", "True", "False")),
        2 * CAUSAL_PAIRS * 128,
        2 * (sum(ELEMENTS) + ELEMENTS[0]),
    ),
    "efficient, causal": (
        "aten::_scaled_dot_product_efficient_attention",
        shape(QKV + [[]] * 4, BF16, attention("", "True", "0.", "True")),
        2 * CAUSAL_PAIRS * 128,
        2 * (sum(ELEMENTS) + ELEMENTS[0]),
    ),
    "cuDNN, not causal": (
        "aten::_scaled_dot_product_cudnn_attention",
        shape(QKV + [[]] * 5, BF16, attention("", "True", "0.", "False", "False")),
        2 * PAIRS * 128,
        2 * (sum(ELEMENTS) + ELEMENTS[0]),
    ),
    "efficient, backward, causal": (
        "aten::_efficient_attention_backward",
        shape([INSIDE[0], *INSIDE] + [[]] * 11, BF16, [""] * 11 + ["0.", "", "", "1"]),
        2 * CAUSAL_PAIRS * (3 * 64 + 2 * 64),
        2 * (ELEMENTS[0] + 2 * sum(ELEMENTS)),
    ),
    "cuDNN, backward, causal": (
        "aten::_scaled_dot_product_cudnn_attention_backward",
        shape([QKV[0], *QKV] + [[]] * 11, BF16, [""] * 11 + ["128", "256", "0.", "True"][1:] + ["True"]),
        2 * CAUSAL_PAIRS * (3 * 64 + 2 * 64),
        2 * (ELEMENTS[0] + 2 * sum(ELEMENTS)),
    ),
    "layer norm": (
        "aten::native_layer_norm",
        shape([[8, 64], [], [64], [64], []], BF16),
        0,
        2 * (8 * 64 * 2 + 2 * 64),
    ),
    "a broadcast product": ("aten::mul", shape([[8, 64], [64]], FP32), 0, 4 * (8 * 64 * 2 + 64)),
    "rows of a table": ("aten::embedding", shape([[1000, 64], [8, 4]], [FP32, LONG]), 0, 8 * 32 + 4 * 32 * 64 * 2),
    "a compiled kernel": ("triton_poi_fused_add_0", shape([[64], [64], [64], []], FP32), 0, 4 * 3 * 64),
}  # fmt: skip


@pytest.mark.parametrize(("name", "given", "flops", "moved"), CASES.values(), ids=CASES.keys())
def test_work_of_one_call(name: str, given: Shape, flops: int, moved: int) -> None:
    found = work_of(name, given)
    assert (found.flops, found.bytes) == (flops, moved)


MIB = 2**20
TRACELENS: dict[str, tuple[str, Shape, float, float]] = {
    "mm": ("aten::mm", shape([[8944, 1024], [1024, 2816]], BF16), 51.581550592, 71.0078125),
    "addmm": (
        "aten::addmm", shape([[1024], [8944, 1024], [1024, 1024], [], []], BF16),
        18.766086144, 36.939453125,
    ),
    "bmm": ("aten::bmm", shape([[1, 32, 1], [1, 1, 559]], FP32), 3.5776e-05, 0.07049179077148438),
    "attention": (
        "aten::_scaled_dot_product_flash_attention",
        shape([[16, 16, 559, 64]] * 3 + [[]] * 4, BF16, ["", "", "", "0.", "True", "False", "0.125"]),
        10.239377408, 69.875,
    ),
    "mul that widens": ("aten::mul", shape([[16, 16, 559, 64], [1, 1, 559, 64]], BF16), 0, 35.0057373046875),
    "add": ("aten::add", shape([[16, 559, 1024]] * 2 + [[]], BF16), 0, 52.40625),
}  # fmt: skip
"""GFLOP and MiB of one call, as TraceLens' own tests expect them for a trace of Qwen1.5-0.5B on an H100. It also gives
elementwise operators a FLOP per element, which Redline does not count: memory limits them."""


@pytest.mark.parametrize(("name", "given", "gflop", "mib"), TRACELENS.values(), ids=TRACELENS.keys())
def test_the_same_figures_as_tracelens(name: str, given: Shape, gflop: float, mib: float) -> None:
    found = work_of(name, given)
    assert found.flops == pytest.approx(gflop * 1e9, rel=1e-9)
    assert found.bytes == pytest.approx(mib * MIB, rel=1e-9)


def test_both_gradients_of_a_convolution_read_what_comes_in_once() -> None:
    """TraceLens counts two passes, which read the incoming gradient twice: 15.453125 MiB. The FLOPs are the same."""
    values = ["", "", "", "[0]", "[1, 1]", "[1, 1]", "[1, 1]", "False", "[0, 0]", "1", "[True, True, False]"]
    given = shape([[10, 64, 56, 56], [10, 64, 56, 56], [64, 64, 3, 3]] + [[]] * 8, BF16, values)
    found = work_of("aten::convolution_backward", given)
    assert found.flops == 4_624_220_160
    assert found.bytes + 2 * 10 * 64 * 56 * 56 == 15.453125 * MIB


def test_an_operator_against_the_gpu_in_the_header() -> None:
    """8192 × 8192 × 8192 in bf16 within 2 ms is 550 of an H100's 989 TFLOP/s."""
    maker = TraceMaker()
    maker.gpu("NVIDIA H100 80GB HBM3", (9, 0))
    operator = maker.operator("aten::mm", 0, 10 * US, dims=[[8192, 8192], [8192, 8192]], types=[BF16, BF16])
    maker.kernel(GEMM, 20 * US, 2000 * US, launched=2 * US, operator=operator)
    (row,) = profiled(maker).limits
    assert row.flops_per_s == pytest.approx(2 * 8192**3 / 2e-3)
    assert row.efficiency == pytest.approx(2 * 8192**3 / 2e-3 / 989e12, rel=0.01)
    assert (row.limited_by, row.number_format) == ("compute", "bf16")


def profiled(*makers: TraceMaker) -> Profile:
    return profile_of([maker.read() for maker in makers])


def reduced(rank: int, arrives: tuple[int, ...], *, clock_us: int = 0, computes: int = 0) -> TraceMaker:
    """All-reduces of 4 MiB between two ranks that end together: 1 ms, 3 ms … each 200 µs after the last has come."""
    maker = TraceMaker(process=100 + rank, device=rank)
    maker.header["distributedInfo"] = {"rank": rank, "world_size": 2}
    args = {
        "Collective name": "allreduce", "In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float",
        "Group size": 2, "Process Group Name": "0",
    }  # fmt: skip
    for number, at in enumerate(arrives):
        begin, end = at + clock_us, 1000 + 2000 * number + clock_us
        maker.kernel(REDUCE, begin * US, (end - begin) * US, launched=(begin - 9) * US, stream=20, **args)
        if computes:
            maker.kernel(GEMM, begin * US, computes * US, launched=(begin - 8) * US)
    return maker


class TestCollectives:
    def test_bandwidth_waiting_and_the_straggler(self) -> None:
        """Rank 0 comes 300 µs before rank 1 each time; its clock is 5 ms ahead."""
        early, late = reduced(0, (500, 2500, 4500), clock_us=5000), reduced(1, (800, 2800, 4800))
        profile = profiled(early, late)
        (row,) = profile.collectives
        assert (row.name, row.message_bytes, row.group_size, row.calls) == ("allreduce", 4 << 20, 2, 6)
        assert row.wait_s == pytest.approx(3 * 300e-6)
        assert row.transfer_s == pytest.approx(6 * 200e-6)
        assert row.bus_bytes_per_s == pytest.approx((4 << 20) / 200e-6)  # 2 (n - 1) / n is 1 for two ranks
        worst = profile.stragglers[0]
        assert (worst.label, worst.last, worst.collectives) == ("rank 1, device 1", 3, 3)
        assert worst.waited_s == pytest.approx(900e-6)

    def test_of_one_rank_alone_nobody_knows_how_long_it_waits(self) -> None:
        (row,) = profiled(reduced(0, (800, 2700), computes=50)).collectives
        assert row.wait_s is None
        assert row.hidden_s == pytest.approx(100e-6)
        assert (row.min_s, row.max_s) == (pytest.approx(200e-6), pytest.approx(300e-6))

    @pytest.mark.parametrize(
        ("name", "ranks", "factor"),
        [("allreduce", 8, 1.75), ("_allgather_base", 8, 0.875), ("reduce_scatter_tensor_coalesced", 4, 0.75),
         ("all_to_allv", 4, 0.75), ("broadcast", 8, 1.0)],
    )  # fmt: skip
    def test_the_bus_factor_of_nccls_own_tests(self, name: str, ranks: int, factor: float) -> None:
        maker = TraceMaker()
        args = {
            "Collective name": name, "In msg nelems": 1000, "Out msg nelems": 1000, "dtype": "BFloat16",
            "Group size": ranks,
        }  # fmt: skip
        maker.kernel(REDUCE, 0, 100 * US, launched=-5 * US, **args)
        (row,) = profiled(maker).collectives
        assert row.bus_bytes_per_s == pytest.approx(factor * 2000 / 100e-6)

    def test_collectives_without_any_launch_are_counted(self) -> None:
        maker = TraceMaker()
        maker.kernel(REDUCE, 0, 100 * US)
        found = profiled(maker)
        assert (found.collectives[0].calls, found.gradient_reductions) == (1, None)
