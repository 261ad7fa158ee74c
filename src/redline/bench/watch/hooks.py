"""Where the watched process is listened to: DataLoader, model, autograd, optimizer, copies.

Nothing of the user's is changed in a way that a checkpoint, `torch.jit` or `torch.compile` would see: methods of classes
are wrapped, no hook is registered on a module, and under the compiler every wrapper is the function it wraps. If one of
our own lines fails, watching ends, the reason is written down, and the script goes on.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.data
from torch.optim import optimizer as optimizers
from torch.utils.data import dataloader as loaders

from .clock import BACKWARD, COPY, DATA, FORWARD, OPTIMIZER, PULSE_S, Clock, Spool
from .facts import Facts, batch_samples, is_out_of_memory, leading_size
from .profile import Windows

is_compiling = torch.compiler.is_compiling

FACTS_AFTER = 1
"""Steps until model, device and flags are looked at: all of it has been used by then."""
EARLY_PULSES = (2, 10)
"""A script of a few steps is described too."""
SYNCS_FROM, SYNCS_TO = 6, 16
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
MOST_LEVELS = 4
"""A model whose parts are called one by one, as Lightning does, is looked into so deep."""


class Watch:
    """Everything that is in place in this process; `remove` takes it out again."""

    def __init__(self, folder: str, windows: str = "") -> None:
        self._folder = folder
        self._windows = windows
        self._undo: list[Callable[[], None]] = []
        self._watched: set[type] = set()
        self._found: list[weakref.ref[torch.nn.Module]] = []
        self._levels = 0
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
        self._next_pulse = 0.0

    def heard(self) -> Clock | None:
        """The clock, where this call counts."""
        clock = self.clock
        return clock if clock is not None and clock.hears() else None

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
        self._undo += [before.remove, after.remove]
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _forked(self) -> None:
        if self.clock is not None:
            self._start()

    def remove(self) -> None:
        self.windows.close()
        self.clock = None
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._watched.clear()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        """Replace a function by one that calls `around` with it; under the compiler it stays what it was."""
        original = getattr(owner, name)
        own = vars(owner).get(name)

        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self.clock is None:
                return original(*args, **kwargs)
            return around(original, *args, **kwargs)

        setattr(owner, name, wrapper)
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _timed(self, phase: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clock = self.heard()
        if clock is None:
            return call(*args, **kwargs)
        self._try(clock.enter, phase)
        try:
            return call(*args, **kwargs)
        finally:
            self._try(clock.leave)

    # Data

    def _new_iterator(self, original: Callable[..., Any], loader: Any) -> Any:
        began = time.perf_counter()
        iterator = self._timed(DATA, original, loader)
        self._fresh = (id(iterator), id(loader), began)
        if self.facts is not None:
            self._try(self.facts.saw_loader, loader)
        return iterator

    def _next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        try:
            batch = self._timed(DATA, original, iterator)
        except StopIteration:
            clock = self.heard()
            if clock is not None:
                self._try(clock.saw_end_of_data)
            raise
        clock = self.heard()
        if clock is not None:
            self._has_loader = True
            try:
                clock.saw_batch(batch_samples(batch, iterator))
                if self._fresh is not None and self._fresh[0] == id(iterator) and self.facts is not None:
                    self.facts.saw_first_batch(self._fresh[1], time.perf_counter() - self._fresh[2])
                    self._fresh = None
            except Exception as error:
                self.failed(error)
        return batch

    def _copy(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        clock = self.heard()
        if (
            clock is None
            or tensor.is_cuda
            or clock.phase in (FORWARD, BACKWARD, COPY)
            or not torch.cuda.is_initialized()
        ):
            return original(tensor, *args, **kwargs)
        began = time.perf_counter()
        moved = self._timed(COPY, original, tensor, *args, **kwargs)
        is_batch = clock.steps > 0  # before the first step it is the model that moves
        if is_batch and isinstance(moved, torch.Tensor) and moved.is_cuda and self.facts is not None:
            self._try(self.facts.saw_copy, tensor, args, kwargs, time.perf_counter() - began, clock.steps)
        return moved

    # The model

    def _new_optimizer(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        self._try(self._find_models, optimizer)

    def _find_models(self, optimizer: Any) -> None:
        """The outermost modules that own what the optimizer trains."""
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        self._find_owners(lambda parameter: id(parameter) in trained)

    def _find_models_with_gradients(self) -> None:
        self._find_owners(lambda parameter: parameter.requires_grad and parameter.grad is not None)

    def _find_owners(self, is_trained: Callable[[Any], bool]) -> None:
        """By asking the collector for every module."""
        objects = gc.get_objects()
        kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.nn.Module)}
        modules = [one for one in objects if type(one) in kinds]
        del objects
        owners = [one for one in modules if any(map(is_trained, _parameters(one)))]
        inner = {id(child) for one in owners for child in _children(one)}
        known = self._roots()
        self._found_at = self.clock.steps if self.clock is not None else 0
        for root in owners:
            if id(root) not in inner and not any(root is one for one in known):
                self._found.append(weakref.ref(root))
                self._watch_class(type(root))

    def _roots(self) -> list[torch.nn.Module]:
        """Those that are still alive: what the script lets go is not held here."""
        return [root for found in self._found if (root := found()) is not None]

    def _watch_class(self, kind: type) -> None:
        if kind not in self._watched:
            self._watched.add(kind)
            self._wrap(kind, "__call__", self._forward)

    def _look_deeper(self) -> None:
        """Nobody calls the models themselves: listen to their parts."""
        if self._levels < MOST_LEVELS:
            self._levels += 1
            parts = [child for root in self._roots() for child in root.children()]
            self._found = [weakref.ref(part) for part in parts] or self._found
            for part in parts:
                self._watch_class(type(part))

    def _forward(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> Any:
        clock = self.heard()
        if clock is None or clock.phase == FORWARD or clock.phase == BACKWARD:
            return original(module, *args, **kwargs)
        with_gradients, is_training = torch.is_grad_enabled(), module.training
        self._forwards += 1
        try:
            clock.saw_forward(id(module), leading_size((args, kwargs)), with_gradients, is_training)
            if with_gradients and self.facts is not None:
                self.facts.saw_forward(module, args, kwargs, clock.steps)
            clock.enter(FORWARD)
        except Exception as error:
            self.failed(error)
        try:
            return original(module, *args, **kwargs)
        except Exception as error:
            self._broke("forward", error, clock)
            raise
        finally:
            evaluates = not with_gradients and not is_training and any(module is one() for one in self._found)
            self._try(clock.leave_forward, with_gradients, evaluates)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        clock = self.heard()
        if clock is None:
            return original(tensors, *args, **kwargs)
        try:
            if original.__name__ == "backward":
                clock.saw_backward(self._loss_of(tensors))
            clock.enter(BACKWARD)
        except Exception as error:
            self.failed(error)
        try:
            return original(tensors, *args, **kwargs)
        except Exception as error:
            self._broke("backward", error, clock)
            raise
        finally:
            self._try(clock.leave)
            if not self._found and not self._has_searched:  # no optimizer was made: whoever got gradients is trained
                self._has_searched = True
                self._try(clock.skipping, self._find_models_with_gradients)

    def _broke(self, phase: str, error: BaseException, clock: Clock) -> None:
        """The script's own error, which goes on its way; who held the memory is only known now."""
        if self.facts is not None and is_out_of_memory(error):
            self._try(self.facts.saw_out_of_memory, phase, error, clock.steps, self._roots())

    def _loss_of(self, tensors: Any) -> float:
        """On a CPU it is there; of a GPU it is asked for once in a while, and read when it has come."""
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and tensors else tensors
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or self.facts is None:
            return math.nan
        return self.facts.loss(loss)

    def _scaling(self, original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        scaled = original(scaler, outputs)
        if self.facts is not None:
            self._try(self.facts.saw_scaler, scaler, outputs, scaled)
        return scaled

    # The optimizer

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            self._begin(optimizer, optimizer)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not is_compiling():
            self._end(optimizer)

    def _begin(self, optimizer: Any, caller: Any) -> None:
        clock = self.heard()
        if clock is not None:
            self._try(clock.enter_optimizer, caller)
            if clock.steps == 0 and not self._roots():  # the model came after its optimizer
                self._try(clock.skipping, self._find_models, optimizer)

    def _end(self, optimizer: Any) -> None:
        clock = self.heard()
        if clock is not None:
            if self.facts is not None:
                self._try(self.facts.saw_optimizer, optimizer)
            self._try(clock.leave_optimizer, optimizer)

    def _scaled_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """A step that GradScaler leaves out, because gradients overflowed, is a step of the loop all the same."""
        self._begin(optimizer, scaler)
        result = original(scaler, optimizer, *args, **kwargs)
        self._end(optimizer)
        return result

    def _zero_grad(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        clock = self.heard()
        began = time.perf_counter()
        result = self._timed(OPTIMIZER, original, optimizer, *args, **kwargs)
        if clock is not None and self.facts is not None:
            keeps = (args[0] if args else kwargs.get("set_to_none", True)) is False
            self._try(self.facts.saw_zero_grad, keeps, time.perf_counter() - began)
        return result

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
        if clock.steps == FACTS_AFTER:
            facts.describe(self._roots())
            clock.mark = facts.device_mark()
        # A model that was found while its first step ended has not been heard yet.
        if self._forwards == 0 and self._found and clock.steps > self._found_at + 1:
            self._look_deeper()
        self._forwards = 0
        if facts.is_on_gpu and clock.steps in (SYNCS_FROM, SYNCS_TO):
            self._listen_for_waits() if clock.steps == SYNCS_FROM else self._stop_listening_for_waits()
        self.windows.after_step()
        now = time.monotonic()
        if now >= self._next_pulse or clock.steps in EARLY_PULSES:
            self._next_pulse = now + PULSE_S
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

    def _wait(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], torch.Tensor) and not args[0].is_cuda:
            return original(*args, **kwargs)
        began = time.perf_counter()
        result = original(*args, **kwargs)
        clock = self.heard()
        if clock is not None and self.facts is not None:
            is_scaler = clock.phase == OPTIMIZER  # GradScaler asks whether gradients overflowed
            self._try(self.facts.saw_wait, original.__name__, time.perf_counter() - began, is_scaler)
        return result

    def _try(self, call: Callable[..., Any], *args: Any) -> None:
        try:
            call(*args)
        except Exception as error:
            self.failed(error)


def _parameters(module: torch.nn.Module) -> list[Any]:
    return [one for one in _walk(module, "_parameters") if one is not None]


def _children(module: torch.nn.Module) -> list[Any]:
    return [one for one in _walk(module, "_modules") if one is not None]


def _walk(module: torch.nn.Module, what: str) -> list[Any]:
    """Of the module and all below it, without calling anything that a class may have overridden."""
    found: list[Any] = []
    seen: set[int] = set()
    waiting = [module]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        own = vars(one)
        found += own.get(what, {}).values()
        waiting += [child for child in own.get("_modules", {}).values() if child is not None]
    return found


_installed: Watch | None = None


def installed() -> Watch | None:
    """What watches this process, if anything does."""
    return _installed


def install(folder: str, windows: str | None = None) -> Watch:
    """Watch this process. A second call, as by a callback in a script that is watched already, changes nothing."""
    global _installed
    if _installed is None or _installed.clock is None:
        _installed = Watch(folder, os.environ.get("REDLINE_WATCH_WINDOWS", "") if windows is None else windows)
        _installed.install()
    return _installed
