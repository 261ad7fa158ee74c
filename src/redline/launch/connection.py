"""This is the desk's end of a session: one worker, or several ranks that answer as one.

Every request goes to each worker over a line of its own, and their answers become one. A worker that dies, raises or hangs
is known by its number, whoever started it and wherever it runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from redline.launch.door import Session
from redline.launch.ranks import hanging, merged
from redline.model.errors import DoorError
from redline.model.protocol import (
    Ask,
    Close,
    ClosedReply,
    FailureReply,
    Hello,
    OnProgress,
    Position,
    Prepare,
    Profile,
    Progress,
    Reply,
    Request,
    Where,
    receive_reply,
    send,
)
from redline.model.record import Closed, Failure, FailureKind
from redline.model.spec import LaunchSpec

LONGEST_LOOK_S = 1.0
"""The log of a silent worker is trimmed this often. A timeout may also be longer than `poll` can count."""
ASK_TIMEOUT_S = 180.0
"""A question must be answered within this time."""
END_TIMEOUT_S = 5.0
"""A worker that has hung up must end within this time."""
GRACE_S = 3.0
"""After the first rank has failed, the others have this long to say whether they failed too, or where they are."""
LOG_TAIL_BYTES = 4000
"""This many bytes from the end of a log are read to say what a worker last wrote."""
LOG_LIMIT_BYTES = 16 << 20
"""A log that is longer is trimmed, because a model may print in every step."""
LOG_KEPT_BYTES = 64 << 10
"""This many bytes of a trimmed log are kept, from its end."""
PRINTED_LINES = 20
"""A record keeps this many lines of what its worker printed."""
_VMSTAT = Path("/proc/vmstat")


class Process(Protocol):
    """This is a process that the desk had started. Its process group holds everything that it started itself."""

    pid: int

    def wait(self, timeout_s: float) -> int | None:
        """Returns the exit status as `os.waitpid` does, or None while it still runs."""

    def kill(self) -> None:
        """End it with all that it started, and wait until it has ended."""


@dataclass
class Line:
    """A line is the desk's end of one worker."""

    connection: socket.socket
    pid: int | None = None
    """It is None for a rank on another machine, which no signal reaches."""
    process: Process | None = None
    """The worker itself, or torchrun, which has started it."""
    rank: int = 0
    stage: str = "start"
    reply: Reply | None = None
    position: Position | None = None
    is_gone: bool = False
    failed_at: float = math.inf

    @property
    def failure(self) -> Failure | None:
        return self.reply.failure if isinstance(self.reply, FailureReply) else None

    @property
    def is_victim(self) -> bool:
        """Returns true if it failed because another rank went away or never came."""
        return self.failure is not None and any(note.code == "broken-collective" for note in self.failure.notes)


