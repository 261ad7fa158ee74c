"""Old records still load; new, damaged and foreign ones do no harm."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import Connection, text
from store_writer import make_block, make_record

from redline import record as record_module
from redline.errors import RecordError, StoreError
from redline.record import RunRecord
from redline.store import History, layout


def execute(path: Path, statement: str, *values: object) -> None:
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def rewrite_head(path: Path, record: RunRecord, **changes: Any) -> None:
    plain = {**msgspec.to_builtins(record), **changes}
    execute(
        path,
        "UPDATE records SET head = ?, record_schema = ? WHERE id = ?",
        msgspec.msgpack.encode(plain),
        plain["schema"],
        record.id,
    )


@pytest.fixture
def stored(history: History) -> RunRecord:
    record = make_record(id="a", created_at=1.0, stopped="target", blocks=(make_block(0), make_block(1)))
    history.finish(record)
    return record


def test_an_older_record_is_migrated_with_its_blocks(
    history: History, path: Path, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(plain: dict[str, Any]) -> dict[str, Any]:
        blocks = [{"samples": block.pop("times"), **block} for block in plain["blocks"]]
        return {
            **{name: value for name, value in plain.items() if name != "remarks"},
            "notes": plain["remarks"],
            "blocks": blocks,
        }

    old = msgspec.to_builtins(stored)
    rewrite_head(path, stored, schema=0, remarks=["old"])
    for number, block in enumerate(old["blocks"]):
        block["times"] = block.pop("samples")
        execute(path, "UPDATE blocks SET body = ? WHERE number = ?", msgspec.msgpack.encode(block), number)

    with pytest.raises(RecordError, match="no way from record schema 0 to 1"):
        history.load("a")
    monkeypatch.setitem(record_module.MIGRATIONS, 0, rename)
    assert history.load("a") == msgspec.structs.replace(stored, notes=("old",))
    assert history.find() == [history.load("a")]


def test_a_newer_record_is_listed_but_not_loaded(history: History, path: Path, stored: RunRecord) -> None:
    history.finish(make_record(id="b", created_at=2.0))
    rewrite_head(path, stored, schema=99, something_new=1)
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
def test_a_damaged_head_stops_no_listing(history: History, path: Path, stored: RunRecord, head: bytes) -> None:
    sound = make_record(id="b", created_at=2.0)
    history.finish(sound)
    execute(path, "UPDATE records SET head = ? WHERE id = 'a'", head)
    assert [row.id for row in history.rows()] == ["b", "a"]
    with pytest.raises(RecordError, match="record a is damaged"):
        history.load("a")
    told: list[str] = []
    assert history.find(on_unreadable=lambda record_id, error: told.append(f"{record_id}: {error}")) == [sound]
    assert len(told) == 1
    assert told[0].startswith("a: record a is damaged")


def test_a_damaged_block_damages_its_record_only(
    history: History, path: Path, stored: RunRecord, caplog: pytest.LogCaptureFixture
) -> None:
    sound = make_record(id="b", blocks=(make_block(),))
    history.finish(sound)
    execute(path, "UPDATE blocks SET body = x'c1' WHERE record_id = 'a' AND number = 1")
    with pytest.raises(RecordError, match="record a is damaged"):
        history.load("a")
    with caplog.at_level(logging.WARNING):
        assert history.find() == [sound]
    assert "left out record a" in caplog.text


class TestLayout:
    def test_an_older_layout_is_led_up_once(
        self, history: History, path: Path, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def add_a_column(connection: Connection) -> None:
            connection.execute(text("ALTER TABLE records ADD COLUMN host TEXT"))

        now = layout.LAYOUT
        monkeypatch.setattr(layout, "LAYOUT", now + 1)
        with pytest.raises(StoreError, match=f"layout {now}: no way from {now} to {now + 1}"):
            History.open(path)
        monkeypatch.setitem(layout.MIGRATIONS, now, add_a_column)
        for _ in range(2):  # the second time there is nothing left to do: the column would be there twice
            with History.open(path) as opened:
                assert opened.load("a") == stored
        with closing(sqlite3.connect(path)) as connection:
            assert connection.execute("SELECT value FROM meta WHERE name = 'layout'").fetchall() == [(str(now + 1),)]

    def test_a_migration_that_breaks_leaves_all_as_it_was(
        self, path: Path, stored: RunRecord, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def break_half_way(connection: Connection) -> None:
            connection.execute(text("ALTER TABLE records ADD COLUMN host TEXT"))
            connection.execute(text("ALTER TABLE nowhere ADD COLUMN host TEXT"))

        now = layout.LAYOUT
        monkeypatch.setitem(layout.MIGRATIONS, now, break_half_way)
        with monkeypatch.context() as newer:
            newer.setattr(layout, "LAYOUT", now + 1)
            with pytest.raises(StoreError, match="no such table: nowhere"):
                History.open(path)
        with closing(sqlite3.connect(path)) as connection:
            assert "host" not in str(connection.execute("PRAGMA table_info(records)").fetchall())
        with History.open(path) as opened:
            assert opened.load("a") == stored

    def test_a_newer_layout_asks_for_a_newer_redline(self, path: Path, stored: RunRecord) -> None:
        execute(path, "UPDATE meta SET value = '99'")
        with pytest.raises(
            StoreError, match=f"{path} has layout 99, this Redline knows {layout.LAYOUT}: update Redline"
        ):
            History.open(path)

    def test_a_history_from_before_there_were_sweeps_gets_their_table(self, path: Path, stored: RunRecord) -> None:
        execute(path, "DROP TABLE sweep_cells")
        execute(path, "DROP TABLE ceilings")
        execute(path, "DROP TABLE tunes")
        execute(path, "UPDATE meta SET value = '1' WHERE name = 'layout'")
        with History.open(path) as opened:
            assert opened.load("a") == stored
            ledger = opened.sweep("study")
            assert ledger.cells() == {}
            ledger.settle("k", make_record(id="b"))
            assert [cell.record_id for cell in ledger.cells().values()] == ["b"]

    def test_a_history_from_before_there_were_searches_gets_their_table(self, path: Path, stored: RunRecord) -> None:
        execute(path, "DROP TABLE tunes")
        execute(path, "UPDATE meta SET value = '3' WHERE name = 'layout'")
        with History.open(path) as opened:
            assert opened.load("a") == stored
            assert opened.tunes().rows() == []
