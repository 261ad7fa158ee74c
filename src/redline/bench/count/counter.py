"""Counting operators as they run: FLOPs and bytes, the number format of each, and the module it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from redline.bench.count.formulas import is_ragged
from redline.bench.count.kinds import (
    Known,
    Touched,
    distinct,
    known,
    placed_bytes,
    read_bytes,
    tensor_bytes,
    tensors_in,
)
from redline.bench.device.base import Device
from redline.bench.workload.structure import WholeDispatchMode, packed
from redline.model.work import PRODUCTS, OperatorKind, WorkPhase

_FORMATS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.complex64: "fp32",
    torch.complex128: "fp64",
    torch.int8: "int8",
    torch.uint8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
    **{getattr(torch, name): "fp8" for name in (
        "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    ) if hasattr(torch, name)},
}  # fmt: skip


@dataclass(frozen=True)
class Tf32:
    """Where fp32 products may use the shorter format."""

    matmul: bool = False
    convolution: bool = False

    @classmethod
    def of(cls, device: Device) -> Tf32:
        if not device.is_accelerator:
            return cls()
        return cls(matmul=torch.backends.cuda.matmul.allow_tf32, convolution=torch.backends.cudnn.allow_tf32)


NO_TF32 = Tf32()


def number_format(tensors: Iterable[Tensor], kind: OperatorKind | None, tf32: Tf32) -> str:
    """That of the first tensor that holds numbers to compute with."""
    found = next((_FORMATS[tensor.dtype] for tensor in tensors if tensor.dtype in _FORMATS), "int")
    if found == "fp32" and kind in ("matmul", "attention"):
        return "tf32" if tf32.matmul else found
    if found == "fp32" and kind == "convolution":
        return "tf32" if tf32.convolution else found
    return found


Row = tuple[str, OperatorKind, str, WorkPhase, int, int]
"""Name, kind, number format, phase, FLOPs and bytes of one call."""


@dataclass
class Share:
    """What happened directly in one module."""

    calls: int = 0
    flops: Counter[WorkPhase] = field(default_factory=Counter)
    other_flops: int = 0
    bytes: Counter[WorkPhase] = field(default_factory=Counter)
    formats: Counter[str] = field(default_factory=Counter)


@contextmanager
def watching(model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """Call `enter` and `leave` with a module's path whenever the forward pass does. The modules stay untouched.

    A module with several names goes by its first. One that is not part of the model belongs to the module that called it.
    """
    paths = {id(module): path for path, module in model.named_modules()}

    def before(module: nn.Module, _: Any) -> None:
        path = paths.get(id(module))
        if path is not None:
            enter(path)

    def after(module: nn.Module, _: Any, __: Any) -> None:
        path = paths.get(id(module))
        if path is not None:
            leave(path)

    handles = [register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ModulePaths:
    """Which module is at work. A backward operator belongs to the module whose forward made its node.

    Autograd numbers its nodes as they are made; with the number at which each module was entered and left, the module
    of any node is found again without a hook on any tensor.
    """

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._numbers: list[int] = []
        self._paths: list[str] = []
        self.calls: Counter[str] = Counter()

    def enter(self, path: str) -> None:
        self._stack.append(path)
        self.calls[path] += 1
        self._turn()

    def leave(self, path: str) -> None:
        while self._stack and self._stack.pop() != path:
            pass  # a module that raised, and whose caller went on without it
        self._turn()

    def here(self) -> str:
        node = torch._C._current_autograd_node()
        # A step of the user's own calls backward from inside: then the whole is at work, and the node says more.
        if self._stack and (node is None or self._stack != [""]):
            return self._stack[-1]
        if node is None or not self._numbers:
            return ""
        position = bisect_right(self._numbers, node._sequence_nr()) - 1
        return self._paths[position] if position >= 0 else ""

    def _turn(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        path = self._stack[-1] if self._stack else ""
        if self._numbers and self._numbers[-1] == number:
            self._paths[-1] = path  # no node was made in between
        else:
            self._numbers.append(number)
            self._paths.append(path)

    def watch(self, model: nn.Module) -> AbstractContextManager[None]:
        return watching(model, self.enter, self.leave)


class WorkCounter(WholeDispatchMode):
    def __init__(self, leaves: Iterable[Tensor], tf32: Tf32) -> None:
        super().__init__()
        self.phase: WorkPhase = "forward"
        self.rows: Counter[Row] = Counter()
        self.uncounted: Counter[str] = Counter()
        self.shares: dict[str, Share] = {}
        self.module_paths = ModulePaths()
        self.touched = Touched(leaves)
        self._tf32 = tf32
        self._finds_phases = False
        self.has_opened = False
        """An operator that calls functions was seen."""
        self._packed: dict[torch.ScriptObject, list[Tensor]] = {}

    @contextmanager
    def finding_phases(self) -> Iterator[None]:
        """Inside, the phase is read off what autograd and the optimizers are doing."""
        self._finds_phases = True
        hooks = [
            register_optimizer_step_pre_hook(lambda *_: self._enter("optimizer")),
            register_optimizer_step_post_hook(lambda *_: self._enter("forward")),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _enter(self, phase: WorkPhase) -> None:
        self.phase = phase

    def _phase_now(self) -> WorkPhase:
        is_backward = self._finds_phases and torch._C._current_graph_task_id() >= 0
        return "backward" if is_backward else self.phase

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):
            self.has_opened = True
            seen = self.rows.total()
            out = self.opened(func, args, kwargs)
            if self.rows.total() == seen:  # nothing that could be seen: a kernel of the user's own
                self.uncounted[func.name()] += 1
            return out
        about = known(func)
        if about.kind is None:
            return func(*args, **kwargs)
        if about.formula is None and is_composite(func):
            # Under inference mode operators that are made of others arrive whole: take them apart.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self._note(func, about, args, kwargs, out)
        return out

    def _note(self, func: Any, about: Known, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        if about.takes_packed:
            args = tuple(self._weights_in(one) for one in args)
        inputs = distinct(tensors_in((*args, *kwargs.values())))
        outputs = distinct(tensors_in(out))
        written = sum(tensor_bytes(tensor) for _, tensor in outputs)
        read = read_bytes(inputs, about.reads, written)
        placed = placed_bytes(about.name, inputs)
        if placed is not None:
            read[0], written = placed
        phase = self._phase_now()
        if phase == "forward":
            for (region, _), size in zip(inputs, read, strict=True):
                self.touched.look(region, size)
        flops = _flops(func, about, args, kwargs, out)
        if flops is None:
            self.uncounted[about.name] += 1
        computed = [tensor for _, tensor in inputs or outputs]
        if about.takes_packed:  # the weight's format is that of the product: the data is converted on the way
            computed.sort(key=lambda tensor: not tensor.is_quantized)
        form = number_format(computed, about.kind, self._tf32)
        assert about.kind is not None
        row: Row = (about.name, about.kind, form, phase, flops or 0, sum(read) + written)
        self.rows[row] += 1
        self._share(row)

    def _weights_in(self, argument: Any) -> Any:
        """What a quantized layer packed away, unpacked once, so that every call sees the same tensors."""
        if not isinstance(argument, torch.ScriptObject):
            return argument
        if argument not in self._packed:
            self._packed[argument] = packed(argument)
            self.touched.hold(self._packed[argument])
        return self._packed[argument]

    def _share(self, row: Row) -> None:
        _, kind, form, phase, flops, moved = row
        share = self.shares.setdefault(self.module_paths.here(), Share())
        share.bytes[phase] += moved
        if kind in PRODUCTS:
            share.flops[phase] += flops
            share.formats[form] += flops
        else:
            share.other_flops += flops


def _flops(func: Any, about: Known, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    if not about.counted:
        return None
    if about.formula is not None:
        arguments = _by_name(func, args, kwargs)
        if is_ragged(arguments):
            return None
        first = _first(out)
        # A product of complex numbers takes four real ones, and so do the additions.
        reals = 4 if about.kind in PRODUCTS and first is not None and first.is_complex() else 1
        return reals * int(about.formula(arguments, first))
    if not about.per_element:
        return 0
    sized = (*args, *kwargs.values()) if about.of_input else out
    return about.per_element * max((int(tensor.numel()) for tensor in tensors_in(sized)), default=0)


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _first(out: Any) -> Any:
    return next(tensors_in(out), None)


def is_composite(func: Any) -> bool:
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    has: Callable[..., bool] | None = getattr(func, "has_kernel_for_dispatch_key", None)
    return has is not None and has(key)
