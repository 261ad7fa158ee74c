"""Switches for convolutional networks: the layout of images, how cuDNN picks its algorithms, BatchNorm folded away."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import ClassVar

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from redline.bench.device.base import Device
from redline.bench.device.failure import one_line
from redline.bench.recipe.base import FLAGS, INFER, LAYOUT, SWITCHES, WEIGHTS, RecipeCode, RecipeSwitch
from redline.bench.recipe.plain import fold_batchnorms, foldable_batchnorms, symbolic_graph
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError
from redline.model.record import Capabilities
from redline.model.work import Facts

FORMAT_BY_RANK = {4: torch.channels_last, 5: torch.channels_last_3d}
NOT_THE_MODELS = (Path(torch.__file__).parent, Path(__file__).parents[1])


class _ForConvolutions(RecipeSwitch):
    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        if facts is not None and "convolution" not in facts.layers:
            return "no convolution runs in this model"
        has_weights = self.task == "step" or any(weight.dim() >= self.fewest_axes for weight in model.parameters())
        return None if has_weights else self.without_weights

    fewest_axes: ClassVar[int] = 3
    without_weights: ClassVar[str] = "the model has no convolutions"


@SWITCHES.register("channels-last")
class ChannelsLast(_ForConvolutions):
    name = "channels-last"
    summary = "images and convolution weights with the channel innermost"
    stage = LAYOUT
    family = "layout"
    fewest_axes = 4
    without_weights = "the model has no convolution weights whose layout could change"

    def apply(self, setup: Setup) -> None:
        model = setup.workload.model
        for rank in {parameter.dim() for parameter in model.parameters()} & FORMAT_BY_RANK.keys():
            model.to(memory_format=FORMAT_BY_RANK[rank])
        setup.change_inputs(_channels_last)

    def write(self, code: RecipeCode) -> None:
        code.model_lines.append("model = model.to(memory_format=torch.channels_last)")
        code.input_changes.append(
            "tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor"
        )


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    layout = FORMAT_BY_RANK.get(tensor.dim())
    return tensor.contiguous(memory_format=layout) if layout else tensor


@SWITCHES.register("cudnn-benchmark")
class CudnnBenchmark(_ForConvolutions):
    name = "cudnn-benchmark"
    summary = "let cuDNN (MIOpen on AMD) time its convolution algorithms and keep the fastest"
    stage = FLAGS
    family = "autotune"
    tasks = ("infer", "train", "step")
    leaves_program = True

    def refusal(self, device: Device) -> str | None:
        if not device.is_accelerator:
            return "cuDNN runs on GPUs only"
        return None if torch.backends.cudnn.is_available() else "this torch has no cuDNN"

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
    tasks = INFER

    def irrelevance(self, model: torch.nn.Module, facts: Facts | None) -> str | None:
        if facts is not None and "batch-norm" not in facts.layers:
            return "no BatchNorm runs in this model"
        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if not norms:
            return "the model has no BatchNorm"
        if all(norm.training for norm in norms):
            return "BatchNorm in training mode follows each batch and cannot be folded; call model.eval() first"
        try:
            pairs = foldable_batchnorms(model)
        except Exception as error:  # a model may do anything to a tracer
            frames = [(Path(frame.filename), frame) for frame in traceback.extract_tb(error.__traceback__)]
            own = [frame for file, frame in frames if not any(map(file.is_relative_to, NOT_THE_MODELS))]
            place = f" (in {own[-1].name}, {Path(own[-1].filename).name}:{own[-1].lineno})" if own else ""
            return f"torch.fx cannot trace the model: {one_line(error)}{place}"
        return None if pairs else "no BatchNorm takes what one convolution or linear layer gives to it alone"

    def apply(self, setup: Setup) -> None:
        model = setup.workload.model
        norms = sum(isinstance(module, _BatchNorm) for module in model.modules())
        pairs = fold_batchnorms(model, setup.args, setup.kwargs)
        if not pairs:
            why = "fold-bn: BatchNorm here scales another axis than the layer before it makes"
            raise BenchError("unsupported", why)
        setup.notes[self.name] = f"folded {len(pairs)} of {norms} BatchNorm layers"

    def write(self, code: RecipeCode) -> None:
        fusion = "from torch.nn.utils.fusion import fuse_conv_bn_weights"
        code.bring_in("from typing import Any", "import torch.fx", fusion)
        code.carry(symbolic_graph, foldable_batchnorms, fold_batchnorms)
        code.model_lines.append("fold_batchnorms(model, args, kwargs)")
