"""Starts a user's script with the watching hooks in it, passes signals on, and reads what the hooks write."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import redline
from redline.model.errors import UsageError
from redline.model.watching import PHASES

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
    handlers = {each: signal.signal(each, lambda number, _: caught.append(number)) for each in wanted}
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
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _is_in_foreground() -> bool:
    """Whether a terminal's Ctrl-C and Ctrl-\\ reach us, and the script, which is in the same group, by themselves."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def _wait_for_signal(wanted: set[signal.Signals]) -> tuple[int, int] | None:
    """Number and origin; None when none came for a moment."""
    if hasattr(signal, "sigtimedwait"):
        found = signal.sigtimedwait(wanted, TICK_S)
        return None if found is None else (found.si_signo, found.si_code)
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


Rows = np.ndarray[Any, np.dtype[np.float64]]
LIKE = 20
"""Steps before the missing ones that say how those are split."""


class ProcessLog:
    """What one watched process has written so far."""

    def __init__(self, stem: Path) -> None:
        self._stem = stem
        self._read: dict[str, int] = {".steps": 0, ".facts": 0}
        self._chunks: list[Rows] = []
        self._ended: tuple[float, float] = (0.0, 0.0)
        """How many steps have ended in all, the rows of the last few of them may be missing, and when the last one did."""
        self._ended_at = 0
        self.columns: tuple[str, ...] = ()
        self.facts: dict[str, dict[str, Any]] = {}
        """The last of each kind."""
        self.pulses: list[dict[str, Any]] = []
        self.windows: list[dict[str, Any]] = []

    def refresh(self) -> None:
        self._refresh_rows()
        told = self._new(".facts")
        told = told[: told.rfind(b"\n") + 1]
        self._read[".facts"] += len(told)
        for line in told.splitlines():
            try:
                fact = json.loads(line)
            except ValueError:
                continue  # cut off in the middle of a line
            self.facts[fact["kind"]] = fact
            if fact["kind"] == "pulse":
                self.pulses.append(fact)
            if fact["kind"] == "window":
                self.windows.append(fact)

    @property
    def rows(self) -> Rows:
        if len(self._chunks) != 1:
            width = max(len(self.columns), 1)
            self._chunks = [np.concatenate(self._chunks) if self._chunks else np.empty((0, width))]
        return with_missing_steps(self._chunks[0], self.columns, *self._ended)

    @property
    def process(self) -> dict[str, Any]:
        return self.facts.get("process", {})

    def _refresh_rows(self) -> None:
        """The rows that are whole; space for more of them follows."""
        if not self.columns:
            head, newline, _ = self._new(".steps").partition(b"\n")
            if not newline:
                return
            told = json.loads(head)
            self.columns, self._ended_at = tuple(told["columns"])[:-1], int(told["ended_at"])
            self._read[".steps"] = mmap.ALLOCATIONGRANULARITY
        with Path(f"{self._stem}.steps").open("rb") as file:
            file.seek(self._ended_at)
            self._ended = struct.unpack("<2d", file.read(16))
        width = len(self.columns) + 1
        data = self._new(".steps")
        rows = np.frombuffer(data[: len(data) - len(data) % (8 * width)], dtype="<f8").reshape(-1, width)
        unwritten = np.flatnonzero(rows[:, -1] == 0)
        whole = rows[: unwritten[0]] if len(unwritten) else rows
        self._read[".steps"] += whole.nbytes
        if len(whole):
            self._chunks.append(whole[:, :-1].copy())

    def _new(self, suffix: str) -> bytes:
        """What has not been read yet."""
        path = Path(f"{self._stem}{suffix}")
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self._read[suffix])
            return file.read()


def with_missing_steps(rows: Rows, columns: Sequence[str], steps: float, ended_s: float) -> Rows:
    """The rows, and one for each step that had ended when the process was killed and whose row it could not write.

    Of those only their number and the last one's end are known: each takes as long as the others, split as in the steps before.
    """
    at = {name: number for number, name in enumerate(columns)}
    known = rows[rows[:, at["kind"]] == 0][-LIKE:] if at else rows
    missing = int(steps - known[-1, at["step"]] - 1) if len(known) else 0
    if missing <= 0:
        return rows
    last = known[-1]
    took_s = max(ended_s - last[at["ended"]], 0.0) / missing
    phases = [at[name] for name in PHASES]
    usual = known[:, phases].sum(axis=0)
    added = np.tile(last, (missing, 1))
    number = np.arange(1, missing + 1)
    added[:, at["step"]] += number
    added[:, at["ended"]] += number * took_s
    added[:, phases] = usual / max(usual.sum(), 1e-12) * took_s
    for name in ("paused", "before", *(f"aside_{phase}" for phase in PHASES)):
        added[:, at[name]] = 0.0
    whole: Rows = np.concatenate([rows, added])
    return whole


class SpoolReader:
    """The logs of every process that was watched, as far as they have been written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, ProcessLog] = {}

    def refresh(self) -> list[ProcessLog]:
        for path in sorted(self._folder.glob("*.facts")) + sorted(self._folder.glob("*.steps")):
            stem = str(path.with_suffix(""))
            self._logs.setdefault(stem, ProcessLog(Path(stem)))
        for log in self._logs.values():
            log.refresh()
        return list(self._logs.values())
