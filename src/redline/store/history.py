"""A `History` keeps records in a database."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any

import msgspec
import platformdirs
from sqlalchemy import Column, Connection, Select, bindparam, delete, func, select

from redline.model.errors import RecordError, StoreError
from redline.model.fields import LAST_MOMENT
from redline.model.identity import Series, device_key_of_ceilings
from redline.model.record import Block, RunRecord
from redline.model.work import Ceilings
from redline.store.archive import (
    Imported,
    is_archive,
    read_archive,
    read_damaged,
    read_exported,
    rows_of,
    store_rows,
    write_archive,
)
from redline.store.database import Database, damage_of, file_of, is_sqlite, resolve
from redline.store.ledgers import Hold, SweepLedger, TuneLedger, activities
from redline.store.schema import (
    OWNED,
    WRITER,
    Activity,
    ActivityKind,
    Mark,
    MarkKind,
    Point,
    Row,
    SeriesSeen,
    blocks,
    ceilings,
    column_text,
    columns_of,
    holders,
    marks,
    points,
    portions,
    put,
    read_ceilings,
    records,
    series,
    sweep_cells,
    unpack,
    with_trace,
    write_record,
)
from redline.system.processes import is_gone

OnUnreadable = Callable[[str, RecordError], None]
"""It is called with the id of a record that was left out, and the reason."""

HEAD: tuple[Column[Any], ...] = (records.c.id, records.c.head)


def _matching(
    columns: Sequence[Column[Any]],
    since: float | None = None,
    limit: int | None = None,
    newest_first: bool = True,
    **exact: Any,
) -> Select[Any]:
    """Returns a statement that selects `columns` of the records that fit, in order of time.

    `exact` are fields of a `Row`, such as the model or the recipe's text as it was written; one that is None excludes none.
    """
    fields = dict(zip(Row.__struct_fields__, columns_of(records, Row), strict=True))
    fits = [fields[name] == column_text(value) for name, value in exact.items() if value is not None]
    fits += [] if since is None else [records.c.created_at >= since]
    order = (records.c.created_at, records.c.id)  # ids sort by time too and settle what falls on one instant
    in_order = [column.desc() for column in order] if newest_first else order
    return select(*columns).where(*fits).order_by(*in_order).limit(limit)


def _log_unreadable(record_id: str, error: RecordError) -> None:
    logging.getLogger(__name__).warning("left out record %s: %s", record_id, error)


class History:
    """A history keeps records in a database. Several threads may use it, and several processes may write to it.

    A record is begun, its blocks are appended one by one as they are measured, and it is finished; each call is one
    transaction, so whatever kills the writer, all that was appended before stays and can be loaded.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._appending = Lock()
        self._next_blocks: dict[str, int] = {}
        self.has_written = False
        """It says whether this process has written a record."""

    @classmethod
    def open(cls, url: str | os.PathLike[str] | None = None, **how: Any) -> History:
        """Opens the history at a database URL or path. The default is in `REDLINE_STORE`, or else it is the history of this user.

        `only_to_read` creates no file and no table. A server that goes away is waited for `patience_s` seconds (five
        minutes), and `on_note` is told.
        """
        return cls(Database(resolve(None if url is None else os.fspath(url)), **how))

    def require_writable(self) -> None:
        """Raises a `StoreError` now, if nothing can be written, rather than when something has been measured for minutes."""
        nothing = delete(holders).where(holders.c.name == "")
        self._database.write(lambda connection: connection.execute(nothing), patient=False)

    @property
    def location(self) -> str:
        """Returns the location for people to read, which is a path, or a URL without its password."""
        return self._database.location

    @property
    def folder(self) -> Path:
        """Returns the folder for files of this history, such as traces. It is that of a SQLite file, or else this user's data folder."""
        path = file_of(self._database.url)
        return path.parent if path is not None else Path(platformdirs.user_data_path("redline"))

    def close(self) -> None:
        self._database.close()

    def __enter__(self) -> History:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # Writing

    def begin(self, record: RunRecord) -> None:
        """Writes a record's head, or replaces it when more is known; blocks that were appended already stay."""
        self._write(record, over=False)

    def append(self, record_id: str, block: Block) -> None:
        """Adds a block at the end of a record. The cost depends neither on the record nor on the history.

        One process writes a record, and it numbers the blocks: a block that was stored although no answer came back has a
        number that is taken, and is not stored twice.
        """
        body = msgspec.msgpack.encode(block)

        def append(connection: Connection) -> None:
            if record_id not in self._next_blocks:
                if connection.scalar(select(records.c.id).where(records.c.id == record_id)) is None:
                    raise StoreError(f"no record {record_id!r}: begin it before appending to it")
                last = connection.scalar(select(func.max(blocks.c.number)).where(blocks.c.record_id == record_id))
                self._next_blocks[record_id] = 0 if last is None else last + 1
            row = {"record_id": record_id, "number": self._next_blocks[record_id], "body": body}
            put(connection, blocks, row, replace=False)

        with self._appending:
            self._database.write(append)
            self._next_blocks[record_id] += 1

    def finish(self, record: RunRecord) -> None:
        """Writes a record's head for the last time. Blocks of the record that were not appended yet are added."""
        self._write(record, over=True)
        self._next_blocks.pop(record.id, None)

    def _write(self, record: RunRecord, *, over: bool) -> None:
        stored = with_trace(record, self.folder, is_stored=True)
        self._database.write(lambda connection: write_record(connection, stored, over=over))
        self.has_written = True

    # Who works on what

    def sweep(self, name: str) -> SweepLedger:
        """Returns what is known of the cells of a sweep."""
        return SweepLedger(self._database, name)

    def tunes(self) -> TuneLedger:
        """Returns the ledger of all searches for a fastest recipe."""
        return TuneLedger(self._database)

    def hold(self, kind: ActivityKind, name: str) -> Hold:
        """Returns a hold, which says what this process is at for those who look on."""
        return Hold(self._database, kind, name)

    def activities(self) -> list[Activity]:
        """Returns what processes said they are at."""
        with self._database.reading() as connection:
            return activities(connection, *self._database.clocks(connection))

    # The limits of devices

    def ceilings(self, device_key: str) -> Ceilings | None:
        """Returns what a device can do at most; None if that is not known, or was measured in another way."""
        bodies = self._database.values(select(ceilings.c.body).where(ceilings.c.device_key == device_key))
        return read_ceilings(bodies[0]) if bodies else None

    def keep_ceilings(self, measured: Ceilings) -> None:
        """Writes what a device can do at most, in the place of what was known of it."""
        row = {
            "device_key": device_key_of_ceilings(measured),
            "device_name": measured.name,
            "measured_at": measured.measured_at,
            "body": msgspec.msgpack.encode(measured),
        }
        self._database.write(lambda connection: put(connection, ceilings, row))

    # Reading

    def load(self, id_or_unique_prefix: str) -> RunRecord:
        """Returns one whole record. Raises `StoreError` for none or several, `RecordError` for one that cannot be read."""
        return self.load_many([self.id_of(id_or_unique_prefix)], on_unreadable=_refuse).popitem()[1]

    def rows(self, **filters: Any) -> list[Row]:
        """Returns rows of the records that fit, newest first. They lack what was measured, so they cost little and cannot be damaged.

        `since` (seconds since the epoch), `limit`, `newest_first` and the fields of a `Row` choose them.
        """
        rows = self._database.rows(_matching(columns_of(records, Row), **filters), Row)
        gone = set[str]()
        if any(row.status == "running" for row in rows):
            with self._database.reading() as connection:
                writers = connection.execute(select(holders.c.name, holders.c.process)).all()
            gone = {name for name, process in writers if name.startswith(WRITER) and is_gone(process)}

        def shown(row: Row) -> Row:
            """Returns the row as it is shown. A time outside of the calendar, as in a damaged history, becomes the nearest inside."""
            status = "cut off" if row.status == "running" and f"{WRITER}{row.id}" in gone else row.status
            moment = min(max(row.created_at, 0.0), LAST_MOMENT)
            return msgspec.structs.replace(row, status=status, created_at=moment)

        return [shown(row) for row in rows]

    def find(self, *, on_unreadable: OnUnreadable = _log_unreadable, **filters: Any) -> list[RunRecord]:
        """Returns the whole records that fit, newest first. Those that cannot be read are left out, and `on_unreadable` is told."""
        return self._records(_matching(HEAD, **filters), on_unreadable)

    def latest_group(self) -> list[RunRecord]:
        """Returns the newest record and those measured interleaved with it, or nothing where there is none."""
        return self.load_with_groups(row.id for row in self.rows(limit=1))

    def load_many(
        self, ids: Iterable[str], *, with_blocks: bool = True, on_unreadable: OnUnreadable = _log_unreadable
    ) -> dict[str, RunRecord]:
        """Returns records by their whole ids; without their blocks if what was measured does not matter.

        Those that are not there or cannot be read are left out.
        """
        found = self._records(select(*HEAD), on_unreadable, ids=sorted(set(ids)), with_blocks=with_blocks)
        return {record.id: record for record in found}

    def load_with_groups(self, ids_or_prefixes: Iterable[str]) -> list[RunRecord]:
        """Returns records; after each come those that were measured interleaved with it. A named one that cannot be read is an error."""
        found: dict[str, RunRecord] = {}
        for record_id in map(self.id_of, ids_or_prefixes):
            if record_id not in found:
                record = self.load(record_id)
                group = self.find(group=record.group) if record.group else [record]
                found |= {one.id: one for one in sorted(group, key=lambda one: (one.position, one.id))}
        return list(found.values())

    def _records(
        self,
        heads: Select[Any],
        on_unreadable: OnUnreadable,
        *,
        ids: Iterable[str] | None = None,
        with_blocks: bool = True,
    ) -> list[RunRecord]:
        bodies: dict[str, list[bytes]] = {}
        with self._database.reading() as connection:
            found = list(portions(connection, heads, records.c.id, ids))
            asked = select(blocks.c.record_id, blocks.c.body).order_by(blocks.c.record_id, blocks.c.number)
            own = [row.id for row in found] if with_blocks else []
            for record_id, body in portions(connection, asked, blocks.c.record_id, own):
                bodies.setdefault(record_id, []).append(body)
        readable = []
        for record_id, head in found:
            try:
                readable.append(with_trace(unpack(record_id, head, bodies.get(record_id, [])), self.folder))
            except RecordError as error:
                self._database.refuse_damage(error)
                on_unreadable(record_id, error)
        return readable

    def id_of(self, prefix: str) -> str:
        """Returns the full id of the one record whose id starts with this. It is looked up as a range: LIKE would not use the index."""
        first = column_text(prefix)
        asked = select(records.c.id).where(records.c.id >= first, records.c.id < f"{first}\U0010ffff")
        found = self._database.values(asked.order_by(records.c.id).limit(4)) if prefix else []
        if not found:
            raise StoreError(f"no record {prefix!r} in {self.location}")
        if found[0] != prefix and len(found) > 1:
            some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
            raise StoreError(f"{prefix!r} fits several records ({some}): give more of the id")
        return str(found[0])

    def count(self) -> int:
        (number,) = self._database.values(select(func.count()).select_from(records))
        return int(number)

    # Tags and notes

    def mark(self, record_id: str, kind: MarkKind, words: str, *, at: float) -> None:
        """Tags a record, or notes something about it; the same does nothing a second time."""
        values = {"record_id": record_id, "kind": kind, "words": words, "created_at": at}
        self._database.write(lambda connection: put(connection, marks, values), durable=True)

    def unmark(self, record_id: str, kind: MarkKind, words: str) -> bool:
        """Removes a tag or note, and returns whether it was there."""
        own = delete(marks).filter_by(record_id=record_id, kind=kind, words=column_text(words))
        return self._database.execute(own, durable=True) > 0

    def marks(self, *, series: Sequence[str] | None = None) -> list[Mark]:
        """Returns all tags and notes, or those that records of some series have; the oldest come first."""
        asked = select(*columns_of(marks, Mark)).order_by(marks.c.created_at, marks.c.record_id, marks.c.words)
        if series is not None:
            own = select(points.c.record_id).where(points.c.series_key.in_(series))
            asked = asked.where(marks.c.record_id.in_(own))
        return self._database.rows(asked, Mark)

    def tagged(self, tag: str) -> list[str]:
        """Returns the ids of all records that have this tag."""
        return self._database.values(select(marks.c.record_id).filter_by(kind="tag", words=column_text(tag)))

    # Trends

    def series(self) -> list[SeriesSeen]:
        """Returns the series of which there are trends; the latest measured comes first."""
        asked = select(series).join(points, points.c.series_key == series.c.series_key).group_by(series.c.series_key)
        with self._database.reading() as connection:
            seen = connection.execute(asked.order_by(func.max(points.c.created_at).desc())).all()
        found = []
        for key, body in seen:
            with suppress(TypeError, ValueError):  # a damaged series is left out
                found.append(SeriesSeen(key=key, series=msgspec.json.decode(body, type=Series)))
        return found

    def points(self, key: str) -> list[Point]:
        """Returns the points that a series has, the oldest first."""
        own = select(*columns_of(points, Point)).where(points.c.series_key == key)
        return self._database.rows(own.order_by(points.c.created_at, points.c.record_id), Point)

    # Files

    def export_archive(self, out: IO[bytes], ids: Sequence[str] = ()) -> int:
        """Writes the whole history, or some records, byte by byte, and returns how many records that were."""
        with self._database.reading() as connection:
            return write_archive(rows_of(connection, ids), out)

    def add_file(self, path: Path) -> Imported:
        """Adds the records of a back-up, of an exported document or of another history that are not there yet.

        If the other history is damaged, all of it that can be read is added.
        """
        read = read_archive if is_archive(path) else read_damaged if damage_of(path) else None
        if read is not None:
            return self._database.write(lambda to: store_rows(to, read(path)), durable=True)
        with history_in(path) as other, other._database.reading() as source:
            return self._database.write(lambda to: store_rows(to, rows_of(source)), durable=True)

    def delete(self, ids: Sequence[str]) -> list[str]:
        """Deletes records with all that belongs to them, and returns the names of sweeps that have lost a cell by it.

        Files of traces in the history's folder go too.
        """
        traces = [record.trace.path for record in self.load_many(ids, with_blocks=False).values() if record.trace]

        def remove(connection: Connection) -> set[str]:
            cells = portions(connection, select(sweep_cells.c.sweep), sweep_cells.c.record_id, ids)
            sweeps = {cell.sweep for cell in cells}
            for table in (points, *OWNED, records):
                own = delete(table).where(table.c["id" if table is records else "record_id"] == bindparam("own"))
                connection.execute(own, [{"own": record_id} for record_id in ids])
            return sweeps

        sweeps = self._database.write(remove, durable=True)
        for path in filter(None, traces):
            Path(path).unlink(missing_ok=True)
        return sorted(sweeps)


def _refuse(record_id: str, error: RecordError) -> None:
    raise error


@contextmanager
def history_in(path: Path) -> Iterator[History]:
    """Yields the history that a file is, or that a back-up or an exported document holds. It is for reading."""
    if is_sqlite(path):
        with History.open(path, only_to_read=True) as history:
            yield history
        return
    with History.open(":memory:") as history:
        if is_archive(path):
            history.add_file(path)
        else:
            for record in read_exported(path):
                history.finish(record)
        yield history
