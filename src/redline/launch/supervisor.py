"""This is the desk's end of the processes that start workers. It says what a worker takes over from this process, and how it ended."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from redline.launch.connection import last_line, log_tail, signal_group, worker_log
from redline.model.errors import DoorError
from redline.model.spec import LaunchSpec
from redline.system.processes import keep_standard_descriptors

START_TIMEOUT_S = 180.0
"""Importing torch from a slow disk takes minutes."""
REPLY_TIMEOUT_S = 120.0
"""A supervisor must have started a worker within this time."""
LEAVE_TIMEOUT_S = 20.0
"""We wait so long for a process to end after it was told to."""
SOURCE = str(Path(__file__).parents[2])
"""This is the folder that holds Redline."""
SAFE_IMPORT = {
    # OpenBLAS starts its threads while numpy is imported.
    "OPENBLAS_NUM_THREADS": "1",
    # A package that asks for CUDA while it is imported is answered through NVML, so that the CUDA driver stays out of this process.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""These variables are set while a supervisor imports torch; its workers have those of the desk."""
_MOST_BYTES = 1 << 16
"""A message of a supervisor has at most so many bytes."""
_MAIN = "import sys; sys.path.append(sys.argv[2]); from redline.bench.supervisor import main; main(sys.argv)"
"""The folder of Redline comes last: nothing else in it is to hide a module of Python's."""


class Supervisor:
    """A supervisor is a process of `redline.bench.supervisor`. One that is to fork workers starts by importing torch."""

    def __init__(self, *, forks: bool) -> None:
        keep_standard_descriptors()
        # SEQPACKET keeps messages whole and ends with the last holder, so the supervisor notices a killed desk.
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = worker_log()
        self._process = subprocess.Popen(
            # -P: files in the working folder are the user's, also those called statistics.py.
            [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno()), SOURCE, "torch" if forks else "plain"],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={**os.environ, **SAFE_IMPORT},
            cwd="/",
            start_new_session=True,
        )
        theirs.close()
        self._exits: dict[int, int] = {}
        self._lock = threading.Lock()
        self._is_ready = False

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def start(
        self,
        launch: LaunchSpec,
        log: IO[bytes],
        *,
        line: socket.socket | None = None,
        command: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> WorkerProcess:
        """Starts the command, or without one forks a worker that talks on `line`. It writes into the log.

        `variables` are added to its environment.
        """
        environ = {**os.environ, **(variables or {})}
        if command:
            environ["PYTHONPATH"] = os.pathsep.join(paths_of(launch, folder_last=True))
        request = [
            [os.fsencode(word) for word in command],
            [(os.fsencode(name), os.fsencode(value)) for name, value in environ.items()],
            [os.fsencode(entry) for entry in paths_of(launch)],
            # Nothing can be loaded from inside a folder that was removed: a worker then starts at the root.
            os.fsencode(launch.folder or current_folder() or "/"),
            time.time(),
        ]
        with self._lock, tempfile.TemporaryFile(prefix="redline-request-") as file:  # a message of a socket is small
            file.write(msgspec.msgpack.encode(request))
            file.seek(0)
            descriptors = [end.fileno() for end in (log, file, line) if end is not None]
            try:
                if not self._is_ready:
                    self._receive("ready", START_TIMEOUT_S)
                    self._is_ready = True
                socket.send_fds(self._control, [b"."], descriptors)
                return WorkerProcess(self, int(self._receive("started", REPLY_TIMEOUT_S)["started"]))
            except TimeoutError:
                raise DoorError("the process that starts workers did not answer in time") from None

    def exit_status(self, pid: int, timeout_s: float) -> int | None:
        """Returns the exit status as `os.waitpid` tells it, or None while the worker still runs."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while pid not in self._exits:
                try:
                    self._receive("exited", max(deadline - time.monotonic(), 0.001))
                except TimeoutError:
                    return None
                except DoorError:
                    return int(signal.SIGKILL)  # the supervisor died, and its workers with it
            return self._exits[pid]

    def close(self) -> None:
        self._control.close()  # it sees the end of the stream, kills its workers and leaves
        if not self._is_ready:
            self._process.kill()  # it is importing torch, and has no worker yet
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(LEAVE_TIMEOUT_S)
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _receive(self, wanted: str, timeout_s: float) -> dict[str, Any]:
        """Returns the next event of one kind; exits received meanwhile are remembered."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._control.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                body = self._control.recv(_MOST_BYTES)
            except ConnectionError:
                body = b""
            if not body:
                self._process.poll()
                why = last_line(log_tail(self._log), f"it exited with status {self._process.returncode}")
                raise DoorError(f"the process that starts workers is gone: {why}")
            event: dict[str, Any] = msgspec.msgpack.decode(body)
            if "exited" in event:
                self._exits[event["exited"]] = event["status"]
            if wanted in event:
                return event


class WorkerProcess:
    """This is a process that a supervisor started."""

    def __init__(self, supervisor: Supervisor, pid: int) -> None:
        self._supervisor = supervisor
        self.pid = pid

    def wait(self, timeout_s: float) -> int | None:
        return self._supervisor.exit_status(self.pid, timeout_s)

    def kill(self) -> None:
        """Ends it with all that it started."""
        signal_group(self, signal.SIGKILL)
        self.wait(LEAVE_TIMEOUT_S)


_supervisors: dict[bool, Supervisor] = {}


def shared_supervisor(*, forks: bool) -> Supervisor:
    """Returns the supervisor of this process. Starting one that forks costs an import of torch."""
    if forks not in _supervisors or not _supervisors[forks].is_alive:
        _supervisors[forks] = Supervisor(forks=forks)
        atexit.register(_supervisors[forks].close)
    return _supervisors[forks]


# These functions say where a worker imports from.


def current_folder() -> str:
    """Returns the working folder, or nothing where somebody has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def paths_of(launch: LaunchSpec, *, folder_last: bool = False) -> list[str]:
    """Returns where a worker imports from: as this process does, with the modules of `launch.folder`'s project first.

    Entries inside this project's checkout are replaced by their counterparts in the other, so that an editable install
    leads there too. Another interpreter knows its own packages.
    `folder_last`: modules of the working folder do not hide others.
    """
    known = sorted(sys.path, key=lambda entry: entry == "") if folder_last else sys.path
    entries = [] if launch.python else [path for entry in known if (path := entry or current_folder())]
    if not launch.folder:
        return entries
    here, there = (Path(checkout_of(folder)) for folder in (current_folder() or "/", launch.folder))

    def moved(entry: str) -> str:
        inside = os.path.relpath(os.path.realpath(entry), here.resolve())
        is_there = not inside.startswith("..") and (there / inside).is_dir()
        return os.path.normpath(there / inside) if is_there else entry

    own = [folder for folder in (Path(launch.folder), there, there / "src") if folder.is_dir()]
    return list(dict.fromkeys([*map(str, own), *map(moved, entries)]))


def checkout_of(folder: str) -> str:
    """Returns the root of the git checkout that a folder is in, or the folder itself where it is in none."""
    for path in (Path(folder), *Path(folder).parents):
        if (path / ".git").exists():
            return str(path)
    return folder
