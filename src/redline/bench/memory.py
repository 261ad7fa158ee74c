"""This finds out whose memory a step holds: every storage from when it is made until it is freed, with its kind and its module."""

from __future__ import annotations

import os
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from redline.bench.count.count import shown_model
from redline.bench.count.counter import ModulePaths, watching
from redline.bench.device import Device, open_device
from redline.bench.device.failure import is_out_of_memory, one_line
from redline.bench.environment import describe
from redline.bench.recipe.compose import set_up
from redline.bench.workload.called import name_of, refuse_what_has_not_run
from redline.bench.workload.sources.user import HANDED_OVER, remember_module
from redline.bench.workload.step import InferenceStep, Setup, TrainingStep, make_step
from redline.bench.workload.structure import WholeDispatchMode, packed, stored, tensors_within
from redline.model.errors import BenchError
from redline.model.protocol import MemoryAnswer
from redline.model.spec import RunSpec
from redline.model.units import format_bytes
from redline.model.work import MemoryCategory, MemoryHolder, MemoryPoint, MemoryUse

MOST_HOLDERS = 30
"""At most this many modules are listed, those that hold most."""
POINTS = 200
"""The timeline of a step has at most this many points, which are enough for a chart."""
LOSS = "(loss)"
"""This stands in place of a module while the loss is computed, because the loss is none of the model's modules."""
GPU_ROUNDING = 512
"""Torch's allocator for GPUs gives out multiples of this many bytes."""
NOT_THE_USERS = (os.path.dirname(torch.__file__), os.path.dirname(os.path.abspath(__file__)), "<")
"""Frames of files whose names begin like this are torch's, the bench's or generated ones, and no line of the user's."""

Step = InferenceStep | TrainingStep
Holding = tuple[MemoryCategory, str, Tensor]
"""A holding says what a tensor is for, the module that it belongs to, and the tensor itself."""


def answer_memory(spec: RunSpec) -> MemoryAnswer:
    """Returns whose memory one step of a workload holds. If the forward needs gradients, it is watched with them."""
    device = open_device(spec.device, spec.threads)
    device.limit_memory(spec.launch.memory_limit_bytes, isolated=True)
    handed = HANDED_OVER.get(spec.workload.artifact or "")
    give_back = remember_module(handed[0]) if handed else lambda: None
    try:
        setup = set_up(spec, device)
        if setup.capabilities.dissolves_modules or setup.capabilities.records_graph:
            why = f"no memory by module under {spec.recipe}: its modules no longer run one by one"
            raise BenchError("unsupported", why)
        setup.let_originals_go()
        step = make_step(setup, spec.workload.optimizer)

        def once() -> None:
            with step.context():
                step()

        try:
            use = _memory_of(step, setup, device)
        except RuntimeError:
            if not setup.workload.differentiates(once):
                raise
            use = _memory_of(step, setup, device)
        return MemoryAnswer(use=use, workload=setup.workload.info(), environment=describe(device))
    finally:
        give_back()


def _memory_of(step: Step, setup: Setup, device: Device) -> MemoryUse:
    """Returns the memory of the second step, which is like every later one."""
    with step.context():
        with setup.watching_inputs():
            _run(step, setup, device)  # the optimizer's state and the libraries' handles come with the first
        device.synchronize()
        device.release_cache()
        device.reset_peaks()
        ledger = _run(step, setup, device)
        device.synchronize()
    memory = device.memory()
    return ledger.use(memory.peak_allocated_bytes, memory.peak_reserved_bytes)


def _run(step: Step, setup: Setup, device: Device) -> Ledger:
    """Runs one step and returns a ledger of everything that it held. If memory runs out, the error tells who asked and who held it."""
    ledger = Ledger(list(step.phases), GPU_ROUNDING if device.is_accelerator else 1, device.reserved_bytes)
    model = shown_model(setup.workload)
    for category, module, tensor in _resident(step, setup, model):
        ledger.hold(tensor, category, module)
    for path, size in _packed(model):
        ledger.keep(size, "weights", path)
    try:
        with ledger, watching(model, ledger.paths.enter, ledger.paths.leave):
            output = step(lambda: ledger.mark(model))
            refuse_what_has_not_run(output, name_of(setup.workload.model))
            # Some optimizers replace what they keep of a sparse gradient instead of writing into it.
            ledger.rename(_optimizer_state(step, model))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise BenchError("oom", f"{ledger.culprit()}; {one_line(error)}") from error
    return ledger


