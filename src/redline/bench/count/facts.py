"""What one real step of a workload does, watched before any search.

The forward runs under inference mode, where operators that are made of others (`linear`, `scaled_dot_product_attention`,
`lstm`) arrive whole at a dispatch mode: what ran is then known by what was called, not by the names of modules. It runs
on two draws of the inputs, on more where Python reads values, which shows whether the program depends on the data.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.utils._pytree import tree_leaves

from redline.bench.count.accumulating import accumulating
from redline.bench.count.attention import attends, cast
from redline.bench.count.clock import LONGEST_HOLD_S, Clock, clocked
from redline.bench.count.count import plainly
from redline.bench.count.counter import is_composite, watching
from redline.bench.count.functions import FunctionCalls
from redline.bench.count.kinds import described, tensors_in
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.recipe.plain import BACKENDS, repeated_blocks
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.state import changed_tensors, held_tensors
from redline.bench.workload.step import Setup, make_step
from redline.bench.workload.structure import WholeDispatchMode
from redline.bench.workload.workload import Workload
from redline.model.environment import Memory
from redline.model.spec import OptimizerName
from redline.model.work import Facts, LayerKind, LayerShare, OperatorKind, OperatorShare, RepeatedBlock

K = TypeVar("K")

OPERATORS_TOLD = 12
WATCHING_FACTOR = 20.0
"""Watching makes a step take the host about this many times as long to issue."""
MOST_LOOKS, LOOKING_S = 6, 1.0
"""At a model that reads values on the host, each on inputs of its own."""
DOUBLE = (torch.float64, torch.complex128)
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}

PLAIN_OUTPUTS = (Tensor, bool, int, float, complex, str, type(None))
"""What a program made from a model can return, in any structure that torch's pytree knows."""


def facts_of(workload: Workload, device: Device, optimizer: OptimizerName, seed: int) -> Facts:
    """Runs a few steps in strict fp32. Weights, buffers and random numbers are put back afterwards."""
    started = time.perf_counter()
    device.allow_tf32(False)
    setup = Setup(workload=workload, device=device, model=workload.model, args=workload.args, kwargs=workload.kwargs)
    with _left_as_it_was(workload, device):
        clock = clocked(setup, optimizer)
        step, sparse = Watch(setup), list[str]()
        if setup.task == "train":
            timed = make_step(setup, optimizer)
            with timed.context(), _sparse_gradients(workload.model) as sparse:
                step.over(timed, clock.issue_s)
        torch.manual_seed(seed)
        before, state = held_tensors(workload.model), device.random_state()
        forward = _watched_forward(setup, (workload.args, workload.kwargs), clock)
        mutated = changed_tensors(before, held_tensors(workload.model))
        draws = not torch.equal(state, device.random_state())
        added_to = accumulating(setup, mutated, seed) if setup.task == "infer" else ()
        torch.manual_seed(seed)
        others = list(_on_other_inputs(setup, forward, seed + 1, clock))
    forward.take_shorter_times(others[0])
    whole = step if step.calls else forward
    memory = device.memory() if device.is_accelerator else Memory()
    branches = any(other.names != forward.names for other in others)
    other_shapes = any(other.shapes != forward.shapes for other in others)
    return Facts(
        layers=_layers(forward),
        activated=_activated(forward),
        operators=_operators(whole),
        kinds=_kinds(whole),
        launches=len(whole.calls),
        double_share=whole.shares_by(lambda call: call.is_double).get(True, 0.0),
        attention_backends=forward.backends_of_all(),
        blocks=_blocks(workload.model, forward),
        reads=tuple(f"{what} ({count})" for what, count in (forward.reads | step.reads).items()),
        synchronises=clock.synchronises,
        branches=branches,
        varies_shapes=forward.varies_shapes or (other_shapes and not branches),
        mutates=mutated,
        accumulates=added_to,
        draws_random_numbers=draws,
        sparse_gradients=tuple(sparse),
        strange_outputs=forward.strange_outputs,
        step_s=clock.step_s,
        host_s=clock.issue_s if device.is_accelerator else None,
        device_s=clock.device_s if device.is_accelerator else sum(whole.times),
        page_faults=None if device.is_accelerator else clock.page_faults,
        peak_bytes=(memory.peak_reserved_bytes or 0) + (memory.context_bytes or 0) or None,
        limit_bytes=memory.limit_bytes,
        seconds=time.perf_counter() - started,
    )


def _watched_forward(setup: Setup, inputs: Inputs, clock: Clock) -> Watch:
    args, kwargs = inputs
    watch, returned = Watch(setup), list[Any]()
    with setup.workload.context():
        watch.over(lambda: returned.append(setup.workload.model(*args, **kwargs)), clock.issue_s)
    classes = (type(leaf).__name__ for leaf in tree_leaves(returned) if not isinstance(leaf, PLAIN_OUTPUTS))
    watch.strange_outputs = tuple(dict.fromkeys(classes))
    return watch


