"""Where the watched process is listened to: DataLoader, model, autograd, optimizer, copies.

Nothing of the user's is changed in a way that a checkpoint, `torch.jit` or `torch.compile` would see: methods of classes
are wrapped, no hook is registered on a module, and under the compiler every wrapper is the function it wraps.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .clock import Clock
from .facts import Facts
from .listener import is_compiling
from .spool import PHASES, Spool
from .stepping import Stepping
from .stopwatch import OPTIMIZER

DESCRIBED_AFTER = (1, 10)
"""Steps after which model, device and flags are looked at: by then what is used has been used."""
EARLY_PULSES = (2, 10, 18)
"""A script of a few steps is described too."""
SYNCS_FROM, SYNCS_TO = 6, 16
WAITING_METHODS = ("item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__")
PREFIX = "redline/"
"""Of the phases in a captured window."""


class Watch(Stepping):
    """Everything that is in place in this process; `remove` takes it out again."""

    def __init__(self, folder: str, windows: str = "") -> None:
        super().__init__()
        self._folder = folder
        self._windows = windows
        self._undo_waits: list[Callable[[], None]] = []
        self._start()

    def _start(self) -> None:
        """Also in a forked child, which may be a loader's worker or may train itself: no file until it does."""
        spool = Spool(self._folder)
        self.facts = Facts(spool)
        self.clock = Clock(spool)
        self.clock.on_step = self._after_step
        self.clock.has_updated = self._updates.happened
        self.windows = Windows(self.clock, self._windows)
        self.clock.busy_until = max(self.clock.busy_until, self.windows.after)

    def install(self) -> None:
        self._install_loading()
        self._install_computing()
        self._install_stepping()
        self._wrap(os, "_exit", self._exit)
        atexit.register(self._close_clock)
        self._undo.append(lambda: atexit.unregister(self._close_clock))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def _exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """`os._exit`, after which nothing runs any more."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self.clock is not None:
                self._work_through(self.clock)
            return original(*args, **kwargs)

        return wrapper

    def _forked(self) -> None:
        if self.clock is not None:
            self._start()

    def _close_clock(self) -> None:
        """What is still to be read and told when the program or its loop has ended.

        A program that ends while torch's profiler runs ends with a segmentation fault.
        """
        self._try(self.windows.close)
        if self.clock is not None and self.clock.steps:
            self._try(self.clock.close)
            if self.facts is not None and self.clock is not None:
                self._try(self.facts.pulse, self.clock.steps)

    def remove(self) -> None:
        self._close_clock()
        self.clock = None
        self._stop_listening_for_waits()
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._watched.clear()
        self._stepped.clear()

    # After each step

    def _after_step(self, clock: Clock) -> None:
        facts = self.facts
        if facts is None:
            return
        if clock.steps in DESCRIBED_AFTER:
            self._models.find_frozen()
            facts.describe(self._models.roots(facts.trained()), clock.forwards > 0)
            clock.device = clock.device or facts.device_clock()
        # A model that was found while its first step ended has not been heard yet.
        if clock.forwards == 0 and self._models.found and clock.steps > self._found_at + 1:
            self._look_around()
        clock.forwards = 0
        if facts.is_on_gpu and clock.steps == SYNCS_FROM:
            self._listen_for_waits()
        elif clock.steps >= SYNCS_TO:
            self._stop_listening_for_waits()
        if not clock.is_by_batch or (self._models.found and "torch._dynamo" in sys.modules):
            self.windows.after_step()  # what is read before the training begins is not to be profiled
        if clock.steps > clock.busy_until or clock.steps in EARLY_PULSES:
            facts.pulse(clock.steps)

    def _listen_for_waits(self) -> None:
        """For a few steps: what makes the host wait for the device, and from which line."""
        if self._undo_waits:
            return
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
            began = time.perf_counter()
            result = original(*args, **kwargs)
            clock = self.heard()
            if clock is not None and self.facts is not None:
                is_scaler = clock.phase == OPTIMIZER  # GradScaler asks whether gradients overflowed
                self._try(self.facts.saw_wait, original.__name__, time.perf_counter() - began, is_scaler)
            return result

        return wrapper


class Windows:
    """A short capture with torch's profiler in the middle of a run: of `steps` steps, from step `after` on."""

    def __init__(self, clock: Clock, settings: str) -> None:
        asked: dict[str, Any] = json.loads(settings) if settings else {}
        self._clock = clock
        self._steps = int(asked.get("steps", 0))
        self.after = int(asked.get("after", 0))
        self._is_taken = False
        self._profiler: Any = None
        self._left = 0
        self._ranges: list[Any] = []

    def after_step(self) -> None:
        if self._profiler is not None:
            self._advance()
        elif self._is_due():
            self._open()

    def _is_due(self) -> bool:
        return bool(self._steps) and self._clock.steps >= self.after and not self._is_taken

    def _open(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_initialized():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        path = self._clock.spool.path("-0.trace.json")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler = torch.profiler.profile(
                activities=activities,
                schedule=torch.profiler.schedule(wait=0, warmup=1, active=self._steps, repeat=1),
                on_trace_ready=lambda profiler: profiler.export_chrome_trace(path),
                record_shapes=True,
            )
            self._profiler.start()
        self._left = self._steps + 1
        self._path = path
        self._clock.profiled = True
        self._clock.on_phase = self._phase

    def _advance(self) -> None:
        self._left -= 1
        if self._left in (0, self._steps) and torch.cuda.is_initialized():
            torch.cuda.synchronize()  # no work without its launch in the trace
        self._close_ranges()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._profiler.step()
            if self._left == 0:
                self._profiler.stop()
                self._finish()

    def _finish(self) -> None:
        self._profiler = None
        self._clock.profiled, self._clock.on_phase = False, None
        self._clock.spool.fact("window", path=self._path, steps=self._steps, ended_with=self._clock.steps)
        self._is_taken = True

    def _phase(self, phase: int | None) -> None:
        if phase is None:
            if self._ranges:
                self._ranges.pop().__exit__(None, None, None)
            return
        mark = torch.profiler.record_function(PREFIX + PHASES[phase])
        mark.__enter__()
        self._ranges.append(mark)

    def _close_ranges(self) -> None:
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)

    def close(self) -> None:
        """The script ends inside a window: what was captured of it is dropped."""
        if self._profiler is not None:
            profiler, self._profiler = self._profiler, None
            self._clock.profiled, self._clock.on_phase = False, None
            self._close_ranges()
            profiler.on_trace_ready = None
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                profiler.stop()


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