def _resident(step: Step, setup: Setup, model: nn.Module) -> Iterator[Holding]:
    """Yields what is held before the step begins: weights, the optimizer's state and inputs."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        yield "weights", name.rpartition(".")[0], tensor
    for path, module in model.named_modules():
        for value in vars(module).values():  # masks and tables are neither
            if isinstance(value, Tensor):
                yield "weights", path, value
    yield from _optimizer_state(step, model)
    for _, tensor in tensors_within((setup.args, setup.kwargs)):
        yield "inputs", "", tensor


def _optimizer_state(step: Step, model: nn.Module) -> Iterator[Holding]:
    if isinstance(step, TrainingStep):
        owners = {id(parameter): name.rpartition(".")[0] for name, parameter in model.named_parameters()}
        for parameter, state in step.optimizer_state():
            for _, tensor in tensors_within(state):
                yield "optimizer state", owners.get(id(parameter), ""), tensor


def _packed(model: nn.Module) -> Iterator[tuple[str, int]]:
    """Yields for each module the bytes of the weights that torch packs into objects of its own, as `quantize_dynamic` does."""
    seen: set[int] = set()
    for path, module in model.named_modules():
        objects = [one for one in vars(module).values() if isinstance(one, torch.ScriptObject) and id(one) not in seen]
        seen.update(map(id, objects))
        if size := sum(part.untyped_storage().nbytes() for one in objects for part in packed(one)):
            yield path, size


@dataclass(eq=False)
class Held:
    """A storage is held for some purpose, by a module, since a line of the user's code."""

    bytes: int
    category: MemoryCategory
    module: str
    line: str = ""


