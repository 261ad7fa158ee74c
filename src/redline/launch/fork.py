"""The fork door: isolated workers from a server that has torch loaded already."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from redline.launch.connection import (
    WorkerDoor,
    WorkerSession,
    current_folder,
    log_tail,
    paths_of,
    worker_log,
)
from redline.launch.ranks import RankLine, RanksSession
from redline.model.errors import DoorError
from redline.model.spec import LaunchSpec, RunSpec
from redline.system.processes import keep_standard_descriptors

START_TIMEOUT_S = 180.0
FORK_TIMEOUT_S = 120.0
END_TIMEOUT_S = 5.0
_MAX_MESSAGE = 1 << 16
_SERVER = "import sys; sys.path.append(sys.argv[2]); from redline.bench.forkserver import main; main(sys.argv)"
"""The folder of Redline comes last: nothing else in it is to hide a module of Python's."""


class ForkServer:
    """The desk's end of `redline.bench.forkserver`. One per desk process: starting it costs an import of torch."""

    def __init__(self) -> None:
        keep_standard_descriptors()
        # SEQPACKET keeps messages whole and ends with the last holder, so the server notices a killed desk.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = worker_log()
        self._process = subprocess.Popen(
            # -P: files in the working folder are the user's, also those called statistics.py.
            [sys.executable, "-P", "-c", _SERVER, str(theirs.fileno()), str(Path(__file__).parents[2])],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self._exits: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ready = False

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def fork(
        self, connection: socket.socket, log_fd: int, launch: LaunchSpec, variables: Mapping[str, str] | None = None
    ) -> int:
        """A fresh worker that talks on `connection`; returns its process id. `variables` are added to its environment."""
        with self._lock, _request_file(launch, variables or {}) as request, _working_folder(launch) as folder:
            if not self._ready:
                self._receive("ready", START_TIMEOUT_S)
                self._ready = True
            # Handed over in a file and by their descriptors: a message of a socket is small, and a folder may have no
            # name any more.
            socket.send_fds(self._control, [b"."], [connection.fileno(), log_fd, folder, request.fileno()])
            return int(self._receive("forked", FORK_TIMEOUT_S)["forked"])

    def exit_status(self, pid: int, timeout_s: float) -> int | None:
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while pid not in self._exits:
                remaining = deadline - time.monotonic()
                try:
                    self._receive("exited", max(remaining, 0.001))
                except TimeoutError:
                    return None
                except DoorError:
                    return int(signal.SIGKILL)  # the server died, and its workers with it
            return self._exits[pid]

    def close(self) -> None:
        self._control.close()  # the server sees the end of the stream, kills its workers and leaves
        if not self._ready:
            self._process.kill()  # it is importing torch, and has no worker yet
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _receive(self, wanted: str, timeout_s: float) -> dict[str, Any]:
        """The next event of one kind; exits received meanwhile are remembered."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._control.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                body = self._control.recv(_MAX_MESSAGE)
            except ConnectionError:
                body = b""
            if not body:
                raise DoorError(f"the fork server is gone: {self._last_words()}")
            event: dict[str, Any] = msgspec.msgpack.decode(body)
            if "exited" in event:
                self._exits[event["exited"]] = event["status"]
            if wanted in event:
                return event

    def _last_words(self) -> str:
        self._process.poll()
        lines = log_tail(self._log).strip().splitlines()
        return lines[-1] if lines else f"it exited with status {self._process.returncode}"


@contextmanager
def _request_file(launch: LaunchSpec, variables: Mapping[str, str]) -> Iterator[IO[bytes]]:
    """A file with what a worker takes over from this process: `redline.bench.forkserver.ForkRequest`."""
    request = [
        list({**os.environb, **{name.encode(): value.encode() for name, value in variables.items()}}.items()),
        [os.fsencode(entry) for entry in paths_of(launch)],
        time.time(),
    ]
    with tempfile.TemporaryFile(prefix="redline-request-") as file:
        file.write(msgspec.msgpack.encode(request))
        file.seek(0)
        yield file


@contextmanager
def _working_folder(launch: LaunchSpec) -> Iterator[int]:
    """Nothing can be loaded from inside a folder that was removed: a worker then starts at the root."""
    descriptor = os.open(launch.folder or ("." if current_folder() else "/"), os.O_RDONLY | getattr(os, "O_PATH", 0))
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class ForkedProcess:
    def __init__(self, server: ForkServer, pid: int) -> None:
        self._server = server
        self.pid = pid

    def wait(self, timeout_s: float) -> int | None:
        return self._server.exit_status(self.pid, timeout_s)


class ForkDoor(WorkerDoor):
    """Closing it ends its workers; the server stays for the next door of this process."""

    def __init__(self, launch: LaunchSpec) -> None:
        super().__init__(launch)
        self._ports: list[socket.socket] = []

    def close(self) -> None:
        super().close()
        while self._ports:
            self._ports.pop().close()

    def open(self, spec: RunSpec | None = None) -> WorkerSession | RanksSession:
        log, launch = worker_log(), spec.launch if spec else self._launch
        session: WorkerSession | RanksSession
        if spec is not None and spec.ranks > 1:
            session = self._several(spec.ranks, log, launch)
        else:
            session = WorkerSession(*_forked(log, launch), log, launch)
        self._sessions.append(session)
        return session

    def _several(self, ranks: int, log: IO[bytes], launch: LaunchSpec) -> RanksSession:
        """Ranks on this machine, as torchrun would start them, but forked."""
        port = launch.port
        if port is None:
            self._ports.append(reserved_port())
            port = self._ports[-1].getsockname()[1]
        forked = []
        for rank in range(ranks):
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            told = {name: str(value) for name, value in where.items()}
            forked.append(
                _forked(log, launch, {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), RANKED: "1"})
            )
        lines = [RankLine(rank, connection, process.pid, process) for rank, (connection, process) in enumerate(forked)]
        return RanksSession(lines, [process for _, process in forked], log, launch)


RANKED = "REDLINE_RANKED"
"""As `redline.bench.worker` has it, which the desk does not import."""


def _forked(
    log: IO[bytes], launch: LaunchSpec, variables: Mapping[str, str] | None = None
) -> tuple[socket.socket, ForkedProcess]:
    server = shared_server()
    ours, theirs = socket.socketpair()
    try:
        pid = server.fork(theirs, log.fileno(), launch, variables)
    except TimeoutError:
        raise DoorError("the fork server did not answer in time") from None
    finally:
        theirs.close()
    return ours, ForkedProcess(server, pid)


_server: ForkServer | None = None


def shared_server() -> ForkServer:
    global _server
    if _server is None or not _server.alive:
        _server = ForkServer()
        atexit.register(_server.close)
    return _server


def reserved_port() -> socket.socket:
    """A socket that keeps a port for whoever is told its number, until it is closed.

    It does not listen. Servers that ask for SO_REUSEADDR, as torch's store and Python's do, can listen beside it, while
    the system gives the port to nobody who asks for any free one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
