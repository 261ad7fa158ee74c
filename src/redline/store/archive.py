"""This module reads and writes files of records: back-ups, and documents that 'history export --format json --raw' wrote.

A back-up has every row as it is stored, byte by byte, in frames of a length and a msgpack list, and a digest at the end. What
is read back into an empty history gives the same file again. Traces lie in a folder beside the history and are copied with
it, not with this.
"""

from __future__ import annotations

import gzip
import hashlib
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import msgspec
from sqlalchemy import Connection, Table, select

from redline.model.errors import RecordError, StoreError, UsageError
from redline.model.files import MOST_DOCUMENT_BYTES, open_to_read, read_up_to
from redline.model.migrations import record_of
from redline.model.record import RunRecord
from redline.store.schema import OWNED, ceilings, keep_points, put, records, tunes, with_trace

MAGIC = b"REDLINE1"
"""Every back-up begins with this."""
LONGEST = 1 << 30
"""No frame is longer than this (1 GiB); a greater length is damage."""
SMALLEST_ROW = 32
"""A row takes at least this many bytes, which limits how many rows a damaged file may have."""
OTHERS = (tunes, ceilings)
"""The rows of these tables belong to no record."""
TABLES = {table.name: table for table in (records, *OWNED, *OTHERS)}

StoredRow = tuple[str, dict[str, Any]]
"""It is the name of a table, and then one row of it."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    added: int
    known: int
    """This many records were there already, and stayed as they are."""


def rows_of(connection: Connection, ids: Sequence[str] = ()) -> Iterator[StoredRow]:
    """Yields all records in order, or some, and after each what belongs to it. Searches and ceilings follow if all are asked for."""
    every = select(records.c.id).order_by(records.c.id)
    for record_id in sorted(ids) or connection.execute(every).scalars().all():
        for table in (records, *OWNED):
            yield from _stored(connection, table, (table.c.id if table is records else table.c.record_id) == record_id)
    for table in () if ids else OTHERS:
        yield from _stored(connection, table)


def _stored(connection: Connection, table: Table, *which: Any) -> Iterator[StoredRow]:
    for row in connection.execute(select(table).where(*which).order_by(*table.primary_key)).mappings():
        # SQLAlchemy's names are a kind of text that msgpack does not know.
        yield str(table.name), {str(name): value for name, value in row.items()}


def store_rows(connection: Connection, rows: Iterable[StoredRow]) -> Imported:
    """Adds the rows that are not there yet. What belongs to a record is added with the record only."""
    added: dict[str, None] = {}
    known = 0
    for name, row in rows:
        if TABLES[name] in OWNED and row["record_id"] not in added:
            continue
        is_new = put(connection, TABLES[name], row, replace=False) > 0
        if name == records.name:
            known += not is_new
            added |= {row["id"]: None} if is_new else {}
    keep_points(connection, added)
    return Imported(added=len(added), known=known)


def write_archive(rows: Iterable[StoredRow], out: IO[bytes]) -> int:
    """Writes rows with a digest at the end, and returns how many records they were."""
    digest, count = hashlib.sha256(), 0
    out.write(MAGIC)
    for row in rows:
        count += row[0] == records.name
        body = msgspec.msgpack.encode(row)
        digest.update(body)
        out.write(len(body).to_bytes(4, "big") + body)
    body = msgspec.msgpack.encode(("end", count, digest.digest()))
    out.write(len(body).to_bytes(4, "big") + body)
    return count


@contextmanager
def _opened(path: Path) -> Iterator[BufferedIOBase]:
    """Opens a file for reading, and unpacks it if gzip has compressed it. Whatever cannot be read in it is said in one line."""
    try:
        with open_to_read(path) as file:
            yield gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is neither a back-up nor a history nor a JSON document of Redline: {error}") from None


def is_archive(path: Path) -> bool:
    with _opened(path) as file:
        return file.read(len(MAGIC)) == MAGIC


def read_archive(path: Path) -> Iterator[StoredRow]:
    """Yields the rows of a back-up. Raises at the first damage, so that whoever stores them stores nothing."""
    digest = hashlib.sha256()
    with _opened(path) as file:
        file.read(len(MAGIC))
        while (length := int.from_bytes(head := file.read(4), "big")) <= LONGEST and len(head) == 4:
            body = file.read(length)
            match msgspec.msgpack.decode(body):
                case ["end", int(), written] if written == digest.digest() and not file.read(1):
                    return
                case [str(name), dict(row)] if name in TABLES and _fits(name, row):
                    digest.update(body)
                    yield name, row
                case _:
                    break
    raise StoreError(f"{path} is cut short, damaged or of another version of Redline; nothing was added")


def read_damaged(path: Path) -> Iterator[StoredRow]:
    """Yields the rows that SQLite can still read in a damaged file, which stays as it is.

    A range of rows that cannot be read is halved until it is one row. A row whose bits changed without becoming invalid cannot be told
    from a sound one, and a record may lack some of its blocks.
    """
    most = path.stat().st_size // SMALLEST_ROW
    with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
        connection.row_factory = sqlite3.Row
        connection.execute(
            "PRAGMA writable_schema = ON"
        )  # nothing is written; a damaged schema is read as far as it goes
        for name in TABLES:
            with suppress(sqlite3.DatabaseError, UnicodeDecodeError):  # the way to the whole table may be damaged
                connection.execute(f"SELECT * FROM {name} LIMIT 0")
                ranges = [range(1, most + 1)]
                while ranges:
                    ids = ranges.pop()
                    try:
                        asked = f"SELECT * FROM {name} WHERE rowid BETWEEN ? AND ?"
                        rows = [dict(row) for row in connection.execute(asked, (ids[0], ids[-1]))]
                    except sqlite3.DatabaseError:
                        half = len(ids) // 2
                        ranges += [ids[half:], ids[:half]] if half else []
                    else:
                        yield from ((name, row) for row in rows if _fits(name, row))


def _fits(name: str, row: dict[str, Any]) -> bool:
    """Returns whether a row fits its table. One of an older layout may lack columns that were added since, if they may be empty."""
    columns = TABLES[name].columns
    return set(row) <= set(columns.keys()) and all(
        column.nullable or row.get(column.name) is not None for column in columns
    )


def read_exported(path: Path) -> list[RunRecord]:
    """Returns the records that an exported document has, without the paths of their traces. Old ones go through the migrations."""
    with _opened(path) as file:
        document = msgspec.json.decode(read_up_to(file, MOST_DOCUMENT_BYTES, str(path)))
    if not isinstance(document, dict) or not all(
        isinstance(document.get(name), list) for name in ("results", "records")
    ):
        raise UsageError(
            f"{path} holds no records, and what --json prints is not read back: --save FILE.redline writes the records "
            "beside the answer, 'redline history export --format archive -o FILE' those of the history"
        )
    try:
        return [with_trace(record_of(plain), None) for plain in document["records"]]
    except RecordError as error:
        raise RecordError(f"{path}: {error}") from None
