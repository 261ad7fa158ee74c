"""The stopwatch of a watched process, with a clock that the test turns."""

from __future__ import annotations

import struct
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from redline.analyze.watch import rates_of
from redline.bench.watch.clock import Clock
from redline.bench.watch.spool import CHUNK, COLUMNS, PHASES, ROW, Spool
from redline.bench.watch.stopwatch import BACKWARD, COPY, DATA, EARLY_STEPS, FORWARD, OPTIMIZER
from redline.launch.watch import SpoolReader


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


def test_gradients_without_a_backward_pass_make_a_step_per_batch() -> None:
    """torch.func, and updates by hand with torch.autograd.grad; inner steps on one batch are one step."""
    loop = Loop()
    for _ in range(3):
        loop.batch(1.0)
        for _ in range(2):
            loop.forward(2.0)
            loop.clock.saw_gradients()
            loop.spend(BACKWARD, 3.0)
    loop.spend(DATA, 0.5)
    assert [row["caller"] for row in loop.spool.rows] == [-2.0, -2.0, -2.0]
    assert (loop.last["data"], loop.last["forward"], loop.last["backward"]) == (1.0, 4.0, 6.0)
    without = Loop()
    for _ in range(3):
        without.forward(2.0)
        without.clock.saw_gradients()
        without.spend(BACKWARD, 3.0)
    assert len(without.spool.rows) == 2


def test_batches_of_which_nothing_more_is_heard_are_steps() -> None:
    """Neither model nor optimizer is heard inside compiled code, or where gradients are worked out by hand."""
    loop = Loop()
    for _ in range(3):
        loop.batch(1.0)
        loop.spend(None, 4.0)
    loop.spend(DATA, 0.5)
    assert [row["caller"] for row in loop.spool.rows] == [-3.0, -3.0, -3.0]
    assert loop.clock.is_by_batch


def test_batches_that_were_read_before_the_training_are_no_steps() -> None:
    loop = Loop()
    for _ in range(30):
        loop.batch(1.0)
    for _ in range(2):
        loop.batch(1.0)
        loop.forward(2.0)
        loop.clock.saw_backward(0.5)
        loop.spend(BACKWARD, 3.0)
        loop.step(1.0)
    assert not loop.clock.is_by_batch
    assert loop.clock.steps == 2  # the looks after the first steps are at the training
    assert [row["step"] for row in loop.spool.rows if row["caller"] >= 0] == [0, 1]
    assert loop.last["loaded"] == 8
    without_optimizer = Loop()
    for _ in range(3):  # of two loaders: no batch is a step of its own once a backward pass was heard
        without_optimizer.batch(1.0)
        without_optimizer.batch(1.0)
        without_optimizer.forward(2.0)
        without_optimizer.clock.saw_backward(0.5)
        without_optimizer.spend(BACKWARD, 3.0)
    assert [row["caller"] for row in without_optimizer.spool.rows] == [-3.0, -2.0, -2.0]
    assert without_optimizer.last["loaded"] == 16


def test_nobody_waits_for_a_batch_when_a_loader_is_through() -> None:
    loop = Loop()
    loop.batch(1.0)
    loop.step(1.0)
    loop.clock.enter(DATA)
    loop.at += 5.0  # its workers end
    loop.clock.leave_exhausted()
    assert (loop.last["kind"], loop.last["data"], loop.last["other"]) == (2.0, 0.0, 5.0)
    loop.batch(1.0)
    loop.step(1.0)
    assert (loop.last["data"], loop.last["other"]) == (1.0, 5.0)


def test_a_new_pass_over_a_loader_is_told_from_batches_that_are_fetched_ahead() -> None:
    loop = Loop()
    loop.clock.begin_pass()
    assert not loop.spool.rows  # the first one
    for _ in range(3):
        loop.batch(1.0)
    loop.clock.begin_pass()
    assert [row["kind"] for row in loop.spool.rows] == [0.0, 0.0, 2.0]
    loop.batch(1.0)
    loop.step(1.0)
    loop.clock.begin_pass()
    assert loop.last["kind"] == 0.0  # of a training that goes on


def test_evaluation_before_a_loader_is_through_is_told() -> None:
    loop = Loop()
    loop.batch(1.0)
    loop.step(1.0)
    loop.clock.enter(FORWARD)
    loop.at += 3.0
    loop.clock.leave_forward(False, True)
    loop.clock.enter(DATA)
    loop.at += 5.0
    loop.clock.leave_exhausted()
    assert (loop.last["forward"], loop.last["aside_forward"], loop.last["aside_other"]) == (3.0, 3.0, 0.0)


