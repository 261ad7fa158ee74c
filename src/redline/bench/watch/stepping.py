"""The end of a step: optimizers, GradScaler, recorded CUDA graphs, and programs that count their steps themselves."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch.optim import optimizer as optimizers

from .clock import BACKWARD, FORWARD, OPTIMIZER, Captured, Clock
from .computing import Computing
from .listener import is_compiling, is_traced
from .loading import Loading


class Stepping(Loading, Computing):
    def __init__(self) -> None:
        super().__init__()
        self._graphs: weakref.WeakKeyDictionary[Any, Captured] = weakref.WeakKeyDictionary()
        """What a recorded graph does each time it is replayed."""

    def _install_stepping(self) -> None:
        self._wrap(torch.amp.grad_scaler.GradScaler, "step", self._scaled_step)
        self._wrap(torch.amp.grad_scaler.GradScaler, "scale", self._scaling)
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
            if self.facts is not None and not is_compiling():
                self._try(self.facts.saw_scaler, scaler, outputs, scaled)
            return scaled

        return wrapper

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        clock = self.heard()
        if clock is not None:
            self._begin(clock, optimizer, optimizer)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        clock = self.heard()
        if clock is not None:
            self._end(clock, optimizer)

    def _begin(self, clock: Clock, optimizer: Any, caller: Any) -> None:
        try:
            clock.enter_optimizer(caller)
            if clock.steps == 0 and not self._models.found:  # the model came after its optimizer
                clock.skipping(self._find_models, optimizer)
        except Exception as error:
            self.failed(error)

    def _end(self, clock: Clock, optimizer: Any) -> None:
        try:
            if self.facts is not None and id(optimizer) not in self.facts.optimizers:
                self.facts.saw_optimizer(optimizer)
            clock.leave_optimizer(optimizer)
        except Exception as error:
            self.failed(error)

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A step that GradScaler leaves out, because gradients overflowed, is a step of the loop all the same."""

        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            clock = self.heard()
            if clock is None:
                return original(scaler, optimizer, *args, **kwargs)
            self._begin(clock, optimizer, scaler)
            result = original(scaler, optimizer, *args, **kwargs)
            self._end(clock, optimizer)
            return result

        return wrapper

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            clock = self.clock
            if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
                return original(optimizer, *args, **kwargs)
            keeps = (args[0] if args else kwargs.get("set_to_none", True)) is False
            began = time.perf_counter() if keeps else 0.0
            try:
                clock.enter(OPTIMIZER)
            except Exception as error:
                self.failed(error)
            try:
                return original(optimizer, *args, **kwargs)
            finally:
                try:
                    clock.leave()
                    if self.facts is not None:
                        self.facts.zero_grads += 1
                        if keeps:
                            self.facts.saw_kept_gradients(time.perf_counter() - began)
                except Exception as error:
                    self.failed(error)

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
            if clock is not None and clock.phase not in (FORWARD, BACKWARD):
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
            if captured is None or clock is None or clock.phase in (FORWARD, BACKWARD):
                return original(graph)
            self._try(clock.enter_replay, captured)
            try:
                return original(graph)
            finally:
                self._try(clock.leave_replay, captured)
                if self.facts is not None:
                    self.facts.replays += 1

        return wrapper
