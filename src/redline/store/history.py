"""The history: records in a database."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, TypedDict, Unpack

import msgspec
from sqlalchemy import Text, case, delete, func, or_, select

from redline.model.errors import RecordError, StoreError
from redline.model.identity import Series
from redline.model.record import Block, RunRecord
from redline.store.archive import Imported, is_archive, read_archive, read_exported, rows_of, store_rows, write_archive
from redline.store.codec import (
    Activity,
    ActivityKind,
    Mark,
    MarkKind,
    Point,
    Row,
    SeriesSeen,
    Status,
    column_text,
    pack_block,
    row_from,
    unpack,
    with_found_trace,
    with_stored_trace,
)
from redline.store.database import Database, OnNote, folder_of_files, is_sqlite, resolve
from redline.store.ledgers import CeilingShelf, Hold, SweepLedger, TuneLedger, activities
from redline.store.recover import Salvage
from redline.store.schema import (
    OWNED,
    RENAMED,
    ROW,
    WRITER,
    blocks,
    holders,
    marks,
    points,
    put,
    records,
    series,
    sweep_cells,
    write_record,
)
from redline.system.processes import is_gone

if TYPE_CHECKING:
    from sqlalchemy import ColumnElement, Connection, Select

OnUnreadable = Callable[[str, RecordError], None]
"""Called with the id of a record that was left out, and why."""

HEAD = (records.c.id, records.c.head)
IDS_AT_ONCE = 10_000
"""Below what SQLite (32 766) and PostgreSQL (65 535) take in one statement."""


class Filters(TypedDict, total=False):
    """Filters choose the records that `rows` and `find` of a history return. One that is left out excludes none."""

    model: str | None
    task: str | None
    recipe: str | None
    """The recipe's text as it was written."""
    key: str | None
    group: str | None
    status: Status | None
    since: float | None
    """Seconds since the epoch."""
    limit: int | None
    newest_first: bool


def _matching(
    columns: Sequence[ColumnElement[Any]],
    since: float | None = None,
    limit: int | None = None,
    newest_first: bool = True,
    **exact: Any,
) -> Select[Any]:
    """Selects `columns` of the records that fit, in order of time."""
    fits = {records.c[RENAMED.get(name, name)]: value for name, value in exact.items()}
    statement = select(*columns).where(*(column == column_text(v) for column, v in fits.items() if v is not None))
    if since is not None:
        statement = statement.where(records.c.created_at >= since)
    order = (records.c.created_at, records.c.id)  # ids sort by time too and settle what falls on one instant
    statement = statement.order_by(*(column.desc() if newest_first else column for column in order))
    return statement if limit is None else statement.limit(limit)


def _log_unreadable(record_id: str, error: RecordError) -> None:
    logging.getLogger(__name__).warning("left out record %s: %s", record_id, error)


