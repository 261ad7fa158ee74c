"""Counting the work of one step (`count_work`), without memory where the model allows it, and per module."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from redline.bench.count.counter import NO_TF32, Share, Tf32, WorkCounter
from redline.bench.count.formulas import SPARSE
from redline.bench.count.kinds import distinct, tensor_bytes
from redline.bench.recipe.fastpath import without_fast_path
from redline.bench.workload.called import name_of, refuse_what_has_not_run
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.losses import TrainingLoss
from redline.bench.workload.state import model_state, own_objects
from redline.bench.workload.structure import map_tensors, named_tensors, parameter_count, tensors_within
from redline.model.errors import BenchError
from redline.model.note import note
from redline.model.spec import OptimizerName
from redline.model.units import format_count
from redline.model.work import ModuleWork, OperatorWork, Uncounted, WorkCount


def module_rows(model: nn.Module, counter: WorkCounter) -> list[ModuleWork]:
    """Parents before children, as `named_modules` tells them; what did nothing and holds nothing is left out."""
    rows = []
    whole = {path: Share() for path, _ in model.named_modules()}
    for path, share in counter.shares.items():
        for ancestor in ancestors(path):
            _add(whole[ancestor], share)
    for path, module in model.named_modules():
        share, calls = whole[path], counter.module_paths.calls[path]
        params = parameter_count(module)
        if not (params or calls or share.bytes):
            continue
        rows.append(
            ModuleWork(
                path=path,
                type=name_of(module),
                params=params,
                calls=calls,
                number_format=share.formats.most_common(1)[0][0] if share.formats else "",
                flops=share.flops["forward"],
                backward_flops=share.flops["backward"],
                other_flops=share.other_flops,
                bytes=share.bytes["forward"],
                backward_bytes=share.bytes["backward"],
            )
        )
    return rows


def ancestors(path: str) -> list[str]:
    """The path itself, all those around it, and the model: `a.b`, `a` and the empty path."""
    found = [""]
    for position, character in enumerate(path):
        if character == ".":
            found.append(path[:position])
    return [*found, path] if path else found


def _add(total: Share, share: Share) -> None:
    total.flops.update(share.flops)
    total.bytes.update(share.bytes)
    total.formats.update(share.formats)
    total.other_flops += share.other_flops


def fake_mode(model: nn.Module, inputs: Any) -> FakeTensorMode:
    """The mode a model was built under, else a new one. Tensors that hide in places unknown may enter as they are."""
    tensors = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in named_tensors(inputs))]
    for tensor in tensors:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_mode
    return FakeTensorMode(allow_non_fake_inputs=True)


def _refuse_what_loses_its_size(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        if tensor.layout in SPARSE:
            raise BenchError("unsupported", "how many entries a sparse tensor has is lost in a copy without memory")
        if tensor.is_nested:
            raise BenchError("unsupported", "how long the rows of a ragged tensor are is lost in a copy without memory")


def fake_inputs(inputs: Any, mode: FakeTensorMode) -> Any:
    _refuse_what_loses_its_size(tensor for _, tensor in named_tensors(inputs))
    made: dict[int, Tensor] = {}  # one tensor may be given twice, and is read once

    def fake(_: str, tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = _fake(tensor, mode)
        return made[id(tensor)]

    return map_tensors(inputs, fake)


def fake_twin(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Whatever the module does to itself while it runs, it does to the copy."""
    tensors = [*model.parameters(), *model.buffers(), *_attributes(model)]
    _refuse_what_loses_its_size(tensors)
    if any(isinstance(tensor, FakeTensor) for tensor in tensors):
        return model  # built without memory, for counting alone
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise BenchError("unsupported", "a TorchScript module cannot be copied without its memory")
    memo: dict[int, Any] = {id(tensor): _fake(tensor, mode) for tensor in tensors}
    # What the copy would share with the original, were it not copied, must live as long as the memo does.
    memo[id(memo)] = tensors
    return copy.deepcopy(model, memo)


def has_no_values(model: nn.Module) -> bool:
    """Built on torch's meta device or under a fake mode: it can be counted, not run."""
    return any(isinstance(one, FakeTensor) or one.is_meta for one in (*model.parameters(), *model.buffers()))


def _fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if not tensor.is_meta:
        return mode.from_tensor(tensor, static_shapes=True)
    # As if on the CPU: some operators take another way on the meta device than on any that exists.
    with mode:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _attributes(model: nn.Module) -> list[Tensor]:
    """Tensors that are neither parameters nor buffers: weights that a norm recomputes, masks, tables."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]


STATE_COPIES: dict[OptimizerName, int] = {"sgd": 1, "adam": 2, "adamw": 2}
"""Tensors as large as the weights that an optimizer keeps: momentum; first and second moment."""
OPTIMIZER_FLOPS: dict[OptimizerName, int] = {"sgd": 4, "adam": 12, "adamw": 14}
"""Per weight."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be counted."""

    model: nn.Module
    inputs: Inputs
    loss: TrainingLoss | None = None
    """None: the forward pass alone."""
    differentiates: bool = False
    """The forward pass needs autograd itself."""
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    optimizer: OptimizerName | None = None
    is_whole_step: bool = False
    """The model is a step of the user's own: backward and update happen inside it."""
    tf32: Tf32 = NO_TF32
    modules: bool = False


ONE_DRAW = note(
    "counted-one-draw",
    "counted for one draw: the model asks the random generator of Python or NumPy, so another step may do other work",
)


