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
from redline.bench.workload.decoder import generator_workload
from redline.bench.workload.handed import sort_inputs, sort_out, workload_of, workload_of_step
from redline.bench.workload.hf_decoder import own_decoder
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.source import SOURCES, Source, refuse_options
from redline.bench.workload.workload import Workload, choose_batch
from redline.model.errors import BenchError, SpecError
from redline.model.note import Note
from redline.model.spec import Task, WorkloadSpec

HANDED_OVER: dict[str, Any] = {}
"""Models that cannot be pickled, for a bench in the very process they live in: under the name their spec gives."""


class LiveSource(Source):
    is_built_elsewhere = True
    writes_text = True

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

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        return self._build(spec, seed, None)

    def build_for(self, spec: WorkloadSpec, seed: int, inputs: Inputs) -> Workload:
        return self._build(spec, seed, inputs)

    def _build(self, spec: WorkloadSpec, seed: int, inputs: Inputs | None) -> Workload:
        whose = f"live model {spec.model}"
        opened = _open(spec)
        if spec.task == "step":
            return workload_of_step(_own_step(opened), spec, source="live", identity="live", seed=seed)
        handed = sort_out(opened, whose)
        if spec.task == "generate":
            if handed.inputs is not None:
                raise SpecError("a generation draws its prompt: leave the inputs out, and say --prompt how long it is")
            notes: list[Note] = []
            decoder = own_decoder(handed.model, spec, choose_batch(spec.batch, "generate", notes), seed, whose)
            return generator_workload(decoder, source="live", identity="live", seed=seed, notes=notes)
        return workload_of(handed, spec, whose=whose, source="live", identity="live", seed=seed, notes=[], data=inputs)


def _open(spec: WorkloadSpec) -> Any:
    assert spec.artifact is not None
    if spec.artifact in HANDED_OVER:
        return HANDED_OVER[spec.artifact]
    # Classes outside __main__ were pickled by name: they must be importable from where the person stands.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        with Path(spec.artifact).open("rb") as file:
            return pickle.load(file)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BenchError(
            "user", f"live model {spec.model} cannot be opened in the worker: {one_line(error)}"
        ) from error


SOURCES.register("live")(LiveSource())


def _own_step(handed: dict[str, Any]) -> OwnStep:
    """A function as the desk hands it over."""
    function, inputs = handed["step"], handed["inputs"]
    return OwnStep(
        function,
        handed["name"],
        NO_INPUTS if inputs is None else sort_inputs(inputs),
        setup=handed["setup"],
        teardown=handed["teardown"],
    )


def remember_live(spec: WorkloadSpec) -> Callable[[], None]:
    """Returns a function that gives a module of this process back as it was. What a function changes stays changed."""
    handed = HANDED_OVER.get(spec.artifact or "")
    return remember_module(handed[0]) if isinstance(handed, tuple) and handed else lambda: None


def remember_module(model: nn.Module) -> Callable[[], None]:
    """Returns a function that gives the module back as it was: undoes casts, moves, training steps, changes of mode, and
    layers, weights or methods that were replaced."""
    tensors = [(tensor, _copied(tensor)) for tensor in (*model.parameters(), *model.buffers())]
    # A cast replaces the buffer itself, folding and quantizing replace weights and whole layers, compiling and
    # recomputing replace what a block does when it is called, and patches as products the class of a convolution.
    classes = [(module, type(module)) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    parts = [(held, dict(held)) for module in model.modules() for held in _parts_of(module)]
    scripts = [(module, module.training) for module in model.modules() if isinstance(module, torch.jit.ScriptModule)]

    def restore() -> None:
        for module, kind in classes:
            if type(module) is not kind:
                module.__class__ = kind
        for held, then in parts:
            held.clear()
            held.update(then)
        for script, mode in scripts:
            script.training = mode  # which TorchScript keeps in none of its parts
        for tensor, (value, gradient) in tensors:
            tensor.data = value
            tensor.grad = gradient

    return restore


def _parts_of(module: nn.Module) -> list[dict[str, Any]]:
    """A TorchScript module has views of its parts in their place: nothing can be put there, so nothing was replaced."""
    held = (vars(module), module._parameters, module._buffers, module._modules)
    return [part for part in held if isinstance(part, dict)]


def _copied(tensor: Tensor) -> tuple[Tensor, Tensor | None]:
    return tensor.detach().clone(), None if tensor.grad is None else tensor.grad.detach().clone()
