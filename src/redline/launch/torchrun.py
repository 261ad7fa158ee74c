"""The torchrun door: ranks that torchrun starts, here or on other machines.

Here the door runs torchrun itself. With a rendezvous it only waits: people or their scheduler start
`torchrun … -m redline.bench.worker ranks:tcp:HOST:PORT` on every machine, and each rank calls this process.
"""

from __future__ import annotations

import hmac
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import IO

from redline.launch.connection import Line, Process, WorkerDoor, WorkerSession, log_tail, worker_log
from redline.launch.workers import LOOK_EVERY_S, Callback, forked, started
from redline.model.errors import DoorError, UsageError
from redline.model.fields import split_address
from redline.model.protocol import Hello, receive_reply
from redline.model.record import Failure
from redline.model.spec import LaunchSpec, RunSpec

WORKER = "redline.bench.worker"
START_TIMEOUT_S = 180.0
"""For torchrun and its ranks to import torch and to call."""
HELLO_TIMEOUT_S = 10.0
TOKEN = "REDLINE_TOKEN"
"""The word by which ranks on other machines are known. Set it on all of them, or none can call."""


class TorchrunDoor(WorkerDoor):
    def __init__(self, launch: LaunchSpec) -> None:
        super().__init__(launch)
        self._listener: socket.socket | None = None

    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        if spec is None:  # a question that needs no ranks
            log = worker_log()
            session = WorkerSession([forked(log, self._launch)], log, self._launch)
        else:
            session = self._join(spec) if spec.launch.rendezvous else self._start(spec)
        self._sessions.append(session)
        return session

    def close(self) -> None:
        super().close()
        if self._listener is not None:
            self._listener.close()

    def _start(self, spec: RunSpec) -> WorkerSession:
        """torchrun on this machine, and its ranks."""
        callback, log = Callback(backlog=spec.ranks), worker_log()
        process = started(_command(spec, callback.address), spec.launch, log)
        calls = _Calls(spec.ranks, callback.socket)
        try:
            calls.collect(START_TIMEOUT_S, lambda: process.wait(0.0) is None)
        finally:
            callback.close()
        return _session(calls, process, log, spec.launch)

    def _join(self, spec: RunSpec) -> WorkerSession:
        """Ranks that others start."""
        address = spec.launch.rendezvous
        assert address is not None
        self._listener = self._listener or listen_at(address)
        calls = _Calls(spec.ranks, self._listener, os.environ.get(TOKEN, ""))
        calls.collect(spec.launch.prepare_timeout_s, lambda: True)
        return _session(calls, None, worker_log(), spec.launch)


def invitation(spec: RunSpec) -> str:
    """What to run on every machine, for ranks to come to a rendezvous."""
    host, port = split_address("rendezvous", spec.launch.rendezvous or "")
    return (
        f"waiting for {spec.ranks} ranks at {host}:{port}; start on every machine: torchrun --nnodes N --nproc-per-node M "
        f"--rdzv-backend c10d --rdzv-endpoint {host}:{port + 1} -m {WORKER} ranks:tcp:{host}:{port}"
    )


def listen_at(address: str) -> socket.socket:
    host, port = split_address("rendezvous", address)
    try:
        return socket.create_server((host, port), backlog=1024)
    except OSError as error:
        raise UsageError(f"rendezvous {address}: {error.strerror or error}; choose another port or address") from None


def _command(spec: RunSpec, address: str) -> list[str]:
    port = spec.launch.port or int(os.environ.get("MASTER_PORT") or 0)
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)] if port else ["--standalone"]
    python = spec.launch.python or sys.executable
    run = [python, "-P", "-m", "torch.distributed.run", "--nnodes", "1", *meeting]
    # -P, as for every worker: files in the working folder are the user's, also those called statistics.py.
    worker = ["--no-python", python, "-P", "-m", WORKER]
    return [*run, "--nproc-per-node", str(spec.ranks), *worker, f"ranks:{address}", repr(time.time())]


class _Calls:
    """Ranks that call, until all are there."""

    def __init__(self, ranks: int, listener: socket.socket, token: str = "") -> None:
        self.ranks = ranks
        self.token = token
        self.callers: dict[int, tuple[socket.socket, Hello]] = {}
        self.problem = ""
        self._listener = listener

    def collect(self, timeout_s: float, is_alive: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        self._listener.settimeout(LOOK_EVERY_S)
        while len(self.callers) < self.ranks and not self.problem:
            try:
                self._admit(self._listener.accept()[0])
            except TimeoutError:
                if not is_alive():
                    self.problem = "torchrun ended before"
                elif time.monotonic() > deadline:
                    self.problem = f"within {timeout_s:g} s not"

    def _admit(self, connection: socket.socket) -> None:
        connection.settimeout(HELLO_TIMEOUT_S)
        try:
            hello = receive_reply(connection)
        except (OSError, DoorError):
            hello = None
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            connection.close()  # a stranger
        elif hello.world != self.ranks:
            connection.close()
            self.problem = f"torchrun started {hello.world} ranks where {self.ranks} were asked for, so"
        else:
            self.callers[hello.rank] = connection, hello

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.callers]


def _session(calls: _Calls, starter: Process | None, log: IO[bytes], launch: LaunchSpec) -> WorkerSession:
    lines = [
        Line(connection, hello.pid if starter is not None else None, rank=rank)
        for rank, (connection, hello) in calls.callers.items()
    ]
    if not calls.missing and not calls.problem:
        return WorkerSession(lines, log, launch, starter)
    for line in lines:
        line.connection.close()
    names = ", ".join(map(str, calls.missing))
    words = _last_error(log)
    message = (
        f"{calls.problem} all ranks came up: rank {names} of {calls.ranks} never called{f': {words}' if words else ''}"
    )
    session = WorkerSession([], log, launch, starter)
    rank = calls.missing[0] if calls.missing else None
    session.fail(Failure(stage="start", kind="crash", message=message, rank=rank))
    return session


def _last_error(log: IO[bytes]) -> str:
    """The last line that tells an error of a rank, as Python prints it; torchrun adds its own after it."""
    lines = [line.strip() for line in log_tail(log).splitlines()]
    own = ("File", "raise", "torch.distributed.elastic")
    errors = [line for line in lines if "Error" in line and not line.startswith(own)]
    return errors[-1] if errors else (lines[-1] if lines else "")
