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
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
from alive import wait_until

from redline.launch import connection, open_door, supervisor
from redline.launch.connection import Line, WorkerSession, log_tail, signal_group, worker_log
from redline.launch.workers import WorkerDoor, calls_of, own_address
from redline.model.errors import UsageError
from redline.model.protocol import (
    Ask,
    AskHealth,
    BlockReply,
    Close,
    ClosedReply,
    FailureReply,
    Hello,
    Load,
    Measure,
    ModelNames,
    Prepare,
    Profile,
    Progress,
    Reply,
    Request,
    Squeeze,
    TrainEpoch,
    TrainingProgress,
    receive_reply,
    receive_request,
    send,
)
from redline.model.record import Block, Closed, Failure, Memory
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec

ASK = Ask(question=AskHealth())
NAMES = ModelNames(models=())


class Child:
    """A real process in a group of its own, with one child more."""

    def __init__(self, script: str = "sleep 600 & echo $!; wait") -> None:
        self._process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, text=True, process_group=0)
        self.pid = self._process.pid
        assert self._process.stdout is not None
        with self._process.stdout as said:
            self.grandchild = said.readline().strip()

    def wait(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return -code if code < 0 else code << 8

    @property
    def stands_still(self) -> bool:
        return str(psutil.Process(self.pid).status()) == psutil.STATUS_STOPPED

    def kill(self) -> None:
        signal_group(self, signal.SIGKILL)
        self.wait(20.0)

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    @property
    def is_ended_whole(self) -> bool:
        return self.wait(0.0) == signal.SIGKILL and wait_until(lambda: not psutil.pid_exists(int(self.grandchild)))


class Desk:
    """A session, and the worker's end of its connection."""

    def __init__(self, script: str | None = None, **launch: float) -> None:
        self.child = Child() if script is None else Child(f"echo; {script}")
        ours, self.worker = socket.socketpair()
        self.log = worker_log()
        line = Line(ours, self.child.pid, self.child)
        self.session = WorkerSession([line], self.log, LaunchSpec(**launch))
        self.asked: list[Request | None] = []
        self.players: list[threading.Thread] = []

    def write(self, text: bytes) -> None:
        os.write(self.log.fileno(), text)

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

    def failure(self) -> Failure:
        reply = self.session.ask(ASK)
        assert isinstance(reply, FailureReply), reply
        return reply.failure


@pytest.fixture
def make() -> Iterator[Callable[..., Desk]]:
    desks: list[Desk] = []

    def made(*words: str, **launch: float) -> Desk:
        desks.append(Desk(*words, **launch))
        return desks[-1]

    yield made
    for desk in desks:
        desk.session.kill()
        for thread in desk.players:  # the connection is closed at the other end, which ends them
            thread.join()
        desk.worker.close()
        desk.child.end()


@pytest.fixture
def desk(make: Callable[..., Desk]) -> Desk:
    return make()


def test_progress_is_passed_on_and_the_answer_returned_when_it_is_there(desk: Desk) -> None:
    seen: list[Progress] = []
    desk.session.begin(ASK)
    assert desk.session.wait(timeout_s=0.0) is None
    assert desk.session.wait(timeout_s=0.05) is None
    desk.answer(Progress(stage="build"), Progress(stage="warm-up", detail="3 steps"), NAMES)
    assert desk.session.wait(seen.append) == NAMES
    assert seen == [Progress(stage="build"), Progress(stage="warm-up", detail="3 steps")]
    assert desk.asked == [ASK]


def test_a_block_that_comes_late_is_still_read_whole(desk: Desk) -> None:
    """A reply in many pieces, slower than one look."""
    block = BlockReply(block=Block(kind="latency", clock="host", samples=tuple(float(n) for n in range(20_000))))
    body = msgspec.msgpack.encode(block)
    whole = len(body).to_bytes(8) + body
    desk.answer(*(whole[start : start + 50_000] for start in range(0, len(whole), 50_000)))
    assert desk.session.ask(ASK) == block


@pytest.mark.parametrize(
    ("request_", "limit_s"),
    [
        (Prepare(spec=RunSpec(workload=WorkloadSpec(model="m"))), 21.0),
        (Profile(path="x"), 21.0),
        (Measure(kind="latency", seconds=0.5), 22.5),
        (Squeeze(), 22.0),
        (Load(arrivals_s=(), rate=1.0, deadline_s=3.0), 25.0),
        (TrainEpoch(number=1, loader_timeout_s=4.0), 26.0),
        (Close(), 23.0),
        (ASK, connection.ASK_TIMEOUT_S),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_question_has_its_own_limit(request_: Request, limit_s: float) -> None:
    launch = LaunchSpec(prepare_timeout_s=21.0, measure_timeout_s=22.0, close_timeout_s=23.0)
    assert connection.timeout_of(request_, launch) == limit_s


def test_one_that_does_not_answer_is_ended_with_its_whole_group(make: Callable[..., Desk]) -> None:
    desk = make(measure_timeout_s=0.1)
    send(desk.worker, Progress(stage="throughput"))  # by a thread it might come too late
    reply = desk.session.ask(Measure(kind="throughput", seconds=0.1))
    assert isinstance(reply, FailureReply)
    assert (reply.failure.kind, reply.failure.stage) == ("timeout", "throughput")
    assert reply.failure.message == "no answer within 0.2 s while the worker was at 'throughput'; it was stopped"
    assert desk.child.is_ended_whole, "it is waited for, or its memory would count with the next one's"
    assert desk.failure() == reply.failure, "and stays what it was"


@pytest.mark.parametrize(
    ("script", "says", "message"),
    [
        ("exit 3", b"", "the worker exited with status 3 at 'ask'"),
        ("exit 0", b"", "the worker exited with status 0 at 'ask'"),
        ("kill -SEGV $$", b"", "the worker died of SIGSEGV at 'ask'"),
        ("kill -KILL $$", b"", "the worker died of SIGKILL at 'ask'"),
        ("sleep 600", b"", "the worker hung up at 'ask' and did not end within 1 s; it was stopped"),
        ("sleep 600", b"\0\0\0\0\0\0\0\x01\xc1", "the worker sent something that is not a message"),
    ],
)
def test_how_it_ended_is_told(
    make: Callable[..., Desk], script: str, says: bytes, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "END_TIMEOUT_S", 60.0 if script != "sleep 600" else 1.0)
    desk = make(script)
    desk.write(b"last words\n")
    desk.answer(*filter(None, [says]), hang_up=not says)
    failure = desk.failure()
    assert (failure.kind, failure.stage, failure.traceback) == ("crash", "ask", "last words\n")
    assert failure.message.startswith(message)
    assert desk.child.wait(10.0) is not None


@pytest.mark.parametrize(("number", "kills", "kind"), [("KILL", 4, "oom"), ("SEGV", 4, "crash"), ("KILL", 3, "crash")])
def test_a_kill_by_the_kernel_is_out_of_memory(
    make: Callable[..., Desk], number: str, kills: int, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counters = tmp_path / "vmstat"
    counters.write_text("pgmajfault 7\noom_kill 3\nother 9\n")
    monkeypatch.setattr(connection, "_VMSTAT", counters)
    desk = make(f"kill -{number} $$")
    counters.write_text(f"pgmajfault 7\noom_kill {kills}\nother 9\n")
    desk.answer(hang_up=True)
    assert desk.failure().kind == kind


def test_one_that_is_gone_is_told_and_sent_nothing(make: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number may be somebody else's by now."""
    desk = make("exit 0")
    assert desk.child.wait(10.0) == 0
    desk.worker.close()
    monkeypatch.setattr(os, "killpg", lambda group, number: pytest.fail("somebody else"))
    desk.session.pause()
    assert desk.failure().kind == "crash"
    desk.session.kill()
    monkeypatch.undo()


def test_it_stands_still_and_goes_on_when_it_is_let_or_asked(desk: Desk) -> None:
    desk.session.pause()
    assert wait_until(lambda: desk.child.stands_still)
    desk.session.resume()
    assert wait_until(lambda: not desk.child.stands_still)
    desk.session.pause()
    desk.answer(NAMES)
    assert desk.session.ask(ASK) == NAMES
    assert wait_until(lambda: not desk.child.stands_still)


def test_the_time_it_stood_still_does_not_count(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_epoch_that_goes_on_has_time_again(desk: Desk) -> None:
    where = TrainingProgress(epoch=1, epochs=2, step=3, steps=4)
    for progress, has_more in ((Progress(stage="epoch", training=where), True), (Progress(stage="epoch"), False)):
        desk.session.begin(ASK)
        desk.session._deadline = soon = time.monotonic() + 30.0
        desk.answer(progress, NAMES)
        assert desk.session.wait() == NAMES
        assert (desk.session._deadline > soon + 60.0) is has_more


def test_closing_says_so_waits_and_keeps_what_was_printed(make: Callable[..., Desk]) -> None:
    desk = make("sleep 600")
    desk.write("".join(f"line {n}\n\n" for n in range(30)).encode())
    desk.answer(ClosedReply(closed=Closed(memory=Memory(allocator_retries=3))))
    ending = threading.Timer(0.2, desk.child.end)
    ending.start()
    closed = desk.session.close()
    ending.join()
    assert desk.asked == [Close()]
    assert closed.memory is not None
    assert closed.memory.allocator_retries == 3
    assert closed.printed.splitlines() == [f"line {n}" for n in range(10, 30)]
    assert desk.session.close() == Closed()
    assert desk.failure().message == "the session is closed"
    assert desk.log.closed


def test_one_that_does_not_leave_is_ended(make: Callable[..., Desk]) -> None:
    desk = make(close_timeout_s=0.2)
    desk.answer(ClosedReply(closed=Closed()))
    desk.session.close()
    assert desk.child.is_ended_whole


def test_a_door_ends_all_its_sessions_with_what_they_started_and_once(
    make: Callable[..., Desk], monkeypatch: pytest.MonkeyPatch
) -> None:
    desks, door = [make(), make()], WorkerDoor(LaunchSpec())
    door._sessions += [desk.session for desk in desks]
    door.close()
    assert all(desk.child.is_ended_whole for desk in desks)
    assert door._sessions == []
    monkeypatch.setattr(os, "killpg", lambda group, number: pytest.fail("twice"))
    desks[0].session.kill()
    monkeypatch.undo()


@pytest.mark.parametrize(("written", "left"), [(100, 100), (101, 10)])
def test_only_the_end_of_a_log_beyond_the_limit_stays(
    desk: Desk, written: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is cut while an answer is waited for, as a model may print in every step; who writes on does so at the end."""
    monkeypatch.setattr(connection, "LOG_LIMIT_BYTES", 100)
    monkeypatch.setattr(connection, "LOG_KEPT_BYTES", 10)
    text = bytes(33 + number % 90 for number in range(written))
    desk.session.begin(ASK)
    desk.write(text)
    assert desk.session.wait(timeout_s=0.0) is None
    desk.write(b"!\xff")
    assert log_tail(desk.log) == text[-left:].decode() + "!\ufffd"


def test_a_call_is_taken_by_name_and_the_address_is_gone() -> None:
    with own_address() as (listener, address):
        path = Path(address.removeprefix("unix:"))
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        callers = [socket.socket(socket.AF_UNIX) for _ in range(2)]
        for caller, token in zip(callers, ("a stranger", "ours"), strict=True):
            caller.connect(str(path))
            send(caller, Hello(rank=0, world=1, local_rank=0, host="here", pid=1, token=token))
        called, problem = calls_of(1, listener, 20.0, lambda: True, "ours")
    assert (list(called), problem) == ([0], "")
    send(callers[1], NAMES)
    assert receive_reply(called[0][0]) == NAMES
    assert not path.parent.exists()
    for end in (*callers, called[0][0]):
        end.close()


def test_one_that_ended_before_it_called_is_not_waited_for() -> None:
    with own_address() as (listener, _):
        assert calls_of(1, listener, 600.0, lambda: False) == ({}, "what started it has ended")
        assert calls_of(1, listener, 0.0, lambda: True) == ({}, "not within 0 s")


def test_the_fake_door_is_made_by_hand() -> None:
    with pytest.raises(UsageError, match="make a FakeDoor"):
        open_door(LaunchSpec(door="fake"))


def test_the_working_folder_comes_last_where_its_files_must_hide_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", ["/a", "", "/b"])
    here = os.getcwd()
    assert supervisor.paths_of(LaunchSpec(), folder_last=True) == ["/a", "/b", here]
    assert supervisor.paths_of(LaunchSpec()) == ["/a", here, "/b"]
    assert supervisor.paths_of(LaunchSpec(door="spawn", python="/usr/bin/python3")) == []


def test_an_entry_of_this_checkout_leads_to_its_counterpart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here / ".git", here / "src", there / ".git", there / "src", here / "only", tmp_path / "src"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr("sys.path", [str(here / "src"), str(here / "only"), str(tmp_path / "src")])
    paths = supervisor.paths_of(LaunchSpec(folder=str(there)))
    # There is no counterpart of the second, and the third is not of this checkout.
    assert paths == [str(there), str(there / "src"), str(here / "only"), str(tmp_path / "src")]
