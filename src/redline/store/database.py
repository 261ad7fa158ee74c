"""A `Database` is where a history lies: several processes write to it, a server may go away, and every error is one line.

SQLite needs three things said to it that a server does not: a writer takes the lock before it reads, changes go through a write-ahead
log, and a connection that came through a fork is not touched. Nothing else in the package knows which of the two databases it talks to.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import platformdirs
from sqlalchemy import Connection, Engine, Executable, QueuePool, Select, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError, SQLAlchemyError

from redline.model.errors import MissingExtra, RedlineError, StoreError
from redline.model.files import open_to_read
from redline.store import schema

VARIABLE = "REDLINE_STORE"
"""This environment variable holds a database URL, or the path of a SQLite file."""
KINDS = "a path, sqlite:///PATH or postgresql://USER@HOST/DATABASE"
ELSEWHERE = f"set {VARIABLE} to another location"

SYNCHRONOUS = {"durable": "FULL", "usual": "NORMAL"}
"""With its write-ahead log, SQLite is safe from crashes with NORMAL, and with FULL from a power cut too."""
PATIENCE_S = 300.0
"""A server that was there before and has gone away is waited for this long: five minutes are enough to start it again."""
RETRY_S = 1.0
"""A server that is away is tried again after this long."""
BUSY_S = 60
"""A writer to a SQLite file may wait this long for its turn. A turn takes well under a millisecond; only a hung disk gets near this."""

S = TypeVar("S", bound=msgspec.Struct)
R = TypeVar("R")
OnNote = Callable[[str], None]
"""It is called with one line that a person should know, such as that a server is waited for."""

# `sqlite:/x` is a mistyped URL; taken as a path it would silently start an empty history elsewhere.
_URL = re.compile(r"[\w+.-]+://|(sqlite|postgres)\w*(\+\w*)?:", re.IGNORECASE)
_SECRETS = re.compile(r"(?<=:).*@|\?.*")
"""These parts of a URL may hold a password."""
_SERVER_OPTIONS = {"connect_timeout": 10, "keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
"""A server whose machine is gone must be noticed, not waited for until the network gives up."""
_AWAY_STATES = ("57P01", "57P02", "57P03")
"""These are PostgreSQL's codes for shutting down, crashed and starting up. Codes of class 08 mean a broken connection."""

# SQLite forbids even closing a connection that came through a fork, so the child keeps the parent's alive, unused.
_abandoned: list[object] = []


def resolve(location: str | None = None) -> URL:
    """Returns the URL that `location` means; without it, the URL in the environment is taken, or else that of this user's history."""
    location = location or os.environ.get(VARIABLE) or str(platformdirs.user_data_path("redline") / "history.sqlite")
    if not _URL.match(location):
        return _file(location)
    with suppress(ArgumentError, ValueError):
        url = make_url(location)
        if url.drivername in ("sqlite", "sqlite+pysqlite") and not url.query:
            return _file(url.database or ":memory:")
        if url.drivername in ("postgres", "postgresql", "postgresql+psycopg"):
            return url.set(drivername="postgresql+psycopg")  # SQLAlchemy's own default differs between its versions
    # A text that cannot be parsed may hold a password anywhere, so only what surely is none is shown.
    raise StoreError(f"cannot read {_SECRETS.sub('…', location)!r} as a location for the history: write {KINDS}")


def _file(path: str) -> URL:
    # The path is made absolute now, because it must not move when someone changes the working directory.
    whole = None if path == ":memory:" else os.path.abspath(os.path.expanduser(path))
    return URL.create("sqlite", database=whole)


def describe(url: URL) -> str:
    """Returns the location for people to read: a path, or a URL without its password."""
    if url.get_backend_name() == "sqlite":
        return url.database or ":memory:"
    secrets = [name for name in url.query if "password" in name.lower()]
    return url.difference_update_query(secrets).render_as_string(hide_password=True)


def file_of(url: URL) -> Path | None:
    """Returns the SQLite file that a URL names; None if it names a server or memory."""
    return Path(url.database) if url.get_backend_name() == "sqlite" and url.database else None


def is_sqlite(path: Path) -> bool:
    """Returns whether a file says that it is one of SQLite's. One that cannot be read does not."""
    with suppress(OSError), open_to_read(path) as file:
        return file.read(16) == b"SQLite format 3\0"
    return False


