"""One real step of a workload is watched before any search, to learn what it does.

The forward runs under inference mode, where operators that are made of others (`linear`, `scaled_dot_product_attention`,
`lstm`) arrive whole at a dispatch mode: what ran is then known by what was called, not by the names of modules. It runs
on two draws of the inputs, and on more if Python reads values, which shows whether the program depends on the data.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from redline.bench.count.count import plainly
from redline.bench.count.counter import ModulePaths, watching
from redline.bench.count.operators import is_composite, known, tensors_in
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
"""At most this many plain steps are timed, for at most this long: the median of a few is enough to plan a search."""
LONGEST_HOLD_S = 0.5
"""A device is held back for this long at most, so that it need not wait for the host."""
WATCHING_FACTOR = 20.0
"""The host takes about this many times as long to issue a step that is watched. It decides how long the device is held back."""
MOST_LOOKS, LOOKING_S = 6, 1.0
"""A model that reads values on the host is looked at this often and this long at most, each time on other inputs."""
DOUBLE = (torch.float64, torch.complex128)
"""The share of operators that read such numbers is noted, because shorter formats lose most of their digits."""
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""Each backend of attention is tried in these formats, because which of them it can do depends on the format."""
READING_METHODS = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "__array__"}
"""These read values without calling an operator if the tensor lies in the host's memory."""
ACTIVATIONS = ("gelu", "relu", "relu_")
"""Libraries can compute these in the kernel of a product."""


def facts_of(workload: Workload, device: Device, optimizer: OptimizerName, seed: int) -> Facts:
    """Returns what a few steps in strict fp32 show. Weights, buffers and random numbers are put back afterwards."""
    started, model = time.perf_counter(), workload.model
    setup = plain_setup(workload, device)
    devices = [device.torch_device] if device.is_accelerator else []
    with torch.random.fork_rng(devices), unchanged_afterwards(model), plainly():
        timed = make_step(setup, optimizer)
        clock = _clocked(timed, device)
        step = Watch(setup)
        if setup.task == "train":
            timed = make_step(setup, optimizer)
            with timed.context():
                step.over(timed, clock.issue_s)
        torch.manual_seed(seed)
        before, state = held_tensors(model), device.random_state()
        forward = _watched_forward(setup, (workload.args, workload.kwargs), clock)
        mutated = changed_tensors(before, held_tensors(model))
        draws = not torch.equal(state, device.random_state())
        added_to = forward.added_to(mutated) if setup.task == "infer" else ()
        torch.manual_seed(seed)
        others = _on_other_inputs(setup, forward, seed + 1, clock)
    if (forward.names, forward.shapes) == (others[0].names, others[0].shapes):
        # The shorter time of each operator counts: a busy machine makes some far too long.
        forward.times = list(map(min, forward.times, others[0].times))
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
        attention_backends={form: tuple(filter(able.__contains__, BACKENDS)) for form, able in forward.able.items()},
        blocks=_blocks(model, forward),
        reads=tuple(f"{what} ({count})" for what, count in (forward.reads | step.reads).items()),
        synchronises=clock.synchronises,
        branches=branches,
        varies_shapes=forward.varies_shapes or (other_shapes and not branches),
        mutates=mutated,
        accumulates=added_to,
        draws_random_numbers=draws,
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
    """A clock holds what timing a few plain steps showed."""

    step_s: float
    issue_s: float
    """The host needs this many seconds to issue a step. On a CPU this is the whole step."""
    device_s: float | None
    synchronises: bool | None
    page_faults: float
    """One step has this many page faults on average."""


def _clocked(step: TimedStep, device: Device) -> Clock:
    """Times a few plain steps. It returns how long one takes, how long the host needs to issue it, and how long the device works on it."""
    whole, issued = list[float](), list[float]()
    with step.context():
        step()  # libraries load, pick algorithms, and the optimizer makes its state
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
            # The device is held back until all is issued, so that it then works without waiting for the host.
            device.hold(min(2 * median(issued), LONGEST_HOLD_S))
            marks = [device.mark()]
            step()
            marks.append(device.mark())
            device_s = device.seconds_between(marks)[0]
    return Clock(median(whole), median(issued), device_s, synchronises, faults_per_step)


