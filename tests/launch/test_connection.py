"""The desk's end of a worker, with a worker that is played by the test: no torch, and every way to end."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import psutil
import pytest
from alive import wait_until

from redline.launch import connection, open_door, supervisor
from redline.launch.connection import Line, WorkerDoor, WorkerSession, log_tail, worker_log
from redline.launch.workers import Callback
from redline.model.errors import UsageError
from redline.model.protocol import (
    Ask,
    AskHealth,
    BlockReply,
    Close,
    ClosedReply,
    FailureReply,
    Load,
    Measure,
    ModelNames,
    Prepare,
    Profile,
    Progress,
    Reply,
    Request,
    Squeeze,
    TrainingProgress,
    receive_request,
    send,
)
from redline.model.record import Block, Closed, Failure, Memory
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec

LAUNCH = LaunchSpec(prepare_timeout_s=21.0, measure_timeout_s=22.0, close_timeout_s=23.0)
ASK = Ask(question=AskHealth())
NAMES = ModelNames(models=())


class Child:
    """A real process in a group of its own, with one child more."""

    all: ClassVar[list[Child]] = []

    def __init__(self, script: str = "sleep 600 & echo $!; wait") -> None:
        self._process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0)
        self.pid = self._process.pid
        self.grandchild = self._process.stdout.readline().strip()
        Child.all.append(self)

    def wait(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return -code if code < 0 else code << 8

    def state(self) -> str:
        return str(psutil.Process(self.pid).status())

    def end(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # another thread may see it end first
                os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@pytest.fixture(autouse=True)
def end_all() -> Iterator[None]:
    yield
    while Desk.all:
        desk = Desk.all.pop()
        desk.session.kill()
        for thread in desk.players:  # the connection is closed at the other end, which ends them
            thread.join()
        desk.worker.close()
    while Child.all:
        Child.all.pop().end()


@pytest.fixture
def child() -> Child:
    return Child()


class Desk:
    """A session, and the worker's end of its connection."""

    all: ClassVar[list[Desk]] = []

    def __init__(self, process: Any, launch: LaunchSpec = LAUNCH) -> None:
        ours, self.worker = socket.socketpair()
        self.log = worker_log()
        self.session = WorkerSession([Line(ours, process.pid, process)], self.log, launch)
        self.asked: list[Request | None] = []
        self.players: list[threading.Thread] = []
        Desk.all.append(self)

    def answer(self, *replies: Reply | bytes, hang_up: bool = False) -> None:
        """In a thread: wait for one request, then say these."""

        def play() -> None:
            with contextlib.suppress(ConnectionError):  # a session that has given up closes its end
                self.asked.append(receive_request(self.worker))
                for reply in replies:
                    self.worker.sendall(reply) if isinstance(reply, bytes) else send(self.worker, reply)
            if hang_up:
                self.worker.close()

        self.players.append(threading.Thread(target=play, daemon=True))
        self.players[-1].start()


@pytest.fixture
def desk(child: Child) -> Desk:
    return Desk(child)


def failure_of(reply: Reply) -> Failure:
    assert isinstance(reply, FailureReply), reply
    return reply.failure


