"""The desk's end of a worker: asking it, noticing how it ended, and ending it."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

import msgspec

from redline.launch.door import Session
from redline.model.errors import DoorError
from redline.model.protocol import (
    AllReduce,
    Ask,
    Close,
    ClosedReply,
    FailureReply,
    Feed,
    Load,
    Measure,
    OnProgress,
    Progress,
    Reply,
    Request,
    Squeeze,
    TrainEpoch,
    receive_reply,
    send,
)
from redline.model.record import Closed, Failure, FailureKind
from redline.model.spec import LaunchSpec

LOOK_EVERY_S = 0.2
LONGEST_LOOK_S = 1.0
"""While a worker is silent its log is looked after; and a timeout may be longer than `poll` can count."""


class Callback:
    """An address at which a worker calls.

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


ASK_TIMEOUT_S = 180.0
END_TIMEOUT_S = 5.0
"""For a worker to be gone that has hung up, or was killed."""
KILL_TIMEOUT_S = 20.0
LOG_TAIL_CHARACTERS = 4000
LOG_LIMIT_BYTES = 16 << 20
LOG_KEPT_BYTES = 64 << 10
PRINTED_LINES = 20
"""Of what a worker printed, kept with its record."""
_VMSTAT = Path("/proc/vmstat")


class WorkerProcess(Protocol):
    """The process behind the socket. Its process group holds everything it started."""

    pid: int

    def wait(self, timeout_s: float) -> int | None:
        """The exit status as `os.waitpid` tells it, or None when it still runs."""


class WorkerSession(Session):
    """The desk's end of one isolated worker."""

    def __init__(self, connection: socket.socket, process: WorkerProcess, log: IO[bytes], launch: LaunchSpec) -> None:
        self._connection = connection
        self._process = process
        self._log = log
        self._launch = launch
        self._stage = "start"
        self._dead: Failure | None = None
        self._paused = False
        self._released = False
        self._oom_kills = kernel_oom_kills()
        self._deadline = 0.0
        self._limit_s = 0.0
        self._paused_at = 0.0

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, request: Request) -> None:
        if self._dead is not None:
            return
        self.resume()
        trim_log(self._log)
        self._stage = stage_of(request)
        self._limit_s = timeout_of(request, self._launch)
        self._deadline = time.monotonic() + self._limit_s
        try:
            self._connection.settimeout(self._limit_s)
            send(self._connection, request)
        except (TimeoutError, ConnectionError):
            self._died()

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._dead is None:
            if self._has_sent_something(min(self._deadline, until) - time.monotonic()):
                # A frame that has begun is read whole, so that looking in briefly never splits one.
                reply = self._received()
                if not isinstance(reply, Progress):
                    trim_log(self._log)
                    return reply
                self._stage = reply.stage
                if reply.training is not None:  # an epoch may take hours; what counts is that it goes on
                    self._deadline = time.monotonic() + self._limit_s
                if on_progress:
                    on_progress(reply)
            elif time.monotonic() >= self._deadline:
                return FailureReply(failure=self._timed_out(self._limit_s))
            elif time.monotonic() >= until:
                return None
            trim_log(self._log)
        return FailureReply(failure=self._dead)

    def _has_sent_something(self, within_s: float) -> bool:
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        return bool(poll.poll(1000 * min(max(within_s, 0.0), LONGEST_LOOK_S)))

    def _received(self) -> Reply:
        try:
            self._connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            reply = receive_reply(self._connection)
            return FailureReply(failure=self._died()) if reply is None else reply
        except TimeoutError:
            return FailureReply(failure=self._timed_out(self._limit_s))
        except ConnectionError:
            return FailureReply(failure=self._died())
        except DoorError as error:
            self._signal(signal.SIGKILL)
            self._dead = Failure(stage=self._stage, kind="crash", message=str(error), traceback=log_tail(self._log))
            return FailureReply(failure=self._dead)

    def pause(self) -> None:
        if self._dead is None and not self._paused:
            self._signal(signal.SIGSTOP)
            self._paused, self._paused_at = True, time.monotonic()

    def resume(self) -> None:
        if self._paused:
            self._signal(signal.SIGCONT)
            self._paused = False
            self._deadline += time.monotonic() - self._paused_at  # it could not work meanwhile

    def close(self) -> Closed:
        if self._released:
            return Closed()
        reply = self.ask(Close()) if self._dead is None else None
        if self._process.wait(self._launch.close_timeout_s if reply is not None else 0.0) is None:
            self._signal(signal.SIGKILL)
            self._process.wait(KILL_TIMEOUT_S)
        printed = last_lines(log_tail(self._log))
        self._release()
        closed = reply.closed if isinstance(reply, ClosedReply) else Closed()
        return msgspec.structs.replace(closed, printed=printed)

    def kill(self) -> None:
        """End the worker and all it started, now."""
        if self._released:
            return
        self._signal(signal.SIGKILL)
        self._process.wait(KILL_TIMEOUT_S)
        self._release()

    def _release(self) -> None:
        self._released = True
        self._dead = self._dead or Failure(stage="closed", kind="crash", message="the session is closed")
        self._connection.close()
        self._log.close()

    def _died(self) -> Failure:
        status = self._process.wait(END_TIMEOUT_S)
        if status is None:
            self._signal(signal.SIGKILL)
            self._process.wait(END_TIMEOUT_S)
        kind, message = cause_of_death(status, self._stage, kernel_oom_kills() > self._oom_kills)
        self._dead = Failure(stage=self._stage, kind=kind, message=message, traceback=log_tail(self._log))
        return self._dead

    def _timed_out(self, limit_s: float) -> Failure:
        self._signal(signal.SIGKILL)
        self._process.wait(END_TIMEOUT_S)
        message = f"no answer within {limit_s:g} s while the worker was at '{self._stage}'; it was stopped"
        self._dead = Failure(stage=self._stage, kind="timeout", message=message, traceback=log_tail(self._log))
        return self._dead

    def _signal(self, number: signal.Signals) -> None:
        """To the worker's whole group; not to one that has ended, whose number may be somebody else's by now."""
        if self._process.wait(0.0) is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)