def _watched_forward(setup: Setup, inputs: Inputs, clock: Clock) -> Watch:
    args, kwargs = inputs
    watch = Watch(setup)
    with setup.workload.context():
        watch.over(lambda: setup.workload.model(*args, **kwargs), clock.issue_s)
    return watch


def _on_other_inputs(setup: Setup, first: Watch, seed: int, clock: Clock) -> list[Watch]:
    """Returns one more look, and more if Python reads values, until one shows other operators, because values may decide what runs.

    The first look stands in where there are no other inputs, or the model takes none.
    """
    looks, ends_at = list[Watch](), time.perf_counter() + LOOKING_S
    for number in range(MOST_LOOKS if first.reads else 1):
        looks.append(first)
        if (second := setup.workload.second_inputs(seed + number)) is not None:
            try:
                looks[-1] = _watched_forward(setup, second.inputs, clock)
            except Exception as error:
                if second.how == "drawn" or is_out_of_memory(error):
                    raise
        if looks[-1].names != first.names or time.perf_counter() > ends_at:
            break
    return looks


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


@dataclass(frozen=True)
class Call:
    """A call is one operator that ran and did some work."""

    name: str
    kind: OperatorKind
    layer: LayerKind | None
    path: str
    """This is the path of the innermost module at work."""
    shapes: tuple[tuple[int, ...], ...]
    constants: tuple[str, ...] = ()
    """These are numbers among its arguments, such as the rate of a dropout: a compiler writes them into the program."""
    is_double: bool = False
    """True if it reads numbers of 64 bits."""
    is_activation: bool = False
    """True if it is an activation right behind a linear layer with a bias."""

    @property
    def work(self) -> tuple[object, ...]:
        """This is equal for two calls of one kind."""
        return self.name, self.shapes, self.constants