class TestAsking:
    def test_progress_is_passed_on_and_the_answer_returned(self, desk: Desk) -> None:
        seen: list[Progress] = []
        desk.answer(Progress(stage="build"), Progress(stage="warm-up", detail="3 steps"), NAMES)
        assert desk.session.ask(ASK, seen.append) == NAMES
        assert seen == [Progress(stage="build"), Progress(stage="warm-up", detail="3 steps")]
        assert desk.asked == [ASK]

    def test_looking_in_returns_nothing_until_there_is_something(self, desk: Desk) -> None:
        desk.session.begin(ASK)
        assert desk.session.wait(timeout_s=0.0) is None
        assert desk.session.wait(timeout_s=0.05) is None
        desk.answer(NAMES)
        assert desk.session.wait() == NAMES

    @pytest.mark.parametrize(
        ("request_", "limit_s"),
        [
            (Prepare(spec=RunSpec(workload=WorkloadSpec(model="m"))), 21.0),
            (Profile(path="x"), 21.0),
            (Measure(kind="latency", seconds=0.5), 22.5),
            (Squeeze(), 22.0),
            (Load(arrivals_s=(), rate=1.0, deadline_s=3.0), 25.0),
            (Close(), 23.0),
            (ASK, connection.ASK_TIMEOUT_S),
        ],
        ids=lambda value: type(value).__name__,
    )
    def test_each_question_has_its_own_limit(self, desk: Desk, request_: Request, limit_s: float) -> None:
        assert connection.timeout_of(request_, desk.session._launch) == limit_s

    def test_one_that_does_not_answer_is_ended_with_its_whole_group(self, child: Child) -> None:
        desk = Desk(child, LaunchSpec(measure_timeout_s=0.1))
        send(desk.worker, Progress(stage="throughput"))  # by a thread it might come too late
        failure = failure_of(desk.session.ask(Measure(kind="throughput", seconds=0.1)))
        assert (failure.kind, failure.stage) == ("timeout", "throughput")
        assert failure.message == "no answer within 0.2 s while the worker was at 'throughput'; it was stopped"
        assert child.wait(0.0) == signal.SIGKILL, "it is waited for, or its memory would count with the next one's"
        assert wait_until(lambda: not psutil.pid_exists(int(child.grandchild)))
        assert failure_of(desk.session.ask(ASK)) == failure, "and stays what it was"

    def test_nonsense_ends_it(self, desk: Desk, child: Child) -> None:
        os.write(desk.log.fileno(), b"something went wrong\n")
        desk.answer(b"\0\0\0\0\0\0\0\x01\xc1")
        failure = failure_of(desk.session.ask(ASK))
        assert (failure.kind, failure.stage) == ("crash", "ask")
        assert failure.message.startswith("the worker sent something that is not a message")
        assert failure.traceback == "something went wrong\n"
        assert child.wait(10.0) == signal.SIGKILL


