"""TorchScript: trace, freeze, optimize_for_inference. Kept because people still deploy it; torch deprecates it."""

from __future__ import annotations

import warnings

import torch

from redline.bench.failure import is_out_of_memory
from redline.bench.recipe.base import COMPILER, SWITCHES, RecipeSwitch, Setup
from redline.bench.recipe.code import RecipeCode
from redline.errors import BenchError


@SWITCHES.register("torchscript")
class TorchScript(RecipeSwitch):
    name = "torchscript"
    summary = "torch.jit trace, freeze and optimize_for_inference"
    stage = COMPILER
    family = "compiler"
    relieves = "both"
    tasks = ("infer",)

    def apply(self, setup: Setup) -> None:
        if setup.args and setup.kwargs:
            raise BenchError("unsupported", "torchscript traces positional or keyword inputs, not both at once")
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
                    raise BenchError("compile", f"torchscript cannot trace it: {_beginning(error)}") from error
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


def _beginning(error: Exception) -> str:
    """Its first line, and those after it as long as one ends in a comma: torch.jit breaks its sentences there."""
    told: list[str] = []
    for line in filter(None, map(str.strip, str(error).splitlines())):
        told.append(line)
        if not line.endswith(","):
            break
    return " ".join(told) or type(error).__name__
