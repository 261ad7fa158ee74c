"""ONNX Runtime: the model exported at the timed shape and run by another engine."""

from __future__ import annotations

import re
import time
import warnings

from redline.bench.device.base import Device
from redline.bench.failure import is_out_of_memory, one_line
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeSwitch, Setup, missing_extra
from redline.bench.recipe.code import RecipeCode
from redline.bench.recipe.plain.calling import CallForm
from redline.bench.recipe.plain.onnx import OnnxModel
from redline.errors import BenchError
from redline.spec import Task


@SWITCHES.register("onnx")
class OnnxRuntime(RecipeSwitch):
    name = "onnx"
    summary = "export to ONNX and run by ONNX Runtime, on the CPU or through its CUDA provider (inference)"
    stage = COMPILER
    family = "compiler"
    relieves = "both"
    tasks = ("infer",)
    # Autocast is torch's and is not there when another engine computes; layouts are that engine's own business.
    excludes = frozenset({"compile", "torchscript", "tensorrt", "amp", "amp-bf16", "graphs", "channels-last"})

    def refusal(self, device: Device, task: Task) -> str | None:
        missing = [missing_extra(package, "onnx") for package in ("onnx", "onnxscript", "onnxruntime")]
        if any(missing):
            return next(filter(None, missing))
        provider = _PROVIDERS.get(device.kind)
        if provider is None:
            return f"there is no provider of ONNX Runtime for {device.kind} here"
        import onnxruntime

        if provider not in onnxruntime.get_available_providers():
            return f"this ONNX Runtime has no {provider}; for a GPU install onnxruntime-gpu in place of onnxruntime"
        return None

    def apply(self, setup: Setup) -> None:
        import onnxruntime

        started = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter's own, about its insides
            try:
                setup.model = OnnxModel(setup.workload.model, setup.args, setup.kwargs)
            except Exception as error:  # onnxruntime's and the exporter's share no class
                if is_out_of_memory(error):
                    raise
                raise BenchError("compile", f"onnx cannot run this model: {_reason(error)}") from error
        seconds = time.perf_counter() - started
        engine = f"ONNX Runtime {onnxruntime.__version__}, {_PROVIDERS[setup.device.kind]}"
        setup.notes[self.name] = f"{engine}, exported and loaded in {seconds:.1f} s"
        if setup.device.is_accelerator:
            setup.notes[self.name] += "; memory figures are torch's and leave out what ONNX Runtime holds"

    def write(self, code: RecipeCode) -> None:
        code.bring_in(
            "import os",
            "import tempfile",
            "from typing import Any",
            "from torch.utils._pytree import tree_flatten, tree_unflatten",
        )
        code.carry(CallForm, OnnxModel)
        code.model_lines.append("model = OnnxModel(model, args, kwargs)")
        code.notes.append(f"Needs onnx, onnxscript and onnxruntime{'-gpu' if code.device == 'cuda' else ''}.")


_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


def _reason(error: BaseException) -> str:
    """The exporter wraps what went wrong into an advice of many lines, the runtime into codes and a file now gone."""
    if error.__cause__ is not None:
        return _reason(error.__cause__)
    return re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", one_line(error))