def _generators() -> tuple[Any, ...]:
    """Where the generators stand whose numbers choose between paths without any tensor showing it."""
    _, keys, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(keys).tobytes(), position


AS_IT_RUNS = "a function is counted as it runs"


def count_work(task: Task) -> WorkCount:
    """Raises whatever the model raises in a real step, where a step without memory was not possible."""
    started, draws = time.perf_counter(), _generators()
    if task.is_whole_step:
        with plainly():
            work = msgspec.structs.replace(_count(task, task.model, task.inputs), for_these_inputs=AS_IT_RUNS)
        return msgspec.structs.replace(work, seconds=time.perf_counter() - started)
    try:
        with plainly():
            work = _without_memory(task)
    except Exception as error:
        if has_no_values(task.model):
            raise
        with plainly():
            work = _for_real(task, because(error))
    work = work if task.optimizer is None else _with_optimizer(work, task, task.optimizer)
    if _generators() != draws:
        work = msgspec.structs.replace(work, notes=(*work.notes, ONE_DRAW))
    return msgspec.structs.replace(work, seconds=time.perf_counter() - started)


def because(error: Exception) -> str:
    """Why a step on tensors without values was not possible, naming the operator where it is known."""
    operator = getattr(error, "func", None)
    if operator is not None:
        return f"{operator} needs the values of its inputs"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, BenchError):
        return said[:200]  # a sentence of ours
    return f"{type(error).__name__}: {said}"[:200]


def _without_memory(task: Task) -> WorkCount:
    mode = fake_mode(task.model, task.inputs)
    model = fake_twin(task.model, mode)
    inputs = fake_inputs(task.inputs, mode)
    with mode, _fake_targets(task.loss, mode):
        return _count_settled(task, model, inputs)


@contextmanager
def _fake_targets(loss: TrainingLoss | None, mode: FakeTensorMode) -> Iterator[None]:
    """The user's own targets without values, as the inputs are."""
    if not isinstance(loss, TrainingLoss) or loss.targets is None:
        yield
        return
    held, loss.targets = loss.targets, fake_inputs(loss.targets, mode)
    try:
        yield
    finally:
        loss.targets = held


def _for_real(task: Task, why: str) -> WorkCount:
    gradients = [(parameter, parameter.grad) for parameter in task.model.parameters()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        return msgspec.structs.replace(_count_settled(task, task.model, task.inputs), for_these_inputs=why)
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _count_settled(task: Task, model: nn.Module, inputs: Inputs) -> WorkCount:
    """The first call of a model that keeps nothing; else the second, which is like those that are timed.

    What a first call alone does (a table that is built and kept) is no part of a step. Where the third call differs from
    the second, every call may, and the count says so.
    """
    counts = []
    for _ in range(3):
        before = model_state(model)
        try:
            counts.append(_count(task, model, inputs))
        except Exception:
            if not counts:
                raise
            return counts[0]  # what it kept has a gradient whose graph is gone
        for parameter in model.parameters():
            parameter.grad = None  # the next call would add to it
        if model_state(model) == before:
            return counts[-1]
    first, second, third = counts
    if second.operators == third.operators:
        return second
    text = (
        f"each call does other work, because the model changes what it keeps: {format_count(first.flops)} FLOPs in the "
        f"first, {format_count(second.flops)} in the second, which is the one counted, {format_count(third.flops)} in the third"
    )
    return msgspec.structs.replace(second, notes=(*second.notes, note("work-changes", text)))


def _count(task: Task, model: nn.Module, inputs: Inputs) -> WorkCount:
    args, kwargs = own_objects(inputs)
    given = (tensor for _, tensor in tensors_within((args, kwargs)))
    leaves = [*model.parameters(), *model.buffers(), *_attributes(model), *given]
    counter = WorkCounter(leaves, task.tf32)
    phases = counter.finding_phases() if task.is_whole_step else nullcontext()
    has_gradients = task.is_whole_step or task.loss is not None or task.differentiates
    with phases, counter.module_paths.watch(model), counter, torch.set_grad_enabled(has_gradients):
        with task.autocast():
            output = model(*args, **kwargs)
            if task.loss is None:
                refuse_what_has_not_run(output, name_of(model))
            loss = task.loss(output) if task.loss is not None else None
        if loss is not None and not loss.requires_grad:
            if counter.has_opened:
                raise BenchError(
                    "unsupported", "what torch.cond, a loop or a scan calls has gradients in a compiled step only"
                )
            raise BenchError("user", f"no gradient reaches a parameter of {name_of(model)}")
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
        params=parameter_count(model),
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
    # Weights that are not trained are read in the forward pass all the same.
    frozen = [parameter for parameter in task.model.parameters() if not parameter.requires_grad]
    read = sum(map(tensor_bytes, (*frozen, *(tensor for _, tensor in tensors_within(task.inputs)))))
    return msgspec.structs.replace(
        work, operators=(*work.operators, update), compulsory_bytes=read + (2 + 2 * states) * size
    )


@contextmanager
def plainly() -> Iterator[None]:
    """Without the encoder's fast path: the same arithmetic in operators that can be counted one by one."""
    with without_fast_path(), _eagerly():
        yield


def _eagerly() -> AbstractContextManager[Any]:
    """A model that brings a compiled part of its own is counted as it was written."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading the compiler takes seconds
        return nullcontext()
    stance: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance
