"""This counts the work of one step: without memory if the model allows it, and per module where that is asked for."""

from __future__ import annotations

import copy
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgspec
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from redline.bench.count.counter import Kinds, Row, WorkCounter, tf32_kinds, watching
from redline.bench.count.operators import SPARSE, distinct, region_of, tensor_bytes
from redline.bench.device import open_device
from redline.bench.device.cpu import CpuDevice
from redline.bench.recipe.base import COMPILER, PRECISION, without_fast_path
from redline.bench.recipe.compose import plain_setup, set_up, switches_of
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.called import StepModule, name_of, refuse_what_has_not_run
from redline.bench.workload.inputs import Inputs, model_state, own_objects
from redline.bench.workload.losses import TrainingLoss
from redline.bench.workload.signal import give_signal
from redline.bench.workload.step import Setup
from redline.bench.workload.structure import map_tensors, named_tensors, parameter_count, tensors_within
from redline.bench.workload.workload import Workload
from redline.model.errors import BenchError, UsageError
from redline.model.note import note
from redline.model.protocol import CountAnswer
from redline.model.spec import OptimizerName, RunSpec
from redline.model.work import PRODUCTS, ModuleWork, OperatorWork, Uncounted, WorkCount

STATE_COPIES: dict[OptimizerName, int] = {"sgd": 1, "adam": 2, "adamw": 2}
"""An optimizer keeps this many tensors as large as the weights: SGD its momentum, Adam and AdamW a first and a second moment."""
OPTIMIZER_FLOPS: dict[OptimizerName, int] = {"sgd": 4, "adam": 12, "adamw": 14}
"""One update takes about this many FLOPs per weight, by the additions, products and roots of its formula."""


