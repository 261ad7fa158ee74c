"""The stopwatch of a watched process, with a clock that the test turns."""

from __future__ import annotations

import struct
import threading
from typing import Any

import pytest

from redline.bench.watch.clock import BACKWARD, COLUMNS, COPY, DATA, FORWARD, OPTIMIZER, PHASES, Clock


class Rows:
    """Takes the place of the files."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def row(self, values: tuple[float, ...]) -> None:
        struct.pack(f"<{len(COLUMNS)}d", *values)
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))


class Loop:
    """A training loop whose parts take as long as they are told to."""

    def __init__(self) -> None:
        self.at = 100.0
        self.spool = Rows()
        self.clock = Clock(self.spool, now=lambda: self.at)  # type: ignore[arg-type]
        self.optimizer = object()

    def spend(self, phase: int | None, seconds: float) -> None:
        if phase is None:
            self.at += seconds
            return
        self.clock.enter(phase)
        self.at += seconds
        self.clock.leave()

    def forward(self, seconds: float, *, gradients: bool = True, evaluates: bool = False) -> None:
        self.clock.saw_forward(1, 8.0, gradients)
        self.clock.enter(FORWARD)
        self.at += seconds
        self.clock.leave_forward(gradients, evaluates)

    def step(self, seconds: float, optimizer: object | None = None) -> None:
        self.clock.enter_optimizer(optimizer or self.optimizer)
        self.at += seconds
        self.clock.leave_optimizer(optimizer or self.optimizer)

    def batch(self, seconds: float) -> None:
        self.spend(DATA, seconds)
        self.clock.saw_batch(8.0)

    @property
    def last(self) -> dict[str, float]:
        return self.spool.rows[-1]


def phases(row: dict[str, float]) -> dict[str, Any]:
    return {name: pytest.approx(row[name]) for name in PHASES}


def test_every_moment_of_a_step_belongs_to_one_phase() -> None:
    loop = Loop()
    loop.batch(2.0)
    loop.spend(None, 0.5)
    loop.spend(COPY, 0.25)
    loop.forward(3.0)
    loop.spend(None, 0.125)  # the loss
    loop.spend(BACKWARD, 5.0)
    loop.step(1.0)
    assert phases(loop.last) == {
        "data": 2.0, "copy": 0.25, "forward": 3.125, "backward": 5.0, "optimizer": 1.0, "other": 0.5,
    }  # fmt: skip
    assert loop.last["loaded"] == 8


def test_forward_and_backward_in_an_optimizers_closure_are_not_the_optimizers() -> None:
    """As Lightning and LBFGS do it."""
    loop = Loop()
    loop.batch(1.0)
    loop.clock.enter_optimizer(loop.optimizer)
    loop.forward(2.0)
    loop.spend(BACKWARD, 3.0)
    loop.at += 0.5
    loop.clock.leave_optimizer(loop.optimizer)
    assert (loop.last["forward"], loop.last["backward"], loop.last["optimizer"]) == (2.0, 3.0, 0.5)


def test_a_closure_that_is_called_again_sees_the_same_samples() -> None:
    """LBFGS: several evaluations per step."""
    loop = Loop()
    loop.clock.enter_optimizer(loop.optimizer)
    for _ in range(3):
        loop.forward(1.0)
        loop.clock.saw_backward(0.5)
        loop.spend(BACKWARD, 1.0)
    loop.clock.leave_optimizer(loop.optimizer)
    assert (loop.last["fed"], loop.last["backwards"]) == (8.0, 3.0)


def test_what_comes_between_batch_and_model_is_not_the_models() -> None:
    loop = Loop()
    for _ in range(2):
        loop.batch(1.0)
        loop.spend(None, 4.0)
        loop.forward(2.0)
        loop.spend(None, 0.5)
        loop.spend(OPTIMIZER, 0.25)  # zero_grad between the loss and its backward pass
        loop.spend(None, 0.5)
        loop.spend(BACKWARD, 1.0)
        loop.step(1.0)
    assert (loop.last["other"], loop.last["before"], loop.last["forward"]) == (4.0, 4.0, 3.0)


def test_without_an_optimizer_a_step_ends_when_the_next_batch_is_used() -> None:
    loop = Loop()
    for _ in range(3):
        loop.spend(None, 1.0)
        loop.forward(2.0)
        loop.clock.saw_backward(0.5)
        loop.spend(BACKWARD, 3.0)
    assert [row["caller"] for row in loop.spool.rows] == [-2.0, -2.0]
    assert (loop.last["forward"], loop.last["backward"], loop.last["other"]) == (2.0, 3.0, 1.0)
    loop.step(1.0)  # the first call of an optimizer: from now on it counts the steps
    loop.forward(2.0)
    loop.clock.saw_backward(0.5)
    loop.spend(BACKWARD, 3.0)
    loop.forward(2.0)
    assert [row["caller"] for row in loop.spool.rows] == [-2.0, -2.0, 0.0]


def test_the_thread_that_trains_may_be_followed_by_another() -> None:
    loop, heard = Loop(), []

    def train() -> None:
        heard.append(loop.clock.hears())
        loop.step(1.0)

    for _ in range(2):
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert heard == [True, True]
    loop.step(1.0)
    other = threading.Thread(target=lambda: heard.append(loop.clock.hears()))
    assert loop.clock.hears()  # the others have ended
    other.start()
    other.join()
    assert heard == [True, True, False]


def test_a_wrapped_optimizer_takes_one_step() -> None:
    loop = Loop()
    loop.clock.enter_optimizer(loop.optimizer)
    loop.step(1.0, optimizer=object())
    loop.clock.leave_optimizer(loop.optimizer)
    assert len(loop.spool.rows) == 1


def test_evaluation_between_steps_is_set_aside() -> None:
    loop = Loop()
    for _ in range(2):
        loop.batch(1.0)
        loop.forward(1.0)
        loop.spend(BACKWARD, 1.0)
        loop.step(1.0)
        for _ in range(3):
            loop.batch(7.0)
            loop.forward(7.0, gradients=False)
        loop.spend(DATA, 0.0)  # the loader says that it is through
    assert loop.last["paused"] == pytest.approx(42.0)
    assert (loop.last["data"], loop.last["forward"], loop.last["loaded"]) == (1.0, 1.0, 8.0)


def test_a_teacher_without_gradients_is_part_of_the_step() -> None:
    loop = Loop()
    for _ in range(2):
        loop.batch(1.0)
        loop.forward(2.0, gradients=False)
        loop.forward(3.0)
        loop.spend(BACKWARD, 1.0)
        loop.step(1.0)
    assert (loop.last["paused"], loop.last["forward"]) == (0.0, 5.0)


def test_batches_of_one_step_are_added_up() -> None:
    loop = Loop()
    for _ in range(4):
        loop.batch(1.0)
        loop.forward(1.0)
        loop.spend(BACKWARD, 2.0)
    loop.step(1.0)
    assert (loop.last["loaded"], loop.last["backward"], loop.last["data"]) == (32.0, 8.0, 4.0)


def test_a_model_that_is_not_found_is_all_between_data_and_backward() -> None:
    loop = Loop()
    loop.batch(1.0)
    loop.spend(None, 4.0)
    loop.spend(BACKWARD, 2.0)
    loop.step(1.0)
    assert (loop.last["forward"], loop.last["other"]) == (4.0, 0.0)


def test_an_optimizer_that_raised_does_not_hold_up_the_next_step() -> None:
    loop = Loop()
    loop.clock.enter_optimizer(loop.optimizer)
    loop.at += 1.0
    loop.step(1.0)
    assert len(loop.spool.rows) == 1
    assert loop.clock.phase not in (OPTIMIZER, FORWARD)


def test_what_watching_takes_is_not_charged_to_the_next_step() -> None:
    loop = Loop()

    def look(_: Clock) -> None:
        loop.at += 30.0

    loop.clock.on_step = look
    for _ in range(2):
        loop.batch(1.0)
        loop.step(1.0)
    assert loop.last["paused"] == 30.0
    assert sum(loop.last[name] for name in PHASES) == 2.0


def test_steps_that_a_program_counts_itself() -> None:
    loop = Loop()
    for _ in range(3):
        loop.batch(1.0)
        loop.clock.end_by_hand()
    assert [row["data"] for row in loop.spool.rows] == [1.0, 1.0, 1.0]
    beside = Loop()
    beside.step(1.0)
    beside.clock.end_by_hand()
    assert len(beside.spool.rows) == 1  # the optimizer counts them
