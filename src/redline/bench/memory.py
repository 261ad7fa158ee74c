"""Whose memory a step holds: every storage from when it is made until it is freed, with its kind and its module."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator

from redline.bench.count.count import shown_model
from redline.bench.count.counter import watching
from redline.bench.device import Device, open_device, resolve_device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.environment import describe
from redline.bench.recipe.compose import apply_recipe
from redline.bench.workload.build import build_workload, settle_batch
from redline.bench.workload.called import name_of, refuse_what_has_not_run
from redline.bench.workload.sources.live import HANDED_OVER, remember_module
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep, make_step
from redline.bench.workload.structure import WholeDispatchMode, stored, tensors_within
from redline.model.errors import BenchError
from redline.model.questions import MemoryAnswer
from redline.model.spec import RunSpec
from redline.model.units import format_bytes
from redline.model.work import MemoryCategory, MemoryHolder, MemoryPoint, MemoryUse

MOST_HOLDERS = 30
POINTS = 200
LOSS = "(loss)"
"""Stands for a module where the loss is computed, which is none of the model's."""
GPU_ROUNDING = 512
"""Bytes: torch's allocator for GPUs gives out multiples of it."""
_OURS = os.path.dirname(os.path.abspath(__file__))
_TORCH = os.path.dirname(os.path.abspath(torch.__file__))


def answer_memory(spec: RunSpec, snapshot: str | None = None) -> MemoryAnswer:
    """`snapshot`: where to write what was held when memory ran out, without a suffix."""
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    device = open_device(resolve_device(spec.device))
    device.limit_memory(spec.launch.memory_limit_bytes, isolated=True)
    handed = HANDED_OVER.get(spec.workload.artifact or "")
    give_back = remember_module(handed[0]) if handed else lambda: None
    try:
        workload = build_workload(spec.workload, spec.seed).to(device.torch_device)
        settle_batch(workload, spec.workload)
        setup = apply_recipe(spec.recipe, workload, device)
        if setup.capabilities.dissolves_modules or setup.capabilities.records_graph:
            raise BenchError(
                "unsupported", f"no memory by module under {spec.recipe}: its modules no longer run one by one"
            )
        setup.let_originals_go()
        step = make_step(setup, spec.workload.optimizer)
        try:
            use = memory_of(step, setup, device, snapshot)
        except RuntimeError:
            if not workload.differentiates(lambda: _once(step)):
                raise
            use = memory_of(step, setup, device, snapshot)
        return MemoryAnswer(use=use, workload=workload.info(), environment=describe(device))
    finally:
        give_back()


def _once(step: InferenceStep | TrainingStep) -> None:
    with step.context():
        step()


@dataclass(eq=False)
class Held:
    """One storage."""

    bytes: int
    category: MemoryCategory
    module: str
    phase: str
    line: str = ""


def memory_of(
    step: InferenceStep | TrainingStep, setup: Setup, device: Device, snapshot: str | None = None
) -> MemoryUse:
    if snapshot is not None:
        device.record_allocations()
    with step.context():
        with setup.watching_inputs():
            _run(step, setup, device, snapshot)  # the optimizer's state and the libraries' handles come with the first
        device.synchronize()
        device.release_cache()
        device.reset_peaks()
        ledger = _run(step, setup, device, snapshot)
        device.synchronize()
    memory = device.memory()
    return ledger.told(memory.peak_allocated_bytes, memory.peak_reserved_bytes)


def _run(step: InferenceStep | TrainingStep, setup: Setup, device: Device, snapshot: str | None) -> Ledger:
    """One step with all that it holds written down; where memory runs out, who asked and who held it is told."""
    ledger = Ledger(list(step.phases), GPU_ROUNDING if device.is_accelerator else 1, device.reserved_bytes)
    model = shown_model(setup.workload)
    for category, module, tensor in _resident(step, setup):
        ledger.hold(tensor, category, module)
    for path, size in _packed(model):
        ledger.keep(size, "weights", path)
    try:
        with ledger, watching(model, ledger.enter, ledger.leave):
            output = step(lambda: ledger.mark(model))
            refuse_what_has_not_run(output, name_of(setup.workload.model))
            ledger.name_state(_optimizer_state(step, model))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        written = _write_snapshot(ledger, device, snapshot) if snapshot is not None else ""
        raise BenchError("oom", f"{ledger.culprit()}{written}; {one_line(error)}") from error
    return ledger


def _write_snapshot(ledger: Ledger, device: Device, snapshot: str) -> str:
    """What was held, and on a GPU the allocator's own snapshot, which https://pytorch.org/memory_viz draws."""
    use = ledger.told(None, None)
    try:
        Path(snapshot).parent.mkdir(parents=True, exist_ok=True)
        told = {"culprit": ledger.culprit(), **msgspec.to_builtins(use)}
        Path(f"{snapshot}.json").write_bytes(msgspec.json.format(msgspec.json.encode(told), indent=2))
        drawn = device.write_allocations(f"{snapshot}.pickle")
    except OSError as error:
        return f" (the snapshot cannot be written: {error.strerror})"
    return f" (snapshot: {snapshot}.json{' and .pickle' if drawn else ''})"


