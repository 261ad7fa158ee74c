"""The spawn door: a fresh interpreter per worker, with a command in front where one is asked for."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from redline.launch.connection import (
    Callback,
    WorkerDoor,
    WorkerSession,
    current_folder,
    log_tail,
    paths_of,
    worker_log,
)
from redline.model.errors import DoorError, UsageError
from redline.model.protocol import Request, write_script
from redline.model.spec import LaunchSpec, RunSpec
from redline.system.processes import REPLY_BYTES, keep_standard_descriptors

START_TIMEOUT_S = 180.0
CALLBACK_TIMEOUT_S = 180.0
"""Until a worker behind a profiler calls: both have to start, and torch is imported before the call."""
_OWN = "import sys; sys.path.insert(0, sys.argv[1]); import redline; del sys.path[0], sys.argv[1]; "
"""This Redline, whatever another checkout or environment holds, and nothing else of the folder that it is in."""
_WORKER = f"{_OWN}from redline.bench.worker import main; main(sys.argv[1:])"
_GUARDIAN = f"{_OWN}from redline.system.processes import guard; guard(int(sys.argv[1]), sys.argv[2:])"


class SpawnedProcess:
    """A worker behind its guardian."""

    def __init__(self, guardian: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._guardian = guardian
        self._line = line
        self._status: int | None = None
        line.settimeout(START_TIMEOUT_S)
        try:
            told = line.recv(REPLY_BYTES)
        except TimeoutError:
            guardian.kill()
            told = b""
        if not told:
            line.close()
            guardian.wait()
            raise DoorError("the worker could not be started")
        self.pid = int(told)

    def wait(self, timeout_s: float) -> int | None:
        if self._status is None:
            self._line.settimeout(max(timeout_s, 0.001))
            try:
                told = self._line.recv(REPLY_BYTES)
            except TimeoutError:
                return None
            code = int(told) if told else -9  # a guardian that says nothing was killed, and its worker with it
            self._status = -code if code < 0 else code << 8  # as os.waitpid would tell it
            self._line.close()
            self._guardian.wait()
        return self._status

    def kill(self) -> None:
        """The guardian ends whatever the worker has started when its line goes dead."""
        if self._status is None:
            self._line.close()
            self._guardian.wait()
            self._status = int(signal.SIGKILL)


class SpawnDoor(WorkerDoor):
    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        launch = spec.launch if spec else self._launch
        session = self._behind(launch) if launch.command_prefix else self._directly(launch)
        self._sessions.append(session)
        return session

    def _directly(self, launch: LaunchSpec) -> WorkerSession:
        keep_standard_descriptors()
        ours, theirs = socket.socketpair()
        log = worker_log()
        process = start_worker(launch, str(theirs.fileno()), log, inherited=(theirs.fileno(),))
        theirs.close()
        return WorkerSession(ours, process, log, launch)

    def _behind(self, launch: LaunchSpec) -> WorkerSession:
        """Behind a command, which starts the worker in its own way."""
        prefix = launch.command_prefix
        if shutil.which(prefix[0]) is None:
            raise UsageError(f"no such command: {prefix[0]!r} (asked for in front of the worker)")
        callback, log = Callback(), worker_log()
        process = start_worker(launch, callback.address, log)
        ours = callback.wait(lambda: process.wait(0.0) is None, CALLBACK_TIMEOUT_S)
        if ours is None:
            process.kill()
            said = log_tail(log).strip().splitlines()
            log.close()
            raise DoorError(f"no worker came up behind {prefix[0]!r}" + (f": {said[-1]}" if said else ""))
        return WorkerSession(ours, process, log, launch)


def start_worker(launch: LaunchSpec, where: str, log: IO[bytes], inherited: Sequence[int] = ()) -> SpawnedProcess:
    """A worker behind its guardian, told where to find its requests."""
    ours, python = str(Path(__file__).parents[2]), launch.python or sys.executable
    # -P: files in the working folder are the user's, also those called statistics.py.
    worker = [*launch.command_prefix, python, "-P", "-c", _WORKER, ours, where, repr(time.time())]
    return start_guarded(worker, launch, log, inherited)


def start_guarded(
    command: Sequence[str], launch: LaunchSpec, log: IO[bytes], inherited: Sequence[int] = ()
) -> SpawnedProcess:
    """A command behind a guardian, which leaves nothing of it behind."""
    line, guardians_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours = str(Path(__file__).parents[2])
    guardian = subprocess.Popen(
        [sys.executable, "-P", "-c", _GUARDIAN, ours, str(guardians_line.fileno()), *command],
        pass_fds=[*inherited, guardians_line.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd=launch.folder or current_folder() or "/",
        start_new_session=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths_of(launch, folder_last=True)),
            "REDLINE_WORKER_FDS": ",".join(map(str, inherited)),
        },
    )
    guardians_line.close()
    return SpawnedProcess(guardian, line)


FOLLOW_UP_TIMEOUT_S = 600.0


def run_script(launch: LaunchSpec, requests: Sequence[Request], folder: Path, timeout_s: float) -> None:
    """A worker behind a command: it follows a script from a file each time the command starts it."""
    script = folder / "requests.msgpack"
    script.write_bytes(write_script(requests))
    log = worker_log()
    tool = launch.command_prefix[0]
    process = start_worker(launch, f"script:{script}", log)
    status = process.wait(timeout_s)
    if status is None:
        process.kill()
    said = log_tail(log).strip().splitlines()
    log.close()
    if status is None:
        raise DoorError(f"{tool} did not end within {timeout_s:g} s; it was stopped")
    if status != 0:
        raise DoorError(f"{tool} failed: {said[-1] if said else f'status {status >> 8}'}")


def run_after(command: Sequence[str], output: Path, timeout_s: float = FOLLOW_UP_TIMEOUT_S) -> None:
    """Run a command to its end, what it prints going to a file."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout_s, check=False)
    except FileNotFoundError:
        raise DoorError(f"no such command: {command[0]!r}") from None
    except subprocess.TimeoutExpired:
        raise DoorError(f"{command[0]} {command[1]} did not end within {timeout_s:g} s; it was stopped") from None
    output.write_bytes(done.stdout)
    if done.returncode != 0:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines()
        raise DoorError(f"{command[0]} {command[1]} failed: {said[-1] if said else f'status {done.returncode}'}")
