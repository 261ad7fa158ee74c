"""The optimizer's switch as one kernel over all parameters, instead of some per parameter group."""

from __future__ import annotations

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import FLAGS, SWITCHES, RecipeSwitch, Setup
from redline.bench.recipe.code import RecipeCode
from redline.spec import Task


@SWITCHES.register("fused-optimizer")
class FusedOptimizer(RecipeSwitch):
    name = "fused-optimizer"
    summary = "SGD, Adam or AdamW as one fused kernel (fused=True)"
    stage = FLAGS
    family = "optimizer"
    relieves = "both"
    tasks = ("train",)
    leaves_program = True

    def apply(self, setup: Setup) -> None:
        setup.optimizer_options["fused"] = True

    def write(self, code: RecipeCode) -> None:
        code.optimizer_options["fused"] = "True"


@SWITCHES.register("cudnn-benchmark")
class CudnnBenchmark(RecipeSwitch):
    name = "cudnn-benchmark"
    summary = "let cuDNN (MIOpen on AMD) time its convolution algorithms and keep the fastest"
    stage = FLAGS
    family = "autotune"
    leaves_program = True

    def refusal(self, device: Device, task: Task) -> str | None:
        if not device.is_accelerator:
            return "cuDNN runs on GPUs only"
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def irrelevance(self, model: torch.nn.Module, task: Task) -> str | None:
        has_convolutions = any(parameter.dim() >= 3 for parameter in model.parameters())
        return None if has_convolutions else "the model has no convolutions"

    def apply(self, setup: Setup) -> None:
        torch.backends.cudnn.benchmark = True

    def write(self, code: RecipeCode) -> None:
        code.flags.append("torch.backends.cudnn.benchmark = True")
