"""Folding, attention kernels, quantization and other engines on a real GPU: they keep the numbers or say why not."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.util import find_spec

import pytest

import redline
from redline.launch import open_door
from redline.model.spec import LaunchSpec
from redline.verbs.workspace import Workspace

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.device_count(), reason="no GPU here")]


@pytest.fixture(scope="module")
def measured():
    """One warm door for all: its start is most of the time these tests take."""
    with ExitStack() as stack:
        door = open_door(LaunchSpec())
        stack.callback(door.close)

        def measure(recipe: str, model: str, **settings):
            settings = {"batch": 8, "effort": "quick", **settings}
            return redline.run(model, recipes=recipe, **settings, workspace=Workspace(door=door, keep=False))[0]

        yield measure


@pytest.mark.parametrize(
    ("recipe", "model"),
    [
        ("fold-bn", "resnet18"),
        ("fp16+fold-bn+channels-last+graphs", "resnet18"),
        ("sdpa:math", "vit_b_16"),
        ("sdpa:efficient", "vit_b_16"),
        ("fp16+sdpa:flash", "vit_b_16"),
        ("bf16+sdpa:cudnn", "vit_b_16"),
        ("amp-bf16+sdpa:flash+compile", "vit_b_16"),
    ],
)
def test_the_numbers_stay_right(measured, recipe: str, model: str) -> None:
    row = measured(recipe, model)
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


def test_training_with_a_chosen_kernel_keeps_its_loss_path(measured) -> None:
    row = measured("amp-bf16+sdpa:flash", "vit_b_16", task="train")
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


def test_flash_in_fp32_is_refused_with_torchs_reason(measured) -> None:
    row = measured("sdpa:flash", "vit_b_16")
    assert row.failure.kind == "unsupported"
    assert "dtype" in row.failure.message


@pytest.mark.parametrize("recipe", ["int8", "bf16+int8:weight-only", "fp8", "bf16+fp8", "bf16+fp8+compile"])
def test_quantized_layers_stay_within_their_rounding_or_the_package_is_named(measured, recipe: str) -> None:
    row = measured(recipe, "vit_b_16")
    if find_spec("torchao") is None:
        assert "redline[quant]" in row.failure.message
        return
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics


@pytest.mark.parametrize(
    ("recipe", "package", "hint"),
    [
        ("onnx", "onnxruntime", "redline[onnx]"),
        ("fp16+onnx", "onnxruntime", "redline[onnx]"),
        ("tensorrt", "torch_tensorrt", "redline[tensorrt]"),
        ("fp16+tensorrt", "torch_tensorrt", "redline[tensorrt]"),
    ],
)
def test_another_engine_keeps_the_numbers_or_the_package_is_named(
    measured, recipe: str, package: str, hint: str
) -> None:
    row = measured(recipe, "resnet18")
    if row.failure is not None and find_spec(package) is None:
        assert hint in row.failure.message
        return
    assert row.failure is None, row.failure
    assert row.numerics.passed, row.numerics
