"""Holding something alone across processes: a lock the system lets go of when its holder dies, however that happens."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec
from sqlalchemy import text

from redline.errors import UsageError
from redline.record import RunRecord
from redline.store import queries
from redline.store.writer import write_record

if TYPE_CHECKING:
    from redline.store.database import Database


@contextmanager
def hold(database: Database, what: str) -> Iterator[str | None]:
    """Yields None to the holder, and to anyone else who it is. On a server the lock is the server's, for all machines."""
    key = hashlib.sha256(f"{database.place}\0{what}".encode()).digest()
    if database.on_server:
        with _server_lock(database, int.from_bytes(key[:8], signed=True)) as got:
            yield None if got else "another process"
    elif database.place == ":memory:":
        yield None  # nobody else can see it
    else:
        with _file_lock(Path(tempfile.gettempdir()) / "redline-locks" / f"{key.hex()[:24]}.lock") as holder:
            yield holder


@contextmanager
def _file_lock(path: Path) -> Iterator[str | None]:
    path.parent.mkdir(exist_ok=True)
    if path.parent.stat().st_uid == os.getuid():
        path.parent.chmod(0o1777)  # other users may share the same history
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
        yield None
    finally:
        os.close(descriptor)


@contextmanager
def _server_lock(database: Database, key: int) -> Iterator[bool]:
    with database.lasting() as connection:
        got = bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar())
        try:
            yield got
        finally:
            if got:
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": key})


CellStatus = Literal["done", "failed"]


class SettledCell(msgspec.Struct, frozen=True, kw_only=True):
    """A cell that needs no further look, unless someone asks for one."""

    key: str
    """The plan key: of the spec and of the place, as they were known before anything ran."""
    status: CellStatus
    record_id: str
    failure_kind: str | None
    failure_stage: str | None
    failure_message: str | None


class SweepLedger:
    """The settled cells of one sweep, by name."""

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self.name = name

    @contextmanager
    def held(self) -> Iterator[None]:
        """Only one process at a time works on a sweep; the hold ends with the process, however that ends."""

        with hold(self._database, f"sweep {self.name}") as holder:
            if holder is not None:
                raise UsageError(
                    f"sweep {self.name!r} is being run by {holder}: wait for it, or give this one another --name"
                )
            yield

    def cells(self) -> dict[str, SettledCell]:
        with self._database.reading() as connection:
            found = connection.execute(queries.CELLS_OF_SWEEP, {"name": self.name})
            return {row["key"]: SettledCell(**row) for row in found.mappings()}

    def settle(self, key: str, record: RunRecord) -> None:
        """Write the record and that it settles this cell; on disk, not only in the system's memory, when it returns."""
        failure = record.failure
        values = {
            "sweep": self.name,
            "cell_key": key,
            "status": "failed" if failure else "done",
            "record_id": record.id,
            "failure_kind": failure.kind if failure else None,
            "failure_stage": failure.stage if failure else None,
            "failure_message": failure.message if failure else None,
        }
        with self._database.writing(durable=True) as connection:
            write_record(connection, record, over=True)
            connection.execute(queries.DELETE_CELL, {"name": self.name, "key": key})
            connection.execute(queries.INSERT_CELL, values)

    def forget(self) -> None:
        """Start over: no cell is settled any more. The records stay in the history."""
        with self._database.writing() as connection:
            connection.execute(queries.DELETE_CELLS, {"name": self.name})


class TuneRow(msgspec.Struct, frozen=True, kw_only=True):
    """A search in a listing."""

    name: str
    created_at: float
    model: str
    task: str
    state: str


class TuneLedger:
    """All searches of a history, by name."""

    def __init__(self, database: Database) -> None:
        self._database = database

    @contextmanager
    def held(self, name: str) -> Iterator[None]:
        """Only one process at a time works on a search; the hold ends with the process, however that ends."""

        with hold(self._database, f"tune {name}") as holder:
            if holder is not None:
                raise UsageError(
                    f"tune {name!r} is being run by {holder}: wait for it, or give this one another --name"
                )
            yield

    def save(self, row: TuneRow, body: bytes) -> None:
        with self._database.writing() as connection:
            connection.execute(queries.DELETE_TUNE, {"this_name": row.name})
            connection.execute(queries.INSERT_TUNE, {**msgspec.to_builtins(row), "body": body})

    def load(self, name: str) -> bytes | None:
        """None where there is no search of that name."""
        with self._database.reading() as connection:
            found: bytes | None = connection.execute(queries.TUNE, {"this_name": name}).scalar()
            return found

    def rows(self) -> list[TuneRow]:
        """Newest first."""
        with self._database.reading() as connection:
            return [TuneRow(**row) for row in connection.execute(queries.TUNES).mappings()]
