"""This module collects facts about a watched process: its device, models, loaders, optimizers and flags, and how it uses them.

They are looked at seldom: after the first step and the tenth, then once per second.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sys
import time
import weakref
from collections import Counter
from typing import Any

import torch

from .models import weights_of
from .samples import planned_batches, tensors_in
from .spool import Spool

OURS = os.path.dirname(os.path.abspath(__file__))
MOST_LINES = 20
"""At most this many places in the script that make the host wait are told apart."""
MOST_LOOKS = 400
"""At most this many readings of the memory are kept, which is enough to tell steady growth in a run of any length."""
CALLS = 50
"""We call this many operators to find out how long calling one takes."""


class Facts:
    """It remembers what was seen so far. `describe` and `pulse` write it down."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._device = torch.device("cpu")
        self._made: list[weakref.ref[Any]] = []
        """These are the optimizers that were made. The index of one is its number."""
        self._numbers: dict[int, int] = {}
        """It maps the id of an optimizer to its number. An optimizer that is made at the address of one that is gone gets a new number."""
        self._since: tuple[int, int] | None = None
        """This is the step of the first pulse, and how many operators had been called by then."""
        self.optimizers: dict[int, dict[str, Any]] = {}
        """These are the optimizers that have taken a step, by their numbers."""
        self._loaders: dict[int, dict[str, Any]] = {}
        self._waits: dict[tuple[str, str], dict[str, Any]] = {}
        self._copies = {"asked": 0, "pageable": 0, "blocking": 0}
        self._autocast: str | None = None
        self._inputs: list[str] = []
        self._zero_grads: dict[str, float] = {"count": 0, "kept": 0, "seconds": 0.0}
        self.scales = False
        """It is true if GradScaler steps the optimizer and is enabled."""
        self._held: list[tuple[float, int]] = []
        """Each entry says when something was looked at, and how many bytes the GPU's allocator held then."""
        self.replays = 0
        """It counts how often graphs were replayed that the script recorded."""

    @property
    def is_on_gpu(self) -> bool:
        return self._device.type == "cuda"

    # The next methods record what happens in the script.

    def saw_loader(self, loader: Any) -> None:
        known = self._loaders.setdefault(id(loader), {"iterators": 0, "batches": planned_batches(loader)})
        known["iterators"] += 1
        known["num_workers"] = loader.num_workers

    def made_optimizer(self, optimizer: Any) -> None:
        self._numbers[id(optimizer)] = len(self._made)
        self._made.append(weakref.ref(optimizer))

    def number_of(self, optimizer: Any) -> float:
        """Returns the number of an optimizer that takes a step. Its first step also describes it."""
        if id(optimizer) not in self._numbers:
            self.made_optimizer(optimizer)
        number = self._numbers[id(optimizer)]
        if number not in self.optimizers:
            defaults = getattr(optimizer, "defaults", {})
            self.optimizers[number] = {
                "name": type(optimizer).__name__,
                "can_fuse": "fused" in defaults,
                "fused": bool(defaults.get("fused")),
                "tensors": sum(len(group["params"]) for group in optimizer.param_groups),
            }
        return float(number)

    def trained(self, *, has_stepped: bool) -> set[int]:
        """Returns the ids of the weights of every optimizer, or only of those optimizers that have taken a step."""
        alive = (made() for number, made in enumerate(self._made) if number in self.optimizers or not has_stepped)
        return {
            id(weight) for one in alive if one is not None for group in one.param_groups for weight in group["params"]
        }

    def saw_forward(self, args: Any, kwargs: Any) -> None:
        kind = "cuda" if torch.cuda.is_initialized() else "cpu"
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

    def saw_zero_grad(self, seconds: float, *, keeps: bool) -> None:
        """`keeps` is true if the call wrote zeros over the gradients instead of freeing them."""
        self._zero_grads["count"] += 1
        self._zero_grads["kept"] += keeps
        self._zero_grads["seconds"] += seconds if keeps else 0.0

    def saw_wait(self, how: str, seconds: float) -> None:
        where = user_line()
        if (how, where) in self._waits or len(self._waits) < MOST_LINES:
            new = {"how": how, "where": where, "count": 0, "seconds": 0.0}
            known = self._waits.setdefault((how, where), new)
            known["count"] += 1
            known["seconds"] += seconds

    # The next methods write the facts down.

    def describe(self, models: list[Any], *, is_called: bool, measures: bool) -> None:
        """Writes down the models, the device and the flags.

        `is_called` is true if the models were heard in the last step. If it is false they may run inside a compiled
        function. `measures` asks also for what calling an operator costs.
        """
        weight = next((one for root in models for one in weights_of(root)), None)
        if weight is not None:
            self._device = weight.device
        # If the script computes without modules of torch, its current GPU is the device.
        elif torch.cuda.is_initialized():
            self._device = torch.device("cuda", torch.cuda.current_device())
        rank, world_size = _rank()
        self._spool.fact(
            "process",
            rank=rank,
            world_size=world_size,
            python=platform.python_version(),
            versions={"torch": str(torch.__version__), "cuda": torch.version.cuda, "hip": torch.version.hip},
            threads=torch.get_num_threads(),
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            call_s=_call_s() if measures and not self.is_on_gpu else None,
            device=_device_facts(self._device),
            models=[_model_facts(root, is_called) for root in models],
            flags=_flags(),
        )

    def pulse(self, step: int) -> None:
        # autograd numbers the operators that a thread calls, so the number tells how many were called.
        ask = getattr(torch.autograd, "_get_sequence_nr", None)
        calls = int(ask()) if ask is not None else 0
        self._since = first, calls_before = self._since or (step, calls)
        self._held.append((time.time(), torch.cuda.memory_allocated(self._device) if self.is_on_gpu else 0))
        if len(self._held) > MOST_LOOKS:  # a long run keeps every second reading
            self._held = self._held[::2]
        self._spool.fact(
            "usage",
            reserved=torch.cuda.max_memory_reserved(self._device) if self.is_on_gpu else None,
            operators=(calls - calls_before) / (step - first) if step > first and calls else None,
            loaders=list(self._loaders.values()),
            optimizers=list(self.optimizers.values()),
            waits=list(self._waits.values()),
            copies=self._copies,
            replays=self.replays,
            zero_grads=self._zero_grads,
            scales=self.scales,
            held=self._held,
            autocast=self._autocast,
            inputs=self._inputs,
        )


