"""Facts about a watched process: its device, model, loaders, optimizer and flags, and how it uses them.

They are looked at seldom: after the first step and the tenth, then once per second.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import platform
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from .samples import planned_batches, tensors_in
from .spool import Spool

OURS = os.path.dirname(os.path.abspath(__file__))
MOST_LINES = 20
"""So many places in the script that make the host wait are told apart."""
LOSS_PERIOD_S = 0.25
"""Between two looks at the loss."""
CALLS = 50
"""Operators that are called to find out what calling one takes."""


class Facts:
    """Remembers what was seen so far; `describe` and `pulse` write it down."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._device = torch.device("cpu")
        self._loaders: dict[int, dict[str, Any]] = {}
        self._made: list[weakref.ref[Any]] = []
        """The optimizers, by their numbers."""
        self._numbers: dict[int, int] = {}
        """The numbers of optimizers by their ids. One that is made at the place of another that is gone gets a new number."""
        self._optimizers: dict[int, dict[str, Any]] = {}
        """Those that have taken a step, by their numbers."""
        self._waits: dict[str, dict[str, Any]] = {}
        self._optimizer_wait_s = 0.0
        self._copies: dict[str, int] = {"asked": 0, "pageable": 0, "blocking": 0}
        self._zero_grads: dict[str, float] = {"count": 0, "kept": 0, "seconds": 0.0}
        self.replays = 0
        """How often graphs were replayed that hold a model's passes."""
        self._autocast: str | None = None
        self._scaler: dict[str, Any] | None = None
        self._inputs: list[str] = []
        self._loss = math.nan
        """The last one that was read."""
        self._next_loss = -math.inf
        self._coming: tuple[torch.Tensor, Any] | None = None
        self._unscaled: tuple[int, torch.Tensor] | None = None

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    @property
    def has_optimizers(self) -> bool:
        return bool(self._optimizers)

    # What happens in the script

    def saw_loader(self, loader: Any) -> None:
        if id(loader) not in self._loaders:
            self._loaders[id(loader)] = {"iterators": 0, "batches": planned_batches(loader)}
        known = self._loaders[id(loader)]
        known["iterators"] += 1
        for name in ("num_workers", "pin_memory", "persistent_workers", "prefetch_factor", "batch_size"):
            known[name] = getattr(loader, name, None)

    def made_optimizer(self, optimizer: Any) -> None:
        self._numbers[id(optimizer)] = len(self._made)
        self._made.append(weakref.ref(optimizer))

    def number_of(self, optimizer: Any) -> float:
        """The number of an optimizer that takes a step; with the first one it is described."""
        if id(optimizer) not in self._numbers:
            self.made_optimizer(optimizer)
        number = self._numbers[id(optimizer)]
        if number not in self._optimizers:
            defaults = getattr(optimizer, "defaults", {})
            self._optimizers[number] = {
                "name": type(optimizer).__name__,
                "can_fuse": "fused" in defaults,
                "fused": bool(defaults.get("fused")),
                "tensors": sum(len(group["params"]) for group in optimizer.param_groups),
            }
        return float(number)

    def _stepped(self) -> list[Any]:
        return [one for number in self._optimizers if (one := self._made[number]()) is not None]

    def trained(self) -> set[int]:
        """The ids of the parameters of every optimizer that has taken a step."""
        return {id(weight) for one in self._stepped() for group in one.param_groups for weight in group["params"]}

    def saw_forward(self, args: Any, kwargs: Any, step: int) -> None:
        """Notes autocast and inputs, in some of the steps."""
        kind = self._device.type if step else "cuda" if torch.cuda.is_initialized() else "cpu"
        self._autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self._inputs = [
            f"{'×'.join(map(str, one.shape))} {str(one.dtype).removeprefix('torch.')}"
            for one in tensors_in((args, kwargs))
        ][:4]

    def saw_copy(self, tensor: torch.Tensor, moved: Any, args: Any, kwargs: Any) -> None:
        if isinstance(moved, torch.Tensor) and moved.is_cuda:
            self._copies["asked"] += 1
            self._copies["pageable"] += not tensor.is_pinned()
            asks_not_to_wait = kwargs.get("non_blocking") or any(one is True for one in args)
            self._copies["blocking"] += not asks_not_to_wait

    def saw_zero_grad(self, filling_s: float | None) -> None:
        """`filling_s` says how long a call took that wrote zeros over the gradients; None for one that freed them."""
        self._zero_grads["count"] += 1
        self._zero_grads["kept"] += filling_s is not None
        self._zero_grads["seconds"] += filling_s or 0.0

    def saw_scaler(self, scaler: Any, outputs: Any, scaled: Any) -> None:
        self._scaler = {"enabled": bool(scaler.is_enabled())}
        if isinstance(outputs, torch.Tensor) and isinstance(scaled, torch.Tensor):
            self._unscaled = (id(scaled), outputs)

    def saw_wait(self, how: str, seconds: float, in_optimizer: bool) -> None:
        if in_optimizer:
            self._optimizer_wait_s += seconds
            return
        what = f"{how} {user_line()}"
        if what in self._waits or len(self._waits) < MOST_LINES:
            known = self._waits.setdefault(what, {"what": what, "count": 0, "seconds": 0.0})
            known["count"] += 1
            known["seconds"] += seconds

    def saw_out_of_memory(self, phase: str, error: BaseException, step: int, roots: list[torch.nn.Module]) -> None:
        """Writes down where memory ran out and who held it, and on a GPU keeps the allocator's snapshot."""
        parameters = [parameter for root in roots for parameter in root.parameters()]
        states = [state for one in self._stepped() for state in one.state.values() if isinstance(state, dict)]
        held = {
            "weights": _bytes(parameters),
            "gradients": _bytes(parameter.grad for parameter in parameters if parameter.grad is not None),
            "optimizer state": _bytes(
                tensor for state in states for tensor in state.values() if isinstance(tensor, torch.Tensor)
            ),
        }
        snapshot = None
        if torch.cuda.is_initialized():
            held["activations and the rest"] = max(torch.cuda.memory_allocated() - sum(held.values()), 0)
            snapshot = self._spool.path("-oom.pickle")
            torch.cuda.memory._dump_snapshot(snapshot)
        where = line_of_error(error)
        message = str(error).partition("\n")[0][:300]
        self._spool.fact("oom", phase=phase, step=step, held=held, where=where, error=message, snapshot=snapshot)

    def saw_loss(self, losses: Any) -> None:
        """Reads a loss once in a while, without waiting: one on a GPU is copied, and read when the copy has arrived."""
        unscaled, self._unscaled = self._unscaled, None
        now = time.perf_counter()
        if now < self._next_loss:
            return
        loss = losses[0] if isinstance(losses, (tuple, list)) and losses else losses
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        if unscaled is not None and unscaled[0] == id(loss):
            loss = unscaled[1]
        self._next_loss = now + LOSS_PERIOD_S
        if not loss.is_cuda:
            with contextlib.suppress(RuntimeError, NotImplementedError):  # on the meta device, or inside torch.func
                self._loss = float(loss.item())
        elif torch.cuda.is_current_stream_capturing():  # asking for anything would spoil the script's graph
            return
        elif self._coming is None:
            copied = torch.empty((), dtype=loss.dtype, pin_memory=True)
            copied.copy_(loss.detach().reshape(()), non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._coming = (copied, event)
        elif self._coming[1].query():
            self._loss, self._coming = float(self._coming[0]), None

    # What is written down

    def describe(self, roots: list[torch.nn.Module], *, is_called: bool, measures: bool) -> None:
        """`is_called`: the models were heard in the last step; else they may run inside a compiled function.

        `measures`: also what calling an operator costs.
        """
        parameters = [parameter for root in roots for parameter in root.parameters()]
        if parameters:
            self._device = parameters[0].device
        elif torch.cuda.is_initialized():  # no module of torch's owns what is computed with
            self._device = torch.device("cuda", torch.cuda.current_device())
        rank, world_size = _rank()
        self._spool.fact(
            "process",
            pid=os.getpid(),
            rank=rank,
            world_size=world_size,
            argv=list(getattr(sys, "orig_argv", sys.argv)),
            python=platform.python_version(),
            versions={"torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip},
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            call_s=_call_s() if self._device.type == "cpu" and measures else None,
            device=_device_facts(self._device),
        )
        self._spool.fact("models", models=[_model_facts(root, is_called) for root in roots], flags=_flags())

    def device_clock(self) -> CudaClock | None:
        return CudaClock() if self.is_on_gpu else None

    def pulse(self, step: int) -> None:
        memory = {}
        if self.is_on_gpu:
            memory = {
                "allocated": torch.cuda.memory_allocated(self._device),
                "peak_allocated": torch.cuda.max_memory_allocated(self._device),
                "reserved": torch.cuda.max_memory_reserved(self._device),
            }
        self._spool.fact("pulse", step=step, memory=memory, operators=_operators_so_far(), loss=self._loss)
        self._spool.fact(
            "usage",
            step=step,
            loaders=list(self._loaders.values()),
            optimizers=list(self._optimizers.values()),
            waits=list(self._waits.values()),
            optimizer_wait_s=self._optimizer_wait_s,
            copies=self._copies,
            zero_grads=self._zero_grads,
            replays=self.replays,
            autocast=self._autocast,
            scaler=self._scaler,
            inputs=self._inputs,
        )


def _operators_so_far() -> int | None:
    """How many differentiable operators this thread has called: autograd numbers them."""
    ask = getattr(torch.autograd, "_get_sequence_nr", None)
    return None if ask is None else int(ask())


def _call_s() -> float:
    """Returns the seconds that calling an operator on one number takes here, with its part of the backward pass."""
    weight = torch.ones(1, requires_grad=True)
    taken = []
    with torch.enable_grad():
        for _ in range(3):
            began, value = time.perf_counter(), weight
            for _ in range(CALLS):
                value = value * weight
            torch.autograd.Variable._execution_engine.run_backward(
                (value,), (torch.ones(1),), False, False, (weight,), allow_unreachable=True, accumulate_grad=False
            )
            taken.append((time.perf_counter() - began) / CALLS)
    return min(taken)


class CudaClock:
    """Sets marks on the current stream. A mark is used again when it has been read."""

    def __init__(self) -> None:
        self._spare: list[Any] = []
        self.is_capturing = torch.cuda.is_current_stream_capturing

    def mark(self) -> Any:
        if self.is_capturing():  # a mark would become part of the script's graph
            return None
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def release(self, marks: list[Any]) -> None:
        self._spare += marks


def _rank() -> tuple[int, int]:
    """Number and count of the ranks: of the process group, which need not come from a launcher's variables."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def _device_facts(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"kind": device.type}
    properties = torch.cuda.get_device_properties(device)
    return {
        "kind": "rocm" if torch.version.hip else "cuda",
        "index": device.index,
        "name": properties.name,
        "uuid": str(getattr(properties, "uuid", "")) or None,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
    }


def _model_facts(root: torch.nn.Module, is_called: bool) -> dict[str, Any]:
    named = list(root.named_parameters())
    shapes = hashlib.sha256(repr([(name, tuple(one.shape)) for name, one in named]).encode()).hexdigest()[:16]
    kernels = [one for _, one in named if one.dim() == 4]
    last = [one for one in kernels if one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous()]
    compiled = any(
        hasattr(one, "_orig_mod") or getattr(one, "_compiled_call_impl", None) is not None for one in root.modules()
    )
    compiled = compiled or (not is_called and _compiled_graphs() > 0)
    inner = getattr(root, "_orig_mod", getattr(root, "module", root))
    return {
        "class_name": type(inner).__name__,
        "parameters": sum(one.numel() for _, one in named),
        "dtypes": dict(Counter(str(one.dtype).removeprefix("torch.") for _, one in named)),
        "convolutions": len(kernels),
        "channels_last": len(last),
        "compiled": compiled,
        "hash": shapes,
    }


def _compiled_graphs() -> int:
    """How many torch.compile has made so far in this process."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters["stats"]["unique_graphs"]) if "stats" in counters else 0


def _flags() -> dict[str, Any]:
    flags: dict[str, Any] = {"matmul_precision": torch.get_float32_matmul_precision()}
    try:
        flags["cudnn_tf32"] = bool(torch.backends.cudnn.allow_tf32)
        flags["cudnn_benchmark"] = bool(torch.backends.cudnn.benchmark)
    except RuntimeError:  # the script uses torch's newer names for the same flags, and the two must not be mixed
        flags["cudnn_tf32"] = None
    return flags


def user_line() -> str:
    """Returns the innermost line that is neither torch's nor ours nor an installed package's."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_scripts(frame.f_code.co_filename):
            return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return "an installed package"


def line_of_error(error: BaseException) -> str:
    """Returns the innermost line of the script on the way to the error."""
    line, trace = "an installed package", error.__traceback__
    while trace is not None:
        if _is_scripts(trace.tb_frame.f_code.co_filename):
            line = f"{os.path.basename(trace.tb_frame.f_code.co_filename)}:{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _is_scripts(file: str) -> bool:
    """True if a file is neither torch's nor ours nor an installed package's."""
    return not file.startswith((OURS, "<frozen")) and "site-packages" not in file and "/torch/" not in file


def is_out_of_memory(error: BaseException) -> bool:
    message = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in message


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Returns the size of all these tensors, counting each once."""
    known = {id(tensor): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(known.values())
