"""The device's clock in a watched process: marks on its stream at the transitions of some of the steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Protocol

from .spool import COLUMNS, PHASES, Spool

STEP, DEVICE, TAIL = 0.0, 1.0, 2.0
"""Kinds of rows."""
MARKED_EARLY, EARLY_MARKS = 3, 60
"""One in so many of the first steps is also timed by the device's clock."""
MARKED_LATER = (13, 31, 101)
"""Of those after them one in so many, the fewer the shorter they are.

Primes, so that what a script does every tenth or hundredth step is met as often as it happens.
"""
MARKING_S, MARKING_SHARE = 150e-6, 0.002
"""What marking a step takes the host, about, and the share of its time that it may take."""


class DeviceClock(Protocol):
    """Marks on a device's stream."""

    def mark(self) -> Any:
        """A mark after what has been issued so far; None where there cannot be one, as while a graph is captured."""

    def release(self, marks: list[Any]) -> None:
        """These are not needed any more."""

    def is_capturing(self) -> bool: ...


class DeviceMarks:
    """Marks steps, and writes a row with the device's times once it has passed their marks."""

    __slots__ = (
        "_anchor",
        "_last_turn",
        "_marks",
        "_now",
        "_pending",
        "_rhythm",
        "device",
        "profiled",
        "spool",
        "steps",
    )

    def __init__(self, spool: Spool, now: Callable[[], float]) -> None:
        self.spool = spool
        self.steps = 0
        self.profiled = False
        self.device: DeviceClock | None = None
        """Set once a device is known."""
        self._now = now
        self._marks: list[tuple[int, Any]] | None = None
        """Of a step that is marked: what was charged until then, and the mark."""
        self._pending: list[tuple[int, list[tuple[int, Any]]]] = []
        self._anchor: tuple[float, Any] | None = None
        """A moment by the host's clock, and the mark that was then put on the device's stream."""
        self._rhythm = MARKED_LATER[0]
        self._last_turn: tuple[int, float] | None = None
        """The last step that was marked, and when."""

    def _mark(self, phase: int) -> None:
        mark = self.device.mark() if self.device is not None else None
        if mark is None or self._marks is None:
            self._marks = None
        else:
            self._marks.append((phase, mark))

    def _until_mark(self) -> int:
        """Steps until the next one that is marked."""
        return self._every() - self.steps % self._every()

    def _every(self) -> int:
        return MARKED_EARLY if self.steps < EARLY_MARKS else self._rhythm

    def _set_rhythm(self) -> None:
        now = self._now()
        if self._last_turn is not None:
            steps, began = self._last_turn
            step_s = (now - began) / max(self.steps - steps, 1)
            rare_enough = (each for each in MARKED_LATER if MARKING_S / each <= MARKING_SHARE * step_s)
            self._rhythm = next(rare_enough, MARKED_LATER[-1])
        self._last_turn = (self.steps, now)

    def _mark_next(self, device: DeviceClock) -> None:
        """Read the marks that the device has passed, and mark the next step where it is its turn."""
        is_turn = self.steps % self._every() == 0 and not self.profiled
        if not (is_turn or self._pending) or device.is_capturing():
            return
        if self._anchor is None:
            self._set_anchor(device)
        while self._pending and self._pending[0][1][-1][1].query():
            self._write_device_times(device, *self._pending.pop(0))
        if is_turn:
            self._set_rhythm()
            self._marks = []
            self._mark(PHASES.index("other"))

    def _set_anchor(self, device: DeviceClock) -> None:
        """Wait for the device, once: only where it has nothing left to do its mark is set at a known moment.

        Until then it works for the script, so this belongs to a step's time.
        """
        mark = device.mark()
        if mark is not None:
            mark.synchronize()
            self._anchor = (self._now(), mark)

    def _write_device_times(self, device: DeviceClock, step: int, marks: list[tuple[int, Any]]) -> None:
        if self._anchor is not None:
            spent = [0.0] * len(PHASES)
            for (_, earlier), (phase, later) in itertools.pairwise(marks):
                spent[phase] += earlier.elapsed_time(later) / 1e3
            began, anchor = self._anchor
            blank = (0.0,) * (len(COLUMNS) - 4 - len(PHASES))
            self.spool.row((DEVICE, step, anchor.elapsed_time(marks[-1][1]) / 1e3, *spent, began, *blank))
        device.release([mark for _, mark in marks])

    def read_marks(self) -> None:
        """Wait for the device and read the marks that are left."""
        if self.device is not None and not self.device.is_capturing():
            for step, marks in self._pending:
                marks[-1][1].synchronize()
                self._write_device_times(self.device, step, marks)
            self._pending = []