def _call_s() -> float:
    """Returns the seconds that calling an operator on one number takes here, including its part of the backward pass."""
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
    """It sets marks on the current stream. A mark is used again when it has been read."""

    def __init__(self) -> None:
        self._spare: list[Any] = []

    def mark(self) -> Any:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def release(self, marks: list[Any]) -> None:
        self._spare += marks


def _rank() -> tuple[int, int]:
    """Returns the number of this rank and the count of ranks. The process group is asked, because it need not come from a
    launcher's variables."""
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


def _model_facts(root: Any, is_called: bool) -> dict[str, Any]:
    named = list(root.named_parameters())
    shapes = hashlib.sha256(repr([(name, tuple(one.shape)) for name, one in named]).encode()).hexdigest()[:16]
    kernels = [one for _, one in named if one.dim() == 4]
    last = [one for one in kernels if one.is_contiguous(memory_format=torch.channels_last) and not one.is_contiguous()]
    compiled = any(hasattr(one, "_orig_mod") or vars(one).get("_compiled_call_impl") for one in root.modules())
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    inner = getattr(root, "_orig_mod", getattr(root, "module", root))
    return {
        "class_name": type(inner).__name__,
        "parameters": sum(one.numel() for _, one in named),
        "dtypes": dict(Counter(str(one.dtype).removeprefix("torch.") for _, one in named)),
        "convolutions": len(kernels),
        "channels_last": len(last),
        "compiled": compiled or (not is_called and bool(counters.get("stats", {}).get("unique_graphs"))),
        "hash": shapes,
    }


def _flags() -> dict[str, Any]:
    flags: dict[str, Any] = {"matmul_precision": torch.get_float32_matmul_precision(), "cudnn_tf32": None}
    try:
        flags["cudnn_tf32"] = bool(torch.backends.cudnn.allow_tf32)
    # The script uses torch's newer names for the same flags, and the two must not be mixed.
    except RuntimeError:
        return flags
    return flags


def user_line() -> str:
    """Returns the innermost line that is neither torch's nor ours nor an installed package's."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((OURS, "<frozen")) and "site-packages" not in file and "/torch/" not in file:
            return f"{os.path.basename(file)}:{frame.f_lineno}"
        frame = frame.f_back
    return "an installed package"