def test_the_last_step_ends_with_the_program() -> None:
    """Without an optimizer only the next batch shows that a step is over."""
    loop = Loop()
    for _ in range(3):
        loop.batch(1.0)
        loop.forward(2.0)
        loop.clock.saw_backward(0.5)
        loop.spend(BACKWARD, 3.0)
    loop.spend(None, 60.0)  # not training any more
    loop.clock.close()
    loop.clock.close()
    assert len(loop.spool.rows) == 3
    assert (loop.last["backward"], loop.last["other"]) == (3.0, 0.0)


def test_a_thread_that_loads_ahead_is_not_the_trainings() -> None:
    loop = Loop()
    loop.clock.data_thread = -1
    loop.clock.enter(DATA)  # of the other thread, and not left when the training begins
    loop.clock.saw_batch(8.0)
    loop.at += 1.0
    loop.clock.saw_backward(0.5)
    loop.spend(BACKWARD, 3.0)
    loop.step(1.0)
    assert (loop.last["loaded"], loop.last["data"], loop.last["backward"]) == (0.0, 0.0, 3.0)


def test_a_replayed_graph_is_a_step() -> None:
    """Nothing is computed while it is recorded, and nothing is heard while it is replayed."""
    loop = Loop()
    loop.batch(1.0)
    loop.forward(2.0)
    loop.clock.saw_backward(0.5)
    loop.spend(BACKWARD, 3.0)
    loop.step(1.0)  # warming up
    loop.spend(None, 0.25)
    loop.clock.begin_capture()
    loop.forward(20.0)
    loop.clock.saw_backward(0.5)
    loop.spend(BACKWARD, 30.0)
    loop.step(10.0)
    graph = loop.clock.end_capture()
    assert len(loop.spool.rows) == 1
    for _ in range(2):
        loop.batch(1.0)
        loop.spend(COPY, 0.5)
        loop.clock.enter_replay(graph)
        loop.at += 4.0
        loop.clock.leave_replay(graph)
    assert [row["caller"] for row in loop.spool.rows] == [0, 0, 0]
    assert loop.spool.rows[1]["paused"] == 60.0
    assert loop.spool.rows[1]["other"] == 0.25
    assert phases(loop.last) == {
        "data": 1.0,
        "copy": 0.5,
        "forward": 4.0,
        "backward": 0.0,
        "optimizer": 0.0,
        "other": 0.0,
    }
    assert (loop.last["loaded"], loop.last["fed"], loop.last["backwards"]) == (8.0, 8.0, 1)


def test_a_replayed_graph_without_an_optimizer() -> None:
    loop = Loop()
    loop.clock.begin_capture()
    loop.forward(2.0)
    loop.clock.saw_backward(0.5)
    loop.spend(BACKWARD, 3.0)
    graph = loop.clock.end_capture()
    for _ in range(3):
        loop.clock.enter_replay(graph)
        loop.at += 4.0
        loop.clock.leave_replay(graph)
        loop.spend(None, 1.0)  # an update by hand
    assert [row["caller"] for row in loop.spool.rows] == [-2, -2]
    assert (loop.last["forward"], loop.last["other"], loop.last["fed"]) == (4.0, 1.0, 8.0)


def test_optimizers_in_the_backward_pass_do_not_end_the_step() -> None:
    """Hooks that update each parameter once it has its gradient."""
    loop = Loop()
    for _ in range(2):
        loop.batch(1.0)
        loop.forward(2.0)
        loop.clock.saw_backward(0.5)
        loop.clock.enter(BACKWARD)
        for _ in range(3):
            loop.at += 1.0
            loop.step(0.5, optimizer=object())
        loop.clock.leave()
    loop.spend(DATA, 0.5)
    assert len(loop.spool.rows) == 2
    assert (loop.last["backward"], loop.last["optimizer"], loop.last["other"]) == (3.0, 1.5, 0.0)


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


