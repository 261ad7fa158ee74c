"""Where the history lies, what is said when it cannot lie there, and waiting for a database. No server runs."""

from __future__ import annotations

import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from store_writer import make_record

from redline.model.errors import MissingExtra, StoreError
from redline.store import History, database
from redline.store.database import Database, describe, resolve


def test_a_new_folder_is_made_and_the_file_is_tuned(tmp_path: Path) -> None:
    path = tmp_path / "not" / "yet" / "there.sqlite"
    with History.open(path) as history:
        history.finish(make_record())
        assert history.location == str(path)
        with history._database.reading() as connection:
            pragmas = ("journal_mode", "synchronous", "busy_timeout", "foreign_keys")
            values = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in pragmas]
    assert values == ["wal", 1, 60_000, 1]


@pytest.mark.parametrize(
    ("asked", "variable", "shown"),
    [
        (None, None, "{data}/redline/history.sqlite"),
        (None, "", "{data}/redline/history.sqlite"),
        (None, "h.sqlite", "{here}/h.sqlite"),
        (None, "sqlite:///h.sqlite", "{here}/h.sqlite"),
        ("/elsewhere/h.sqlite", "h.sqlite", "/elsewhere/h.sqlite"),
        ("a b#?.sqlite", None, "{here}/a b#?.sqlite"),
        ("~/x.sqlite", None, "/home/someone/x.sqlite"),
        (":memory:", None, ":memory:"),
        ("sqlite://", None, ":memory:"),
        ("sqlite:///:memory:", None, ":memory:"),
        ("postgresql://me:s3cret@host:5432/db", None, "postgresql+psycopg://me:***@host:5432/db"),
        ("postgres://me@host/db", None, "postgresql+psycopg://me@host/db"),
        ("postgresql://host/db?password=s3cret&sslmode=require", None, "postgresql+psycopg://host/db?sslmode=require"),
    ],
)
def test_a_location_is_an_argument_the_environment_or_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, variable: str | None, shown: str
) -> None:
    """It is absolute from the start, and shown without a password."""
    monkeypatch.delenv("REDLINE_STORE", raising=False)
    if variable is not None:
        monkeypatch.setenv("REDLINE_STORE", variable)
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setattr("platformdirs.user_data_path", lambda name: Path("/data") / name)
    monkeypatch.chdir(tmp_path)
    assert describe(resolve(asked)) == shown.format(data="/data", here=tmp_path)


class TestRefusals:
    def refused(self, location: str | Path) -> str:
        with pytest.raises(StoreError) as caught:
            History.open(location)
        message = str(caught.value)
        assert "\n" not in message
        assert "s3cret" not in message
        return message

    def test_a_file_that_is_no_database(self, path: Path) -> None:
        path.write_text("this is a letter, not a database\n" * 200)
        before = path.read_bytes()
        assert self.refused(path) == (
            f"cannot open the history at {path}: file is not a database; fix that or set REDLINE_STORE to another location"
        )
        assert path.read_bytes() == before

    def test_a_damaged_database(self, path: Path) -> None:
        with History.open(path) as history:
            for _ in range(50):
                history.finish(make_record())
        whole = path.read_bytes()
        path.write_bytes(whole[:100] + b"\x55" * (len(whole) - 100))
        assert f"the history at {path} is damaged (" in self.refused(path)

    def test_a_database_of_something_else(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")
        assert f"{path} belongs to something else (tables bookmarks)" in self.refused(path)
        with pytest.raises(StoreError, match="belongs to something else"):
            History.open(path, only_to_read=True)
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("bookmarks",)]

    def test_a_folder_or_a_file_where_the_other_is_needed(self, path: Path) -> None:
        assert "unable to open database file; fix that" in self.refused(path.parent)
        path.write_text("")
        assert "cannot make the folder of the history" in self.refused(path / "history.sqlite")
        assert "cannot make the folder of the history" in self.refused(path / "deeper" / "history.sqlite")

    @pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a folder where even root may not write")
    def test_a_folder_that_cannot_be_made(self) -> None:
        assert "cannot make the folder of the history at /proc/self/x/" in self.refused("/proc/self/x/history.sqlite")

    @pytest.mark.parametrize(
        "url",
        [
            "mysql://me:s3cret@h/db",
            "foo://me:s3cret@h",
            "sqlite+aiosqlite:///x",
            "sqlite:///x?mode=ro",
            "sqlite:/x.sqlite",
            "postgres:me:s3cret@h",
            "postgresql://me:s3cret@h:port/db",
            "postgresql://h:port/db?password=s3cret",
            "postgresql+asyncpg://me:s3cret@h/db",
            "postgresql+psycopg2://me:s3cret@h/db",
        ],
    )
    def test_a_url_that_leads_nowhere(self, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        message = self.refused(url)
        assert message.startswith("cannot read '")
        assert message.endswith(
            "as a location for the history: write a path, sqlite:///PATH or postgresql://USER@HOST/DATABASE"
        )
        assert list(tmp_path.iterdir()) == []  # it was not taken for a path

    def test_a_driver_that_is_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "psycopg", None)
        with pytest.raises(MissingExtra) as caught:
            History.open("postgresql://me:s3cret@h/db")
        assert str(caught.value) == (
            "the history at postgresql+psycopg://me:***@h/db needs the package psycopg: pip install 'torch-redline[postgres]'"
        )

    def test_a_server_that_never_answered_is_not_waited_for(self, tmp_path: Path) -> None:
        pytest.importorskip("psycopg")
        assert "cannot open the history at postgresql" in self.refused(f"postgresql://me@/db?host={tmp_path}")


