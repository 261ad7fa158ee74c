"""Files of records: back-ups, and documents that 'history export --format json --raw' wrote.

A back-up has every row as it is stored, byte by byte, in frames of a length and a msgpack list, and a digest at the end. What
is read back into an empty history gives the same file again. Traces lie in a folder beside the history and are copied with
it, not with this.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from io import BufferedIOBase
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
from sqlalchemy import select

from redline.model.errors import RecordError, SpecError, StoreError, UsageError
from redline.model.files import MOST_DOCUMENT_BYTES, open_to_read, read_up_to
from redline.model.migrations import migrate
from redline.model.record import RunRecord
from redline.store.codec import DAMAGE, with_trace_path
from redline.store.schema import OWNED, ceilings, keep_points, put, records, tunes

if TYPE_CHECKING:
    from sqlalchemy import Connection

MAGIC = b"REDLINE1"
LONGEST = 1 << 30
"""The longest frame: a length beyond it is damage."""
OTHERS = (tunes, ceilings)
TABLES = {table.name: table for table in (records, *OWNED, *OTHERS)}
PACKING_DAMAGE = (gzip.BadGzipFile, EOFError, zlib.error)
"""These are the errors that gzip raises for damaged bytes."""

StoredRow = tuple[str, dict[str, Any]]
"""The name of a table comes first, then one row of it."""


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    added: int
    known: int
    """Records that were there already, and stayed as they are."""


def rows_of(connection: Connection, ids: Sequence[str]) -> Iterator[StoredRow]:
    """Yields all records in order, or some, each followed by what belongs to it. Searches and ceilings follow if all are asked for."""
    asked = select(records.c.id).order_by(records.c.id)
    for record_id in sorted(ids) if ids else connection.execute(asked).scalars().all():
        for table in (records, *OWNED):
            key = (table.c.id if table is records else table.c.record_id) == record_id
            yield from _stored(connection, table, key)
    for table in OTHERS if not ids else ():
        yield from _stored(connection, table)


def _stored(connection: Connection, table: Any, *which: Any) -> Iterator[StoredRow]:
    for row in connection.execute(select(table).where(*which).order_by(*table.primary_key.columns)).mappings():
        # SQLAlchemy's names are a kind of text that msgpack does not know.
        yield str(table.name), {str(name): value for name, value in row.items()}


def store_rows(connection: Connection, rows: Iterable[StoredRow]) -> Imported:
    """Add the rows that are not there yet. What belongs to a record is added with the record only."""
    added: list[str] = []
    known = 0
    owned = {table.name for table in OWNED}
    for name, row in rows:
        if name in owned and row.get("record_id") not in added[-1:]:
            continue
        is_new = put(connection, TABLES[name], row, replace=False) > 0
        if name == records.name:
            known += not is_new
            added += [row["id"]] if is_new else []
    for record_id in added:
        keep_points(connection, [record_id])
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


def read_archive(path: Path) -> Iterator[StoredRow]:
    """Yields the rows of a back-up. Raises at the first damage, so that whoever stores them stores nothing."""
    digest = hashlib.sha256()
    try:
        with open_unpacked(path) as file:
            file.read(len(MAGIC))
            for body in _frames(file, path):
                match _decoded(body, path):
                    case ["end", int(), bytes(written)]:
                        if written != digest.digest() or file.read(1):
                            raise StoreError(f"{path} is damaged: its digest does not fit; nothing was added")
                        return
                    case [str(name), dict(row)] if name in TABLES and _fits(name, row):
                        digest.update(body)
                        yield name, row
                    case _:
                        raise StoreError(f"{path} is of another version of Redline, or damaged; nothing was added")
        raise StoreError(f"{path} ends in the middle; nothing was added")
    except PACKING_DAMAGE as error:
        raise StoreError(f"{path} is damaged: {error}; nothing was added") from None


def _fits(name: str, row: dict[str, Any]) -> bool:
    """An archive of an older layout may lack columns that were added since, where these may be empty."""
    columns = TABLES[name].columns
    return set(row) <= set(columns.keys()) and all(column.nullable or column.name in row for column in columns)


def _frames(file: BufferedIOBase, path: Path) -> Iterator[bytes]:
    while head := file.read(4):
        length = int.from_bytes(head, "big")
        body = file.read(length) if length <= LONGEST else b""
        if len(head) != 4 or len(body) != length:
            raise StoreError(f"{path} ends in the middle; nothing was added")
        yield body


def _decoded(body: bytes, path: Path) -> Any:
    try:
        return msgspec.msgpack.decode(body)
    except DAMAGE as error:
        raise StoreError(f"{path} is damaged: {error}; nothing was added") from None


def is_archive(path: Path) -> bool:
    try:
        with open_unpacked(path) as file:
            return file.read(len(MAGIC)) == MAGIC
    except PACKING_DAMAGE as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None


def open_unpacked(path: Path) -> BufferedIOBase:
    """A file for reading, unpacked where gzip has compressed it."""
    file = open_to_read(path)
    if file.peek(2)[:2] != b"\x1f\x8b":
        return file
    unpacked = gzip.GzipFile(fileobj=file)
    # The file is closed with what unpacks it; the type in typeshed is narrower than what gzip takes.
    unpacked.myfileobj = file  # type: ignore[assignment]
    return unpacked


def read_json(path: Path) -> Any:
    """Returns what a JSON file holds, also where gzip has compressed it."""
    try:
        with open_unpacked(path) as file:
            return msgspec.json.decode(read_up_to(file, MOST_DOCUMENT_BYTES, str(path)))
    except PACKING_DAMAGE as error:
        raise UsageError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is neither a back-up nor a history nor a JSON document of Redline: {error}") from None


def has_raw_records(document: Any) -> bool:
    """Returns whether `history export --format json --raw` wrote the document."""
    return isinstance(document, dict) and all(isinstance(document.get(name), list) for name in ("results", "records"))


def read_exported(path: Path) -> list[RunRecord]:
    """Returns the records of an exported document without the paths of their traces. Old ones go through the migrations."""
    document = read_json(path)
    if not has_raw_records(document):
        raise UsageError(
            f"{path} holds no records, and what --json prints is not read back: --save FILE.redline writes the records "
            "beside the answer, 'redline history export --format archive -o FILE' those of the history"
        )
    return [_record(plain, path) for plain in document["records"]]


def _record(plain: Any, path: Path) -> RunRecord:
    if not isinstance(plain, dict):
        raise RecordError(f"{path}: not a record: expected a table")
    try:
        record = msgspec.convert(migrate(plain), RunRecord)
        return record if record.trace is None else with_trace_path(record, "")
    except (msgspec.ValidationError, SpecError) as error:
        raise RecordError(f"{path}: record {plain.get('id')!r} is damaged: {error}") from None
