"""cuDNN's autotuner: try every convolution algorithm once per shape and keep the fastest."""

from __future__ import annotations

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import FLAGS, STEPS, RecipeStep, Setup
from redline.bench.recipe.code import RecipeCode
from redline.spec import Task


@STEPS.register("cudnn-benchmark")
class CudnnBenchmark(RecipeStep):
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
