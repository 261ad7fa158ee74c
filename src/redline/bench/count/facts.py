"""One real step of a workload is watched before any search, to learn what it does.

The forward runs under inference mode, where operators that are made of others (`linear`, `scaled_dot_product_attention`,
`lstm`) arrive whole at a dispatch mode: what ran is then known by what was called, not by the names of modules. It runs
on two draws of the inputs, and on more if Python reads values, which shows whether the program depends on the data.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from redline.bench.count.count import plainly
from redline.bench.count.counter import ModulePaths, is_composite, watching
from redline.bench.count.operators import described, tensors_in
from redline.bench.device.base import Device
from redline.bench.device.failure import is_out_of_memory
from redline.bench.device.process import page_faults
from redline.bench.recipe.compose import plain_setup
from redline.bench.recipe.plain import BACKENDS, repeated_blocks
from redline.bench.recipe.rounding import unchanged_afterwards
from redline.bench.workload.inputs import Inputs, changed_tensors, held_tensors
from redline.bench.workload.step import Setup, TimedStep, make_step
from redline.bench.workload.structure import WholeDispatchMode
from redline.bench.workload.workload import Workload
from redline.model.record import Memory
from redline.model.spec import OptimizerName
from redline.model.work import Facts, LayerKind, LayerShare, OperatorKind, RepeatedBlock

K = TypeVar("K")

TIMED_STEPS, TIMED_SECONDS = 8, 0.5
LONGEST_HOLD_S = 0.5
"""A device is held back for this long at most, so that it need not wait for the host."""
WATCHING_FACTOR = 20.0
"""A step that is watched takes the host about this many times as long to issue."""
MOST_LOOKS, LOOKING_S = 6, 1.0
"""A model that reads values on the host is looked at this often at most, on inputs of their own."""
DOUBLE = (torch.float64, torch.complex128)
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
PLAIN_OUTPUTS = (Tensor, bool, int, float, complex, str, type(None))
"""A program made from a model can return these, in any structure that torch's pytree knows."""
READING_METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "__array__"}
"""These read values without calling an operator if the tensor lies in the host's memory."""
ACTIVATIONS = frozenset(
    {functional.gelu, functional.relu, torch.relu, torch.relu_, functional.relu_, Tensor.relu, Tensor.relu_}
)
"""Libraries can compute these in the kernel of a product."""


