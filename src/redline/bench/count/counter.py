"""This counts operators as they run: their FLOPs and bytes, the number format of each, and the module it belongs to."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from redline.bench.count.operators import (
    Known,
    Moved,
    Touched,
    distinct,
    is_composite,
    known,
    moved_bytes,
    tensor_bytes,
    tensors_in,
)
from redline.bench.device.base import Device
from redline.bench.workload.structure import WholeDispatchMode, packed
from redline.model.work import PRODUCTS, OperatorKind, WorkPhase

FORMATS = {
    torch.float64: "fp64", torch.complex128: "fp64", torch.float32: "fp32", torch.complex64: "fp32", torch.float16: "fp16",
    torch.bfloat16: "bf16", **dict.fromkeys((torch.int8, torch.uint8, torch.qint8, torch.quint8), "int8"),
    **dict.fromkeys((
        torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    ), "fp8"),
}  # fmt: skip
"""Tables name number formats like this. A complex number counts in the format of its parts."""

Kinds = frozenset[OperatorKind]


def tf32_kinds(device: Device) -> Kinds:
    """Returns the kinds of fp32 products that the flags of torch allow to use TF32, the shorter format, at this moment."""
    if not device.is_accelerator:
        return Kinds()
    convolutions: Kinds = frozenset({"convolution"}) if torch.backends.cudnn.allow_tf32 else Kinds()
    return convolutions | (PRODUCTS - {"convolution"} if torch.backends.cuda.matmul.allow_tf32 else Kinds())


class Row(NamedTuple):
    """A row is one call of an operator in the module at work. Calls that are alike in all of this are counted together."""

    path: str
    name: str
    kind: OperatorKind
    number_format: str
    phase: WorkPhase
    flops: int
    bytes: int


@contextmanager
def watching(model: nn.Module, enter: Callable[[str], None], leave: Callable[[str], None]) -> Iterator[None]:
    """Within the context `enter` and `leave` are called with the path of each module that the forward pass enters and leaves.

    The hooks are global, so the modules stay untouched. A module with several names goes by its first. One that is not part of the
    model belongs to the module that called it.
    """
    paths = {id(module): path for path, module in model.named_modules()}

    def tell(whom: Callable[[str], None]) -> Callable[..., None]:
        return lambda module, *_: whom(paths[id(module)]) if id(module) in paths else None

    handles = [
        register_module_forward_pre_hook(tell(enter)),
        register_module_forward_hook(tell(leave), always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class ModulePaths:
    """This knows which module is at work. A backward operator belongs to the module whose forward made its node.

    Autograd numbers its nodes as they are made. The numbers at which each module was entered and left tell the module
    of any node, without a hook on any tensor.
    """

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.calls: Counter[str] = Counter()
        self._numbers: list[int] = []
        self._paths: list[str] = []

    def enter(self, path: str) -> None:
        self.stack.append(path)
        self.calls[path] += 1
        self._note_number()

    def leave(self, path: str) -> None:
        while self.stack and self.stack.pop() != path:
            pass  # this module raised, and its caller went on without it
        self._note_number()

    def here(self) -> str:
        """Returns the path of the module at work, or "" for the model as a whole."""
        node = torch._C._current_autograd_node()
        # A step of the user's own calls backward from inside. The whole model is then at work, and the node says more.
        if self.stack and (node is None or self.stack != [""]):
            return self.stack[-1]
        position = bisect_right(self._numbers, node._sequence_nr()) if node is not None else 0
        return self._paths[position - 1] if position else ""

    def _note_number(self) -> None:
        number = torch._C._autograd._get_sequence_nr()
        if self._numbers[-1:] == [number]:  # no node was made in between: the last module counts
            del self._numbers[-1], self._paths[-1]
        self._numbers.append(number)
        self._paths.append(self.stack[-1] if self.stack else "")


class WorkCounter(WholeDispatchMode):
    """This counts each call by everything that a table of operators or of modules needs to know about it."""

    def __init__(self, leaves: Iterable[Tensor], tf32: Kinds, moved: Moved = moved_bytes) -> None:
        super().__init__()
        self._moved = moved
        self.phase: WorkPhase = "forward"
        self.rows: Counter[Row] = Counter()
        self.uncounted: Counter[str] = Counter()
        self.module_paths = ModulePaths()
        self.touched = Touched(leaves)
        self.has_opened = False
        """True if an operator that calls functions, such as `torch.cond`, was seen."""
        self._tf32 = tf32
        self._finds_phases = False
        self._packed: dict[torch.ScriptObject, list[Tensor]] = {}

    @contextmanager
    def finding_phases(self) -> Iterator[None]:
        """Within the context the phase follows what autograd and the optimizers are doing."""

        def enter(phase: WorkPhase) -> Callable[..., None]:
            return lambda *_: setattr(self, "phase", phase)

        self._finds_phases = True
        before, after = enter("optimizer"), enter("forward")
        hooks = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def opened(self, func: HigherOrderOperator, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        self.has_opened = True
        seen = self.rows.total()
        out = super().opened(func, args, kwargs)
        if self.rows.total() == seen:  # it called nothing that is seen, so it is a kernel of the user's own
            self.uncounted[func.name()] += 1
        return out

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        about = known(func)
        if about.kind is None:
            return func(*args, **kwargs)
        if is_composite(func, about):
            # Under inference mode operators that are made of others arrive whole, so they are taken apart here.
            with self:
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        self._note(func, about, tuple(map(self._unpacked, args)) if about.takes_packed else args, kwargs, out)
        return out

    def _note(self, func: Any, about: Known, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        assert about.kind is not None
        inputs, outputs = distinct(tensors_in((*args, *kwargs.values()))), distinct(tensors_in(out))
        read, written = self._moved(about, list(inputs.values()), sum(map(tensor_bytes, outputs.values())))
        is_backward = self._finds_phases and torch._C._current_graph_task_id() >= 0
        phase: WorkPhase = "backward" if is_backward else self.phase
        if phase == "forward":
            for region, size in zip(inputs, read, strict=True):
                self.touched.look(region, size)
        flops = flops_of(func, about, args, kwargs, out)
        if flops is None:
            self.uncounted[about.name] += 1
        computed = list((inputs or outputs).values())
        if about.takes_packed:  # the product has the weight's format, and the data is converted on the way
            computed.sort(key=lambda tensor: not tensor.is_quantized)
        form, path = self._format_of(computed, about.kind), self.module_paths.here()
        self.rows[Row(path, about.name, about.kind, form, phase, flops or 0, sum(read) + written)] += 1

    def _format_of(self, tensors: Iterable[Tensor], kind: OperatorKind) -> str:
        """Returns the number format of the first tensor that holds numbers to compute with, or "int" if there is none."""
        found = next((FORMATS[tensor.dtype] for tensor in tensors if tensor.dtype in FORMATS), "int")
        return "tf32" if found == "fp32" and kind in self._tf32 else found

    def _unpacked(self, argument: Any) -> Any:
        """Returns the weights that a quantized layer packed away. They are unpacked once, so that every call sees the same tensors."""
        if not isinstance(argument, torch.ScriptObject):
            return argument
        if argument not in self._packed:
            self._packed[argument] = packed(argument)
            self.touched.hold(self._packed[argument])
        return self._packed[argument]


def flops_of(func: Any, about: Known, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int | None:
    """Returns the FLOPs of one call, or None if they are not known."""
    if about.formula is None:
        return None
    names = [argument.name for argument in func._schema.arguments]
    arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    if any(arguments.get(name) is not None for name in ("cum_seq_q", "cu_seqlens_q")):
        return None  # one flat tensor holds sequences of different lengths, and only its data tells these lengths
    node: Any = torch._C._current_autograd_node()
    # Data needs no gradient. In that case nothing stands behind the first input of a backward node.
    arguments["wants_input"] = node is None or not node.next_functions or node.next_functions[0][0] is not None
    # A product of complex numbers takes four real ones, and so do the additions.
    is_complex = about.kind in PRODUCTS and any(tensor.is_complex() for tensor in tensors_in(out))
    return (4 if is_complex else 1) * int(about.formula(arguments, out))