class Ledger(WholeDispatchMode):
    """This writes down when storages come and go while a step runs."""

    def __init__(self, phases: list[str], rounding: int, reserved: Callable[[], int | None]) -> None:
        super().__init__()
        self._phases, self._rounding, self._reserved = phases, rounding, reserved
        self._phase, self._passed = phases[0], 0
        self.paths = ModulePaths()
        self._is_over = False
        self._live: dict[int, Held] = {}
        self._events: list[tuple[Held, int, str, int | None]] = []
        """An event says what came (1) or went (-1), in which phase, and what the allocator held then, which includes freed memory."""
        self._broke_at: tuple[str, str, str] | None = None

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            result = func(*args, **kwargs)
        except Exception:
            operator = str(func).rpartition(".")[0].removeprefix("aten.")
            self._broke_at = self._broke_at or (self._asking(), operator, _line())
            raise
        for _, tensor in tensors_within(result):
            self.hold(tensor, "temporaries", self._asking())
        return result

    def _asking(self) -> str:
        """Returns the path of the module that runs. Between the model and the backward pass it is the loss."""
        if self.paths.stack:
            return self.paths.stack[-1]
        has_left = bool(self.paths.calls)
        return LOSS if has_left and self._phase == "forward" and len(self._phases) > 1 else ""

    def keep(self, size: int, category: MemoryCategory, module: str) -> None:
        """Notes bytes that are held from the beginning to the end."""
        self._events.append((Held(size, category, module), 1, self._phase, None))

    def hold(self, tensor: Tensor, category: MemoryCategory, module: str) -> None:
        for part in stored(tensor):  # a sparse tensor has no storage of its own
            if part.layout != torch.strided or part.device.type == "meta":
                continue
            storage = part.untyped_storage()
            key, size = storage._cdata, -(-storage.nbytes() // self._rounding) * self._rounding
            if key not in self._live and size:
                held = Held(size, category, module, _line() if category == "temporaries" else "")
                self._live[key] = held
                self._events.append((held, 1, self._phase, self._reserved()))
                weakref.finalize(storage, self._gone, key, held).atexit = False

    def _gone(self, key: int, held: Held) -> None:
        if self._live.get(key) is held:
            del self._live[key]
        if not self._is_over:
            self._events.append((held, -1, self._phase, None))

    def mark(self, model: nn.Module) -> None:
        """Notes that a phase has ended. What it leaves behind shows what it was made for: activations or gradients."""
        for held in self._live.values():
            if self._phase == "forward" and held.category == "temporaries":
                held.category = "activations"
        self.rename(
            ("gradients", name.rpartition(".")[0], parameter.grad)
            for name, parameter in model.named_parameters()
            if parameter.grad is not None
        )
        self._passed += 1
        self._phase = self._phases[min(self._passed, len(self._phases) - 1)]

    def rename(self, holdings: Iterable[Holding]) -> None:
        """Notes what these tensors are for and whose they are, if that is known only after they were made."""
        for category, module, tensor in holdings:
            for part in stored(tensor):
                if (held := self._live.get(part.untyped_storage()._cdata)) is not None:
                    held.category, held.module = category, module

    def use(self, allocated: int | None, reserved: int | None) -> MemoryUse:
        """Returns what was held at the peak, and what was held over time. The allocator's own figures are given on a GPU."""
        self._is_over = True
        sizes = np.cumsum([sign * held.bytes for held, sign, _, _ in self._events] or [0])
        at_peak = int(sizes.argmax())
        peak, counts = int(sizes[at_peak]), Counter[Held]()
        for held, sign, _, _ in self._events[: at_peak + 1]:
            counts[held] += sign
        holders = [held for held, count in counts.items() if count]
        categories = _by_category(holders, self._category)
        whole = max(allocated or 0, peak)
        if whole > peak:
            categories["workspace"] = whole - peak
        return MemoryUse(
            peak_bytes=whole,
            peak_phase=self._events[at_peak][2] if self._events else self._phases[0],
            categories=dict(categories),
            holders=tuple(self._by_module(holders)),
            timeline=tuple(self._timeline(sizes)),
            reserved_bytes=reserved,
            fragments_bytes=reserved - allocated if reserved is not None and allocated is not None else None,
        )

    def culprit(self) -> str:
        """Tells who asked for more than there was, and who held most of what was given out."""
        use = self.use(None, None)
        module, operator, line = self._broke_at or ("", "an operator", "")
        where = f"{module or 'no module'}{f' ({line})' if line else ''}"
        held = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in Counter(use.categories).most_common(4))
        most = use.holders[0] if use.holders else None
        by = f"; most by {most.module or 'no module'}, {format_bytes(most.bytes)} of {most.category}" if most else ""
        asked = f"out of memory in {where}, {self._phase} pass, {operator}"
        return f"{asked}; {format_bytes(use.peak_bytes)} held: {held}{by}"

    def _timeline(self, sizes: Any) -> Iterator[MemoryPoint]:
        """Yields the highest moment of each of many equal pieces of the step, with its memory by kind."""
        length = -(-len(self._events) // POINTS) or 1
        firsts = {
            first + int(sizes[first : first + length].argmax()): first for first in range(0, len(self._events), length)
        }
        now, reserved = Counter[MemoryCategory](), None
        for number, (held, sign, phase, then_reserved) in enumerate(self._events):
            now[self._category(held)] += sign * held.bytes
            reserved = reserved if then_reserved is None else then_reserved
            if number in firsts:
                yield MemoryPoint(
                    at=firsts[number] / len(self._events),
                    bytes=int(sizes[number]),
                    phase=phase,
                    categories=dict(+now),
                    reserved_bytes=reserved,
                )

    def _category(self, held: Held) -> MemoryCategory:
        is_inference = len(self._phases) == 1
        return "activations" if is_inference and held.category == "temporaries" else held.category

    def _by_module(self, holders: Iterable[Held]) -> list[MemoryHolder]:
        by_module: dict[str, list[Held]] = {}
        for held in holders:
            by_module.setdefault(held.module, []).append(held)
        found = []
        for module, parts in by_module.items():
            kinds, lines = _by_category(parts, self._category), Counter[str]()
            for held in parts:
                lines[held.line] += held.bytes if held.line else 0
            (category, _), (line, _) = kinds.most_common(1)[0], lines.most_common(1)[0]
            found.append(MemoryHolder(module=module, bytes=kinds.total(), category=category, line=line))
        return sorted(found, key=lambda holder: (-holder.bytes, holder.module))[:MOST_HOLDERS]


def _by_category(holders: Iterable[Held], category_of: Callable[[Held], MemoryCategory]) -> Counter[MemoryCategory]:
    found: Counter[MemoryCategory] = Counter()
    for held in holders:
        found[category_of(held)] += held.bytes
    return found


def _line() -> str:
    """Returns the innermost line of code outside torch and the bench, or "" if there is none."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(NOT_THE_USERS):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
