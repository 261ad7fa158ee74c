"""The stopwatch of a watched process: exclusive time per phase, one row per optimizer step.

On a GPU the same transitions are also marked on its stream in some of the steps;
the times between those marks say what the device waited for or worked on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Any, Self

from .events import MOST_WAITING, MOST_WAITING_S, NOTHING, Events
from .marks import STEP
from .spool import PHASES, Spool

DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, OTHER = range(len(PHASES))

BY_HAND, BY_BACKWARD, BY_BATCH = -1, -2, -3
MOST_MODELS = 50
"""As many bits as a 64-bit float holds without loss, and a few less."""
PULSE_S = 1.0
"""Between two looks at what costs more than a few microseconds."""
OWN_TIME_S = 0.05
"""A look after a step that takes longer, as the profiler's do, is not charged to the next one."""
EARLY_STEPS = 20
"""After each of the first ones there is a look at the program; then after one per `PULSE_S`."""
MOST_VIEWS = 3
"""Of the same samples in one forward pass: more calls of a model are steps in time, each with samples of its own."""
EARLY_QUESTIONS = 4
"""Steps in which more is asked, as for the shapes of the inputs."""


class Stopwatch(Events):
    """Charges time to the phase that is on top; phases may nest, as a forward pass in an optimizer's closure does."""

    # In the order of use: what a step touches lies together.
    __slots__ = (  # noqa: RUF023
        "phase", "_spent", "_below", "on_phase", "_loss_is_open", "_nothing_seen", "_before", "_backwards", "_gradients", "_is_alone",
        "_evaluated", "_trained", "_snapshot", "_loaded", "_models", "_fed", "_views", "_called", "_is_replay", "_optimizers", "_aside", "busy_until",
        "_next_look", "on_step", "has_updated", "_owner", "data_thread", "is_by_batch", "_held", "_captured",
    )  # fmt: skip

    def __init__(self, spool: Spool, *, now: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(spool, now)
        self.on_step: Callable[[Any], None] = lambda clock: None
        """Called outside a step's time: after each of the first ones, each that is profiled, and one per `PULSE_S`."""
        self.has_updated: Callable[[], bool] = lambda: True
        """Whether the weights have changed since the last step ended: else a backward pass only added to their gradients."""
        self.busy_until = EARLY_STEPS
        """Until this step it is called after each of them."""
        self._next_look = -math.inf
        self.on_phase: Callable[[int | None], None] | None = None
        """Called with the phase that begins, or None where one ends; set while a profile is captured."""
        self._is_alone = True
        """Neither optimizer nor backward pass was ever heard: a batch is all that a step shows, as with a compiled step."""
        self.is_by_batch = False
        """The steps so far are batches of which nothing more was heard."""
        self.phase = OTHER
        """What the time is charged to now."""
        self._owner: threading.Thread | None = None
        """The thread that trains; None until that is known."""
        self.data_thread: int | None = None
        """The one that asked for batches before that."""
        self._held: tuple[float, dict[str, Any]] | None = None
        """While a graph is recorded: since when, and the step in which that happens."""
        self._captured: int | None = None
        """The last optimizer whose step was recorded."""
        self._below: list[int] = []
        self._optimizers: list[int] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self._spent = [0.0] * len(PHASES)
        self._loss_is_open = False
        """A forward pass has ended and its backward pass has not begun: what happens is the loss, forward work too."""
        self._nothing_seen = True
        """Neither forward nor backward pass since the batch came: a model that is not known may run now."""
        self._before: float | None = None
        self._aside: list[float] | None = None
        self._looked = self._paused = 0.0
        self._snapshot: tuple[float, list[float], float] | None = None
        self._evaluated = self._trained = 0
        """Forward passes of this batch, without and with gradients, and backward passes."""
        self._loaded = 0.0
        self._fed: dict[int, float] = {}
        """Samples, by the ids of the models."""
        self._views: dict[int, tuple[int, float]] = {}
        """How often each of them was fed a batch of one size since the last backward pass."""
        self._called: dict[int, float] = {}
        """Samples that compiled functions were called with, which may be all that is heard of a forward pass."""
        self._models = 0
        self._backwards = self._gradients = 0
        """Backward passes, and calls that return gradients instead of adding them up."""
        self._is_replay = False

    @property
    def knows_no_optimizer(self) -> bool:
        """Nor does the program count its steps itself: backward passes tell where they end."""
        return not self._numbers

    # What is noted

    def got_batch(self, samples: float, at: float) -> None:
        self.leave(at)
        if self.phase != DATA:  # else a loader reads from another one, and its samples are the same
            self.saw_batch(samples)

    def begin_forward(self, module: int, samples: float, with_gradients: bool, is_training: bool, at: float) -> None:
        self.forwards += 1
        self.saw_forward(module, samples, with_gradients, is_training, at)
        self.enter(FORWARD, at)

    def begin_backward(self, at: float) -> None:
        self._end_by_next(at)
        self.saw_backward()
        self.enter(BACKWARD, at)

    def begin_gradients(self, at: float) -> None:
        self._end_by_next(at)
        self.saw_gradients()
        self.enter(BACKWARD, at)

    def _rehearsal(self, spool: Spool) -> Self:
        other = type(self)(spool, now=lambda: 0.0)
        other._numbers, other._bits, other.thread = dict(self._numbers), dict(self._bits), self.thread
        other._is_alone, other.busy_until, other._next_look, other._since = False, 0, math.inf, 0.0
        return other

    # Phases

    def hears(self) -> bool:
        """Whether this thread is the one that trains; until that is known, every thread is.

        Where the one that trained has ended, another may go on.
        """
        if self.thread is None or self.thread == threading.get_ident():
            return True
        if self._owner is not None and self._owner.is_alive():
            return False
        self._own_thread()
        self.phase, self._below, self._optimizers, self._since = OTHER, [], [], None
        del self.times[:], self.events[:], self._ends[:]
        self.is_direct, self.is_inside, self._is_fresh, self.is_resting, self._rests = True, False, False, False, 0
        self._begin_step()
        return True

    def _own_thread(self) -> None:
        self.thread, self._owner = threading.get_ident(), threading.current_thread()
        if self.data_thread not in (None, self.thread):  # a thread of its own loads ahead: its time is not this one's
            self._below, self.phase, self._loaded, self.is_inside = [], OTHER, 0.0, False
            self._spent[DATA] = 0.0

    def enter(self, phase: int, at: float | None = None) -> None:
        now, current = self._now() if at is None else at, self.phase
        self._is_fresh = False
        if phase == DATA:
            if self.phase != OTHER:
                self.can_rest = False
            if not self._numbers:
                self._end_by_data(now)
        elif (self._loss_is_open or (phase == BACKWARD and self._nothing_seen)) and current in (OTHER, OPTIMIZER):
            current = FORWARD
        if self._since is not None:
            self._spent[current] += now - self._since
            if self._marks is not None:
                self._mark(current)
        if phase == DATA:
            if self._evaluated and not self._trained:
                self._set_evaluation_aside(now)
            if self._snapshot is None or self._trained:
                self._snapshot = (now, self._spent[:], self._loaded)
            self._evaluated = self._trained = 0
            self._loss_is_open, self._nothing_seen = False, True
        else:
            if phase == BACKWARD:
                self._loss_is_open = self._nothing_seen = False
            if self._before is None and phase != OPTIMIZER:
                self._before = max(self._spent[OTHER] - self._looked, 0.0)
        self._since = now
        self._below.append(self.phase)
        self.phase = phase
        if self.on_phase is not None:
            self.on_phase(phase)

    def leave(self, at: float | None = None) -> None:
        now, current = self._now() if at is None else at, self.phase
        if self._since is not None:
            self._spent[current] += now - self._since
        self._since = now
        if self._marks is not None:
            self._mark(current)
        self.phase = self._below.pop() if self._below else OTHER
        if self.on_phase is not None:
            self.on_phase(None)

    def leave_forward(self, with_gradients: bool, evaluates: bool, at: float | None = None) -> None:
        """`evaluates`: the model that is trained ran in evaluation mode."""
        self.leave(at)
        if with_gradients:
            self._loss_is_open, self._nothing_seen = True, False
        elif evaluates and not self._backwards and not self._fed:
            self._aside = list(self._spent)

    def _charge(self, phase: int, now: float) -> None:
        self._is_fresh = False
        if self._since is not None:
            self._spent[phase] += now - self._since
        self._since = now
        if self._marks is not None:
            self._mark(phase)

    # What happens within a step

    def saw_batch(self, samples: float) -> None:
        self._is_fresh = False
        self._loaded += samples

    def saw_forward(
        self, module: int, samples: float, with_gradients: bool, is_training: bool = True, at: float | None = None
    ) -> None:
        """`module`: its id; to be said before its time begins, as a step may end with it."""
        # Gradients that are no backward pass may be those of inner steps: where there is a loader, it tells what a step is.
        if not self._numbers and (self._backwards or (self._gradients and not self._loaded)):
            self._end_by_backward(self._now() if at is None else at)
        if with_gradients and is_training:
            self._trained += 1
        else:
            self._evaluated += 1
            self.can_rest = False
        bit = self._bits.get(module)
        if bit is None:
            bit = self._bits[module] = 1 << (len(self._bits) % MOST_MODELS)
        self._models |= bit
        if with_gradients and not self._is_replay:
            self._feed(module, samples)

    def _feed(self, module: int, samples: float) -> None:
        """Two or three batches of one size for one backward pass are views of the same samples, as of pairs and triplets."""
        times, size = self._views.get(module, (0, 0.0))
        if samples > 1 and size == samples:
            self._views[module] = (times + 1, size)
            new = 0.0 if times < MOST_VIEWS else samples * MOST_VIEWS if times == MOST_VIEWS else samples
        else:
            self._views[module] = (1, samples)
            new = samples
        self._fed[module] = self._fed.get(module, 0.0) + new

    def fed_instead(self, module: int, samples: float, told: float) -> None:
        """The call that ends now was fed so many, and not what was counted when it began."""
        if module in self._fed:
            self._fed[module] += told - samples
            self._views[module] = (1, told)

    def saw_call(self, function: int, samples: float, at: float) -> None:
        """Of a compiled function, whose time is known when its backward pass begins."""
        if self.phase == OTHER:
            self._charge(OTHER, at)
            self._called[function] = self._called.get(function, 0.0) + samples

    def _samples_fed(self) -> float:
        return min((self._fed or self._called).values(), default=0.0)

    def saw_backward(self, loss: float | None = None) -> None:
        if self.thread is None:
            self._own_thread()
        self._is_alone = False
        self._views.clear()
        self._backwards += 1
        self._trained += 1
        if loss is not None:
            self.loss = loss
        # A closure that an optimizer calls again, as LBFGS does, sees the same samples again.
        self._is_replay = bool(self._optimizers)

    def saw_gradients(self) -> None:
        """`torch.autograd.grad` and `torch.func` return them."""
        self._is_alone = False
        self._gradients += 1
        self._trained += 1

    def _set_evaluation_aside(self, now: float) -> None:
        """A batch that only went through forward passes without gradients was evaluated: its time is no training's."""
        if self._snapshot is not None:
            began, spent, loaded = self._snapshot
            self._paused += now - began
            self._spent, self._loaded = spent, loaded
            self._snapshot, self._marks, self._aside = None, None, None

    def skipping(self, look: Callable[..., None], *args: Any) -> None:
        """Make a look at the program that no phase pays for."""
        self.work_through()
        self._charge(self.phase, self._now())
        began = self._since or 0.0
        look(*args)
        self._since = self._now()
        self._paused += self._since - began

    # Steps

    def _end_by_data(self, now: float) -> None:
        if self._backwards or self._gradients:
            self._end_by_backward(now)
        elif self._is_alone and self._loaded and not (self._evaluated or self._trained) and self.phase == OTHER:
            self._charge(OTHER, now)
            self._finish(BY_BATCH)

    def _end_by_backward(self, now: float, gap: int = OTHER) -> None:
        """Where no optimizer of torch is called, a step ends when the batch after its backward pass is used or fetched."""
        if self.phase == OTHER and not self._optimizers and self.has_updated():
            self._charge(gap, now)
            self._finish(BY_BACKWARD)

    def _end_by_next(self, now: float) -> None:
        """Of bare weights without a loader only backward passes are heard: what lies between them is mostly the forward pass."""
        if (self._backwards or self._gradients) and not (self._numbers or self._models or self._loaded):
            self._end_by_backward(now, FORWARD)

    def _finish(self, number: int) -> None:
        ended = self._since or 0.0
        if number != BY_BATCH:
            if self.is_by_batch:  # batches that were read before the training began were no steps
                self.steps, self._pending, self._marks = 0, [], None
            self._is_alone = self.is_by_batch = False
        elif not self.steps:
            self.is_by_batch = True
        self.spool.row(
            (
                STEP,
                self.steps,
                ended,
                *self._spent,
                self._paused,
                self._loaded,
                self._samples_fed(),
                self._backwards,
                self.loss,
                number,
                self.profiled,
                self._models,
                self._before or 0.0,
                *(self._aside or NOTHING),
            )
        )
        if self._marks is not None:
            self._pending.append((self.steps, self._marks))
            self._marks = None
        self._below, self.phase, self.loss = [], OTHER, math.nan
        self._begin_step()
        self._after_row(ended)

    def _after_row(self, ended: float) -> None:
        self.steps += 1
        self._is_fresh = True
        if self._is_behind:
            self._looked = 0.0
            return
        self.is_asking = self.steps < EARLY_QUESTIONS
        if self.steps <= self.busy_until or ended >= self._next_look or self.profiled:
            self.is_asking = self.is_asking or ended >= self._next_look
            self._next_look = ended + PULSE_S
            self.on_step(self)
            later = self._now()
            if later - ended > OWN_TIME_S:  # the profiler's, or a first look at the model: no step of theirs
                self._paused, self._since, ended = later - ended, later, later
        self._looked = self._now() - ended
        if self.device is not None:
            self._mark_next(self.device)
        self.is_direct = (
            self.is_asking
            or self.steps < self.busy_until
            or self.profiled
            or self._marks is not None
            or not self._numbers
        )
        self._work_at = ended + MOST_WAITING_S
        self._most_waiting = MOST_WAITING if self.device is None else min(self._until_mark(), MOST_WAITING)
