"""The same statements on PostgreSQL: all compile, and with a server at hand all run.

The server is named by REDLINE_TEST_POSTGRES, the URL of a database that may be emptied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import msgspec
import pytest
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from store_writer import make_block, make_record

from redline.errors import StoreError
from redline.store import History, layout, queries

SERVER = os.environ.get("REDLINE_TEST_POSTGRES")


def test_tables_and_statements_compile() -> None:
    dialect = postgresql.dialect()
    tables = "\n".join(str(CreateTable(table).compile(dialect=dialect)) for table in layout.metadata.sorted_tables)
    assert 'id TEXT COLLATE "C" NOT NULL' in tables
    assert "head BYTEA NOT NULL" in tables
    assert "created_at DOUBLE PRECISION NOT NULL" in tables
    assert '"' not in tables.replace('"C"', "")  # no name that must be quoted
    indexes = [index for table in layout.metadata.sorted_tables for index in table.indexes]
    assert all(str(CreateIndex(index).compile(dialect=dialect)) for index in indexes)
    assert "FOR UPDATE" in str(queries.LOCK_RECORD.compile(dialect=dialect))
    assert "row_number() OVER" in str(queries.BEST_BY_KEY.compile(dialect=dialect))


@pytest.mark.skipif(SERVER is None, reason="no server named by REDLINE_TEST_POSTGRES")
class TestServer:
    @pytest.fixture
    def history(self) -> Iterator[History]:
        with History.open(SERVER) as history, history._database.writing() as connection:
            layout.metadata.drop_all(connection)
        with History.open(SERVER) as history:
            yield history

    def test_the_life_of_a_record(self, history: History) -> None:
        record = make_record(key="k", group="g")
        history.begin(record)
        for number in range(3):
            history.append(record.id, make_block(number))
        done = msgspec.structs.replace(record, stopped="target")
        history.finish(done)
        whole = msgspec.structs.replace(done, blocks=tuple(make_block(number) for number in range(3)))
        assert history.load(record.id[:8]) == whole
        assert history.find(model="resnet50", since=0.0, limit=5) == history.latest_group() == [whole]
        assert history.known_keys(["k", "other"])["k"].status == "done"
        assert history.count() == 1
        with pytest.raises(StoreError, match="no record 'nowhere'"):
            history.append("nowhere", make_block())