CHANGES = note(
    "work-changes",
    "each call does other work than the one counted, because the model changes what it keeps, so times depend on how many calls there "
    "were; let the factory give what it keeps, such as a cache, as an input: inputs are restored before every step",
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A task says what is to be counted."""

    model: nn.Module
    inputs: Inputs
    loss: TrainingLoss | None = None
    """Backward starts from this loss. If it is None, the forward pass alone is counted."""
    differentiates: bool = False
    """True if the forward pass itself needs autograd."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: OptimizerName | None = None
    is_whole_step: bool = False
    """True if the model is a step of the user's own: backward and update happen inside it."""
    tf32: Kinds = frozenset()
    """These kinds of products use TF32, the shorter format, for fp32 numbers."""


# `redline flops` and every prepared step ask for counts.


def answer_count(spec: RunSpec) -> CountAnswer:
    """Builds a workload and counts it, without memory if its code allows that."""
    if spec.workload.task == "step":
        # A function may do anything, so nothing of it is made without memory: it is counted in one real call.
        setup = set_up(spec, open_device(spec.device))
        assert setup.workload.step is not None
        try:
            return CountAnswer(work=count_step(setup, spec.workload.optimizer), workload=setup.workload.info())
        finally:
            setup.workload.step.close()
    # Most code builds on the meta device, some only under a fake mode, and some reads a value and needs the real thing.
    for without_memory in (lambda: torch.device("meta"), lambda: FakeTensorMode(allow_non_fake_inputs=True)):
        try:
            return _counted(spec, build_workload(spec.workload, spec.seed, without_memory()))
        except UsageError:
            raise
        except Exception:  # if something is really wrong, the real build shows it
            continue
    workload = build_workload(spec.workload, spec.seed)
    if not has_no_values(workload.model):
        give_signal(workload, spec.seed)  # a run does so too: where data decides, the work follows from the weights
    return _counted(spec, workload)


def _counted(spec: RunSpec, workload: Workload) -> CountAnswer:
    """Counts under the recipe's casts and layout. Flags belong to a device that is not here, and compiling changes no count."""
    settle_batch(workload, spec.workload, ask=False)
    setup, switches = plain_setup(workload, CpuDevice()), switches_of(spec.recipe, workload.task)
    for switch in switches:
        if PRECISION <= switch.stage < COMPILER:
            switch.apply(setup)
    is_tf32 = any(switch.number_format == "tf32" for switch in switches)
    task = _task_of(setup, spec.workload.optimizer, PRODUCTS if is_tf32 else Kinds())
    try:
        work = count_work(task)
    except RuntimeError:
        if task.loss is not None:
            raise
        work = count_work(replace(task, differentiates=True))  # if something else is wrong, it is raised again
    if task.loss is None:
        work = _with_backward(work, replace(task, inputs=(setup.args, setup.kwargs), loss=workload.loss))
    return CountAnswer(work=work, workload=workload.info())


def _with_backward(work: WorkCount, task: Task) -> WorkCount:
    """Returns the work of the forward pass as inference runs it, with that of the backward pass beside it.

    If the backward pass cannot be counted, a note says why.
    """
    try:
        both = count_work(task)
    except Exception as error:
        if getattr(error, "func", None) is not None and has_no_values(task.model):
            raise  # an operator of the loss wants values, and the real build has them
        why = note("backward-not-counted", f"backward not counted: {because(error)}")
        return msgspec.structs.replace(work, notes=(*work.notes, why))
    rows = {module.path: module for module in both.modules}
    return msgspec.structs.replace(
        work,
        operators=work.operators + tuple(one for one in both.operators if one.phase == "backward"),
        modules=tuple(
            msgspec.structs.replace(row, backward_flops=other.backward_flops, backward_bytes=other.backward_bytes)
            for row in work.modules
            for other in [rows.get(row.path, row)]
        ),
        seconds=work.seconds + both.seconds,
    )


def counted_work(setup: Setup, optimizer: OptimizerName) -> WorkCount | None:
    """Returns the work of a step, or None with a note, because nothing that goes wrong here may cost the measurement."""
    notes = setup.workload.notes
    if setup.is_sharded:
        notes.append(note("work-not-counted", "work not counted: the weights are spread over the ranks"))
        return None
    try:
        work = count_step(setup, optimizer)
    except Exception as error:
        notes.append(note("work-not-counted", f"work not counted: {because(error)}"))
        return None
    notes += work.notes
    return None if CHANGES in work.notes else work


def count_step(setup: Setup, optimizer: OptimizerName) -> WorkCount:
    """Returns the work of one step of a setup as it will be timed."""

    def bare(_: str, tensor: Tensor) -> Tensor:
        # The last step may have written something into its inputs that has a gradient, whose graph is gone.
        return tensor if tensor.grad_fn is None else tensor.detach()

    inputs = map_tensors(setup.args, bare), map_tensors(setup.kwargs, bare)
    task = _task_of(setup, optimizer, tf32_kinds(setup.device))
    return count_work(replace(task, inputs=inputs, differentiates=setup.workload.gradients == "on"))


def _task_of(setup: Setup, optimizer: OptimizerName, tf32: Kinds) -> Task:
    workload, trains = setup.workload, setup.task == "train"
    own = workload.info().optimizer.partition(" ")[0].lower()
    # The optimizer that a module brings is counted only if it is one of those whose FLOPs are known.
    known = optimizer if not own else next((name for name in get_args(OptimizerName) if name == own), None)
    return Task(
        model=shown_model(workload),
        inputs=(setup.args, setup.kwargs),
        loss=workload.loss if trains else None,
        autocast=setup.autocast,
        optimizer=known if trains else None,
        tf32=tf32,
        is_whole_step=setup.task == "step",
    )


def shown_model(workload: Workload) -> nn.Module:
    """Returns the model. For a function of the user's, it returns one in which the modules that the function reaches are in sight."""
    return workload.model.with_modules() if isinstance(workload.model, StepModule) else workload.model


def has_no_values(model: nn.Module) -> bool:
    """True if it was built on torch's meta device or under a fake mode: it can be counted, not run."""
    return any(isinstance(one, FakeTensor) or one.is_meta for one in (*model.parameters(), *model.buffers()))


def refuse_no_values(model: nn.Module) -> None:
    """Raises a `BenchError` if the model has weights without values, because such a model cannot be timed."""
    if has_no_values(model):
        mend = "build it on a real device, or give it memory by to_empty() and initialise it"
        where = f"{name_of(model)} has weights on the meta device, without values"
        raise BenchError("user", f"{where}: {mend} ('redline flops' counts it as it is)")


# The functions below do the counting.


def count_work(task: Task) -> WorkCount:
    """Returns the work of a task. If a step without memory is not possible, a real one is counted, and raises what the model raises."""
    started = time.perf_counter()
    with plainly():
        if task.is_whole_step:
            work = _for_real(task, "a function is counted as it runs")
        else:
            try:
                work = _without_memory(task)
            except Exception as error:
                if has_no_values(task.model):
                    raise
                work = _for_real(task, because(error))
        if task.optimizer is not None:
            work = _with_optimizer(work, task, task.optimizer)
    return msgspec.structs.replace(work, seconds=time.perf_counter() - started)


@contextmanager
def plainly() -> Iterator[None]:
    """Within this context models run as they were written: without the encoder's fast path, whose operators cannot be counted
    one by one, and without a compiled part that a model brings."""
    eagerly: AbstractContextManager[Any] = nullcontext()
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and loading the compiler takes seconds
        eagerly = torch.compiler.set_stance("force_eager")
    with without_fast_path(), eagerly:
        yield


def because(error: Exception) -> str:
    """Returns why a step on tensors without values was not possible, with the operator if it is known."""
    operator = getattr(error, "func", None)
    if operator is not None:
        return f"{operator} needs the values of its inputs"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return (said if isinstance(error, BenchError) else f"{type(error).__name__}: {said}")[:200]


def _without_memory(task: Task) -> WorkCount:
    """Counts a copy of the model, so that whatever the module does to itself while it runs happens to the copy."""
    given = (task.inputs, task.loss.targets if isinstance(task.loss, TrainingLoss) else None)
    held = [*_tensors_of(task.model), *(tensor for _, tensor in named_tensors(given))]
    for tensor in held:
        if tensor.layout in SPARSE:
            raise BenchError("unsupported", "how many entries a sparse tensor has is lost in a copy without memory")
        if tensor.is_nested:
            raise BenchError("unsupported", "how long the rows of a ragged tensor are is lost in a copy without memory")
    fake = next((tensor for tensor in held if isinstance(tensor, FakeTensor)), None)
    # A model that was built under a fake mode keeps it; others get a new one. Tensors in unknown places may enter as they are.
    mode = fake.fake_mode if fake is not None else FakeTensorMode(allow_non_fake_inputs=True)
    model, memo = task.model, dict[int, Any]()
    for tensor in held:  # one tensor may be given twice, and is read once
        memo.setdefault(id(tensor), _fake(tensor, mode))
    inputs, targets = map_tensors(given, lambda _, tensor: memo[id(tensor)])
    # A model that holds such tensors was built for counting alone, and need not be copied.
    if not any(isinstance(tensor, FakeTensor) for tensor in _tensors_of(model)):
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise BenchError("unsupported", "a TorchScript module cannot be copied without its memory")
        # Tensors that the copy shares with the original must live as long as the memo does.
        model = copy.deepcopy(model, {**memo, id(memo): held})
    if targets is None:
        with mode:
            return _count_settled(task, model, inputs)
    assert isinstance(task.loss, TrainingLoss)
    own, task.loss.targets = task.loss.targets, targets
    try:
        with mode:
            return _count_settled(task, model, inputs)
    finally:
        task.loss.targets = own


def _tensors_of(model: nn.Module) -> list[Tensor]:
    """Returns a model's parameters and buffers, and the tensors that are neither: weights that a norm recomputes, masks, tables."""
    attributes = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor))
    return [*model.parameters(), *model.buffers(), *attributes]


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if not tensor.is_meta:
        return mode.from_tensor(tensor, static_shapes=True)
    # The copy says that it is on the CPU, because some operators take a way on the meta device that they take on no real one.
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _for_real(task: Task, why: str) -> WorkCount:
    """Counts one real step, and records why a real one was needed. Gradients that the parameters had are put back."""
    count = _count if task.is_whole_step else _count_settled
    gradients = [(parameter, parameter.grad) for parameter in task.model.parameters() if not task.is_whole_step]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        return msgspec.structs.replace(count(task, task.model, task.inputs), for_these_inputs=why)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _count_settled(task: Task, model: nn.Module, inputs: Inputs) -> WorkCount:
    """Returns the work of the first call if the model keeps nothing, otherwise of the second, which is like those that are timed.

    What only a first call does, such as building a table that is kept, is no part of a step.
    """
    before, first = model_state(model), _count(task, model, inputs)
    for parameter in model.parameters():
        parameter.grad = None  # the next call would add to it
    after = model_state(model)
    if after == before:
        return first
    try:
        second = _count(task, model, inputs)
    except Exception:  # what it kept has a gradient whose graph is gone
        return first
    return second if model_state(model) == after else msgspec.structs.replace(second, notes=(CHANGES,))