def facts_of(workload: Workload, device: Device, optimizer: OptimizerName, seed: int) -> Facts:
    """Runs a few steps in strict fp32. Weights, buffers and random numbers are put back afterwards."""
    started, model = time.perf_counter(), workload.model
    setup = plain_setup(workload, device)
    devices = [device.torch_device] if device.is_accelerator else []
    with torch.random.fork_rng(devices), unchanged_afterwards(model), plainly():
        timed = make_step(setup, optimizer)
        clock = _clocked(timed, device)
        step, sparse = Watch(setup), list[str]()
        if setup.task == "train":
            timed = make_step(setup, optimizer)
            with timed.context(), _sparse_gradients(model) as sparse:
                step.over(timed, clock.issue_s)
        torch.manual_seed(seed)
        before, state = held_tensors(model), device.random_state()
        forward = _watched_forward(setup, (workload.args, workload.kwargs), clock)
        mutated = changed_tensors(before, held_tensors(model))
        draws = not torch.equal(state, device.random_state())
        added_to = forward.added_to(mutated) if setup.task == "infer" else ()
        torch.manual_seed(seed)
        others = list(_on_other_inputs(setup, forward, seed + 1, clock))
    forward.take_shorter_times(others[0])
    whole = step if step.calls else forward
    memory = device.memory() if device.is_accelerator else Memory()
    branches = any(other.names != forward.names for other in others)
    other_shapes = any(other.shapes != forward.shapes for other in others)
    return Facts(
        layers=forward.layers(),
        activated=forward.activated(),
        kinds=dict(sorted(whole.shares_by(lambda call: call.kind).items(), key=lambda item: -item[1])),
        launches=len(whole.calls),
        double_share=whole.shares_by(lambda call: call.is_double).get(True, 0.0),
        attention_backends=forward.backends_of_all(),
        blocks=_blocks(model, forward),
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


@dataclass(frozen=True)
class Clock:
    step_s: float
    issue_s: float
    """Seconds until the host has issued a step; on a CPU this is the whole step."""
    device_s: float | None
    synchronises: bool | None
    page_faults: float
    """The page faults of one step."""


def _clocked(step: TimedStep, device: Device) -> Clock:
    """Times a few plain steps: how long one takes, how long the host needs to issue it, and how long the device to do it."""
    whole, issued = list[float](), list[float]()
    with step.context():
        step()  # libraries load, algorithms are picked, the optimizer makes its state
        device.synchronize()
        deadline, faults = time.perf_counter() + TIMED_SECONDS, page_faults()
        while len(whole) < TIMED_STEPS and (not whole or time.perf_counter() < deadline):
            started = time.perf_counter()
            step()
            issued.append(time.perf_counter() - started)
            device.synchronize()
            whole.append(time.perf_counter() - started)
        faults_per_step = (page_faults() - faults) / len(whole)
        synchronises, device_s = device.synchronises(step), None
        if device.is_accelerator and not synchronises:
            # Held back until all is issued, the device then works without waiting for the host.
            device.hold(min(2 * median(issued), LONGEST_HOLD_S))
            marks = [device.mark()]
            step()
            marks.append(device.mark())
            device_s = device.seconds_between(marks)[0]
    return Clock(median(whole), median(issued), device_s, synchronises, faults_per_step)


def _watched_forward(setup: Setup, inputs: Inputs, clock: Clock) -> Watch:
    args, kwargs = inputs
    watch, returned = Watch(setup), list[Any]()
    with setup.workload.context():
        watch.over(lambda: returned.append(setup.workload.model(*args, **kwargs)), clock.issue_s)
    classes = (type(leaf).__name__ for leaf in tree_leaves(returned) if not isinstance(leaf, PLAIN_OUTPUTS))
    watch.strange_outputs = tuple(dict.fromkeys(classes))
    return watch


def _on_other_inputs(setup: Setup, first: Watch, seed: int, clock: Clock) -> Iterator[Watch]:
    """One more look, and more if Python reads values, until one shows other operators: the values may decide what runs.

    The first look stands in where there are no other inputs, or the model takes none.
    """
    ends_at = time.perf_counter() + LOOKING_S
    for number in range(MOST_LOOKS if first.reads else 1):
        other, second = first, setup.workload.second_inputs(seed + number)
        if second is not None:
            try:
                other = _watched_forward(setup, second.inputs, clock)
            except Exception as error:
                if second.how == "drawn" or is_out_of_memory(error):
                    raise
        yield other
        if other.names != first.names or time.perf_counter() > ends_at:
            return


def _blocks(model: nn.Module, forward: Watch) -> RepeatedBlock | None:
    names = repeated_blocks(model)
    if not names:
        return None
    block_of = {
        path: name for path in forward.paths.calls for name in names if path == name or path.startswith(f"{name}.")
    }
    computed: dict[str, list[tuple[object, ...]]] = {name: [] for name in block_of.values()}
    for call in forward.calls:
        if (name := block_of.get(call.path)) is not None:
            computed[name].append((call.path[len(name) :], *call.work))
    return RepeatedBlock(
        class_name=type(model.get_submodule(names[0])).__name__,
        count=len(names),
        share=forward.shares_by(lambda call: call.path in block_of).get(True, 0.0),
        kinds=len(set(map(tuple, computed.values()))),
    )


@contextmanager
def _sparse_gradients(model: nn.Module) -> Iterator[list[str]]:
    """Yields a list that gathers the names of parameters whose gradients are sparse tensors."""
    found: list[str] = []

    def look(name: str, parameter: Tensor) -> None:
        if parameter.grad is not None and parameter.grad.layout is not torch.strided and name not in found:
            found.append(name)

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(look, name))
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
    """This is the path of the innermost module at work."""
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[str, ...] = ()
    """These are numbers among its arguments, such as the rate of a dropout: a compiler writes them into the program."""
    is_double: bool = False
    """It reads numbers of 64 bits."""

    @property
    def work(self) -> tuple[object, ...]:
        """Calls with the same work are of one kind."""
        return self.name, self.shapes, self.constants


