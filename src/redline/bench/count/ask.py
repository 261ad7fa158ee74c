"""Counting a model without running it: built without memory where its code allows that."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import msgspec
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from redline.bench.count.count import Task, because, count_work, has_no_values
from redline.bench.count.counter import Tf32
from redline.bench.device import open_device, resolve_device
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.base import COMPILER, PRECISION
from redline.bench.recipe.compose import apply_recipe, switches_of
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.called import StepModule, name_of
from redline.bench.workload.signal import give_signal
from redline.bench.workload.step import Setup
from redline.bench.workload.structure import map_tensors
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, UsageError
from redline.model.note import Note, note
from redline.model.questions import CountAnswer
from redline.model.spec import OptimizerName, RunSpec
from redline.model.work import ModuleWork, WorkCount


def refuse_no_values(model: nn.Module) -> None:
    """What can be counted but not run."""
    if has_no_values(model):
        mend = "build it on a real device, or give it memory by to_empty() and initialise it"
        where = f"{name_of(model)} has weights on the meta device, without values"
        raise BenchError("user", f"{where}: {mend} ('redline flops' counts it as it is)")


def answer_count(spec: RunSpec) -> CountAnswer:
    if spec.workload.task == "step":
        return _counted_step(spec)
    # Most code builds on the meta device, some only under a fake mode, and some reads a value and needs the real thing.
    for without_memory in (lambda: torch.device("meta"), lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        try:
            return _counted(spec, build_workload(spec.workload, spec.seed, without_memory()))
        except UsageError:
            raise
        except Exception:  # what is really wrong shows in the real build
            continue
    workload = build_workload(spec.workload, spec.seed)
    if not has_no_values(workload.model):
        give_signal(workload, spec.seed)  # as in a run: where data decides, the work follows from the weights
    return _counted(spec, workload)


def _counted_step(spec: RunSpec) -> CountAnswer:
    """A function of the user's, in one real call: it may do anything, so nothing of it is made without memory."""
    device = open_device(resolve_device(spec.device))
    workload = build_workload(spec.workload, spec.seed).to(device.torch_device)
    assert workload.step is not None
    try:
        setup = apply_recipe(spec.recipe, workload, device)
        return CountAnswer(work=count_step(setup, spec.workload.optimizer, modules=True), workload=workload.info())
    finally:
        workload.step.close()


def _counted(spec: RunSpec, workload: Workload) -> CountAnswer:
    settle_batch(workload, spec.workload, ask=False)
    setup = _prepared(spec, workload)
    trains = workload.task == "train"
    task = Task(
        model=setup.workload.model,
        inputs=(setup.args, setup.kwargs),
        loss=workload.loss if trains else None,
        autocast=setup.autocast,
        optimizer=counted_optimizer(workload, spec.workload.optimizer),
        tf32=_tf32(spec),
        modules=True,
    )
    try:
        work = count_work(task)
    except RuntimeError:
        if trains:
            raise
        work = count_work(replace(task, differentiates=True))  # what is really wrong shows again
    if not trains:
        work = _with_backward(work, replace(task, inputs=(setup.args, setup.kwargs)), workload)
    return CountAnswer(work=work, workload=workload.info())


def _prepared(spec: RunSpec, workload: Workload) -> Setup:
    """Casts and layout; flags belong to a device that is not here, and compiling changes no count."""
    setup = Setup(
        workload=workload, device=CpuDevice(), model=workload.model, args=workload.args, kwargs=workload.kwargs
    )
    for switch in switches_of(spec.recipe, workload.task):
        if PRECISION <= switch.stage < COMPILER:
            switch.apply(setup)
    return setup


def _tf32(spec: RunSpec) -> Tf32:
    asked = any(switch.number_format == "tf32" for switch in switches_of(spec.recipe, spec.workload.task))
    return Tf32(matmul=asked, convolution=asked)


def _with_backward(work: WorkCount, task: Task, workload: Workload) -> WorkCount:
    """The forward pass as inference runs it, and beside it the backward pass of the same model."""
    try:
        both = count_work(replace(task, loss=workload.loss))
    except Exception as error:
        if getattr(error, "func", None) is not None and has_no_values(task.model):
            raise  # an operator of the loss wants values: the real build has them
        why = note("backward-not-counted", f"backward not counted: {because(error)}")
        return msgspec.structs.replace(work, notes=(*work.notes, why))
    backward = tuple(one for one in both.operators if one.phase == "backward")
    by_path = {module.path: module for module in both.modules}
    return msgspec.structs.replace(
        work,
        operators=work.operators + backward,
        modules=tuple(_joined(module, by_path.get(module.path)) for module in work.modules),
        seconds=work.seconds + both.seconds,
    )


def _joined(forward: ModuleWork, both: ModuleWork | None) -> ModuleWork:
    if both is None:
        return forward
    return msgspec.structs.replace(forward, backward_flops=both.backward_flops, backward_bytes=both.backward_bytes)


def shown_model(workload: Workload) -> nn.Module:
    """The model; for a function of the user's, one with the modules in sight that it reaches."""
    return workload.model.with_modules() if isinstance(workload.model, StepModule) else workload.model


def counted_optimizer(workload: Workload, name: OptimizerName) -> OptimizerName | None:
    """Whose update is counted: the module's own where it brings one of these; None where there is none, or another."""
    if workload.task != "train":
        return None
    own = workload.info().optimizer.partition(" ")[0].lower()
    if not own:
        return name
    return next((known for known in get_args(OptimizerName) if known == own), None)


CHANGES = (
    "each call does other work, because the model changes what it keeps, so times depend on how many calls there were; "
    "let the factory give what it keeps, such as a cache, as an input: inputs are restored before every step"
)


def work_of(setup: Setup, optimizer: OptimizerName, *, modules: bool = False) -> tuple[WorkCount | None, Note | None]:
    """The work of a step, or why it was not counted: nothing that goes wrong here may cost the measurement."""
    if setup.is_sharded:
        return None, note("work-not-counted", "work not counted: the weights are spread over the ranks")
    try:
        work = count_step(setup, optimizer, modules=modules)
        if any(each.code == "work-changes" for each in work.notes):
            return None, note("work-changes", f"work not counted: {CHANGES}")
        return work, None
    except Exception as error:
        return None, note("work-not-counted", f"work not counted: {because(error)}")


def count_step(setup: Setup, optimizer: OptimizerName, *, modules: bool = False) -> WorkCount:
    trains = setup.task == "train"

    def bare(_: str, tensor: torch.Tensor) -> torch.Tensor:
        # What the last step wrote into its inputs may have a gradient, whose graph is gone.
        return tensor if tensor.grad_fn is None else tensor.detach()

    return count_work(
        Task(
            model=shown_model(setup.workload),
            inputs=(map_tensors(setup.args, bare), map_tensors(setup.kwargs, bare)),
            loss=setup.workload.loss if trains else None,
            autocast=setup.autocast,
            optimizer=counted_optimizer(setup.workload, optimizer),
            tf32=Tf32.of(setup.device),
            modules=modules,
            is_whole_step=setup.task == "step",
            differentiates=setup.workload.gradients == "on",
        )
    )
