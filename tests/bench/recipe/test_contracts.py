"""What holds of every switch, in tables: its answer, its code, its numerics, the model it leaves behind, and what it refuses."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from applying import applied, judged, output_of, output_of_code
from torch import Tensor, nn
from torch.nn import functional

from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe import base
from redline.bench.recipe.compose import number_format_of, refuse_impossible, switches_of
from redline.bench.workload.sources.user import remember_module
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.record import Capabilities
from redline.model.spec import Recipe, Task

pytestmark = [pytest.mark.usefixtures("torch_as_it_was"), pytest.mark.filterwarnings("ignore")]


class Accelerator(CpuDevice):
    """Refuses nothing that a GPU would take, and computes on the CPU all the same."""

    kind = "cuda"
    is_accelerator = True

    def refusal_of(self, dtype: torch.dtype) -> str | None:
        return None


class Instinct(Accelerator):
    kind = "rocm"


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        return functional.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.last(self.first(x).relu())


class AlwaysTraining(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> AlwaysTraining:
        super().train(True)
        return self


def blocks() -> nn.Module:
    return nn.Sequential(*(Block() for _ in range(4)), nn.Linear(8, 3))


def images() -> nn.Module:
    """A convolution over patches, BatchNorm with statistics of its own, and a linear layer."""
    norm = nn.BatchNorm2d(8)
    for tensor in (norm.running_mean, norm.running_var, norm.weight, norm.bias):
        assert tensor is not None
        tensor.data.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(3, 8, 2, 2), norm, nn.ReLU(), nn.Flatten(), nn.Linear(128, 5))


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 24))


MODELS: dict[Callable[[], nn.Module], tuple[int, ...]] = {
    images: (4, 3, 8, 8), Attends: (2, 8, 16), blocks: (2, 8), layers: (32, 32),
}  # fmt: skip
Changed = Callable[[Setup], object]
"""True if the switch did to the program what its name says."""


def in_format(dtype: torch.dtype) -> Changed:
    return lambda setup: {parameter.dtype for parameter in setup.workload.model.parameters()} == {dtype}


def laid_out(setup: Setup) -> bool:
    return setup.workload.model[0].weight.is_contiguous(memory_format=torch.channels_last)


def folded(setup: Setup) -> bool:
    return isinstance(setup.workload.model[1], nn.Identity)


def replaced(name: str) -> Changed:
    return lambda setup: type(setup.model).__name__ == name


def by_blocks(setup: Setup) -> bool:
    return all(block._compiled_call_impl for block in list(setup.workload.model)[:4])


def quantized(setup: Setup) -> bool:
    layers = [layer for layer in setup.workload.model if isinstance(layer, nn.Linear)]
    return all(type(layer.weight.data) is not Tensor for layer in layers)


def patched(setup: Setup) -> bool:
    return "forward" in vars(setup.workload.model[0])


ANSWERS: list[tuple[str, Callable[[], nn.Module], float, Changed]] = [
    ("channels-last", images, 1e-5, laid_out),
    ("fold-bn", images, 1e-4, folded),
    ("fold-bn+channels-last", images, 1e-4, lambda setup: folded(setup) and laid_out(setup)),
    ("patch-products", images, 1e-5, patched),
    ("torchscript", images, 1e-5, lambda setup: isinstance(setup.model, torch.jit.ScriptModule)),
    ("onnx", images, 1e-4, replaced("OnnxModel")),
    ("fold-bn+onnx", images, 1e-4, replaced("OnnxModel")),
    ("fp16+onnx", layers, 1e-2, replaced("OnnxModel")),
    ("bf16", images, 0.1, in_format(torch.bfloat16)),
    ("bf16+fold-bn", images, 0.1, folded),
    ("bf16+patch-products", images, 0.1, patched),
    ("fp16", layers, 1e-2, in_format(torch.float16)),
    ("sdpa:flash", Attends, 1e-5, replaced("WithAttention")),
    ("sdpa:math", Attends, 1e-5, replaced("WithAttention")),
    ("compile:backend=aot_eager", blocks, 1e-5, lambda setup: setup.model is not setup.workload.model),
    ("compile:regional,backend=aot_eager", blocks, 1e-5, by_blocks),
    ("int8", layers, 0.05, quantized),
    ("int8:weight-only", layers, 0.05, quantized),
    ("bf16+int8", layers, 0.1, quantized),
]
PACKAGES = {"onnx": "onnxscript", "int8": "torchao"}


@pytest.mark.parametrize(("recipe", "make", "error", "changed"), ANSWERS, ids=[row[0] for row in ANSWERS])
def test_a_recipe_does_what_it_says_and_keeps_the_answer_and_so_does_its_code_and_the_model_is_given_back(
    recipe: str, make: Callable[[], nn.Module], error: float, changed: Changed
) -> None:
    require(recipe)
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(MODELS[make])
    expected, kinds = model(x).detach(), [type(module) for module in model.modules()]
    weights = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    written = output_of_code(recipe, model, x if "16" not in recipe else x.to(dtype_of(recipe)))
    verdict = judged(recipe, copy.deepcopy(model), x)
    give_back = remember_module(model)
    setup = applied(recipe, model, x)
    assert changed(setup)
    found = output_of(setup)
    give_back()
    assert verdict.passed, verdict.reason
    assert (found.float() - expected).norm() <= error * expected.norm()
    torch.testing.assert_close(written.float(), found.float(), rtol=error, atol=error)
    assert [type(module) for module in model.modules()] == kinds
    assert not any("forward" in vars(module) or module._compiled_call_impl for module in model.modules())
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, before) for name, (value, before) in weights.items())


def require(recipe: str) -> None:
    for name, package in PACKAGES.items():
        if name in recipe:
            pytest.importorskip(package)


def rolled(right: Any) -> Any:
    """Answers of the items in another order."""
    return lambda *args, **kwargs: right(*args, **kwargs).roll(1, 0)


def without_shift(right: Any) -> Any:
    return lambda weight, bias, *rest, **options: (weight, nn.Parameter(torch.zeros(len(weight))))


def in_four_bits(right: Any) -> Any:
    def quantize(model: nn.Module, config: Any, filter_fn: Any) -> None:
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                step = layer.weight.abs().amax(dim=-1, keepdim=True) / 7
                layer.weight.data = (layer.weight / step).round() * step

    return quantize


PLAIN = "redline.bench.recipe.plain"
FAULTS = [
    ("fold-bn", images, f"{PLAIN}.fuse_conv_bn_weights", without_shift),
    ("bf16+fold-bn", images, f"{PLAIN}.fuse_conv_bn_weights", without_shift),
    ("patch-products", images, f"{PLAIN}.patch_product", rolled),
    ("onnx", images, f"{PLAIN}.OnnxModel.__call__", rolled),
    ("sdpa:math", Attends, f"{PLAIN}.WithAttention.forward", rolled),
    ("channels-last", images, "redline.bench.recipe.switches.layers._channels_last", rolled),
    ("torchscript", images, "torch.jit.optimize_for_inference", lambda right: rolled),
    ("compile:backend=aot_eager", blocks, "torch.compile", lambda right: lambda model, **settings: right(rolled(model), **settings)),
    ("int8", layers, "torchao.quantization.quantize_", in_four_bits),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "make", "where", "fault"), FAULTS, ids=[row[0] for row in FAULTS])
def test_a_fault_planted_in_a_switch_is_caught(
    recipe: str, make: Callable[[], nn.Module], where: str, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    require(recipe)
    torch.manual_seed(0)
    monkeypatch.setattr(where, fault(pkgutil.resolve_name(where)))
    assert not judged(recipe, make().eval(), torch.randn(MODELS[make])).passed


def dtype_of(recipe: str) -> torch.dtype:
    return torch.bfloat16 if "bf16" in recipe else torch.float16


REFUSED: list[tuple[str, Task, nn.Module, CpuDevice, str]] = [
    ("tf32", "infer", nn.Linear(4, 4), CpuDevice(), "TF32 is a format of NVIDIA Ampere and later GPUs, not of cpu"),
    ("cudnn-benchmark", "infer", nn.Conv2d(3, 4, 3), CpuDevice(), "cuDNN runs on GPUs only"),
    ("channels-last", "infer", nn.Linear(4, 3), CpuDevice(), "the model has no convolution weights"),
    ("fold-bn", "infer", nn.Conv2d(4, 4, 3), CpuDevice(), "the model has no BatchNorm"),
    ("fold-bn", "infer", nn.Sequential(nn.Conv2d(4, 4, 3), AlwaysTraining(4)), CpuDevice(), "in training mode follows"),
    ("sdpa:cudnn", "infer", Attends(), CpuDevice(), "torch has no cudnn attention for the CPU, only flash and math"),
    ("sdpa:cudnn", "infer", Attends(), Instinct(), "cuDNN is NVIDIA's"),
    ("patch-products", "infer", nn.Conv2d(3, 4, 3), CpuDevice(), "has a stride as large as its kernel"),
    ("fused-linear+compile", "infer", layers(), CpuDevice(), "a CPU have no such kernel"),
    ("fused-linear", "infer", layers(), Accelerator(), "add compile"),
    ("overlap-gradients+compile", "train", images(), CpuDevice(), "a CPU runs one operator after the other"),
    ("overlap-gradients", "train", images(), Accelerator(), "add compile"),
    ("checkpointing", "train", nn.Linear(8, 3), CpuDevice(), "no block of the model repeats"),
    ("compile:regional", "infer", nn.Linear(8, 8), CpuDevice(), "no block of the model repeats"),
    ("compile:freeze", "train", blocks(), CpuDevice(), "freeze turns weights into constants, which training changes"),
    ("compile:combine", "infer", blocks(), CpuDevice(), "combine is about Triton kernels, and a CPU runs none"),
    ("compile:coordinate-descent", "infer", blocks(), CpuDevice(), "coordinate-descent is about Triton kernels"),
    ("graphs", "infer", blocks(), CpuDevice(), "cpu has no graphs"),
    ("tensorrt", "infer", layers(), CpuDevice(), "TensorRT runs on NVIDIA GPUs, not on cpu"),
    ("decode-kernels+static-cache", "generate", layers(), CpuDevice(), "a CPU runs none"),
    ("onnx", "infer", layers(), Accelerator(), "it runs on a CPU here; a GPU has compile and tensorrt"),
    ("int8", "infer", images(), CpuDevice(), "quantizes linear layers.* of 6 parameters"),
    ("fp8", "infer", layers(), CpuDevice(), r"fp8 products run on GPUs of compute capability 8\.9 and later"),
    ("fsdp", "train", layers(), CpuDevice(), "it is for several ranks: give --ranks"),
]  # fmt: skip


@pytest.mark.parametrize(("recipe", "task", "model", "device", "words"), REFUSED, ids=lambda value: str(value)[:30])
def test_what_cannot_be_done_is_refused_with_the_reason_before_anything_is_touched(
    recipe: str, task: Task, model: nn.Module, device: CpuDevice, words: str
) -> None:
    if recipe == "int8":  # its share of the weights is what is refused: nearly all lie in the convolution
        model = nn.Sequential(nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Flatten(), nn.Linear(64, 8))
    with pytest.raises(BenchError, match=f"^{recipe.partition('+')[0].partition(':')[0]}: .*{words}") as caught:
        refuse_impossible(switches_of(Recipe.parse(recipe), task), device, model)
    assert caught.value.kind == "unsupported"


@pytest.mark.parametrize(
    ("recipe", "package", "extra"),
    [("onnx", "onnxscript", "onnx"), ("int8", "torchao", "quant"), ("fp8", "torchao", "quant"), ("tensorrt", "torch_tensorrt", "tensorrt")],
)  # fmt: skip
def test_a_missing_package_is_told_with_how_to_install_it(
    recipe: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == package else find_spec("torch"))
    words = rf"it needs the package {package}: pip install 'torch-redline\[{extra}\]'"
    device = CpuDevice() if recipe == "onnx" else Accelerator()
    with pytest.raises(BenchError, match=words):
        refuse_impossible(switches_of(Recipe.parse(recipe), "infer"), device, layers())


@pytest.mark.parametrize(
    ("recipe", "task", "words"),
    [
        ("torchscript", "train", "torchscript is for infer, not for train"),
        ("int8", "train", "int8 is for infer, generate, not for train"),
        ("fused-optimizer", "infer", "fused-optimizer is for train, not for infer"),
        ("fp16:fast", "infer", "switch fp16 takes no argument, got 'fast'"),
        ("channels-last:blocked=true", "infer", "switch channels-last takes no options, got blocked"),
        ("compile:fast", "infer", "switch compile takes one of default, reduce-overhead, .*, freeze, got 'fast'"),
        ("compile:colour=red", "infer", "no option 'colour': give fullgraph, dynamic, backend or an inductor"),
        ("compile:fullgraph=3", "infer", "fullgraph must be true or false, got 3"),
        ("compile:dynamic=maybe", "infer", "dynamic must be true or false, got 'maybe'"),
        ("compile:backend=7", "infer", "backend must be a name, got 7"),
        ("compile:reduce-overhead,max_autotune=true", "infer", r"mode reduce-overhead and options \(max_autotune\)"),
        ("compile:max-autotune,backend=eager", "infer", "are inductor's; backend"),
        ("compile:backend=aot_eager,max_autotune=true", "infer", "are inductor's; backend"),
        ("sdpa", "infer", "sdpa needs a backend: sdpa:flash, sdpa:efficient, sdpa:cudnn, sdpa:math"),
        ("sdpa:slow", "infer", "sdpa takes one of flash, efficient, cudnn, math, got 'slow'"),
        ("static-cache:mb=3", "generate", "switch static-cache takes no options, got mb"),
        ("static-cache:length=true", "generate", "length must be from 1 to 1000000, got True"),
        ("decode-kernels:ahead_mib=8", "generate", "switch decode-kernels takes no options, got ahead_mib"),
        ("graphs+compile:reduce-overhead", "infer", "exclude each other"),
        ("graphs+compile:triton.cudagraphs=true", "infer", "exclude each other"),
        ("compile:max-autotune+graphs", "infer", "exclude each other"),
        ("checkpointing+graphs", "train", "exclude each other"),
        ("fp8", "train", "fp8 is for infer, generate, not for train"),
        ("fp8+amp-bf16", "infer", "exclude each other"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_recipe_is_told_in_one_line(recipe: str, task: Task, words: str) -> None:
    with pytest.raises(SpecError, match=words) as caught:
        switches_of(Recipe.parse(recipe), task)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("recipe", "task"),
    [("graphs+compile", "infer"), ("graphs+compile:max-autotune-no-cudagraphs", "infer"), ("fp8+graphs", "infer")],
)  # fmt: skip
def test_what_may_stand_together(recipe: str, task: Task) -> None:
    assert len(switches_of(Recipe.parse(recipe), task)) == 2


COMPILED = Capabilities(compiles=True, dissolves_modules=True)
RECORDED = Capabilities(compiles=True, records_graph=True, dissolves_modules=True)
ENGINE = Capabilities(compiles=True, refuses_graph=True, dissolves_modules=True, folds_norms=True)
FROZEN = Capabilities(compiles=True, dissolves_modules=True, folds_norms=True)


@pytest.mark.parametrize(
    ("recipe", "does", "number_format"),
    [
        ("baseline", Capabilities(), "fp32"),
        ("compile", COMPILED, "fp32"),
        ("compile:regional", COMPILED, "fp32"),
        ("compile:reduce-overhead", RECORDED, "fp32"),
        ("compile:max-autotune", RECORDED, "fp32"),
        ("compile:max-autotune-no-cudagraphs", COMPILED, "fp32"),
        ("compile:triton.cudagraphs=true", RECORDED, "fp32"),
        ("compile:freeze", FROZEN, "fp32"),
        ("torchscript", ENGINE, "fp32"),
        ("onnx", ENGINE, "fp32"),
        ("graphs", Capabilities(records_graph=True, dissolves_modules=True), "fp32"),
        ("fold-bn", Capabilities(folds_norms=True), "fp32"),
        ("tf32", Capabilities(), "tf32"),
        ("tf32+amp", Capabilities(scales_loss=True), "fp16"),
        ("fp16+channels-last", Capabilities(), "fp16"),
        ("amp-bf16+tf32", Capabilities(), "bf16"),
        ("int8", Capabilities(quantizes=True), "int8"),
        ("bf16+int8:weight-only", Capabilities(quantizes=True), "int8-weights"),
        ("fp8", Capabilities(quantizes=True), "fp8"),
    ],
)  # fmt: skip
def test_a_recipe_says_what_it_does_to_the_program_and_what_it_computes_in(
    recipe: str, does: Capabilities, number_format: str
) -> None:
    parsed = Recipe.parse(recipe)
    assert Capabilities.together(switch.does for switch in switches_of(parsed, "infer")) == does
    assert number_format_of(parsed, "infer") == number_format
