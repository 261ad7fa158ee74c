"""An open database: connections tuned for several writers, transactions, a server that goes away, errors in one line."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
from sqlalchemy import Connection, Engine, QueuePool, RowMapping, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from redline.model.errors import MissingExtra, RedlineError, StoreError
from redline.store import layout, queries
from redline.store.location import (
    KINDS,
    VARIABLE,
    describe,
    file_of,
    folder_of,
    for_reading,
    identity,
    in_memory,
    is_missing,
    is_sqlite,
)

BUSY_SECONDS = 60
"""How long a writer waits for its turn. A turn takes well under a millisecond; only a hung disk gets near this."""
PATIENCE_S = 300.0
"""How long to wait for a server that was there before and has gone away."""
RETRY_S = 1.0

S = TypeVar("S", bound=msgspec.Struct)
OnNote = Callable[[str], None]
"""Told in one line what a person should know: a server that is waited for, a file that was set aside."""

_WRITES = "redline_writes"
_SERVER_OPTIONS = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""A server whose machine is gone must be noticed, not waited for until the network gives up."""
_AWAY_STATES = ("57P01", "57P02", "57P03")
"""PostgreSQL's codes for shutting down, crashed and starting up; class 08 is a broken connection."""

# SQLite forbids even closing a connection that came through a fork, so the child keeps the parent's alive, unused.
_abandoned: list[object] = []


