"""Starts a user's script with the watching hooks in it, passes signals on, and reads what the hooks write."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np

import redline
from redline.model.errors import UsageError

START = Path(redline.__file__).parent / "bench" / "watch" / "start"
"""Holds the `sitecustomize` that Python runs before the script."""

PASSED_ON = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_THE_KERNEL = 0x80
"""si_code of a signal that a terminal sends: the script, which is in the same group, has received it too."""
FROM_A_TERMINAL = tuple(getattr(signal, name) for name in ("SIGINT", "SIGQUIT") if hasattr(signal, name))
TICK_S = 0.2


class WindowPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which steps are captured."""

    steps: int
    after: int = 10
    """The capture begins after this many steps."""


def script_command(words: Sequence[str]) -> list[str]:
    """The command to start: `train.py …` and `-m package …` get an interpreter in front."""
    if not words:
        raise UsageError("name the command to watch: redline watch -- python train.py")
    if words[0] == "-m" and len(words) > 1:
        return [sys.executable, *words]
    if words[0].startswith("-"):
        raise UsageError(f"no such option: {words[0]} ('redline watch --help' lists the options)")
    if words[0].endswith(".py") and Path(words[0]).is_file() and not _starts_itself(words[0]):
        return [sys.executable, *words]
    if shutil.which(words[0]) is None:
        raise UsageError(f"cannot watch {words[0]!r}: there is no such command or script")
    return list(words)


def _starts_itself(script: str) -> bool:
    if not os.access(script, os.X_OK | os.R_OK):
        return False
    with open(script, "rb") as file:
        return file.read(2) == b"#!"


def watching_environment(folder: Path, plan: WindowPlan | None, base: Mapping[str, str]) -> dict[str, str]:
    before = base.get("PYTHONPATH")
    # torch's profiler writes to stderr, which is the script's, each time it starts and stops.
    quiet = {"KINETO_LOG_LEVEL": "99"} if plan is not None and "KINETO_LOG_LEVEL" not in base else {}
    return {
        **base,
        **quiet,
        "PYTHONPATH": os.pathsep.join([str(START), *([before] if before else [])]),
        "REDLINE_WATCH": str(folder),
        "REDLINE_WATCH_WINDOWS": plan_text(plan),
    }


def plan_text(plan: WindowPlan | None) -> str:
    return "" if plan is None else msgspec.json.encode(plan).decode()


def run_watched(command: Sequence[str], environment: Mapping[str, str], on_tick: Callable[[int], None]) -> int:
    """Run the command in the foreground; its exit code, or minus the number of the signal that ended it.

    `on_tick` is called with its process id a few times per second. Signals that are sent to us go on to it, whichever
    thread of ours gets them; only the main thread can see to that, so that in another one they have their usual effect.
    """
    is_main = threading.current_thread() is threading.main_thread()
    wanted = {getattr(signal, name) for name in PASSED_ON if hasattr(signal, name)} if is_main else set()
    caught: list[int] = []
    # This thread waits for them, which also tells where they come from. While it is busy, a thread of some library may
    # get them instead: then Python calls the handler.
    handlers = {number: signal.signal(number, lambda number, _: caught.append(number)) for number in wanted}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, wanted | {signal.SIGCHLD})
    try:
        try:
            script = subprocess.Popen(
                command,
                env=dict(environment),
                preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, before),
            )
        except OSError as error:
            raise UsageError(f"cannot start {command[0]!r}: {error.strerror}") from None
        while script.poll() is None:
            received = _wait_for_signal(wanted | {signal.SIGCHLD})
            if received is not None and received[0] != signal.SIGCHLD and received[1] != FROM_THE_KERNEL:
                script.send_signal(received[0])
            while caught:
                number = caught.pop(0)
                if not (number in FROM_A_TERMINAL and _is_in_foreground()):
                    script.send_signal(number)
            on_tick(script.pid)
        return script.returncode
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Whether a terminal's Ctrl-C and Ctrl-\\ reach us, and the script, which is in the same group, by themselves."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _wait_for_signal(wanted: set[signal.Signals]) -> tuple[int, int] | None:
    """Number and origin; None when none came for a moment."""
    if hasattr(signal, "sigtimedwait"):
        received = signal.sigtimedwait(wanted, TICK_S)
        return None if received is None else (received.si_signo, received.si_code)
    time.sleep(TICK_S)  # pragma: no cover  (no other system tells where a signal comes from)
    pending = signal.sigpending() & wanted
    return (signal.sigwait(pending), 0) if pending else None


