"""Writes as data, performed in a transaction of the caller's, and the outbox for those that a server could not take.

A write that a server could not take is kept in a file and performed later, so performing one twice does no harm.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import platformdirs

from redline.model.errors import StoreError
from redline.model.fields import Frozen
from redline.model.migrations import migrate
from redline.model.record import Block, RunRecord, new_id
from redline.model.work import Ceilings
from redline.store import queries
from redline.store.codec import DAMAGE, TuneRow, column_text, pack_block, pack_head, point_values, row_of, series_body
from redline.system.locks import file_lock
from redline.system.processes import this_process

if TYPE_CHECKING:
    from sqlalchemy import Connection


class WriteRecord(Frozen, tag=True):
    """A record's head, new or replaced. Blocks of the record that were not appended yet are added."""

    record: RunRecord
    over: bool
    """Nothing more will come, however little there is."""


class AppendBlock(Frozen, tag=True):
    """A block at the end of a record."""

    record_id: str
    block: Block


class SettleCell(Frozen, tag=True):
    """A record, and that it settles a cell of a sweep."""

    sweep: str
    key: str
    record: RunRecord
    holder: str | None = None
    """Who must still be working on the sweep, where a server keeps account of that."""


class SaveTune(Frozen, tag=True):
    """A search, as far as it has come."""

    row: TuneRow
    body: bytes
    holder: str | None = None


class KeepCeilings(Frozen, tag=True):
    """What a device can do at most, in place of what was known of it."""

    device_key: str
    ceilings: Ceilings


Write = WriteRecord | AppendBlock | SettleCell | SaveTune | KeepCeilings


def read_write(body: bytes) -> Write:
    """A write from a file, its record through the migrations where an older Redline has kept it."""
    plain: dict[str, Any] = msgspec.msgpack.decode(body)
    if "record" in plain:
        plain["record"] = migrate(plain["record"])
    write: Write = msgspec.convert(plain, Write)
    return write


class NoSuchRecord(StoreError):
    """A block for a record that was never begun."""


class Overtaken(StoreError):
    """Another process has taken over the sweep or the search."""


def perform(connection: Connection, write: Write, *, again: bool = False) -> None:
    """`again`: it may have been performed before, and another process may have gone on since."""
    if isinstance(write, WriteRecord):
        _write_record(connection, write.record, over=write.over)
    elif isinstance(write, AppendBlock):
        _append(connection, write.record_id, pack_block(write.block), again=again)
    elif isinstance(write, SettleCell):
        _settle(connection, write, again=again)
    elif isinstance(write, SaveTune):
        if not _is_overtaken(connection, f"tune {write.row.name}", write.holder):
            connection.execute(queries.DELETE_TUNE, {"this_name": write.row.name})
            connection.execute(queries.INSERT_TUNE, {**_columns(write.row), "body": write.body})
        elif not again:
            raise Overtaken(f"another process has taken over tune {write.row.name!r}: this one stops")
    else:
        connection.execute(queries.DELETE_CEILINGS, {"this_key": write.device_key})
        connection.execute(
            queries.INSERT_CEILINGS,
            {
                "device_key": write.device_key,
                "device_name": column_text(write.ceilings.name),
                "measured_at": write.ceilings.measured_at,
                "body": msgspec.msgpack.encode(write.ceilings),
            },
        )


def _write_record(connection: Connection, record: RunRecord, *, over: bool) -> None:
    row = row_of(record, over=over)
    values = queries.values_of(row, pack_head(record))
    if connection.execute(queries.UPDATE_RECORD, {"this_id": record.id, **values}).rowcount == 0:
        connection.execute(queries.INSERT_RECORD, values)
    _note_writer(connection, record.id, this_process() if row.status == "running" else None)
    if row.status == "done":
        keep_point(connection, record)
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


def keep_point(connection: Connection, record: RunRecord) -> None:
    """The record's point in its trend, in place of an older one."""
    if not record.blocks:  # they were appended one by one
        bodies = connection.execute(queries.BLOCKS_OF, {"ids": [record.id]}).all()
        blocks = tuple(msgspec.msgpack.decode(body, type=Block) for _, body in bodies)
        record = msgspec.structs.replace(record, blocks=blocks)
    values = point_values(record)
    connection.execute(queries.DELETE_POINT, {"this_id": record.id})
    if values is None:
        return
    connection.execute(queries.INSERT_POINT, values)
    if connection.execute(queries.SERIES, {"this_key": values["series_key"]}).first() is None:
        connection.execute(queries.INSERT_SERIES, {"series_key": values["series_key"], "body": series_body(record)})