class Database:
    """Read and write transactions on one database."""

    def __init__(
        self,
        url: URL,
        *,
        only_to_read: bool = False,
        on_note: OnNote = lambda note: None,
        patience_s: float | None = None,
    ) -> None:
        self.url = url
        self.location = describe(url)
        self.only_to_read = only_to_read
        self._on_note = on_note
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._was_there = False
        self._identity = identity(url)
        opened = for_reading(url) if only_to_read else url
        self._is_frozen = "immutable" in opened.query
        with self._in_one_line("open"):
            self._engine = _engine(opened, self.location)
        if only_to_read:
            self._engine = self._engine.execution_options(postgresql_readonly=True)
        self._writer = self._engine.execution_options(**{_WRITES: True})
        self._process = os.getpid()

    @classmethod
    def open(
        cls,
        url: URL,
        *,
        only_to_read: bool = False,
        on_note: OnNote = lambda note: None,
        patience_s: float | None = None,
    ) -> Database:
        """Make the folder, the file and the tables where they are missing, and update older tables.

        `only_to_read` creates and changes nothing: what is not there reads as empty, and older tables are updated in a
        copy in memory.
        """
        if only_to_read:
            return _for_reading(url, on_note, patience_s)
        _make_folder(url, describe(url))
        database = cls(url, on_note=on_note, patience_s=patience_s)
        try:
            with database._in_one_line("open"):
                database.refuse_damage()
                if database._layout() != layout.LAYOUT:
                    with database._writer.begin() as connection:
                        layout.bring_up(connection, database.location)
            database._was_there = True
        except StoreError:
            database.close()
            raise
        return database

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """On SQLite one snapshot; on PostgreSQL a later statement may see more. Nothing is ever taken away, so no harm."""
        self._mind_forks()
        with self._in_one_line("read"), self._connected(self._engine) as connection, connection.begin():
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = False, patient: bool = True) -> Iterator[Connection]:
        """All of it is written or nothing is, also when the process is killed inside. `durable`: or the power fails after.

        `patient` waits for a server that has gone away before this begins.
        """
        self._mind_forks()
        with (
            self._in_one_line("write to"),
            self._connected(self._writer, patient=patient) as connection,
            _synchronous(connection) if durable else nullcontext(),
            connection.begin(),
        ):
            yield connection

    def write(self, deed: Callable[[Connection, bool], None], *, durable: bool = False) -> None:
        """Do `deed` in a transaction of its own; when a server goes away, wait for it and do it again.

        The second time it is told so: the first may have been committed, and only the answer was lost.
        """
        again = False
        while True:
            try:
                with self.writing(durable=durable, patient=False) as connection:
                    return deed(connection, again)
            except StoreError as error:
                if not self._is_away(error.__cause__):
                    raise
                self._wait(error)
                again = True

    def is_current(self) -> bool:
        """Whether reading on shows what is there now: not of a file that was replaced, nor of a copy in memory."""
        if self.on_server:
            return True
        return self._identity is not None and not self._is_frozen and self._identity == identity(self.url)

    def require_writable(self) -> None:
        """Raise where nothing can be written, without changing anything."""
        with self.writing(patient=False) as connection:
            connection.execute(queries.DELETE_META, {"this_name": ""})

    @property
    def on_server(self) -> bool:
        return self._engine.dialect.name != "sqlite"

    def close(self) -> None:
        self._mind_forks()
        self._engine.dispose()

    def _layout(self) -> int | None:
        with self._engine.begin() as connection:
            return layout.version(connection)

    @contextmanager
    def _connected(self, engine: Engine, *, patient: bool = True) -> Iterator[Connection]:
        if self.only_to_read and engine is self._writer:
            raise StoreError(f"cannot write to the history at {self.location}: it was opened only to read")
        try:
            connection = engine.connect()
        except DBAPIError as error:
            if not patient or not self._patience_s or not self._is_away(error):
                raise
            self._wait(error)
            connection = engine.connect()
        with connection:
            yield connection

    def _is_away(self, error: BaseException | None) -> bool:
        """Whether a server that answered before does not any more. One that never did is a mistake in its URL."""
        if not self.on_server or not self._was_there or not isinstance(error, DBAPIError):
            return False
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            return error.connection_invalidated or isinstance(error, OperationalError)
        return str(state).startswith("08") or state in _AWAY_STATES

    def _wait(self, error: BaseException) -> None:
        """Until the server answers; raises when it takes too long."""
        self._on_note(f"the server of the history at {self.location} is away; waiting up to {self._patience_s:g} s")
        deadline = time.monotonic() + self._patience_s
        while time.monotonic() < deadline:
            time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))
            try:
                self._engine.connect().close()
            except DBAPIError as still:
                error = still
            else:
                self._on_note(f"the server of the history at {self.location} is back")
                return
        raise StoreError(
            f"the server of the history at {self.location} has been away for {self._patience_s:g} s: start it and give the "
            "same command again; all that was stored before is there, and a sweep or a search goes on from it"
        ) from error

    def _mind_forks(self) -> None:
        if os.getpid() != self._process:
            _abandoned.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._process = os.getpid()

    def readable(self, found: Iterable[RowMapping], kind: type[S]) -> list[S]:
        """Rows as they are stored. What is not of its kind, in a foreign history, is left out and named in the log."""
        rows = []
        for columns in found:
            try:
                rows.append(msgspec.convert({str(name): value for name, value in columns.items()}, kind))
            except msgspec.ValidationError as error:
                self.refuse_damage(error)
                logging.getLogger(__name__).warning("left out a damaged %s: %s", kind.__name__, error)
        return rows

    @contextmanager
    def _in_one_line(self, doing: str) -> Iterator[None]:
        """Turn errors of the database into one line. Whatever fails on a damaged file fails because of the damage."""
        try:
            yield
        except RedlineError:
            raise
        except Exception as error:
            self.refuse_damage(error)
            if not isinstance(error, SQLAlchemyError):
                raise
            if not isinstance(error, DBAPIError):
                said = " ".join(str(error).split())
                raise StoreError(f"cannot {doing} the history at {self.location}: {said}") from error
            said = " ".join(str(error.orig).split())
            advice = _advice(error.orig)
            raise StoreError(f"cannot {doing} the history at {self.location}: {said}; {advice}") from error

    def refuse_damage(self, cause: BaseException | None = None) -> None:
        """Raise if SQLite finds the file damaged. Looks at all of it, and writes nothing."""
        found = cause.orig if isinstance(cause, DBAPIError) else cause
        damage = str(found) if _is_corrupt(found) else damage_of(self.url)
        if damage is not None:
            raise StoreError(
                f"the history at {self.location} is damaged ({damage}): 'redline history recover' writes every record "
                "that can be read to a new file, and leaves this one as it is"
            ) from cause


def _is_corrupt(error: BaseException | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT


def damage_of(url: URL) -> str | None:
    """What SQLite says is damaged in a file; None for a sound one, and for a server, memory, or something else's file."""
    path = file_of(url)
    if path is None or not is_sqlite(path):
        return None
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True)) as connection:
            connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except UnicodeDecodeError:  # in the message of an error that quotes what it cannot read
        return "its schema cannot be read"
    except sqlite3.DatabaseError as error:
        return str(error) if _is_corrupt(error) or error.sqlite_errorcode == sqlite3.SQLITE_NOTADB else None
    return None if said == "ok" else " ".join(said.removeprefix("*** in database main ***").split())


def _for_reading(url: URL, on_note: OnNote, patience_s: float | None) -> Database:
    if is_missing(url):
        return _in_memory(url)
    database = Database(url, only_to_read=True, on_note=on_note, patience_s=patience_s)
    try:
        with database._in_one_line("open"):
            if database._layout() != layout.LAYOUT:
                with database._engine.begin() as connection:
                    return _stand_in(url, connection)
        database._was_there, readable = True, database
    finally:
        if not database._was_there:
            database.close()
    return readable