class Watch(WholeDispatchMode):
    """Writes down the operators of one run, how long each took on the device, and what else they tell."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup, self._device = setup, setup.device
        self._marks: list[Any] = []
        self._backends: dict[Any, dict[str, set[str]]] = {}
        self.paths = ModulePaths()
        self.calls: list[Call] = []
        self.times: list[float] = []
        self.reads: Counter[str] = Counter()
        self.activating: set[int] = set()
        """Positions of calls that are the activation of a linear layer."""
        self.varies_shapes = False
        self.strange_outputs: tuple[str, ...] = ()
        self._buffers = dict(setup.workload.model.named_buffers())
        self._origins: Any = WeakTensorKeyDictionary({buffer: name for name, buffer in self._buffers.items()})
        """The buffer that a tensor is, is a part of, or was computed from as a new value for it."""
        self._updated: set[str] = set()

    def over(self, work: Callable[[], object], issue_s: float) -> None:
        """Run `work` once. The device is held back meanwhile, so that it need not wait for a host that is watching."""
        self._device.hold(min(WATCHING_FACTOR * issue_s, LONGEST_HOLD_S))
        with watching(self._setup.workload.model, self.paths.enter, self.paths.leave), self, _Functions(self):
            work()
        self._device.synchronize()
        self.times = self._device.seconds_between(self._marks)[::2]

    def read(self, what: str) -> None:
        self.reads[f"{what} in {self._here}" if self._here else what] += 1

    @property
    def _here(self) -> str:
        return self.paths.stack[-1] if self.paths.stack else ""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, layer, kind = described(func)
        if layer == "attention":
            self._try_backends(func, args, kwargs)
        elif layer is None and is_composite(func):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._look_for_reads(func, name, args)
        values = (*args, *kwargs.values())
        inputs = list(tensors_in(values))
        if kind is None:
            out = func(*args, **kwargs)
            self._follow(func, kind, inputs, out)
            return out
        shapes, is_double = (
            tuple(tuple(tensor.shape) for tensor in inputs),
            any(tensor.dtype in DOUBLE for tensor in inputs),
        )
        self._marks.append(self._device.mark())
        out = func(*args, **kwargs)
        self._marks.append(self._device.mark())
        self._follow(func, kind, inputs, out)
        constants = tuple(repr(value) for value in values if _is_constant(value))
        self.calls.append(Call(name, kind, layer, self._here, shapes, constants, is_double))
        return out

    def _follow(self, func: Any, kind: OperatorKind | None, inputs: Sequence[Tensor], out: Any) -> None:
        """Follow buffers into the new values that operators compute from them, and note where one is updated in place."""
        for tensor in inputs:
            if (name := self._origins.get(tensor)) is None:
                continue
            if kind == "norm" or (kind == "elementwise" and func._schema.is_mutable and tensor is inputs[0]):
                self._updated.add(name)
            for part in tensors_in(out) if kind in (None, "elementwise") else ():
                if kind is None or part.shape == self._buffers[name].shape:
                    self._origins[part] = name

    def added_to(self, written: Sequence[str]) -> tuple[str, ...]:
        """Returns the buffers whose new value is computed from the old one: a count, a sum, a moving average.

        What a cache of keys and values is given does not depend on what was there: it is copied in.
        """
        buffers = [(name, buffer) for name, buffer in self._setup.workload.model.named_buffers() if name in written]
        return tuple(
            name
            for name, buffer in buffers
            if buffer.is_floating_point()
            and (name in self._updated or (buffer is not self._buffers[name] and self._origins.get(buffer) == name))
        )

    def _look_for_reads(self, func: Any, name: str, args: tuple[Any, ...]) -> None:
        """Look for what makes the host wait for a value: one that Python asks for, or a shape that depends on values."""
        tags = getattr(func, "tags", ())
        is_masked = any(tensor.dtype in (torch.bool, torch.uint8) for tensor in tensors_in(args[1:]))
        if torch.Tag.data_dependent_output in tags:
            self.read("item" if name == "_local_scalar_dense" else name)
        elif torch.Tag.dynamic_output_shape in tags and (name != "index" or is_masked):
            self.read(name)
            self.varies_shapes = True
        elif name in ("_to_copy", "copy_") and self._device.is_accelerator:
            kinds = [tensor.device.type for tensor in tensors_in(args)]
            target = "cpu" if name == "_to_copy" else kinds[0]
            if target == "cpu" and kinds[-1] != "cpu":
                self.read("copy to the host")

    def _try_backends(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Find the backends that can do this very call, in each number format that the device has. Calls alike are tried once."""
        values = (*args, *kwargs.values())
        tensors = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors_in(values)]
        key = (*tensors, *(str(value) for value in values if not isinstance(value, Tensor)), *sorted(kwargs))
        if key in self._backends:
            return
        trains = self._setup.task == "train"
        self._backends[key] = {}
        for form, dtype in FORMATS.items():
            if self._device.refusal_of(dtype) is None:
                # Query, key and value come first: those take part in autograd when training.
                given = [_cast(value, dtype, trains and index < 3) for index, value in enumerate(args)]
                named = {name: _cast(value, dtype, trains=False) for name, value in kwargs.items()}
                able = {name for name, backend in BACKENDS.items() if _attends(func, given, named, backend, trains)}
                self._backends[key][form] = able

    def backends_of_all(self) -> dict[str, tuple[str, ...]]:
        """Returns the backends that can do every attention of the run, by number format."""
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
        """Take the shorter time of each operator if the other run had the same ones: a busy machine makes some far too long."""
        if (self.names, self.shapes) == (other.names, other.shapes):
            self.times = [min(both) for both in zip(self.times, other.times, strict=True)]

    def shares_by(self, key: Callable[[Call], K]) -> dict[K, float]:
        """Returns the share of the time of all operators that those of each key took."""
        shares: dict[K, float] = {}
        whole = max(sum(self.times), 1e-12)
        for call, taken in zip(self.calls, self.times, strict=True):
            shares[key(call)] = shares.get(key(call), 0.0) + taken / whole
        return shares

    def layers(self) -> dict[LayerKind, LayerShare]:
        shares, calls = self.shares_by(lambda call: call.layer), Counter(call.layer for call in self.calls)
        kinds = Counter(layer for layer, _ in {(call.layer, call.work) for call in self.calls})
        return {
            layer: LayerShare(calls=calls[layer], kinds=kinds[layer], share=share)
            for layer, share in shares.items()
            if layer is not None
        }

    def activated(self) -> LayerShare | None:
        if not self.activating:
            return None
        share = sum(self.times[index] for index in self.activating) / max(sum(self.times), 1e-12)
        return LayerShare(calls=len(self.activating), share=share)