def _count(task: Task, model: nn.Module, inputs: Inputs) -> WorkCount:
    """Returns the work of one call, with its backward pass if there is a loss."""
    args, kwargs = own_objects(inputs)
    given = [tensor for _, tensor in tensors_within((args, kwargs))]
    counter = WorkCounter([*_tensors_of(model), *given], task.tf32)
    paths = counter.module_paths
    phases = counter.finding_phases() if task.is_whole_step else nullcontext()
    has_gradients = task.is_whole_step or task.loss is not None or task.differentiates
    with phases, watching(model, paths.enter, paths.leave), counter, torch.set_grad_enabled(has_gradients):
        with task.autocast():
            output = model(*args, **kwargs)
            if task.loss is None:
                refuse_what_has_not_run(output, name_of(model))
            loss = task.loss(output) if task.loss is not None else None
        if loss is not None and not loss.requires_grad:
            if counter.has_opened:
                only = "what torch.cond, a loop or a scan calls has gradients in a compiled step only"
                raise BenchError("unsupported", only)
            raise BenchError("user", f"no gradient reaches a parameter of {name_of(model)}")
        if loss is not None:
            counter.phase = "backward"
            loss.backward()
    totals: Counter[Row] = Counter()
    for row, calls in counter.rows.items():
        totals[row._replace(path="")] += calls
    operators = [
        OperatorWork(calls=calls, **{name: value for name, value in row._asdict().items() if name != "path"})
        for row, calls in totals.items()
    ]
    operators.sort(key=lambda one: (one.phase != "forward", -one.flops * one.calls, -one.bytes * one.calls, one.name))
    made = [tensor for _, tensor in named_tensors(output) if not counter.touched.owns(region_of(tensor))]
    return WorkCount(
        params=parameter_count(model),
        compulsory_bytes=counter.touched.bytes() + sum(map(tensor_bytes, distinct(made).values())),
        operators=tuple(operators),
        uncounted=tuple(Uncounted(name=name, calls=calls) for name, calls in sorted(counter.uncounted.items())),
        modules=tuple(_module_rows(model, counter)),
    )


