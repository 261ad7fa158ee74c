"""These are the doors to worker processes. They are one door with three ways to start workers.

`fork` copies a process that has torch loaded. `spawn` starts a fresh interpreter, with a command in front where one is asked for, and `torchrun`
has ranks started. Whoever is not forked calls at an address and says who it is: profilers and torchrun start their targets through helpers
of their own, which need not hand on open files. With a rendezvous this process starts nothing: people or their scheduler run
`torchrun … -m redline.bench.worker ranks:tcp:HOST:PORT` on every machine.
"""

from __future__ import annotations

import hmac
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from redline.launch.connection import Line, WorkerSession, last_line, log_tail, worker_log
from redline.launch.supervisor import SOURCE, WorkerProcess, shared_supervisor
from redline.model.errors import DoorError, UsageError
from redline.model.fields import split_address
from redline.model.protocol import Hello, Request, receive_reply, write_script
from redline.model.record import Failure
from redline.model.spec import LaunchSpec, RunSpec

CALL_TIMEOUT_S = 180.0
"""All workers must call within this time: a profiler or torchrun and they have to start and to import torch."""
HELLO_TIMEOUT_S = 10.0
"""A worker that has called must say who it is within this time."""
FOLLOW_UP_TIMEOUT_S = 600.0
"""A command that is run after another must end within this time."""
LOOK_EVERY_S = 0.2
"""While we wait for workers to call, we look this often whether what started them still runs."""
TOKEN = "REDLINE_TOKEN"
"""The word by which ranks on other machines are known. Set it on all of them, or none can call."""
RANKED = "REDLINE_RANKED"
"""`redline.bench.worker` has the same word; the desk does not import that module."""
WORKER = "redline.bench.worker"
_MAIN = (
    "import sys; sys.path.insert(0, sys.argv[1]); import redline; del sys.path[0], sys.argv[1]; "
    f"from {WORKER} import main; main(sys.argv[1:])"
)
"""This Redline, whatever another checkout or environment holds, and nothing else of the folder that it is in."""


class WorkerDoor:
    """It knows its sessions and ends them; the supervisors stay for the next door of this process."""

    def __init__(self, launch: LaunchSpec) -> None:
        self._launch = launch
        self._sessions: list[WorkerSession] = []
        self._held: list[socket.socket] = []
        """These hold ports where ranks meet, and the address where ranks of other machines call."""

    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        launch, ranks, log = spec.launch if spec else self._launch, spec.ranks if spec else 1, worker_log()
        try:
            if self._launch.door == "spawn":
                session = _spawned(launch, log)
            elif self._launch.door == "torchrun" and spec is not None:  # a question needs no ranks
                session = (
                    self._joined(spec, log) if launch.rendezvous else _started(_torchrun(spec), ranks, launch, log)
                )
            else:
                session = self._forked(ranks, launch, log)
        except BaseException:
            log.close()
            raise
        self._sessions.append(session)
        return session

    def close(self) -> None:
        while self._sessions:
            self._sessions.pop().kill()
        while self._held:
            self._held.pop().close()

    def _forked(self, ranks: int, launch: LaunchSpec, log: IO[bytes]) -> WorkerSession:
        world: dict[str, object] = {}
        if ranks > 1:  # what torchrun would tell ranks on this machine
            if launch.port is None:
                self._held.append(reserved_port())
            port = launch.port or self._held[-1].getsockname()[1]
            world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        lines = []
        for rank in range(ranks):
            place = {**world, "RANK": rank, "LOCAL_RANK": rank, RANKED: 1} if world else {}
            ours, theirs = socket.socketpair()
            with theirs:
                variables = {name: str(value) for name, value in place.items()}
                process = shared_supervisor(forks=True).start(launch, log, line=theirs, variables=variables)
            lines.append(Line(ours, process.pid, process, rank))
        return WorkerSession(lines, log, launch)

    def _joined(self, spec: RunSpec, log: IO[bytes]) -> WorkerSession:
        """Returns a session of ranks that others start: they call here, session after session."""
        if not self._held:
            self._held.append(listen_at(spec.launch.rendezvous or ""))
        token, timeout_s = os.environ.get(TOKEN, ""), spec.launch.prepare_timeout_s
        called = calls_of(spec.ranks, self._held[0], timeout_s, lambda: True, token)
        return _session(spec.launch, spec.ranks, *called, log, None)


def _spawned(launch: LaunchSpec, log: IO[bytes]) -> WorkerSession:
    tool = launch.command_prefix[0] if launch.command_prefix else ""
    if tool and shutil.which(tool) is None:
        raise UsageError(f"no such command: {tool!r} (asked for in front of the worker)")
    return _started(lambda address: _worker_command(launch, address), 1, launch, log)


def _torchrun(spec: RunSpec) -> Callable[[str], list[str]]:
    port = spec.launch.port or int(os.environ.get("MASTER_PORT") or 0)
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(port)] if port else ["--standalone"]
    # -P, as for every worker: files in the working folder are the user's, also those called statistics.py.
    python = [spec.launch.python or sys.executable, "-P", "-m"]
    run = [*python, "torch.distributed.run", "--nnodes", "1", *meeting, "--nproc-per-node", str(spec.ranks)]
    return lambda address: [*run, "--no-python", *python, WORKER, f"ranks:{address}", repr(time.time())]


def _started(command_at: Callable[[str], list[str]], ranks: int, launch: LaunchSpec, log: IO[bytes]) -> WorkerSession:
    """Starts a command that leads to so many workers, which are told an address to call at."""
    with own_address(ranks) as (listener, address):
        process = started(command_at(address), launch, log)
        called = calls_of(ranks, listener, CALL_TIMEOUT_S, lambda: process.wait(0.0) is None)
    return _session(launch, ranks, *called, log, process)