def end_like(exit_code: int) -> int:
    """What to exit with; does not return where a signal ended the script: that ends us as well."""
    if exit_code >= 0:
        return exit_code
    number = -exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    if hasattr(signal, "SIGKILL") and number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))  # its dump is enough
    os.kill(os.getpid(), number)
    return 128 + number


ROW_BYTES = 32
"""Of a row: kind, key, value and time, as 64-bit floats."""


class Reader(Protocol):
    """Makes something of rows: kind, key, value, time and number."""

    def read(self, rows: Iterable[tuple[str, float, float, float, int]]) -> None: ...


class ProcessLog:
    """What one watched process has written so far."""

    def __init__(self, stem: Path, reader: Reader) -> None:
        self._stem = stem
        self._at = {".rows": mmap.ALLOCATIONGRANULARITY, ".facts": 0}
        """How far its files have been read. The first page of the rows names their kinds."""
        self._kinds: list[str] = []
        self._number = 0
        self.reader: Any = reader
        self.facts: dict[str, dict[str, Any]] = {}
        """The last of each kind."""
        self.pulses: list[dict[str, Any]] = []
        self.windows: list[dict[str, Any]] = []

    def refresh(self) -> None:
        rows = np.frombuffer(self._new(".rows", ROW_BYTES), dtype="<f8").reshape(-1, 4)
        unwritten = np.flatnonzero(rows[:, 3] == 0)
        rows = rows[: unwritten[0]] if len(unwritten) else rows
        self._at[".rows"] += rows.nbytes
        if len(rows) and not self._kinds:
            with open(f"{self._stem}.rows", "rb") as file:
                self._kinds = json.loads(file.readline())
        self.reader.read(
            (self._kinds[int(kind)], key, value, at, self._number + row)
            for row, (kind, key, value, at) in enumerate(rows.tolist())
        )
        self._number += len(rows)
        written = self._new(".facts")
        written = written[: written.rfind(b"\n") + 1]
        self._at[".facts"] += len(written)
        for line in written.splitlines():
            fact = json.loads(line)
            self.facts[fact["kind"]] = fact
            if fact["kind"] in ("pulse", "window"):
                (self.pulses if fact["kind"] == "pulse" else self.windows).append(fact)

    @property
    def process(self) -> dict[str, Any]:
        return self.facts.get("process", {})

    def _new(self, suffix: str, whole: int = 1) -> bytes:
        """What has not been read yet, in whole pieces of so many bytes."""
        path = Path(f"{self._stem}{suffix}")
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self._at[suffix])
            data = file.read()
        return data[: len(data) // whole * whole]


class SpoolReader:
    """The logs of every process that was watched, as far as they have been written."""

    def __init__(self, folder: Path, make_reader: Callable[[], Any]) -> None:
        self._folder = folder
        self._make_reader = make_reader
        self._logs: dict[str, ProcessLog] = {}

    def refresh(self) -> list[ProcessLog]:
        for path in sorted(self._folder.glob("*.facts")) + sorted(self._folder.glob("*.rows")):
            stem = str(path.with_suffix(""))
            if stem not in self._logs:
                self._logs[stem] = ProcessLog(Path(stem), self._make_reader())
        for log in self._logs.values():
            log.refresh()
        return list(self._logs.values())