class History:
    """Records in a database. May be used by several threads, and several processes may write to one.

    A record is begun, its blocks are appended one by one as they are measured, and it is finished; each call is one
    transaction, so whatever kills the writer, all that was appended before stays and can be loaded.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._appending = Lock()
        self._next_blocks: dict[str, int] = {}
        self.has_written = False
        """Says whether this process has written a record."""

    @classmethod
    def open(
        cls,
        url: str | os.PathLike[str] | None = None,
        *,
        only_to_read: bool = False,
        on_note: OnNote = lambda note: None,
        patience_s: float | None = None,
    ) -> History:
        """Open the history at a database URL or path; by default `REDLINE_STORE`, else the one of this user.

        `only_to_read` creates no file and no table. A server that goes away is waited for `patience_s` seconds (None: five
        minutes), and `on_note` is told.
        """
        location = resolve(None if url is None else os.fspath(url))
        return cls(Database.open(location, only_to_read=only_to_read, on_note=on_note, patience_s=patience_s))

    def require_writable(self) -> None:
        """Raise a `StoreError` now, rather than when something has been measured for minutes."""
        nothing = delete(holders).where(holders.c.name == "")
        self._database.write(lambda connection: connection.execute(nothing), patient=False)

    @property
    def location(self) -> str:
        """This is for people to read: a path, or a URL without its password."""
        return self._database.location

    @property
    def folder(self) -> Path:
        """The files that belong to this history, such as traces, are here."""
        return folder_of_files(self._database.url)

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
        """Write a record's head, or replace it when more is known; blocks already appended stay."""
        self._write(record, over=False)

    def append(self, record_id: str, block: Block) -> None:
        """Add a block at the end of a record, at a cost that depends neither on the record nor on the history.

        One process writes a record, and it numbers the blocks: a block that was stored although no answer came back has a
        number that is taken, and is not stored twice.
        """
        body = pack_block(block)

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
        """Write a record's head for the last time. Blocks of the record that were not appended yet are added."""
        self._write(record, over=True)
        self._next_blocks.pop(record.id, None)

    def _write(self, record: RunRecord, *, over: bool) -> None:
        stored = with_stored_trace(record, self.folder)
        self._database.write(lambda connection: write_record(connection, stored, over=over))
        self.has_written = True

    def sweep(self, name: str) -> SweepLedger:
        """Returns what is known of the cells of a sweep."""
        return SweepLedger(self._database, name)

    def ceilings(self) -> CeilingShelf:
        """Returns what is known of the devices' limits."""
        return CeilingShelf(self._database)

    def tunes(self) -> TuneLedger:
        """The searches for a fastest recipe."""
        return TuneLedger(self._database)

    def hold(self, kind: ActivityKind, name: str) -> Hold:
        """Says what this process is at, for those who look on."""
        return Hold(self._database, kind, name)

    # Reading

    def activities(self) -> list[Activity]:
        """Returns what processes said they are at."""
        return activities(self._database)

    def load(self, id_or_unique_prefix: str) -> RunRecord:
        """One record, whole. Raises `StoreError` for none or several, `RecordError` for one that cannot be read."""
        with self._database.reading() as connection:
            record_id = _the_id(connection, id_or_unique_prefix, self.location)

        def refuse(record_id: str, error: RecordError) -> None:
            raise error

        return self._records(select(*HEAD).where(records.c.id == record_id), refuse)[0]

    def load_recent(self, record_id: str, most_blocks: int) -> tuple[RunRecord, int]:
        """One record with only its last blocks, and how many there are: cheap for one that is being measured."""
        latest = select(blocks.c.body, blocks.c.number).where(blocks.c.record_id == record_id)
        with self._database.reading() as connection:
            head = connection.scalar(select(records.c.head).where(records.c.id == record_id))
            if head is None:
                raise StoreError(f"no record {record_id!r} in {self.location}")
            last = connection.execute(latest.order_by(blocks.c.number.desc()).limit(most_blocks)).all()
        return unpack(record_id, head, [row.body for row in reversed(last)]), last[0].number + 1 if last else 0

    def rows(self, **filters: Unpack[Filters]) -> list[Row]:
        """The records that fit, newest first, without what was measured: cheap, and nothing in it can be damaged."""
        with self._database.reading() as connection:
            found = connection.execute(_matching(ROW, **filters))
            rows = [row_from(row) for row in self._database.readable(found.mappings(), Row)]
            gone = _without_writer(connection, [row.id for row in rows if row.status == "running"])
        return [msgspec.structs.replace(row, status="cut off") if row.id in gone else row for row in rows]

    def is_cut_off(self, record_id: str) -> bool:
        """Returns whether a record is unfinished and the process that wrote it is gone."""
        with self._database.reading() as connection:
            return bool(_without_writer(connection, [record_id]))

    def find(self, *, on_unreadable: OnUnreadable = _log_unreadable, **filters: Unpack[Filters]) -> list[RunRecord]:
        """The records that fit, newest first, whole. Those that cannot be read are left out and told of."""
        return self._records(_matching(HEAD, **filters), on_unreadable)

    def latest_group(self) -> list[RunRecord]:
        """Returns the newest record and those measured interleaved with it, or nothing where there is none."""
        return self.load_with_groups(row.id for row in self.rows(limit=1))

    def load_many(
        self, ids: Iterable[str], *, with_blocks: bool = True, on_unreadable: OnUnreadable = _log_unreadable
    ) -> dict[str, RunRecord]:
        """Records by their whole ids, without their blocks where what was measured does not matter.

        Those that are not there or cannot be read are left out.
        """
        found: dict[str, RunRecord] = {}
        for chunk in _chunks(sorted(set(ids))):
            heads = select(*HEAD).where(records.c.id.in_(chunk))
            found |= {record.id: record for record in self._records(heads, on_unreadable, with_blocks=with_blocks)}
        return found

    def load_with_groups(self, ids_or_prefixes: Iterable[str]) -> list[RunRecord]:
        """Returns records, each followed by those measured interleaved with it. A named one that cannot be read is an error."""
        with self._database.reading() as connection:
            ids = dict.fromkeys(_the_id(connection, word, self.location) for word in ids_or_prefixes)

        def refuse(record_id: str, error: RecordError) -> None:
            if record_id in ids:
                raise error
            _log_unreadable(record_id, error)

        named: dict[str, str] = {}
        together: dict[str, dict[str, RunRecord]] = {}
        for chunk in _chunks(ids):
            own = records.c.id.in_(chunk)
            members = or_(own, records.c.group_id.in_(select(records.c.group_id).where(own)))
            order = (records.c.group_position, records.c.id)
            for record in self._records(select(*HEAD).where(members).order_by(*order), refuse):
                named[record.id] = f"group {record.group}" if record.group else record.id
                together.setdefault(named[record.id], {})[record.id] = record
        return list({record.id: record for one in ids for record in together[named[one]].values()}.values())

    def id_of(self, prefix: str) -> str:
        """Returns the full id of the one record whose id starts with this."""
        with self._database.reading() as connection:
            return _the_id(connection, prefix, self.location)

    def count(self) -> int:
        with self._database.reading() as connection:
            return connection.execute(select(func.count()).select_from(records)).scalar_one()

    # Tags and notes

    def mark(self, record_id: str, kind: MarkKind, words: str, *, at: float) -> None:
        """Tag a record, or note something about it; a second time does nothing."""
        values = {"record_id": record_id, "kind": kind, "words": column_text(words), "created_at": at}
        self._database.write(lambda connection: put(connection, marks, values), durable=True)

    def unmark(self, record_id: str, kind: MarkKind, words: str) -> bool:
        """Remove a tag or note; says whether it was there."""
        own = delete(marks).filter_by(record_id=record_id, kind=kind, words=column_text(words))
        return self._database.write(lambda connection: connection.execute(own).rowcount, durable=True) > 0

    def marks(self, *, series: Sequence[str] | None = None) -> list[Mark]:
        """Returns all tags and notes, oldest first, or those of the records of some series."""
        asked = select(marks).order_by(marks.c.created_at, marks.c.record_id, marks.c.words)
        if series is not None:
            asked = asked.where(
                marks.c.record_id.in_(select(points.c.record_id).where(points.c.series_key.in_(series)))
            )
        with self._database.reading() as connection:
            return self._database.readable(connection.execute(asked).mappings(), Mark)

    def tagged(self, tag: str) -> list[str]:
        """Returns the ids of the records with this tag."""
        asked = select(marks.c.record_id).where(marks.c.kind == "tag", marks.c.words == column_text(tag))
        with self._database.reading() as connection:
            return list(connection.execute(asked).scalars())

    # Trends

    def series(self) -> list[SeriesSeen]:
        """Returns what there are trends of, the latest measured first."""
        number, latest = func.count().label("number"), func.max(points.c.created_at).label("latest")
        with self._database.reading() as connection:
            bodies = {row.series_key: row.body for row in connection.execute(select(series))}
            seen = connection.execute(select(points.c.series_key, number, latest).group_by(points.c.series_key)).all()
        found = []
        for row in seen:
            try:
                known = msgspec.json.decode(bodies[row.series_key], type=Series)
            except (LookupError, TypeError, ValueError) as error:
                logging.getLogger(__name__).warning("left out a damaged series %s: %s", row.series_key, error)
            else:
                found.append(SeriesSeen(key=row.series_key, series=known, number=row.number, latest=row.latest))
        return sorted(found, key=lambda one: -one.latest)

    def points(self, keys: Iterable[str]) -> dict[str, list[Point]]:
        """Returns the points of some series, oldest first."""
        found: dict[str, list[Point]] = {}
        order = (points.c.series_key, points.c.created_at, points.c.record_id)
        with self._database.reading() as connection:
            for chunk in _chunks(keys):
                rows = connection.execute(select(points).where(points.c.series_key.in_(chunk)).order_by(*order))
                for point in self._database.readable(rows.mappings(), Point):
                    found.setdefault(point.series_key, []).append(point)
        return found

    def recent_sweeps(self, since: float) -> list[tuple[str, int, int]]:
        """Sweeps that have settled a cell since then: name, settled cells, and how many of them failed."""
        name = sweep_cells.c.sweep
        failed = func.sum(case((sweep_cells.c.status == "failed", 1), else_=0))
        recent = (
            select(name).join(records, records.c.id == sweep_cells.c.record_id).where(records.c.created_at >= since)
        )
        asked = select(name, func.count(), failed).where(name.in_(recent)).group_by(name).order_by(name)
        with self._database.reading() as connection:
            return [(sweep, settled, int(failed)) for sweep, settled, failed in connection.execute(asked)]

    def fastest_cell(self, sweep: str) -> tuple[str, float] | None:
        """Returns the settled cell of a sweep with the most items per second, in words, and how many those are."""
        speed = points.c["items"] / points.c.step_s
        batch = "batch " + records.c.batch.cast(Text)
        asked = (
            select(records.c.model, records.c.task, records.c.recipe, batch, speed)
            .join(points, points.c.record_id == records.c.id)
            .join(sweep_cells, sweep_cells.c.record_id == records.c.id)
            .where(sweep_cells.c.sweep == column_text(sweep), sweep_cells.c.status == "done")
            .order_by(speed.desc())
        )
        with self._database.reading() as connection:
            row = connection.execute(asked.limit(1)).first()
        return None if row is None else (" ".join(f"{part}" for part in row[:-1] if part), row[-1])

    # Files

    def export_archive(self, out: IO[bytes], ids: Sequence[str] = ()) -> int:
        """Writes the whole history, or some records, byte by byte, and returns how many records that were."""
        with self._database.reading() as connection:
            return write_archive(rows_of(connection, ids), out)

    def add_file(self, path: Path) -> Imported:
        """Add the records of a back-up, of another history or of an exported document that are not there yet."""
        if is_archive(path):
            return self._database.write(lambda to: store_rows(to, read_archive(path)), durable=True)
        if is_sqlite(path):
            with History.open(path, only_to_read=True) as other, other._database.reading() as source:
                return self._database.write(lambda to: store_rows(to, rows_of(source, ())), durable=True)
        found = read_exported(path)
        known = self.load_many((record.id for record in found), with_blocks=False)
        new = [record for record in found if record.id not in known]
        for record in new:
            self.finish(record)
        return Imported(added=len(new), known=len(found) - len(new))

    def add_salvage(self, found: Salvage, folder: Path) -> None:
        """Store what could be read of a damaged history, which is in `folder`."""
        for record, is_over in found.records:
            self._write(with_found_trace(record, folder), over=is_over)
        whole = {record.id: record for record, _ in found.records}
        for record_id, kind, words, moment in found.marks:
            if record_id in whole:
                self.mark(record_id, kind, words, at=moment)
        for sweep, key, record_id in found.cells:
            if record_id in whole:
                self.sweep(sweep).settle(key, whole[record_id])
        for row, body in found.tunes:
            self.tunes().save(row, body)
        for ceilings in found.ceilings:
            self.ceilings().put(ceilings)

    def delete(self, ids: Sequence[str]) -> list[str]:
        """Deletes records with all that belongs to them, and returns the names of sweeps that have lost a cell by it.

        Files of traces in the history's folder go too.
        """
        traces = [record.trace.path for record in self.load_many(ids, with_blocks=False).values() if record.trace]

        def remove(connection: Connection) -> set[str]:
            sweeps: set[str] = set()
            for chunk in _chunks(ids):
                own = sweep_cells.c.record_id.in_(chunk)
                sweeps |= set(connection.execute(select(sweep_cells.c.sweep).where(own)).scalars())
                for table in (points, *OWNED):
                    connection.execute(delete(table).where(table.c.record_id.in_(chunk)))
                connection.execute(delete(records).where(records.c.id.in_(chunk)))
            return sweeps

        sweeps = self._database.write(remove, durable=True)
        for path in filter(None, traces):
            Path(path).unlink(missing_ok=True)
        return sorted(sweeps)

    def _records(self, heads: Select[Any], on_unreadable: OnUnreadable, *, with_blocks: bool = True) -> list[RunRecord]:
        bodies: dict[str, list[bytes]] = {}
        with self._database.reading() as connection:
            found = connection.execute(heads).all()
            for chunk in _chunks(row.id for row in found) if with_blocks else ():
                asked = select(blocks.c.record_id, blocks.c.body).where(blocks.c.record_id.in_(chunk))
                for record_id, body in connection.execute(asked.order_by(blocks.c.record_id, blocks.c.number)):
                    bodies.setdefault(record_id, []).append(body)
        readable = []
        for record_id, head in found:
            try:
                record = unpack(record_id, head, bodies.get(record_id, []))
                readable.append(with_found_trace(record, self.folder))
            except RecordError as error:
                self._database.refuse_damage(error)
                on_unreadable(record_id, error)
        return readable


