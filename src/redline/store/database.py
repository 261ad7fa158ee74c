"""An open database: connections tuned for several writers, transactions, and errors told in one line."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from sqlalchemy import Connection, Engine, QueuePool, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, NoSuchModuleError, SQLAlchemyError

from redline.errors import StoreError
from redline.store import layout
from redline.store.location import KINDS, VARIABLE, describe, folder_of, for_reading, in_memory

BUSY_SECONDS = 60
"""How long a writer waits for its turn. A turn takes well under a millisecond; only a hung disk gets near this."""

_WRITES = "redline_writes"

# SQLite forbids even closing a connection that came through a fork, so the child keeps the parent's alive, unused.
_abandoned: list[object] = []


class Database:
    """Read and write transactions on one place."""

    def __init__(self, url: URL) -> None:
        self.place = describe(url)
        with self._in_one_line("open"):
            self._engine = _engine(url, self.place)
        self._writer = self._engine.execution_options(**{_WRITES: True})
        self._process = os.getpid()

    @classmethod
    def open(cls, url: URL, *, only_to_read: bool = False) -> Database:
        """Make the folder, the file and the tables where they are missing, and lead older tables up.

        `only_to_read` will do with a file in a folder where nothing may be written.
        """
        if only_to_read:
            url = for_reading(url)
        _make_folder(url, describe(url))
        database = cls(url)
        try:
            with database._in_one_line("open"):
                with database._engine.begin() as connection:
                    found = layout.version(connection)
                if found != layout.LAYOUT:
                    with database._writer.begin() as connection:
                        layout.bring_up(connection, database.place)
        except StoreError:
            database.close()
            raise
        return database

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """On SQLite one snapshot; on PostgreSQL a later statement may see more. Nothing is ever taken away, so no harm."""
        self._mind_forks()
        with self._in_one_line("read"), self._engine.begin() as connection:
            yield connection

    @contextmanager
    def writing(self, *, durable: bool = False) -> Iterator[Connection]:
        """All of it is written or nothing is, also when the process is killed inside. `durable`: or the power fails after."""
        self._mind_forks()
        with (
            self._in_one_line("write to"),
            self._writer.connect() as connection,
            _synchronous(connection) if durable else nullcontext(),
            connection.begin(),
        ):
            yield connection

    @property
    def on_server(self) -> bool:
        return self._engine.dialect.name != "sqlite"

    @contextmanager
    def lasting(self) -> Iterator[Connection]:
        """A connection of one's own, in no transaction: for locks that must outlast many."""
        self._mind_forks()
        with self._in_one_line("use"), self._engine.connect() as connection:
            yield connection.execution_options(isolation_level="AUTOCOMMIT")

    def close(self) -> None:
        self._mind_forks()
        self._engine.dispose()

    def _mind_forks(self) -> None:
        if os.getpid() != self._process:
            _abandoned.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._process = os.getpid()

    @contextmanager
    def _in_one_line(self, doing: str) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            said = " ".join(str(error.orig).split())
            raise StoreError(f"cannot {doing} the history at {self.place}: {said}; {_advice(said)}") from error
        except SQLAlchemyError as error:
            said = " ".join(str(error).split())
            raise StoreError(f"cannot {doing} the history at {self.place}: {said}") from error


def _advice(said: str) -> str:
    elsewhere = f"set {VARIABLE} to another place"
    for words, advice in (
        ("not a database", f"move the file away or {elsewhere}"),
        ("malformed", f"the file is damaged: move it away or {elsewhere}"),
        ("readonly", f"make the file and its folder writable or {elsewhere}"),
        ("unable to open", f"check that it is a file in a folder you may write to, or {elsewhere}"),
        ("locked", "another program holds it: try again when that is done"),
        ("full", f"free some space or {elsewhere}"),
    ):
        if words in said:
            return advice
    return f"mend that or {elsewhere}"


def _make_folder(url: URL, place: str) -> None:
    folder = folder_of(url)
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise StoreError(f"no history at {place}: {folder} is not a folder; set {VARIABLE} to another place") from None
    except OSError as error:
        why = error.strerror or str(error)
        raise StoreError(
            f"cannot make the folder of the history at {place}: {why}; set {VARIABLE} to another place"
        ) from error


def _engine(url: URL, place: str) -> Engine:
    options: dict[str, Any] = {}
    if url.get_backend_name() == "sqlite":
        options["connect_args"] = {"timeout": BUSY_SECONDS, "check_same_thread": False}
        options["poolclass"] = QueuePool
        if in_memory(url):
            # Each connection to memory is a database of its own: there is one, and threads take turns.
            options |= {"pool_size": 1, "max_overflow": 0}
    else:
        options["pool_pre_ping"] = True  # a server may hang up between two long measurements
    try:
        engine = create_engine(url, **options)
    except NoSuchModuleError:
        raise StoreError(f"no history in {url.drivername!r} ({place}): set {VARIABLE} to {KINDS}") from None
    except ImportError as error:
        package = "psycopg[binary]" if error.name == "psycopg" else error.name
        raise StoreError(f"the history at {place} needs the package {error.name}: pip install '{package}'") from None
    except TypeError as error:  # options in the URL that are not the driver's
        raise StoreError(f"cannot open the history at {place}: {error}; set {VARIABLE} to {KINDS}") from None
    if engine.dialect.is_async:
        raise StoreError(f"the history at {place} needs a driver that is not asynchronous: write {KINDS}")
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", _tune_sqlite)
        event.listen(engine, "begin", _begin_sqlite)
    return engine


def _tune_sqlite(connection: Any, _: object) -> None:
    connection.isolation_level = None  # we say BEGIN ourselves, below
    connection.execute(f"PRAGMA busy_timeout = {BUSY_SECONDS * 1000}")
    connection.execute("PRAGMA synchronous = NORMAL")  # with WAL: safe from crashes, one fsync per checkpoint
    connection.execute("PRAGMA foreign_keys = ON")
    _write_ahead(connection)


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
            if "locked" not in str(error) or time.monotonic() > deadline:
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