SHARES = ("flops", "backward_flops", "other_flops", "bytes", "backward_bytes")
"""These fields of a module are sums over the operators inside it. Only products count as FLOPs, and the rest as other FLOPs."""


def _module_rows(model: nn.Module, counter: WorkCounter) -> Iterator[ModuleWork]:
    """Yields a row for each module, parents before children as in `named_modules`. A module that did nothing and holds nothing has none."""
    whole: dict[str, Counter[str]] = {path: Counter() for path, _ in model.named_modules()}
    formats: dict[str, Counter[str]] = {path: Counter() for path in whole}
    for row, calls in counter.rows.items():
        side, is_product = "" if row.phase == "forward" else f"{row.phase}_", row.kind in PRODUCTS
        names, flops = row.path.split(".") if row.path else [], calls * row.flops
        for path in (".".join(names[:depth]) for depth in range(len(names) + 1)):
            whole[path][f"{side}bytes"] += calls * row.bytes
            whole[path][f"{side}flops" if is_product else "other_flops"] += flops
            formats[path][row.number_format] += flops if is_product else 0
    for path, module in model.named_modules():
        share, calls, params = whole[path], counter.module_paths.calls[path], parameter_count(module)
        if params or calls or share["bytes"] or share["backward_bytes"]:
            yield ModuleWork(
                path=path,
                type=name_of(module),
                params=params,
                calls=calls,
                number_format=max(+formats[path], key=formats[path].__getitem__, default=""),
                **{name: share[name] for name in SHARES},
            )


def _with_optimizer(work: WorkCount, task: Task, name: OptimizerName) -> WorkCount:
    """Returns the work with one update added, which is counted as if fused: weights and state are read and written, gradients are read."""
    trained, frozen = (
        [weight for weight in task.model.parameters() if weight.requires_grad is wanted] for wanted in (True, False)
    )
    size, state_bytes = sum(map(tensor_bytes, trained)), 2 * STATE_COPIES[name] * sum(map(tensor_bytes, trained))
    update = OperatorWork(
        name=f"optimizer {name}",
        kind="elementwise",
        number_format="fp32" if any(weight.dtype == torch.float32 for weight in trained) else "fp16",
        phase="optimizer",
        calls=1,
        flops=OPTIMIZER_FLOPS[name] * sum(int(weight.numel()) for weight in trained),
        bytes=3 * size + state_bytes,
    )
    # The forward pass reads weights that are not trained as well.
    read = sum(map(tensor_bytes, (*frozen, *(tensor for _, tensor in tensors_within(task.inputs)))))
    return msgspec.structs.replace(
        work, operators=(*work.operators, update), compulsory_bytes=read + 2 * size + state_bytes
    )
