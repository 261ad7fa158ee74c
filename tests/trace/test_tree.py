"""The program as a tree, time by module and queue: each against a count by hand."""

from __future__ import annotations

import pytest
from kineto import ADD, AUTOGRAD, GEMM, TraceMaker

from redline.analyze.profile_diff import diff_profiles
from redline.show.export import json_document
from redline.trace.tree import TreeNode

US = 1000


def model(
    maker: TraceMaker, *, first: int = 0, product: str = "aten::mm", kernel: str = GEMM, linear_us: int = 70
) -> None:
    """Two modules under one, with a backward operator of the inner one, all inside a Python function."""
    maker.frame("train.py(3): main", 0, 400 * US)
    maker.annotation("## step ##", 1 * US, 390 * US)
    maker.frame(f"nn.Module: Net_{first}", 2 * US, 100 * US)
    maker.frame(f"nn.Module: Linear_{first + 4}", 10 * US, 40 * US)
    inner = maker.operator(product, 12 * US, 10 * US, **{"Sequence number": 7, "Fwd thread id": 0})
    maker.kernel(kernel, 500 * US, linear_us * US, launched=14 * US, operator=inner)
    outer = maker.operator("aten::add", 60 * US, 10 * US)
    maker.kernel(ADD, 600 * US, 5 * US, launched=62 * US, operator=outer)
    name = "autograd::engine::evaluate_function: MmBackward0"
    maker.operator(name, 210 * US, 30 * US, thread=AUTOGRAD, **{"Sequence number": 7, "Fwd thread id": 1})
    again = maker.operator(
        "MmBackward0", 215 * US, 20 * US, thread=AUTOGRAD, **{"Sequence number": 7, "Fwd thread id": 1}
    )
    maker.kernel(kernel, 650 * US, 30 * US, launched=220 * US, operator=again, thread=AUTOGRAD)
    maker.kernel(ADD, 700 * US, 9 * US, launched=300 * US)  # by no operator, outside the modules


def below(node: TreeNode, *names: str) -> TreeNode:
    for name in names:
        node = next(child for child in node.children if child.name == name)
    return node


def test_each_place_in_the_program_is_a_node_and_no_device_time_is_lost() -> None:
    maker = TraceMaker()
    model(maker)
    tree = maker.profile().tree
    assert tree.device_s == pytest.approx(114e-6)
    net = below(tree, "train.py(3): main", "## step ##", "nn.Module: Net_0")
    assert (net.kind, net.calls, net.device_self_s) == ("module", 1, 0)
    assert net.device_s == pytest.approx(105e-6), "the backward operator belongs to the module of its forward operator"
    linear = below(net, "nn.Module: Linear_4")
    assert (linear.device_s, linear.backward_s) == (pytest.approx(100e-6), pytest.approx(30e-6))
    assert linear.host_self_s == pytest.approx(30e-6)
    node = below(linear, "autograd::engine::evaluate_function: MmBackward0", "MmBackward0")
    assert node.device_self_s == pytest.approx(30e-6), "what stood inside the moved operator comes along"


def test_time_by_module_and_by_annotation() -> None:
    maker = TraceMaker()
    model(maker)
    rows = {row.path: row for row in maker.profile().parts}
    assert rows["## step ##"].kind == "annotation"
    assert rows["## step ##"].device_s == pytest.approx(114e-6)
    assert rows["Net_0"].device_self_s == pytest.approx(5e-6)
    assert rows["Net_0/Linear_4"].share == pytest.approx(100 / 114)
    assert rows["Net_0/Linear_4"].backward_s == pytest.approx(30e-6)


def test_an_annotation_inside_one_of_its_own_name_does_not_count_twice() -> None:
    maker = TraceMaker()
    maker.annotation("solve", 0, 100 * US)
    maker.annotation("solve", 10 * US, 60 * US)
    inner = maker.operator("aten::mm", 20 * US, 30 * US)
    maker.kernel(GEMM, 200 * US, 40 * US, launched=25 * US, operator=inner)
    (row,) = maker.profile().parts
    assert (row.calls, row.host_s, row.device_s) == (2, pytest.approx(100e-6), pytest.approx(40e-6))


def test_what_is_small_is_left_out_and_its_time_stays() -> None:
    maker = TraceMaker()
    maker.operator("aten::long", 0, 1_000_000 * US)
    for number in range(2000):
        inside = maker.operator(f"aten::tiny{number}", number * 2 * US, US)
        maker.kernel(ADD, 2_000_000 * US + number * US, 10, launched=number * 2 * US, call_ns=10, operator=inside)
    maker.kernel(GEMM, 3_000_000 * US, 500_000 * US, launched=900_000 * US)
    tree = maker.profile().tree
    assert [child.name for child in tree.children] == ["aten::long"]
    assert tree.children[0].children == ()
    assert tree.device_s == pytest.approx(0.50002)


def test_absurd_depth_is_cut_and_can_be_written() -> None:
    maker = TraceMaker()
    for number in range(900):
        maker.operator("aten::again", number * US, (2000 - 2 * number) * US)
    profile = maker.profile()
    assert len(json_document("profile", profile)) > 0
    assert profile.tree.host_s == pytest.approx(2e-3)


def test_delays_of_launches() -> None:
    maker = TraceMaker()
    for number in range(4):  # launched at 0, 10, 20, 30; begun at 10, 110, 210, 310
        maker.kernel(GEMM, (10 + 100 * number) * US, 99 * US, launched=10 * number * US, call_ns=US)
    launches = maker.profile().launches
    assert launches.median_latency_s == pytest.approx(145e-6)


def test_two_programs_are_compared_by_module() -> None:
    """Another maker's kernels and another operator for the same work."""
    before, after = TraceMaker(), TraceMaker(rocm=True)
    model(before, product="aten::cudnn_convolution")
    model(after, product="aten::miopen_convolution", kernel="Cijk_Ailk_Bljk_SB_MT64x64x16", linear_us=140)
    rows = {row.name: row for row in diff_profiles(before.profile(), after.profile()).parts}
    slower = rows["Net_0/Linear_4"]
    assert (slower.change, slower.ratio) == ("slower", pytest.approx(100 / 170))
    assert slower.difference_s == pytest.approx(70e-6)
