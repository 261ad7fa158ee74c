"""The spawn door: a fresh interpreter per worker, with a command in front where one is asked for."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time

from redline.errors import DoorError, UsageError
from redline.launch.connection import WorkerDoor, WorkerSession, worker_log
from redline.launch.guardian import REPLY_BYTES
from redline.spec import RunSpec

START_TIMEOUT_S = 60.0


class SpawnedProcess:
    """A worker behind its guardian."""

    def __init__(self, guardian: subprocess.Popen[bytes], line: socket.socket) -> None:
        self._guardian = guardian
        self._line = line
        self._status: int | None = None
        line.settimeout(START_TIMEOUT_S)
        told = line.recv(REPLY_BYTES)
        if not told:
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


class SpawnDoor(WorkerDoor):
    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        launch = spec.launch if spec else self._launch
        prefix = launch.command_prefix
        if prefix and shutil.which(prefix[0]) is None:
            raise UsageError(f"no such command: {prefix[0]!r} (asked for in front of the worker)")
        ours, theirs = socket.socketpair()
        line, guardians_line = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        log = worker_log()
        worker = [*prefix, sys.executable, "-m", "redline.bench.worker", str(theirs.fileno()), repr(time.time())]
        guardian = subprocess.Popen(
            [sys.executable, "-m", "redline.launch.guardian", str(guardians_line.fileno()), *worker],
            pass_fds=[theirs.fileno(), guardians_line.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),
                "REDLINE_WORKER_FDS": str(theirs.fileno()),
            },
        )
        theirs.close()
        guardians_line.close()
        session = WorkerSession(ours, SpawnedProcess(guardian, line), log, launch)
        self._sessions.append(session)
        return session
