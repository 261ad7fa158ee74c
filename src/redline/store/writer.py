"""Writing one record, and who is writing it: a process that others can check is still alive."""

from __future__ import annotations

import os
import socket
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from redline.record import RunRecord
from redline.store import queries
from redline.store.codec import pack_block, pack_head, row_of

if TYPE_CHECKING:
    from sqlalchemy import Connection


STARTED = 19


STATE = 0


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


def write_record(connection: Connection, record: RunRecord, *, over: bool) -> None:
    """Write or replace a record's head in a transaction of the caller's; blocks that nobody appended are added."""
    row = row_of(record, over=over)
    values = queries.values_of(row, pack_head(record))
    if connection.execute(queries.UPDATE_RECORD, {"this_id": record.id, **values}).rowcount == 0:
        connection.execute(queries.INSERT_RECORD, values)
    _note_writer(connection, record.id, this_process() if row.status == "running" else None)
    if not record.blocks:
        return
    stored: int = connection.execute(queries.NEXT_BLOCK, {"record_id": record.id}).scalar_one()
    missing = [
        {"record_id": record.id, "number": number, "body": pack_block(block)}
        for number, block in enumerate(record.blocks)
        if number >= stored
    ]
    if missing:
        connection.execute(queries.INSERT_BLOCK, missing)


def _note_writer(connection: Connection, record_id: str, writer: str | None) -> None:
    name = queries.writer_name(record_id)
    connection.execute(queries.DELETE_WRITER, {"this_name": name})
    if writer is not None:
        connection.execute(queries.INSERT_WRITER, {"name": name, "value": writer})