def _stand_in(url: URL, connection: Connection) -> Database:
    """What a database of another layout, or without any, is read as."""
    found, location = layout.version(connection), describe(url)
    if found is None:
        layout.check_foreign(connection, location)
        return _in_memory(url)
    layout.check_readable(found, location)
    if connection.dialect.name == "sqlite":
        return _in_memory(url, connection.connection.driver_connection)
    raise StoreError(
        f"the history at {location} has layout {found}: any command that measures updates it, reading alone does not"
    )


def _in_memory(url: URL, source: Any = None) -> Database:
    """A stand-in that is empty, or a copy of `source`, with today's tables."""
    database = Database(URL.create("sqlite"))
    with database._in_one_line("open"):
        if source is not None:
            with database._engine.connect() as connection:
                source.backup(connection.connection.driver_connection)
        with database._writer.begin() as connection:
            layout.bring_up(connection, describe(url))
    database.url, database.location, database.only_to_read = url, describe(url), True
    return database


_ELSEWHERE = f"set {VARIABLE} to another location"
_ADVICE = {
    sqlite3.SQLITE_NOTADB: (
        f"if it was one, 'redline history recover' writes what can be read of it to a new file; otherwise {_ELSEWHERE}"
    ),
    sqlite3.SQLITE_READONLY: f"make the file and its folder writable or {_ELSEWHERE}",
    sqlite3.SQLITE_CANTOPEN: f"check that it is a file in a folder you may write to, or {_ELSEWHERE}",
    sqlite3.SQLITE_BUSY: "another program holds it: try again when that is done",
    sqlite3.SQLITE_FULL: f"free some space or {_ELSEWHERE}",
    sqlite3.SQLITE_IOERR: f"the disk may be full or broken: free some space or {_ELSEWHERE}",
}


def _advice(error: BaseException | None) -> str:
    # The last byte is the kind of the error; the rest says more about it.
    return _ADVICE.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, f"fix that or {_ELSEWHERE}")


def _make_folder(url: URL, location: str) -> None:
    folder = folder_of(url)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"no history at {location}: {folder} is not a folder; {_ELSEWHERE}") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(f"cannot make the folder of the history at {location}: {why}; {_ELSEWHERE}") from error


def _engine(url: URL, location: str) -> Engine:
    if (file := file_of(url)) is not None and file.is_dir():
        raise StoreError(f"no history at {location}: it is a folder; name a file in it or {_ELSEWHERE}")
    options: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": BUSY_SECONDS, "check_same_thread": False}
        options["poolclass"] = QueuePool
        if in_memory(url):
            # Each connection to memory is a database of its own: there is one, and threads take turns.
            options |= {"pool_size": 1, "max_overflow": 0}
    else:
        options["pool_pre_ping"] = True  # a server may hang up between two long measurements
        options["connect_args"] = {name: value for name, value in _SERVER_OPTIONS.items() if name not in url.query}
    try:
        engine = create_engine(url, **options)
    except ImportError:
        raise MissingExtra(f"the history at {location}", "psycopg", "postgres") from None
    except TypeError as error:  # options in the URL that are not the driver's
        raise StoreError(f"cannot open the history at {location}: {error}; set {VARIABLE} to {KINDS}") from None
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
        if url.query.get("mode") != "ro":
            event.listen(engine, "connect", _write_ahead)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _tune_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, below
    connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    connection.execute("PRAGMA synchronous = NORMAL")  # with WAL: safe from crashes, one fsync per checkpoint
    connection.execute("PRAGMA foreign_keys = ON")


def _write_ahead(connection: Any, _: object) -> None:
    """Switch to write-ahead logging, once in the life of a file.

    Changing the journal does not wait for its turn as other statements do: when several processes open a new file
    at the same moment, all but one are refused and must ask again.
    """
    deadline = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
            if mode == "delete":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads first and writes later is refused at once when another wrote in between, however long
    # it would wait; so a writer takes the lock before anything else.
    writes = connection.get_execution_options().get(_WRITES, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


@contextmanager
def _synchronous(connection: Connection) -> Iterator[None]:
    """Commits inside are on the disk when they return. A server sees to that by itself."""
    if connection.dialect.name != "sqlite":
        yield
        return
    driver: Any = connection.connection.driver_connection
    driver.execute("PRAGMA synchronous = FULL")
    try:
        yield
    finally:
        driver.execute("PRAGMA synchronous = NORMAL")
