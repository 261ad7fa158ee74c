"""Old records still load; new, damaged and foreign ones do no harm."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from postgres_server import Server
from sqlalchemy import inspect, text
from store_writer import make_block, make_prepared, make_record

from redline.model.errors import RecordError, StoreError
from redline.model.record import RunRecord
from redline.store import History, schema


def execute(history: History, statement: str, **values: object) -> None:
    history._database.write(lambda connection: connection.execute(text(statement), values))


def rewrite_head(history: History, record: RunRecord, **changes: Any) -> None:
    plain = {**msgspec.to_builtins(record), **changes}
    statement = "UPDATE records SET head = :head, record_schema = :schema WHERE id = :id"
    execute(history, statement, head=msgspec.msgpack.encode(plain), schema=plain["schema"], id=record.id)


@pytest.fixture
def stored(history: History) -> RunRecord:
    prepared = make_prepared()
    record = make_record(
        id="a", created_at=1.0, stopped="target", prepared=prepared, blocks=(make_block(0), make_block(1))
    )
    history.finish(record)
    return record


def test_an_older_record_is_migrated_with_its_blocks(history: History) -> None:
    record = make_record(id="old", blocks=(make_block(0), make_block(1)))
    history.finish(record)
    old = msgspec.to_builtins(record)
    recipe = {"steps": old["spec"]["recipe"]["switches"]}
    rewrite_head(history, record, schema=1, spec={**old["spec"], "recipe": recipe}, blocks=[])
    for number, block in enumerate(old["blocks"]):
        block["alone"] = block.pop("solo")
        body = msgspec.msgpack.encode(block)
        execute(history, "UPDATE blocks SET body = :body WHERE number = :number", body=body, number=number)
    assert history.load("old") == record
    assert history.find() == [record]


def test_a_newer_record_is_listed_but_not_loaded(history: History, stored: RunRecord) -> None:
    history.finish(make_record(id="b", created_at=2.0))
    rewrite_head(history, stored, schema=99, something_new=1)
    assert [(row.id, row.schema) for row in history.rows()] == [("b", 2), ("a", 99)]
    with pytest.raises(RecordError, match="schema 99; this Redline reads up to 2: update Redline"):
        history.load("a")


@pytest.mark.parametrize(
    ("table", "body"),
    [
        ("blocks", b"\xc1"),
        ("records", b""),
        ("records", b"\xc1 not msgpack"),
        ("records", b"\xa1\xff"),
        ("records", msgspec.msgpack.encode([1, 2])),
        ("records", msgspec.msgpack.encode({"schema": 1})),
        (
            "records",
            msgspec.msgpack.encode({"schema": 1, "id": "a", "spec": {"workload": {"model": "x", "batch": 0}}}),
        ),
    ],
    ids=["a block", "empty", "garbage", "not utf-8", "a list", "fields missing", "a spec out of range"],
)
def test_a_damaged_record_stops_no_listing_and_no_other_record(
    history: History, stored: RunRecord, caplog: pytest.LogCaptureFixture, table: str, body: bytes
) -> None:
    sound = make_record(id="b", created_at=2.0, blocks=(make_block(),))
    history.finish(sound)
    which = "SET body = :body WHERE record_id" if table == "blocks" else "SET head = :body WHERE id"
    execute(history, f"UPDATE {table} {which} = 'a'", body=body)
    assert [row.id for row in history.rows()] == ["b", "a"]
    with pytest.raises(RecordError, match="record a is damaged"):
        history.load("a")
    told: list[str] = []
    assert history.find(on_unreadable=lambda record_id, error: told.append(f"{record_id}: {error}")) == [sound]
    assert [line.startswith("a: record a is damaged") for line in told] == [True]
    with caplog.at_level(logging.WARNING):
        assert history.find() == [sound]
    assert "left out record a" in caplog.text


class TestLayout:
    def make_old(self, history: History, number: int) -> None:
        """As a Redline of that layout had left it."""
        lacks = {"sweep_cells": 2, "ceilings": 3, "tunes": 4, "marks": 6, "points": 6, "series": 6, "holders": 8}
        for table in (table for table, since in lacks.items() if number < since):
            execute(history, f"DROP TABLE {table}")
        if number in (3, 4):
            execute(history, "ALTER TABLE ceilings RENAME COLUMN device_key TO place")
        if number == 6:  # it placed a record of another checkout by when it was measured
            execute(history, "UPDATE points SET created_at = 9")
        execute(history, "UPDATE meta SET value = :number WHERE name = 'layout'", number=str(number))
        execute(history, "INSERT INTO meta VALUES ('writer of b', 'no machine 1 1.00'), ('activity sweep x', '{}')")

    @pytest.mark.parametrize("number", range(1, schema.LAYOUT))
    def test_every_older_layout_is_updated_once_and_gets_what_it_lacks(
        self, location: str, history: History, stored: RunRecord, number: int
    ) -> None:
        points = [history.points(seen.key) for seen in history.series()]
        assert points
        self.make_old(history, number)
        errors: list[BaseException] = []

        def open_it() -> None:
            try:
                History.open(location).close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=open_it) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        with History.open(location) as opened:
            assert opened.load("a") == stored
            assert [opened.points(seen.key) for seen in opened.series()] == points
            ledger = opened.sweep("study")
            assert ledger.cells() == {}
            ledger.settle("k", make_record(id="b"))
            assert [cell.record_id for cell in ledger.cells().values()] == ["b"]
            assert opened.ceilings("some key") is None
            assert opened.tunes().rows() == opened.activities() == []
            with opened._database.reading() as connection:
                for table in schema.metadata.sorted_tables:
                    columns = [column["name"] for column in inspect(connection).get_columns(table.name)]
                    assert sorted(columns) == sorted(table.c.keys())

    def test_an_update_that_breaks_leaves_all_as_it_was(
        self, location: str, history: History, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.make_old(history, 5)
        with monkeypatch.context() as broken:
            broken.setattr(schema, "keep_points", lambda connection: connection.execute(text("SELECT nowhere")))
            with pytest.raises(StoreError, match="nowhere"):
                History.open(location)
        with history._database.reading() as connection:
            assert (schema.layout_of(connection, location), inspect(connection).has_table("points")) == (5, False)
        with History.open(location) as opened:
            assert opened.load("a") == stored

    @pytest.mark.parametrize("number", range(1, schema.LAYOUT))
    def test_reading_an_older_layout_changes_nothing(
        self, location: str, history: History, stored: RunRecord, number: int
    ) -> None:
        self.make_old(history, number)
        if "://" in location:
            with pytest.raises(StoreError, match="has an older layout: any command that measures updates it"):
                History.open(location, only_to_read=True)
        else:
            with History.open(location, only_to_read=True) as opened:
                assert opened.load("a") == stored
                assert opened.tunes().rows() == []
                assert opened.location == location
        with history._database.reading() as connection:
            assert schema.layout_of(connection, location) == number

    @pytest.mark.parametrize("only_to_read", [False, True])
    def test_a_newer_layout_asks_for_a_newer_redline(self, location: str, history: History, only_to_read: bool) -> None:
        execute(history, "UPDATE meta SET value = '99'")
        with pytest.raises(StoreError) as caught:
            History.open(location, only_to_read=only_to_read)
        assert str(caught.value) == (
            f"the history at {history.location} has layout 99, this Redline knows {schema.LAYOUT}: update Redline"
        )


class TestReading:
    @pytest.mark.parametrize("is_there", [False, True])
    def test_what_is_not_there_or_empty_reads_as_empty_and_stays_so(self, path: Path, is_there: bool) -> None:
        location = path if is_there else path.parent / "not" / "there" / "history.sqlite"
        if is_there:
            path.touch()
        with History.open(location, only_to_read=True) as history:
            assert history.rows() == []
            assert history.location == str(location)
            with pytest.raises(StoreError, match="it was opened only to read"):
                history.finish(make_record())
        assert list(path.parent.iterdir()) == [path] * is_there
        assert not is_there or path.read_bytes() == b""

    def test_an_empty_server_reads_as_empty_and_gets_no_tables(self, server: Server) -> None:
        url = server.new_database()
        with History.open(url, only_to_read=True) as history:
            assert history.count() == 0
            assert history.location.startswith("postgresql+psycopg://redline@/postgres")
        own = url.rpartition("%3D")[2]
        assert server.execute(f"SELECT count(*) FROM pg_tables WHERE schemaname = '{own}'") == "0"

    def test_what_is_there_is_read_while_another_writes(
        self, location: str, history: History, stored: RunRecord
    ) -> None:
        with History.open(location, only_to_read=True) as reader:
            assert reader.load("a") == stored
            history.finish(make_record(id="b"))
            assert reader.count() == 2
            with pytest.raises(StoreError, match="it was opened only to read"):
                reader.sweep("study").forget()