def started(command: Sequence[str], launch: LaunchSpec, log: IO[bytes]) -> WorkerProcess:
    """Starts a command of which nothing is left behind when it ends or this process does."""
    return shared_supervisor(forks=False).start(launch, log, command=command)


def _worker_command(launch: LaunchSpec, where: str) -> list[str]:
    """Returns the command of a worker that is told where to find its requests."""
    python = launch.python or sys.executable
    return [*launch.command_prefix, python, "-P", "-c", _MAIN, SOURCE, where, repr(time.time())]


# Workers that call


@contextmanager
def own_address(ranks: int = 1) -> Iterator[tuple[socket.socket, str]]:
    """Yields a socket in a folder that is ours alone, where nobody else can call, and how a worker is told of it."""
    with tempfile.TemporaryDirectory(prefix="redline-") as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder, "door"))
        listener.bind(path)
        listener.listen(ranks)
        yield listener, f"unix:{path}"


Callers = dict[int, tuple[socket.socket, Hello]]


def calls_of(
    ranks: int, listener: socket.socket, timeout_s: float, is_alive: Callable[[], bool], token: str = ""
) -> tuple[Callers, str]:
    """Waits for workers to call until all are there. Returns them by their rank, and why one is missing."""
    callers: Callers = {}
    deadline = time.monotonic() + timeout_s
    listener.settimeout(LOOK_EVERY_S)
    while len(callers) < ranks:
        try:
            connection = listener.accept()[0]
        except TimeoutError:
            if not is_alive():
                return callers, "what started it has ended"
            if time.monotonic() > deadline:
                return callers, f"not within {timeout_s:g} s"
            continue
        connection.settimeout(HELLO_TIMEOUT_S)
        try:
            hello = receive_reply(connection)
        except (OSError, DoorError):
            hello = None
        if not isinstance(hello, Hello) or not hmac.compare_digest(hello.token.encode(), token.encode()):
            connection.close()  # a stranger
        elif hello.world != ranks:
            connection.close()
            return callers, f"torchrun started {hello.world} ranks where {ranks} were asked for"
        else:
            callers[hello.rank] = connection, hello
    return callers, ""


def _session(
    spec: LaunchSpec, ranks: int, callers: Callers, problem: str, log: IO[bytes], starter: WorkerProcess | None
) -> WorkerSession:
    """Returns the session of those who called. It has failed if one is missing."""
    own = starter.pid if starter is not None and spec.door == "spawn" else None
    lines = [
        Line(connection, None if starter is None else own or hello.pid, starter, rank)
        for rank, (connection, hello) in callers.items()
    ]
    session = WorkerSession(lines, log, spec)
    if problem:
        missing = [rank for rank in range(ranks) if rank not in callers]
        who = "the worker" if own else f"rank {', '.join(map(str, missing))} of {ranks}"
        message = f"{who} never called, {problem}: {_last_error(log)}"
        session.fail(Failure(stage="start", kind="crash", message=message, rank=None if own else missing[0]))
        if starter is not None:
            starter.kill()
    return session


def _last_error(log: IO[bytes]) -> str:
    """Returns the last line that tells an error, as Python prints it; torchrun adds its own after it, which says nothing more."""
    tail = log_tail(log)
    errors = re.findall(r"^(?:\[rank\d+\]: )?([\w.]*Error: .+)$", tail, re.MULTILINE)
    return str(errors[-1]) if errors else last_line(tail, "it said nothing")


def invitation(spec: RunSpec) -> str:
    """Returns what to run on every machine, for ranks to come to a rendezvous."""
    host, port = split_address("rendezvous", spec.launch.rendezvous or "")
    return (
        f"waiting for {spec.ranks} ranks at {host}:{port}; start on every machine: torchrun --nnodes N --nproc-per-node M "
        f"--rdzv-backend c10d --rdzv-endpoint {host}:{port + 1} -m {WORKER} ranks:tcp:{host}:{port}"
    )


def listen_at(address: str) -> socket.socket:
    try:
        return socket.create_server(split_address("rendezvous", address), backlog=1024)
    except OSError as error:
        raise UsageError(f"rendezvous {address}: {error.strerror or error}; choose another port or address") from None


def reserved_port() -> socket.socket:
    """Returns a socket that keeps a port for whoever is told its number, until it is closed.

    It does not listen. Servers that ask for SO_REUSEADDR, as torch's store and Python's do, can listen beside it, while
    the system gives the port to nobody who asks for any free one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


# Vendors' profilers need the following.


def run_script(launch: LaunchSpec, requests: Sequence[Request], folder: Path, timeout_s: float) -> None:
    """Runs the command in front of a worker. The worker follows a script from a file each time the command starts it."""
    script = folder / "requests.msgpack"
    script.write_bytes(write_script(requests))
    tool = launch.command_prefix[0]
    with worker_log() as log:
        process = started(_worker_command(launch, f"script:{script}"), launch, log)
        status = process.wait(timeout_s)
        if status is None:
            process.kill()
            raise DoorError(f"{tool} did not end within {timeout_s:g} s; it was stopped")
        if status != 0:
            raise DoorError(f"{tool} failed: {last_line(log_tail(log), f'status {status >> 8}')}")


def run_after(command: Sequence[str], output: Path) -> None:
    """Runs a command to its end; what it prints goes to a file."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=FOLLOW_UP_TIMEOUT_S, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise DoorError(f"{command[0]} {command[1]}: {error}") from None
    output.write_bytes(done.stdout)
    if done.returncode != 0:
        reason = last_line(done.stderr.decode("utf-8", "replace"), f"status {done.returncode}")
        raise DoorError(f"{command[0]} {command[1]} failed: {reason}")