class TestDying:
    @pytest.mark.parametrize(
        ("script", "message"),
        [
            ("echo; exit 3", "the worker exited with status 3 at 'ask'"),
            ("echo; exit 0", "the worker exited with status 0 at 'ask'"),
            ("echo; kill -SEGV $$", "the worker died of SIGSEGV at 'ask'"),
            ("echo; kill -KILL $$", "the worker died of SIGKILL at 'ask'"),
        ],
    )
    def test_how_it_ended_is_told(self, script: str, message: str) -> None:
        child = Child(script)
        desk = Desk(child)
        os.write(desk.log.fileno(), b"last words\n")
        desk.answer(hang_up=True)
        failure = failure_of(desk.session.ask(ASK))
        assert (failure.kind, failure.stage, failure.message) == ("crash", "ask", message)
        assert failure.traceback == "last words\n"

    @pytest.mark.parametrize(
        ("number", "kills", "kind"), [("KILL", 4, "oom"), ("SEGV", 4, "crash"), ("KILL", 3, "crash")]
    )
    def test_a_kill_by_the_kernel_is_out_of_memory(
        self, number: str, kills: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counters = tmp_path / "vmstat"
        counters.write_text("pgmajfault 7\noom_kill 3\nother 9\n")
        monkeypatch.setattr(connection, "_VMSTAT", counters)
        child = Child(f"echo; kill -{number} $$")
        desk = Desk(child)
        counters.write_text(f"pgmajfault 7\noom_kill {kills}\nother 9\n")
        desk.answer(hang_up=True)
        assert failure_of(desk.session.ask(ASK)).kind == kind

    def test_one_that_hangs_up_and_lives_on_is_ended(
        self, desk: Desk, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(connection, "END_TIMEOUT_S", 1.0)
        desk.answer(hang_up=True)
        failure = failure_of(desk.session.ask(ASK))
        assert failure.message == "the worker hung up at 'ask' and did not end within 1 s; it was stopped"
        assert child.wait(0.0) == signal.SIGKILL

    def test_asking_one_that_is_gone(self, child: Child) -> None:
        desk = Desk(child)
        desk.worker.close()
        child.end()
        assert failure_of(desk.session.ask(ASK)).kind == "crash"


class TestPausing:
    def test_it_stands_still_and_goes_on(self, desk: Desk, child: Child) -> None:
        desk.session.pause()
        assert wait_until(lambda: child.state() == psutil.STATUS_STOPPED)
        desk.session.resume()
        assert wait_until(lambda: child.state() != psutil.STATUS_STOPPED)

    def test_a_question_wakes_it(self, desk: Desk, child: Child) -> None:
        desk.session.pause()
        desk.answer(NAMES)
        assert desk.session.ask(ASK) == NAMES
        assert wait_until(lambda: child.state() != psutil.STATUS_STOPPED)

    def test_the_time_it_stood_still_does_not_count(self, desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [1000.0]
        monkeypatch.setattr("redline.launch.connection.time.monotonic", lambda: now[0])
        desk.session.begin(ASK)
        before = desk.session._deadline
        now[0] += 5.0
        desk.session.pause()
        now[0] += 7.0
        desk.session.resume()
        assert desk.session._deadline == before + 7.0
        monkeypatch.undo()

    def test_one_that_has_ended_is_sent_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its number may be somebody else's by now."""
        child = Child("echo; exit 0")
        assert child.wait(10.0) == 0
        sent: list[int] = []
        monkeypatch.setattr(os, "killpg", lambda group, number: sent.append(number))
        desk = Desk(child)
        desk.session.pause()
        desk.session.kill()
        assert sent == []


class TestEnding:
    def test_closing_says_so_waits_and_keeps_what_was_printed(self) -> None:
        child = Child("echo; read line; exit 0")
        desk = Desk(child)
        os.write(desk.log.fileno(), "".join(f"line {n}\n\n" for n in range(30)).encode())
        desk.answer(ClosedReply(closed=Closed(memory=Memory(allocator_retries=3))))
        ending = threading.Timer(0.2, child.end)
        ending.start()
        closed = desk.session.close()
        ending.join()
        assert desk.asked == [Close()]
        assert closed.memory.allocator_retries == 3
        assert closed.printed.splitlines() == [f"line {n}" for n in range(10, 30)]
        assert desk.session.close() == Closed()
        assert failure_of(desk.session.ask(ASK)).message == "the session is closed"
        with pytest.raises(ValueError, match="closed file"):
            desk.log.fileno()

    def test_one_that_does_not_leave_is_ended(self, child: Child) -> None:
        desk = Desk(child, LaunchSpec(close_timeout_s=0.2))
        desk.answer(ClosedReply(closed=Closed()))
        desk.session.close()
        assert child.wait(0.0) == signal.SIGKILL

    def test_killing_takes_all_that_was_started_and_happens_once(
        self, child: Child, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        desk = Desk(child)
        desk.session.kill()
        assert child.wait(0.0) == signal.SIGKILL
        assert wait_until(lambda: not psutil.pid_exists(int(child.grandchild)))
        monkeypatch.setattr(os, "killpg", lambda group, number: pytest.fail("twice"))
        desk.session.kill()

    def test_a_door_ends_all_its_sessions(self) -> None:
        children = [Child(), Child()]
        door = WorkerDoor(LAUNCH)
        door._sessions += [Desk(child).session for child in children]
        door.close()
        assert [child.wait(0.0) for child in children] == [signal.SIGKILL] * 2
        assert door._sessions == []


class TestLog:
    def test_the_end_of_it_is_shown(self) -> None:
        with worker_log() as log:
            os.write(log.fileno(), b"x" * 5000 + b"\xff end")
            tail = log_tail(log)
        assert len(tail) == connection.LOG_TAIL_CHARACTERS
        assert tail.endswith("\ufffd end")


class TestCallback:
    def test_a_call_is_taken_and_the_address_is_gone(self) -> None:
        callback = Callback()
        path = Path(callback.address.removeprefix("unix:"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        caller = socket.socket(socket.AF_UNIX)
        caller.connect(str(path))
        taken = callback.wait(lambda: True, 20.0)
        assert taken is not None
        caller.sendall(b"hello")
        assert taken.recv(5) == b"hello"
        assert not path.parent.exists()
        taken.close()
        caller.close()

    def test_one_that_ended_before_it_called_is_not_waited_for(self) -> None:
        callback = Callback()
        assert callback.wait(lambda: False, 600.0) is None
        assert not Path(callback.address.removeprefix("unix:")).parent.exists()


class TestDoors:
    def test_the_fake_one_is_made_by_hand(self) -> None:
        with pytest.raises(UsageError, match="make a FakeDoor"):
            open_door(LaunchSpec(door="fake"))


def test_a_block_that_comes_late_is_still_read_whole(desk: Desk) -> None:
    """A reply in many pieces, slower than one look."""
    block = BlockReply(block=Block(kind="latency", clock="host", samples=tuple(float(n) for n in range(20_000))))
    body = msgspec.msgpack.encode(block)

    def drip() -> None:
        receive_request(desk.worker)
        whole = len(body).to_bytes(8) + body
        for start in range(0, len(whole), 50_000):
            desk.worker.sendall(whole[start : start + 50_000])
            time.sleep(0.01)

    threading.Thread(target=drip, daemon=True).start()
    assert desk.session.ask(ASK) == block


class TestWaiting:
    def test_an_epoch_that_goes_on_has_time_again(self, desk: Desk) -> None:
        where = TrainingProgress(epoch=1, epochs=2, step=3, steps=4)
        for progress, has_more in ((Progress(stage="epoch", training=where), True), (Progress(stage="epoch"), False)):
            desk.session.begin(ASK)
            desk.session._deadline = soon = time.monotonic() + 30.0
            desk.answer(progress, NAMES)
            assert desk.session.wait() == NAMES
            assert (desk.session._deadline > soon + 60.0) is has_more


class TestTrimming:
    @pytest.mark.parametrize(("written", "left"), [(100, 100), (101, 10)])
    def test_only_the_end_of_a_log_beyond_the_limit_stays(
        self, desk: Desk, written: int, left: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is cut while an answer is waited for, as a model may print in every step; who writes on does so at the end."""
        monkeypatch.setattr(connection, "LOG_LIMIT_BYTES", 100)
        monkeypatch.setattr(connection, "LOG_KEPT_BYTES", 10)
        text = bytes(33 + number % 90 for number in range(written))
        desk.session.begin(ASK)
        os.write(desk.log.fileno(), text)
        assert desk.session.wait(timeout_s=0.0) is None
        os.write(desk.log.fileno(), b"!")
        assert os.pread(desk.log.fileno(), 1000, 0) == text[-left:] + b"!"


class TestPaths:
    def test_the_working_folder_comes_last_where_its_files_must_hide_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr("sys.path", ["/a", "", "/b"])
        here = os.getcwd()
        assert supervisor.paths_of(LaunchSpec(), folder_last=True) == ["/a", "/b", here]
        assert supervisor.paths_of(LaunchSpec()) == ["/a", here, "/b"]
        assert supervisor.paths_of(LaunchSpec(door="spawn", python="/usr/bin/python3")) == []

    def test_an_entry_of_this_checkout_leads_to_its_counterpart(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        here, there = tmp_path / "here", tmp_path / "there"
        for folder in (here / ".git", here / "src", there / ".git", there / "src", here / "only", tmp_path / "src"):
            folder.mkdir(parents=True)
        monkeypatch.chdir(here)
        monkeypatch.setattr("sys.path", [str(here / "src"), str(here / "only"), str(tmp_path / "src")])
        paths = supervisor.paths_of(LaunchSpec(folder=str(there)))
        # There is no counterpart of the second, and the third is not of this checkout.
        assert paths == [str(there), str(there / "src"), str(here / "only"), str(tmp_path / "src")]
