"""Engines other than torch.compile: ONNX Runtime for real, TensorRT behind a stand-in."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import pytest
import torch
from applying import applied, code_of, output_of
from torch import Tensor, nn

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.plain import CallForm, OnnxModel
from redline.bench.workload.step import InferenceStep
from redline.model.errors import BenchError

needs_onnx = pytest.mark.skipif(
    not all(map(find_spec, ("onnx", "onnxscript", "onnxruntime"))), reason="ONNX Runtime is not installed"
)
pytestmark = [pytest.mark.usefixtures("torch_as_it_was"), pytest.mark.filterwarnings("ignore")]


class Network(nn.Module):
    """Convolution, norm, dropout: what eval mode and training mode do differently."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(images).mean((2, 3)))
        return y


class Structured(nn.Module):
    """Keywords in, a structure out: with None, the same tensor twice, an input passed on, integers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, scale: Tensor, flag: bool = True) -> dict[str, Any]:
        y = self.layer(x) * scale if flag else x
        return {"y": y, "nothing": None, "pair": (y, x), "best": y.argmax(-1)}


@needs_onnx
def test_every_call_answers_its_own_inputs_in_memory_of_its_own() -> None:
    model = Network().eval()
    setup = applied("onnx", model, torch.randn(2, 3, 8, 8))
    step, others = InferenceStep(setup), torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2)  # not contiguous
    first = output_of(setup)
    kept = first.clone()
    torch.testing.assert_close(step.on((others,), {}), model(others).detach())
    assert torch.equal(first, kept), "an output that is held is not overwritten by the next call"
    assert not any(module.training for module in model.modules())
    assert setup.notes["onnx"].startswith("exported and loaded in ")
    assert code_of("onnx").notes == ["Needs onnx, onnxscript and onnxruntime."]


@needs_onnx
@pytest.mark.parametrize("order", [("x", "scale"), ("scale", "x")])
def test_structures_go_in_and_come_out(order: tuple[str, str]) -> None:
    given = {"x": torch.randn(2, 4), "scale": torch.rand(2, 1)}
    model = Structured().eval()
    setup = applied("onnx", model, **{name: given[name] for name in order})
    found, expected = output_of(setup), model(**given)
    assert list(found) == ["y", "nothing", "pair", "best"]
    assert found["nothing"] is None
    assert found["best"].dtype == torch.int64
    torch.testing.assert_close(found["pair"], expected["pair"])
    assert torch.equal(found["best"], expected["best"])


@needs_onnx
@pytest.mark.parametrize("order", [("x", "y"), ("y", "x")])
def test_keywords_go_by_name_whatever_their_order(order: tuple[str, str]) -> None:
    class Apart(nn.Module):
        def forward(self, x: Tensor, y: Tensor, scales: dict[str, Tensor], sign: float = 1.0) -> Tensor:
            return sign * (x * scales["a"] - 2 * y * scales["b"])

    x, y, a, b = torch.randn(4, 2, 3)
    given: dict[str, Any] = {"x": x, "y": y, "scales": {"a": a, "b": b}}
    expected = Apart()(**given)
    example = {name: given[name] for name in (*order, "scales")}
    fast: Any = OnnxModel(Apart().eval(), (), {**example, "sign": 1.0})
    torch.testing.assert_close(fast(sign=1.0, **given), expected)
    torch.testing.assert_close(fast(scales={"b": b, "a": a}, y=y, x=x, sign=1.0), expected)
    with pytest.raises(TypeError, match=r"made for 0 positional inputs and the keywords .* called with 0 and \['x'\]"):
        fast(x=x)
    with pytest.raises(TypeError, match="called with 1 and"):
        fast(x, y=y, scales=given["scales"], sign=1.0)
    with pytest.raises(ValueError, match=r"made for an input that is 1\.0"):
        fast(sign=-1.0, **given)


@needs_onnx
def test_threads_follow_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    seen: list[int] = []

    def session(path: str, options: Any, providers: Any, make: Any = onnxruntime.InferenceSession) -> Any:
        seen.append(options.intra_op_num_threads)
        return make(path, options, providers=providers)

    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    torch.set_num_threads(2)
    applied("onnx", nn.Linear(4, 3), torch.randn(2, 4))
    assert seen == [2]


@needs_onnx
def test_a_model_that_cannot_be_exported_is_told_in_one_line() -> None:
    class Decides(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum() > 0 else input

    class Convolves(nn.Conv2d):
        pass

    for recipe, model, x in (
        ("onnx", Decides(4, 4), torch.randn(2, 4)),
        ("bf16+onnx", Convolves(3, 4, 3), torch.randn(1, 3, 8, 8)),
    ):
        with pytest.raises(BenchError, match=r"onnx cannot run this model: .+") as caught:
            applied(recipe, model, x)
        assert caught.value.kind == "compile"
        assert "\n" not in str(caught.value)
        assert "/tmp" not in str(caught.value)


@needs_onnx
def test_an_export_that_answers_otherwise_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    exported = torch.onnx.export(nn.Linear(4, 3).eval(), (torch.randn(7, 4),), dynamo=True, verbose=False)
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: exported)
    with pytest.raises(BenchError, match=r"takes \['input'\] of other shapes than the \[\[2, 4\]\] it was given"):
        applied("onnx", nn.Linear(4, 3), torch.randn(2, 4))


def test_a_constant_that_is_not_a_number_may_stay_one() -> None:
    form = CallForm((torch.ones(2), float("nan"), 1.0), {})
    (given,) = form.tensors((torch.zeros(2), float("nan"), 1.0), {})
    assert given.sum() == 0
    with pytest.raises(ValueError, match=r"made for an input that is 1\.0"):
        form.tensors((torch.zeros(2), float("nan"), 2.0), {})


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
    assert "leave out what it holds" in setup.notes["tensorrt"]


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