def test_a_file_that_may_only_be_read_says_so_before_anything_is_measured(path: Path) -> None:
    record = make_record()
    with History.open(path) as history:
        history.finish(record)
        history.require_writable()
        history._database.write(lambda connection: None)
        with history._database.reading() as connection:
            connection.exec_driver_sql("PRAGMA query_only = ON")
        with pytest.raises(StoreError, match=r"cannot write to .*: attempt to write a readonly database; fix that"):
            history.require_writable()
        assert history.load(record.id) == record


@pytest.mark.parametrize("is_written_to", [False, True])
def test_a_folder_where_nothing_may_be_written_can_be_read(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_written_to: bool
) -> None:
    record = make_record()
    with History.open(path) as writer:
        writer.finish(record)
        if not is_written_to:
            writer.close()
        before = sorted(path.parent.iterdir())
        # Root may write anywhere, whatever the folder's mode.
        monkeypatch.setattr("redline.store.database.os.access", lambda folder, mode: folder != path.parent)
        with History.open(path, only_to_read=True) as history:
            assert history.location == str(path)
            assert history.load(record.id) == record
            with pytest.raises(StoreError, match="it was opened only to read"):
                history.begin(make_record())
        assert sorted(path.parent.iterdir()) == before


def error_of(kind: type[DBAPIError], sqlstate: str | None) -> DBAPIError:
    said = Exception("said the server")
    said.sqlstate = sqlstate  # type: ignore[attr-defined]
    return kind("SELECT 1", None, said)


class FailingOnce:
    """A database whose connections fail with these errors before they work."""

    def __init__(self, engine: Any, *errors: Exception) -> None:
        self._inner, self.errors = engine, list(errors)

    def execution_options(self, **options: Any) -> FailingOnce:
        return self

    def connect(self) -> Any:
        if self.errors:
            raise self.errors.pop(0)
        return self._inner.connect()

    begin = connect

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock goes on by sleeping alone."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr(database.time, "sleep", sleep)
    monkeypatch.setattr(database.time, "monotonic", lambda: sum(slept))
    return slept


@pytest.mark.parametrize(
    ("error", "is_away"),
    [
        (error_of(OperationalError, "08006"), True),
        (error_of(OperationalError, "57P01"), True),
        (error_of(OperationalError, "57P03"), True),
        (error_of(OperationalError, "53100"), False),  # its disk is full: waiting changes nothing
        (error_of(IntegrityError, "23505"), False),
        (error_of(OperationalError, None), True),
        (error_of(IntegrityError, None), False),
    ],
)
def test_only_a_server_that_does_not_answer_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, naps: list[float], error: DBAPIError, is_away: bool
) -> None:
    notes: list[str] = []
    there = Database(resolve(":memory:"), on_note=notes.append, patience_s=4.5)
    engine = there._engine
    for on_server in (False, True):
        monkeypatch.setattr(Database, "on_server", on_server)
        monkeypatch.setattr(there, "_engine", FailingOnce(engine, error, error))
        if on_server and is_away:
            there.write(lambda connection: None)
            assert [note.rpartition(" is ")[2] for note in notes] == ["away; waiting up to 4.5 s", "back"]
            assert naps == [1.0, 1.0]
        else:
            with pytest.raises(StoreError, match="said the server"):
                there.write(lambda connection: None)
            assert notes == naps == [], "a file does not go away"


def test_the_wait_for_a_server_ends_when_its_time_is_over(monkeypatch: pytest.MonkeyPatch, naps: list[float]) -> None:
    there = Database(resolve(":memory:"), patience_s=4.5)
    monkeypatch.setattr(Database, "on_server", True)
    monkeypatch.setattr(there, "_engine", FailingOnce(there._engine, *[error_of(OperationalError, None)] * 99))
    with (
        pytest.raises(StoreError, match=r"has been away for 4\.5 s: start it and give the same command again"),
        there.reading(),
    ):
        pass
    assert naps == [1.0, 1.0, 1.0, 1.0, 0.5]
