"""These hooks listen to a watched process: to its DataLoaders, models, autograd, optimizers, copies, checkpoints and recorded graphs.

Nothing of the user's is changed in a way that a checkpoint, `torch.jit` or `torch.compile` would see: methods of classes
are wrapped, no hook is registered on a module, and under the compiler every wrapper is the function it wraps. If one of our
own lines fails, watching ends, the reason is written down, and the script goes on.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

import torch
import torch.utils.data
from torch._guards import TracingContext
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim import optimizer as optimizers
from torch.optim import swa_utils
from torch.utils.data import dataloader as loaders

from .facts import CudaClock, Facts
from .models import MOST_LEVELS, Models, live_objects, weights_of
from .recorder import DeviceMarks, Recorder
from .samples import Fed, batch_samples, tensors_in
from .spool import (
    BACKWARD,
    COPY,
    COUNTED,
    DATA,
    FETCHED,
    FORWARD,
    OPTIMIZER,
    REPLAY,
    SAVING,
    UPKEEP,
    WAITING,
    ZERO_GRAD,
    Spool,
)
from .windows import AFTER, Window

is_compiling = torch.compiler.is_dynamo_compiling
"""While the compiler follows the script's code, every wrapper behaves exactly like the function it wraps."""
is_grad_enabled = torch.is_grad_enabled

DESCRIBED_AFTER = (1, 10)
"""After these steps we look at models, device and flags, because by then everything in use has been used once."""
EARLY_PULSES = (2, 10, 18)
"""We write a pulse after these steps too, so that a script of a few steps is also described."""
WAITS_FROM, WAITS_TO = 6, 16
"""Between these steps we listen to calls that make the host wait for the device."""
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
SAVERS = (
    ("safetensors.torch", "_flatten"),  # this goes with the next one: scripts import `save_file` itself under any name
    ("safetensors.torch", "serialize_file"),
    ("transformers.modeling_utils", "PreTrainedModel.save_pretrained"),
    ("transformers.trainer", "Trainer._save_checkpoint"),
    ("accelerate.accelerator", "Accelerator.save_state"),
    ("lightning.pytorch.trainer.trainer", "Trainer.save_checkpoint"),
)  # fmt: skip
"""These functions of libraries save checkpoints. `torch.save` is wrapped apart from them."""
COPIES_ASKED = 64
"""Asking the driver whether memory is pinned takes a few microseconds. So we ask in this many first steps, then in one step of as many."""

Around = Callable[[Any], Callable[..., Any]]


