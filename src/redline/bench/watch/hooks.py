"""Where the watched process is listened to: DataLoader, model, autograd, optimizer, copies.

Nothing of the user's is changed in a way that a checkpoint, `torch.jit` or `torch.compile` would see: methods of classes
are wrapped, no hook is registered on a module, and under the compiler every wrapper is the function it wraps. If one of
our own lines fails, watching ends, the reason is written down, and the script goes on.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import sys
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
import torch.utils.data
from torch._guards import TracingContext
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader as loaders

from .clock import BACKWARD, COPY, DATA, FORWARD, OPTIMIZER, Clock
from .facts import Facts, batch_samples, is_out_of_memory, leading_size
from .models import MOST_LEVELS, Models, live_objects
from .profile import Windows
from .spool import Spool

is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling
"""While the compiler follows the script's code, every wrapper is the function it wraps."""

DESCRIBED_AFTER = (1, 10)
"""Steps after which model, device and flags are looked at: by then what is used has been used."""
EARLY_PULSES = (2, 10, 18)
"""A script of a few steps is described too."""
SYNCS_FROM, SYNCS_TO = 6, 16
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")


class Watch:
    """Everything that is in place in this process; `remove` takes it out again."""

    def __init__(self, folder: str, windows: str = "") -> None:
        self._folder = folder
        self._windows = windows
        self._undo: list[Callable[[], None]] = []
        self._watched: set[type] = set()
        self._models = Models(self._watch_class)
        self._found_at = 0
        self._forwards = 0
        self._has_loader = self._has_searched = False
        self._fresh: tuple[int, int, float] | None = None
        self.clock: Clock | None = None
        self.facts: Facts | None = None
        self._start()

    def _start(self) -> None:
        """Also in a forked child, which may be a loader's worker or may train itself: no file until it does."""
        spool = Spool(self._folder)
        self.facts = Facts(spool)
        self.clock = Clock(spool)
        self.clock.on_step = self._after_step
        self.windows = Windows(self.clock, self._windows)
        self.clock.busy_until = max(self.clock.busy_until, self.windows.after)

    def heard(self) -> Clock | None:
        """The clock, where this call counts."""
        clock = self.clock
        if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
            return None
        return clock

    def failed(self, error: BaseException) -> None:
        """Our mistake, not the script's: write it down and stop listening."""
        clock, self.clock = self.clock, None
        if clock is not None:
            try:
                clock.spool.fact("broken", error=repr(error))
            except OSError:
                return  # a full disk, which the script will notice by itself

    # Putting in place

    def install(self) -> None:
        self._wrap(torch.nn.Module, "__init__", self._new_module)
        self._wrap(torch.nn.Module, "__setstate__", self._new_module)
        self._wrap(loaders._BaseDataLoaderIter, "__next__", self._next_batch)
        self._wrap(loaders.DataLoader, "__iter__", self._new_iterator)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.amp.grad_scaler.GradScaler, "step", self._scaled_step)
        self._wrap(torch.amp.grad_scaler.GradScaler, "scale", self._scaling)
        self._wrap(optimizers.Optimizer, "zero_grad", self._zero_grad)
        self._wrap(optimizers.Optimizer, "__init__", self._new_optimizer)
        if torch.version.cuda or torch.version.hip:
            self._wrap(torch.Tensor, "to", self._copy)
            self._wrap(torch.Tensor, "cuda", self._copy)
        before = optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        after = optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        atexit.register(self._close_clock)
        self._undo += [before.remove, after.remove, lambda: atexit.unregister(self._close_clock)]
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def find_existing(self) -> None:
        """Models and optimizers that were made before this: asking the collector takes long, so before the loop begins."""
        for module in live_objects(torch.nn.Module):
            self._models.add(module)
        for optimizer in live_objects(optimizers.Optimizer):
            self._try(self._find_models, optimizer)

    def _forked(self) -> None:
        if self.clock is not None:
            self._start()

    def _close_clock(self) -> None:
        """What is still to be read and told when the program or its loop has ended."""
        if self.clock is not None and self.clock.steps:
            self._try(self.clock.close)
            if self.facts is not None and self.clock is not None:
                self._try(self.facts.pulse, self.clock.steps)

    def remove(self) -> None:
        self._close_clock()
        self.windows.close()
        self.clock = None
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._watched.clear()

    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function by what `around` makes of it."""
        original = getattr(owner, name)
        own = vars(owner).get(name)
        setattr(owner, name, functools.wraps(original)(around(original)))
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _enter(self, clock: Clock, phase: int) -> None:
        try:
            clock.enter(phase)
        except Exception as error:
            self.failed(error)

    def _leave(self, clock: Clock) -> None:
        try:
            clock.leave()
        except Exception as error:
            self.failed(error)

    # Data

    def _new_iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(loader: Any) -> Any:
            clock = self.heard()
            if clock is None:
                return original(loader)
            began = time.perf_counter()
            self._enter(clock, DATA)
            try:
                iterator = original(loader)
            finally:
                self._leave(clock)
            self._fresh = (id(iterator), id(loader), began)
            clock.may_be_compiled = bool(self._models.found) and "torch._dynamo" in sys.modules
            if self.facts is not None:
                self._try(self.facts.saw_loader, loader)
            return iterator

        return wrapper

    def _next_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(iterator: Any) -> Any:
            clock = self.clock
            if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
                return original(iterator)
            try:
                clock.enter(DATA)
            except Exception as error:
                self.failed(error)
            try:
                batch = original(iterator)
            except StopIteration:
                self._leave(clock)
                self._try(clock.saw_end_of_data)
                raise
            except BaseException:
                self._leave(clock)
                raise
            try:
                clock.leave()
                clock.saw_batch(batch_samples(batch, iterator))
                self._has_loader = True
                if self._fresh is not None and self._fresh[0] == id(iterator):
                    self._saw_first_batch(*self._fresh)
            except Exception as error:
                self.failed(error)
            return batch

        return wrapper

    def _saw_first_batch(self, iterator: int, loader: int, began: float) -> None:
        self._fresh = None
        if self.facts is not None:
            self.facts.saw_first_batch(loader, time.perf_counter() - began)

    def _copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or tensor.is_cuda or not torch.cuda.is_initialized():
                return original(tensor, *args, **kwargs)
            clock = self.heard()
            if clock is None or clock.phase in (FORWARD, BACKWARD, COPY):
                return original(tensor, *args, **kwargs)
            self._enter(clock, COPY)
            try:
                moved = original(tensor, *args, **kwargs)
            finally:
                self._leave(clock)
            if self.facts is not None and self.facts.asks_about_copies(clock.steps):
                self._try(self.facts.saw_copy, tensor, moved, args, kwargs)
            return moved

        return wrapper

    # The model

    def _new_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._models.add(module)
            return original(module, *args, **kwargs)

        return wrapper

    def _new_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.clock is not None and not is_compiling():
                self._try(self._find_models, optimizer)

        return wrapper

    def _find_models(self, optimizer: Any | None) -> None:
        """Those that the optimizer trains; without one, whoever got gradients."""
        self._models.find(optimizer)
        if self.clock is not None:  # a model that nobody calls is looked into in the next steps
            self._found_at = self.clock.steps
            self.clock.busy_until = max(self.clock.busy_until, self.clock.steps + 2 * MOST_LEVELS)

    def _watch_class(self, kind: type) -> None:
        if kind not in self._watched:
            self._watched.add(kind)
            self._wrap(kind, "__call__", self._forward)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            clock = self.clock
            if clock is None or clock.phase == FORWARD or clock.phase == BACKWARD:
                return original(module, *args, **kwargs)
            if clock.thread != get_ident() and not clock.hears():
                return original(module, *args, **kwargs)
            with_gradients, is_training = torch.is_grad_enabled(), module.training
            try:
                self._forwards += 1
                clock.saw_forward(id(module), leading_size(args, kwargs), with_gradients, is_training)
                if with_gradients and (clock.steps <= 3 or not clock.steps % 512) and self.facts is not None:
                    self.facts.saw_forward(args, kwargs, clock.steps)
                clock.enter(FORWARD)
            except Exception as error:
                self.failed(error)
            try:
                return original(module, *args, **kwargs)
            except Exception as error:
                self._broke("forward", error, clock)
                raise
            finally:
                try:
                    evaluates = not with_gradients and not is_training and self._models.holds(module)
                    clock.leave_forward(with_gradients, evaluates)
                except Exception as error:
                    self.failed(error)

        return wrapper

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        has_loss = original.__name__ == "backward"

        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            clock, facts = self.clock, self.facts
            if is_traced() or clock is None or (clock.thread != get_ident() and not clock.hears()):
                return original(tensors, *args, **kwargs)
            try:
                if has_loss:
                    is_due = facts is not None and time.monotonic() >= facts.next_loss
                    clock.saw_backward(self._loss_of(tensors) if is_due else math.nan)
                elif TracingContext.try_get() is None:  # the compiler asks for gradients, too
                    clock.saw_gradients()
                clock.enter(BACKWARD)
            except Exception as error:
                self.failed(error)
            try:
                return original(tensors, *args, **kwargs)
            except Exception as error:
                self._broke("backward", error, clock)
                raise
            finally:
                try:
                    clock.leave()
                except Exception as error:
                    self.failed(error)
                if (
                    not self._models.found and not self._has_searched
                ):  # no optimizer was made: whoever got gradients is trained
                    self._has_searched = True
                    self._try(clock.skipping, self._find_models, None)

        return wrapper

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

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if self.facts is not None and not is_compiling():
                self._try(self.facts.saw_scaler, scaler, outputs, scaled)
            return scaled

        return wrapper

    # The optimizer

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

    # After each step

    def _after_step(self, clock: Clock) -> None:
        facts = self.facts
        if facts is None:
            return
        if clock.steps in DESCRIBED_AFTER:
            facts.describe(self._models.roots(facts.trained()), self._forwards > 0)
            clock.device = clock.device or facts.device_clock()
        # A model that was found while its first step ended has not been heard yet.
        if self._forwards == 0 and self._models.found and clock.steps > self._found_at + 1:
            self._models.look_deeper()
        self._forwards = 0
        if facts.is_on_gpu and clock.steps in (SYNCS_FROM, SYNCS_TO):
            self._listen_for_waits() if clock.steps == SYNCS_FROM else self._stop_listening_for_waits()
        self.windows.after_step()
        if clock.steps > clock.busy_until or clock.steps in EARLY_PULSES:
            facts.pulse(clock.steps)

    def _listen_for_waits(self) -> None:
        """For a few steps: what makes the host wait for the device, and from which line."""
        self._before_waits = len(self._undo)
        for name in WAITING_METHODS:
            self._wrap(torch.Tensor, name, self._wait)
        self._wrap(torch.cuda, "synchronize", self._wait)

    def _stop_listening_for_waits(self) -> None:
        while len(self._undo) > self._before_waits:
            self._undo.pop()()

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or (args and isinstance(args[0], torch.Tensor) and not args[0].is_cuda):
                return original(*args, **kwargs)
            began = time.perf_counter()
            result = original(*args, **kwargs)
            clock = self.heard()
            if clock is not None and self.facts is not None:
                is_scaler = clock.phase == OPTIMIZER  # GradScaler asks whether gradients overflowed
                self._try(self.facts.saw_wait, original.__name__, time.perf_counter() - began, is_scaler)
            return result

        return wrapper

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self.failed(error)


_installed: Watch | None = None


def installed() -> Watch | None:
    """What watches this process, if anything does."""
    return _installed


def install(folder: str, windows: str | None = None, *, in_program: bool = False) -> Watch:
    """Watch this process. A second call, as by a callback in a script that is watched already, changes nothing.

    `in_program`: it has run for a while and may have made its model.
    """
    global _installed
    if _installed is None or _installed.clock is None:
        _installed = Watch(folder, os.environ.get("REDLINE_WATCH_WINDOWS", "") if windows is None else windows)
        _installed.install()
        if in_program:
            _installed.find_existing()
    return _installed
