"""The worker's loop: a request in, `Progress` on the way, one reply out, until the desk hangs up.

Started as `python -m redline.bench.worker WHERE REQUESTED_AT` by the spawn door, or forked by the fork server. WHERE is
an inherited descriptor, `unix:PATH` to call back at, or `script:FILE` with requests to be done in turn without a desk.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import time
import traceback
from pathlib import Path

from redline.errors import BenchError
from redline.processes import adopt_orphans
from redline.protocol import Close, FailureReply, Progress, Reply, read_script, receive_request, send
from redline.record import Failure

_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")
COPY_ARRIVES_S = 0.5
"""After something was forked: how long to wait for a copy that comes back from the same code at about the same time."""
FORKED = (
    "the model forked this worker, and the copy came back from the model's code: end the child with os._exit, or start "
    "it with subprocess or multiprocessing"
)


def serve(connection: socket.socket, *, import_s: float | None, requested_at: float) -> None:
    from redline.bench.session import BenchSession

    line = _Line(connection)
    session = BenchSession(
        on_progress=line.send,
        import_s=import_s,
        start_s=time.time() - requested_at,
    )
    while (request := receive_request(connection)) is not None:
        line.send(session.handle(request))
        if isinstance(request, Close):
            return


class _Line:
    """The worker's end of the connection. Only the worker itself speaks on it, and it always says something."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._worker = os.getpid()
        self._forks = 0
        self._copies, self._copy_says = os.pipe()
        os.register_at_fork(after_in_parent=self._count_fork)

    def send(self, message: Reply) -> None:
        # What was printed goes to the log between steps, never within them: a crash then takes little of it along.
        sys.stdout.flush()
        sys.stderr.flush()
        if os.getpid() != self._worker:
            # Two answers to one question would be taken for answers to two.
            os.write(self._copy_says, b".")
            os._exit(1)
        if self._has_copies():
            if isinstance(message, Progress):
                raise BenchError("user", FORKED)  # now: each further step would fork again, and so would its copies
            message = FailureReply(failure=Failure(stage="worker", kind="user", message=FORKED))
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
        """Whether a forked child has come back from the model's code. Helpers that a library forks never do."""
        if not self._forks:
            return False
        self._forks = 0
        return bool(select.select([self._copies], [], [], COPY_ARRIVES_S)[0])


def follow(script: Path, requested_at: float) -> None:
    """For tools that run their target again and again, each time from the beginning: nobody can talk to all of them."""
    from redline.bench.session import BenchSession

    session = BenchSession(on_progress=lambda progress: None, start_s=time.time() - requested_at)
    for request in read_script(script.read_bytes()):
        reply = session.handle(request)
        if isinstance(reply, FailureReply):
            sys.exit(f"{reply.failure.kind} at {reply.failure.stage}: {reply.failure.message}")


def volunteer_for_oom() -> None:
    """Rather this worker than the desk or the user's editor."""
    if _OOM_SCORE_ADJ.exists():
        _OOM_SCORE_ADJ.write_text("1000")


def own_descriptors(log: int) -> None:
    """Libraries below Python (Kineto, nanobind, compilers) write to 1 and 2: send them to the worker's log."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)


def main(arguments: list[str]) -> None:
    where, requested_at = arguments[0], float(arguments[1])
    volunteer_for_oom()
    adopt_orphans()
    started = time.perf_counter()
    import torch  # noqa: F401  (timed here, on its own)
    import torchvision  # noqa: F401

    import_s = time.perf_counter() - started
    kind, _, address = where.partition(":")
    if kind == "script":
        follow(Path(address), requested_at)
        return
    serve(_connected(kind, address), import_s=import_s, requested_at=requested_at)


def _connected(kind: str, address: str) -> socket.socket:
    if kind != "unix":
        return socket.socket(fileno=int(kind))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    return connection


if __name__ == "__main__":
    main(sys.argv[1:])
