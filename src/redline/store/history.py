"""The history: records in a database."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Unpack

import msgspec

from redline.model.errors import RecordError, StoreError
from redline.model.identity import Series
from redline.model.record import Block, RunRecord
from redline.store import layout, queries
from redline.store.archive import Imported, is_archive, is_history, read_archive, write_archive
from redline.store.codec import (
    Activity,
    ActivityKind,
    Mark,
    MarkKind,
    Point,
    Row,
    SeriesSeen,
    column_text,
    read_exported,
    row_from,
    unpack,
    with_found_trace,
    with_stored_trace,
)
from redline.store.database import Database, OnNote
from redline.store.ledgers import Announcer, CeilingShelf, SweepLedger, TuneLedger, activities
from redline.store.location import folder_of_files, resolve
from redline.store.queries import Filters
from redline.store.recover import Salvage
from redline.store.writer import append_block, put, write_record
from redline.system.processes import is_gone

if TYPE_CHECKING:
    from sqlalchemy import Connection, Select


OnUnreadable = Callable[[str, RecordError], None]
"""Called with the id of a record that was left out, and why."""


def _log_unreadable(record_id: str, error: RecordError) -> None:
    logging.getLogger(__name__).warning("left out record %s: %s", record_id, error)


class History:
    """Records in a database. May be used by several threads, and several processes may write to one.

    A record is begun, its blocks are appended one by one as they are measured, and it is finished; each call is one
    transaction, so whatever kills the writer, all that was appended before stays and can be loaded.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self.has_written = False
        """Whether this process has written a record."""

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
        self._database.require_writable()

    @property
    def location(self) -> str:
        """A path, or a URL without its password; for people."""
        return self._database.location

    @property
    def folder(self) -> Path:
        """Where the files that belong to this history are, such as traces."""
        return folder_of_files(self._database.url)

    def is_current(self) -> bool:
        """Whether this still reads what is there: not where a file was deleted or replaced since it was opened."""
        return self._database.is_current()

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
        """Add a block at the end of a record, at a cost that depends neither on the record nor on the history."""
        self._database.write(lambda connection, again: append_block(connection, record_id, block, again=again))

    def finish(self, record: RunRecord) -> None:
        """Write a record's head for the last time. Blocks of the record that were not appended yet are added."""
        self._write(record, over=True)

    def _write(self, record: RunRecord, *, over: bool) -> None:
        stored = with_stored_trace(record, self.folder)
        self._database.write(lambda connection, _: write_record(connection, stored, over=over))
        self.has_written = True

    def sweep(self, name: str) -> SweepLedger:
        """What is known of the cells of a sweep."""
        return SweepLedger(self._database, name)

    def ceilings(self) -> CeilingShelf:
        """What is known of the devices' limits."""
        return CeilingShelf(self._database)

    def tunes(self) -> TuneLedger:
        """The searches for a fastest recipe."""
        return TuneLedger(self._database)

    def announcer(self, kind: ActivityKind, name: str) -> Announcer:
        """Says what this process is at, for those who look on."""
        return Announcer(self._database, kind, name)

    # Reading

    def activities(self) -> list[Activity]:
        """What processes said they are at."""
        return activities(self._database)

    def load(self, id_or_unique_prefix: str) -> RunRecord:
        """One record, whole. Raises `StoreError` for none or several, `RecordError` for one that cannot be read."""
        with self._database.reading() as connection:
            record_id = self._the_id(connection, id_or_unique_prefix)
            head: bytes = connection.execute(queries.HEAD_OF, {"record_id": record_id}).one().head
            bodies = _bodies(connection, [record_id]).get(record_id, [])
        try:
            return with_found_trace(unpack(record_id, head, bodies), self.folder)
        except RecordError as error:
            self._database.refuse_damage(error)
            raise

    def load_recent(self, record_id: str, blocks: int) -> tuple[RunRecord, int]:
        """One record with only its last blocks, and how many there are: cheap for one that is being measured."""
        with self._database.reading() as connection:
            found = connection.execute(queries.HEAD_OF, {"record_id": record_id}).first()
            if found is None:
                raise StoreError(f"no record {record_id!r} in {self.location}")
            last = connection.execute(queries.LAST_BLOCKS, {"record_id": record_id, "number": blocks}).all()
        return unpack(record_id, found.head, [row.body for row in reversed(last)]), last[0].number + 1 if last else 0

    def rows(self, **filters: Unpack[Filters]) -> list[Row]:
        """The records that fit, newest first, without what was measured: cheap, and nothing in it can be damaged."""
        with self._database.reading() as connection:
            found = connection.execute(queries.matching(queries.ROW, **filters))
            rows = [row_from(row) for row in self._database.readable(found.mappings(), Row)]
            gone = _without_writer(connection, [row.id for row in rows if row.status == "running"])
        return [msgspec.structs.replace(row, status="cut off") if row.id in gone else row for row in rows]

    def is_cut_off(self, record_id: str) -> bool:
        """Whether a record is unfinished and the process that wrote it is gone."""
        with self._database.reading() as connection:
            return bool(_without_writer(connection, [record_id]))

    def find(self, *, on_unreadable: OnUnreadable = _log_unreadable, **filters: Unpack[Filters]) -> list[RunRecord]:
        """The records that fit, newest first, whole. Those that cannot be read are left out and told of."""
        return self._records(queries.matching(queries.HEAD, **filters), on_unreadable)

    def group_of(self, record: RunRecord) -> list[RunRecord]:
        """All records measured interleaved with this one, the first of the group first; alone, just itself."""
        return [record] if record.group is None else self._records(queries.in_group(record.group), _log_unreadable)

    def latest_group(self) -> list[RunRecord]:
        """The group of the newest record; empty where there is none."""
        for row in self.rows(limit=1):
            if row.group is None:
                return [self.load(row.id)]
            return self._records(queries.in_group(row.group), _log_unreadable)
        return []

    def load_many(
        self, ids: Iterable[str], *, blocks: bool = True, on_unreadable: OnUnreadable = _log_unreadable
    ) -> dict[str, RunRecord]:
        """Records by their whole ids, without their `blocks` where only what was measured is asked for.

        Those that are not there or cannot be read are left out.
        """
        found: dict[str, RunRecord] = {}
        for chunk in queries.chunks(sorted(set(ids))):
            records = self._records(queries.HEADS_OF, on_unreadable, {"ids": chunk}, blocks=blocks)
            found.update((record.id, record) for record in records)
        return found

    def load_with_groups(self, ids_or_prefixes: Iterable[str]) -> list[RunRecord]:
        """Records, each followed by those measured interleaved with it. A named one that cannot be read is an error."""
        words = list(dict.fromkeys(ids_or_prefixes))
        with self._database.reading() as connection:
            whole = _groups(connection, words)
            ids = [word if word in whole else self._the_id(connection, word) for word in words]
            groups = whole | _groups(connection, [each for each in ids if each not in whole])

        def tell(record_id: str, error: RecordError) -> None:
            if record_id in groups:
                raise error
            _log_unreadable(record_id, error)

        found: dict[str, list[RunRecord]] = {}
        for chunk in queries.chunks({group for group in groups.values() if group is not None}):
            for record in self._records(queries.HEADS_OF_GROUPS, tell, {"groups": chunk}):
                found.setdefault(record.group or "", []).append(record)
        alone = self.load_many((each for each, group in groups.items() if group is None), on_unreadable=tell)
        together = ([alone[each]] if groups[each] is None else found[groups[each] or ""] for each in ids)
        return list({record.id: record for records in together for record in records}.values())

    # Tags and notes

    def mark(self, record_id: str, kind: MarkKind, words: str, *, at: float) -> None:
        """Tag a record, or note something about it; a second time does nothing."""
        with self._database.writing(durable=True) as connection:
            values = {"record_id": record_id, "kind": kind, "words": column_text(words), "created_at": at}
            put(connection, layout.marks, values)

    def unmark(self, record_id: str, kind: MarkKind, words: str) -> bool:
        """Remove a tag or note; says whether it was there."""
        with self._database.writing(durable=True) as connection:
            found = {"this_id": record_id, "this_kind": kind, "these": column_text(words)}
            return connection.execute(queries.DELETE_MARK, found).rowcount > 0

    def marks(self, *, series: Sequence[str] | None = None) -> list[Mark]:
        """All tags and notes, oldest first, or those of the records of some series."""
        with self._database.reading() as connection:
            if series is None:
                found = connection.execute(queries.MARKS)
            else:
                found = connection.execute(queries.MARKS_OF_SERIES, {"keys": list(series)})
            return self._database.readable(found.mappings(), Mark)

    def tagged(self, tag: str) -> list[str]:
        """The ids of the records with this tag."""
        with self._database.reading() as connection:
            return list(connection.execute(queries.TAGGED, {"words": column_text(tag)}).scalars())

    def id_of(self, prefix: str) -> str:
        """The full id of the one record whose id starts with this."""
        with self._database.reading() as connection:
            return self._the_id(connection, prefix)

    # Trends

    def series(self) -> list[SeriesSeen]:
        """What there are trends of, the latest measured first."""
        with self._database.reading() as connection:
            bodies = {row.series_key: row.body for row in connection.execute(queries.ALL_SERIES)}
            seen = connection.execute(queries.SERIES_SEEN).all()
        found = []
        for row in seen:
            try:
                series = msgspec.json.decode(bodies[row.series_key], type=Series)
            except (LookupError, TypeError, ValueError) as error:
                logging.getLogger(__name__).warning("left out a damaged series %s: %s", row.series_key, error)
            else:
                found.append(SeriesSeen(key=row.series_key, series=series, number=row.number, latest=row.latest))
        return sorted(found, key=lambda each: -each.latest)

    def points(self, keys: Iterable[str]) -> dict[str, list[Point]]:
        """The points of some series, oldest first."""
        found: dict[str, list[Point]] = {}
        with self._database.reading() as connection:
            for chunk in queries.chunks(keys):
                for point in self._database.readable(
                    connection.execute(queries.POINTS_OF, {"keys": chunk}).mappings(), Point
                ):
                    found.setdefault(point.series_key, []).append(point)
        return found

    def recent_sweeps(self, since: float) -> list[tuple[str, int, int]]:
        """Sweeps that have settled a cell since then: name, settled cells, and how many of them failed."""
        with self._database.reading() as connection:
            rows = connection.execute(queries.RECENT_SWEEPS, {"since": since}).all()
        return [(name, settled, int(failed)) for name, settled, failed in rows]

    def fastest_cell(self, sweep: str) -> tuple[str, float] | None:
        """The settled cell of a sweep with the most items per second, in words, and how many."""
        with self._database.reading() as connection:
            row = connection.execute(queries.FASTEST_CELL, {"name": column_text(sweep)}).first()
        return None if row is None else (" ".join(f"{part}" for part in row[:-1] if part), row[-1])

    # Back-up

    def export_archive(self, out: IO[bytes], ids: Sequence[str] = ()) -> int:
        """Write the whole history, or some records, byte by byte; how many records that were."""
        return write_archive(self._database, out, ids)

    def import_archive(self, path: Path) -> Imported:
        """Add what an archive holds and this history does not."""
        return read_archive(self._database, path)

    def add_file(self, path: Path) -> Imported:
        """Add the records of a back-up, of another history or of an exported document that are not there yet."""
        if is_archive(path):
            return self.import_archive(path)
        if is_history(path):
            with History.open(path, only_to_read=True) as other, NamedTemporaryFile() as file:
                other.export_archive(file)
                file.flush()
                return self.import_archive(Path(file.name))
        found = read_exported(path)
        known = self.load_many((record.id for record in found), blocks=False)
        new = [record for record in found if record.id not in known]
        for record in new:
            self.finish(record)
        return Imported(added=len(new), known=len(found) - len(new))

    def add_salvage(self, found: Salvage, folder: Path) -> None:
        """Store what could be read of a damaged history, which is in `folder`."""
        for record, is_over in found.records:
            self._write(with_found_trace(record, folder), over=is_over)
        records = {record.id: record for record, _ in found.records}
        for record_id, kind, words, moment in found.marks:
            if record_id in records:
                self.mark(record_id, kind, words, at=moment)
        for sweep, key, record_id in found.cells:
            if record_id in records:
                self.sweep(sweep).settle(key, records[record_id])
        for row, body in found.tunes:
            self.tunes().save(row, body)
        for ceilings in found.ceilings:
            self.ceilings().put(ceilings)

    # Taking away

    def delete(self, ids: Sequence[str]) -> list[str]:
        """Delete records with all that belongs to them; the names of sweeps that have lost a cell by it.

        Files of traces in the history's folder go too.
        """
        traces = [record.trace.path for record in self.load_many(ids, blocks=False).values() if record.trace]
        sweeps: set[str] = set()
        with self._database.writing(durable=True) as connection:
            for chunk in queries.chunks(ids):
                sweeps |= set(connection.execute(queries.SWEEPS_OF, {"ids": chunk}).scalars())
                for statement in (*queries.DELETE_BY_RECORD, queries.DELETE_RECORDS):
                    connection.execute(statement, {"ids": chunk})
        for path in traces:
            if path:
                Path(path).unlink(missing_ok=True)
        return sorted(sweeps)

    def count(self) -> int:
        with self._database.reading() as connection:
            number: int = connection.execute(queries.COUNT).scalar_one()
            return number

    def _the_id(self, connection: Connection, prefix: str) -> str:
        # Ids are plain text; anything else fits none, and would not make a range.
        plain = bool(prefix) and prefix.isascii() and prefix.isprintable()
        found: Sequence[str] = connection.execute(queries.ids_from(prefix, limit=4)).scalars().all() if plain else []
        if not found:
            raise StoreError(f"no record {prefix!r} in {self.location}")
        if found[0] != prefix and len(found) > 1:
            some = ", ".join(found[:3]) + (", …" if len(found) > 3 else "")
            raise StoreError(f"{prefix!r} fits several records ({some}): give more of the id")
        return found[0]

    def _records(
        self,
        heads: Select[Any],
        on_unreadable: OnUnreadable,
        parameters: dict[str, Any] | None = None,
        *,
        blocks: bool = True,
    ) -> list[RunRecord]:
        with self._database.reading() as connection:
            found = [(row.id, row.head) for row in connection.execute(heads, parameters or {})]
            bodies = _bodies(connection, [record_id for record_id, _ in found]) if blocks else {}
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
    if is_history(path):
        with History.open(path, only_to_read=True) as history:
            yield history
    elif is_archive(path):
        with History.open(":memory:") as history:
            history.import_archive(path)
            yield history
    else:
        yield None


def _without_writer(connection: Connection, record_ids: Iterable[str]) -> set[str]:
    """Those of some records whose writer is known to be gone."""
    names = {queries.writer_name(record_id): record_id for record_id in record_ids}
    found = [row for chunk in queries.chunks(names) for row in connection.execute(queries.WRITERS, {"names": chunk})]
    return {names[name] for name, writer in found if is_gone(writer)}


def _groups(connection: Connection, ids: Iterable[str]) -> dict[str, str | None]:
    """The group of each of these records that there is."""
    return {
        row.id: row.group_id
        for chunk in queries.chunks(ids)
        for row in connection.execute(queries.GROUPS_OF, {"ids": chunk})
    }


def _bodies(connection: Connection, record_ids: Sequence[str]) -> dict[str, list[bytes]]:
    """The blocks of several records, each in the order in which they were measured."""
    bodies: dict[str, list[bytes]] = {}
    for chunk in queries.chunks(record_ids):
        for record_id, body in connection.execute(queries.BLOCKS_OF, {"ids": chunk}):
            bodies.setdefault(record_id, []).append(body)
    return bodies