def _on_other_inputs(setup: Setup, first: Watch, seed: int, clock: Clock) -> Iterator[Watch]:
    """One more look, and where Python reads values some more, until one shows other operators: they may decide what runs."""
    ends_at = time.perf_counter() + LOOKING_S
    for number in range(MOST_LOOKS if first.reads else 1):
        other = _another_forward(setup, first, seed + number, clock)
        yield other
        if other.names != first.names or time.perf_counter() > ends_at:
            return


def _another_forward(setup: Setup, first: Watch, seed: int, clock: Clock) -> Watch:
    """A look on other inputs; the first once more where there are none, or the model takes none."""
    second = setup.workload.second_inputs(seed)
    if second is None:
        return first
    try:
        return _watched_forward(setup, second.inputs, clock)
    except Exception as error:
        if second.how == "drawn" or is_out_of_memory(error):
            raise
        return first


def _layers(forward: Watch) -> dict[LayerKind, LayerShare]:
    calls, shares = Counter(call.layer for call in forward.calls), forward.shares_by(lambda call: call.layer)
    distinct = {(call.layer, call.name, call.shapes, call.constants) for call in forward.calls}
    kinds = Counter(layer for layer, *_ in distinct)
    return {
        layer: LayerShare(calls=calls[layer], kinds=kinds[layer], share=share)
        for layer, share in shares.items()
        if layer is not None
    }


def _activated(forward: Watch) -> LayerShare | None:
    if not forward.activating:
        return None
    share = sum(forward.times[index] for index in forward.activating) / max(sum(forward.times), 1e-12)
    return LayerShare(calls=len(forward.activating), share=share)


def _around(path: str) -> list[str]:
    """The module of this path, and those around it, without the model itself."""
    names = path.split(".") if path else []
    return [".".join(names[: index + 1]) for index in range(len(names))]


def _operators(watch: Watch) -> tuple[OperatorShare, ...]:
    calls = Counter((call.name, call.kind) for call in watch.calls)
    shares = watch.shares_by(lambda call: (call.name, call.kind))
    longest = sorted(shares, key=lambda key: -shares[key])[:OPERATORS_TOLD]
    return tuple(OperatorShare(name=key[0], kind=key[1], calls=calls[key], share=shares[key]) for key in longest)


def _kinds(watch: Watch) -> dict[OperatorKind, float]:
    return dict(sorted(watch.shares_by(lambda call: call.kind).items(), key=lambda item: -item[1]))


def _blocks(model: nn.Module, forward: Watch) -> RepeatedBlock | None:
    names = repeated_blocks(model)
    if not names:
        return None
    blocks = set(names)
    block_of = {path: name for path in forward.entered for name in _around(path) if name in blocks}
    share = forward.shares_by(lambda call: call.path in block_of).get(True, 0.0)
    computed: dict[str, list[tuple[object, ...]]] = {name: [] for name in block_of.values()}
    for call in forward.calls:
        if (name := block_of.get(call.path)) is not None:
            computed[name].append((call.path[len(name) :], call.name, call.shapes, call.constants))
    kinds = {tuple(calls) for calls in computed.values()}
    class_name = type(model.get_submodule(names[0])).__name__
    return RepeatedBlock(class_name=class_name, count=len(names), share=share, kinds=len(kinds))


@contextmanager
def _left_as_it_was(workload: Workload, device: Device) -> Iterator[None]:
    devices = [device.torch_device] if device.is_accelerator else []
    with torch.random.fork_rng(devices), unchanged_afterwards(workload.model), plainly():
        yield


@contextmanager
def _sparse_gradients(model: nn.Module) -> Iterator[list[str]]:
    """The names of parameters whose gradients are sparse tensors, as a backward pass makes them."""
    found: list[str] = []

    def look(parameter: Tensor, name: str) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided and name not in found:
            found.append(name)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(look, name=name))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    ]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@dataclass(frozen=True)
class Call:
    """One operator that ran and did some work."""

    name: str
    kind: OperatorKind
    layer: LayerKind | None
    path: str
    """Of the innermost module at work."""
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[str, ...] = ()
    """Numbers among its arguments, such as the rate of a dropout: a compiler writes them into the program."""
    is_double: bool = False
    """It reads numbers of 64 bits."""


