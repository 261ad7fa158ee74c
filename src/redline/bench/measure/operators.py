"""This times single operators one by one: named ones over given shapes, or those that a model calls.

The operators of a model are caught in one real forward, and each distinct call is run again by itself on random
tensors of the same shapes, number formats and layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import msgspec
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree

from redline.bench.count.counter import Row, WorkCounter, tf32_kinds
from redline.bench.count.operators import known
from redline.bench.device import Device, open_device
from redline.bench.device.failure import failure_from
from redline.bench.measure.ceilings import HALVES, Call, time_bursts
from redline.bench.recipe.compose import set_up
from redline.bench.workload.structure import WholeDispatchMode, named_tensors
from redline.model.errors import SpecError
from redline.model.note import note
from redline.model.protocol import AskOperators, OperatorCase, OperatorTimes
from redline.model.spec import RunSpec
from redline.model.work import OperatorTime

BURSTS, BURST_S = 7, 0.02
"""Each operator is timed in this many bursts of this length, which takes about 0.15 s for each."""
MOST_FROM_A_MODEL = 40
"""At most this many distinct calls of a model are timed, those with most work."""


def answer_operators(asked: AskOperators) -> OperatorTimes:
    device = open_device(asked.device, asked.threads)
    if asked.spec is not None:
        return _of_model(asked.spec, device)
    with torch.inference_mode():
        return OperatorTimes(rows=tuple(_timed_case(case, device) for case in asked.cases))


def _timed_case(case: OperatorCase, device: Device) -> OperatorTime:
    """Returns the times of one operator over one shape, or why this device cannot run it."""
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
    """Returns a call with random numbers. Zeros would not do, because a GPU multiplies them with less power, hence faster."""
    random = partial(torch.randn, device=device.torch_device, dtype=dtype)
    shape = case.shape
    match case.operator, shape:
        case "matmul", (m, n, k):
            return partial(torch.mm, random(m, k), random(k, n))
        case "conv", (batch, channels, height, width, out, kernel):
            images, weight = random(batch, channels, height, width), random(out, channels, kernel, kernel)
            return partial(functional.conv2d, images, weight, padding=kernel // 2)
        case "attention", (_, _, _, _):
            return partial(functional.scaled_dot_product_attention, random(*shape), random(*shape), random(*shape))
        case "norm", (_, width):
            return partial(functional.layer_norm, random(*shape), (width,), random(width), random(width))
        case "elementwise", (_,):
            return partial(torch.add, random(*shape), random(*shape))
    raise SpecError(f"{case.operator} takes another number of sizes than {len(shape)}")


def _of_model(spec: RunSpec, device: Device) -> OperatorTimes:
    """Times the operators of one forward of the model under its recipe. Operators that a compiler would fuse stay apart."""
    setup = set_up(spec, device, ask=False)
    # The model is built outside: weights made under inference mode could not be changed any more.
    with torch.inference_mode():
        with _Caught(device) as caught, setup.autocast(cache=False):
            setup.workload.model(*setup.args, **setup.kwargs)
        heaviest = sorted(caught.seen.values(), key=lambda same: -same.work * same.row.calls)[:MOST_FROM_A_MODEL]
        rows = [_timed(same.row, same.make, device) for same in heaviest]
    notes = []
    if caught.writes:
        named = ", ".join(f"{name} ({calls}×)" for name, calls in sorted(caught.writes.items()))
        notes.append(note("left-out", f"not timed, because it writes into its inputs: {named}"))
    if (fewer := len(caught.seen) - MOST_FROM_A_MODEL) > 0:
        less = f"not timed: {fewer} distinct calls with less work than these {MOST_FROM_A_MODEL}"
        notes.append(note("left-out", less))
    return OperatorTimes(rows=tuple(rows), notes=tuple(notes))


@dataclass
class _Same:
    """These are the calls of one operator with the same shapes."""

    row: OperatorTime
    work: int
    make: Callable[[], Call]
    """This makes the same call with other numbers."""


class _Caught(WholeDispatchMode):
    """This catches the operators that a model calls, and counts how often it calls each with the same shapes."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device
        self.writes: Counter[str] = Counter()
        self.seen: dict[Any, _Same] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with WorkCounter([], tf32_kinds(self._device)) as counter:
            out = func(*args, **kwargs)
        about = known(func)
        # One call may be several operators inside, as that of a recurrent layer is. Views and moves are left out, because a model
        # is not made of them. Lookups are kept.
        parts = [row for row in counter.rows.elements() if row.kind != "copy" or about.layer == "embedding"]
        if parts and func._schema.is_mutable:
            self.writes[about.name] += 1
        elif parts:
            tensors = [tensor for _, tensor in named_tensors((args, kwargs))]
            key = about.name, str([(list(tensor.shape), tensor.stride(), str(tensor.dtype)) for tensor in tensors])
            if key not in self.seen:
                shape = " ".join("×".join(map(str, tensor.shape)) or "1" for tensor in tensors)
                form = max(parts, key=_weight).number_format
                row = OperatorTime(operator=about.name, shape=shape, number_format=form, calls=0)
                work = max(sum(row.flops for row in parts), sum(row.bytes for row in parts))
                like = pytree.tree_map_only(Tensor, partial(_like, device=self._device), (args, kwargs))
                self.seen[key] = _Same(row, work, partial(_again, func, like))
            same = self.seen[key]
            same.row = msgspec.structs.replace(same.row, calls=same.row.calls + 1)
        return out


def _like(tensor: Tensor, device: Device) -> Any:
    """Returns a function that makes a random tensor like this one. Indices and masks are copied, because only some are valid."""
    if not tensor.is_floating_point():
        return tensor.detach().clone()
    empty = partial(torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device.torch_device)
    is_drawn = tensor.dtype.itemsize >= 2
    return lambda: empty().uniform_(0.1, 1.0) if is_drawn else empty().fill_(1.0)


def _again(func: Any, like: Any) -> Call:
    """Returns a call of the operator with freshly drawn tensors."""
    args, kwargs = pytree.tree_map_only(FunctionType, lambda make: make(), like)
    return partial(func, *args, **kwargs)


def _weight(row: Row) -> tuple[int, int]:
    """Returns a key to sort by: the main operator among those that a call consists of is the one with the largest."""
    return row.flops, row.bytes


def _timed(row: OperatorTime, make: Callable[[], Call], device: Device) -> OperatorTime:
    """Returns the row with its times, or with the reason why there are none, such as a shape that is too large for this device."""
    try:
        call = make()
        with WorkCounter([], tf32_kinds(device)) as counter:
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
