"""A live module from the user's Python: cloudpickled as (module, inputs, loss) on the desk, opened here."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.workload.called import NO_INPUTS, OwnStep
from redline.bench.workload.handed import Factory, OwnSource, sort_inputs
from redline.bench.workload.source import SOURCES, refuse_options
from redline.model.errors import BenchError, SpecError
from redline.model.spec import Task, WorkloadSpec

HANDED_OVER: dict[str, Any] = {}
"""Models that cannot be pickled, for a bench in the very process they live in: under the name their spec gives."""


class LiveSource(OwnSource):
    name = "live"

    def claims(self, model: str) -> bool:
        return False  # a live model is known by its artifact, never by a name

    def check(self, spec: WorkloadSpec) -> None:
        if spec.artifact is None:
            raise SpecError(f"model {spec.model!r} is live but has no artifact: pass the module itself")
        if spec.artifact not in HANDED_OVER and not Path(spec.artifact).is_file():
            raise SpecError(f"no such file: {spec.artifact} (the pickled {spec.model})")
        refuse_options(spec, "classes", "sequence_length", "stem", why="the module is already built")

    def task_of(self, spec: WorkloadSpec) -> Task:
        return spec.task

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return Path(spec.artifact or "").stem  # the desk names the file by its content

    def identity(self, spec: WorkloadSpec) -> str:
        return "live"

    def factory(self, spec: WorkloadSpec) -> Factory:
        opened = _open(spec)
        if spec.task == "generate" and isinstance(opened, tuple) and opened[1] is not None:
            raise SpecError("a generation draws its prompt: leave the inputs out, and say --prompt how long it is")
        return Factory(lambda: opened, None, f"live model {spec.model}")

    def step(self, spec: WorkloadSpec) -> OwnStep:
        handed = _open(spec)
        inputs = NO_INPUTS if handed["inputs"] is None else sort_inputs(handed["inputs"])
        return OwnStep(handed["step"], handed["name"], inputs, setup=handed["setup"], teardown=handed["teardown"])


def _open(spec: WorkloadSpec) -> Any:
    assert spec.artifact is not None
    if spec.artifact in HANDED_OVER:
        return HANDED_OVER[spec.artifact]
    # Classes outside __main__ were pickled by name: they must be importable from where the person stands.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return pickle.loads(Path(spec.artifact).read_bytes())
    except Exception as error:
        if is_out_of_memory(error):
            raise
        text = f"live model {spec.model} cannot be opened in the worker: {one_line(error)}"
        raise BenchError("user", text) from error


SOURCES.register("live")(LiveSource())


def remember_live(spec: WorkloadSpec) -> Callable[[], None]:
    """Returns a function that gives a module of this process back as it was. What a function changes stays changed."""
    handed = HANDED_OVER.get(spec.artifact or "")
    return remember_module(handed[0]) if isinstance(handed, tuple) and handed else lambda: None


def remember_module(model: nn.Module) -> Callable[[], None]:
    """Returns a function that gives the module back as it was: undoes casts, moves, training steps, changes of mode, and
    layers, weights or methods that were replaced."""
    tensors = [(tensor, _copied(tensor), _copied(tensor.grad)) for tensor in (*model.parameters(), *model.buffers())]
    # A cast replaces the buffer itself, folding and quantizing replace weights and whole layers, compiling and
    # recomputing replace what a block does when it is called, and patches as products the class of a convolution.
    # A TorchScript module has views of its parts in their place: nothing can be put there, so nothing was replaced.
    scripts = [(module, module.training) for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]
    kinds = [(module, type(module)) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    parts = [
        (part, dict(part))
        for module in model.modules()
        for part in (vars(module), module._parameters, module._buffers, module._modules)
        if isinstance(part, dict)
    ]

    def restore() -> None:
        for module, kind in kinds:
            if type(module) is not kind:
                module.__class__ = kind
        for part, then in parts:
            part.clear()
            part.update(then)
        for script, mode in scripts:
            script.training = mode  # which TorchScript keeps in none of its parts
        for tensor, value, gradient in tensors:
            assert value is not None
            tensor.data, tensor.grad = value, gradient

    return restore


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()
