"""The model's passes: which modules are called, `torch.autograd.backward` and `grad`, running out of memory in them."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
from torch._guards import TracingContext

from .clock import (
    BEGIN_BACKWARD,
    BEGIN_FORWARD,
    BEGIN_GRADIENTS,
    ENTER_FORWARD,
    LEAVE,
    LEAVE_FORWARD,
    LEFT_TRAINING,
    SAW_CALL,
    Clock,
)
from .events import MOST_EVENTS
from .facts import is_out_of_memory
from .listener import Listener, is_compiling, is_traced
from .models import MOST_LEVELS, Models, Updates
from .samples import Question, Singles, samples_given, samples_mapped

is_grad_enabled = torch.is_grad_enabled


class Computing(Listener):
    def __init__(self) -> None:
        super().__init__()
        self._watched: set[type] = set()
        self._models = Models(self._watch_class)
        self._singles = Singles()
        self._updates = Updates()
        self._found_at = 0
        self._is_functional = False
        """A model is called with weights that are not its own, and may be mapped over its samples."""
        self._has_searched = False

    def _install_computing(self) -> None:
        self._wrap(torch.nn.Module, "__init__", self._new_module)
        self._wrap(torch.nn.Module, "__setstate__", self._new_module)
        self._wrap(torch, "compile", self._compiling)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.nn.utils.stateless, "_functional_call", self._functional_call)

    def _new_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._models.add(module)
            return original(module, *args, **kwargs)

        return wrapper

    def _functional_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and type(module) not in self._watched and not _is_traced():
                self._is_functional = True
                self._try(self._models.hear, module)
            return original(module, *args, **kwargs)

        return wrapper

    def _find_models(self, optimizer: Any | None) -> None:
        """Those that the optimizer trains; without one, whoever got gradients."""
        self._models.find(optimizer)
        self._heed_models()

    def _look_around(self) -> None:
        """Nobody calls the models: listen to what they were put into, or else to their parts."""
        if self._models.look_outward():
            self._heed_models()
        else:
            self._models.look_deeper()

    def _look_outward(self) -> None:
        if self._models.look_outward():
            self._heed_models()

    def _heed_models(self) -> None:
        self._singles.forget()
        if self.clock is not None:  # a model that nobody calls is looked into in the next steps
            self._found_at = self.clock.steps
            self.clock.busy_until = max(self.clock.busy_until, self.clock.steps + 2 * MOST_LEVELS)

    def _watch_class(self, kind: type) -> None:
        if kind not in self._watched:
            self._watched.add(kind)
            self._wrap(kind, "__call__", self._forward)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            clock = None if is_traced() else self.clock
            if clock is None or (
                clock.is_inside and (clock.thread is not None or clock.data_thread in (None, get_ident()))
            ):
                return original(module, *args, **kwargs)
            if clock.thread != get_ident() and not clock.hears():
                return original(module, *args, **kwargs)
            if id(module) in self._models.frozen:
                return self._frozen_forward(clock, original, module, args, kwargs)
            with_gradients = is_grad_enabled()
            if clock.is_resting and with_gradients and module.training:
                return original(module, *args, **kwargs)
            clock.is_resting, clock.is_inside = False, True
            question = None
            try:
                samples = self._singles.samples(module, args, kwargs)
                if self._is_functional:
                    samples *= samples_mapped(args, kwargs)
                elif clock.is_asking and with_gradients:
                    question = self._singles.question(module, args, kwargs)
                if clock.is_asking and with_gradients and self.facts is not None:
                    self.facts.saw_forward(args, kwargs, clock.steps)
                what = (BEGIN_FORWARD, id(module), samples, with_gradients, module.training)
                clock.put_time(perf_counter())
                clock.put(what)
                if clock.is_direct or len(clock.events) > MOST_EVENTS:
                    clock.work_through()
            except Exception as error:
                self.failed(error)
            try:
                if question is None:
                    return original(module, *args, **kwargs)
                try:
                    output = original(module, *args, **kwargs)
                finally:
                    question.close()
                self._try(self._learn, clock, module, question, output, args, kwargs, samples)
                return output
            except Exception as error:
                self._broke("forward", error, clock)
                raise
            finally:
                clock.is_inside = False
                clock.put_time(perf_counter())
                clock.put(LEFT_TRAINING if with_gradients else self._left_evaluation(module))
                if clock.is_direct:
                    self._work_through(clock)

        return wrapper

    def _frozen_forward(self, clock: Clock, original: Callable[..., Any], module: Any, args: Any, kwargs: Any) -> Any:
        if clock.is_resting:
            return original(module, *args, **kwargs)
        clock.is_inside = True
        clock.put_time(perf_counter())
        clock.put(ENTER_FORWARD)
        if clock.is_direct or len(clock.events) > MOST_EVENTS:
            self._work_through(clock)
        try:
            return original(module, *args, **kwargs)
        finally:
            clock.is_inside = False
            clock.put_time(perf_counter())
            clock.put(LEAVE)
            if clock.is_direct:
                self._work_through(clock)

    def _learn(
        self, clock: Clock, module: Any, question: Question, output: Any, args: Any, kwargs: Any, samples: int
    ) -> None:
        """The call has shown what its batch is: the calls after it are counted so, and this one too."""
        told = self._singles.learn(module, question, output, args, kwargs)
        if told != samples:
            clock.fed_instead(id(module), samples, told)

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile`: no call of a model is heard within a function that it compiles, as a loss."""

        def wrapper(model: Any = None, **kwargs: Any) -> Any:
            compiled = original(model, **kwargs)
            is_function = model is not None and isinstance(compiled, FunctionType) and not is_compiling()
            return functools.wraps(compiled)(self._compiled_call(compiled)) if is_function else compiled

        return wrapper

    def _compiled_call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            clock = None if is_traced() else self.clock
            if clock is None or clock.is_inside or clock.is_resting or not is_grad_enabled():
                return compiled(*args, **kwargs)
            if clock.thread == get_ident() or clock.hears():
                clock.put_time(perf_counter())
                clock.put((SAW_CALL, id(compiled), samples_given(args, kwargs)))
                if clock.is_direct:
                    self._work_through(clock)
            return compiled(*args, **kwargs)

        return wrapper

    def _left_evaluation(self, module: Any) -> tuple[Any, ...]:
        return (LEAVE_FORWARD, False, not module.training and self._models.holds(module))

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        has_loss = original.__name__ == "backward"

        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            clock, facts = self.clock, self.facts
            if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
                return original(tensors, *args, **kwargs)
            if clock.is_resting or (not has_loss and _is_traced()):
                return original(tensors, *args, **kwargs)
            # Before it is known who trains, another thread may be inside: in a loader that fetches ahead.
            was_inside, clock.is_inside = clock.is_inside and clock.thread is not None, True
            try:
                at = perf_counter()
                if has_loss and facts is not None and at >= facts.next_loss:
                    clock.loss = self._loss_of(tensors)
                if clock.knows_no_optimizer:
                    self._updates.follow(tensors)
                clock.put_time(at)
                clock.put(BEGIN_BACKWARD if has_loss else BEGIN_GRADIENTS)
                if clock.is_direct or len(clock.events) > MOST_EVENTS:
                    clock.work_through()
            except Exception as error:
                self.failed(error)
            try:
                return original(tensors, *args, **kwargs)
            except Exception as error:
                self._broke("backward", error, clock)
                raise
            finally:
                clock.is_inside = was_inside
                clock.put_time(perf_counter())
                clock.put(LEAVE)
                if clock.knows_no_optimizer:
                    self._try(self._updates.keep_gradients)
                if clock.is_direct:
                    self._work_through(clock)
                    self._search_without_optimizer(clock)

        return wrapper

    def _search_without_optimizer(self, clock: Clock) -> None:
        """No optimizer was made: whoever got gradients is trained."""
        if not self._models.found and not self._has_searched:
            self._has_searched = True
            self._try(clock.skipping, self._find_models, None)

    def _broke(self, phase: str, error: BaseException, clock: Clock) -> None:
        """The script's own error, which goes on its way; who held the memory is only known now."""
        if self.facts is not None and is_out_of_memory(error):
            self._try(self.facts.saw_out_of_memory, phase, error, clock.steps, self._models.roots())

    def _loss_of(self, tensors: Any) -> float:
        """On a CPU it is there; of a GPU it is asked for once in a while, and read when it has come."""
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or self.facts is None:
            return math.nan
        return self.facts.loss(loss)


def _is_traced() -> bool:
    """Whether the compiler or `make_fx` asks for gradients: it writes down what is computed later without a call."""
    if TracingContext.try_get() is not None:
        return True
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None
