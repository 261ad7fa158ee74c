"""Single operators, timed one by one: named ones over given shapes, or those that a model calls.

The operators of a model are caught in one real forward, and each distinct call is run again by itself on random
tensors of the same shapes, number formats and layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from redline.bench.count.counter import Row, Tf32, WorkCounter
from redline.bench.count.operators import known
from redline.bench.device import Device, open_device
from redline.bench.device.failure import failure_from
from redline.bench.measure.ceilings import HALVES, Call, time_bursts
from redline.bench.recipe.compose import set_up
from redline.bench.workload.structure import WholeDispatchMode, named_tensors
from redline.model.errors import SpecError
from redline.model.note import Note, note
from redline.model.protocol import AskOperators, OperatorCase, OperatorTimes
from redline.model.spec import RunSpec
from redline.model.work import OperatorTime

SIZES = {"matmul": 3, "conv": 6, "attention": 4, "norm": 2, "elementwise": 1}
"""How many numbers a shape has: M×N×K; N×C×H×W×K×R (output channels, kernel); batch×heads×length×width; rows×width; n."""
BURSTS, BURST_S = 7, 0.02
MOST_FROM_A_MODEL = 40
"""The number of distinct calls that are timed, those with most work first."""


def answer_operators(asked: AskOperators) -> OperatorTimes:
    device = open_device(asked.device, asked.threads)
    if asked.spec is not None:
        return _of_model(asked.spec, device)
    with torch.inference_mode():
        return OperatorTimes(rows=tuple(_timed_case(case, device) for case in asked.cases))


def _timed_case(case: OperatorCase, device: Device) -> OperatorTime:
    row = OperatorTime(operator=case.operator, shape="×".join(map(str, case.shape)), number_format=case.number_format)
    is_tf32, dtype = case.number_format == "tf32", HALVES.get(case.number_format, torch.float32)
    refusal = device.tf32_refusal() if is_tf32 else device.refusal_of(dtype)
    if refusal is not None:
        return msgspec.structs.replace(row, refusal=refusal)
    device.allow_tf32(is_tf32)
    try:
        return _timed(row, lambda: _call_of(case, dtype, device), device)
    finally:
        device.allow_tf32(False)


def _call_of(case: OperatorCase, dtype: torch.dtype, device: Device) -> Call:
    """Returns a call with random numbers, never zeros: a GPU multiplies zeros with less power, hence faster."""
    if len(case.shape) != SIZES[case.operator]:
        raise SpecError(f"{case.operator} takes {SIZES[case.operator]} sizes, got {len(case.shape)}")
    shape = case.shape

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes, device=device.torch_device, dtype=dtype)

    if case.operator == "matmul":
        m, n, k = shape
        return partial(torch.mm, random(m, k), random(k, n))
    if case.operator == "conv":
        batch, channels, height, width, out, kernel = shape
        images, weight = random(batch, channels, height, width), random(out, channels, kernel, kernel)
        return partial(functional.conv2d, images, weight, padding=kernel // 2)
    if case.operator == "attention":
        return partial(functional.scaled_dot_product_attention, random(*shape), random(*shape), random(*shape))
    if case.operator == "norm":
        width = shape[-1]
        return partial(functional.layer_norm, random(*shape), (width,), random(width), random(width))
    return partial(torch.add, random(*shape), random(*shape))


def _of_model(spec: RunSpec, device: Device) -> OperatorTimes:
    """Times the operators of one forward of the model under its recipe; what a compiler would fuse stays apart."""
    setup = set_up(spec, device, ask=False)
    # The model is built outside: weights made under inference mode could not be changed any more.
    with torch.inference_mode():
        with _Caught(Tf32.of(device)) as caught, setup.autocast(cache=False):
            setup.workload.model(*setup.args, **setup.kwargs)
        heaviest = sorted(caught.seen.values(), key=lambda same: -same.work * same.calls)[:MOST_FROM_A_MODEL]
        rows = [_timed(same.row, partial(same.again, device), device) for same in heaviest]
    return OperatorTimes(rows=tuple(rows), notes=tuple(caught.left_out()))


class _Like:
    """A tensor is remembered with everything but its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._values = tensor.detach().clone() if not tensor.is_floating_point() else None

    def made(self, device: Device) -> Tensor:
        """Random if it holds real numbers; indices and masks as they were, because only some are valid."""
        if self._values is not None:
            return self._values
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device.torch_device)
        return made.uniform_(0.1, 1.0) if self.dtype.itemsize >= 2 else made.fill_(1.0)


