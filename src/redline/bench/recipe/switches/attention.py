"""Which kernel does scaled_dot_product_attention, instead of the one torch would pick."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, is_without_attention_backend, one_line, refused_attention
from redline.bench.recipe.base import ATTENTION, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.recipe.fastpath import leave_fast_path, write_without_fast_path
from redline.bench.recipe.plain import BACKENDS, WithAttention
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.spec import Switch, Task
from redline.model.work import Facts

_ON_CPU = ("flash", "math")


@SWITCHES.register("sdpa")
class Attention(RecipeSwitch):
    name = "sdpa"
    summary = "one kernel for every attention: sdpa:flash, sdpa:efficient, sdpa:cudnn or sdpa:math"
    stage = ATTENTION
    family = "attention"
    excludes = frozenset({"torchscript", "onnx", "tensorrt"})  # these bring their own attention
    arguments = tuple(BACKENDS)
    offered = tuple(BACKENDS)
    tasks = ("infer", "train", "generate")

    def __init__(self, switch: Switch) -> None:
        super().__init__(switch)
        if switch.argument is None:
            raise SpecError(f"switch sdpa needs a backend: {', '.join(f'sdpa:{name}' for name in BACKENDS)}")
        self.backend = BACKENDS[switch.argument]

    def refusal(self, device: Device, task: Task) -> str | None:
        if not device.is_accelerator and self.switch.argument not in _ON_CPU:
            return f"torch has no {self.switch.argument} attention for the CPU, only {' and '.join(_ON_CPU)}"
        if self.switch.argument == "cudnn" and device.kind == "rocm":
            return "cuDNN is NVIDIA's"
        return None

    def irrelevance(self, model: nn.Module, task: Task, facts: Facts | None) -> str | None:
        if facts is None:
            return None  # applying it finds out
        if "attention" not in facts.layers:
            return _NEVER_CALLED
        if not self.formats(facts):
            return f"{self.switch.argument} cannot do this model's attention here in any number format"
        return None

    def formats(self, facts: Facts) -> frozenset[str]:
        return frozenset(
            form for form, backends in facts.attention_backends.items() if self.switch.argument in backends
        )

    def apply(self, setup: Setup) -> None:
        model = setup.model
        assert isinstance(model, nn.Module)
        leave_fast_path(setup)
        if _refused_with(setup, model, []) is None:
            raise BenchError("unsupported", f"sdpa: {_NEVER_CALLED}")
        reason = _refused_with(setup, model, [self.backend])
        if reason is not None:
            raise BenchError(
                "unsupported", f"sdpa:{self.switch.argument} cannot do this model's attention here: {reason}"
            )
        setup.model = WithAttention(model, self.backend)

    def write(self, code: RecipeCode) -> None:
        code.bring_in("from typing import Any", "from torch.nn.attention import SDPBackend, sdpa_kernel")
        write_without_fast_path(code)
        code.carry(WithAttention)
        code.model_lines.append(f"model = WithAttention(model, {self.backend})")


_NEVER_CALLED = "the model never calls scaled_dot_product_attention"


def _refused_with(setup: Setup, model: nn.Module, backends: list[SDPBackend]) -> str | None:
    """Torch's reason when one forward with these backends finds none that fits; None when it went through.

    With no backend at all, a forward goes through only where attention is never called.
    """
    # A forward in training mode moves BatchNorm's statistics.
    untouched = unchanged_afterwards(model) if setup.task == "train" else nullcontext()
    with warnings.catch_warnings(record=True) as said, untouched:
        warnings.simplefilter("always")
        try:
            with torch.set_grad_enabled(setup.task == "train"), setup.autocast(), sdpa_kernel(backends):
                model(*setup.args, **setup.kwargs)
        except RuntimeError as error:
            if is_out_of_memory(error) or not is_without_attention_backend(error):
                raise
            return refused_attention(said) or one_line(error)
    return None
