"""This module writes down what the hooks hear. One step in k is heard in full. Of the others it writes only
batches, ends and unusual events.

The recorder decides nothing about steps and phases: `analyze/watch.py` makes both of the rows, when all of them are known.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from time import perf_counter
from typing import Any

from .spool import CLOSED, DEVICE, PAUSE, RESTART, Spool

EARLY_STEPS = 20
"""The first steps are all heard in full, because a script of only a few steps is described too."""
HEARD_S, MARKED_S = 25e-6, 150e-6
"""Hearing a step in full costs the training thread this many seconds, without and with marks on a GPU.
`benchmarks/watch_cost.py` measures both."""
MOST_SHARE = 0.005
"""Hearing steps in full may take this share of the training's time."""
EVERY = (1, 3, 5, 7, 13, 31, 101, 307)
"""One step in so many is heard in full: the first of these numbers that keeps within `MOST_SHARE`. They are odd, and all but 1
are prime, so that optimizers that take turns, and what a script does every tenth step, are met as often as they happen."""
LOOK_S = 1.0
"""We look at facts that cost more than a few microseconds once in this many seconds."""
OWN_LOOK_S = 0.05
"""A look that takes longer than this, as the first one at a large model does, is not counted as the script's time."""


class Recorder:
    """It writes rows for the thread that trains, and knows where in its step the program is."""

    def __init__(self, spool: Spool, on_step: Callable[[], None] = lambda: None) -> None:
        self.spool = spool
        self._on_step = on_step
        """It is called after each of the first steps, after each that is profiled, and once per `LOOK_S`, to look at the program."""
        self.thread: threading.Thread | None = None
        """This is the thread that trains. It is None until a backward pass or an optimizer shows it, and until then every
        thread is heard."""
        self._first: int | None = None
        """This is the thread that was heard first."""
        self.inside: int | None = None
        """This is the thread that is within a call that is written down. What it calls there belongs to that call."""
        self.steps = 0
        self.is_full = self.is_whole = True
        """`is_full` says that the rest of this step is written down, `is_whole` that all of the step is."""
        self.knows_end = False
        """It is true if an optimizer ends the steps, or the program itself does. Otherwise every row is needed to tell
        where a step ends."""
        self.optimizers = 0
        """It counts the steps of optimizers that are going on, one within the other."""
        self.is_profiled = False
        self.on_row: Callable[[float], None] | None = None
        """While a profile is captured, this is called with every kind of row."""
        self.looks_until = EARLY_STEPS
        self.device: DeviceMarks | None = None
        self._heard = 0
        """This is a hash of what was heard in this step. Times are left out."""
        self._usual: dict[float, int] = {}
        """It maps what ended a step to the hash of the last full step of that kind, because a step that repeats need not be
        heard in full."""
        self._next_look, self._ended = 0.0, perf_counter()
        self._next_full = 0

    def hears(self) -> bool:
        """Returns True if this thread is the one that trains. When that one has ended, another may take over."""
        thread = get_ident()
        if self.thread is None:
            self._first = self._first or thread
        elif self.thread.ident != thread:
            if self.thread.is_alive():
                return False
            self.trains()
        return True

    def trains(self) -> None:
        """Marks this thread as the one that trains. What others did before, such as loading ahead, does not count for its steps."""
        before, self.thread = self.thread, threading.current_thread()
        if before is None:
            self.steps = 0  # batches that were only read do not count as steps
        if self.thread.ident != (self._first if before is None else before.ident):
            self.inside, self.optimizers = None, 0
            self.put(RESTART)

    def put(self, kind: float, key: float = 0.0, value: float = 0.0, at: float | None = None) -> None:
        self.spool.put(kind, key, value, perf_counter() if at is None else at)
        if self.is_full:
            self._heard = hash((self._heard, kind, value))
            if self.device is not None:
                self.device.mark()
        if self.on_row is not None:
            self.on_row(kind)

    def step_ended(self, caller: float = -1.0) -> None:
        """Call this after the row that ended the step. `caller` is the optimizer that ended it."""
        now = perf_counter()
        self.steps += 1
        took_s, self._ended = now - self._ended, now
        if self.steps <= self.looks_until or now >= self._next_look or self.is_profiled:
            self._look(now)
        if self.device is not None:
            self.device.read()
        if self.is_full:
            is_usual = self._usual.get(caller) == self._heard
            self._usual[caller] = self._heard
            cost_s = HEARD_S if self.device is None else MARKED_S
            every = next((every for every in EVERY if cost_s / every <= MOST_SHARE * took_s), EVERY[-1])
            self._next_full = self.steps + (every - 1 if is_usual and self.steps >= EARLY_STEPS else 0)
        self._heard = 0
        self.is_full = self.is_whole = self.is_profiled or not self.knows_end or self.steps >= self._next_full

    def _look(self, began: float) -> None:
        self._next_look = began + LOOK_S
        self._on_step()
        ended = perf_counter()
        if ended - began > OWN_LOOK_S or self.is_profiled:
            self.put(PAUSE, 0.0, float(self.is_profiled), began)
            self.put(PAUSE + 1, at=ended)
        self._ended = ended

    def close(self) -> None:
        if self.device is not None:
            self.device.read(waits=True)
        self.put(CLOSED)


class DeviceMarks:
    """These are the marks that were set with rows. They are kept until the device has reached them."""

    def __init__(self, spool: Spool, clock: Any) -> None:
        self._spool, self._clock = spool, clock
        """`_clock` sets a `mark` after what has been issued so far, and takes back marks that are not needed any more (`release`)."""
        self._marks: list[tuple[int, Any]] = []
        """These are the numbers of this step's rows, with their marks."""
        self._pending: list[list[tuple[int, Any]]] = []
        self._anchor: Any = None

    def mark(self) -> None:
        number, mark = self._spool.rows - 1, self._clock.mark()
        # The device's clock can be set by the host's only when the device has nothing left to do.
        if self._anchor is None:
            mark.synchronize()
            self._anchor, mark = mark, self._clock.mark()
            self._spool.put(DEVICE, -1.0, 0.0, perf_counter())
        self._marks.append((number, mark))

    def read(self, *, waits: bool = False) -> None:
        if self._marks:
            self._pending.append(self._marks)
            self._marks = []
        while self._pending and (waits or self._pending[0][-1][1].query()):
            marks = self._pending.pop(0)
            if waits:
                marks[-1][1].synchronize()
            for number, mark in marks:
                self._spool.put(DEVICE, float(number), self._anchor.elapsed_time(mark) / 1e3, perf_counter())
            self._clock.release([mark for _, mark in marks])