class _Same:
    """These are the calls of one operator with the same shapes."""

    def __init__(self, name: str, number_format: str, work: int, func: Any, inputs: Any) -> None:
        self._name, self._number_format, self._func, self.work, self.calls = name, number_format, func, work, 0
        self._like = pytree.tree_map_only(Tensor, _Like, inputs)
        self._shape = " ".join("×".join(map(str, tensor.shape)) or "1" for _, tensor in named_tensors(inputs))

    @property
    def row(self) -> OperatorTime:
        return OperatorTime(operator=self._name, shape=self._shape, number_format=self._number_format, calls=self.calls)

    def again(self, device: Device) -> Call:
        args, kwargs = pytree.tree_map_only(_Like, lambda like: like.made(device), self._like)
        return partial(self._func, *args, **kwargs)


class _Caught(WholeDispatchMode):
    """Catches the operators that a model calls, with how often it calls each with the same shapes."""

    def __init__(self, tf32: Tf32) -> None:
        super().__init__()
        self._tf32 = tf32
        self._writes: Counter[str] = Counter()
        self.seen: dict[Any, _Same] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counter = WorkCounter([], self._tf32)
        with counter:
            out = func(*args, **kwargs)
        about = known(func)
        name = about.name
        # One call may be several operators inside, as that of a recurrent layer is. Views and moves are not what a model is
        # made of; lookups are.
        parts = [row for row in counter.rows.elements() if row.kind != "copy" or about.layer == "embedding"]
        if parts and func._schema.is_mutable:
            self._writes[name] += 1
        elif parts:
            tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
            key = name, str([(list(tensor.shape), tensor.stride(), str(tensor.dtype)) for tensor in tensors])
            if key not in self.seen:
                work = max(sum(row.flops for row in parts), sum(row.bytes for row in parts))
                self.seen[key] = _Same(name, max(parts, key=_weight).number_format, work, func, (args, kwargs))
            self.seen[key].calls += 1
        return out

    def left_out(self) -> Iterator[Note]:
        if self._writes:
            named = ", ".join(f"{name} ({calls}×)" for name, calls in sorted(self._writes.items()))
            yield note("left-out", f"not timed, because it writes into its inputs: {named}")
        if (fewer := len(self.seen) - MOST_FROM_A_MODEL) > 0:
            less = f"not timed: {fewer} distinct calls with less work than these {MOST_FROM_A_MODEL}"
            yield note("left-out", less)


def _weight(row: Row) -> tuple[int, int]:
    """The main operator among those that a call consists of is the one that is largest by this."""
    return row.flops, row.bytes


def _timed(row: OperatorTime, make: Callable[[], Call], device: Device) -> OperatorTime:
    """Returns the row with its times, or with the reason: too large for this device, or a format that it does not take."""
    try:
        call, counter = make(), WorkCounter([], Tf32.of(device))
        with counter:
            call()
        samples = time_bursts(device, call, BURSTS, BURST_S)
    except Exception as error:
        return msgspec.structs.replace(row, refusal=failure_from(error, "ops").message)
    finally:
        device.release_cache()
    rows = list(counter.rows.elements())
    return msgspec.structs.replace(
        row,
        kind=max(rows, key=_weight).kind if rows else "other",
        samples=tuple(samples),
        flops=sum(part.flops for part in rows),
        bytes=sum(part.bytes for part in rows),
    )
