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
    "kind", "step", "ended", *PHASES, "paused", "loaded", "fed", "backwards", "loss", "caller", "profiled", "models",
    "before", *(f"aside_{name}" for name in PHASES),
)  # fmt: skip
"""Of a row, all 64-bit floats.

`kind`: 0 a step by the host's clock, 1 the phases of a step by the device's clock: its `ended` is then the device's time
since the moment `paused` of the host's clock; 2 what has passed since the last step when a loader was through. `caller`: the optimizer's number; -1
a step that the program counted itself, -2 one that ended with its backward pass, because no optimizer was called yet.
`models`: the modules that were called, as bits. `before`: of `other`, what passed before the batch was first used.
`aside_*`: what had passed when the last forward pass in evaluation mode ended, before the training went on.
"""
BY_HAND, BY_BACKWARD = -1, -2
MOST_MODELS = 50
"""As many bits as a 64-bit float holds without loss, and a few less."""
ROW = struct.Struct(f"<{len(COLUMNS)}d")
STEP, DEVICE, TAIL = 0.0, 1.0, 2.0
NOTHING = (0.0,) * len(PHASES)

PULSE_S = 1.0
"""Between two looks at what costs more than a few microseconds."""
OWN_TIME_S = 1e-3
"""What watching takes after a step and more is not charged to the next one."""
MARKED_STEPS = 4
"""One step in this many is also timed by the device's clock."""


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
        self.phase = OTHER
        """What the time is charged to now."""
        self._thread: int | None = None
        self._owner: threading.Thread | None = None
        """The thread that trains; None until that is known."""
        self._now = now
        self._since: float | None = None
        self._below: list[int] = []
        self._optimizers: list[int] = []
        self._numbers: dict[int, int] = {}
        self._bits: dict[int, int] = {}
        self._marks: list[tuple[int, Any]] | None = None
        self._pending: list[tuple[int, list[tuple[int, Any]]]] = []
        self._anchor: tuple[float, Any] | None = None
        """A moment by the host's clock, and the mark that was then put on the device's stream."""
        self._begin_step()

    def _begin_step(self) -> None:
        self._spent = [0.0] * len(PHASES)
        self._loss_is_open = False
        """A forward pass has ended and its backward pass has not begun: what happens is the loss, forward work too."""
        self._nothing_seen = True
        """Neither forward nor backward pass since the batch came: a model that is not known may run now."""
        self._before: float | None = None
        self._aside: list[float] | None = None
        self._paused = 0.0
        self._snapshot: tuple[float, list[float], float] | None = None
        self._batch_forwards = [0, 0]
        self._loaded = 0.0
        self._fed: dict[int, float] = {}
        self._models = 0
        self._backwards = 0
        self._is_replay = False
        self._loss = math.nan

    # Phases

    def hears(self) -> bool:
        """Whether this thread is the one that trains; until that is known, every thread is.

        Where the one that trained has ended, another may go on.
        """
        if self._thread is None or self._thread == threading.get_ident():
            return True
        if self._owner is not None and self._owner.is_alive():
            return False
        self._own_thread()
        self.phase, self._below, self._optimizers, self._since = OTHER, [], [], None
        self._begin_step()
        return True

    def _own_thread(self) -> None:
        self._thread, self._owner = threading.get_ident(), threading.current_thread()

    def enter(self, phase: int) -> None:
        now = self._now()
        if phase == DATA:
            self._end_by_backward(now)
        if self._since is not None:
            current = self.phase
            if (
                phase != DATA
                and current in (OTHER, OPTIMIZER)
                and (self._loss_is_open or (phase == BACKWARD and self._nothing_seen))
            ):
                current = FORWARD
            self._charge(current, now)
        if phase == DATA:
            self._set_evaluation_aside(now)
            self._loss_is_open, self._nothing_seen = False, True
        elif phase != OPTIMIZER and self._before is None:
            self._before = self._spent[OTHER]
        if phase == BACKWARD:
            self._loss_is_open = self._nothing_seen = False
        self._since = now
        self._below.append(self.phase)
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def leave(self) -> None:
        self._charge(self.phase, self._now())
        self.phase = self._below.pop() if self._below else OTHER
        if self.on_phase is not None:
            self.on_phase(None)

    def leave_forward(self, with_gradients: bool, evaluates: bool) -> None:
        """`evaluates`: the model that is trained ran in evaluation mode."""
        self.leave()
        if with_gradients:
            self._loss_is_open, self._nothing_seen = True, False
        elif evaluates and not self._backwards and not self._fed:
            self._aside = list(self._spent)

    def _charge(self, phase: int, now: float) -> None:
        if self._since is not None:
            self._spent[phase] += now - self._since
        self._since = now
        if self._marks is not None and self.mark is not None:
            self._marks.append((phase, self.mark()))

    # What happens within a step

    def saw_batch(self, samples: float) -> None:
        self._loaded += samples

    def saw_forward(self, module: int, samples: float, with_gradients: bool, is_training: bool = True) -> None:
        """`module`: its id; to be said before its time begins, as a step may end with it."""
        self._end_by_backward(None)
        self._batch_forwards[with_gradients and is_training] += 1
        bit = self._bits.get(module)
        if bit is None:
            bit = self._bits[module] = 1 << (len(self._bits) % MOST_MODELS)
        self._models |= bit
        if with_gradients and not self._is_replay:
            self._fed[module] = self._fed.get(module, 0.0) + samples

    def saw_backward(self, loss: float) -> None:
        if self._thread is None:
            self._own_thread()
        self._backwards += 1
        self._batch_forwards[1] += 1
        self._loss = loss
        # A closure that an optimizer calls again, as LBFGS does, sees the same samples again.
        self._is_replay = bool(self._optimizers)

    def _set_evaluation_aside(self, now: float) -> None:
        """A batch that only went through forward passes without gradients was evaluated: its time is no training's."""
        evaluated, trained = self._batch_forwards
        if self._snapshot is not None and evaluated and not trained:
            began, spent, loaded = self._snapshot
            self._paused += now - began
            self._spent, self._loaded = spent, loaded
            self._snapshot, self._marks, self._aside = None, None, None
        if self._snapshot is None or trained:
            self._snapshot = (now, list(self._spent), self._loaded)
        self._batch_forwards = [0, 0]

    def skipping(self, look: Callable[..., None], *args: Any) -> None:
        """Make a look at the program that no phase pays for."""
        self._charge(self.phase, self._now())
        began = self._since or 0.0
        look(*args)
        self._since = self._now()
        self._paused += self._since - began

    # Steps

    def enter_optimizer(self, optimizer: object) -> None:
        if self._thread is None:
            self._own_thread()
        if id(optimizer) in self._optimizers:  # the last call of its step raised
            self._optimizers, self._below, self.phase = [], [], OTHER
        self._optimizers.append(id(optimizer))
        self.enter(OPTIMIZER)

    def leave_optimizer(self, optimizer: object) -> None:
        if not self._optimizers:
            return
        self.leave()
        self._optimizers.pop()
        if not self._optimizers:
            number = self._numbers.get(id(optimizer))
            if number is None:
                number = self._numbers[id(optimizer)] = len(self._numbers)
            self._finish(number)

    def end_by_hand(self) -> None:
        """The program says that a step has ended; without effect where optimizers tell it."""
        if any(number >= 0 for number in self._numbers.values()):
            return
        self._numbers[id(self)] = BY_HAND
        self._charge(self.phase, self._now())
        self._finish(BY_HAND)

    def _end_by_backward(self, now: float | None) -> None:
        """Where no optimizer of torch is called, a step ends when the batch after its backward pass is used or fetched."""
        if self._numbers or not self._backwards or self.phase != OTHER or self._optimizers:
            return
        self._charge(OTHER, self._now() if now is None else now)
        self._finish(BY_BACKWARD)

    def _finish(self, number: int) -> None:
        ended = self._since or 0.0
        self.spool.row(
            (
                STEP,
                self.steps,
                ended,
                *self._spent,
                self._paused,
                self._loaded,
                min(self._fed.values()) if self._fed else 0.0,
                self._backwards,
                self._loss,
                number,
                self.profiled,
                self._models,
                self._before or 0.0,
                *(self._aside or NOTHING),
            )
        )
        if self.mark is not None:
            self._keep_marks()
        self.steps += 1
        self._below, self.phase = [], OTHER
        self._begin_step()
        self.on_step(self)
        later = self._now()
        if later - ended > OWN_TIME_S:  # the profiler's, or a first look at the model: no step of theirs
            self._paused, self._since = later - ended, later

    def saw_end_of_data(self) -> None:
        """A loader is through. Where no step follows, what has passed since the last one belongs to the loop all the same."""
        if self.steps:
            blank = (0.0,) * (len(COLUMNS) - 4 - len(PHASES))
            self.spool.row((TAIL, self.steps, self._since or 0.0, *self._spent, self._paused, *blank))

    # The device's clock

    def _keep_marks(self) -> None:
        if self._marks is not None:
            self._pending.append((self.steps, self._marks))
            self._marks = None
        if self.mark is not None and self._anchor is None:
            self._anchor = (self._now(), self.mark())
        if self.mark is not None and (self.steps + 1) % MARKED_STEPS == 0 and not self.profiled:
            self._marks = [(OTHER, self.mark())]
        while self._pending and self._pending[0][1][-1][1].query():
            step, marks = self._pending.pop(0)
            self._write_device_times(step, marks)

    def _write_device_times(self, step: int, marks: list[tuple[int, Any]]) -> None:
        spent = [0.0] * len(PHASES)
        for (_, earlier), (phase, later) in itertools.pairwise(marks):
            spent[phase] += earlier.elapsed_time(later) / 1e3
        assert self._anchor is not None
        began, anchor = self._anchor
        blank = (0.0,) * (len(COLUMNS) - 4 - len(PHASES))
        self.spool.row((DEVICE, step, anchor.elapsed_time(marks[-1][1]) / 1e3, *spent, began, *blank))
