"""This has the engines other than torch.compile: ONNX Runtime, TensorRT and TorchScript. The model is exported at the timed shape.

TensorRT is written from its documentation and has not been run yet. Torch has deprecated TorchScript, but people still deploy it.
"""

from __future__ import annotations

import re
import time
import warnings
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.recipe.base import COMPILER, INFER, RecipeCode, RecipeSwitch, data_dependence, registered
from redline.bench.recipe.plain import OnnxModel
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError
from redline.model.record import Capabilities
from redline.model.work import Facts


class _Engine(RecipeSwitch):
    """An engine runs a program of its own, which is made from one example and has BatchNorm folded into it."""

    stage = COMPILER
    family = "compiler"
    relieves = "both"
    tasks = INFER
    does = Capabilities(compiles=True, refuses_graph=True, dissolves_modules=True, folds_norms=True)
    # Autocast is torch's and does not reach an engine, and layouts are the engine's own business.
    excludes = frozenset({"compile", "torchscript", "onnx", "tensorrt", "amp", "amp-bf16", "channels-last"})
    failing = "cannot run this model"

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        dependence = data_dependence(facts) if facts is not None else None
        return f"a program made from one example keeps one way, and this model {dependence}" if dependence else None

    def is_doubtful(self, facts: Facts) -> bool:
        """Returns whether Python reads values from tensors. They are no part of a program, so an exporter refuses most such models."""
        return bool(facts.reads)

    def apply(self, setup: Setup) -> None:
        """Makes the engine's program the model. Whatever goes wrong is a failure of the compiler."""
        started = time.perf_counter()
        with warnings.catch_warnings():
            # Exporters warn about their own insides, and torch.jit warns of its retirement.
            warnings.simplefilter("ignore")
            try:
                setup.model = self.program(setup)
            except BenchError:
                raise
            except Exception as error:  # these libraries share no class of errors
                if is_out_of_memory(error):
                    raise  # this is a failure of another kind, which is known by its own error
                raise BenchError("compile", f"{self.name} {self.failing}: {self.reason(error)}") from error
        if self.packages:
            taken = f"exported and loaded in {time.perf_counter() - started:.1f} s"
            setup.notes[self.name] = f"{taken}; memory figures are torch's and leave out what it holds"

    @abstractmethod
    def program(self, setup: Setup) -> Any:
        """Returns the program that is called in place of the model."""

    def reason(self, error: BaseException) -> str:
        """Returns why it failed, in one line.

        An exporter wraps its reason into advice of many lines, ONNX Runtime into codes and the name of a file that is gone by now.
        """
        if error.__cause__ is not None:
            return self.reason(error.__cause__)
        return re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from \S+ failed:)?", "", one_line(error))


@registered
class OnnxRuntime(_Engine):
    name = "onnx"
    summary = "export to ONNX and run by ONNX Runtime on the CPU (inference)"
    packages = ("onnx", "onnx", "onnxscript", "onnxruntime")
    carries = (OnnxModel,)
    lines = ("model = OnnxModel(model, args, kwargs)",)
    remarks = ("Needs onnx, onnxscript and onnxruntime.",)

    def formats(self, facts: Facts) -> frozenset[str]:
        """Returns fp32 and fp16, because ONNX Runtime has no kernels for most operators in bf16."""
        return frozenset({"fp32", "fp16"})

    def refused_by(self, device: Device) -> str | None:
        return "it runs on a CPU here; a GPU has compile and tensorrt" if device.is_accelerator else None

    def program(self, setup: Setup) -> OnnxModel:
        return OnnxModel(setup.workload.model, setup.args, setup.kwargs)


@registered
class TensorRt(_Engine):
    name = "tensorrt"
    summary = "an engine built by TensorRT (torch-tensorrt), in the number format of the rest of the recipe (inference)"
    is_slow_to_prepare = True
    packages = ("tensorrt", "torch_tensorrt")
    imports = ("import torch_tensorrt",)
    lines = (
        'model = torch_tensorrt.compile(model, ir="dynamo", arg_inputs=list(args), kwarg_inputs=kwargs, '
        "use_explicit_typing=True, disable_tf32=not torch.backends.cuda.matmul.allow_tf32)",
    )
    failing = "cannot build an engine"

    def refused_by(self, device: Device) -> str | None:
        return None if device.kind == "cuda" else f"TensorRT runs on NVIDIA GPUs, not on {device.kind}"

    def program(self, setup: Setup) -> Any:
        import torch_tensorrt

        return torch_tensorrt.compile(
            setup.workload.model,
            ir="dynamo",
            arg_inputs=list(setup.args),
            kwarg_inputs=setup.kwargs,
            # The engine computes in the formats that the recipe has given the model, and in no other.
            use_explicit_typing=True,
            disable_tf32=not torch.backends.cuda.matmul.allow_tf32,
        )


@registered
class TorchScript(_Engine):
    name = "torchscript"
    summary = "torch.jit trace, freeze and optimize_for_inference"
    excludes = frozenset({"onnx", "tensorrt"})
    prepare_s = 3.0
    """It takes about this long to trace a model and to freeze what was traced."""
    failing = "cannot trace it"

    def unsuited(self, model: nn.Module, facts: Facts | None) -> str | None:
        if found := super().unsuited(model, facts):
            return found
        # Inputs that take the other way may come later, and no comparison of outputs here would show that.
        reads = ", ".join(facts.reads[:3]) if facts is not None else ""
        return f"a trace keeps what Python read from the tensors of one example ({reads})" if reads else None

    def program(self, setup: Setup) -> Any:
        leaves = pytree.tree_leaves((setup.args, setup.kwargs))
        others = [type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor)]
        why = f"tensors, and the model takes {others[0]} too" if others else None
        if setup.args and setup.kwargs:
            why = "positional or keyword inputs, not both at once"
        if why is not None:
            raise BenchError("unsupported", f"torchscript traces {why}", switches=(self.name,), scope="switch")
        with torch.inference_mode(), setup.autocast(cache=False):
            traced = torch.jit.trace(
                setup.workload.model,
                example_inputs=setup.args or None,
                example_kwarg_inputs=setup.kwargs or None,
                strict=False,
                check_trace=False,  # the numerics check compares far more than a second trace would
            )
            return torch.jit.optimize_for_inference(torch.jit.freeze(traced))

    def reason(self, error: BaseException) -> str:
        """Returns the first line of the error, with the next as long as a line ends in a comma, where torch.jit breaks its sentences."""
        lines = re.sub(r",\s*\n\s*", ", ", str(error).strip()).splitlines() or [""]
        return lines[0].strip()[:300] or type(error).__name__  # it may print whole tensors

    def write(self, code: RecipeCode) -> None:
        inputs = "example_inputs=args or None, example_kwarg_inputs=kwargs or None"
        # A trace made outside of autocast would not see it.
        autocast = f"torch.autocast({code.device!r}, dtype={code.autocast}, cache_enabled=False), "
        code.model_lines += [
            f"with {autocast if code.autocast else ''}torch.inference_mode():",
            f"    model = torch.jit.trace(model, {inputs}, strict=False, check_trace=False)",
            "    model = torch.jit.optimize_for_inference(torch.jit.freeze(model))",
        ]