class Watch(WholeDispatchMode):
    """This writes down the operators of one run, how long each took on the device, and what else they tell."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self._setup, self._device = setup, setup.device
        self._marks: list[Any] = []
        self._tried: set[Any] = set()
        self.able: dict[str, set[str]] = {}
        """For each number format, these backends can do every attention of the run."""
        self.paths = ModulePaths()
        self.calls: list[Call] = []
        self.times: list[float] = []
        self.reads: Counter[str] = Counter()
        self._products: Any = WeakTensorKeyDictionary()
        """These are the outputs of linear layers with a bias. They are held weakly, so that watching keeps no memory."""
        self.varies_shapes = False
        self._buffers = dict(setup.workload.model.named_buffers())
        self._origins: Any = WeakTensorKeyDictionary({buffer: name for name, buffer in self._buffers.items()})
        """This names the buffer that a tensor is, is a part of, or was computed from as a new value for it."""
        self._updated: set[str] = set()

    def over(self, work: Callable[[], object], issue_s: float) -> None:
        """Runs `work` once. The device is held back meanwhile, so that it need not wait for a host that is watching."""
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
        about, values = known(func), (*args, *kwargs.values())
        if about.layer == "attention":
            self._try_backends(func, args, kwargs)
        elif about.layer is None and is_composite(func, about):
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        self._look_for_reads(func, about.name, args)
        inputs, kind = list(tensors_in(values)), about.kind
        shapes = tuple(tuple(tensor.shape) for tensor in inputs)  # they are read before the call, which may change one
        if kind is not None:
            self._marks.append(self._device.mark())
        out = func(*args, **kwargs)
        if kind is not None:
            self._marks.append(self._device.mark())
            constants = tuple(repr(value) for value in values if _is_constant(value))
            is_double = any(tensor.dtype in DOUBLE for tensor in inputs)
            activates = about.name in ACTIVATIONS and inputs[0] in self._products
            self.calls.append(Call(about.name, kind, about.layer, self._here, shapes, constants, is_double, activates))
            if about.layer == "linear" and len(inputs) > 2 and out.dim() > 1:
                self._products[out] = True
        self._follow(func, kind, inputs, out)
        return out

    def _follow(self, func: Any, kind: OperatorKind | None, inputs: Sequence[Tensor], out: Any) -> None:
        """Follows buffers into the new values that operators compute from them, and notes where one is updated in place."""
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
        """Notes what makes the host wait for a value: one that Python asks for, or a shape that depends on values."""
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
        """Finds the backends that can do this very call, in each number format that the device has. Calls that are alike are tried once."""
        values = (*args, *kwargs.values())
        tensors = [(tuple(tensor.shape), tensor.stride()) for tensor in tensors_in(values)]
        key = (*tensors, *(str(value) for value in values if not isinstance(value, Tensor)), *sorted(kwargs))
        if key in self._tried:
            return
        trains = self._setup.task == "train"
        self._tried.add(key)
        for form, dtype in FORMATS.items():
            if self._device.refusal_of(dtype) is None:
                # Query, key and value come first, and only these take part in autograd when training.
                given = [_cast(value, dtype, trains and index < 3) for index, value in enumerate(args)]
                named = {name: _cast(value, dtype, trains=False) for name, value in kwargs.items()}
                able = self.able.setdefault(form, set(BACKENDS))
                able &= {name for name in able if _attends(func, given, named, BACKENDS[name], trains)}

    @property
    def names(self) -> list[str]:
        return [call.name for call in self.calls]

    @property
    def shapes(self) -> list[tuple[tuple[int, ...], ...]]:
        return [call.shapes for call in self.calls]

    def shares_by(self, key: Callable[[Call], K]) -> dict[K, float]:
        """Returns for each key the share of all operators' time that the calls with this key took."""
        shares: dict[K, float] = {}
        whole = max(sum(self.times), 1e-12)
        for call, taken in zip(self.calls, self.times, strict=True):
            shares[key(call)] = shares.get(key(call), 0.0) + taken / whole
        return shares

    def layers(self) -> dict[LayerKind, LayerShare]:
        """Returns for each kind of layer how many calls it has, how many kinds of calls, and its share of the time."""
        found: dict[LayerKind, LayerShare] = {}
        for layer, share in self.shares_by(lambda call: call.layer).items():
            works = [call.work for call in self.calls if call.layer == layer]
            if layer is not None:
                found[layer] = LayerShare(calls=len(works), kinds=len(set(works)), share=share)
        return found

    def activated(self) -> LayerShare | None:
        """Returns the activations right behind linear layers, or None if there are none."""
        calls = sum(call.is_activation for call in self.calls)
        share = self.shares_by(lambda call: call.is_activation).get(True, 0.0)
        return LayerShare(calls=calls, share=share) if calls else None


class _Functions(TorchFunctionMode):
    """This tells a watch when Python reads a tensor's values without calling an operator."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in READING_METHODS:
            self._watch.read(READING_METHODS[func])
        return func(*args, **(kwargs or {}))


def _cast(value: Any, dtype: torch.dtype, trains: bool) -> Any:
    """Returns a copy of a floating-point tensor in another format, and any other value as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    with torch.inference_mode(False):
        return value.detach().to(dtype, copy=True).requires_grad_(trains)


def _attends(func: Any, args: Sequence[Any], kwargs: dict[str, Any], backend: SDPBackend, trains: bool) -> bool:
    """Returns whether this call of attention runs with this backend alone."""
    with torch.inference_mode(False), torch.set_grad_enabled(trains), warnings.catch_warnings(), sdpa_kernel(backend):
        warnings.simplefilter("ignore")  # torch warns why a backend cannot do it, which nobody needs to read here
        try:
            func(*args, **kwargs)
        except RuntimeError:  # running out of memory counts too: the backend cannot do this call here
            return False
    return True


def _is_constant(value: Any) -> bool:
    return (
        all(map(_is_constant, value))
        if isinstance(value, list | tuple)
        else isinstance(value, bool | int | float | str)
    )