class Killable(Protocol):
    def kill(self) -> None: ...


class WorkerDoor:
    """What doors to worker processes have in common: they know their sessions and end them."""

    def __init__(self, launch: LaunchSpec) -> None:
        self._launch = launch
        self._sessions: list[Killable] = []

    def close(self) -> None:
        for session in self._sessions:
            session.kill()
        self._sessions.clear()


def worker_log() -> IO[bytes]:
    """A file without a name: it goes when the last holder closes it, also after a SIGKILL."""
    log = tempfile.TemporaryFile(prefix="redline-worker-")  # noqa: SIM115  (its session closes it)
    # Whoever writes does so at the end, also after `trim_log`.
    fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
    return log


def trim_log(log: IO[bytes]) -> None:
    """Keep only the end of a log that has grown too long: a model may print in every step."""
    size = os.fstat(log.fileno()).st_size
    if size > LOG_LIMIT_BYTES:
        tail = os.pread(log.fileno(), LOG_KEPT_BYTES, size - LOG_KEPT_BYTES)
        os.ftruncate(log.fileno(), 0)
        os.write(log.fileno(), tail)


def current_folder() -> str:
    """Empty where somebody has removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def paths_of(launch: LaunchSpec, *, folder_last: bool = False) -> list[str]:
    """Where a worker imports from: as this process does, with the modules of `launch.folder`'s project first.

    Entries inside this project's checkout are replaced by their counterparts in the other, so that an editable install
    leads there too. Another interpreter knows its own packages.
    `folder_last`: modules of the working folder do not hide others.
    """
    known = sorted(sys.path, key=lambda entry: entry == "") if folder_last else sys.path
    entries = [] if launch.python else [found for entry in known if (found := entry or current_folder())]
    if not launch.folder:
        return entries
    there, here = checkout_of(launch.folder), checkout_of(current_folder() or "/")
    own = [launch.folder, there, os.path.join(there, "src")]
    moved = [_moved(entry, here, there) for entry in entries]
    return list(dict.fromkeys([*(entry for entry in own if os.path.isdir(entry)), *moved]))


def checkout_of(folder: str) -> str:
    """The root of the git checkout that a folder is in; itself where it is in none."""
    for path in (Path(folder), *Path(folder).parents):
        if (path / ".git").exists():
            return str(path)
    return folder


def _moved(entry: str, here: str, there: str) -> str:
    inside = os.path.relpath(os.path.realpath(entry), os.path.realpath(here))
    counterpart = os.path.normpath(os.path.join(there, inside))
    return counterpart if not inside.startswith("..") and os.path.isdir(counterpart) else entry


def log_tail(log: IO[bytes]) -> str:
    """The last that a worker, or what stands in front of it, wrote to its log."""
    log.flush()
    size = os.fstat(log.fileno()).st_size
    tail = os.pread(log.fileno(), LOG_TAIL_CHARACTERS, max(0, size - LOG_TAIL_CHARACTERS))
    return tail.decode("utf-8", "replace")


def last_lines(tail: str) -> str:
    return "\n".join([line.rstrip() for line in tail.splitlines() if line.strip()][-PRINTED_LINES:])


def stage_of(request: Request) -> str:
    return type(request).__name__.lower()


def timeout_of(request: Request, launch: LaunchSpec) -> float:
    if isinstance(request, Measure | Feed):
        return launch.measure_timeout_s + request.seconds
    if isinstance(request, Load):
        return launch.measure_timeout_s + request.deadline_s
    if isinstance(request, TrainEpoch):
        return launch.measure_timeout_s + request.loader_timeout_s
    if isinstance(request, Squeeze | AllReduce):
        return launch.measure_timeout_s
    if isinstance(request, Ask):
        return ASK_TIMEOUT_S
    if isinstance(request, Close):
        return launch.close_timeout_s
    return launch.prepare_timeout_s


def cause_of_death(
    status: int | None, stage: str, kernel_oom: bool, who: str = "the worker"
) -> tuple[FailureKind, str]:
    if status is None:
        return "crash", f"{who} hung up at '{stage}' and did not end within {END_TIMEOUT_S:g} s; it was stopped"
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name
        if number == signal.SIGKILL and kernel_oom:
            return "oom", f"the kernel killed {who} at '{stage}': the machine ran out of memory"
        return "crash", f"{who} died of {name} at '{stage}'"
    return "crash", f"{who} exited with status {os.WEXITSTATUS(status)} at '{stage}'"


def kernel_oom_kills() -> int:
    if not _VMSTAT.exists():
        return 0
    found = re.search(r"^oom_kill (\d+)", _VMSTAT.read_text(), re.MULTILINE)
    return int(found.group(1)) if found else 0
