"""The doors to worker processes on this machine: forked ones, and fresh interpreters with a command in front where one is asked for."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from redline.launch.connection import Line, WorkerDoor, WorkerSession, last_line, log_tail, worker_log
from redline.launch.supervisor import SOURCE, WorkerProcess, shared_supervisor
from redline.model.errors import DoorError, UsageError
from redline.model.protocol import Request, write_script
from redline.model.spec import LaunchSpec, RunSpec

CALL_TIMEOUT_S = 180.0
"""A worker behind a profiler must call within this time: both have to start, and torch is imported before the call."""
FOLLOW_UP_TIMEOUT_S = 600.0
LOOK_EVERY_S = 0.2
RANKED = "REDLINE_RANKED"
"""As `redline.bench.worker` has it, which the desk does not import."""
LINE = 3
"""As `redline.bench.supervisor` has it."""
_WORKER = (
    "import sys; sys.path.insert(0, sys.argv[1]); import redline; del sys.path[0], sys.argv[1]; "
    "from redline.bench.worker import main; main(sys.argv[1:])"
)
"""This Redline, whatever another checkout or environment holds, and nothing else of the folder that it is in."""


class ForkDoor(WorkerDoor):
    """Closing it ends its workers; the supervisor stays for the next door of this process."""

    def __init__(self, launch: LaunchSpec) -> None:
        super().__init__(launch)
        self._ports: list[socket.socket] = []

    def close(self) -> None:
        super().close()
        while self._ports:
            self._ports.pop().close()

    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        log, launch, ranks = worker_log(), spec.launch if spec else self._launch, spec.ranks if spec else 1
        if ranks == 1:
            lines = [forked(log, launch)]
        else:
            lines = [forked(log, launch, variables, rank) for rank, variables in enumerate(self._places(ranks, launch))]
        self._sessions.append(WorkerSession(lines, log, launch))
        return self._sessions[-1]

    def _places(self, ranks: int, launch: LaunchSpec) -> list[dict[str, str]]:
        """What torchrun would tell ranks on this machine."""
        port = launch.port
        if port is None:
            self._ports.append(reserved_port())
            port = self._ports[-1].getsockname()[1]
        world = {
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            RANKED: 1,
        }
        places = [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
        return [{name: str(value) for name, value in place.items()} for place in places]


class SpawnDoor(WorkerDoor):
    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        launch = spec.launch if spec else self._launch
        tool = launch.command_prefix[0] if launch.command_prefix else ""
        if tool and shutil.which(tool) is None:
            raise UsageError(f"no such command: {tool!r} (asked for in front of the worker)")
        log = worker_log()
        line = _behind(tool, log, launch) if tool else _spawned(log, launch)
        self._sessions.append(WorkerSession([line], log, launch))
        return self._sessions[-1]


def forked(log: IO[bytes], launch: LaunchSpec, variables: Mapping[str, str] | None = None, rank: int = 0) -> Line:
    ours, theirs = socket.socketpair()
    with theirs:
        process = shared_supervisor(forks=True).start(launch, log, line=theirs, variables=variables)
    return Line(ours, process.pid, process, rank)


def _spawned(log: IO[bytes], launch: LaunchSpec) -> Line:
    ours, theirs = socket.socketpair()
    with theirs:
        command = _worker_command(launch, str(LINE))
        process = shared_supervisor(forks=False).start(launch, log, line=theirs, command=command)
    return Line(ours, process.pid, process)


def _behind(tool: str, log: IO[bytes], launch: LaunchSpec) -> Line:
    """A worker behind a command, which starts it in its own way."""
    callback = Callback()
    process = started(_worker_command(launch, callback.address), launch, log)
    ours = callback.wait(lambda: process.wait(0.0) is None, CALL_TIMEOUT_S)
    if ours is None:
        process.kill()
        reason = last_line(log_tail(log), "it said nothing")
        log.close()
        raise DoorError(f"no worker came up behind {tool!r}: {reason}")
    return Line(ours, process.pid, process)


def started(command: Sequence[str], launch: LaunchSpec, log: IO[bytes]) -> WorkerProcess:
    """A command of which nothing is left behind when it ends or this process does."""
    return shared_supervisor(forks=False).start(launch, log, command=command)


def _worker_command(launch: LaunchSpec, where: str) -> list[str]:
    """A worker that is told where to find its requests."""
    # -P: files in the working folder are the user's, also those called statistics.py.
    python = launch.python or sys.executable
    return [*launch.command_prefix, python, "-P", "-c", _WORKER, SOURCE, where, repr(time.time())]


class Callback:
    """An address at which workers call.

    A profiler starts its target through helpers of its own, which need not hand on open files: behind one, the worker
    gets the address of a socket instead of the socket itself.
    """

    def __init__(self, backlog: int = 1) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="redline-"))  # ours alone: nobody else can call
        self.socket = socket.socket(socket.AF_UNIX)
        path = str(self._folder / "door")
        self.socket.bind(path)
        self.socket.listen(backlog)
        self.address = f"unix:{path}"

    def wait(self, is_alive: Callable[[], bool], timeout_s: float) -> socket.socket | None:
        """The worker's call; None when it ended first, or did not call in time."""
        deadline = time.monotonic() + timeout_s
        self.socket.settimeout(LOOK_EVERY_S)
        try:
            while True:
                try:
                    return self.socket.accept()[0]
                except TimeoutError:
                    if not is_alive() or time.monotonic() >= deadline:
                        return None
        finally:
            self.close()

    def close(self) -> None:
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def reserved_port() -> socket.socket:
    """A socket that keeps a port for whoever is told its number, until it is closed.

    It does not listen. Servers that ask for SO_REUSEADDR, as torch's store and Python's do, can listen beside it, while
    the system gives the port to nobody who asks for any free one.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held


# What vendors' profilers need


def run_script(launch: LaunchSpec, requests: Sequence[Request], folder: Path, timeout_s: float) -> None:
    """A worker behind a command follows a script from a file each time the command starts it."""
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


def run_after(command: Sequence[str], output: Path, timeout_s: float = FOLLOW_UP_TIMEOUT_S) -> None:
    """Run a command to its end; what it prints goes to a file."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise DoorError(f"no such command: {command[0]!r}") from None
    except subprocess.TimeoutExpired:
        raise DoorError(f"{command[0]} {command[1]} did not end within {timeout_s:g} s; it was stopped") from None
    output.write_bytes(done.stdout)
    if done.returncode != 0:
        reason = last_line(done.stderr.decode("utf-8", "replace"), f"status {done.returncode}")
        raise DoorError(f"{command[0]} {command[1]} failed: {reason}")