class _Functions(TorchFunctionMode):
    """Tells a watch when Python reads a tensor's values, and which operators are the activation of a linear layer."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch
        self._from_linear: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """Outputs of linear layers that are still alive, by their identity."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, watch = kwargs or {}, self._watch
        if func in READING_METHODS:
            watch.read(READING_METHODS[func])
        begun = len(watch.calls)
        out = func(*args, **kwargs)
        if func is functional.linear:
            bias = args[2] if len(args) > 2 else kwargs.get("bias")
            if bias is not None and out.dim() > 1:
                self._from_linear[id(out)] = out
        elif func in ACTIVATIONS:
            given = args[0] if args else kwargs.get("input")
            if given is not None and self._from_linear.get(id(given)) is given:
                watch.activating |= set(range(begun, len(watch.calls)))
        return out


def _cast(value: Any, dtype: torch.dtype, trains: bool) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    with torch.inference_mode(False):
        return value.detach().to(dtype, copy=True).requires_grad_(trains)


def _attends(func: Any, args: Sequence[Any], kwargs: dict[str, Any], backend: SDPBackend, trains: bool) -> bool:
    with torch.inference_mode(False), torch.set_grad_enabled(trains), warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # torch tells why a backend will not do
        try:
            func(*args, **kwargs)
        except RuntimeError:  # also out of memory: it cannot do this call here
            return False
    return True


def _is_constant(value: Any) -> bool:
    return (
        all(map(_is_constant, value))
        if isinstance(value, list | tuple)
        else isinstance(value, bool | int | float | str)
    )
