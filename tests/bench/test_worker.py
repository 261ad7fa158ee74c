"""The worker's loop: whatever happens to a question, the desk gets one answer."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest

from redline.bench import worker
from redline.bench.session import BenchSession
from redline.bench.worker import FORKED, _Line
from redline.model.errors import BenchError
from redline.model.protocol import ClosedReply, FailureReply, Prepare, Progress, receive_reply
from redline.model.record import Closed, Failure
from redline.model.spec import RunSpec, WorkloadSpec


@pytest.fixture
def ends() -> Iterator[tuple[_Line, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(20)
    yield _Line(ours), theirs
    ours.close()
    theirs.close()


def test_a_reply_that_cannot_be_sent_is_answered_with_why(ends: tuple[_Line, socket.socket]) -> None:
    line, desk = ends
    line.send(FailureReply(failure=Failure(stage="build", kind="user", message="caf\udce9")))
    reply = receive_reply(desk)
    assert isinstance(reply, FailureReply)
    assert reply.failure.kind == "crash"
    assert reply.failure.message.startswith("the worker cannot send its FailureReply: UnicodeEncodeError(")
    assert "surrogates not allowed" in reply.failure.traceback


@pytest.mark.parametrize("is_progress", [True, False])
def test_a_copy_of_the_worker_says_nothing_and_is_told_of(ends: tuple[_Line, socket.socket], is_progress: bool) -> None:
    line, desk = ends
    child = os.fork()
    if child == 0:
        line.send(ClosedReply(closed=Closed()))
        os._exit(0)  # not reached
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    if is_progress:
        with pytest.raises(BenchError, match="the model forked this worker"):
            line.send(Progress(stage="warm-up"))
    else:
        line.send(ClosedReply(closed=Closed()))
        reply = receive_reply(desk)
        assert isinstance(reply, FailureReply)
        assert (reply.failure.kind, reply.failure.message) == ("user", FORKED)


def test_a_helper_that_was_forked_and_ends_by_itself_is_nobodys_business(
    ends: tuple[_Line, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "COPY_ARRIVES_S", 0.01)
    line, desk = ends
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    line.send(ClosedReply(closed=Closed()))
    assert receive_reply(desk) == ClosedReply(closed=Closed())


def test_a_rank_loads_its_bench_before_it_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading takes many seconds on a busy machine, and whoever calls without a word is taken for a stranger."""
    monkeypatch.setitem(sys.modules, "redline.bench.session", None)
    monkeypatch.setattr(worker, "_called", lambda *_: pytest.fail("it called first"))
    monkeypatch.setattr(worker, "adopt_orphans", lambda: None)
    monkeypatch.setattr(worker, "volunteer_for_oom", lambda: None)
    with pytest.raises(ImportError, match=r"redline\.bench\.session"):
        worker.main(["ranks:tcp:127.0.0.1:1"])


@pytest.mark.parametrize("isolated", [True, False])
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_only_ctrl_c_leaves_the_bench_and_only_where_a_person_pressed_it(
    monkeypatch: pytest.MonkeyPatch, isolated: bool, kind: type[BaseException]
) -> None:
    session = BenchSession(on_progress=lambda progress: None, isolated=isolated)

    def interrupted(*_: object, **__: object) -> None:
        raise kind("bye")

    monkeypatch.setattr(session._bench, "prepare", interrupted)
    request = Prepare(spec=RunSpec(workload=WorkloadSpec(model="m")))
    if kind is KeyboardInterrupt and not isolated:
        with pytest.raises(KeyboardInterrupt):
            session.handle(request)
    else:
        reply = session.handle(request)
        assert isinstance(reply, FailureReply)
        assert reply.failure.kind == "user"