class WorkerSession(Session):
    """This is the session of one worker, or of several ranks."""

    def __init__(self, lines: Sequence[Line], log: IO[bytes], launch: LaunchSpec) -> None:
        self._lines = sorted(lines, key=lambda line: line.rank)
        self._log = log
        self._launch = launch
        self._dead: Failure | None = None
        """The session has ended with this; every later question gets it as its answer."""
        self._paused_at: float | None = None
        self._released = False
        self._deadline = self._limit_s = 0.0
        self._oom_kills = kernel_oom_kills()

    @property
    def pids(self) -> list[int]:
        """Returns the process ids of the workers on this machine."""
        return [line.pid for line in self._lines if line.pid is not None]

    def begin(self, request: Request) -> None:
        if self._dead is not None:
            return
        self.resume()
        self._limit_s = timeout_of(request, self._launch)
        self._deadline = time.monotonic() + self._limit_s
        for line in self._lines:
            line.reply, line.position, line.stage = None, None, type(request).__name__.lower()
            try:
                line.connection.settimeout(self._limit_s)
                send(line.connection, self._for_rank(request, line.rank))
            except (TimeoutError, ConnectionError):
                self._hang_up(line)

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while self._dead is None and self._silent:
            trim_log(self._log)
            self._hear(min(self._next_moment(), until) - time.monotonic(), on_progress)
            now = time.monotonic()
            if self._silent and now >= self._next_moment():
                self._give_up()
            elif self._silent and now >= until:
                return None
        return self._answer() if self._dead is None else FailureReply(failure=self._dead)

    def pause(self) -> None:
        if self._dead is None and self._paused_at is None:
            self._signal(signal.SIGSTOP)
            self._paused_at = time.monotonic()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._signal(signal.SIGCONT)
            self._deadline += time.monotonic() - self._paused_at  # they could not work meanwhile
            self._paused_at = None

    def close(self) -> Closed:
        if self._released:
            return Closed()
        reply = self.ask(Close()) if self._dead is None else None
        closed = reply.closed if isinstance(reply, ClosedReply) else None
        grace_s = 0.0 if closed is None else self._launch.close_timeout_s
        if None in [process.wait(grace_s) for process in self._processes]:
            self._end()
        printed = [line.rstrip() for line in log_tail(self._log).splitlines() if line.strip()]
        self._release()
        return msgspec.structs.replace(closed or Closed(), printed="\n".join(printed[-PRINTED_LINES:]))

    def kill(self) -> None:
        if not self._released:
            self._end()
            self._release()

    def fail(self, failure: Failure) -> FailureReply:
        """Ends every worker, and answers every question with this failure from now on."""
        self._end()
        self._dead = failure if failure.traceback else msgspec.structs.replace(failure, traceback=log_tail(self._log))
        return FailureReply(failure=self._dead)

    # Hearing

    @property
    def _silent(self) -> list[Line]:
        return [line for line in self._lines if line.reply is None]

    def _next_moment(self) -> float:
        """Returns the deadline; once a rank has failed, the others have only a moment to say so too."""
        return min([self._deadline, *(line.failed_at + GRACE_S for line in self._lines)])

    def _hear(self, within_s: float, on_progress: OnProgress | None = None) -> None:
        lines: dict[Any, Line] = {line.connection: line for line in self._lines if not line.is_gone}
        for connection in wait(list(lines), min(max(within_s, 0.0), LONGEST_LOOK_S)):
            self._take(lines[connection], on_progress)

    def _take(self, line: Line, on_progress: OnProgress | None) -> None:
        """Reads one message. A message that has begun is read whole, so that a short look never splits one."""
        try:
            line.connection.settimeout(max(self._deadline - time.monotonic(), 0.001))
            reply = receive_reply(line.connection)
        except TimeoutError:
            return  # the deadline has passed
        except ConnectionError:
            reply = None
        except DoorError as error:
            self._hang_up(line, str(error))
            return
        match reply:
            case None:
                self._hang_up(line)
            case Progress(stage=stage, training=training):
                line.stage = stage
                if training is not None:  # an epoch may take hours; what counts is that it goes on
                    self._deadline = time.monotonic() + self._limit_s
                if on_progress and line is self._lines[0]:
                    on_progress(reply)
            case Position():
                line.position = reply
            case Hello():
                pass  # of a rank that was forked, whose number is known
            case _:
                line.reply = reply
                line.failed_at = time.monotonic() if line.failure is not None else math.inf

    def _hang_up(self, line: Line, nonsense: str = "") -> None:
        """Notes how a worker ended whose connection broke, or that it sent `nonsense`."""
        line.is_gone, line.failed_at = True, min(line.failed_at, time.monotonic())
        if line.failure is None or line.is_victim:
            death: tuple[FailureKind, str] = ("crash", nonsense) if nonsense else self._death_of(line)
            kind, message = death
            line.reply = FailureReply(failure=Failure(stage=line.stage, kind=kind, message=message))

    def _death_of(self, line: Line) -> tuple[FailureKind, str]:
        ranks, at = len(self._lines), f"at '{line.stage}'"
        who = "the worker" if ranks == 1 else f"rank {line.rank} of {ranks}"
        is_known = line.process is not None and line.process.pid == line.pid
        status = line.process.wait(END_TIMEOUT_S) if line.process is not None and is_known else None
        code = None if status is None else os.waitstatus_to_exitcode(status)
        has_memory_ended = kernel_oom_kills() > self._oom_kills
        if has_memory_ended and (not is_known or code == -signal.SIGKILL):
            return "oom", f"the kernel killed {who} {at}: the machine ran out of memory"
        if not is_known:
            return "crash", f"{who} died {at}"
        if code is None:
            return "crash", f"{who} hung up {at} and did not end within {END_TIMEOUT_S:g} s; it was stopped"
        how = f"exited with status {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
        return "crash", f"{who} {how} {at}"

    # Answering

    def _answer(self) -> Reply:
        failed = [line for line in self._lines if line.failure is not None]
        if not failed or (len(self._lines) == 1 and not failed[0].is_gone):
            return merged([line.reply for line in self._lines if line.reply is not None])
        return self.fail(self._cause(failed))

    def _give_up(self) -> None:
        """Ends the session because a rank failed and others wait for it, or because nobody answers in time."""
        failed = [line for line in self._lines if line.failure is not None]
        if failed and not all(line.is_victim for line in failed):
            self.fail(self._cause(failed))
            return
        asked, until = self._silent, time.monotonic() + GRACE_S
        if len(self._lines) > 1:
            for line in asked:
                with contextlib.suppress(OSError):
                    line.connection.settimeout(1.0)
                    send(line.connection, Where())
            self._deadline = max(self._deadline, until)
            while any(line.position is None and line.reply is None for line in asked) and time.monotonic() < until:
                self._hear(until - time.monotonic())
        places = {line.rank: line.position or line.stage for line in asked}
        self.fail(hanging(places, len(self._lines), self._limit_s))

    def _cause(self, failed: Sequence[Line]) -> Failure:
        """Returns the first failure that no other rank caused, with the rank's number."""
        culprits = [line for line in failed if not line.is_victim] or failed
        first, ranks = min(culprits, key=lambda line: (line.failed_at, line.rank)), len(self._lines)
        failure = first.failure
        assert failure is not None
        if ranks == 1:
            return failure
        alike = {(line.failure.kind, line.failure.message) for line in failed if line.failure}
        if len(failed) == ranks and len(alike) == 1:
            return msgspec.structs.replace(failure, message=f"on every rank: {failure.message}")
        message = failure.message if first.is_gone else f"rank {first.rank} of {ranks}: {failure.message}"
        return msgspec.structs.replace(failure, message=message, rank=first.rank)

    def _for_rank(self, request: Request, rank: int) -> Request:
        """Each of several ranks writes its own trace."""
        if len(self._lines) == 1 or not isinstance(request, Profile) or not request.path:
            return request
        stem, dot, ending = request.path.partition(".json")
        return msgspec.structs.replace(request, path=f"{stem}.rank{rank}{dot}{ending}")

    # Ending

    @property
    def _processes(self) -> list[Process]:
        return list({line.process.pid: line.process for line in self._lines if line.process is not None}.values())

    def _signal(self, number: signal.Signals) -> None:
        """Sends a signal to every worker on this machine, with all that it started.

        A worker that has ended gets none, and neither does one whose starter has ended: its number may be somebody else's by now.
        """
        for line in self._lines:
            if line.pid is not None and line.process is not None:
                signal_group(line.process, number, line.pid)

    def _end(self) -> None:
        """Workers elsewhere end when their line does."""
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.kill()

    def _release(self) -> None:
        self._released = True
        self._dead = self._dead or Failure(stage="closed", kind="crash", message="the session is closed")
        for line in self._lines:
            line.connection.close()
        self._log.close()