def _resident(step: InferenceStep | TrainingStep, setup: Setup) -> Iterator[tuple[MemoryCategory, str, Tensor]]:
    model = shown_model(setup.workload)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield "weights", name.rpartition(".")[0], tensor
    for path, module in model.named_modules():
        for tensor in vars(module).values():  # masks and tables that are neither
            if isinstance(tensor, Tensor):
                yield "weights", path, tensor
    yield from _optimizer_state(step, model)
    for tensor in _tensors((setup.args, setup.kwargs)):
        yield "inputs", "", tensor


def _optimizer_state(
    step: InferenceStep | TrainingStep, model: nn.Module
) -> Iterator[tuple[MemoryCategory, str, Tensor]]:
    if isinstance(step, TrainingStep):
        owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        for parameter, state in step.optimizer_state():
            for tensor in _tensors(state):
                yield "optimizer state", owners.get(id(parameter), ""), tensor


def _packed(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Bytes of the weights that torch keeps in objects of its own, as `quantize_dynamic` does, by module."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        objects = [one for one in vars(module).values() if isinstance(one, torch.ScriptObject) and id(one) not in seen]
        seen.update(map(id, objects))
        if size := sum(map(_state_bytes, objects)):
            yield path, size


def _state_bytes(one: Any) -> int:
    """Of what it would write into a checkpoint, which is as large as what it holds."""
    if isinstance(one, Tensor):
        return sum(part.untyped_storage().nbytes() for part in stored(one))
    if isinstance(one, torch.ScriptObject):
        packed: Any = one  # what it has is not in torch's types
        return _state_bytes(packed.__getstate__()) if packed._has_method("__getstate__") else 0
    return sum(map(_state_bytes, one)) if isinstance(one, tuple | list) else 0


def _tensors(structure: Any) -> Iterable[Tensor]:
    return (tensor for _, tensor in tensors_within(structure))


class Ledger(WholeDispatchMode):
    """Writes down when storages come and go while a step runs."""

    def __init__(self, phases: list[str], rounding: int, reserved: Callable[[], int | None]) -> None:
        super().__init__()
        self._reserved = reserved
        self._phases = phases
        self._phase = phases[0]
        self._passed = 0
        self._rounding = rounding
        self._stack: list[str] = []
        self._has_left = False
        self._live: dict[int, Held] = {}
        self._events: list[tuple[Held, int, str]] = []
        self._reserved_at: dict[int, int] = {}
        """By number of the event, what the allocator held after it: memory that is freed stays reserved."""
        self._is_over = False
        self._broke_at: tuple[str, str, str, str] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            return self.opened(func, args, kwargs)
        try:
            result = func(*args, **(kwargs or {}))
        except Exception:
            if not self._broke_at:
                self._broke_at = (
                    self._asking(),
                    self._phase,
                    str(func).rpartition(".")[0].removeprefix("aten."),
                    _line(),
                )
            raise
        for tensor in _tensors(result):
            self.hold(tensor, "temporaries", self._asking())
        return result

    def _asking(self) -> str:
        """The module that runs; between the model and the backward pass it is the loss."""
        if self._stack:
            return self._stack[-1]
        return LOSS if self._has_left and self._phase == "forward" and len(self._phases) > 1 else ""

    def keep(self, size: int, category: MemoryCategory, module: str) -> None:
        """So many bytes are held from the beginning to the end."""
        self._events.append((Held(size, category, module, self._phase, ""), 1, self._phase))

    def hold(self, tensor: Tensor, category: MemoryCategory, module: str) -> None:
        for part in stored(tensor):
            self._hold(part, category, module)

    def _hold(self, tensor: Tensor, category: MemoryCategory, module: str) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or not storage.nbytes() or tensor.device.type == "meta":
            return
        size = -(-storage.nbytes() // self._rounding) * self._rounding
        held = Held(size, category, module, self._phase, _line() if category == "temporaries" else "")
        self._live[key] = held
        self._events.append((held, 1, self._phase))
        reserved = self._reserved()
        if reserved is not None:
            self._reserved_at[len(self._events) - 1] = reserved
        weakref.finalize(storage, self._gone, key, held).atexit = False

    def _gone(self, key: int, held: Held) -> None:
        if self._live.get(key) is held:
            del self._live[key]
        if not self._is_over:
            self._events.append((held, -1, self._phase))

    def enter(self, path: str) -> None:
        self._stack.append(path)

    def leave(self, path: str) -> None:
        while self._stack and self._stack.pop() != path:
            continue
        self._has_left = not self._stack

    def mark(self, model: nn.Module) -> None:
        """A phase has ended: what it leaves behind shows what it was made for."""
        if self._phase == "forward":
            for held in self._live.values():
                if held.category == "temporaries":
                    held.category = "activations"
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                self._name(parameter.grad, "gradients", name.rpartition(".")[0])
        self._passed += 1
        self._phase = self._phases[min(self._passed, len(self._phases) - 1)]

    def name_state(self, state: Iterable[tuple[MemoryCategory, str, Tensor]]) -> None:
        """The step is over: some optimizers replace what they keep of a sparse gradient instead of writing into it."""
        for category, module, tensor in state:
            self._name(tensor, category, module)

    def _name(self, tensor: Tensor, category: MemoryCategory, module: str) -> None:
        for part in stored(tensor):  # a sparse tensor has no storage of its own
            kept = self._live.get(part.untyped_storage()._cdata)
            if kept is not None:
                kept.category, kept.module = category, module

    def told(self, allocated: int | None, reserved: int | None) -> MemoryUse:
        self._is_over = True
        now, peak, at_peak, phase = 0, 0, 0, self._phases[0]
        course: list[tuple[int, str]] = []
        for number, (held, sign, when) in enumerate(self._events):
            now += sign * held.bytes
            course.append((now, when))
            if now > peak:
                peak, at_peak, phase = now, number, when
        holders = self._held_at(at_peak)
        categories: Counter[MemoryCategory] = Counter()
        for held in holders:
            categories[self._category(held)] += held.bytes
        whole = peak if allocated is None else max(allocated, peak)
        if whole > peak:
            categories["workspace"] = whole - peak
        return MemoryUse(
            peak_bytes=whole,
            peak_phase=phase,
            categories=dict(categories),
            holders=tuple(self._by_module(holders)),
            timeline=tuple(self._timeline(course)),
            reserved_bytes=reserved,
            fragments_bytes=reserved - allocated if reserved is not None and allocated is not None else None,
        )

    def culprit(self) -> str:
        """Who asked for more than there was, and who held most of what was given out."""
        use = self.told(None, None)
        module, phase, operator, line = self._broke_at or ("", self._phase, "an operator", "")
        where = f"{module or 'no module'}{f' ({line})' if line else ''}"
        kinds = sorted(use.categories.items(), key=lambda kind: -kind[1])
        held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in kinds[:4])
        most = use.holders[0] if use.holders else None
        by = f"; most by {most.module or 'no module'}, {format_bytes(most.bytes)} of {most.category}" if most else ""
        return f"out of memory in {where}, {phase} pass, {operator}; {format_bytes(use.peak_bytes)} held: {held}{by}"

    def _timeline(self, course: list[tuple[int, str]]) -> Iterator[MemoryPoint]:
        """The highest moment of each piece, by kind."""
        size = max(1, -(-len(course) // POINTS))
        pieces = [range(first, min(first + size, len(course))) for first in range(0, len(course), size)]
        highest = {max(piece, key=lambda number: course[number][0]): piece.start for piece in pieces}
        held_now: Counter[MemoryCategory] = Counter()
        reserved: int | None = None
        for number, (held, sign, _) in enumerate(self._events):
            held_now[self._category(held)] += sign * held.bytes
            reserved = self._reserved_at.get(number, reserved)
            if number in highest:
                most, phase = course[number]
                at = highest[number] / len(course)
                yield MemoryPoint(at=at, bytes=most, phase=phase, categories=dict(+held_now), reserved_bytes=reserved)

    def _category(self, held: Held) -> MemoryCategory:
        is_inference = len(self._phases) == 1
        return "activations" if is_inference and held.category == "temporaries" else held.category

    def _held_at(self, last: int) -> list[Held]:
        there: dict[int, Held] = {}
        for held, sign, _ in self._events[: last + 1]:
            if sign > 0:
                there[id(held)] = held
            else:
                there.pop(id(held), None)
        return list(there.values())

    def _by_module(self, holders: Iterable[Held]) -> list[MemoryHolder]:
        by_module: dict[str, list[Held]] = {}
        for held in holders:
            by_module.setdefault(held.module, []).append(held)
        found = []
        for module, parts in by_module.items():
            kinds: Counter[MemoryCategory] = Counter()
            lines: Counter[str] = Counter()
            for held in parts:
                kinds[self._category(held)] += held.bytes
                lines[held.line] += held.bytes if held.line else 0
            line = lines.most_common(1)[0][0] if lines else ""
            found.append(
                MemoryHolder(module=module, bytes=kinds.total(), category=kinds.most_common(1)[0][0], line=line)
            )
        return sorted(found, key=lambda holder: (-holder.bytes, holder.module))[:MOST_HOLDERS]


def _line() -> str:
    """The innermost line outside torch and the bench."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS, "<")):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
