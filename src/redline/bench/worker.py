"""This is the worker's loop: it reads a request, and sends `Progress` and one reply, until the desk disconnects.

The spawn door starts it as `python -m redline.bench.worker WHERE [REQUESTED_AT]`, or `bench/supervisor.py` forks it. WHERE is
`unix:PATH` to call at, or `script:FILE` with requests to be done in turn without a desk.

Under torchrun, on one machine or several, WHERE is `ranks:unix:PATH` or `ranks:tcp:HOST:PORT`: every rank calls there.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from redline.model.errors import BenchError
from redline.model.protocol import (
    Close,
    FailureReply,
    Progress,
    Reply,
    Request,
    Where,
    read_script,
    receive_request,
    send,
)
from redline.model.record import Failure
from redline.system.processes import adopt_orphans

if TYPE_CHECKING:
    from redline.bench.session import BenchSession

_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")
"""The kernel ends the process with the highest number here first."""
RANKED = "REDLINE_RANKED"
"""This is set in the environment of a forked worker that is one of several ranks."""
COPY_ARRIVES_S = 0.5
"""If the model's code forked, the worker waits this long for a copy that comes back from the same code at about the same time."""
FORKED = (
    "the model forked this worker, and the copy came back from the model's code: end the child with os._exit, or start "
    "it with subprocess or multiprocessing"
)


def work(
    connection: socket.socket, *, import_s: float | None, requested_at: float, is_ranked: bool = False, token: str = ""
) -> None:
    """Answers one request after the other. One of several ranks can be asked where it is, even while it works or hangs."""
    from redline.bench.session import BenchSession
    from redline.bench.workload.ranks import Rank, Ranks

    rank, line = Rank.of_environment() if is_ranked else Rank(), _Line(connection)
    line.send(rank.hello(token))
    start_s = time.time() - requested_at
    session = BenchSession(
        on_progress=line.send, import_s=import_s, start_s=start_s, ranks=Ranks(rank) if is_ranked else None
    )
    next_request: Callable[[], Request | None] = partial(receive_request, connection)
    if is_ranked:
        requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
        listening = (connection, line, session, requests)
        threading.Thread(target=_listen, args=listening, name="redline-listener", daemon=True).start()
        next_request = requests.get
    while (request := next_request()) is not None:
        line.send(session.handle(request))
        if isinstance(request, Close):
            return


def _listen(
    connection: socket.socket, line: _Line, session: BenchSession, requests: queue.SimpleQueue[Request]
) -> None:
    """Reads requests in a thread of its own. It answers where the session is, and hands everything else to the main thread."""
    while (request := receive_request(connection)) is not None:
        if isinstance(request, Where):
            line.send(session.position())
            continue
        requests.put(request)
        if isinstance(request, Close):
            return
    os._exit(1)  # the desk is gone, and the main thread may wait for a rank that will never come


class _Line:
    """This is the worker's end of the connection. Only the worker itself speaks on it, and it always says something."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._worker = os.getpid()
        self._lock = threading.Lock()
        self._forks = 0
        self._copies, self._copy_says = os.pipe()
        os.register_at_fork(after_in_parent=self._count_fork)

    def send(self, message: Reply) -> None:
        # Printed text goes to the log here, between steps and never within them, so that a crash takes little of it along.
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() != self._worker:
            # The desk would take two answers to one question for answers to two questions.
            os.write(self._copy_says, b".")
            os._exit(1)
        if self._has_copies():
            if isinstance(message, Progress):
                raise BenchError("user", FORKED)  # at once: each further step would fork again, and so would its copies
            message = FailureReply(failure=Failure(stage="worker", kind="user", message=FORKED))
        with self._lock:
            try:
                send(self._connection, message)
            except (TypeError, ValueError, OverflowError) as error:
                said = f"the worker cannot send its {type(message).__name__}: {error!r}"
                trace = "".join(traceback.format_exception(error))
                failure = Failure(stage="worker", kind="crash", message=said, traceback=trace)
                send(self._connection, FailureReply(failure=failure))

    def _count_fork(self) -> None:
        self._forks += 1

    def _has_copies(self) -> bool:
        """Returns whether a forked child has come back from the model's code. Helpers that a library forks never do."""
        if not self._forks:
            return False
        self._forks = 0
        return bool(select.select([self._copies], [], [], COPY_ARRIVES_S)[0])


