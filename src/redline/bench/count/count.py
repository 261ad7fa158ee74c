"""The work of one step: on a copy without memory where that can be, else in one real step, which then says so."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch import nn

from redline.bench.count.counter import WorkCounter
from redline.bench.count.formats import NO_TF32, Tf32
from redline.bench.count.traffic import distinct, tensor_bytes
from redline.bench.count.tree import module_rows
from redline.bench.count.twin import fake_inputs, fake_mode, fake_twin, has_no_values
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.losses import Loss
from redline.bench.workload.structure import named_tensors
from redline.spec import OptimizerName
from redline.work import OperatorWork, Uncounted, WorkCount

STATE_COPIES: dict[OptimizerName, int] = {"sgd": 1, "adam": 2, "adamw": 2}
"""Tensors as large as the weights that an optimizer keeps: momentum; first and second moment."""
OPTIMIZER_FLOPS: dict[OptimizerName, int] = {"sgd": 4, "adam": 12, "adamw": 14}
"""Per weight."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be counted."""

    model: nn.Module
    inputs: Inputs
    loss: Loss | None = None
    """None: the forward pass alone, without autograd."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: OptimizerName | None = None
    tf32: Tf32 = NO_TF32
    modules: bool = False


def count_work(task: Task) -> WorkCount:
    """Raises whatever the model raises in a real step, where a step without memory was not possible."""
    started = time.perf_counter()
    try:
        with _plainly():
            work = _without_memory(task)
    except Exception as error:
        if has_no_values(task.model):
            raise
        with _plainly():
            work = _for_real(task, because(error))
    work = work if task.optimizer is None else _with_optimizer(work, task, task.optimizer)
    return msgspec.structs.replace(work, seconds=time.perf_counter() - started)


def because(error: Exception) -> str:
    """Why a step on tensors without values was not possible, naming the operator where it is known."""
    operator = getattr(error, "func", None)
    if operator is not None:
        return f"{operator} needs the values of its inputs"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:200]


def _without_memory(task: Task) -> WorkCount:
    mode = fake_mode(task.model, task.inputs)
    model = fake_twin(task.model, mode)
    inputs = fake_inputs(task.inputs, mode)
    with mode:
        return _count(task, model, inputs)


def _for_real(task: Task, why: str) -> WorkCount:
    gradients = [(parameter, parameter.grad) for parameter in task.model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        return msgspec.structs.replace(_count(task, task.model, task.inputs), for_these_inputs=why)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _count(task: Task, model: nn.Module, inputs: Inputs) -> WorkCount:
    args, kwargs = inputs
    leaves = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in named_tensors((args, kwargs)))]
    counter = WorkCounter(leaves, task.tf32)
    with counter.places.watch(model), counter, torch.set_grad_enabled(task.loss is not None):
        with task.autocast():
            output = model(*args, **kwargs)
            loss = task.loss(output) if task.loss is not None else None
        if loss is not None:
            counter.phase = "backward"
            loss.backward()
    return _gathered(task, model, counter, output)


def _gathered(task: Task, model: nn.Module, counter: WorkCounter, output: Any) -> WorkCount:
    operators = [
        OperatorWork(name=name, kind=kind, number_format=form, phase=phase, calls=calls, flops=flops, bytes=moved)
        for (name, kind, form, phase, flops, moved), calls in counter.rows.items()
    ]
    operators.sort(key=lambda one: (one.phase != "forward", -one.flops * one.calls, -one.bytes * one.calls, one.name))
    given = [tensor for _, tensor in named_tensors(output) if not counter.touched.owns(tensor)]
    return WorkCount(
        params=sum(int(parameter.numel()) for parameter in model.parameters()),
        compulsory_bytes=counter.touched.bytes() + sum(tensor_bytes(tensor) for _, tensor in distinct(given)),
        operators=tuple(operators),
        uncounted=tuple(Uncounted(name=name, calls=calls) for name, calls in sorted(counter.uncounted.items())),
        modules=tuple(module_rows(model, counter)) if task.modules else (),
    )


def _with_optimizer(work: WorkCount, task: Task, name: OptimizerName) -> WorkCount:
    """One update, as if fused: weights and state are read and written, gradients read."""
    trained = [parameter for parameter in task.model.parameters() if parameter.requires_grad]
    weights, size = sum(int(one.numel()) for one in trained), sum(map(tensor_bytes, trained))
    states = STATE_COPIES[name]
    form = "fp32" if any(one.dtype == torch.float32 for one in trained) else "fp16"
    update = OperatorWork(
        name=f"optimizer {name}",
        kind="elementwise",
        number_format=form,
        phase="optimizer",
        calls=1,
        flops=OPTIMIZER_FLOPS[name] * weights,
        bytes=(3 + 2 * states) * size,
    )
    inputs = sum(tensor_bytes(tensor) for _, tensor in named_tensors(task.inputs))
    return msgspec.structs.replace(
        work, operators=(*work.operators, update), compulsory_bytes=inputs + (2 + 2 * states) * size
    )


@contextmanager
def _plainly() -> Iterator[None]:
    """Without the encoder's fast path: the same arithmetic in operators that can be counted one by one."""
    held = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with _eagerly():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(held)


def _eagerly() -> AbstractContextManager[Any]:
    """A model that brings a compiled part of its own is counted as it was written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading the compiler takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