def signal_group(process: Process, number: signal.Signals, group: int | None = None) -> None:
    """Sends a signal to the group of a process, or to `group`, as long as the process runs."""
    if process.wait(0.0) is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group or process.pid, number)


def timeout_of(request: Request, launch: LaunchSpec) -> float:
    if isinstance(request, Ask):
        return ASK_TIMEOUT_S
    if isinstance(request, Close):
        return launch.close_timeout_s
    if isinstance(request, Prepare | Profile):
        return launch.prepare_timeout_s
    # The work that is asked for may itself take this long, so the time for it is added.
    return launch.measure_timeout_s + sum(
        getattr(request, name, 0.0) for name in ("seconds", "deadline_s", "loader_timeout_s")
    )


def kernel_oom_kills() -> int:
    """Returns how many processes the kernel has ended for want of memory since it started."""
    counter = re.search(r"^oom_kill (\d+)", _VMSTAT.read_text(), re.MULTILINE) if _VMSTAT.exists() else None
    return int(counter[1]) if counter else 0


# The log of a worker


def worker_log() -> IO[bytes]:
    """Returns a file without a name: it goes when the last holder closes it, also after a SIGKILL."""
    log = tempfile.TemporaryFile(prefix="redline-worker-")  # noqa: SIM115  (its session closes it)
    # Whoever writes does so at the end, also after `trim_log`.
    fcntl.fcntl(log, fcntl.F_SETFL, fcntl.fcntl(log, fcntl.F_GETFL) | os.O_APPEND)
    return log


def trim_log(log: IO[bytes]) -> None:
    """Keep only the end of a log that has grown too long: a model may print in every step."""
    if os.fstat(log.fileno()).st_size > LOG_LIMIT_BYTES:
        tail = _end_of(log, LOG_KEPT_BYTES)
        os.ftruncate(log.fileno(), 0)
        os.write(log.fileno(), tail)


def log_tail(log: IO[bytes]) -> str:
    """Returns the last that a worker, or what stands in front of it, wrote to its log."""
    return _end_of(log, LOG_TAIL_BYTES).decode("utf-8", "replace")


def _end_of(log: IO[bytes], count: int) -> bytes:
    log.flush()
    return os.pread(log.fileno(), count, max(0, os.fstat(log.fileno()).st_size - count))


def last_line(text: str, otherwise: str) -> str:
    """Returns the last line that says something, or `otherwise` if none does."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), otherwise)