class Database:
    """A database runs transactions that read or write."""

    def __init__(
        self,
        url: URL,
        *,
        only_to_read: bool = False,
        on_note: OnNote = lambda note: None,
        patience_s: float | None = None,
    ) -> None:
        """Makes the folder, the file and the tables if they are missing, and updates older tables.

        `only_to_read` creates and changes nothing: what is not there reads as empty, and the tables of an older file are
        updated in a copy in memory.
        """
        self.url = url
        self.location = describe(url)
        self.only_to_read = only_to_read
        self._on_note = on_note
        self._patience_s = PATIENCE_S if patience_s is None else patience_s
        self._was_there = False
        self._process = os.getpid()
        path = file_of(url)
        if path is not None and not only_to_read:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                why = error.strerror or error
                raise StoreError(
                    f"cannot make the folder of the history at {self.location}: {why}; {ELSEWHERE}"
                ) from error
        if only_to_read and path is not None and _is_missing(path):
            self._engine = self._stand_in(None)
            return
        self._engine = engine = _engine(url, self.location, only_to_read)
        try:
            with self._in_one_line("open"):
                if not only_to_read:
                    self.refuse_damage()
                with engine.begin() as connection:
                    layout = schema.layout_of(connection, self.location)
                    if only_to_read and layout != schema.LAYOUT:
                        self._engine = self._stand_in(None if layout is None else connection)
            if not only_to_read and layout != schema.LAYOUT:
                self.write(lambda connection: schema.bring_up(connection, self.location), doing="open")
            self._was_there = True
        finally:
            if not self._was_there or self._engine is not engine:
                engine.dispose()

    def _stand_in(self, source: Connection | None) -> Engine:
        """Returns a database in memory that is empty, or a copy of the one behind `source`, with today's tables."""
        if source is not None and source.dialect.name != "sqlite":
            raise StoreError(
                f"the history at {self.location} has an older layout: any command that measures updates it, reading alone does not"
            )
        engine = _engine(URL.create("sqlite"), self.location, only_to_read=False)
        if source is not None:
            with engine.connect() as connection:
                there: Any = source.connection.driver_connection
                there.backup(connection.connection.driver_connection)
        with engine.begin() as connection:
            schema.bring_up(connection, self.location)
        return engine

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        """Yields a connection for reading. SQLite shows one snapshot; on PostgreSQL a later statement may see more, which does no harm."""
        self._mind_forks()
        with self._in_one_line("read"):
            connection = self._patiently(lambda: self._engine.connect(), self._patience_s)
            with connection, connection.begin():
                yield connection

    def rows(self, statement: Select[Any], kind: type[S]) -> list[S]:
        """Returns rows as they are stored. What is not of its kind, in a foreign history, is left out and named in the log."""
        rows = []
        with self.reading() as connection:
            result = connection.execute(statement)
            names, found = list(map(str, result.keys())), result.all()
        for values in found:
            try:
                rows.append(msgspec.convert(dict(zip(names, values, strict=True)), kind))
            except msgspec.ValidationError as error:
                self.refuse_damage(error)
                logging.getLogger(__name__).warning("left out a damaged %s: %s", kind.__name__, error)
        return rows

    def values(self, statement: Select[Any]) -> list[Any]:
        """Returns the values that a statement selects in its first column."""
        with self.reading() as connection:
            return list(connection.execute(statement).scalars())

    def execute(self, statement: Executable, *, durable: bool = False) -> int:
        """Changes something in a transaction of its own, and returns how many rows that were."""
        return self.write(lambda connection: connection.execute(statement).rowcount, durable=durable)

    def write(
        self, deed: Callable[[Connection], R], *, durable: bool = False, patient: bool = True, doing: str = "write to"
    ) -> R:
        """Does `deed` in a transaction: all of it is written or nothing is, even if the process is killed inside.

        When a server goes away, this waits for it and does `deed` again. The first time may have been committed, and only
        the answer was lost, so what `deed` inserts has a key of its own. With `durable` it is on disk when this returns.
        """
        if self.only_to_read:
            raise StoreError(f"cannot write to the history at {self.location}: it was opened only to read")
        self._mind_forks()

        def attempt() -> R:
            with self._engine.connect() as connection:
                connection.execution_options(redline_writes="durable" if durable else "usual")
                with connection.begin():
                    return deed(connection)

        with self._in_one_line(doing):
            return self._patiently(attempt, self._patience_s if patient else 0.0)

    def _patiently(self, attempt: Callable[[], R], patience_s: float) -> R:
        """Makes an attempt again every second while a server is away. It says so once, and gives up when the time is over."""
        began: float | None = None
        while True:
            try:
                found = attempt()
            except DBAPIError as error:
                if not patience_s or not self._is_away(error):
                    raise
                now = time.monotonic()
                if began is None:
                    began = now
                    self._on_note(
                        f"the server of the history at {self.location} is away; waiting up to {patience_s:g} s"
                    )
                left_s = began + patience_s - now
                if left_s <= 0:
                    raise StoreError(
                        f"the server of the history at {self.location} has been away for {patience_s:g} s: start it and give the "
                        "same command again; all that was stored before is there, and a sweep or a search goes on from it"
                    ) from error
                time.sleep(min(RETRY_S, left_s))
            else:
                if began is not None:
                    self._on_note(f"the server of the history at {self.location} is back")
                return found

    @property
    def on_server(self) -> bool:
        return self._engine.dialect.name != "sqlite"

    def close(self) -> None:
        self._mind_forks()
        self._engine.dispose()

    def clocks(self, connection: Connection) -> tuple[float, float]:
        """Returns the time now, and when the server was started, by the server's clock. A file has always been there."""
        if not self.on_server:
            return time.time(), 0.0
        epochs = "extract(epoch FROM clock_timestamp())::float8, extract(epoch FROM pg_postmaster_start_time())::float8"
        now, started = connection.execute(text(f"SELECT {epochs}")).one()
        return now, started

    def _is_away(self, error: DBAPIError) -> bool:
        """Returns whether a server that answered before does not any more. One that never did is a mistake in its URL."""
        if not self.on_server or not self._was_there:
            return False
        state = getattr(error.orig, "sqlstate", None)
        if state is None:
            return error.connection_invalidated or isinstance(error, OperationalError)
        return str(state).startswith("08") or state in _AWAY_STATES

    def _mind_forks(self) -> None:
        if os.getpid() != self._process:
            _abandoned.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._process = os.getpid()

    @contextmanager
    def _in_one_line(self, doing: str) -> Iterator[None]:
        """Raises errors of the database as one line. Whatever fails on a damaged file is taken to fail because of the damage."""
        try:
            yield
        except RedlineError:
            raise
        except Exception as error:
            self.refuse_damage(error)
            # An OverflowError means that a document has a number beyond 64 bits.
            if not isinstance(error, SQLAlchemyError | OverflowError):
                raise
            cause = error.orig if isinstance(error, DBAPIError) else None
            said = " ".join(str(cause or error).split())
            raise StoreError(
                f"cannot {doing} the history at {self.location}: {said}; fix that or {ELSEWHERE}"
            ) from error

    def refuse_damage(self, cause: BaseException | None = None) -> None:
        """Raises an error if SQLite finds the file damaged. It looks at all of the file, and writes nothing."""
        path = file_of(self.url)
        damage = None if path is None else damage_of(path)
        if damage is not None:
            raise StoreError(
                f"the history at {self.location} is damaged ({damage}): 'redline history import {shlex.quote(self.location)}' adds what can be "
                f"read of it to a new one, for which {ELSEWHERE}"
            ) from cause


