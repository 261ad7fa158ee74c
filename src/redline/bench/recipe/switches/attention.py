"""This switch picks the kernel that computes scaled_dot_product_attention, instead of torch."""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory, is_without_attention_backend, one_line, refused_attention
from redline.bench.recipe.base import ALL_MODELS, ATTENTION, SWITCHES, RecipeCode, RecipeSwitch
from redline.bench.recipe.fastpath import leave_fast_path, write_without_fast_path
from redline.bench.recipe.plain import BACKENDS, WithAttention
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.step import Setup
from redline.model.errors import BenchError, SpecError
from redline.model.spec import Switch, Task
from redline.model.work import Facts

ON_CPU = ("flash", "math")
NEVER_CALLED = "the model never calls scaled_dot_product_attention"


@SWITCHES.register("sdpa")
class Attention(RecipeSwitch):
    name = "sdpa"
    summary = "one kernel for every attention: sdpa:flash, sdpa:efficient, sdpa:cudnn or sdpa:math"
    stage = ATTENTION
    family = "attention"
    excludes = frozenset({"torchscript", "onnx", "tensorrt"})  # these bring their own attention
    arguments = tuple(BACKENDS)
    offered = arguments
    tasks = ALL_MODELS

    def __init__(self, switch: Switch, task: Task) -> None:
        super().__init__(switch, task)
        if switch.argument is None:
            raise SpecError(f"switch sdpa needs a backend: {', '.join(f'sdpa:{name}' for name in BACKENDS)}")
        self.backend = BACKENDS[switch.argument]

    def refusal(self, device: Device) -> str | None:
        if not device.is_accelerator and self.argument not in ON_CPU:
            return f"torch has no {self.argument} attention for the CPU, only {' and '.join(ON_CPU)}"
        return "cuDNN is NVIDIA's" if self.argument == "cudnn" and device.kind == "rocm" else None

    def irrelevance(self, model: nn.Module, facts: Facts | None) -> str | None:
        if facts is None:
            return None  # applying it finds out
        if "attention" not in facts.layers:
            return NEVER_CALLED
        cannot = f"{self.argument} cannot do this model's attention here in any number format"
        return None if self.formats(facts) else cannot

    def formats(self, facts: Facts) -> frozenset[str]:
        return frozenset(form for form, backends in facts.attention_backends.items() if self.argument in backends)

    def apply(self, setup: Setup) -> None:
        model = setup.model
        assert isinstance(model, nn.Module)
        leave_fast_path(setup)
        if _refused_with(setup, model, []) is None:
            raise BenchError("unsupported", f"sdpa: {NEVER_CALLED}")
        if (reason := _refused_with(setup, model, [self.backend])) is not None:
            raise BenchError("unsupported", f"{self.switch} cannot do this model's attention here: {reason}")
        setup.model = WithAttention(model, self.backend)

    def write(self, code: RecipeCode) -> None:
        code.bring_in("from typing import Any", "from torch.nn.attention import SDPBackend, sdpa_kernel")
        write_without_fast_path(code)
        code.carry(WithAttention)
        code.model_lines.append(f"model = WithAttention(model, {self.backend})")


def _refused_with(setup: Setup, model: nn.Module, backends: list[SDPBackend]) -> str | None:
    """Torch's reason if one forward with these backends finds none that fits, or None if it went through.

    With no backend at all, a forward goes through only if attention is never called.
    """
    # A forward in training mode moves the statistics of BatchNorm.
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
