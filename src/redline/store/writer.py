"""Who is writing a record: a process that can be asked whether it still lives, as long as that can be seen from here."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path

# Of what /proc tells of a process, behind its name.
STATE = 0
STARTED = 19
"""In the kernel's own ticks, which no change of the clock moves."""


def this_process() -> str | None:
    """A name that no other process on any machine has; None where the system does not tell enough."""
    fields = _stat(os.getpid())
    return f"{_machine()} {os.getpid()} {fields[STARTED]}" if fields else None


def is_gone(writer: str) -> bool:
    """True only where that is certain: of another machine or container nothing is known here."""
    machine, pid, started = writer.rsplit(" ", 2)
    if machine != _machine():
        return False
    if fields := _stat(int(pid)):
        return fields[STATE] == "Z" or fields[STARTED] != started
    try:
        os.kill(int(pid), 0)  # asks, and sends nothing
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False  # somebody else's, which /proc may hide


def _machine() -> str:
    try:
        processes = os.readlink("/proc/self/ns/pid")  # a container numbers its processes anew
    except OSError:
        processes = ""
    return f"{socket.gethostname()}/{_machine_id()}/{processes}"


@cache
def _machine_id() -> str:
    """Hosts may share a name; machines that were set up apart do not share this."""
    try:
        return Path("/etc/machine-id").read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # the name before may hold anything, blanks and brackets too
