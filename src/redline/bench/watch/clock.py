"""When a step ends: with its optimizer, with a recorded graph, or by the program's own count."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from .events import NOTHING
from .marks import TAIL
from .spool import COLUMNS, PHASES, Spool
from .stopwatch import BACKWARD, BY_BACKWARD, BY_HAND, COPY, DATA, FORWARD, OPTIMIZER, OTHER, Stopwatch

HELD = (
    "phase", "_below", "_optimizers", "_spent", "_loss_is_open", "_nothing_seen", "_before", "_looked", "_aside", "_paused",
    "_snapshot", "_evaluated", "_trained", "_loaded", "_fed", "_views", "_called", "_models", "_backwards", "_gradients", "_is_replay", "loss",
)  # fmt: skip
"""Of a step, while a graph is recorded in the middle of it."""


class Captured(NamedTuple):
    """What was recorded as a graph, and happens each time it is replayed."""

    optimizer: int | None
    """The one whose step comes last, by its id."""
    backwards: int
    models: int
    fed: float


class Pass(NamedTuple):
    """What was known when a loader began to be gone through."""

    began: float
    spent: list[float]
    paused: float
    loaded: float
    trained: tuple[int, int, int]


class Clock(Stopwatch):
    """The stopwatch of a whole program."""

    __slots__ = ("_pass", "_set_aside_at")

    def __init__(self, spool: Spool, *, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(spool, now=now)
        self._pass: Pass | None = None
        """The newest one over a loader."""
        self._set_aside_at = 0
        """Steps at the end of the last pass in which nothing was trained."""

    # Optimizers

    def enter_optimizer(self, optimizer: object, at: float | None = None) -> None:
        self.begin_optimizer(id(optimizer), at)

    def begin_optimizer(self, optimizer: int, at: float | None = None) -> None:
        """`optimizer`: its id."""
        if self.thread is None:
            self._own_thread()
        if optimizer in self._optimizers:  # the last call of its step raised
            self._optimizers, self._below, self.phase = [], [], OTHER
        self._optimizers.append(optimizer)
        self.enter(OPTIMIZER, at)

    def leave_optimizer(self, optimizer: object, at: float | None = None) -> None:
        self.end_optimizer(id(optimizer), at)

    def end_optimizer(self, optimizer: int, at: float | None = None) -> None:
        if not self._optimizers:
            return
        self.leave(at)
        self._optimizers.pop()
        # Hooks that update each parameter as soon as it has its gradient: the step ends with the backward pass.
        if self._held is not None:  # it is recorded, and takes place later
            self._captured = optimizer
        elif not self._optimizers and self.phase != BACKWARD:
            self._finish(self._number(optimizer))

    def end_by_hand(self) -> None:
        """The program says that a step has ended; without effect where optimizers tell it."""
        if any(number >= 0 for number in self._numbers.values()):
            return
        self.work_through()
        self._numbers[id(self)] = BY_HAND
        self._charge(self.phase, self._now())
        self._finish(BY_HAND)

    # Graphs

    @property
    def is_capturing(self) -> bool:
        return self._held is not None

    def begin_capture(self) -> None:
        """What happens until `end_capture` is only recorded; the step in which that happens waits."""
        self.work_through()
        self.is_direct = True
        self._charge(self.phase, self._now())
        self._held = (self._since or 0.0, {name: getattr(self, name) for name in HELD})
        self._captured, self._optimizers, self._below = None, [], []
        self._begin_step()

    def end_capture(self) -> Captured:
        assert self._held is not None
        captured = Captured(self._captured, self._backwards + self._gradients, self._models, self._samples_fed())
        (began, held), self._held = self._held, None
        for name, value in held.items():
            setattr(self, name, value)
        self._since = self._now()
        self._paused += self._since - began
        return captured

    def enter_replay(self, captured: Captured) -> None:
        self.work_through()
        if captured.backwards and self._backwards and not self._numbers:
            self._end_by_backward(self._now())
        self.enter(FORWARD)

    def leave_replay(self, captured: Captured) -> None:
        """A graph with an optimizer in it is a whole step."""
        self.leave()
        self._nothing_seen = False
        self._models |= captured.models
        self._trained += 1
        if captured.fed:
            self._fed[id(captured)] = self._fed.get(id(captured), 0.0) + captured.fed
        if captured.backwards:
            self.saw_backward()
        if captured.optimizer is not None and not self._optimizers:
            self._finish(self._number(captured.optimizer))

    def leave_exhausted(self, at: float | None = None) -> None:
        """A loader is through. Nobody waited for a batch then: its workers end.

        Where no step follows, what has passed since the last one belongs to the loop all the same.
        """
        self.phase = OTHER
        self.leave(at)
        if not self.steps:
            return
        self._set_pass_aside()
        self._write_tail()
        is_training = not self._paused and not self._evaluated
        if is_training and self._anchor is not None and self.device is not None:
            mark = self.device.mark()
            if mark is not None:  # when the device is through as well
                self._pending.append((self.steps - 1, [(OTHER, mark)]))

    def begin_pass(self) -> None:
        """A loader is gone through anew: what was only read before that is no part of what follows."""
        if self.is_by_batch:
            self._write_tail()
        self._pass = Pass(self._since or 0.0, self._spent[:], self._paused, self._loaded, self._has_trained)

    @property
    def _has_trained(self) -> tuple[int, int, int]:
        """Is another one after each backward pass and step."""
        return self.steps, self._backwards, self._gradients

    def _set_pass_aside(self) -> None:
        """A pass over a loader in which nothing was trained is validation, whoever was fed: an average of the weights, or a
        model that is not heard. One before each step belongs to the step."""
        whole, self._pass = self._pass, None
        if whole is None or whole.trained != self._has_trained or not self._numbers:
            return
        if self.steps - self._set_aside_at > 1:
            self._paused = whole.paused + (self._since or 0.0) - whole.began
            self._spent, self._loaded = whole.spent, whole.loaded
            self._snapshot, self._marks, self._aside = None, None, None
            self._evaluated = 0
        self._set_aside_at = self.steps

    def _write_tail(self) -> None:
        blank = (0.0,) * (len(COLUMNS) - 4 - 2 * len(PHASES))
        self.spool.row(
            (TAIL, self.steps, self._since or 0.0, *self._spent, self._paused, *blank, *(self._aside or NOTHING))
        )

    def close(self) -> None:
        """The program or its loop has ended: so has a step whose end only the next batch would have shown."""
        self.work_through()
        has_ended = self._backwards or (self._gradients and not self._loaded)
        if has_ended and not self._numbers and not self._optimizers and self.phase == OTHER and self.has_updated():
            self._finish(BY_BACKWARD)
        self.read_marks()


# What hooks note after the time: a method and its arguments, to which the time is added when the events are worked through.
GOT_BATCH, BEGIN_FORWARD, LEAVE_FORWARD, SAW_CALL = (
    Clock.got_batch,
    Clock.begin_forward,
    Clock.leave_forward,
    Clock.saw_call,
)
BEGIN_OPTIMIZER, END_OPTIMIZER = Clock.begin_optimizer, Clock.end_optimizer
ENTER_DATA, ENTER_COPY, ENTER_OPTIMIZER = (Clock.enter, DATA), (Clock.enter, COPY), (Clock.enter, OPTIMIZER)
ENTER_FORWARD, LEAVE, EXHAUSTED = (Clock.enter, FORWARD), (Clock.leave,), (Clock.leave_exhausted,)
BEGIN_BACKWARD, BEGIN_GRADIENTS = (Clock.begin_backward,), (Clock.begin_gradients,)
LEFT_TRAINING = (Clock.leave_forward, True, False)
