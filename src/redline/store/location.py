"""Where a history is: the per-user folder, a path, or a database URL. Nothing is opened here."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote, unquote

import platformdirs
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from redline.model.errors import StoreError

VARIABLE = "REDLINE_STORE"
"""Environment variable: a database URL, or the path of a SQLite file."""

KINDS = "a path, sqlite:///PATH or postgresql://USER@HOST/DATABASE"
PSYCOPG = "psycopg"
"""The only driver for PostgreSQL: its error codes tell errors apart."""

SQLITE_MAGIC = b"SQLite format 3\0"
"""What every SQLite file begins with."""

# `sqlite:/x` is a mistyped URL; taken as a path it would silently start an empty history elsewhere.
_URL = re.compile(r"[\w+.-]+://|(sqlite|postgres)\w*(\+\w*)?:", re.IGNORECASE)
_FILE_OPTIONS = {"cache", "immutable", "mode", "nolock", "psow", "vfs"}
_DRIVER_OPTIONS = {"cached_statements", "check_same_thread", "detect_types", "isolation_level", "timeout", "uri"}
_SECRETS = re.compile(r"(?<=:).*@|\?.*")


def resolve(text: str | None = None) -> URL:
    """The URL meant by `text`, else by the environment, else the history of this user."""
    text = text or os.environ.get(VARIABLE)
    if not text:
        return _file(str(platformdirs.user_data_path("redline") / "history.sqlite"))
    return _parsed(text) if _URL.match(text) else _file(text)


def describe(url: URL) -> str:
    """The location for people to read: a path, or a URL without its password."""
    if url.get_backend_name() == "sqlite":
        database = url.database or ":memory:"
        return unquote(database.removeprefix("file:")) if _is_uri(url) else database
    secrets = [name for name in url.query if "password" in name.lower()]
    return url.difference_update_query(secrets).render_as_string(hide_password=True)


def file_of(url: URL) -> Path | None:
    """The SQLite file behind a URL; None for a server, for memory, and for a `file:` URI, which SQLite reads itself."""
    if url.get_backend_name() != "sqlite" or in_memory(url) or _is_uri(url):
        return None
    return Path(str(url.database))


def folder_of(url: URL) -> Path | None:
    """The folder that a new SQLite file needs; None where nothing is to be made."""
    if url.get_backend_name() != "sqlite" or in_memory(url):
        return None
    if not _is_uri(url):
        return Path(str(url.database)).parent
    path = describe(url).removeprefix("//").partition("?")[0]
    only_read = url.query.get("mode") in ("ro", "memory") or "immutable" in url.query
    return None if only_read or not path.startswith("/") else Path(path).parent


def in_memory(url: URL) -> bool:
    return url.get_backend_name() == "sqlite" and url.database in (None, "", ":memory:")


def folder_of_files(url: URL) -> Path:
    """Where the files that belong to a history are: beside a SQLite file, else in this user's data folder."""
    path = _path_of(url)
    return path.parent if path is not None else Path(platformdirs.user_data_path("redline"))


def is_missing(url: URL) -> bool:
    """Whether a SQLite file is not there. A folder that may not be looked into gives no answer."""
    path = file_of(url)
    try:
        return path is not None and not os.lstat(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def is_sqlite(path: Path) -> bool:
    """Whether a file says that it is one of SQLite's. One that cannot be read gives no answer."""
    try:
        with path.open("rb") as file:
            return file.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC
    except OSError:
        return False


def identity(url: URL) -> tuple[int, int] | None:
    """Tells a SQLite file from another that is put in its place; None where there is none to look at."""
    path = _path_of(url)
    try:
        found = None if path is None else os.stat(path)
    except OSError:
        return None
    return None if found is None else (found.st_dev, found.st_ino)


def for_reading(url: URL) -> URL:
    """The same location, opened so that nothing is written."""
    path = file_of(url)
    if path is None:
        return url
    # In a folder where nothing may be written, SQLite cannot make the index of its log that it would read through.
    # Without a log nobody is writing, and it needs none.
    is_open_elsewhere = os.path.exists(path.with_name(f"{path.name}-wal"))
    immutable = {} if is_open_elsewhere or os.access(path.parent, os.W_OK) else {"immutable": "1"}
    return _as_uri(url, path, {"mode": "ro", **immutable})


def _path_of(url: URL) -> Path | None:
    """The file behind any SQLite URL, also one that SQLite reads itself; None for a server and for memory."""
    if url.get_backend_name() != "sqlite" or in_memory(url) or url.query.get("mode") == "memory":
        return None
    if not _is_uri(url):
        return Path(str(url.database))
    return Path(os.path.abspath(describe(url).removeprefix("//").partition("?")[0]))


def _is_uri(url: URL) -> bool:
    return str(url.database).startswith("file:")


def _as_uri(url: URL, path: Path, options: Mapping[str, str]) -> URL:
    """The form in which SQLite itself reads options, such as `mode=ro`."""
    return url.set(database=f"file:{quote(str(path))}").update_query_dict({**options, "uri": "true"})


def _file(path: str) -> URL:
    if path == ":memory:":
        return URL.create("sqlite")
    # Absolute now: it must not move when someone changes the working directory.
    return URL.create("sqlite", database=os.path.abspath(os.path.expanduser(path)))


def _parsed(text: str) -> URL:
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        # What cannot be parsed may hold a password anywhere: show only what surely is none.
        raise StoreError(
            f"cannot read {_SECRETS.sub('…', text)!r} as a location for the history: write {KINDS}"
        ) from None
    backend, _, driver = url.drivername.partition("+")
    if backend in ("postgres", "postgresql"):
        if driver not in ("", PSYCOPG):
            raise StoreError(
                f"no history by the driver {driver!r} ({describe(url)}): write postgresql://USER@HOST/DATABASE"
            )
        return url.set(drivername=f"postgresql+{PSYCOPG}")  # SQLAlchemy's own default differs between its versions
    if backend != "sqlite" or driver not in ("", "pysqlite"):
        raise StoreError(f"no history in {url.drivername!r} ({describe(url)}): set {VARIABLE} to {KINDS}")
    return _sqlite(url)


def _sqlite(url: URL) -> URL:
    unknown = sorted(url.query.keys() - _DRIVER_OPTIONS - _FILE_OPTIONS)
    if unknown:
        raise StoreError(f"SQLite has no option {unknown[0]!r} ({describe(url)}): set {VARIABLE} to {KINDS}")
    path = file_of(url)
    absolute = None if path is None else Path(os.path.abspath(path.expanduser()))
    if absolute is not None and (url.query.keys() & {*_FILE_OPTIONS, "uri"}):
        # Otherwise the driver drops them, or makes them part of the file's name.
        return _as_uri(url, absolute, {})
    if absolute is not None:
        return url.set(database=str(absolute))
    return url.update_query_dict({"uri": "true"}) if _is_uri(url) else url
