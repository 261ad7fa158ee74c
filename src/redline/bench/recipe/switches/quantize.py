"""Quantized matrix products by torchao: int8 for inference, fp8 for inference and training.

Never tried or recommended unless asked for.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import nn

from redline.bench.device.base import Device
from redline.bench.recipe.base import QUANTIZE, SWITCHES, RecipeCode, RecipeSwitch, literal, missing_extra
from redline.bench.recipe.plain import SIDES, is_plain_linear, plain_linears
from redline.bench.workload.step import Setup
from redline.model.record import Capabilities
from redline.model.spec import Task
from redline.model.work import Facts

SMALLEST_SHARE = 0.1
"""Share of the model's weights, and of the time: below it a quantized model is the old one with a few rounded layers."""


_UNTRIED_IN_TRAINING = frozenset({"int8", "amp", "fp16"})


class _Quantized(RecipeSwitch):
    stage = QUANTIZE
    family = "quantize"
    tasks: ClassVar[tuple[Task, ...]] = ("infer", "generate")
    does = Capabilities(quantizes=True)
    # Autocast would cast what goes into a layer whose scales are fp32; models cast whole are what torchao documents.
    # The others take the weights out of the model by ways that quantized ones do not go.
    excludes = frozenset({"int8", "fp8", "int4", "amp", "amp-bf16", "torchscript", "onnx", "tensorrt"})

    def refusal(self, device: Device, task: Task) -> str | None:
        return missing_extra("torchao", "quant")

    def irrelevance(self, model: nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is not None:
            linear = facts.layers.get("linear")
            if linear is None or linear.share < SMALLEST_SHARE:
                return f"linear layers take {linear.share if linear else 0.0:.1%} of the forward's time"
        share, touched, total = share_of(model, self.name)
        if share >= SMALLEST_SHARE:
            return None
        which = f"{touched} of {total} parameters, {share:.1%} of the weights"
        return f"torchao quantizes linear layers, and those would be {which}"

    @abstractmethod
    def config(self) -> str:
        """The name of torchao's config."""

    def config_options(self) -> dict[str, Any]:
        return {"set_inductor_config": False}

    def apply(self, setup: Setup) -> None:
        import torchao.quantization

        model, name = setup.workload.model, self.config()
        share, touched, total = share_of(model, self.name)
        # Left to itself torchao sets switches of the whole process: inductor's, and TF32 for every other product.
        config: Any = getattr(torchao.quantization, name)(**self.config_options())
        torchao.quantization.quantize_(
            model, config, filter_fn=lambda module, _: is_plain_linear(module, SIDES[self.name])
        )
        setup.notes[self.name] = (
            f"torchao {torchao.__version__}, {name}: {touched} of {total} parameters, {share:.0%} of the weights"
        )

    def write(self, code: RecipeCode) -> None:
        name = self.config()
        code.bring_in(f"from torchao.quantization import {name}, quantize_")
        code.carry(is_plain_linear)
        options = ", ".join(f"{key}={literal(value)}" for key, value in self.config_options().items())
        code.model_lines += [
            f"config = {name}({options})",
            f"quantize_(model, config, filter_fn=lambda module, name: is_plain_linear(module, {SIDES[self.name]}))",
        ]


@SWITCHES.register("int8")
class Int8(_Quantized):
    name = "int8"
    summary = "linear layers in int8 (torchao): int8:weight-only, int8:dynamic rounds activations too"
    arguments = ("weight-only", "dynamic")
    offered = ("weight-only", "dynamic")

    _CONFIGS: ClassVar[dict[str, str]] = {
        "weight-only": "Int8WeightOnlyConfig",
        "dynamic": "Int8DynamicActivationInt8WeightConfig",
    }

    def config(self) -> str:
        # torchao's own advice where products take the time, on tensor cores and on CPUs with VNNI. On such a CPU, one
        # thread, an MLP of width 1024 ran at 2.4× with 197 rows and at 0.2× with one; weight-only at 0.8× and 0.7×, for
        # without a compiler it unpacks weights at every call.
        return self._CONFIGS[self.switch.argument or "dynamic"]

    def computes_in(self) -> str:
        return "int8-weights" if self.switch.argument == "weight-only" else "int8"


@SWITCHES.register("int4")
class Int4(_Quantized):
    name = "int4"
    summary = "weights of linear layers in int4 (torchao, groups of 128); activations stay in bf16; needs a GPU"
    number_format = "int4-weights"

    def refusal(self, device: Device, task: Task) -> str | None:
        if not device.is_accelerator:
            return "torchao packs int4 weights for GPUs only"
        return super().refusal(device, task)

    def config(self) -> str:
        return "Int4WeightOnlyConfig"

    def config_options(self) -> dict[str, Any]:
        return {"group_size": 128}


@SWITCHES.register("fp8")
class Fp8(_Quantized):
    name = "fp8"
    summary = "products of linear layers in fp8 (torchao), scaled as they come; fp8:weight-only; Ada, Hopper and later"
    arguments = ("weight-only",)
    offered = (None, "weight-only")
    tasks = ("infer", "train", "generate")

    def refusal(self, device: Device, task: Task) -> str | None:
        return device.refusal_of(torch.float8_e4m3fn) or super().refusal(device, task)

    def exclusions(self, task: Task) -> frozenset[str]:
        # In training weights stay as they are and every product is rounded, also under autocast. torchao trains bf16 and
        # fp32 models so.
        return _UNTRIED_IN_TRAINING if task == "train" else self.excludes

    def config(self) -> str:
        if self.switch.argument == "weight-only":
            return "Float8WeightOnlyConfig"
        return "Float8DynamicActivationFloat8WeightConfig"

    def computes_in(self) -> str:
        return "fp8-weights" if self.switch.argument == "weight-only" else "fp8"

    def apply(self, setup: Setup) -> None:
        if setup.task != "train":
            super().apply(setup)
            return
        import torchao
        from torchao.float8 import convert_to_float8_training

        model = setup.workload.model
        share, touched, total = share_of(model, self.name)
        convert_to_float8_training(model, module_filter_fn=lambda module, _: is_plain_linear(module, SIDES[self.name]))
        setup.notes[self.name] = (
            f"torchao {torchao.__version__}, dynamic scales: the products of {touched} of {total} parameters, "
            f"{share:.0%} of the weights"
        )

    def write(self, code: RecipeCode) -> None:
        if code.task != "train":
            super().write(code)
            return
        code.bring_in("from torchao.float8 import convert_to_float8_training")
        code.carry(is_plain_linear)
        keep = f"lambda module, name: is_plain_linear(module, {SIDES[self.name]})"
        code.model_lines.append(f"convert_to_float8_training(model, module_filter_fn={keep})")


def share_of(model: nn.Module, number_format: str) -> tuple[float, int, int]:
    """The share of the weights in layers that would be quantized, and of how many parameters these are how many."""
    chosen, everything = {layer.weight for layer in plain_linears(model, number_format)}, list(model.parameters())
    total = sum(parameter.numel() for parameter in everything)
    return sum(weight.numel() for weight in chosen) / max(total, 1), len(chosen), len(everything)
