"""These switches change number formats: TF32 inside fp32, autocast (AMP), models cast whole, and products quantized by torchao.

Quantization is neither tried nor recommended unless it is asked for.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.recipe.base import (
    ALL_MODELS,
    FLAGS,
    PRECISION,
    QUANTIZE,
    RecipeCode,
    RecipeSwitch,
    leave_fast_path,
    registered,
    write_without_fast_path,
)
from redline.bench.recipe.plain import SIDES, is_plain_linear, plain_linears
from redline.bench.recipe.rounding import DTYPES
from redline.bench.workload.decoder import cast_weights
from redline.bench.workload.step import Setup
from redline.model.record import Capabilities
from redline.model.spec import Switch, Task
from redline.model.work import PRODUCTS, Facts


@registered
class Tf32(RecipeSwitch):
    name = "tf32"
    summary = "fp32 products and convolutions in TF32 on tensor cores"
    stage = FLAGS
    family = "tf32"
    number_format = "tf32"
    tasks = ("infer", "train", "step", "generate")
    excludes = frozenset({"fp16", "bf16"})  # nothing is left in fp32 for it to speed up
    flag_lines = ("torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True",)

    def refused_by(self, device: Device) -> str | None:
        return device.tf32_refusal()

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        has_products = facts is None or any(facts.kinds.get(kind) for kind in PRODUCTS)
        return None if has_products else "no matrix product or convolution runs in this model"

    def apply(self, setup: Setup) -> None:
        setup.device.allow_tf32(True)


class _Precision(RecipeSwitch):
    stage = PRECISION
    tasks = ALL_MODELS
    family = "precision"
    excludes = frozenset({"amp", "amp-bf16", "fp16", "bf16"})
    number_format = "bf16"

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        assert self.number_format is not None
        self.dtype = DTYPES[self.number_format]

    def refused_by(self, device: Device) -> str | None:
        return device.refusal_of(self.dtype)


@registered
class AmpBf16(_Precision):
    name = "amp-bf16"
    summary = "automatic mixed precision in bf16"

    def apply(self, setup: Setup) -> None:
        leave_fast_path(setup)
        setup.autocast_dtype = self.dtype
        setup.scales_gradients = self.does.scales_loss

    def write(self, code: RecipeCode) -> None:
        write_without_fast_path(code)
        code.autocast = str(self.dtype)
        code.scales_gradients = self.task == "train" and self.does.scales_loss


@registered
class AmpFp16(AmpBf16):
    name = "amp"
    summary = "automatic mixed precision in fp16, with GradScaler when training"
    does = Capabilities(scales_loss=True)  # fp16 gradients underflow without it; bf16 has fp32's range
    number_format = "fp16"


@registered
class Bf16(_Precision):
    name = "bf16"
    summary = "weights, inputs and arithmetic in bf16"

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if task == "train":
            self.caution = (
                "weights kept in 16 bits drop small updates, which shows later than a short comparison of losses"
            )

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        """Returns which buffer the forward adds to, if there is one. A short comparison cannot see the harm: in bf16 a count stops at 256,
        and in fp16 at 2048."""
        if facts is None or not facts.accumulates:
            return None
        name = facts.accumulates[0]
        return f"the forward adds to {name} call by call, and in 16 bits that stops moving; amp keeps it as it is"

    def apply(self, setup: Setup) -> None:
        setup.workload.model = setup.model = setup.workload.model.to(self.dtype)
        setup.change_inputs(lambda leaf: leaf.to(self.dtype) if leaf.is_floating_point() else leaf)

    def write(self, code: RecipeCode) -> None:
        if self.task == "generate":
            code.carry(cast_weights)
            code.model_lines.append(f"model = cast_weights(model, {self.dtype})")
            return
        code.model_lines.append(f"model = model.to({self.dtype})")
        code.input_changes.append(f"tensor.to({self.dtype}) if tensor.is_floating_point() else tensor")


@registered
class Fp16(Bf16):
    name = "fp16"
    summary = "weights, inputs and arithmetic in fp16"
    number_format = "fp16"


SMALLEST_QUANTIZED_SHARE = 0.1
"""With a smaller share of the weights or of the time, a quantized model is little else than the old one with a few rounded layers."""


class _Quantized(RecipeSwitch):
    stage = QUANTIZE
    family = "quantize"
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "generate")
    does = Capabilities(quantizes=True)
    # Autocast would cast what goes into a layer whose scales are fp32, while torchao documents models that are cast whole.
    # The engines take the weights out of the model in ways that do not work for quantized ones.
    excludes = frozenset({"int8", "fp8", "amp", "amp-bf16", "torchscript", "onnx", "tensorrt"})
    packages = ("quant", "torchao")
    configs: ClassVar[tuple[str, str]]
    """Torchao's configs have these names: the first quantizes both sides of a product, the second the weights alone."""
    carries = (is_plain_linear,)

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        is_for_weights = self.argument == "weight-only"
        if is_for_weights:
            self.number_format = f"{self.name}-weights"
        is_chosen = f"lambda module, name: is_plain_linear(module, {SIDES[self.name]})"
        self.config = name = self.configs[is_for_weights]
        self.imports = (f"from torchao.quantization import {name}, quantize_",)
        # If it is left to itself, torchao sets flags of the whole process: inductor's, and TF32 for every other product.
        self.lines = (f"quantize_(model, {name}(set_inductor_config=False), filter_fn={is_chosen})",)

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if facts is not None:
            linear = facts.layers.get("linear")
            time_share = linear.share if linear is not None else 0.0
            if time_share < SMALLEST_QUANTIZED_SHARE:
                return f"linear layers take {time_share:.1%} of the forward's time"
        share, which = self._share_of(model)
        little = f"torchao quantizes linear layers, and those would be {which}, {share:.1%} of the weights"
        return little if share < SMALLEST_QUANTIZED_SHARE else None

    def _share_of(self, model: nn.Module) -> tuple[float, str]:
        """Returns the share of the weights that are in quantized layers, and how many parameters these are."""
        chosen, everything = {layer.weight for layer in plain_linears(model, self.name)}, list(model.parameters())
        total = sum(parameter.numel() for parameter in everything)
        share = sum(weight.numel() for weight in chosen) / max(total, 1)
        return share, f"{len(chosen)} of {len(everything)} parameters"

    def apply(self, setup: Setup) -> None:
        import torchao
        from torchao import quantization

        model, config = setup.workload.model, getattr(quantization, self.config)(set_inductor_config=False)
        share, which = self._share_of(model)

        def is_chosen(module: nn.Module, _: str) -> bool:
            return is_plain_linear(module, SIDES[self.name])

        quantization.quantize_(model, config, filter_fn=is_chosen)
        said = f"torchao {torchao.__version__}, {self.config}"
        setup.notes[self.name] = f"{said}: {which}, {share:.0%} of the weights"


@registered
class Int8(_Quantized):
    name = "int8"
    summary = "linear layers in int8 (torchao): int8:weight-only, int8:dynamic rounds activations too"
    number_format = "int8"
    arguments = offered = ("weight-only", "dynamic")
    # Dynamic is torchao's own advice where products take the time, on tensor cores and on CPUs with VNNI. On such a CPU, with one
    # thread, an MLP of width 1024 ran at 2.4× with 197 rows and at 0.2× with one; weight-only at 0.8× and 0.7×, because
    # without a compiler it unpacks weights at every call.
    configs = ("Int8DynamicActivationInt8WeightConfig", "Int8WeightOnlyConfig")


@registered
class Fp8(_Quantized):
    name = "fp8"
    summary = "products of linear layers in fp8 (torchao), scaled as they come; fp8:weight-only; Ada, Hopper and later"
    number_format = "fp8"
    arguments = ("weight-only",)
    offered = (None, "weight-only")
    configs = ("Float8DynamicActivationFloat8WeightConfig", "Float8WeightOnlyConfig")

    def refused_by(self, device: Device) -> str | None:
        return device.refusal_of(torch.float8_e4m3fn)
