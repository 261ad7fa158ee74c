"""Finds and opens the database of a history. Several processes may write to it, a server may go away, and errors are one line."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import platformdirs
from sqlalchemy import Connection, Engine, QueuePool, RowMapping, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from redline.model.errors import MissingExtra, RedlineError, StoreError
from redline.model.files import open_to_read
from redline.store import schema

VARIABLE = "REDLINE_STORE"
"""Environment variable: a database URL, or the path of a SQLite file."""
KINDS = "a path, sqlite:///PATH or postgresql://USER@HOST/DATABASE"
SQLITE_MAGIC = b"SQLite format 3\0"
"""Every SQLite file begins with this."""

SYNCHRONOUS = {"durable": "FULL", "usual": "NORMAL"}
"""With its write-ahead log, SQLite is safe from crashes with NORMAL, and with FULL from a power cut too."""

PATIENCE_S = 300.0
"""A server that was there before and has gone away is waited for this long."""
RETRY_S = 1.0
BUSY_SECONDS = 60
"""A writer waits this long for its turn. A turn takes well under a millisecond; only a hung disk gets near this."""

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R")
OnNote = Callable[[str], None]
"""Called with one line that a person should know, such as that a server is waited for."""

# `sqlite:/x` is a mistyped URL; taken as a path it would silently start an empty history elsewhere.
_URL = re.compile(r"[\w+.-]+://|(sqlite|postgres)\w*(\+\w*)?:", re.IGNORECASE)
_SECRETS = re.compile(r"(?<=:).*@|\?.*")
_DRIVER = "psycopg"
"""The only driver for PostgreSQL: its error codes tell errors apart."""
_SERVER_OPTIONS = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""A server whose machine is gone must be noticed, not waited for until the network gives up."""
_AWAY_STATES = ("57P01", "57P02", "57P03")
"""PostgreSQL uses these codes for shutting down, crashed and starting up. Class 08 is a broken connection."""
_ELSEWHERE = f"set {VARIABLE} to another location"

# SQLite forbids even closing a connection that came through a fork, so the child keeps the parent's alive, unused.
_abandoned: list[object] = []


def resolve(location: str | None = None) -> URL:
    """Returns the URL meant by `location`, else by the environment, else that of this user's history."""
    location = location or os.environ.get(VARIABLE)
    if not location:
        return _file(str(platformdirs.user_data_path("redline") / "history.sqlite"))
    if not _URL.match(location):
        return _file(location)
    try:
        url = make_url(location)
    except (ArgumentError, ValueError):
        # A text that cannot be parsed may hold a password anywhere, so only what surely is none is shown.
        shown = _SECRETS.sub("…", location)
        raise StoreError(f"cannot read {shown!r} as a location for the history: write {KINDS}") from None
    backend, _, driver = url.drivername.partition("+")
    if backend in ("postgres", "postgresql"):
        if driver not in ("", _DRIVER):
            written = "write postgresql://USER@HOST/DATABASE"
            raise StoreError(f"no history by the driver {driver!r} ({describe(url)}): {written}")
        return url.set(drivername=f"postgresql+{_DRIVER}")  # SQLAlchemy's own default differs between its versions
    if backend != "sqlite" or driver not in ("", "pysqlite"):
        raise StoreError(f"no history in {url.drivername!r} ({describe(url)}): set {VARIABLE} to {KINDS}")
    if url.query:
        option = next(iter(url.query))
        raise StoreError(f"the URL of a SQLite history has no options, got {option!r}: set {VARIABLE} to {KINDS}")
    return _file(url.database or ":memory:")


def _file(path: str) -> URL:
    # Absolute now: it must not move when someone changes the working directory.
    whole = None if path == ":memory:" else os.path.abspath(os.path.expanduser(path))
    return URL.create("sqlite", database=whole)


def describe(url: URL) -> str:
    """Returns the location for people to read: a path, or a URL without its password."""
    if url.get_backend_name() == "sqlite":
        return url.database or ":memory:"
    secrets = [name for name in url.query if "password" in name.lower()]
    return url.difference_update_query(secrets).render_as_string(hide_password=True)


def file_of(url: URL) -> Path | None:
    """Returns the SQLite file behind a URL, or None for a server and for memory."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def folder_of_files(url: URL) -> Path:
    """Returns the folder of the files that belong to a history: beside a SQLite file, else this user's data folder."""
    path = file_of(url)
    return path.parent if path is not None else Path(platformdirs.user_data_path("redline"))