def _append(connection: Connection, record_id: str, body: bytes, *, again: bool) -> None:
    if connection.execute(queries.LOCK_RECORD, {"record_id": record_id}).first() is None:
        raise NoSuchRecord(f"no record {record_id!r}: begin it before appending to it")
    if again and connection.execute(queries.LAST_BLOCKS, {"record_id": record_id, "number": 1}).scalar() == body:
        return
    connection.execute(queries.APPEND_BLOCK, {"record_id": record_id, "body": body})


def _settle(connection: Connection, write: SettleCell, *, again: bool) -> None:
    cell = {"name": write.sweep, "key": write.key}
    if _is_overtaken(connection, f"sweep {write.sweep}", write.holder):
        if not again:
            raise Overtaken(
                f"another process has taken over sweep {write.sweep!r}: this one stops, and its last cell is not kept"
            )
        if connection.execute(queries.CELL, cell).scalar() not in (None, write.record.id):
            return  # the other has measured it
    _write_record(connection, write.record, over=True)
    connection.execute(queries.DELETE_CELL, cell)
    failure = write.record.failure
    values = {
        "sweep": write.sweep,
        "cell_key": write.key,
        "status": "failed" if failure else "done",
        "record_id": write.record.id,
        "failure_kind": failure.kind if failure else None,
        "failure_stage": column_text(failure.stage) if failure else None,
        "failure_message": column_text(failure.told) if failure else None,
    }
    connection.execute(queries.INSERT_CELL, values)


def _columns(row: TuneRow) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(row)
    return {name: column_text(value) if isinstance(value, str) else value for name, value in plain.items()}


def _note_writer(connection: Connection, record_id: str, writer: str | None) -> None:
    put_meta(connection, queries.writer_name(record_id), writer)


def put_meta(connection: Connection, name: str, value: str | None) -> None:
    """Write an entry, or remove it.

    An entry that is there is updated, not replaced: on PostgreSQL, a reader that waits for its lock is then given the
    new value. It would find nothing where the old row was deleted.
    """
    if value is None:
        connection.execute(queries.DELETE_META, {"this_name": name})
    elif not connection.execute(queries.UPDATE_META, {"this_name": name, "value": value}).rowcount:
        connection.execute(queries.INSERT_META, {"name": name, "value": value})


class Holder(Frozen):
    """Who works on a sweep or a search on a server, and until when that holds unless renewed."""

    token: str
    process: str
    until: float
    """Seconds since the epoch by the server's clock."""


def read_holder(connection: Connection, what: str) -> Holder | None:
    """Locks the entry until the transaction ends."""
    value = connection.execute(queries.META, {"this_name": queries.holder_name(what)}).scalar()
    return None if value is None else msgspec.json.decode(value, type=Holder)


def write_holder(connection: Connection, what: str, holder: Holder | None) -> None:
    value = None if holder is None else msgspec.json.encode(holder).decode()
    put_meta(connection, queries.holder_name(what), value)


def _is_overtaken(connection: Connection, what: str, token: str | None) -> bool:
    if token is None:
        return False
    holder = read_holder(connection, what)
    return holder is None or holder.token != token


SUFFIX = ".msgpack"


class Outbox:
    """The writes that wait for one server, in the order in which they were made."""

    def __init__(self, location: str) -> None:
        digest = hashlib.sha256(location.encode()).hexdigest()[:16]
        self.folder = Path(platformdirs.user_data_path("redline")) / "unsent" / digest

    def put(self, write: Write) -> None:
        """Write it; it is on disk when this returns."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{new_id()}{SUFFIX}"
            unfinished = path.with_suffix(".part")
            with unfinished.open("wb") as file:
                file.write(msgspec.msgpack.encode(write))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            descriptor = os.open(self.folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        except OSError as error:
            raise StoreError(f"cannot keep what was measured in {self.folder}: {error.strerror}") from error

    def waiting(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == SUFFIX)
        except FileNotFoundError:
            return []

    def send(self, perform: Callable[[Write], None], on_note: Callable[[str], None]) -> None:
        """Perform every write that waits, also those of other processes of this user, each once.

        A file that cannot be read is moved aside and named to `on_note`.
        """
        if not self.waiting():
            return
        with file_lock(self.folder / "lock", mode=0o600, on_wait=lambda holder: None):
            for path in self.waiting():
                try:
                    write = read_write(path.read_bytes())
                except DAMAGE as error:
                    self._set_aside(path, error, on_note)
                    continue
                try:
                    perform(write)
                except NoSuchRecord as error:
                    self._set_aside(path, error, on_note)
                else:
                    path.unlink()

    def _set_aside(self, path: Path, error: Exception, on_note: Callable[[str], None]) -> None:
        aside = path.with_suffix(".damaged")
        path.rename(aside)
        on_note(f"a measurement that waited for the server cannot be sent: {error}; it is now {aside}")
