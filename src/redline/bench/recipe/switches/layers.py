"""These switches are for kinds of layers: convolutions (layout, algorithms, patches, gradients), BatchNorm, linear layers, attention."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.base import Device
from redline.bench.device.failure import (
    is_out_of_memory,
    is_without_attention_backend,
    one_line,
    refused_attention,
    user_line,
)
from redline.bench.recipe.base import (
    ALL_MODELS,
    ATTENTION,
    FLAGS,
    INFER,
    LAYOUT,
    REWRITE,
    TRAIN,
    WEIGHTS,
    RecipeCode,
    RecipeSwitch,
    leave_fast_path,
    must_change,
    registered,
    write_without_fast_path,
)
from redline.bench.recipe.plain import (
    BACKENDS,
    WithAttention,
    fold_batchnorms,
    foldable_batchnorms,
    fuse_activations,
    overlap_gradients,
    patch_convolutions,
    patches_as_products,
)
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.protocol import SwitchNeed
from redline.model.record import Capabilities
from redline.model.spec import Switch, Task
from redline.model.units import counted
from redline.model.work import Facts

FORMAT_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}
"""Tensors of images and of volumes have these layouts, by their number of axes."""


class _ForConvolutions(RecipeSwitch):
    layer = "convolution"
    fewest_axes: ClassVar[int] = 3
    without_weights: ClassVar[str] = "the model has no convolutions"

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        has_weights = self.task == "step" or any(weight.dim() >= self.fewest_axes for weight in model.parameters())
        return None if has_weights else self.without_weights


@registered
class ChannelsLast(_ForConvolutions):
    name = "channels-last"
    summary = "images and convolution weights with the channel innermost"
    stage = LAYOUT
    family = "layout"
    fewest_axes = 4
    without_weights = "the model has no convolution weights whose layout could change"
    lines = ("model = model.to(memory_format=torch.channels_last)",)
    input_changes = ("tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor",)

    def apply(self, setup: Setup) -> None:
        model = setup.workload.model
        for rank in {parameter.dim() for parameter in model.parameters()} & FORMAT_BY_RANK.keys():
            model.to(memory_format=FORMAT_BY_RANK[rank])
        setup.change_inputs(_channels_last)


def _channels_last(tensor: Tensor) -> Tensor:
    layout = FORMAT_BY_RANK.get(tensor.dim())
    return tensor.contiguous(memory_format=layout) if layout else tensor


@registered
class CudnnBenchmark(_ForConvolutions):
    name = "cudnn-benchmark"
    summary = "let cuDNN (MIOpen on AMD) time its convolution algorithms and keep the fastest"
    stage = FLAGS
    family = "autotune"
    tasks = ("infer", "train", "step")
    leaves_program = True
    needs_gpu = "cuDNN runs on GPUs only"
    flag_lines = ("torch.backends.cudnn.benchmark = True",)

    def refused_by(self, device: Device) -> str | None:
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def apply(self, setup: Setup) -> None:
        torch.backends.cudnn.benchmark = True


@registered
class FoldBatchNorm(RecipeSwitch):
    name = "fold-bn"
    summary = "BatchNorm folded into the convolution before it (inference)"
    stage = WEIGHTS
    relieves = "both"
    does = Capabilities(folds_norms=True)
    tasks = INFER
    layer = "batch-norm"
    carries = (fold_batchnorms,)
    lines = ("fold_batchnorms(model)",)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if not norms:
            return "the model has no BatchNorm"
        if all(norm.training for norm in norms):
            return "BatchNorm in training mode follows each batch and cannot be folded; call model.eval() first"
        try:
            pairs = foldable_batchnorms(model)
        except Exception as error:  # a model may do anything to a tracer
            place = f" ({line})" if (line := user_line(error)) else ""
            return f"torch.fx cannot trace the model: {one_line(error)}{place}"
        return None if pairs else "no BatchNorm takes what one convolution gives to it alone"

    def apply(self, setup: Setup) -> None:
        norms = sum(isinstance(module, _BatchNorm) for module in setup.workload.model.modules())
        pairs = fold_batchnorms(setup.workload.model)
        setup.notes[self.name] = f"folded {len(pairs)} of {norms} BatchNorm layers"


SMALLEST_ACTIVATIONS = 0.002
"""Activations behind linear layers must take at least this share of the forward's time in strict fp32. In half precision their share
is several times as large: 2 % of ViT-B/16's forward on an H200 became 10 %."""
FEWEST_CONVOLUTIONS = 3
"""A model must have this many. Its first convolution is not moved, and with only one more, little can run at the same time."""


@registered
class PatchProducts(RecipeSwitch):
    name = "patch-products"
    summary = "convolutions whose patches do not overlap (as ViT begins with) as matrix products"
    stage = REWRITE
    family = "patches"
    layer = "convolution"
    carries = (patches_as_products,)
    lines = ("patches_as_products(model)",)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if not isinstance(model, torch.jit.ScriptModule) and patch_convolutions(model):
            return None
        return "no convolution of the model has a stride as large as its kernel, and no padding"

    def apply(self, setup: Setup) -> None:
        count = patches_as_products(setup.workload.model)
        setup.notes[self.name] = f"{counted(count, 'convolution')} as matrix products"


