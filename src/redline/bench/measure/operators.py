"""Single operators, timed one by one: named ones over given shapes, or those that a model calls.

The operators of a model are caught in one real forward, and each distinct call is run again by itself on random
tensors of the same shapes, number formats and layout.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.nn import functional
from torch.utils import _pytree as pytree

from redline.bench.count.counter import Tf32, WorkCounter
from redline.bench.count.kinds import described, known
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.device.failure import failure_from
from redline.bench.recipe.compose import apply_recipe
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.structure import WholeDispatchMode, named_tensors
from redline.model.errors import SpecError
from redline.model.note import Note, note
from redline.model.questions import AskOperators, OperatorCase, OperatorTimes
from redline.model.spec import RunSpec
from redline.model.work import OperatorTime

Call = Callable[[], Any]

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SIZES = {"matmul": 3, "conv": 6, "attention": 4, "norm": 2, "elementwise": 1}
"""How many numbers a shape has: M×N×K; N×C×H×W×K×R (output channels, kernel); batch×heads×length×width; rows×width; n."""
BURSTS = 7
BURST_S = 0.02
MOST_FROM_A_MODEL = 40
"""Distinct calls, those with most work first."""


def answer_operators(asked: AskOperators) -> OperatorTimes:
    if asked.threads is not None:
        torch.set_num_threads(asked.threads)
    device = open_device(resolve_device(asked.device))
    with torch.inference_mode():
        if asked.spec is not None:
            return _of_model(asked.spec, device)
        return OperatorTimes(rows=tuple(_timed_case(case, device) for case in asked.cases))


def _timed_case(case: OperatorCase, device: Device) -> OperatorTime:
    told = OperatorTime(operator=case.operator, shape="×".join(map(str, case.shape)), number_format=case.number_format)
    refusal = device.tf32_refusal() if case.number_format == "tf32" else device.refusal_of(DTYPES[case.number_format])
    if refusal is not None:
        return _refused(told, refusal)
    device.allow_tf32(case.number_format == "tf32")
    try:
        return _timed(told, _call_of(case, device), device)
    except Exception as error:  # too large for this device, or a format it does not take
        return _refused(told, failure_from(error, "ops").message)
    finally:
        device.allow_tf32(False)
        device.release_cache()


def _refused(told: OperatorTime, why: str) -> OperatorTime:
    return OperatorTime(operator=told.operator, shape=told.shape, number_format=told.number_format, refusal=why)


def _call_of(case: OperatorCase, device: Device) -> Call:
    """Random numbers, never zeros: a GPU multiplies zeros with less power, hence faster."""
    if len(case.shape) != SIZES[case.operator]:
        raise SpecError(f"{case.operator} takes {SIZES[case.operator]} sizes, got {len(case.shape)}")

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device.torch_device, dtype=DTYPES[case.number_format])

    if case.operator == "matmul":
        m, n, k = case.shape
        left, right = random(m, k), random(k, n)
        return lambda: torch.mm(left, right)
    if case.operator == "conv":
        batch, channels, height, width, out, kernel = case.shape
        image, weight = random(batch, channels, height, width), random(out, channels, kernel, kernel)
        return lambda: functional.conv2d(image, weight, padding=kernel // 2)
    if case.operator == "attention":
        query, key, value = random(*case.shape), random(*case.shape), random(*case.shape)
        return lambda: functional.scaled_dot_product_attention(query, key, value)
    if case.operator == "norm":
        rows, width = case.shape
        data, weight, bias = random(rows, width), random(width), random(width)
        return lambda: functional.layer_norm(data, (width,), weight, bias)
    first, second = random(*case.shape), random(*case.shape)
    return lambda: torch.add(first, second)


def _of_model(spec: RunSpec, device: Device) -> OperatorTimes:
    """The operators of one forward of the model under its recipe; what a compiler would fuse stays apart."""
    workload = build_workload(spec.workload, spec.seed).to(device.torch_device)
    settle_batch(workload, spec.workload, ask=False)
    setup = apply_recipe(spec.recipe, workload, device)
    with _Caught(Tf32.of(device)) as caught, setup.autocast(cache=False):
        workload.model(*setup.args, **setup.kwargs)
    rows = []
    for call in caught.heaviest(MOST_FROM_A_MODEL):
        told = OperatorTime(operator=call.name, shape=call.shape, number_format=call.number_format, calls=call.calls)
        try:
            rows.append(_timed(told, call.again(device), device))
        except Exception as error:
            rows.append(_refused(told, failure_from(error, "ops").message))
        device.release_cache()
    return OperatorTimes(rows=tuple(rows), notes=tuple(caught.left_out(MOST_FROM_A_MODEL)))


class _Same:
    """One distinct call of an operator."""

    def __init__(self, func: Any, args: Any, kwargs: Any, number_format: str, work: int) -> None:
        self.name = known(func).name
        self._func = func
        self._like = pytree.tree_map_only(Tensor, _Like, (args, kwargs))
        self.number_format = number_format
        self.work = work
        self.calls = 0
        shapes = [list(tensor.shape) for _, tensor in named_tensors((args, kwargs))]
        self.shape = " ".join("×".join(map(str, shape)) or "1" for shape in shapes)

    def again(self, device: Device) -> Call:
        args, kwargs = pytree.tree_map_only(_Like, lambda like: like.made(device), self._like)
        return lambda: self._func(*args, **kwargs)


class _Like:
    """What is remembered of a tensor: everything but its values."""

    def __init__(self, tensor: Tensor) -> None:
        self.size, self.stride, self.dtype = tensor.size(), tensor.stride(), tensor.dtype
        self._values = tensor.detach().clone() if not tensor.is_floating_point() else None

    def made(self, device: Device) -> Tensor:
        """Random where it holds real numbers; indices and masks as they were, because only some are valid."""
        if self._values is not None:
            return self._values
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device.torch_device)
        return made.uniform_(0.1, 1.0) if self.dtype.itemsize >= 2 else made.fill_(1.0)


class _Caught(WholeDispatchMode):
    def __init__(self, tf32: Tf32) -> None:
        super().__init__()
        self._tf32 = tf32
        self._seen: dict[Any, _Same] = {}
        self._times: Counter[Any] = Counter()
        self._writes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self.opened(func, args, kwargs)
        kwargs = kwargs or {}
        counter = WorkCounter([], self._tf32)
        with counter:
            out = func(*args, **kwargs)
        # One call may be several operators inside, as that of a recurrent layer is.
        name, layer, _ = described(func)
        # Views and moves are not what a model is made of; lookups are.
        parts = [row for row in counter.rows.elements() if row[1] != "copy" or layer == "embedding"]
        if not parts:
            return out
        if func._schema.is_mutable:
            self._writes[name] += 1
            return out
        key = (name, str([(list(t.shape), t.stride(), str(t.dtype)) for _, t in named_tensors((args, kwargs))]))
        if key not in self._seen:
            flops, moved = sum(row[4] for row in parts), sum(row[5] for row in parts)
            main = max(parts, key=lambda row: (row[4], row[5]))
            self._seen[key] = _Same(func, args, kwargs, main[2], max(flops, moved))
        self._times[key] += 1
        return out

    def heaviest(self, most: int) -> list[_Same]:
        for key, same in self._seen.items():
            same.calls = self._times[key]
        return sorted(self._seen.values(), key=lambda same: -same.work * same.calls)[:most]

    def left_out(self, most: int) -> Iterator[Note]:
        if self._writes:
            named = ", ".join(f"{name} ({calls}×)" for name, calls in sorted(self._writes.items()))
            yield note("left-out", f"not timed, because it writes into its inputs: {named}")
        if len(self._seen) > most:
            yield note(
                "left-out", f"not timed: {len(self._seen) - most} distinct calls with less work than these {most}"
            )


def _timed(told: OperatorTime, call: Call, device: Device) -> OperatorTime:
    counter = WorkCounter([], Tf32.of(device))
    with counter:
        call()
    device.synchronize()
    before = time.perf_counter()
    call()
    device.synchronize()
    calls = max(1, math.ceil(BURST_S / max(time.perf_counter() - before, 1e-6)))
    samples = []
    for _ in range(BURSTS):
        call()  # not timed: it wakes the device up
        marks = [device.mark()]
        for _ in range(calls):
            call()
        marks.append(device.mark())
        samples.append(device.seconds_between(marks)[0] / calls)
    rows = list(counter.rows.elements())
    return OperatorTime(
        operator=told.operator,
        shape=told.shape,
        number_format=told.number_format,
        calls=told.calls,
        kind=_main_kind(rows),
        samples=tuple(samples),
        flops=sum(row[4] for row in rows),
        bytes=sum(row[5] for row in rows),
    )


def _main_kind(rows: Sequence[Any]) -> Any:
    return max(rows, key=lambda row: (row[4], row[5]))[1] if rows else "other"
