"""TensorRT: its refusals, and the call that torch-tensorrt is documented to take. No engine has been built yet."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from applying import applied, code_of, output_of
from torch import nn

from redline.bench.device.cpu import CpuDevice
from redline.model.errors import BenchError

pytestmark = pytest.mark.usefixtures("torch_as_it_was")


class Gpu(CpuDevice):
    kind = "cuda"


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A torch_tensorrt whose engine is the model, and which keeps what it was asked."""
    module = ModuleType("torch_tensorrt")
    module.__spec__ = ModuleSpec("torch_tensorrt", None)

    def build(model: nn.Module, **options: Any) -> nn.Module:
        module.asked = options
        return nn.Sequential(model)

    module.compile = build
    monkeypatch.setitem(sys.modules, "torch_tensorrt", module)
    return module


@pytest.mark.parametrize("tf32", [False, True])
def test_an_engine_is_asked_for_in_the_formats_of_the_recipe(tensorrt: ModuleType, tf32: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = tf32
    setup = applied("fp16+tensorrt", nn.Linear(4, 3), torch.randn(2, 4), device=Gpu())
    assert isinstance(setup.model, nn.Sequential)
    (given,) = tensorrt.asked.pop("arg_inputs")
    assert given.dtype == torch.float16
    assert tensorrt.asked == {"ir": "dynamo", "kwarg_inputs": {}, "use_explicit_typing": True, "disable_tf32": not tf32}
    assert output_of(setup).dtype == torch.float16
    assert "leave out what TensorRT holds" in setup.notes["tensorrt"]


def test_the_written_call_is_the_one_that_was_made(tensorrt: ModuleType) -> None:
    x = torch.randn(2, 4)
    applied("tensorrt", nn.Linear(4, 3), x, device=Gpu())
    made = tensorrt.asked
    code = code_of("tensorrt", device="cuda")
    names: dict[str, Any] = {"model": nn.Linear(4, 3), "args": (x,), "kwargs": {}}
    exec("\n".join([*code.imports, "import torch", *code.model_lines]), names)
    assert made == tensorrt.asked


def test_what_cannot_be_built_is_told_in_one_line(tensorrt: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> None:
        raise ValueError("no converter for aten::strange\nand much more")

    monkeypatch.setattr(tensorrt, "compile", fails)
    with pytest.raises(BenchError, match="tensorrt cannot build an engine: ValueError: no converter") as caught:
        applied("tensorrt", nn.Linear(4, 3), torch.randn(2, 4), device=Gpu())
    assert caught.value.kind == "compile"
    assert "\n" not in str(caught.value)