class Gpu:
    """A device that works off what it is given, one thing after the other, behind the host."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self.free_at = 0.0
        self.capturing = False
        self.waited = 0

    def work(self, seconds: float) -> None:
        self.free_at = max(self.free_at, self._loop.at) + seconds

    def mark(self) -> Mark | None:
        return None if self.capturing else Mark(self, max(self.free_at, self._loop.at))

    def release(self, marks: list[Any]) -> None: ...

    def is_capturing(self) -> bool:
        return self.capturing


class Mark:
    def __init__(self, gpu: Gpu, at: float) -> None:
        self._gpu, self.at = gpu, at

    def query(self) -> bool:
        assert not self._gpu.capturing  # it would spoil the script's graph
        return self.at <= self._gpu._loop.at

    def synchronize(self) -> None:
        self._gpu.waited += 1
        self._gpu._loop.at = max(self._gpu._loop.at, self.at)

    def elapsed_time(self, later: Mark) -> float:
        return 1e3 * (later.at - self.at)


def gpu_loop(steps: int, *, issue_s: float, work_s: float, capturing: range = range(0)) -> tuple[Loop, Gpu]:
    """A loop whose host needs `issue_s` per step and whose device needs `work_s`, three steps apart at most."""
    loop = Loop()
    gpu = Gpu(loop)
    for number in range(steps):
        gpu.capturing = number in capturing
        loop.batch(0.0)
        loop.clock.saw_forward(1, 8.0, True)
        loop.clock.enter(FORWARD)
        loop.at += issue_s
        gpu.work(work_s)
        loop.at = max(loop.at, gpu.free_at - 3 * work_s)  # the queue is full
        loop.clock.leave_forward(True, False)
        loop.step(0.0)
        if loop.clock.device is None:
            loop.clock.device = gpu
    return loop, gpu


def rates(loop: Loop) -> Any:
    log = SimpleNamespace(
        columns=COLUMNS,
        rows=np.array([list(row.values()) for row in loop.spool.rows]),
        process={},
        facts={},
        pulses=[],
    )
    return rates_of([log])


def test_the_device_is_waited_for_once_and_its_last_work_belongs_to_the_loop() -> None:
    """The host is ahead of the device from the first step on, so that its own times miss what is still to be done."""
    loop, gpu = gpu_loop(40, issue_s=0.01, work_s=0.1)
    loop.clock.enter(DATA)
    loop.clock.leave_exhausted()
    assert gpu.waited == 1
    loop.clock.close()
    told = rates(loop)
    assert told.steps_per_s == pytest.approx(40 / (gpu.free_at - 100.0), rel=1e-3)
    assert told.shares["forward"] > 0.95


def test_nothing_is_asked_of_a_device_while_a_graph_is_captured() -> None:
    loop, _ = gpu_loop(40, issue_s=0.01, work_s=0.1, capturing=range(9, 20))
    marked = [row["step"] for row in loop.spool.rows if row["kind"] == 1]
    assert marked
    assert not {*range(9, 20)} & {int(step) for step in marked}


def test_steps_of_every_rhythm_are_marked() -> None:
    """What a script does every second, fifth or tenth step is met in some of the marked ones, and not in all."""
    loop, _ = gpu_loop(400, issue_s=0.01, work_s=0.02)
    marked = {int(row["step"]) for row in loop.spool.rows if row["kind"] == 1}
    for rhythm in (2, 4, 5, 10, 16):
        assert len({step % rhythm for step in marked}) == rhythm


def test_a_look_comes_after_each_of_the_first_steps_and_then_seldom() -> None:
    loop, seen = Loop(), []
    loop.clock.on_step = lambda clock: seen.append(clock.steps)
    for _ in range(300):
        loop.step(0.01)
    assert seen[:EARLY_STEPS] == list(range(1, EARLY_STEPS + 1))
    assert len(seen) - EARLY_STEPS == 2  # one per second


def test_rows_are_whole_across_the_pieces_of_the_file(tmp_path: Path) -> None:
    spool, reader = Spool(str(tmp_path)), SpoolReader(tmp_path)
    count = 2 * CHUNK // ROW.size + 3
    for number in range(count):
        spool.row((float(number),) * len(COLUMNS))
        if number == 5:
            (log,) = reader.refresh()
            assert len(log.rows) == 6
    (log,) = reader.refresh()
    assert log.rows[:, 0].tolist() == list(range(count))


class NotedLoop(Loop):
    """A loop whose parts are noted as hooks do it: worked through at once only where the clock asks for it."""

    def hear(self, seconds: float, *note: Any) -> None:
        self.at += seconds
        clock = self.clock
        clock.put_time(self.at)
        clock.put(note)
        if note[0] is Clock.end_optimizer and not clock.is_direct:
            clock.step_ended(self.at)
        elif clock.is_direct:
            clock.work_through()

    def whole_step(self, scale: float = 1.0, samples: float = 8.0, optimizer: int = 7) -> None:
        """With every part; where the clock rests, hooks note batch and end only."""
        clock = self.clock
        self.hear(0.001, Clock.enter, DATA)
        self.hear(0.002 * scale, Clock.got_batch, samples)
        if clock.is_resting:
            self.at += 0.097 * scale
        else:
            self.hear(0.004 * scale, Clock.begin_forward, 1, samples, True, True)
            self.hear(0.030 * scale, Clock.leave_forward, True, False)
            self.hear(0.003 * scale, Clock.begin_backward)
            self.hear(0.040 * scale, Clock.leave)
            self.hear(0.000 * scale, Clock.begin_optimizer, optimizer)
            self.at += 0.020 * scale
        self.hear(0.0, Clock.end_optimizer, optimizer)

    def evaluate(self) -> None:
        """A batch without gradients; a model in evaluation mode ends a rest."""
        self.hear(0.001, Clock.enter, DATA)
        self.hear(0.002, Clock.got_batch, 16.0)
        self.clock.is_resting = False
        self.hear(0.001, Clock.begin_forward, 1, 16.0, False, False)
        self.hear(0.005, Clock.leave_forward, False, True)


def short_loop(steps: int, **how: Any) -> NotedLoop:
    loop = NotedLoop()
    loop.clock.spool.ended = lambda steps, at: None  # type: ignore[method-assign]
    for _ in range(steps):
        loop.whole_step(scale=how.get("scale", 0.05))
    return loop


def test_steps_of_which_little_is_noted_are_split_as_those_before_them() -> None:
    loop = short_loop(200)
    loop.clock.close()
    rows = loop.spool.rows
    assert len(rows) == 200
    early, late = rows[5], rows[-2]
    assert phases(late) == {name: pytest.approx(early[name]) for name in PHASES}
    same = ("loaded", "fed", "backwards", "caller", "models")
    assert [late[name] for name in same] == [early[name] for name in same]
    assert [row["step"] for row in rows] == list(range(200))
    assert rows[-1]["ended"] == pytest.approx(loop.at)


def test_the_wait_for_each_batch_is_its_own_however_little_is_noted() -> None:
    loop = short_loop(40)
    for number in range(40):
        loop.whole_step(scale=0.05 * (1 + number % 3), samples=4.0 + number % 2)
    loop.clock.close()
    late = loop.spool.rows[40:]
    assert [row["data"] for row in late] == pytest.approx([0.0001 * (1 + number % 3) for number in range(40)])
    assert [row["loaded"] for row in late] == [4.0 + number % 2 for number in range(40)]
    walls = [sum(row[name] for name in PHASES) for row in late]
    assert sum(walls) == pytest.approx(loop.at - loop.spool.rows[39]["ended"])


def test_validation_ends_the_rest_and_is_set_aside() -> None:
    loop = short_loop(60)
    for _ in range(3):
        for _ in range(5):
            loop.evaluate()
        for _ in range(20):
            loop.whole_step(scale=0.05)
    loop.clock.close()
    rows = [row for row in loop.spool.rows if row["kind"] == 0]
    assert len(rows) == 120
    assert sum(row["loaded"] for row in rows) == 8 * 120
    assert [round(row["paused"], 6) for row in rows if row["paused"]] == [pytest.approx(5 * 0.009)] * 3


def test_another_optimizer_in_a_rest_is_another_caller() -> None:
    loop = short_loop(60)
    for _ in range(30):
        loop.whole_step(scale=0.05, optimizer=9)
    loop.clock.close()
    assert [row["caller"] for row in loop.spool.rows[:60]] == [0.0] * 60
    assert [row["caller"] for row in loop.spool.rows[60:]] == [1.0] * 30


def test_steps_whose_rows_a_killed_process_did_not_write_are_counted(tmp_path: Path) -> None:
    spool = Spool(str(tmp_path))
    clock_of = Clock(spool)
    loop = NotedLoop()
    clock_of._now = lambda: loop.at
    loop.clock = clock_of
    for _ in range(52):
        loop.whole_step(scale=0.05)
    assert clock_of.steps < 52  # the last ones wait
    (log,) = SpoolReader(tmp_path).refresh()
    assert len(log.rows) == 52
    assert log.rows[-1, COLUMNS.index("ended")] == pytest.approx(loop.at)
    told = rates_of([log])
    assert told.steps == 52
    assert told.samples == 8 * 52
    clock_of.close()
    (log,) = SpoolReader(tmp_path).refresh()
    assert len(log.rows) == 52


def test_a_new_optimizer_with_the_id_of_one_that_is_gone_is_another_caller() -> None:
    """Cross-validation: a model and an optimizer per fold, at the same address as those before them."""
    loop = short_loop(60)
    loop.clock.renew(8)  # nobody's so far
    loop.clock.renew(7)
    for _ in range(30):
        loop.whole_step(scale=0.05)
    loop.clock.close()
    assert [row["caller"] for row in loop.spool.rows] == [0.0] * 60 + [1.0] * 30
    assert rates(loop).steps == 90


@pytest.mark.parametrize(("forwards", "fed"), [(1, 8.0), (2, 8.0), (3, 8.0), (4, 32.0), (6, 48.0)])
def test_a_few_forward_passes_for_one_backward_pass_see_the_same_samples(forwards: int, fed: float) -> None:
    """Pairs and triplets; more of them are steps in time, as of agents that play."""
    loop = Loop()
    loop.step(1.0)
    for _ in range(2):  # gradients of two such batches are added up
        for _ in range(forwards):
            loop.forward(1.0)
        loop.clock.saw_backward()
        loop.spend(BACKWARD, 1.0)
    loop.step(1.0)
    assert loop.last["fed"] == 2 * fed
