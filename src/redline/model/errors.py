"""This tree shows all that can go wrong. `Exit` has the exit codes of commands.

RedlineError
├── UsageError            the person asked for something that cannot be: one line, exit code 2
│   ├── SpecError         a field of a spec is out of its range
│   ├── UnknownName       no model, switch, device or door goes by that name
│   ├── TraceError        a file is not the trace or the profiler's output it was given for
│   └── MissingExtra      an optional package is needed and not installed
├── BenchError            the bench broke; carries the kind and the traceback, becomes a `Failure`
├── DoorError             the door itself broke: the worker is gone or spoke nonsense
├── StoreError            the history cannot be opened, read or written
└── RecordError           a stored record cannot be understood

Interrupted               a KeyboardInterrupt after records were stored
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from enum import IntEnum


class RedlineError(Exception):
    """This is the base of everything that Redline raises on purpose."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C after records were written into the history: what was measured until then is there.

    `result` has the finished rows of a grid, where some are finished.
    """

    def __init__(self, result: object = None) -> None:
        super().__init__()
        self.result = result


class UsageError(RedlineError):
    """A mistake in what was asked, reported in one line."""


class SpecError(UsageError):
    """A field has a value that is not allowed; the message names the field, the rule and the value."""


class UnknownName(UsageError):
    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        self.close = closest(name, known)
        suggestion = f"; did you mean {' or '.join(self.close)}?" if self.close else ""
        super().__init__(f"unknown {what} {name!r}{suggestion}{f' ({hint})' if hint else ''}")


class TraceError(UsageError):
    """A file cannot be read as what it was given for; the message names the file and what is wrong with it."""


class MissingExtra(UsageError):
    def __init__(self, what: str, package: str, extra: str) -> None:
        super().__init__(f"{what} needs the package {package}: {install_command(extra)}")


def install_command(extra: str) -> str:
    """Returns the command that installs an extra. The distribution has another name than the package, which was taken."""
    return f"pip install 'torch-redline[{extra}]'"


class BenchError(RedlineError):
    """The bench broke, in one line; with the switch that caused it where that is known.

    `scope` says what the failure rules out: the switch in any recipe, a pair of switches, or only this recipe.
    `traceback` is the worker's, where there is one.
    """

    def __init__(
        self,
        kind: str,
        message: str,
        traceback: str = "",
        *,
        switches: tuple[str, ...] = (),
        scope: str = "recipe",
    ) -> None:
        self.kind = kind
        self.traceback = traceback
        self.switches = switches
        self.scope = scope
        super().__init__(message)


class DoorError(RedlineError):
    """The worker is gone, late, or said something that is not a message."""


class StoreError(RedlineError):
    """The history cannot be used; the message says where it is."""


class RecordError(RedlineError):
    """A record is of an unknown schema or damaged."""


class Exit(IntEnum):
    """These are the exit codes of every command and script."""

    DONE = 0
    SLOWER = 1
    """`compare`: B is slower than A. Any command: stdout cannot be written."""
    USAGE = 2
    """A mistake in what was asked."""
    INCOMPARABLE = 3
    INCONCLUSIVE = 4
    """Only `compare --fail-inconclusive` exits with this."""
    FAILED_ROW = 5
    """This means that something could not be measured; the other rows were."""
    INTERRUPTED = 130


def closest(name: str, known: Iterable[str], count: int = 3) -> list[str]:
    """Returns the known names that look most like `name`."""
    lowered: dict[str, str] = {}
    for candidate in known:
        lowered.setdefault(candidate.lower(), candidate)
    found = difflib.get_close_matches(name.lower(), lowered, n=count, cutoff=0.6)
    return [lowered[match] for match in found]
