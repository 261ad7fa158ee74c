"""Waiting for a database: for a server that has gone away, for a file that another process is changing. No server runs."""

from __future__ import annotations

import sqlite3
from typing import Any

import pytest
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError
from sqlalchemy.pool import NullPool

from redline.store import database as module
from redline.store.database import Database
from redline.store.location import resolve


def error_of(kind: type[DBAPIError], sqlstate: str | None) -> DBAPIError:
    said = Exception("said the server")
    said.sqlstate = sqlstate  # type: ignore[attr-defined]
    return kind("SELECT 1", None, said)


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
        (ValueError("no error of a database"), False),
        (None, False),
    ],
)
def test_only_a_server_that_does_not_answer_is_away(error: BaseException | None, is_away: bool) -> None:
    pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    server = Database(resolve("postgresql://nobody@localhost/nothing"))
    assert not server._is_away(error), "one that never answered is a mistake in its URL"
    server._was_there = True
    assert server._is_away(error) is is_away
    file = Database(resolve("history.sqlite"))
    file._was_there = True
    assert not file._is_away(error), "a file does not go away"


class Busy:
    """A connection to a file, of which other processes change the journal the first times it is asked."""

    def __init__(self, refusals: int, code: int = sqlite3.SQLITE_BUSY, mode: str = "delete") -> None:
        self.refusals, self.code, self.mode = refusals, code, mode
        self.said: list[str] = []

    def execute(self, statement: str) -> Any:
        self.said.append(statement)
        if self.refusals:
            self.refusals -= 1
            error = sqlite3.OperationalError("database is locked")
            error.sqlite_errorcode = self.code
            raise error
        return self

    def fetchone(self) -> tuple[str]:
        return (self.mode,)


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The clock goes on by sleeping alone."""
    slept: list[float] = []
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        slept.append(seconds)

    monkeypatch.setattr(module.time, "sleep", sleep)
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    return slept


def test_a_journal_that_is_being_changed_is_asked_for_again(naps: list[float]) -> None:
    connection = Busy(3)
    module._write_ahead(connection, None)
    assert len(naps) == 3
    assert connection.said[-1] == "PRAGMA journal_mode = WAL"
    module._write_ahead(again := Busy(0, mode="wal"), None)
    assert again.said == ["PRAGMA journal_mode"], "once in the life of a file"


def test_and_not_for_ever(naps: list[float]) -> None:
    with pytest.raises(sqlite3.OperationalError):
        module._write_ahead(Busy(10**6), None)
    assert sum(naps) == pytest.approx(module.BUSY_SECONDS, abs=1)


def test_another_error_is_not_waited_for(naps: list[float]) -> None:
    with pytest.raises(sqlite3.OperationalError):
        module._write_ahead(Busy(1, sqlite3.SQLITE_CORRUPT), None)
    module._write_ahead(Busy(1, sqlite3.SQLITE_BUSY | 1 << 8), None)  # an extended code of the same
    assert len(naps) == 1


def test_the_wait_for_a_server_ends_when_it_answers_or_its_time_is_over(
    naps: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    there = Database(resolve("sqlite://"), on_note=notes.append, patience_s=4.5)
    refusals = [error_of(OperationalError, None)] * 2

    class Engine:
        pool = NullPool(lambda: None)  # type: ignore[arg-type,return-value]

        def connect(self) -> Any:
            if refusals:
                raise refusals.pop()
            return there._writer.connect()

    monkeypatch.setattr(there, "_engine", Engine())
    there._wait(ValueError("away"))
    assert naps == [1.0, 1.0, 1.0]
    assert [note.rpartition(" is ")[2] for note in notes] == ["away; waiting up to 4.5 s", "back"]
    naps.clear()
    refusals += [error_of(OperationalError, None)] * 99
    with pytest.raises(module.StoreError, match=r"has been away for 4\.5 s: start it and give the same command again"):
        there._wait(ValueError("away"))
    assert naps == [1.0, 1.0, 1.0, 1.0, 0.5]
