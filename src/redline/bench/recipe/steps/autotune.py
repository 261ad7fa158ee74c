"""cuDNN's autotuner: try every convolution algorithm once per shape and keep the fastest."""

from __future__ import annotations

import torch

from redline.bench.device.base import Device
from redline.bench.recipe.base import FLAGS, STEPS, RecipeStep, Setup
from redline.spec import Task


@STEPS.register("cudnn-benchmark")
class CudnnBenchmark(RecipeStep):
    name = "cudnn-benchmark"
    summary = "let cuDNN (MIOpen on AMD) time its convolution algorithms and keep the fastest"
    stage = FLAGS

    def refusal(self, device: Device, task: Task) -> str | None:
        if not device.is_accelerator:
            return "cuDNN runs on GPUs only"
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def apply(self, setup: Setup) -> None:
        torch.backends.cudnn.benchmark = True