class Watch:
    """It holds everything that is in place in this process. `remove` takes it out again."""

    def __init__(self, folder: str, *, profiles: bool = False) -> None:
        self._folder, self._profiles = folder, profiles
        self._undo: dict[tuple[int, str], Callable[[], None]] = {}
        """It maps the owner's id and the name of each function that was replaced to a call that restores it."""
        self._models, self._fed, self._batches = Models(), Fed(), NextBatch()
        self._forwards = 0
        """It counts the calls of models that were heard in this step."""
        self._found_at = 0
        """This is the step in which we last looked for models."""
        self._has_loader = self._has_gradients = False
        self._is_scaled = False
        """It is true while GradScaler steps the optimizer, or skips the step. That call counts as the optimizer's step."""
        self.log: Recorder | None = None
        self._start()

    def _start(self) -> None:
        """Starts listening. A forked child starts too, because it may be a loader's worker or may train itself. It
        writes no file until it trains."""
        self.log = Recorder(Spool(self._folder), self._after_step)
        self.facts = Facts(self.log.spool)
        self._window = Window(self.log) if self._profiles else None
        self.log.looks_until = max(self.log.looks_until, AFTER)

    def install(self) -> None:
        saving, upkeep = functools.partial(self._timed, SAVING), functools.partial(self._timed, UPKEEP, is_always=False)
        around: list[tuple[Any, str, Around]] = [
            (loaders._BaseDataLoaderIter, "__next__", self._next_batch),
            (loaders.DataLoader, "__iter__", self._new_iterator),
            (torch.nn.Module, "__init__", self._new_module),
            (torch.nn.Module, "__setstate__", self._new_module),
            (torch.autograd, "backward", self._backward),
            (torch.autograd, "grad", self._backward),
            (torch, "save", saving),
            (swa_utils.AveragedModel, "update_parameters", upkeep),
            (torch.amp.grad_scaler.GradScaler, "step", self._scaled_step),
            (optimizers.Optimizer, "__init__", self._new_optimizer),
            (optimizers.Optimizer, "zero_grad", self._zero_grad),
        ]
        if torch.version.cuda or torch.version.hip:
            around += [
                (torch.Tensor, "to", self._copy),
                (torch.Tensor, "cuda", self._copy),
                (torch.cuda.CUDAGraph, "replay", self._replay),
            ]
        for owner, name, wrapper in around:
            self._wrap(owner, name, wrapper)
        self._undo[0, "before"] = optimizers.register_optimizer_step_pre_hook(self._before_optimizer).remove
        self._undo[0, "after"] = optimizers.register_optimizer_step_post_hook(self._after_optimizer).remove
        self._undo[0, "registered"] = register_module_module_registration_hook(self._registered).remove
        atexit.register(self._close)
        self._undo[0, "exit"] = lambda: atexit.unregister(self._close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=lambda: self._start() if self.log is not None else None)

    def _wrap(self, owner: Any, name: str, around: Around) -> None:
        """Replaces a function by what `around` makes of it, once."""
        if (id(owner), name) not in self._undo:
            original, own = getattr(owner, name), vars(owner).get(name)
            setattr(owner, name, functools.wraps(original)(around(original)))
            self._undo[id(owner), name] = lambda: delattr(owner, name) if own is None else setattr(owner, name, own)

    def _close(self) -> None:
        """Writes what has not been written yet. A program that ends while torch's profiler runs would end with a segmentation fault."""
        if self._window is not None:
            self.attempt(self._window.close)
        if self.log is not None and self.log.spool.rows:
            self.attempt(self.log.close)
            self.attempt(self.facts.pulse, self.log.steps)

    def remove(self) -> None:
        self._close()
        self.log = None
        self._batches.stop()
        while self._undo:
            self._undo.popitem()[1]()

    def failed(self, error: BaseException) -> None:
        """Writes down that one of our own lines failed, which is not the script's fault, and stops listening."""
        log, self.log = self.log, None
        if log is not None:
            try:
                log.spool.fact("broken", error=repr(error))
            except OSError:
                # The disk is full, which the script will notice by itself.
                return

    def attempt(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except Exception as error:
            self.failed(error)

    # Most wrappers share the next methods.

    def _heard(self, *, is_always: bool = False) -> Recorder | None:
        """Returns the recorder if this call is to be written down, else None. A call within another one is not, and unless
        `is_always` is set, none in a step that is not heard in full.

        Nothing is computed while a graph is recorded, so nothing is written down then.
        """
        log = self.log
        if is_compiling() or log is None or log.inside == get_ident() or not log.hears():
            return None
        if log.device is not None and torch.cuda.is_current_stream_capturing():
            return None
        if log.is_full or is_always:
            return log
        log.is_whole = False
        return None

    def _timed(self, kind: float, original: Callable[..., Any], *, is_always: bool = True) -> Callable[..., Any]:
        """Returns a wrapper that writes a call down from its beginning to its end."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            log = self._heard(is_always=is_always)
            if log is None:
                return original(*args, **kwargs)
            with Span(self, log, kind):
                return original(*args, **kwargs)

        return wrapper

    def _zero_grad(self, original: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed(ZERO_GRAD, original, is_always=False)

        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            began = perf_counter()
            result = timed(optimizer, *args, **kwargs)
            keeps = (args[0] if args else kwargs.get("set_to_none", True)) is False
            self.facts.saw_zero_grad(perf_counter() - began, keeps=keeps)
            return result

        return wrapper

    # The next wrappers hear where batches come from, and how they reach the device.

    def _new_iterator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(loader: Any) -> Any:
            log = self._heard(is_always=True)
            if log is None:
                return original(loader)
            ends_workers = 0 if getattr(loader, "persistent_workers", False) else loader.num_workers
            with Span(self, log, DATA, 0.0, 1.0 + ends_workers) as span:
                iterator = original(loader)
                span.key = float(id(iterator))
            self.attempt(self.facts.saw_loader, loader)
            return iterator

        return wrapper

    def _next_batch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(iterator: Any) -> Any:
            log = self._heard(is_always=True)
            if log is None:
                return original(iterator)
            # Without an optimizer the next batch begins the next step.
            if self._has_loader and not log.knows_end:
                self.attempt(log.step_ended)
            # The span keeps transforms out of sight. They may be modules, but they are not models.
            with Span(self, log, DATA, float(id(iterator))) as span:
                span.value = -1.0
                batch = original(iterator)
                span.at, span.value = perf_counter(), 0.0
                if batch is not None:
                    span.value, self._has_loader = self.attempt(batch_samples, batch, iterator) or 0.0, True
            return batch

        return wrapper

    def _copy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            is_moved = not (is_compiling() or tensor.is_cuda) and torch.cuda.is_initialized()
            log = self._heard() if is_moved else None
            if log is None:
                return original(tensor, *args, **kwargs)
            with Span(self, log, COPY):
                moved = original(tensor, *args, **kwargs)
            # Before the first step ends the model may still be moved to the device, which is not a copy of a batch.
            if log.steps and (log.steps < COPIES_ASKED or log.steps % COPIES_ASKED == 0):
                self.attempt(self.facts.saw_copy, tensor, moved, args, kwargs)
            return moved

        return wrapper

    # The next wrappers hear the model's passes.

    def _new_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if not is_compiling():
                self._models.add(module)
            return original(module, *args, **kwargs)

        return wrapper

    def _registered(self, holder: Any, name: str, part: Any) -> None:
        """Follows a model that is put into another module, as DDP and `torch.compile` do, because that module is called instead."""
        if id(part) in self._models.trained and not is_compiling():
            self._models.trained.add(id(holder))
            self.attempt(self._wrap, type(holder), "__call__", self._forward)

    def _find_models(self) -> None:
        """Finds and wraps the models that optimizers train, or without an optimizer those that got gradients, and the
        models that run beside them."""
        weights = self.facts.trained(has_stepped=False) or self._models.with_gradients()
        for model in self._models.find(weights) if weights else ():
            self._wrap(type(model), "__call__", self._forward)
        # A model that nobody calls is looked into in the next steps.
        if self.log is not None:
            self._found_at = self.log.steps
            self.log.looks_until = max(self.log.looks_until, self.log.steps + 2 * MOST_LEVELS)

    def _forward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(module, *args, **kwargs)
            self._batches.stop()
            fetched_s, with_gradients = self._batches.fetched_s(args, kwargs), is_grad_enabled()
            is_usual = with_gradients and module.training
            log = self._heard(is_always=not is_usual)
            if log is None:
                return original(module, *args, **kwargs)
            log.is_full = True
            question = (
                self.attempt(self._ask, log, module, args, kwargs)
                if with_gradients and log.steps < DESCRIBED_AFTER[1]
                else None
            )
            is_trained = id(module) in self._models.trained
            self._forwards += is_trained
            if fetched_s:
                self.attempt(log.put, FETCHED, 0.0, fetched_s)
            with Span(
                self, log, FORWARD, float(id(module) * is_trained), with_gradients + 2.0 * module.training
            ) as span:
                try:
                    output = original(module, *args, **kwargs)
                finally:
                    if question is not None:
                        question.remove()
                span.at = perf_counter()
                span.value = self.attempt(self._fed.count, module, args, kwargs) or 0.0
            if is_usual and is_trained and not self._has_loader:
                self._batches.listen(sys._getframe(1))
            return output

        return wrapper

    def _ask(self, log: Recorder, module: Any, args: Any, kwargs: Any) -> Any:
        """Lets the call itself tell, in some of the first steps, which dimension is the batch."""
        self.facts.saw_forward(args, kwargs)
        return self._fed.ask(module, args, kwargs)

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensors, *args, **kwargs)
            self._batches.stop(is_backward=True)
            log = self._heard()
            if log is None or _is_traced():
                return original(tensors, *args, **kwargs)
            log.trains()
            if self._has_gradients and not (log.knows_end or log.optimizers or self._has_loader):
                # Nothing else tells where a step ends.
                self.attempt(log.step_ended)
            handle = self.attempt(self._mark_own_end, log, tensors) if torch.distributed.is_initialized() else None
            with Span(self, log, BACKWARD):
                result = original(tensors, *args, **kwargs)
            if handle is not None:
                handle.remove()
            # If no optimizer was made, the gradients tell which models are trained.
            if not self._has_gradients and not self._models.trained:
                self.attempt(self._find_models)
            self._has_gradients = True
            return result

        return wrapper

    def _mark_own_end(self, log: Recorder, losses: Any) -> Any:
        """Writes down when this rank has computed its gradients. After that DDP waits for those of the other ranks.

        DDP asks the engine to call it after the backward pass as well, but later than this, because it asks when the last
        gradient is there.
        """
        loss = next(tensors_in(losses), None)
        if loss is None or not loss.requires_grad:
            return None
        engine: Any = torch.autograd.Variable._execution_engine
        return loss.register_hook(lambda _: engine.queue_callback(lambda: self.attempt(log.put, WAITING)))

    # The next methods hear the end of a step.

    def _new_optimizer(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            original(optimizer, *args, **kwargs)
            if self.log is not None and not is_compiling():
                self.attempt(self._hear_optimizer, optimizer)

        return wrapper

    def find_existing(self) -> None:
        """Finds models and optimizers that were made before watching began. Asking the collector takes long, so this runs
        before the loop begins."""
        for module in live_objects(torch.nn.Module):
            self._models.add(module)
        for optimizer in live_objects(optimizers.Optimizer):
            self.attempt(self._hear_optimizer, optimizer)

    def _hear_optimizer(self, optimizer: Any) -> None:
        self.facts.made_optimizer(optimizer)
        self._find_models()

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._batches.stop()
        log = None if self._is_scaled else self._heard(is_always=True)
        if log is not None:
            log.trains()
            log.optimizers += 1
            if log.is_full:
                self.attempt(log.put, OPTIMIZER, self.facts.number_of(optimizer))

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        log = None if self._is_scaled else self._heard(is_always=True)
        if log is None or not log.optimizers:
            return
        log.optimizers -= 1
        number = self.facts.number_of(optimizer)
        self.attempt(log.put, OPTIMIZER + 1, number, float(log.is_whole))
        if not log.optimizers:
            log.knows_end = True
            self.attempt(log.step_ended, number)

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hears a step of GradScaler. A step that it skips because gradients overflowed is still a step of the loop."""

        def wrapper(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            self._before_optimizer(optimizer, (), {})
            was, self._is_scaled = self._is_scaled, True
            self.facts.scales = bool(scaler.is_enabled())
            try:
                return original(scaler, optimizer, *args, **kwargs)
            finally:
                self._is_scaled = was
                self._after_optimizer(optimizer, (), {})

        return wrapper

    def manual_step(self, samples: float | None) -> None:
        """Records a step that the program counts itself. If there is an optimizer of torch as well, the optimizer counts the steps."""
        log = self._heard(is_always=True)
        if log is not None and not self.facts.optimizers:
            log.trains()
            self._count(log, samples if samples is not None and not self._has_loader else 0.0)

    def _count(self, log: Recorder, samples: float = 0.0) -> None:
        log.knows_end = True
        self.attempt(log.put, COUNTED, float(log.is_whole), samples)
        self.attempt(log.step_ended)

    def _replay(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hears the replay of a graph that the script recorded. Nothing inside the graph is heard, so one replay counts as one step."""

        def wrapper(graph: Any) -> Any:
            log = self._heard(is_always=True)
            if log is None:
                return original(graph)
            with Span(self, log, REPLAY, float(id(graph))):
                result = original(graph)
            self.facts.replays += 1
            self._count(log)
            return result

        return wrapper

    # The next method runs after each of the first steps, and then once per second.

    def _after_step(self) -> None:
        log, facts = self.log, self.facts
        assert log is not None
        # A model that was found while its first step ended has not been heard yet.
        is_known = self._models.trained and log.is_whole and log.steps > self._found_at + 1
        is_called = self._forwards > 0 or not is_known
        if log.steps in DESCRIBED_AFTER or (not is_called and self._models.look_deeper()):
            self._find_models()
        if log.steps in DESCRIBED_AFTER:
            stepped = facts.trained(has_stepped=True)
            used = [one for one in self._models.roots if any(id(weight) in stepped for weight in weights_of(one))]
            measures = log.steps == DESCRIBED_AFTER[1]
            facts.describe(used or self._models.roots, is_called=self._forwards > 0, measures=measures)
            self._hear_savers()
            if facts.is_on_gpu and log.device is None:
                log.device = DeviceMarks(log.spool, CudaClock())
        self._forwards = 0
        if facts.is_on_gpu and log.steps == WAITS_FROM:
            for owner, name in self._waits():
                self._wrap(owner, name, self._wait)
        elif log.steps == WAITS_TO:
            self._stop_waits()
        # Batches that are read before the training begins are not profiled.
        if self._window is not None and (log.thread is not None or "torch._dynamo" in sys.modules):
            self._window.after_step()
        if log.steps > log.looks_until or log.steps in EARLY_PULSES:
            facts.pulse(log.steps)

    def _hear_savers(self) -> None:
        """Wraps functions of libraries that save in their own way. They exist only where a script has imported them."""
        for module, path in SAVERS:
            *owners, name = path.split(".")
            owner: Any = sys.modules.get(module)
            for attribute in owners:
                owner = getattr(owner, attribute, None)
            if hasattr(owner, name):
                self._wrap(owner, name, functools.partial(self._timed, SAVING))

    def _waits(self) -> list[tuple[Any, str]]:
        return [*((torch.Tensor, name) for name in WAITING_METHODS), (torch.cuda, "synchronize")]

    def _stop_waits(self) -> None:
        for owner, name in self._waits():
            self._undo.pop((id(owner), name), lambda: None)()

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Hears calls that make the host wait for the device, and the line they come from. GradScaler's own look at
        gradients is left out."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or (args and isinstance(args[0], torch.Tensor) and not args[0].is_cuda):
                return original(*args, **kwargs)
            began = perf_counter()
            result = original(*args, **kwargs)
            if self.log is not None and self.log.hears() and not self.log.optimizers:
                self.attempt(self.facts.saw_wait, original.__name__, perf_counter() - began)
            return result

        return wrapper


class Span:
    """It writes down a call of the script's from its beginning to its end. Calls within it belong to it and are not heard.

    The key and the value may be set before its end, and so may the time of it. An error of the script's passes through.
    """

    __slots__ = ("_kind", "_log", "_watch", "_within", "at", "key", "value")

    def __init__(self, watch: Watch, log: Recorder, kind: float, key: float = 0.0, value: float = 0.0) -> None:
        self._watch, self._log, self._kind = watch, log, kind
        self._within, log.inside = log.inside, get_ident()
        self.key, self.value = key, 0.0
        self.at: float | None = None
        watch.attempt(log.put, kind, key, value)

    def __enter__(self) -> Span:
        return self

    def __exit__(self, *_: object) -> None:
        log = self._log
        # If this is false, another thread has begun to train meanwhile, and this one loads ahead for it.
        if log.hears():
            log.inside = self._within
            self._watch.attempt(log.put, self._kind + 1, self.key, self.value, self.at)


class NextBatch:
    """It finds out whether a script without a loader makes its next batch between a forward pass and the backward pass.

    Of the functions that are called there by whoever called the model, the one that returned what the model is fed next has
    made the next batch. A batch that is made without a function of its own cannot be told apart from the loss.
    """

    def __init__(self) -> None:
        self._callers: set[int] = set()
        """These are the ids of the frames that called the model."""
        self._has_followed = False
        """It is true if a backward pass has come since the last forward pass."""
        self._made: list[tuple[float, set[int]]] = []
        """Each entry says how long a call took, and which ids the tensors have that it returned."""

    def listen(self, frame: Any) -> None:
        """Call this after a forward pass. Nothing is listened to if no backward pass followed the last one."""
        follows, self._has_followed = self._has_followed, False
        if follows and sys.gettrace() is None:
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
                self._made.append((perf_counter() - began, {id(one) for one in tensors_in(result)}))
            return leave

        return leave

    def fetched_s(self, args: Any, kwargs: Any) -> float:
        """Returns the seconds that making these inputs took."""
        made, self._made = self._made, []
        inputs = {id(one) for one in tensors_in((args, kwargs))} if made else set()
        return sum(seconds for seconds, tensors in made if tensors & inputs)


def _is_traced() -> bool:
    """Returns True if the compiler or `make_fx` asks for gradients. They only write down what is computed later."""
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    return TracingContext.try_get() is not None or (tracing is not None and tracing.get_proxy_mode() is not None)


_installed: Watch | None = None


def installed() -> Watch | None:
    """Returns the object that watches this process, if there is one."""
    return _installed


def install(folder: str, *, profiles: bool | None = None, in_program: bool = False) -> Watch:
    """Starts watching this process. A second call, as by a library's callback in a script that is watched already, changes nothing.

    `in_program` means that the program has run for a while and may have made its model.
    """
    global _installed
    if _installed is None or _installed.log is None:
        _installed = Watch(folder, profiles="REDLINE_WATCH_PROFILE" in os.environ if profiles is None else profiles)
        _installed.install()
        if in_program:
            _installed.find_existing()
    return _installed