def _is_missing(path: Path) -> bool:
    """Returns whether a file is not there, which a folder that may not be looked into does not tell."""
    try:
        return not os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def damage_of(path: Path) -> str | None:
    """Returns what SQLite says is damaged in a file, or None for a sound one and for a file of something else."""
    if not is_sqlite(path):
        return None
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, timeout=BUSY_S)) as connection:
            (said,) = connection.execute("PRAGMA quick_check(1)").fetchone()
    except UnicodeDecodeError:  # the message of an error quotes what it cannot read
        return "its schema cannot be read"
    except sqlite3.DatabaseError as error:
        # The last byte is the kind of the error; the other bytes say more about it.
        return str(error) if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) else None
    return None if said == "ok" else " ".join(said.removeprefix("*** in database main ***").split())


def _engine(url: URL, location: str, only_to_read: bool) -> Engine:
    if url.get_backend_name() != "sqlite":
        options = {name: value for name, value in _SERVER_OPTIONS.items() if name not in url.query}
        try:
            # A server may hang up between two long measurements, so a connection is tried before it is used.
            engine = create_engine(url, pool_pre_ping=True, connect_args=options)
        except ImportError:
            raise MissingExtra(f"the history at {location}", "psycopg", "postgres") from None
        return engine.execution_options(postgresql_readonly=True) if only_to_read else engine
    path = file_of(url)
    if path is not None and only_to_read:
        # In a folder where nothing may be written, SQLite cannot make the index of its log that it would read through.
        # Without a log nobody is writing, and it needs none.
        is_open_elsewhere = os.path.exists(path.with_name(f"{path.name}-wal"))
        query = {"mode": "ro", "uri": "true"}
        query |= {} if is_open_elsewhere or os.access(path.parent, os.W_OK) else {"immutable": "1"}
        url = URL.create("sqlite", database=f"file:{quote(str(path))}", query=query)
    # Each connection to memory is a database of its own, so there is only one, and threads take turns.
    shared: dict[str, Any] = {"pool_size": 1, "max_overflow": 0} if path is None else {}
    engine = create_engine(
        url, connect_args={"timeout": BUSY_S, "check_same_thread": False}, poolclass=QueuePool, **shared
    )

    @event.listens_for(engine, "connect")
    def _tune(connection: Any, _: object) -> None:
        connection.isolation_level = None  # we say BEGIN ourselves, below
        connection.execute("PRAGMA foreign_keys = ON")
        # Changing the journal does not wait for its turn: of several who open a new file at once all but one are refused, and use
        # what that one sets. On the way the journal is in memory, because one that a killed process leaves on the disk would have
        # to be undone before anybody could read the file.
        with suppress(sqlite3.OperationalError):
            if not only_to_read and connection.execute("PRAGMA journal_mode").fetchone() == ("delete",):
                connection.execute("PRAGMA journal_mode = MEMORY")
                connection.execute("PRAGMA journal_mode = WAL")

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:
        # A transaction that reads first and writes later is refused at once when another wrote in between, however long
        # it would wait; so a writer takes the lock before anything else.
        writes = connection.get_execution_options().get("redline_writes")
        if writes:
            connection.exec_driver_sql(f"PRAGMA synchronous = {SYNCHRONOUS[writes]}")
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
