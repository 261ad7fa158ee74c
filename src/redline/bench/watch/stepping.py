"""The end of a step: optimizers, GradScaler, recorded CUDA graphs, and programs that count their steps themselves."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from .clock import BEGIN_OPTIMIZER, END_OPTIMIZER, ENTER_OPTIMIZER, LEAVE, Captured, Clock
from .computing import Computing
from .listener import is_compiling, is_traced
from .loading import Loading
from .models import live_objects


class Stepping(Loading, Computing):
    def __init__(self) -> None:
        super().__init__()
        self._graphs: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()
        """What a recorded graph does each time it is replayed."""
        self._is_scaled = False
        """GradScaler steps the optimizer, or leaves it out: its call is the optimizer's."""
        self._called = (0, 0.0)
        """The optimizer that was called last, by its id, and when."""
        self._stepped: set[type] = set()
        """Classes of optimizers of which that is known."""

    def _install_stepping(self) -> None:
        self._wrap(torch.amp.grad_scaler.GradScaler, "step", self._scaled_step)
        self._wrap(torch.amp.grad_scaler.GradScaler, "scale", self._scaling)
        self._wrap(optimizers.Optimizer, "__init__", self._new_optimizer)
        self._wrap(optimizers.Optimizer, "zero_grad", self._zero_grad)
        before = optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        after = optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._undo += [before.remove, after.remove]
        if torch.version.cuda or torch.version.hip:
            self._wrap(torch.cuda.CUDAGraph, "capture_begin", self._begin_capture)
            self._wrap(torch.cuda.CUDAGraph, "capture_end", self._end_capture)
            self._wrap(torch.cuda.CUDAGraph, "replay", self._replay)

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            is_resting = self.clock is not None and self.clock.is_resting
            if self.facts is not None and not is_resting and not is_compiling():
                self._try(self.facts.saw_scaler, scaler, outputs, scaled)
            return scaled

        return wrapper

    def _new_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.clock is not None and not is_compiling():
                self._try(self._hear_steps, type(optimizer))
                self._try(self.clock.renew, id(optimizer))
                self._try(self._find_models, optimizer)

        return wrapper

    def find_existing(self) -> None:
        """Models and optimizers that were made before this: asking the collector takes long, so before the loop begins."""
        for module in live_objects(torch.nn.Module):
            self._models.add(module)
        for optimizer in live_objects(optimizers.Optimizer):
            self._try(self._hear_steps, type(optimizer))
            self._try(self._find_models, optimizer)

    def _hear_steps(self, kind: type) -> None:
        """Torch calls its hooks some time after a step was called: it makes a record of it first."""
        owner = next((one for one in kind.__mro__ if "step" in vars(one)), None)
        if owner is not None and owner not in self._stepped and getattr(vars(owner)["step"], "hooked", False):
            self._stepped.add(owner)
            self._wrap(owner, "step", self._whole_step)

    def _whole_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing but the time is noted here: of a step that is compiled in parts, hooks are heard both or not at all."""

        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_traced() and self.clock is not None:
                self._called = (id(optimizer), perf_counter())
            return original(optimizer, *args, **kwargs)

        return wrapper

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        clock = None if is_traced() or self._is_scaled else self.clock
        if clock is None or clock.is_resting or (clock.thread != get_ident() and not clock.hears()):
            return
        called, at = self._called
        clock.put_time(at if called == id(optimizer) else perf_counter())
        clock.put((BEGIN_OPTIMIZER, id(optimizer)))
        if clock.is_direct:
            self._begin(clock, optimizer)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        clock = None if is_traced() or self._is_scaled else self.clock
        if clock is None or (clock.thread != get_ident() and not clock.hears()):
            return
        at = perf_counter()
        clock.put_time(at)
        clock.put((END_OPTIMIZER, id(optimizer)))
        try:
            if clock.is_direct:
                if self.facts is not None and id(optimizer) not in self.facts.optimizers:
                    self.facts.saw_optimizer(optimizer)
                clock.work_through()
            elif not clock.is_inside:
                clock.step_ended(at)
        except Exception as error:
            self.failed(error)

    def _begin(self, clock: Clock, optimizer: Any) -> None:
        try:
            clock.work_through()
            if clock.steps == 0 and not self._models.found:  # the model came after its optimizer
                clock.skipping(self._find_models, optimizer)
            elif clock.steps == 0 and clock.forwards == 0:  # or was compiled after it
                clock.skipping(self._look_outward)
        except Exception as error:
            self.failed(error)

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A step that GradScaler leaves out, because gradients overflowed, is a step of the loop all the same."""

        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            clock = self.heard()
            if clock is None:
                return original(scaler, optimizer, *args, **kwargs)
            if not clock.is_resting:
                clock.put_time(perf_counter())
                clock.put((BEGIN_OPTIMIZER, id(scaler)))
            if clock.is_direct:
                self._begin(clock, optimizer)
            self._is_scaled = True
            try:
                result = original(scaler, optimizer, *args, **kwargs)
            finally:
                self._is_scaled = False
            self._after_optimizer(optimizer, (), {})
            return result

        return wrapper

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            clock = self.clock
            if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
                return original(optimizer, *args, **kwargs)
            if self.facts is not None:
                self.facts.zero_grads += 1
            keeps = (args or kwargs) and (args[0] if args else kwargs.get("set_to_none")) is False
            if clock.is_resting and not keeps:
                return original(optimizer, *args, **kwargs)
            began, is_noted = perf_counter(), not clock.is_resting
            if is_noted:
                clock.put_time(began)
                clock.put(ENTER_OPTIMIZER)
            if clock.is_direct:
                self._work_through(clock)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                ended = perf_counter()
                if is_noted:
                    clock.put_time(ended)
                    clock.put(LEAVE)
                if clock.is_direct:
                    self._work_through(clock)
                if keeps and self.facts is not None:
                    self.facts.saw_kept_gradients(ended - began)

        return wrapper

    def manual_step(self, samples: float | None) -> None:
        """A step that the program counts itself. With an optimizer of torch as well, that one counts the steps."""
        clock = self.heard()
        if clock is not None:
            if samples is not None and not self._has_loader:
                self._try(clock.saw_batch, float(samples))
            self._try(clock.end_by_hand)

    # Recorded graphs: while one is recorded nothing is computed, and when it is replayed no hook is called

    def _begin_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            clock = self.heard()
            # Within a pass it is the compiler that records: the pass is heard, whatever it replays.
            if clock is not None and not clock.is_inside:
                if not self._graphs:
                    self._try(self._wrap, torch.Tensor, "copy_", self._copy_into)
                self._try(clock.begin_capture)
            return result

        return wrapper

    def _end_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(graph: Any) -> Any:
            try:
                return original(graph)
            finally:
                clock = self.heard()
                if clock is not None and clock.is_capturing:
                    self._try(self._keep_graph, graph, clock)

        return wrapper

    def _keep_graph(self, graph: Any, clock: Clock) -> None:
        self._graphs[graph] = clock.end_capture()

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(graph: Any) -> Any:
            captured = self._graphs.get(graph)
            clock = self.heard() if captured is not None else None
            if captured is None or clock is None or clock.is_inside:
                return original(graph)
            self._try(clock.enter_replay, captured)
            try:
                return original(graph)
            finally:
                self._try(clock.leave_replay, captured)
                if self.facts is not None:
                    self.facts.replays += 1

        return wrapper
