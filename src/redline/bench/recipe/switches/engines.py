"""Engines other than torch.compile: ONNX Runtime, TensorRT and TorchScript. The model is exported at the timed shape.

TensorRT is written from its documentation and has not been run yet. TorchScript is deprecated by torch and kept because
people still deploy it.
"""

from __future__ import annotations

import re
import time
import warnings

import torch
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeCode, RecipeSwitch, data_dependence, missing_extra
from redline.bench.recipe.plain import CallForm, OnnxModel
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError
from redline.model.record import Capabilities
from redline.model.spec import Task
from redline.model.work import Facts

TRACE_S = 3.0
"""To trace a model and to freeze what was traced."""


class _Engine(RecipeSwitch):
    """Another engine runs a program of its own, made from one example, with BatchNorm folded into it."""

    stage = COMPILER
    family = "compiler"
    relieves = "both"
    tasks = ("infer",)
    does = Capabilities(compiles=True, refuses_graph=True, dissolves_modules=True, folds_norms=True)

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is not None and facts.strange_outputs:
            return f"the model returns {facts.strange_outputs[0]}, a class that torch's pytree does not know"
        dependence = data_dependence(facts) if facts is not None else None
        return f"a program made from one example keeps one way, and this model {dependence}" if dependence else None

    def is_doubtful(self, facts: Facts) -> bool:
        """What Python reads from tensors is not part of a program: an exporter refuses most of it."""
        return bool(facts.reads)


@SWITCHES.register("onnx")
class OnnxRuntime(_Engine):
    name = "onnx"
    summary = "export to ONNX and run by ONNX Runtime, on the CPU or through its CUDA provider (inference)"
    # Autocast is torch's and is not there when another engine computes; layouts are that engine's own business.
    excludes = frozenset({"compile", "torchscript", "tensorrt", "amp", "amp-bf16", "channels-last"})

    def formats(self, facts: Facts) -> frozenset[str]:
        """It has no kernels for most operators in bf16."""
        return frozenset({"fp32", "fp16"})

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
                raise BenchError("compile", f"onnx cannot run this model: {_onnx_reason(error)}") from error
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


def _onnx_reason(error: BaseException) -> str:
    """The exporter wraps what went wrong into an advice of many lines, the runtime into codes and a file now gone."""
    if error.__cause__ is not None:
        return _onnx_reason(error.__cause__)
    return re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", one_line(error))


@SWITCHES.register("tensorrt")
class TensorRt(_Engine):
    name = "tensorrt"
    summary = "an engine built by TensorRT (torch-tensorrt), in the number format of the rest of the recipe (inference)"
    # Autocast is torch's and is not there when an engine computes; layouts and graphs are TensorRT's own business.
    excludes = frozenset({"compile", "torchscript", "amp", "amp-bf16", "channels-last"})
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


@SWITCHES.register("torchscript")
class TorchScript(_Engine):
    name = "torchscript"
    summary = "torch.jit trace, freeze and optimize_for_inference"

    def prepare_s(self, task: Task) -> float | None:
        return TRACE_S

    def irrelevance(self, model: torch.nn.Module, task: Task, facts: Facts | None) -> str | None:
        found = super().irrelevance(model, task, facts)
        if found is None and facts is not None and facts.reads:
            # Inputs that take the other way may come later: no comparison of outputs here would show that.
            return f"a trace keeps what Python read from the tensors of one example ({', '.join(facts.reads[:3])})"
        return found

    def apply(self, setup: Setup) -> None:
        why = _why_not_traced(setup)
        if why is not None:
            raise BenchError("unsupported", f"torchscript traces {why}", switches=(self.name,), scope="switch")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit announces its retirement on every call
            with torch.inference_mode(), setup.autocast(cache=False):
                try:
                    traced = torch.jit.trace(
                        setup.workload.model,
                        example_inputs=setup.args or None,
                        example_kwarg_inputs=setup.kwargs or None,
                        strict=False,
                        check_trace=False,  # the numerics check compares far more than a second trace would
                    )
                except (RuntimeError, TypeError, NameError) as error:
                    if is_out_of_memory(error):
                        raise  # a failure of another kind, known by its own error
                    raise BenchError("compile", f"torchscript cannot trace it: {_torchscript_reason(error)}") from error
                setup.model = torch.jit.optimize_for_inference(torch.jit.freeze(traced))

    def write(self, code: RecipeCode) -> None:
        inputs = "example_inputs=args or None, example_kwarg_inputs=kwargs or None"
        # A trace made outside of autocast would not see it.
        context = (
            f"torch.autocast({code.device!r}, dtype={code.autocast}, cache_enabled=False), " if code.autocast else ""
        )
        code.model_lines += [
            f"with {context}torch.inference_mode():",
            f"    model = torch.jit.trace(model, {inputs}, strict=False, check_trace=False)",
            "    model = torch.jit.optimize_for_inference(torch.jit.freeze(model))",
        ]


def _why_not_traced(setup: Setup) -> str | None:
    """What the inputs hold that no trace takes; None where it may."""
    if setup.args and setup.kwargs:
        return "positional or keyword inputs, not both at once"
    others = [leaf for leaf in pytree.tree_leaves((setup.args, setup.kwargs)) if not isinstance(leaf, torch.Tensor)]
    return f"tensors, and the model takes {type(others[0]).__name__} too" if others else None


def _torchscript_reason(error: Exception) -> str:
    """Its first line, and those after it as long as one ends in a comma: torch.jit breaks its sentences there."""
    lines = re.sub(r",\s*\n\s*", ", ", str(error).strip()).splitlines() or [""]
    return lines[0].strip()[:300] or type(error).__name__  # it may print whole tensors