class Watch(WholeDispatchMode):
    """Writes down the operators of one run, how long each took on the device, and what else they tell."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup, self._device = setup, setup.device
        self._marks: list[Any] = []
        self._stack: list[str] = []
        self._backends: dict[Any, dict[str, set[str]]] = {}
        self.calls: list[Call] = []
        self.times: list[float] = []
        self.reads: Counter[str] = Counter()
        self.entered: Counter[str] = Counter()
        """How often each module was called, by its path."""
        self.activating: set[int] = set()
        """Positions of calls that are the activation of a linear layer."""
        self.varies_shapes = False
        self.strange_outputs: tuple[str, ...] = ()

    def over(self, work: Callable[[], object], issue_s: float) -> None:
        """Run `work` once. The device is held back meanwhile, so that it need not wait for a host that is watching."""
        self._device.hold(min(WATCHING_FACTOR * issue_s, LONGEST_HOLD_S))
        with watching(self._setup.workload.model, self._enter, self._leave), self, FunctionCalls(self):
            work()
        self._device.synchronize()
        self.times = self._device.seconds_between(self._marks)[::2]

    def _enter(self, path: str) -> None:
        self._stack.append(path)
        self.entered[path] += 1

    def _leave(self, path: str) -> None:
        while self._stack and self._stack.pop() != path:
            pass  # a module that raised, and whose caller went on without it

    def read(self, what: str) -> None:
        self.reads[f"{what} in {self._stack[-1]}" if self._stack and self._stack[-1] else what] += 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self.opened(func, args, kwargs)
        kwargs = kwargs or {}
        name, layer, kind = described(func)
        if layer == "attention":
            self._try_backends(func, args, kwargs)
        elif layer is None and is_composite(func):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._look_for_reads(func, name, args)
        if kind is None:
            return func(*args, **kwargs)
        inputs = list(tensors_in((*args, *kwargs.values())))
        shapes, is_double = tuple(tuple(each.shape) for each in inputs), any(each.dtype in DOUBLE for each in inputs)
        self._marks.append(self._device.mark())
        out = func(*args, **kwargs)
        self._marks.append(self._device.mark())
        constants = tuple(repr(value) for value in (*args, *kwargs.values()) if _is_constant(value))
        path = self._stack[-1] if self._stack else ""
        self.calls.append(Call(name, kind, layer, path, shapes, constants, is_double))
        return out

    def _look_for_reads(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        """What makes the host wait for a value: one that Python asks for, or a shape that depends on values."""
        tags = getattr(func, "tags", ())
        if torch.Tag.data_dependent_output in tags:
            self.read("item" if name == "_local_scalar_dense" else name)
        elif torch.Tag.dynamic_output_shape in tags and (name != "index" or _is_masked(args)):
            self.read(name)
            self.varies_shapes = True
        elif name in ("_to_copy", "copy_") and self._device.is_accelerator:
            kinds = [tensor.device.type for tensor in tensors_in(args)]
            target = "cpu" if name == "_to_copy" else kinds[0]
            if target == "cpu" and kinds[-1] != "cpu":
                self.read("copy to the host")

    def _try_backends(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Which backends can do this very call, in each number format that the device has; calls alike are tried once."""
        tensors = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors_in((*args, *kwargs.values()))]
        plain = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
        key = (*tensors, *map(str, plain), *sorted(kwargs))
        if key in self._backends:
            return
        trains = self._setup.task == "train"
        found: dict[str, set[str]] = {}
        for form, dtype in FORMATS.items():
            if self._device.refusal_of(dtype) is None:
                given = cast(args, dtype, trains), {name: cast(value, dtype) for name, value in kwargs.items()}
                found[form] = {name for name, backend in BACKENDS.items() if attends(func, *given, backend, trains)}
        self._backends[key] = found

    def backends_of_all(self) -> dict[str, tuple[str, ...]]:
        """Those that can do every attention of the run."""
        runs = list(self._backends.values())
        formats = runs[0] if runs else {}
        return {
            form: tuple(name for name in BACKENDS if all(name in run.get(form, ()) for run in runs)) for form in formats
        }

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        return [call.shapes for call in self.calls]

    def take_shorter_times(self, other: Watch) -> None:
        """For each operator the shorter time, where the other run had the same ones: a busy machine makes some far too long."""
        if [(call.name, call.shapes) for call in self.calls] == [(call.name, call.shapes) for call in other.calls]:
            self.times = [min(both) for both in zip(self.times, other.times, strict=True)]

    def shares_by(self, key: Callable[[Call], K]) -> dict[K, float]:
        """Of the time that all operators took, how much those of each key took."""
        shares: dict[K, float] = {}
        whole = max(sum(self.times), 1e-12)
        for call, taken in zip(self.calls, self.times, strict=True):
            shares[key(call)] = shares.get(key(call), 0.0) + taken / whole
        return shares


def _is_constant(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_constant, value))
    return isinstance(value, bool | int | float | str)


def _is_masked(args: tuple[Any, ...]) -> bool:
    return any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1:]))
