"""Switches for convolutional networks: the layout of images, how cuDNN picks its algorithms, BatchNorm folded away."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.base import Device
from redline.bench.device.failure import one_line
from redline.bench.recipe.base import FLAGS, LAYOUT, SWITCHES, WEIGHTS, RecipeCode, RecipeSwitch
from redline.bench.recipe.plain import fold_batchnorms, foldable_batchnorms, symbolic_graph
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError
from redline.model.record import Capabilities
from redline.model.spec import Task
from redline.model.work import Facts

_TORCH = Path(torch.__file__).parent
_FORMAT_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}


@SWITCHES.register("channels-last")
class ChannelsLast(RecipeSwitch):
    name = "channels-last"
    summary = "images and convolution weights with the channel innermost"
    stage = LAYOUT
    family = "layout"

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is not None and "convolution" not in facts.layers:
            return "no convolution runs in this model"
        return None if _ranks(model) else "the model has no convolution weights whose layout could change"

    def apply(self, setup: Setup) -> None:
        for rank in _ranks(setup.workload.model):
            setup.workload.model.to(memory_format=_FORMAT_BY_RANK[rank])
        setup.change_inputs(_channels_last)

    def write(self, code: RecipeCode) -> None:
        code.model_lines.append("model = model.to(memory_format=torch.channels_last)")
        code.input_changes.append(
            "tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor"
        )


def _ranks(model: torch.nn.Module) -> set[int]:
    return {parameter.dim() for parameter in model.parameters()} & _FORMAT_BY_RANK.keys()


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    layout = _FORMAT_BY_RANK.get(tensor.dim())
    return tensor.contiguous(memory_format=layout) if layout else tensor


@SWITCHES.register("cudnn-benchmark")
class CudnnBenchmark(RecipeSwitch):
    name = "cudnn-benchmark"
    summary = "let cuDNN (MIOpen on AMD) time its convolution algorithms and keep the fastest"
    stage = FLAGS
    family = "autotune"
    tasks = ("infer", "train", "step")
    leaves_program = True

    def refusal(self, device: Device, task: Task) -> str | None:
        if not device.is_accelerator:
            return "cuDNN runs on GPUs only"
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is not None:
            return None if "convolution" in facts.layers else "no convolution runs in this model"
        has_convolutions = task == "step" or any(parameter.dim() >= 3 for parameter in model.parameters())
        return None if has_convolutions else "the model has no convolutions"

    def apply(self, setup: Setup) -> None:
        torch.backends.cudnn.benchmark = True

    def write(self, code: RecipeCode) -> None:
        code.flags.append("torch.backends.cudnn.benchmark = True")


@SWITCHES.register("fold-bn")
class FoldBatchNorm(RecipeSwitch):
    name = "fold-bn"
    summary = "BatchNorm folded into the convolution or linear layer before it (inference)"
    stage = WEIGHTS
    relieves = "both"
    does = Capabilities(folds_norms=True)
    tasks = ("infer",)

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is not None and "batch-norm" not in facts.layers:
            return "no BatchNorm runs in this model"
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if not norms:
            return "the model has no BatchNorm"
        if all(norm.training for norm in norms):
            return "BatchNorm in training mode follows each batch and cannot be folded; call model.eval() first"
        try:
            pairs = foldable_batchnorms(model)
        except Exception as error:  # what a model does to a tracer is anybody's guess
            return f"torch.fx cannot trace the model: {one_line(error)}{_place_of(error)}"
        return None if pairs else "no BatchNorm takes what one convolution or linear layer gives to it alone"

    def apply(self, setup: Setup) -> None:
        model = setup.workload.model
        norms = sum(isinstance(module, _BatchNorm) for module in model.modules())
        pairs = fold_batchnorms(model, setup.args, setup.kwargs)
        if not pairs:
            raise BenchError(
                "unsupported", "fold-bn: BatchNorm here scales another axis than the layer before it makes"
            )
        setup.notes[self.name] = f"folded {len(pairs)} of {norms} BatchNorm layers"

    def write(self, code: RecipeCode) -> None:
        code.bring_in(
            "from typing import Any", "import torch.fx", "from torch.nn.utils.fusion import fuse_conv_bn_weights"
        )
        code.carry(symbolic_graph, foldable_batchnorms, fold_batchnorms)
        code.model_lines.append("fold_batchnorms(model, args, kwargs)")


def _place_of(error: Exception) -> str:
    """Where in the model's own code it happened."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_of_the_model(Path(frame.filename))]
    return f" (in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _is_of_the_model(file: Path) -> bool:
    return not file.is_relative_to(_TORCH) and not file.is_relative_to(Path(__file__).parents[1])
