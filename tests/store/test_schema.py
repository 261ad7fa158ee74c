"""Old records still load; new, damaged and foreign ones do no harm."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from postgres_server import Server
from sqlalchemy import Connection, inspect, text
from store_writer import make_block, make_record

from redline.model import migrations
from redline.model.errors import RecordError, StoreError
from redline.model.note import note
from redline.model.record import RunRecord
from redline.store import History, layout


def execute(history: History, statement: str, **values: object) -> None:
    with history._database.writing() as connection:
        connection.execute(text(statement), values)


def rewrite_head(history: History, record: RunRecord, **changes: Any) -> None:
    plain = {**msgspec.to_builtins(record), **changes}
    statement = "UPDATE records SET head = :head, record_schema = :schema WHERE id = :id"
    execute(history, statement, head=msgspec.msgpack.encode(plain), schema=plain["schema"], id=record.id)


@pytest.fixture
def stored(history: History) -> RunRecord:
    record = make_record(id="a", created_at=1.0, stopped="target", blocks=(make_block(0), make_block(1)))
    history.finish(record)
    return record


def test_an_older_record_is_migrated_with_its_blocks(
    history: History, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(plain: dict[str, Any]) -> dict[str, Any]:
        blocks = [{"samples": block.pop("times"), **block} for block in plain["blocks"]]
        return {
            **{name: value for name, value in plain.items() if name != "remarks"},
            "notes": plain["remarks"],
            "blocks": blocks,
        }

    old = msgspec.to_builtins(stored)
    rewrite_head(history, stored, schema=0, remarks=[msgspec.to_builtins(note("note", "old"))])
    for number, block in enumerate(old["blocks"]):
        block["times"] = block.pop("samples")
        body = msgspec.msgpack.encode(block)
        execute(history, "UPDATE blocks SET body = :body WHERE number = :number", body=body, number=number)

    with pytest.raises(RecordError, match="cannot update a record from schema 0 to 1"):
        history.load("a")
    monkeypatch.setitem(migrations.MIGRATIONS, 0, rename)
    assert history.load("a") == msgspec.structs.replace(stored, notes=(note("note", "old"),))
    assert history.find() == [history.load("a")]


def test_a_newer_record_is_listed_but_not_loaded(history: History, stored: RunRecord) -> None:
    history.finish(make_record(id="b", created_at=2.0))
    rewrite_head(history, stored, schema=99, something_new=1)
    assert [(row.id, row.schema) for row in history.rows()] == [("b", 2), ("a", 99)]
    with pytest.raises(RecordError, match="schema 99; this Redline reads up to 2: update Redline"):
        history.load("a")


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xc1 not msgpack",
        b"\xa1\xff",
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode({"schema": 1}),
        msgspec.msgpack.encode({"schema": 1, "id": "a", "spec": {"workload": {"model": "x", "batch": 0}}}),
    ],
    ids=["empty", "garbage", "not utf-8", "a list", "fields missing", "a spec out of range"],
)
def test_a_damaged_head_stops_no_listing(history: History, stored: RunRecord, head: bytes) -> None:
    sound = make_record(id="b", created_at=2.0)
    history.finish(sound)
    execute(history, "UPDATE records SET head = :head WHERE id = 'a'", head=head)
    assert [row.id for row in history.rows()] == ["b", "a"]
    with pytest.raises(RecordError, match="record a is damaged"):
        history.load("a")
    told: list[str] = []
    assert history.find(on_unreadable=lambda record_id, error: told.append(f"{record_id}: {error}")) == [sound]
    assert len(told) == 1
    assert told[0].startswith("a: record a is damaged")


def test_a_damaged_block_damages_its_record_only(
    history: History, stored: RunRecord, caplog: pytest.LogCaptureFixture
) -> None:
    sound = make_record(id="b", blocks=(make_block(),))
    history.finish(sound)
    execute(history, "UPDATE blocks SET body = :body WHERE record_id = 'a' AND number = 1", body=b"\xc1")
    with pytest.raises(RecordError, match="record a is damaged"):
        history.load("a")
    with caplog.at_level(logging.WARNING):
        assert history.find() == [sound]
    assert "left out record a" in caplog.text


class TestLayout:
    def columns(self, history: History, table: str) -> list[str]:
        with history._database.reading() as connection:
            return [column["name"] for column in inspect(connection).get_columns(table)]

    def test_an_older_layout_is_updated_once(
        self, location: str, history: History, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def add_a_column(connection: Connection) -> None:
            connection.execute(text("ALTER TABLE records ADD COLUMN host TEXT"))

        now = layout.LAYOUT
        monkeypatch.setattr(layout, "LAYOUT", now + 1)
        with pytest.raises(StoreError, match=f"layout {now}: no way from {now} to {now + 1}"):
            History.open(location)
        monkeypatch.setitem(layout.MIGRATIONS, now, add_a_column)
        for _ in range(2):  # the second time there is nothing left to do: the column would be there twice
            with History.open(location) as opened:
                assert opened.load("a") == stored
        with history._database.reading() as connection:
            assert layout.version(connection) == now + 1

    def test_a_migration_that_breaks_leaves_all_as_it_was(
        self, location: str, history: History, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def break_half_way(connection: Connection) -> None:
            connection.execute(text("ALTER TABLE records ADD COLUMN host TEXT"))
            connection.execute(text("ALTER TABLE nowhere ADD COLUMN host TEXT"))

        now = layout.LAYOUT
        monkeypatch.setitem(layout.MIGRATIONS, now, break_half_way)
        with monkeypatch.context() as newer:
            newer.setattr(layout, "LAYOUT", now + 1)
            with pytest.raises(StoreError, match="nowhere"):
                History.open(location)
        assert "host" not in self.columns(history, "records")
        with History.open(location) as opened:
            assert opened.load("a") == stored

    @pytest.mark.parametrize("only_to_read", [False, True])
    def test_a_newer_layout_asks_for_a_newer_redline(
        self, location: str, history: History, stored: RunRecord, only_to_read: bool
    ) -> None:
        execute(history, "UPDATE meta SET value = '99'")
        with pytest.raises(StoreError) as caught:
            History.open(location, only_to_read=only_to_read)
        assert str(caught.value) == (
            f"the history at {history.location} has layout 99, this Redline knows {layout.LAYOUT}: update Redline"
        )

    def make_old(self, history: History, number: int) -> None:
        """As a Redline of that layout had left it."""
        missing = {1: ["sweep_cells", "ceilings", "tunes"], 2: ["ceilings", "tunes"], 3: ["tunes"]}
        for table in (*missing.get(number, []), *(("marks", "points", "series") if number < 6 else ())):
            execute(history, f"DROP TABLE {table}")
        if number in (3, 4):
            execute(history, "ALTER TABLE ceilings RENAME COLUMN device_key TO place")
        execute(history, "UPDATE meta SET value = :number WHERE name = 'layout'", number=str(number))

    @pytest.mark.parametrize("number", range(1, layout.LAYOUT))
    def test_every_older_layout_gets_what_it_lacks(
        self, location: str, history: History, stored: RunRecord, number: int
    ) -> None:
        self.make_old(history, number)
        with History.open(location) as opened:
            assert opened.load("a") == stored
            ledger = opened.sweep("study")
            assert ledger.cells() == {}
            ledger.settle("k", make_record(id="b"))
            assert [cell.record_id for cell in ledger.cells().values()] == ["b"]
            assert opened.ceilings().get("some key") is None
            assert opened.tunes().rows() == []
            for table in layout.metadata.sorted_tables:
                assert sorted(self.columns(opened, table.name)) == sorted(table.c.keys())

    @pytest.mark.parametrize("number", range(1, layout.LAYOUT))
    def test_reading_an_older_layout_changes_nothing(
        self, location: str, history: History, stored: RunRecord, number: int
    ) -> None:
        self.make_old(history, number)
        if "://" in location:
            with pytest.raises(StoreError, match=f"has layout {number}: any command that measures updates it"):
                History.open(location, only_to_read=True)
        else:
            with History.open(location, only_to_read=True) as opened:
                assert opened.load("a") == stored
                assert opened.tunes().rows() == []
                assert opened.location == location
        with history._database.reading() as connection:
            assert layout.version(connection) == number


class TestReading:
    def test_a_history_that_is_not_there_reads_as_empty_and_is_not_made(self, path: Path) -> None:
        location = path.parent / "not" / "there" / "history.sqlite"
        with History.open(location, only_to_read=True) as history:
            assert history.rows() == []
            assert history.location == str(location)
            with pytest.raises(StoreError, match="it was opened only to read"):
                history.finish(make_record())
        assert list(path.parent.iterdir()) == []

    def test_an_empty_file_reads_as_empty_and_stays_so(self, path: Path) -> None:
        path.touch()
        with History.open(path, only_to_read=True) as history:
            assert history.count() == 0
        assert path.read_bytes() == b""

    def test_an_empty_server_reads_as_empty_and_gets_no_tables(self, server: Server) -> None:
        url = server.new_database()
        with History.open(url, only_to_read=True) as history:
            assert history.count() == 0
            assert history.location.startswith("postgresql+psycopg://redline@/postgres")
        schema = url.rpartition("%3D")[2]
        assert server.execute(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{schema}'") == "0"

    def test_a_database_of_something_else_is_refused(self, path: Path) -> None:
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("CREATE TABLE bookmarks (url TEXT)")
        with pytest.raises(StoreError, match="belongs to something else"):
            History.open(path, only_to_read=True)

    def test_what_is_there_is_read_while_another_writes(
        self, location: str, history: History, stored: RunRecord
    ) -> None:
        with History.open(location, only_to_read=True) as reader:
            assert reader.load("a") == stored
            history.finish(make_record(id="b"))
            assert reader.count() == 2
            with pytest.raises(StoreError, match="it was opened only to read"):
                reader.sweep("study").forget()
