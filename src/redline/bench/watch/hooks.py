"""Hooks that listen to a watched process: to its DataLoaders, models, autograd, optimizers, copies, checkpoints and recorded graphs.

Nothing of the user's is changed in a way that a checkpoint, `torch.jit` or `torch.compile` would see: methods of classes are
wrapped, no hook is registered on a module, and under the compiler every wrapper is the function it wraps. If one of our own lines
fails, watching ends, the reason is written down, and the script goes on.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from types import FunctionType
from typing import Any

import torch
import torch.utils.data
from torch._guards import TracingContext
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import optimizer as optimizers
from torch.optim import swa_utils
from torch.utils.data import dataloader as loaders

from .facts import Facts, is_out_of_memory
from .models import MOST_LEVELS, Models, live_objects
from .recorder import Recorder
from .samples import Question, Samples, batch_samples, samples_given, samples_mapped, tensors_in
from .spool import (
    BACKWARD,
    CALLED,
    CAPTURE,
    COPY,
    COUNTED,
    DATA,
    FETCHED,
    FORWARD,
    OPTIMIZER,
    OPTIMIZER_ENDED,
    REPLAY,
    SAVING,
    UPKEEP,
    WAITING,
    ZERO_GRAD,
    Spool,
)  # fmt: skip
from .windows import Windows

is_compiling = torch.compiler.is_compiling
is_traced = torch.compiler.is_dynamo_compiling
"""While the compiler follows the script's code, every wrapper is the function it wraps."""
is_grad_enabled = torch.is_grad_enabled