def is_sqlite(path: Path) -> bool:
    """Returns whether a file says that it is one of SQLite's. One that cannot be read does not."""
    try:
        with open_to_read(path) as file:
            return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        return False


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
        self._process = os.getpid()
        self._engine = _engine(url, self.location, only_to_read=only_to_read)

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
        path = file_of(url)
        if only_to_read and path is not None and _is_missing(path):
            return cls._in_memory(url)
        if not only_to_read and path is not None:
            _make_folder(path.parent, describe(url))
        database = cls(url, only_to_read=only_to_read, on_note=on_note, patience_s=patience_s)
        try:
            with database._in_one_line("open"):
                if not only_to_read:
                    database.refuse_damage()
                with database._engine.begin() as connection:
                    found = schema.version(connection)
                    if found != schema.LAYOUT and only_to_read:
                        return cls._stand_in(url, connection, found)
            if found != schema.LAYOUT:
                database.write(lambda connection: schema.bring_up(connection, database.location), doing="open")
            database._was_there = True
            return database
        finally:
            if not database._was_there:
                database.close()

    @classmethod
    def _stand_in(cls, url: URL, connection: Connection, found: int | None) -> Database:
        """Returns what a database of another layout, or without any, is read as."""
        location = describe(url)
        if found is None:
            schema.check_foreign(connection, location)
            return cls._in_memory(url)
        schema.check_readable(found, location)
        if connection.dialect.name == "sqlite":
            return cls._in_memory(url, connection.connection.driver_connection)
        raise StoreError(
            f"the history at {location} has layout {found}: any command that measures updates it, reading alone does not"
        )

    @classmethod
    def _in_memory(cls, url: URL, source: Any = None) -> Database:
        """A stand-in that is empty, or a copy of `source`, with today's tables."""
        database = cls(URL.create("sqlite"))
        if source is not None:
            with database._engine.connect() as connection:
                source.backup(connection.connection.driver_connection)
        database.write(lambda connection: schema.bring_up(connection, describe(url)))
        database.url, database.location, database.only_to_read = url, describe(url), True
        return database

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """On SQLite one snapshot; on PostgreSQL a later statement may see more. Nothing is ever taken away, so no harm."""
        self._mind_forks()
        with self._in_one_line("read"):
            try:
                connection = self._engine.connect()
            except DBAPIError as error:
                if not self._patience_s or not self._is_away(error):
                    raise
                self._wait(error)
                connection = self._engine.connect()
            with connection, connection.begin():
                yield connection

    def write(
        self, deed: Callable[[Connection], R], *, durable: bool = False, patient: bool = True, doing: str = "write to"
    ) -> R:
        """Do `deed` in a transaction: all of it is written or nothing is, also when the process is killed inside.

        When a server goes away, this waits for it and does `deed` again. The first time may have been committed, and only
        the answer was lost, so what `deed` inserts has a key of its own. `durable`: on disk when this returns.
        """
        if self.only_to_read:
            raise StoreError(f"cannot write to the history at {self.location}: it was opened only to read")
        self._mind_forks()
        while True:
            try:
                with self._in_one_line(doing), self._engine.connect() as connection:
                    connection.execution_options(redline_writes="durable" if durable else "usual")
                    with connection.begin():
                        return deed(connection)
            except StoreError as error:
                if not patient or not self._is_away(error.__cause__):
                    raise
                self._wait(error)

    @property
    def on_server(self) -> bool:
        return self._engine.dialect.name != "sqlite"

    def close(self) -> None:
        self._mind_forks()
        self._engine.dispose()

    def clocks(self, connection: Connection) -> tuple[float, float]:
        """The time now, and when the server was started, by the server's clock. A file has always been there."""
        if not self.on_server:
            return time.time(), 0.0
        epochs = "extract(epoch FROM clock_timestamp())::float8, extract(epoch FROM pg_postmaster_start_time())::float8"
        now, started = connection.execute(text(f"SELECT {epochs}")).one()
        return now, started

    def _is_away(self, error: BaseException | None) -> bool:
        """Returns whether a server that answered before does not any more. One that never did is a mistake in its URL."""
        if not self.on_server or not self._was_there or not isinstance(error, DBAPIError):
            return False
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            return error.connection_invalidated or isinstance(error, OperationalError)
        return str(state).startswith("08") or state in _AWAY_STATES

    def _wait(self, error: BaseException) -> None:
        """Waits until the server answers, and raises when it takes too long."""
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
        """Turns errors of the database into one line. Whatever fails on a damaged file fails because of the damage."""
        try:
            yield
        except RedlineError:
            raise
        except Exception as error:
            self.refuse_damage(error)
            if not isinstance(
                error, SQLAlchemyError | OverflowError
            ):  # the latter: a number beyond 64 bits in a document
                raise
            cause = error.orig if isinstance(error, DBAPIError) else None
            said = " ".join(str(cause or error).split())
            advice = f"; {_advice(cause)}" if cause else ""
            raise StoreError(f"cannot {doing} the history at {self.location}: {said}{advice}") from error

    def refuse_damage(self, cause: BaseException | None = None) -> None:
        """Raise if SQLite finds the file damaged. Looks at all of it, and writes nothing."""
        found = cause.orig if isinstance(cause, DBAPIError) else cause
        path = file_of(self.url)
        damage = str(found) if _is_corrupt(found) else None if path is None else damage_of(path)
        if damage is not None:
            raise StoreError(
                f"the history at {self.location} is damaged ({damage}): 'redline history recover' writes every record "
                "that can be read to a new file, and leaves this one as it is"
            ) from cause


