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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import redline
from redline.model.errors import UsageError

START = Path(redline.__file__).parent / "bench" / "watch" / "start"
"""Holds the `sitecustomize` that Python runs before the script."""

PASSED_ON = ("SIGTERM", "SIGHUP", "SIGINT", "SIGQUIT", "SIGUSR1", "SIGUSR2")
FROM_A_TERMINAL = ("SIGINT", "SIGQUIT")
TICK_S = 0.2
"""While the script runs, `on_tick` is called this often."""


def script_command(words: Sequence[str]) -> list[str]:
    """Returns the command to start: `train.py …` and `-m package …` get an interpreter in front."""
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


def watching_environment(folder: Path, base: Mapping[str, str], *, profiles: bool = False) -> dict[str, str]:
    path = os.pathsep.join([str(START), *([base["PYTHONPATH"]] if base.get("PYTHONPATH") else [])])
    # torch's profiler writes to stderr, which is the script's, each time it starts and stops.
    profiling = (
        {"KINETO_LOG_LEVEL": base.get("KINETO_LOG_LEVEL", "99"), "REDLINE_WATCH_PROFILE": "1"} if profiles else {}
    )
    return {**base, **profiling, "PYTHONPATH": path, "REDLINE_WATCH": str(folder)}


def run_watched(command: Sequence[str], environment: Mapping[str, str], on_tick: Callable[[int], None]) -> int:
    """Runs the command in the foreground. Returns its exit code, or minus the number of the signal that ended it.

    `on_tick` is called with its process id a few times per second. Signals that are sent to us go on to it, but for those that a
    terminal sends: the script, which is in the same group, has received them too. Only the main thread can see to that, so that in
    another one they have their usual effect.
    """
    try:
        script = subprocess.Popen(command, env=dict(environment))
    except OSError as error:
        raise UsageError(f"cannot start {command[0]!r}: {error.strerror}") from None

    def pass_on(number: int, _: object) -> None:
        if not (signal.Signals(number).name in FROM_A_TERMINAL and _is_in_foreground()):
            script.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    wanted = [getattr(signal, name) for name in PASSED_ON if is_main and hasattr(signal, name)]
    handlers = {number: signal.signal(number, pass_on) for number in wanted}
    try:
        while True:
            try:
                return script.wait(TICK_S)
            except subprocess.TimeoutExpired:
                on_tick(script.pid)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Returns whether a terminal's Ctrl-C and Ctrl-\\ reach us, and the script, which is in the same group, by themselves."""
    try:
        return os.tcgetpgrp(sys.stdin.fileno()) == os.getpgrp()
    except (OSError, ValueError):
        return False


def end_like(exit_code: int) -> int:
    """Returns what to exit with. It does not return where a signal ended the script, because that ends us as well."""
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
"""A row has so many bytes: kind, key, value and time, as 64-bit floats."""


class Reader(Protocol):
    """Makes something of rows: kind, key, value, time and number."""

    def read(self, rows: Iterable[tuple[str, float, float, float, int]]) -> None: ...


class ProcessLog:
    """This holds what one watched process has written so far."""

    def __init__(self, stem: str, reader: Reader) -> None:
        self._stem = stem
        self._at = {".rows": mmap.ALLOCATIONGRANULARITY, ".facts": 0}
        """Its files have been read so far. The first page of the rows names their kinds."""
        self._kinds: list[str] = []
        self._number = 0
        self.reader: Any = reader
        self.facts: dict[str, dict[str, Any]] = {}
        """It has the last fact of each kind."""

    def refresh(self) -> None:
        data = self._new(".rows")
        rows = np.frombuffer(data[: len(data) // ROW_BYTES * ROW_BYTES], dtype="<f8").reshape(-1, 4)
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
        self.facts |= {fact["kind"]: fact for fact in map(json.loads, written.splitlines())}

    def fact(self, kind: str) -> dict[str, Any]:
        return self.facts.get(kind, {})

    def _new(self, suffix: str) -> bytes:
        """Returns what has not been read yet."""
        path = Path(f"{self._stem}{suffix}")
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self._at[suffix])
            return file.read()


class SpoolReader:
    """The logs of every process that was watched, as far as they have been written."""

    def __init__(self, folder: Path, make_reader: Callable[[], Any]) -> None:
        self._folder = folder
        self._make_reader = make_reader
        self._logs: dict[str, ProcessLog] = {}

    def refresh(self) -> list[ProcessLog]:
        for stem in sorted(
            {str(path.with_suffix("")) for kind in ("facts", "rows") for path in self._folder.glob(f"*.{kind}")}
        ):
            if stem not in self._logs:
                self._logs[stem] = ProcessLog(stem, self._make_reader())
            self._logs[stem].refresh()
        return list(self._logs.values())