@registered
class FusedLinear(RecipeSwitch):
    name = "fused-linear"
    summary = "ReLU and GELU in the kernel of the linear layer before them (inference, with compile)"
    stage = FLAGS
    tasks = INFER
    # Autocast does not know the joint kernel, and torchao's layers have products of their own.
    excludes = frozenset({"amp", "amp-bf16", "int8", "fp8"})
    needs = (SwitchNeed(wants=("compile",), reason="torch.compile puts the two together; add compile"),)
    needs_gpu = "the libraries of a CPU have no such kernel in torch"
    carries = (fuse_activations,)
    lines = ("fuse_activations()",)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if facts is None or (facts.activated is not None and facts.activated.share >= SMALLEST_ACTIVATIONS):
            return None
        if facts.activated is None:
            return "no ReLU or GELU stands right behind a linear layer with a bias"
        return f"activations behind linear layers take {facts.activated.share:.2%} of the forward's time"

    def apply(self, setup: Setup) -> None:
        missing = "no ReLU or GELU right behind a linear layer with a bias in one number format"
        must_change(setup, self.name, fuse_activations(), missing)


@registered
class OverlapGradients(RecipeSwitch):
    name = "overlap-gradients"
    summary = (
        "weight gradients of convolutions on other streams, beside the rest of the backward (training, with compile)"
    )
    stage = FLAGS
    tasks = TRAIN
    needs = (SwitchNeed(wants=("compile",), reason="it changes the program of torch.compile; add compile"),)
    needs_gpu = "a CPU runs one operator after the other"
    layer = "convolution"
    carries = (overlap_gradients,)
    lines = ("overlap_gradients()",)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        has_few = facts is not None and facts.layers["convolution"].calls < FEWEST_CONVOLUTIONS
        return "it has too few convolutions" if has_few else None

    def apply(self, setup: Setup) -> None:
        missing = "no convolution with a weight gradient that can be computed apart"
        must_change(setup, self.name, overlap_gradients(), missing)


ON_CPU = ("flash", "math")
"""Torch has these kinds of attention for a CPU."""


@registered
class Attention(RecipeSwitch):
    name = "sdpa"
    summary = "one kernel for every attention: sdpa:flash, sdpa:efficient, sdpa:cudnn or sdpa:math"
    stage = ATTENTION
    family = "attention"
    excludes = frozenset({"torchscript", "onnx", "tensorrt"})  # these bring their own attention
    arguments = tuple(BACKENDS)
    offered = arguments
    tasks = ALL_MODELS
    layer = "attention"

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if switch.argument is None:
            raise SpecError(f"switch sdpa needs a backend: {', '.join(f'sdpa:{name}' for name in BACKENDS)}")
        self.backend = BACKENDS[switch.argument]

    def refused_by(self, device: Device) -> str | None:
        if not device.is_accelerator and self.argument not in ON_CPU:
            return f"torch has no {self.argument} attention for the CPU, only {' and '.join(ON_CPU)}"
        return "cuDNN is NVIDIA's" if self.argument == "cudnn" and device.kind == "rocm" else None

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        cannot = f"{self.argument} cannot do this model's attention here in any number format"
        return None if facts is None or self.formats(facts) else cannot

    def formats(self, facts: Facts) -> frozenset[str]:
        return frozenset(form for form, backends in facts.attention_backends.items() if self.argument in backends)

    def apply(self, setup: Setup) -> None:
        model = setup.model
        assert isinstance(model, nn.Module)
        leave_fast_path(setup)
        if _refused_with(setup, model, []) is None:
            raise BenchError("unsupported", "sdpa: the model never calls scaled_dot_product_attention")
        if (reason := _refused_with(setup, model, [self.backend])) is not None:
            raise BenchError("unsupported", f"{self.switch} cannot do this model's attention here: {reason}")
        setup.model = WithAttention(model, self.backend)

    def write(self, code: RecipeCode) -> None:
        write_without_fast_path(code)
        code.carry(WithAttention)
        code.model_lines.append(f"model = WithAttention(model, {self.backend})")


def _refused_with(setup: Setup, model: nn.Module, backends: list[SDPBackend]) -> str | None:
    """Returns torch's reason if one forward with these backends finds none that fits, or None if it went through.

    With no backend at all, a forward goes through only if attention is never called.
    """
    # A forward in training mode moves the statistics of BatchNorm, so they are put back.
    untouched = unchanged_afterwards(model) if setup.task == "train" else nullcontext()
    with warnings.catch_warnings(record=True) as said, untouched:
        warnings.simplefilter("always")
        try:
            with torch.set_grad_enabled(setup.task == "train"), setup.autocast(), sdpa_kernel(backends):
                model(*setup.args, **setup.kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) or not is_without_attention_backend(error):
                raise
            return refused_attention(said) or one_line(error)
    return None
