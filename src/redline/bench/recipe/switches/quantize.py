"""Quantized matrix products by torchao: int8 and int4 for inference, fp8 for inference and training.

None of them is tried or recommended unless asked for.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.recipe.base import (
    ALL_MODELS,
    QUANTIZE,
    SWITCHES,
    RecipeCode,
    RecipeSwitch,
    literal,
    missing_extra,
)
from redline.bench.recipe.plain import SIDES, is_plain_linear, plain_linears
from redline.bench.workload.step import Setup
from redline.model.record import Capabilities
from redline.model.spec import Switch, Task
from redline.model.work import Facts

SMALLEST_SHARE = 0.1
"""With a smaller share of the weights, or of the time, a quantized model is the old one with a few rounded layers."""


class _Quantized(RecipeSwitch):
    stage = QUANTIZE
    family = "quantize"
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "generate")
    does = Capabilities(quantizes=True)
    # Autocast would cast what goes into a layer whose scales are fp32; models cast whole are what torchao documents.
    # The engines take the weights out of the model by ways that quantized ones do not go.
    excludes = frozenset({"int8", "fp8", "int4", "amp", "amp-bf16", "torchscript", "onnx", "tensorrt"})
    config: ClassVar[dict[str | None, str]]
    """The names of torchao's configs, by argument."""
    # Left to itself torchao sets switches of the whole process: inductor's, and TF32 for every other product.
    config_options: ClassVar[dict[str, Any]] = {"set_inductor_config": False}

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if self.argument == "weight-only":
            self.number_format = f"{self.name}-weights"

    def refusal(self, device: Device) -> str | None:
        return missing_extra("quant", "torchao")

    def irrelevance(self, model: nn.Module, facts: Facts | None) -> str | None:
        if facts is not None:
            linear = facts.layers.get("linear")
            time_share = linear.share if linear is not None else 0.0
            if time_share < SMALLEST_SHARE:
                return f"linear layers take {time_share:.1%} of the forward's time"
        share, which = self._share_of(model)
        little = f"torchao quantizes linear layers, and those would be {which}, {share:.1%} of the weights"
        return little if share < SMALLEST_SHARE else None

    def _share_of(self, model: nn.Module) -> tuple[float, str]:
        """The share of the weights in layers that are quantized, and how many parameters these are."""
        chosen, everything = {layer.weight for layer in plain_linears(model, self.name)}, list(model.parameters())
        total = sum(parameter.numel() for parameter in everything)
        share = sum(weight.numel() for weight in chosen) / max(total, 1)
        return share, f"{len(chosen)} of {len(everything)} parameters"

    def apply(self, setup: Setup) -> None:
        import torchao

        model = setup.workload.model
        (share, which), name = self._share_of(model), "dynamic scales"

        def is_chosen(module: nn.Module, _: str) -> bool:
            return is_plain_linear(module, SIDES[self.name])

        if self.task == "train":
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model, module_filter_fn=is_chosen)
            which = f"the products of {which}"
        else:
            from torchao import quantization

            name = self.config[self.argument]
            quantization.quantize_(model, getattr(quantization, name)(**self.config_options), filter_fn=is_chosen)
        setup.notes[self.name] = f"torchao {torchao.__version__}, {name}: {which}, {share:.0%} of the weights"

    def write(self, code: RecipeCode) -> None:
        code.carry(is_plain_linear)
        is_chosen = f"lambda module, name: is_plain_linear(module, {SIDES[self.name]})"
        if self.task == "train":
            code.bring_in("from torchao.float8 import convert_to_float8_training")
            code.model_lines.append(f"convert_to_float8_training(model, module_filter_fn={is_chosen})")
            return
        name = self.config[self.argument]
        options = ", ".join(f"{key}={literal(value)}" for key, value in self.config_options.items())
        code.bring_in(f"from torchao.quantization import {name}, quantize_")
        code.model_lines += [f"config = {name}({options})", f"quantize_(model, config, filter_fn={is_chosen})"]


@SWITCHES.register("int8")
class Int8(_Quantized):
    name = "int8"
    summary = "linear layers in int8 (torchao): int8:weight-only, int8:dynamic rounds activations too"
    number_format = "int8"
    arguments = offered = ("weight-only", "dynamic")
    # Dynamic is torchao's own advice where products take the time, on tensor cores and on CPUs with VNNI. On such a CPU, with one
    # thread, an MLP of width 1024 ran at 2.4× with 197 rows and at 0.2× with one; weight-only at 0.8× and 0.7×, because
    # without a compiler it unpacks weights at every call.
    config = dict.fromkeys((None, "dynamic"), "Int8DynamicActivationInt8WeightConfig") | {
        "weight-only": "Int8WeightOnlyConfig"
    }


@SWITCHES.register("int4")
class Int4(_Quantized):
    name = "int4"
    summary = "weights of linear layers in int4 (torchao, groups of 128); activations stay in bf16; needs a GPU"
    number_format = "int4-weights"
    config: ClassVar[dict[str | None, str]] = {None: "Int4WeightOnlyConfig"}
    config_options: ClassVar[dict[str, Any]] = {"group_size": 128}

    def refusal(self, device: Device) -> str | None:
        only = "torchao packs int4 weights for GPUs only"
        return super().refusal(device) if device.is_accelerator else only


@SWITCHES.register("fp8")
class Fp8(_Quantized):
    name = "fp8"
    summary = "products of linear layers in fp8 (torchao), scaled as they come; fp8:weight-only; Ada, Hopper and later"
    number_format = "fp8"
    arguments = ("weight-only",)
    offered = (None, "weight-only")
    tasks = ALL_MODELS
    config: ClassVar[dict[str | None, str]] = {
        None: "Float8DynamicActivationFloat8WeightConfig",
        "weight-only": "Float8WeightOnlyConfig",
    }

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if task == "train":
            # Weights stay as they are and every product is rounded, also under autocast: torchao trains bf16 and fp32 models so.
            self.excludes = frozenset({"int8", "amp", "fp16"})

    def refusal(self, device: Device) -> str | None:
        return device.refusal_of(torch.float8_e4m3fn) or super().refusal(device)