def _is_missing(path: Path) -> bool:
    """Returns whether a file is not there, which a folder that may not be looked into does not tell."""
    try:
        return not os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _is_corrupt(error: BaseException | None) -> bool:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_CORRUPT


def damage_of(path: Path) -> str | None:
    """Returns what SQLite says is damaged in a file, or None for a sound one and for a file of something else."""
    if not is_sqlite(path):
        return None
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_SECONDS)) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except UnicodeDecodeError:  # in the message of an error that quotes what it cannot read
        return "its schema cannot be read"
    except sqlite3.DatabaseError as error:
        return str(error) if _is_corrupt(error) or error.sqlite_errorcode == sqlite3.SQLITE_NOTADB else None
    return None if said == "ok" else " ".join(said.removeprefix("*** in database main ***").split())


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


def _make_folder(folder: Path, location: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"no history at {location}: {folder} is not a folder; {_ELSEWHERE}") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(f"cannot make the folder of the history at {location}: {why}; {_ELSEWHERE}") from error


def _engine(url: URL, location: str, *, only_to_read: bool) -> Engine:
    path = file_of(url)
    if path is not None and path.is_dir():
        raise StoreError(f"no history at {location}: it is a folder; name a file in it or {_ELSEWHERE}")
    if url.get_backend_name() != "sqlite":
        return _server_engine(url, location, only_to_read=only_to_read)
    opened = url
    if path is not None and only_to_read:
        # In a folder where nothing may be written, SQLite cannot make the index of its log that it would read through.
        # Without a log nobody is writing, and it needs none.
        is_open_elsewhere = os.path.exists(path.with_name(f"{path.name}-wal"))
        query = {"mode": "ro", "uri": "true"}
        query |= {} if is_open_elsewhere or os.access(path.parent, os.W_OK) else {"immutable": "1"}
        opened = URL.create("sqlite", database=f"file:{quote(str(path))}", query=query)
    # Each connection to memory is a database of its own: there is one, and threads take turns.
    shared: dict[str, Any] = {"pool_size": 1, "max_overflow": 0} if path is None else {}
    options = {"timeout": BUSY_SECONDS, "check_same_thread": False}
    engine = create_engine(opened, connect_args=options, poolclass=QueuePool, **shared)

    @event.listens_for(engine, "connect")
    def _tune(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
        connection.execute("PRAGMA foreign_keys = ON")
        if not only_to_read:
            _write_ahead(connection)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later is refused at once when another wrote in between, however long
        # it would wait; so a writer takes the lock before anything else.
        writes = connection.get_execution_options().get("redline_writes")
        if writes:
            connection.exec_driver_sql(f"PRAGMA synchronous = {SYNCHRONOUS[writes]}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _write_ahead(connection: Any) -> None:
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


def _server_engine(url: URL, location: str, *, only_to_read: bool) -> Engine:
    options = {name: value for name, value in _SERVER_OPTIONS.items() if name not in url.query}
    try:
        # A server may hang up between two long measurements, so a connection is tried before it is used.
        engine = create_engine(url, pool_pre_ping=True, connect_args=options)
    except ImportError:
        raise MissingExtra(f"the history at {location}", "psycopg", "postgres") from None
    except TypeError as error:  # options in the URL that are not the driver's
        raise StoreError(f"cannot open the history at {location}: {error}; set {VARIABLE} to {KINDS}") from None
    return engine.execution_options(postgresql_readonly=True) if only_to_read else engine
