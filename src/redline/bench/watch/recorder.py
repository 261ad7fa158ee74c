"""Writes down what the hooks hear: one step of k in full, of the others only batches and ends.

The recorder decides nothing about steps and phases: `analyze/watch.py` makes both of the rows, when all of them are known.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from threading import get_ident
from typing import Any, Protocol

from .spool import CLOSED, DEVICE, PAUSE, PAUSE_ENDED, RESTART, Spool

perf_counter = time.perf_counter

EARLY_STEPS = 20
"""The first steps are all heard in full: a script of a few steps is described too."""
HEARD_S, MARKED_S = 25e-6, 150e-6
"""Seconds of the training thread for hearing a step in full, as `benchmarks/watch_cost.py` measures them, and with marks on a GPU."""
MOST_SHARE = 0.005
"""Hearing steps in full may take this share of the training's time."""
EVERY = (1, 3, 5, 7, 13, 31, 101, 307)
"""One step of so many is heard in full. Odd numbers and primes, so that optimizers that take turns, and what a script does
every tenth step, are met as often as they happen."""
LOOK_S = 1.0
"""Facts that cost more than a few microseconds are looked at this often."""
OWN_LOOK_S = 0.05
"""A look that takes longer, as the first one at a large model, is no time of the script's."""


class DeviceClock(Protocol):
    """Marks on a device's stream."""

    def mark(self) -> Any:
        """Returns a mark after what has been issued so far, or None where there cannot be one, as while a graph is recorded."""

    def release(self, marks: list[Any]) -> None:
        """These are not needed any more."""

    def is_capturing(self) -> bool: ...


class Recorder:
    """Writes rows for the thread that trains, and knows where in its step the program is."""

    def __init__(self, spool: Spool, *, now: Callable[[], float] = perf_counter) -> None:
        self.spool = spool
        self.now = now
        self.inside: int | None = None
        """The thread that is within a forward or backward pass or a loader now: what it calls there belongs to them."""
        self.thread: int | None = None
        """The thread that trains; None until a backward pass or an optimizer shows it. Until then every thread is heard."""
        self._owner = threading.current_thread()
        self._first: int | None = None
        """The thread that was heard first."""
        self.steps = 0
        self.is_full = True
        """Everything is written down of this step."""
        self.has_missed = False
        """Something of this step was not written down."""
        self.knows_optimizer = False
        """An optimizer ends the steps, or the program itself does. Else every row is needed to tell where a step ends."""
        self.optimizers = 0
        """Steps of optimizers that are going on, one within the other."""
        self._heard = 0
        """A hash of what was heard in this step, times apart."""
        self._usual: dict[float, int] = {}
        """That hash of the last full step, by what ended the step: only steps that repeat need not be heard in full."""
        self.is_profiled = False
        self.on_row: Callable[[float], None] | None = None
        """Hears every kind of row, while a profile is captured."""
        self.on_step: Callable[[], None] = lambda: None
        """Looks at the program after each of the first steps, each that is profiled, and once per `LOOK_S`."""
        self.looks_until = EARLY_STEPS
        self._next_look = self._next_full = 0.0
        self._ended = now()
        self.device: DeviceClock | None = None
        self._marks: list[tuple[int, Any]] = []
        """The numbers of this step's rows, and the marks that were set with them."""
        self._pending: list[list[tuple[int, Any]]] = []
        self._anchor: Any = None

    def hears(self) -> bool:
        """True if this thread is the one that trains. When that one has ended, another may go on."""
        thread = get_ident()
        if thread == self.thread:
            return True
        if self.thread is None:
            self._first = self._first or thread
            return True
        if self._owner.is_alive():
            return False
        self.trains()
        return True

    def trains(self) -> None:
        """This thread trains: what others did before, such as loading ahead, is no time of its steps."""
        if self.thread == get_ident():
            return
        is_first = self.thread is None
        self.thread, self._owner = get_ident(), threading.current_thread()
        if is_first:
            self.steps = 0  # batches that were only read were no steps
        if not is_first or self._first not in (None, get_ident()):
            self.inside, self.optimizers = None, 0
            self.put(RESTART, 0.0, float(not is_first))

    def put(self, kind: float, key: float = 0.0, value: float = 0.0, at: float | None = None) -> None:
        self.spool.put(kind, key, value, self.now() if at is None else at)
        if self.is_full:
            self._heard = hash((self._heard, kind, value))
            if self.device is not None:
                self._mark(self.device)
        if self.on_row is not None:
            self.on_row(kind)

    def step_ended(self, caller: float = -1.0) -> None:
        """To be called after the row that ended the step; `caller` is the optimizer that did."""
        now = self.now()
        self.steps += 1
        took_s, self._ended = now - self._ended, now
        if self.steps <= self.looks_until or now >= self._next_look or self.is_profiled:
            self._look(now)
        if self.device is not None:
            self._read_marks(self.device)
        self.has_missed = False
        if self.is_full:
            is_usual = self._usual.get(caller) == self._heard
            self._usual[caller] = self._heard
            cost_s = HEARD_S if self.device is None else MARKED_S
            every = next((every for every in EVERY if cost_s / every <= MOST_SHARE * took_s), EVERY[-1])
            self._next_full = self.steps + (every - 1 if is_usual and self.steps >= EARLY_STEPS else 0)
        self._heard = 0
        self.is_full = self.is_profiled or not self.knows_optimizer or self.steps >= self._next_full

    def _look(self, began: float) -> None:
        self._next_look = began + LOOK_S
        self.on_step()
        ended = self.now()
        if ended - began > OWN_LOOK_S or self.is_profiled:
            self.put(PAUSE, 0.0, float(self.is_profiled), began)
            self.put(PAUSE_ENDED, at=ended)
        self._ended = ended

    # The device's clock

    def _mark(self, device: DeviceClock) -> None:
        number = self.spool.rows - 1
        if self._anchor is None:
            self._set_anchor(device)
        mark = device.mark()
        if mark is not None:
            self._marks.append((number, mark))

    def _set_anchor(self, device: DeviceClock) -> None:
        """Wait for the device, once: only where it has nothing left to do its clock can be set by the host's."""
        anchor = device.mark()
        if anchor is not None:
            anchor.synchronize()
            self._anchor = anchor
            self.spool.put(DEVICE, -1.0, 0.0, self.now())

    def _read_marks(self, device: DeviceClock, *, waits: bool = False) -> None:
        if self._marks:
            self._pending.append(self._marks)
            self._marks = []
        if device.is_capturing():
            return
        while self._pending and (waits or self._pending[0][-1][1].query()):
            marks = self._pending.pop(0)
            if waits:
                marks[-1][1].synchronize()
            for number, mark in marks:
                self.spool.put(DEVICE, float(number), self._anchor.elapsed_time(mark) / 1e3, self.now())
            device.release([mark for _, mark in marks])

    def close(self) -> None:
        if self.device is not None:
            self._read_marks(self.device, waits=True)
        self.spool.put(CLOSED, 0.0, 0.0, self.now())
