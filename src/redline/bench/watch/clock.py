"""The stopwatch of a watched process: exclusive time per phase, one row per optimizer step, written at once.

Each row goes to the kernel with one system call, so whatever ends the process (`os._exit`, a signal, running out of
memory) loses nothing that was timed. On a GPU the same transitions are also marked on its stream in some of the steps;
the times between those marks say what the device waited for or worked on.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

PHASES = ("data", "copy", "forward", "backward", "optimizer", "other")
DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(6)

COLUMNS = (
    "kind", "step", "ended", *PHASES, "paused", "loaded", "fed", "backwards", "loss", "caller", "profiled",
)  # fmt: skip
"""Of a row, all 64-bit floats. `kind`: 0 a step by the host's clock, 1 the phases of a step by the device's clock."""
ROW = struct.Struct(f"<{len(COLUMNS)}d")
STEP, DEVICE = 0.0, 1.0

PULSE_S = 1.0
"""Between two looks at what costs more than a few microseconds."""
OWN_TIME_S = 1e-3
"""What watching takes after a step and more is not charged to the next one."""
MARKED_STEPS = 4
"""One step in so many is also timed by the device's clock."""


class Spool:
    """The files of one process: rows of steps, and facts as lines of JSON. Nothing is created before the first write."""

    def __init__(self, folder: str) -> None:
        self._name = os.path.join(folder, f"{os.getpid()}-{time.time_ns()}")
        self.folder = folder
        self._rows: int | None = None
        self._facts: int | None = None

    def row(self, values: tuple[float, ...]) -> None:
        if self._rows is None:
            self._rows = self._open(".steps")
            os.write(self._rows, json.dumps({"columns": COLUMNS}).encode() + b"\n")
        os.write(self._rows, ROW.pack(*values))

    def fact(self, kind: str, **fields: Any) -> None:
        if self._facts is None:
            self._facts = self._open(".facts")
        os.write(self._facts, json.dumps({"kind": kind, "at": time.time(), **fields}, default=str).encode() + b"\n")

    def path(self, suffix: str) -> str:
        return self._name + suffix

    def _open(self, suffix: str) -> int:
        return os.open(self._name + suffix, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


class Clock:
    """Charges time to the phase that is on top; phases may nest, as a forward pass in an optimizer's closure does."""

    def __init__(self, spool: Spool, *, now: Callable[[], float] = time.perf_counter) -> None:
        self.spool = spool
        self.steps = 0
        self.on_step: Callable[[Clock], None] = lambda clock: None
        """Called after each step, outside its time."""
        self.on_phase: Callable[[int | None], None] | None = None
        """Called with the phase that begins, or None where one ends; set while a profile is captured."""
        self.mark: Callable[[], Any] | None = None
        """A mark on the device's stream; set once a device is known."""
        self.profiled = False
        self._now = now
        self._thread: int | None = None
        self._since: float | None = None
        self._spent = [0.0] * len(PHASES)
        self._current = OTHER
        self._below: list[int] = []
        self._optimizers: list[int] = []
        self._optimizer_numbers: dict[int, int] = {}
        self._forward_seen = False
        self._tail = True
        self._paused = 0.0
        self._snapshot: tuple[float, list[float], float] | None = None
        self._batch_forwards = [0, 0]
        self._loaded = 0.0
        self._fed: dict[int, float] = {}
        self._backwards = 0
        self._loss = math.nan
        self._marks: list[tuple[int, Any]] | None = None
        self._pending: list[tuple[int, list[tuple[int, Any]]]] = []

    # Phases

    def hears(self) -> bool:
        """Whether this thread is the one that trains; until that is known, every thread is."""
        return self._thread is None or self._thread == threading.get_ident()

    @property
    def phase(self) -> int:
        return self._current

    def enter(self, phase: int) -> None:
        now = self._now()
        if self._since is not None:
            # Between a forward pass and its backward pass the loss is computed: that is forward work.
            is_loss = self._tail and self._current in (OTHER, OPTIMIZER) and phase in (COPY, FORWARD, BACKWARD)
            is_loss = is_loss and (self._forward_seen or phase == BACKWARD)
            self._charge(FORWARD if is_loss else self._current, now)
        if phase == DATA:
            self._set_evaluation_aside(now)
            self._forward_seen = False
        if phase in (DATA, BACKWARD, OPTIMIZER):
            self._tail = phase == DATA
        self._since = now
        self._below.append(self._current)
        self._current = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def leave(self) -> None:
        now = self._now()
        self._charge(self._current, now)
        if self._current == FORWARD:
            self._tail = True
        self._current = self._below.pop() if self._below else OTHER
        if self.on_phase is not None:
            self.on_phase(None)

    def _charge(self, phase: int, now: float) -> None:
        if self._since is not None:
            self._spent[phase] += now - self._since
        self._since = now
        if self._marks is not None and self.mark is not None:
            self._marks.append((phase, self.mark()))

    # What happens within a step

    def saw_batch(self, samples: float) -> None:
        self._loaded += samples

    def saw_forward(self, module: int, samples: float, with_gradients: bool) -> None:
        self._batch_forwards[with_gradients] += 1
        self._forward_seen = self._forward_seen or with_gradients
        if with_gradients:
            self._fed[module] = self._fed.get(module, 0.0) + samples

    def saw_backward(self, loss: float) -> None:
        self._thread = self._thread or threading.get_ident()
        self._backwards += 1
        self._batch_forwards[1] += 1
        self._loss = loss

    def _set_evaluation_aside(self, now: float) -> None:
        """A batch that only went through forward passes without gradients was evaluated: its time is no training's."""
        evaluated, trained = self._batch_forwards
        if self._snapshot is not None and evaluated and not trained:
            began, spent, loaded = self._snapshot
            self._paused += now - began
            self._spent, self._loaded = spent, loaded
            self._snapshot, self._marks = None, None
        if self._snapshot is None or trained:
            self._snapshot = (now, list(self._spent), self._loaded)
        self._batch_forwards = [0, 0]

    def skipping(self, look: Callable[..., None], *args: Any) -> None:
        """Make a look at the program that no phase pays for."""
        self._charge(self._current, self._now())
        began = self._since or 0.0
        look(*args)
        self._since = self._now()
        self._paused += self._since - began

    # Steps

    def enter_optimizer(self, optimizer: object) -> None:
        self._thread = self._thread or threading.get_ident()
        if id(optimizer) in self._optimizers:  # the last call of its step raised
            self._optimizers, self._below, self._current = [], [], OTHER
        self._optimizers.append(id(optimizer))
        self.enter(OPTIMIZER)

    def leave_optimizer(self, optimizer: object) -> None:
        if not self._optimizers:
            return
        self.leave()
        self._optimizers.pop()
        if not self._optimizers:
            self._finish(id(optimizer))

    def end_by_hand(self) -> None:
        """The program says that a step has ended; without effect where optimizers tell it."""
        if any(number >= 0 for number in self._optimizer_numbers.values()):
            return
        self._optimizer_numbers.setdefault(id(self), -1)
        self._charge(self._current, self._now())
        self._finish(id(self))

    def _finish(self, optimizer: int) -> None:
        number = self._optimizer_numbers.setdefault(optimizer, len(self._optimizer_numbers))
        ended = self._since or 0.0
        fed = min(self._fed.values(), default=0.0)
        self.spool.row(
            (
                STEP,
                self.steps,
                ended,
                *self._spent,
                self._paused,
                self._loaded,
                fed,
                self._backwards,
                self._loss,
                number,
                float(self.profiled),
            )
        )
        self._keep_marks()
        self.steps += 1
        self._spent = [0.0] * len(PHASES)
        self._below, self._current = [], OTHER
        self._forward_seen, self._tail, self._paused = False, True, 0.0
        self._snapshot, self._batch_forwards = None, [0, 0]
        self._loaded, self._fed, self._backwards, self._loss = 0.0, {}, 0, math.nan
        self.on_step(self)
        later = self._now()
        if later - ended > OWN_TIME_S:  # the profiler's, or a first look at the model: no step of theirs
            self._paused, self._since = later - ended, later

    # The device's clock

    def _keep_marks(self) -> None:
        if self._marks is not None:
            self._pending.append((self.steps, self._marks))
            self._marks = None
        if self.mark is None:
            return
        if (self.steps + 1) % MARKED_STEPS == 0 and not self.profiled:
            self._marks = [(OTHER, self.mark())]
        while self._pending and self._pending[0][1][-1][1].query():
            step, marks = self._pending.pop(0)
            self._write_device_times(step, marks)

    def _write_device_times(self, step: int, marks: list[tuple[int, Any]]) -> None:
        spent = [0.0] * len(PHASES)
        for (_, earlier), (phase, later) in itertools.pairwise(marks):
            spent[phase] += earlier.elapsed_time(later) / 1e3
        blank = (0.0,) * (len(COLUMNS) - 3 - len(PHASES))
        self.spool.row((DEVICE, step, self._since or 0.0, *spent, *blank))
