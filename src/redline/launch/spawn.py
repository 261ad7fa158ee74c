"""The spawn door: a fresh interpreter per worker, with a command in front where one is asked for."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

from redline.errors import UsageError
from redline.launch.connection import WorkerSession, worker_log
from redline.spec import LaunchSpec, RunSpec

_PR_SET_PDEATHSIG = 1


class SpawnedProcess:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    def wait(self, timeout_s: float) -> int | None:
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return -code if code < 0 else code << 8  # as os.waitpid would tell it


class SpawnDoor:
    def __init__(self, launch: LaunchSpec) -> None:
        self._launch = launch
        self._sessions: list[WorkerSession] = []

    def open(self, spec: RunSpec | None = None) -> WorkerSession:
        launch = spec.launch if spec else self._launch
        prefix = launch.command_prefix
        if prefix and shutil.which(prefix[0]) is None:
            raise UsageError(f"no such command: {prefix[0]!r} (asked for in front of the worker)")
        ours, theirs = socket.socketpair()
        log = worker_log()
        process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "redline.bench.worker", *_arguments(theirs.fileno(), bool(prefix))],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=_die_with_desk,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
        )
        theirs.close()
        session = WorkerSession(ours, SpawnedProcess(process), log, launch)
        self._sessions.append(session)
        return session

    def close(self) -> None:
        for session in self._sessions:
            session.kill()
        self._sessions.clear()


def _arguments(descriptor: int, has_prefix: bool) -> list[str]:
    # Behind a command in front, the worker's parent is that command and dies with the desk in its place.
    return [str(descriptor), repr(time.time()), "0" if has_prefix else str(os.getpid())]


def _die_with_desk() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
