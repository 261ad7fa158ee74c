"""TensorRT, by way of torch-tensorrt. Written from its documentation: it has not met the hardware yet."""

from __future__ import annotations

import torch

from redline.bench.device.base import Device
from redline.bench.failure import is_out_of_memory, one_line
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeSwitch, Setup, missing_extra
from redline.bench.recipe.code import RecipeCode
from redline.errors import BenchError
from redline.spec import Task


@SWITCHES.register("tensorrt")
class TensorRt(RecipeSwitch):
    name = "tensorrt"
    summary = "an engine built by TensorRT (torch-tensorrt), in the number format of the rest of the recipe (inference)"
    stage = COMPILER
    family = "compiler"
    relieves = "both"
    tasks = ("infer",)
    # Autocast is torch's and is not there when an engine computes; layouts and graphs are TensorRT's own business.
    excludes = frozenset({"compile", "torchscript", "amp", "amp-bf16", "graphs", "channels-last"})
    slow_to_prepare = frozenset({None})

    def refusal(self, device: Device, task: Task) -> str | None:
        if device.kind != "cuda":
            return f"TensorRT runs on NVIDIA GPUs, not on {device.kind}"
        return missing_extra("torch_tensorrt", "tensorrt")

    def apply(self, setup: Setup) -> None:
        import torch_tensorrt

        try:
            setup.model = torch_tensorrt.compile(
                setup.workload.model,
                ir="dynamo",
                arg_inputs=list(setup.args),
                kwarg_inputs=setup.kwargs,
                # The engine computes in the formats the recipe has given the model, and in no other.
                use_explicit_typing=True,
                disable_tf32=not torch.backends.cuda.matmul.allow_tf32,
            )
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise BenchError("compile", f"tensorrt cannot build an engine: {one_line(error)}") from error
        setup.notes[self.name] = "memory figures are torch's and leave out what TensorRT holds"

    def write(self, code: RecipeCode) -> None:
        code.bring_in("import torch_tensorrt")
        code.model_lines.append(
            'model = torch_tensorrt.compile(model, ir="dynamo", arg_inputs=list(args), kwarg_inputs=kwargs, '
            "use_explicit_typing=True, disable_tf32=not torch.backends.cuda.matmul.allow_tf32)"
        )
