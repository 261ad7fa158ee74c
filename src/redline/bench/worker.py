"""The worker's loop: a request in, `Progress` on the way, one reply out, until the desk hangs up.

Started as `python -m redline.bench.worker WHERE REQUESTED_AT` by the spawn door, or forked by the fork server. WHERE is
an inherited descriptor, `unix:PATH` to call back at, or `script:FILE` with requests to be done in turn without a desk.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

from redline.protocol import Close, FailureReply, Progress, read_script, receive_request, send

_PR_SET_PDEATHSIG = 1
_OOM_SCORE_ADJ = Path("/proc/self/oom_score_adj")


def serve(connection: socket.socket, *, import_s: float | None, requested_at: float) -> None:
    from redline.bench.session import BenchSession

    def tell(progress: Progress) -> None:
        _flush()
        send(connection, progress)

    session = BenchSession(
        on_progress=tell,
        import_s=import_s,
        start_s=time.time() - requested_at,
    )
    while (request := receive_request(connection)) is not None:
        reply = session.handle(request)
        _flush()
        send(connection, reply)
        if isinstance(request, Close):
            return


def _flush() -> None:
    """What was printed goes to the log between steps, never within them: a crash then takes little of it along."""
    sys.stdout.flush()
    sys.stderr.flush()


def follow(script: Path, requested_at: float) -> None:
    """For tools that run their target again and again, each time from the beginning: nobody can talk to all of them."""
    from redline.bench.session import BenchSession

    session = BenchSession(on_progress=lambda progress: None, start_s=time.time() - requested_at)
    for request in read_script(script.read_bytes()):
        reply = session.handle(request)
        if isinstance(reply, FailureReply):
            sys.exit(f"{reply.failure.kind} at {reply.failure.stage}: {reply.failure.message}")


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when its parent goes, and go at once if it already has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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
    started = time.perf_counter()
    import torch  # noqa: F401  (timed here, on its own)
    import torchvision  # noqa: F401

    import_s = time.perf_counter() - started
    kind, _, place = where.partition(":")
    if kind == "script":
        follow(Path(place), requested_at)
        return
    serve(_connected(kind, place), import_s=import_s, requested_at=requested_at)


def _connected(kind: str, place: str) -> socket.socket:
    if kind != "unix":
        return socket.socket(fileno=int(kind))
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(place)
    return connection


if __name__ == "__main__":
    main(sys.argv[1:])
