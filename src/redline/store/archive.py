"""A back-up of a history as one file: every row as it is stored, byte by byte, and a digest at the end.

Frames of a length and a msgpack list. What is read back into an empty history gives the same file again. Traces lie in
a folder beside the history and are copied with it, not with this.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from sqlalchemy import insert, select

from redline.model.errors import RecordError, StoreError, UsageError
from redline.model.files import open_to_read
from redline.store.codec import DAMAGE, PACKING_DAMAGE, open_unpacked, unpack
from redline.store.layout import blocks, ceilings, marks, records, sweep_cells, tunes
from redline.store.location import SQLITE_MAGIC
from redline.store.writer import keep_point

if TYPE_CHECKING:
    from sqlalchemy import Connection, Table

    from redline.store.database import Database

MAGIC = b"REDLINE1"
LONGEST = 1 << 30
"""The longest frame: a length beyond it is damage."""
OWNED = (blocks, marks, sweep_cells)
"""Rows that belong to a record."""
OTHERS = (tunes, ceilings)


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    added: int
    known: int
    """Records that were there already, and stayed as they are."""


def is_archive(path: Path) -> bool:
    return _begins_with(path, MAGIC, open_unpacked)


def is_history(path: Path) -> bool:
    """Whether it is a SQLite file, as a history is."""
    return _begins_with(path, SQLITE_MAGIC, open_to_read)


def _begins_with(path: Path, magic: bytes, opened: Callable[[Path], BufferedIOBase]) -> bool:
    try:
        with opened(path) as file:
            return file.read(len(magic)) == magic
    except PACKING_DAMAGE as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def write_archive(database: Database, out: IO[bytes], ids: Sequence[str] = ()) -> int:
    """All records in order, or some, with what belongs to each; then searches and ceilings. How many records it were."""
    digest = hashlib.sha256()
    out.write(MAGIC)

    def put(table: Table, row: Mapping[Any, Any]) -> None:
        # SQLAlchemy's names are a kind of text that msgpack does not know.
        body = msgspec.msgpack.encode((str(table.name), {str(name): value for name, value in row.items()}))
        digest.update(body)
        out.write(len(body).to_bytes(4, "big") + body)

    with database.reading() as connection:
        wanted = sorted(ids) if ids else connection.execute(select(records.c.id).order_by(records.c.id)).scalars().all()
        for record_id in wanted:
            row = connection.execute(select(records).where(records.c.id == record_id)).mappings().one()
            put(records, row)
            for table in OWNED:
                for each in _rows(connection, table, record_id):
                    put(table, each)
        for table in OTHERS if not ids else ():
            for each in _rows(connection, table):
                put(table, each)
    body = msgspec.msgpack.encode(("end", len(wanted), digest.digest()))
    out.write(len(body).to_bytes(4, "big") + body)
    return len(wanted)


def _rows(connection: Connection, table: Table, record_id: str | None = None) -> Iterator[Mapping[Any, Any]]:
    statement = select(table).order_by(*table.primary_key.columns)
    if record_id is not None:
        statement = statement.where(table.c.record_id == record_id)
    yield from connection.execute(statement).mappings()


def read_archive(database: Database, path: Path) -> Imported:
    """Add what is not there yet, all of it or nothing."""
    try:
        return _read_archive(database, path)
    except PACKING_DAMAGE as error:
        raise StoreError(f"{path} is damaged: {error}; nothing was added") from None


def _read_archive(database: Database, path: Path) -> Imported:
    tables = {table.name: table for table in (records, *OWNED, *OTHERS)}
    added: set[str] = set()
    known = 0
    digest = hashlib.sha256()
    with open_unpacked(path) as file, database.writing(durable=True) as connection:
        if file.read(len(MAGIC)) != MAGIC:
            raise UsageError(f"{path} is not a back-up of Redline")
        for body in _frames(file, path):
            name, *values = _decoded(body, path)
            if name == "end":
                if values[1] != digest.digest() or file.read(1):
                    raise StoreError(f"{path} is damaged: its digest does not fit; nothing was added")
                break
            digest.update(body)
            table, row = tables.get(name), values[0]
            if table is None or not isinstance(row, dict) or not _fits(table, row):
                raise StoreError(f"{path} is of another version of Redline, or damaged; nothing was added")
            if table is records:
                exists = connection.execute(select(records.c.id).where(records.c.id == row["id"])).first()
                known += exists is not None
                if exists is None:
                    added.add(row["id"])
                    connection.execute(insert(records).values(**row))
            elif row.get("record_id") in added or (table in OTHERS and not _exists(connection, table, row)):
                connection.execute(insert(table).values(**row))
        else:
            raise StoreError(f"{path} ends in the middle; nothing was added")
        for record_id in sorted(added):
            _keep_point(connection, record_id)
    return Imported(added=len(added), known=known)


def _fits(table: Table, row: dict[str, Any]) -> bool:
    """An archive of an older layout may lack columns that were added since, where these may be empty."""
    return set(row) <= set(table.columns.keys()) and all(
        column.nullable for column in table.columns if column.name not in row
    )


def _exists(connection: Connection, table: Table, row: dict[str, Any]) -> bool:
    keys = [column == row[column.name] for column in table.primary_key.columns]
    return connection.execute(select(*table.primary_key.columns).where(*keys)).first() is not None


def _keep_point(connection: Connection, record_id: str) -> None:
    row = connection.execute(select(records.c.head, records.c.status).where(records.c.id == record_id)).one()
    bodies = connection.execute(select(blocks.c.body).where(blocks.c.record_id == record_id).order_by(blocks.c.number))
    if row.status != "done":
        return
    try:
        keep_point(connection, unpack(record_id, row.head, bodies.scalars()))
    except RecordError:
        return  # told by whoever reads it


def _frames(file: BufferedIOBase, path: Path) -> Iterator[bytes]:
    while head := file.read(4):
        length = int.from_bytes(head, "big")
        body = file.read(length) if length <= LONGEST else b""
        if len(head) != 4 or len(body) != length:
            raise StoreError(f"{path} ends in the middle; nothing was added")
        yield body


def _decoded(body: bytes, path: Path) -> list[Any]:
    try:
        found = msgspec.msgpack.decode(body)
    except DAMAGE as error:
        raise StoreError(f"{path} is damaged: {error}; nothing was added") from None
    if not isinstance(found, list) or len(found) < 2:
        raise StoreError(f"{path} is damaged; nothing was added")
    return found