DESCRIBED_AFTER = (1, 10)
"""Steps after which model, device and flags are looked at: by then what is used has been used."""
EARLY_PULSES = (2, 10, 18)
"""A script of a few steps is described too."""
SYNCS_FROM, SYNCS_TO = 6, 16
"""Steps in which what makes the host wait for the device is listened to."""
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
SAVERS = (
    (
        "safetensors.torch",
        "_flatten",
    ),  # with the next one: `save_file` itself is called by whatever name a script has for it
    ("safetensors.torch", "serialize_file"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    ("transformers.trainer", "Trainer._save_checkpoint"),
    ("accelerate.accelerator", "Accelerator.save_state"),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint"),
)
"""Functions of libraries that save, besides `torch.save`."""
COPIES_ASKED = 64
"""Asking the driver whether memory is pinned takes a few microseconds: in the first steps, then in one of so many."""


class Watch:
    """Everything that is in place in this process; `remove` takes it out again."""

    def __init__(self, folder: str, windows: str = "") -> None:
        self._folder, self._asked = folder, windows
        self._undo: list[Callable[[], None]] = []
        self._undo_waits: list[Callable[[], None]] = []
        self._watched: set[type] = set()
        """Classes of models whose calls are heard."""
        self._stepped: set[type] = set()
        """Classes of optimizers whose `step` is heard."""
        self._savers = set[tuple[str, str]]()
        """Functions of libraries that are heard."""
        self._graphs: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()
        """Recorded graphs, and whether an optimizer's step is in them."""
        self._models = Models(self._watch_class)
        self._samples = Samples()
        self._batches = NextBatch()
        self._called = (0, 0.0)
        """The optimizer that was called last, by its id, and when: torch calls its hooks some time after that."""
        self._is_scaled = False
        """True while GradScaler steps the optimizer, or leaves it out: its call counts as the optimizer's."""
        self._found_at = self._forwards = 0
        self._has_loader = self._is_functional = self._has_gradients = False
        self.log: Recorder | None = None
        self._start()

    def _start(self) -> None:
        """Also in a forked child, which may be a loader's worker or may train itself: no file until it does."""
        self.log = Recorder(Spool(self._folder))
        self.facts = Facts(self.log.spool)
        self.log.on_step = self._after_step
        self.windows = Windows(self.log, self._asked)
        self.log.looks_until = max(self.log.looks_until, self.windows.after)

    def install(self) -> None:
        self._wrap(loaders._BaseDataLoaderIter, "__next__", self._next_batch)
        self._wrap(loaders.DataLoader, "__iter__", self._new_iterator)
        self._wrap(torch.nn.Module, "__init__", self._new_module)
        self._wrap(torch.nn.Module, "__setstate__", self._new_module)
        self._wrap(torch, "compile", self._compiling)
        self._wrap(torch.autograd, "backward", self._backward)
        self._wrap(torch.autograd, "grad", self._backward)
        self._wrap(torch.nn.utils.stateless, "_functional_call", self._functional_call)
        self._wrap(torch, "save", functools.partial(self._timed, SAVING))
        self._wrap(
            swa_utils.AveragedModel, "update_parameters", functools.partial(self._timed, UPKEEP, is_always=False)
        )
        self._wrap(torch.amp.grad_scaler.GradScaler, "step", self._scaled_step)
        self._wrap(torch.amp.grad_scaler.GradScaler, "scale", self._scaling)
        self._wrap(optimizers.Optimizer, "__init__", self._new_optimizer)
        self._wrap(optimizers.Optimizer, "zero_grad", self._zero_grad)
        registered = register_module_module_registration_hook(self._registered)
        before = optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        after = optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        self._undo += [before.remove, after.remove, registered.remove]
        if torch.version.cuda or torch.version.hip:
            self._wrap(torch.Tensor, "to", self._copy)
            self._wrap(torch.Tensor, "cuda", self._copy)
            self._wrap(torch.cuda.CUDAGraph, "capture_begin", self._begin_capture)
            self._wrap(torch.cuda.CUDAGraph, "capture_end", self._end_capture)
            self._wrap(torch.cuda.CUDAGraph, "replay", self._replay)
        self._wrap(os, "_exit", self._exit)
        atexit.register(self._close)
        self._undo.append(lambda: atexit.unregister(self._close))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: self._start() if self.log is not None else None)

    def _wrap(self, owner: Any, name: str, around: Callable[[Any], Callable[..., Any]]) -> None:
        """Replace a function by what `around` makes of it."""
        original = getattr(owner, name)
        own = vars(owner).get(name)
        setattr(owner, name, functools.wraps(original)(around(original)))
        self._undo.append(lambda: delattr(owner, name) if own is None else setattr(owner, name, own))

    def _exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os._exit`, after which nothing runs any more."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.log is not None and self.log.steps:
                self.attempt(self.facts.pulse, self.log.steps)
            return original(*args, **kwargs)

        return wrapper

    def _close(self) -> None:
        """Write what is still to be told. A program that ends while torch's profiler runs ends with a segmentation fault."""
        self.attempt(self.windows.close)
        if self.log is not None and self.log.spool.rows:
            self.attempt(self.log.close)
            self.attempt(self.facts.pulse, self.log.steps)

    def remove(self) -> None:
        self._close()
        self.log = None
        self._batches.stop()
        self._stop_listening_for_waits()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._watched.clear()
        self._stepped.clear()
        self._savers.clear()

    def failed(self, error: BaseException) -> None:
        """Our mistake, not the script's: write it down and stop listening."""
        log, self.log = self.log, None
        if log is not None:
            try:
                log.spool.fact("broken", error=repr(error))
            except OSError:
                return  # a full disk, which the script will notice by itself

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self.failed(error)

    # What most wrappers share

    def _heard(self, *, is_always: bool = False) -> Recorder | None:
        """The recorder, if this call is to be written down: not within a pass or a loader, and where the step is heard in full."""
        log = self.log
        if is_traced() or log is None or log.inside == get_ident() or not log.hears():
            return None
        if log.is_full or is_always:
            return log
        log.has_missed = True
        return None

    def _timed(self, kind: float, original: Callable[..., Any], *, is_always: bool = True) -> Callable[..., Any]:
        """A call that is written down from its begin to its end."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            log = self._heard(is_always=is_always)
            if log is None:
                return original(*args, **kwargs)
            with Span(self, log, kind):
                return original(*args, **kwargs)

        return wrapper

    # Where batches come from, and how they reach the device

    def _new_iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(loader: Any) -> Any:
            log = self._heard(is_always=True)
            if log is None:
                return original(loader)
            ends_workers = 0 if getattr(loader, "persistent_workers", False) else loader.num_workers
            with Span(self, log, DATA, 0.0, 1.0 + ends_workers) as span:
                iterator = original(loader)
                span.key, span.value = float(id(iterator)), 0.0
            self.attempt(self.facts.saw_loader, loader)
            return iterator

        return wrapper

    def _next_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(iterator: Any) -> Any:
            log = self._heard(is_always=True)
            if log is None:
                return original(iterator)
            if self._has_loader and not log.knows_optimizer:  # without an optimizer the next batch begins the next step
                self.attempt(log.step_ended)
            with Span(self, log, DATA, float(id(iterator))) as span:  # transforms may be modules, and are no models
                try:
                    batch = original(iterator)
                except StopIteration:
                    span.value = -1.0
                    raise
                span.at = perf_counter()
                if batch is not None:
                    span.value, self._has_loader = self.attempt(batch_samples, batch, iterator) or 0.0, True
            return batch

        return wrapper

    def _copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or tensor.is_cuda:
                return original(tensor, *args, **kwargs)
            return self._timed_copy(tensor, original, (tensor, *args), kwargs)

        return wrapper

    def _copy_into(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Into the buffers of a recorded graph, which is how its batches reach the device."""

        def wrapper(tensor: torch.Tensor, source: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not tensor.is_cuda or not isinstance(source, torch.Tensor) or source.is_cuda:
                return original(tensor, source, *args, **kwargs)
            return self._timed_copy(source, original, (tensor, source, *args), kwargs)

        return wrapper

    def _timed_copy(self, source: torch.Tensor, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        log = self._heard() if torch.cuda.is_initialized() or (self.log and self.log.device) else None
        if log is None:
            return original(*args, **kwargs)
        with Span(self, log, COPY):
            moved = original(*args, **kwargs)
        if log.steps > 0 and (log.steps < COPIES_ASKED or log.steps % COPIES_ASKED == 0):  # at first the model moves
            self.attempt(self.facts.saw_copy, source, moved, args, kwargs)
        return moved

    # The model's passes

    def _new_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._models.add(module)
            return original(module, *args, **kwargs)

        return wrapper

    def _registered(self, holder: Any, name: str, part: Any) -> None:
        if self.log is not None and not is_compiling():
            self.attempt(self._models.registered, holder, name, part)

    def _functional_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling() and type(module) not in self._watched and not _is_traced():
                self._is_functional = True
                self.attempt(self._models.hear, module)
            return original(module, *args, **kwargs)

        return wrapper

    def _find_models(self, optimizer: Any | None) -> None:
        """Those that the optimizer trains; without one, whoever got gradients."""
        self._models.find(optimizer)
        self._heed_models()

    def _heed_models(self) -> None:
        self._samples.forget()
        if self.log is not None:  # a model that nobody calls is looked into in the next steps
            self._found_at = self.log.steps
            self.log.looks_until = max(self.log.looks_until, self.log.steps + 2 * MOST_LEVELS)

    def _watch_class(self, kind: type) -> None:
        if kind not in self._watched:
            self._watched.add(kind)
            self._wrap(kind, "__call__", self._forward)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._batches.stop()
            log, with_gradients = self.log, is_grad_enabled()
            is_usual = with_gradients and module.training
            if self._batches.is_awaited and log is not None:
                self.attempt(self._saw_inputs, log, args, kwargs)
            log = self._heard(is_always=not is_usual)
            if log is None:
                return original(module, *args, **kwargs)
            log.is_full = True
            self._forwards += 1
            question = self.attempt(self._ask, log, module, with_gradients, args, kwargs)
            is_frozen = id(module) in self._models.frozen
            key = 0.0 if is_frozen else float(id(module))
            with Span(self, log, FORWARD, key, with_gradients + 2.0 * module.training, "forward") as span:
                try:
                    output = original(module, *args, **kwargs)
                    if question is not None:
                        self.attempt(self._samples.learn, module, question, output)
                finally:
                    if question is not None:
                        question.close()
                    span.value = self.attempt(self._fed, module, args, kwargs) or 0.0
            if is_usual and log.is_full and not (self._has_loader or is_frozen or self._is_functional):
                self._batches.listen(sys._getframe(1))
            return output

        return wrapper

    def _ask(self, log: Recorder, module: Any, with_gradients: bool, args: Any, kwargs: Any) -> Question | None:
        """In some of the first steps the call itself tells which dimension is the batch."""
        if not with_gradients or self._is_functional or not log.steps < DESCRIBED_AFTER[-1]:
            return None
        self.facts.saw_forward(args, kwargs, log.steps)
        return self._samples.question(module, args, kwargs)

    def _fed(self, module: Any, args: Any, kwargs: Any) -> float:
        samples = self._samples.fed(module, args, kwargs)
        return float(samples * samples_mapped(args, kwargs) if self._is_functional else samples)

    def _saw_inputs(self, log: Recorder, args: Any, kwargs: Any) -> None:
        seconds = self._batches.made(args, kwargs)
        if seconds:
            log.put(FETCHED, 0.0, seconds)

    def _compiling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.compile`: no call of a model is heard within a function that it compiles, such as a loss."""

        def wrapper(model: Any = None, **kwargs: Any) -> Any:
            compiled = original(model, **kwargs)
            is_function = model is not None and isinstance(compiled, FunctionType) and not is_compiling()
            return functools.wraps(compiled)(self._compiled_call(compiled)) if is_function else compiled

        return wrapper

    def _compiled_call(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            log = self._heard() if is_grad_enabled() else None
            if log is not None:
                self.attempt(log.put, CALLED, float(id(compiled)), float(samples_given(args, kwargs)))
            return compiled(*args, **kwargs)

        return wrapper

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        has_loss = original.__name__ == "backward"

        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            self._batches.stop(is_backward=True)
            if self.log is not None and has_loss and not is_traced():
                self.attempt(self.facts.saw_loss, tensors)
            log = self._heard()
            if log is None or (not has_loss and _is_traced()):
                return original(tensors, *args, **kwargs)
            log.trains()
            if self._has_gradients and not (log.knows_optimizer or log.optimizers or self._has_loader):
                self.attempt(log.step_ended)  # nothing else tells where a step ends
            handle = self.attempt(self._mark_own_end, log, tensors) if torch.distributed.is_initialized() else None
            with Span(self, log, BACKWARD, phase="backward"):
                result = original(tensors, *args, **kwargs)
            if handle is not None:
                handle.remove()
            if (
                not self._has_gradients and not self._models.known
            ):  # no optimizer was made: whoever got gradients is trained
                self.attempt(self._find_models, None)
            self._has_gradients = True
            return result

        return wrapper

    def _mark_own_end(self, log: Recorder, losses: Any) -> Any:
        """Writes down where this rank has computed its gradients: DDP then waits for those of the others.

        DDP asks the engine to call it after the backward pass as well, but later than this: it asks when the last gradient is there.
        """
        loss = losses[0] if isinstance(losses, (tuple, list)) and losses else losses
        if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
            return None
        engine: Any = torch.autograd.Variable._execution_engine
        return loss.register_hook(lambda _: engine.queue_callback(lambda: self.attempt(log.put, WAITING)))

    def broke(self, phase: str, error: BaseException) -> None:
        """Looks at an error of the script's: if memory ran out, only now is it known who held it."""
        if is_out_of_memory(error) and self.log is not None:
            self.attempt(self.facts.saw_out_of_memory, phase, error, self.log.steps, self._models.roots())

    # The end of a step

    def _new_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.log is not None and not is_compiling():
                self.attempt(self._hear_optimizer, optimizer)

        return wrapper

    def find_existing(self) -> None:
        """Models and optimizers that were made before this: asking the collector takes long, so before the loop begins."""
        for module in live_objects(torch.nn.Module):
            self._models.add(module)
        for optimizer in live_objects(optimizers.Optimizer):
            self.attempt(self._hear_optimizer, optimizer)

    def _hear_optimizer(self, optimizer: Any) -> None:
        owner = next((one for one in type(optimizer).__mro__ if "step" in vars(one)), None)
        if owner is not None and owner not in self._stepped and getattr(vars(owner)["step"], "hooked", False):
            self._stepped.add(owner)
            self._wrap(owner, "step", self._whole_step)
        self.facts.made_optimizer(optimizer)
        self._find_models(optimizer)

    def _whole_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Nothing but the time is noted here: of a step that is compiled in parts, either both of torch's hooks fire or neither."""

        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_traced() and self.log is not None:
                self._called = (id(optimizer), perf_counter())
            return original(optimizer, *args, **kwargs)

        return wrapper

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._is_scaled:
            called, at = self._called
            self._begin_optimizer(optimizer, at if called == id(optimizer) else perf_counter())

    def _begin_optimizer(self, optimizer: Any, at: float) -> None:
        self._batches.stop()
        log = self._heard(is_always=True)
        if log is None:
            return
        log.trains()
        log.optimizers += 1
        if log.is_full:
            self.attempt(log.put, OPTIMIZER, self.facts.number_of(optimizer), 0.0, at)
        if log.steps == 0 and not self._models.known:  # the model came after its optimizer
            self.attempt(self._find_models, optimizer)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        at, log = perf_counter(), None if self._is_scaled else self._heard(is_always=True)
        if log is None or not log.optimizers:
            return
        log.optimizers -= 1
        is_step = log.optimizers == 0 and not self._is_capturing
        value = float(log.is_full and not log.has_missed)
        self.attempt(log.put, OPTIMIZER_ENDED, self.facts.number_of(optimizer), value, at)
        self._has_optimizer_in_graph = True
        if is_step:
            log.knows_optimizer = True
            self.attempt(log.step_ended, self.facts.number_of(optimizer))

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A step that GradScaler leaves out, because gradients overflowed, is a step of the loop all the same."""

        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._begin_optimizer(optimizer, perf_counter())
            was, self._is_scaled = self._is_scaled, True
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._is_scaled = was
                self._after_optimizer(optimizer, (), {})

        return wrapper

    def _scaling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if self.log is not None and not is_compiling():
                self.attempt(self.facts.saw_scaler, scaler, outputs, scaled)
            return scaled

        return wrapper

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            keeps = (args or kwargs) and (args[0] if args else kwargs.get("set_to_none")) is False
            log, began = self._heard(), perf_counter()
            if log is None:
                original(optimizer, *args, **kwargs)
            else:
                with Span(self, log, ZERO_GRAD):
                    original(optimizer, *args, **kwargs)
            self.facts.saw_zero_grad(perf_counter() - began if keeps else None)

        return wrapper

    def manual_step(self, samples: float | None) -> None:
        """A step that the program counts itself. With an optimizer of torch as well, that one counts the steps."""
        log = self._heard(is_always=True)
        if log is not None and not self.facts.has_optimizers:
            log.trains()
            log.knows_optimizer = True
            value = samples if samples is not None and not self._has_loader else 0.0
            self.attempt(log.put, COUNTED, float(not log.has_missed), value)
            self.attempt(log.step_ended)

    # Recorded graphs: while one is recorded nothing is computed, and when it is replayed no hook is called

    _is_capturing = _has_optimizer_in_graph = False

    def _begin_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(graph: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(graph, *args, **kwargs)
            log = self._heard(is_always=True)  # within a pass it is the compiler that records
            if log is not None:
                if not self._graphs:
                    self.attempt(self._wrap, torch.Tensor, "copy_", self._copy_into)
                self._is_capturing, self._has_optimizer_in_graph, log.is_full = True, False, True
                self.attempt(log.put, CAPTURE)
            return result

        return wrapper

    def _end_capture(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(graph: Any) -> Any:
            try:
                return original(graph)
            finally:
                if self._is_capturing and self.log is not None:
                    self._is_capturing = False
                    self._graphs[graph] = self._has_optimizer_in_graph
                    self.attempt(self.log.put, CAPTURE + 1, float(id(graph)))

        return wrapper

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(graph: Any) -> Any:
            log = self._heard(is_always=True) if graph in self._graphs else None
            if log is None:
                return original(graph)
            with Span(self, log, REPLAY, float(id(graph))) as span:
                result = original(graph)
                span.value = float(not log.has_missed)
            self.facts.replays += 1
            if self._graphs[graph] and not log.optimizers:
                log.knows_optimizer = True
                self.attempt(log.step_ended)
            return result

        return wrapper

    # After each of the first steps, and then once per second

    def _after_step(self) -> None:
        log, facts = self.log, self.facts
        assert log is not None
        if log.steps in DESCRIBED_AFTER:
            self._models.find_frozen()
            measures = log.steps == DESCRIBED_AFTER[-1]
            facts.describe(self._models.roots(facts.trained()), is_called=self._forwards > 0, measures=measures)
            self._hear_savers()
            log.device = log.device or facts.device_clock()
        # A model that was found while its first step ended has not been heard yet.
        if self._forwards == 0 and self._models.known and log.steps > self._found_at + 1:
            self._models.look_deeper()  # nobody calls the models: listen to their parts
        self._forwards = 0
        if facts.is_on_gpu and log.steps == SYNCS_FROM:
            self._listen_for_waits()
        elif log.steps >= SYNCS_TO:
            self._stop_listening_for_waits()
        # What is read before the training begins is not to be profiled.
        if log.thread is not None or (self._models.known and "torch._dynamo" in sys.modules):
            self.windows.after_step()
        if log.steps > log.looks_until or log.steps in EARLY_PULSES:
            facts.pulse(log.steps)

    def _hear_savers(self) -> None:
        """Libraries that save in their own way exist only where a script has imported them."""
        for module, path in SAVERS:
            *owners, name = path.split(".")
            owner: Any = sys.modules.get(module)
            for attribute in owners:
                owner = getattr(owner, attribute, None)
            saver = getattr(owner, name, None)
            if saver is not None and (module, path) not in self._savers:
                self._savers.add((module, path))
                self._wrap(owner, name, functools.partial(self._timed, SAVING))

    def _listen_for_waits(self) -> None:
        """For a few steps: what makes the host wait for the device, and from which line."""
        if not self._undo_waits:
            lasting, self._undo = self._undo, self._undo_waits
            for name in WAITING_METHODS:
                self._wrap(torch.Tensor, name, self._wait)
            self._wrap(torch.cuda, "synchronize", self._wait)
            self._undo = lasting

    def _stop_listening_for_waits(self) -> None:
        while self._undo_waits:
            self._undo_waits.pop()()

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or (args and isinstance(args[0], torch.Tensor) and not args[0].is_cuda):
                return original(*args, **kwargs)
            began = perf_counter()
            result = original(*args, **kwargs)
            if self.log is not None and self.log.hears():
                is_scaler = self.log.optimizers > 0  # GradScaler asks whether gradients overflowed
                self.attempt(self.facts.saw_wait, original.__name__, perf_counter() - began, is_scaler)
            return result

        return wrapper


class Span:
    """Writes down a call of the script's from its beginning to its end. Calls within it belong to it and are not heard.

    The key and the value may be set before its end, and so may the time of it. An error of the script's goes on its way.
    """

    __slots__ = ("_kind", "_log", "_phase", "_watch", "_within", "at", "key", "value")

    def __init__(
        self, watch: Watch, log: Recorder, kind: float, key: float = 0.0, value: float = 0.0, phase: str = ""
    ) -> None:
        self._watch, self._log, self._kind, self._phase = watch, log, kind, phase
        self._within, log.inside = log.inside, get_ident()
        self.key, self.value = key, 0.0
        self.at: float | None = None
        watch.attempt(log.put, kind, key, value)

    def __enter__(self) -> Span:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        log = self._log
        if isinstance(error, Exception) and self._phase:
            self._watch.broke(self._phase, error)
        if log.hears():  # else another thread has begun to train meanwhile: this one loads ahead for it
            log.inside = self._within
            self._watch.attempt(log.put, self._kind + 1, self.key, self.value, self.at)


class NextBatch:
    """Finds out whether a script without a loader makes its next batch between a forward pass and the backward pass.

    Of the functions that are called there by whoever called the model, the one that returned what the model is fed next has made
    the next batch. A batch that is made without a function of its own is not told from the loss.
    """

    def __init__(self) -> None:
        self._callers: set[int] = set()
        """The ids of the frames that called the model."""
        self._has_followed = False
        """A backward pass has come since the last forward pass."""
        self._made: list[tuple[float, set[int]]] = []
        """How long each call took, and the ids of the tensors that it returned."""

    @property
    def is_awaited(self) -> bool:
        return bool(self._made)

    def listen(self, frame: Any) -> None:
        """To be called after a forward pass: nothing is listened to if no backward pass followed the last one."""
        follows, self._has_followed = self._has_followed, False
        if follows and sys.gettrace() is None:
            self._made = []
            while frame is not None:
                self._callers.add(id(frame))
                frame = frame.f_back
            sys.settrace(self._enter)

    def stop(self, *, is_backward: bool = False) -> None:
        self._has_followed = self._has_followed or is_backward
        if self._callers:
            self._callers.clear()
            sys.settrace(None)

    def _enter(self, frame: Any, event: str, arg: Any) -> Any:
        if id(frame.f_back) not in self._callers:
            return None
        frame.f_trace_lines = False
        began = perf_counter()

        def leave(_: Any, event: str, result: Any) -> Any:
            if event == "return" and type(result) in (torch.Tensor, tuple, list, dict):
                tensors = {id(one) for one in tensors_in(result)}
                if tensors:
                    self._made.append((perf_counter() - began, tensors))
            return leave

        return leave

    def made(self, args: Any, kwargs: Any) -> float:
        """Seconds that making these inputs took."""
        made, self._made = self._made, []
        inputs = {id(one) for one in tensors_in((args, kwargs))}
        return sum(seconds for seconds, tensors in made if tensors & inputs)


def _is_traced() -> bool:
    """True if the compiler or `make_fx` asks for gradients: it only writes down what is computed later."""
    if TracingContext.try_get() is not None:
        return True
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return tracing is not None and tracing.get_proxy_mode() is not None


_installed: Watch | None = None


def installed() -> Watch | None:
    """Returns what watches this process, if anything does."""
    return _installed


def install(folder: str, windows: str | None = None, *, in_program: bool = False) -> Watch:
    """Watch this process. A second call, as by a callback in a script that is watched already, changes nothing.

    `in_program`: it has run for a while and may have made its model.
    """
    global _installed
    if _installed is None or _installed.log is None:
        _installed = Watch(folder, os.environ.get("REDLINE_WATCH_WINDOWS", "") if windows is None else windows)
        _installed.install()
        if in_program:
            _installed.find_existing()
    return _installed