@contextmanager
def history_in(path: Path) -> Iterator[History | None]:
    """The history that a file is, or that a back-up holds, for reading; None for any other file."""
    if is_sqlite(path):
        with History.open(path, only_to_read=True) as history:
            yield history
    elif is_archive(path):
        with History.open(":memory:") as history:
            history.add_file(path)
            yield history
    else:
        yield None


def _the_id(connection: Connection, prefix: str, location: str) -> str:
    """The one id that begins with `prefix`. Looked up as a range, because LIKE would not use the index."""
    found: Sequence[str] = ()
    if prefix and prefix.isascii() and prefix.isprintable():  # ids are plain text; anything else fits none
        end = prefix[:-1] + chr(ord(prefix[-1]) + 1)
        asked = select(records.c.id).where(records.c.id >= prefix, records.c.id < end).order_by(records.c.id)
        found = connection.execute(asked.limit(4)).scalars().all()
    if not found:
        raise StoreError(f"no record {prefix!r} in {location}")
    if found[0] != prefix and len(found) > 1:
        some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
        raise StoreError(f"{prefix!r} fits several records ({some}): give more of the id")
    return found[0]


def _without_writer(connection: Connection, record_ids: Iterable[str]) -> set[str]:
    """Returns those of some records whose writer is known to be gone."""
    gone: set[str] = set()
    for chunk in _chunks(f"{WRITER}{record_id}" for record_id in record_ids):
        asked = select(holders.c.name, holders.c.process).where(holders.c.name.in_(chunk))
        gone |= {name.removeprefix(WRITER) for name, process in connection.execute(asked) if is_gone(process)}
    return gone


def _chunks(values: Iterable[str]) -> Iterator[list[str]]:
    iterator = iter(values)
    while chunk := list(islice(iterator, IDS_AT_ONCE)):
        yield chunk