def follow(script: Path, requested_at: float) -> None:
    """Does the requests of a script in turn. Some tools run their target several times from the start, and no desk can talk to all runs."""
    from redline.bench.session import BenchSession

    session = BenchSession(on_progress=lambda progress: None, start_s=time.time() - requested_at)
    for request in read_script(script.read_bytes()):
        reply = session.handle(request)
        if isinstance(reply, FailureReply):
            sys.exit(f"{reply.failure.kind} at {reply.failure.stage}: {reply.failure.message}")


def volunteer_for_oom() -> None:
    """Makes the kernel end this worker, if memory runs out, rather than the desk or the user's editor."""
    if _OOM_SCORE_ADJ.exists():
        _OOM_SCORE_ADJ.write_text("1000")


def own_descriptors(log: int) -> None:
    """Sends descriptors 1 and 2 to the worker's log, because libraries below Python (Kineto, nanobind, compilers) write to them."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def main(arguments: list[str]) -> None:
    where = arguments[0]
    requested_at = float(arguments[1]) if len(arguments) > 1 else time.time()
    volunteer_for_oom()
    adopt_orphans()
    started = time.perf_counter()
    import torch  # noqa: F401  (timed here, on its own)
    import torchvision  # noqa: F401

    import_s = time.perf_counter() - started
    import redline.bench.session  # noqa: F401  (before the call: who calls has only some seconds to say who it is)

    kind, _, address = where.partition(":")
    if kind == "script":
        follow(Path(address), requested_at)
        return
    if is_ranked := kind == "ranks":
        kind, _, address = address.partition(":")
    if kind == "unix":
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(address)
        work(connection, import_s=import_s, requested_at=requested_at, is_ranked=is_ranked)
    else:
        work_for_others(address, import_s, requested_at)


FIRST_CALL_TIMEOUT_S = 600.0
"""A rank on another machine calls for this long, because a person may start the ranks before the command."""
NEXT_CALL_TIMEOUT_S = 10.0
"""After a session it calls for this long. If nobody answers by then, everything is measured."""
_SESSIONS = "REDLINE_RANK_SESSIONS"
"""A rank on another machine counts its sessions in this variable, because each begins in a fresh interpreter."""
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
"""Torchrun counts in this variable how often it has started the ranks again."""
OWN_ATTEMPTS = 1000
"""Each session adds this to the attempt, so that ranks do not meet under an attempt that torchrun counts itself."""


def work_for_others(address: str, import_s: float, requested_at: float) -> None:
    """Calls at another machine, works for one session, and starts again in a fresh interpreter for the next one."""
    sessions = int(os.environ.get(_SESSIONS, "0"))
    connection = _called(address, NEXT_CALL_TIMEOUT_S if sessions else FIRST_CALL_TIMEOUT_S)
    if connection is None:
        if sessions:
            return  # the command is done, because everything is measured
        sys.exit(
            f"no command waits for ranks at {address}: start 'redline run MODEL --ranks N --rendezvous {address}' first"
        )
    token = os.environ.get("REDLINE_TOKEN", "")
    work(connection, import_s=import_s, requested_at=requested_at, is_ranked=True, token=token)
    os.environ[_SESSIONS] = str(sessions + 1)
    # Ranks meet under the number of the attempt, so a new number makes them meet anew.
    os.environ[_ATTEMPT] = str(int(os.environ.get(_ATTEMPT, "0")) + OWN_ATTEMPTS)
    os.execv(sys.executable, sys.orig_argv)


def _called(address: str, timeout_s: float) -> socket.socket | None:
    """Returns a connection to the address, or None if nobody has answered within the time."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            connection = socket.create_connection((host, int(port)), timeout=5.0)
        except OSError:
            time.sleep(0.2)
            continue
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
