"""A server that goes away, and who works on what when it is back. All else about it is tested with SQLite's tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import store_writer
from postgres_server import Server
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable
from store_writer import make_block, make_record

import redline
from redline.model.errors import StoreError, UsageError
from redline.search.observer import Observer
from redline.store import History, layout, queries
from redline.store.database import Database
from redline.store.ledgers import Lease
from redline.store.location import resolve
from redline.store.writer import Holder, append_block, read_holder, write_holder
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace


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
    assert "FOR UPDATE" in str(queries.META.compile(dialect=dialect))


@pytest.fixture
def url(server: Server) -> str:
    return server.new_database()


@pytest.fixture
def stopped(server: Server) -> Iterator[Server]:
    """The server, to be stopped by the test; it runs again afterwards."""
    yield server
    if not server.is_running:
        server.start()


def open_history(url: str, notes: list[str], patience_s: float = 60.0) -> History:
    return History(Database.open(resolve(url), on_note=notes.append, patience_s=patience_s))


class TestAway:
    def test_a_write_waits_and_says_so(self, stopped: Server, url: str) -> None:
        """The server is back after a while: everything is there once, in order."""
        notes: list[str] = []
        with open_history(url, notes) as history:
            record = make_record()
            history.begin(record)
            history.append(record.id, make_block(0))
            stopped.stop()
            starter = threading.Timer(2.0, stopped.start)
            starter.start()
            history.append(record.id, make_block(1))
            starter.join()
            history.append(record.id, make_block(2))
            history.sweep("study").settle("k", msgspec.structs.replace(record, stopped="target"))
            assert [block.round for block in history.load(record.id).blocks] == [0, 1, 2]
            assert [cell.record_id for cell in history.sweep("study").cells().values()] == [record.id]
        assert [note.rpartition(" is ")[2] for note in notes] == ["away; waiting up to 60 s", "back"]

    def test_reading_waits_too(self, stopped: Server, url: str) -> None:
        with open_history(url, []) as history:
            history.finish(make_record())
            stopped.stop()
            starter = threading.Timer(1.0, stopped.start)
            starter.start()
            assert history.count() == 1
            starter.join()

    def test_one_who_waits_in_vain_says_what_to_do_and_keeps_what_was_stored(self, stopped: Server, url: str) -> None:
        record = make_record()
        with open_history(url, [], patience_s=0.5) as history:
            history.begin(record)
            history.append(record.id, make_block(0))
            stopped.stop()
            with pytest.raises(StoreError, match=r"has been away for 0.5 s: start it and give the same command again"):
                history.append(record.id, make_block(1))
        stopped.start()
        with History.open(url) as history:
            assert [block.round for block in history.load(record.id).blocks] == [0]

    def test_a_block_that_was_committed_unheard_is_not_stored_twice(self, url: str) -> None:
        """The answer to a commit is lost with the connection: whether it was heard cannot be known."""
        record = make_record()
        with History.open(url) as history:
            history.begin(record)
            for number, again in ((0, False), (0, True), (1, True)):
                with history._database.writing() as connection:
                    append_block(connection, record.id, make_block(number), again=again)
            assert [block.round for block in history.load(record.id).blocks] == [0, 1]

    def test_eight_writers_outlive_a_server_that_is_killed_twice(self, stopped: Server, url: str) -> None:
        """Crashed while all of them write: every record is there once, whole."""
        with History.open(url) as history:
            command = [sys.executable, str(store_writer.__file__), url, "write_records", "25"]
            writers = [subprocess.Popen(command) for _ in range(8)]
            for some in (8, 60):
                deadline = time.monotonic() + 120
                while time.monotonic() < deadline:
                    groups = [row.group for row in history.rows()]
                    if len(groups) >= some and len(set(groups)) == 8:  # a server that never answered is no server
                        break
                stopped.stop(signal.SIGQUIT)
                stopped.start()
            assert [writer.wait() for writer in writers] == [0] * 8
            records = history.find()
        assert len(records) == len({record.id for record in records}) == 200
        assert {tuple(block.round for block in record.blocks) for record in records} == {(0, 1, 2)}
        assert {record.stopped for record in records} == {"target"}


class TestHolding:
    def test_a_dropped_connection_lets_nobody_in(self, server: Server, url: str) -> None:
        with History.open(url) as one, History.open(url) as other, one.sweep("study").held():
            server.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                "AND backend_type = 'client backend'"
            )
            with pytest.raises(UsageError, match="is being run by process"), other.sweep("study").held():
                pass

    def test_nor_does_a_restarted_server(self, stopped: Server, url: str) -> None:
        with History.open(url) as one, one.sweep("study").held():
            stopped.stop()
            stopped.start()
            with History.open(url) as other:
                # As on another machine, where nobody can see whether the holder lives; long after its last word.
                with other._database.writing() as connection:
                    holder = Holder(token="x", process="elsewhere//pid 7 1.00", until=0.0)
                    write_holder(connection, "sweep study", holder)
                with pytest.raises(UsageError, match="process 7 on elsewhere"), other.sweep("study").held():
                    pass

    def test_a_holder_that_died_here_is_succeeded_at_once(self, url: str, tmp_path: Path) -> None:
        program = (
            "import os, sys\nfrom redline.store import History\n"
            "ledger = History.open(sys.argv[1]).sweep('study')\n"
            "with ledger.held():\n    os._exit(0)\n"
        )
        subprocess.run([sys.executable, "-c", program, url], check=True)
        with History.open(url) as history, history.sweep("study").held():
            pass

    def test_one_that_died_elsewhere_when_its_time_is_over(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("redline.store.ledgers.LEASE_S", 0.001)  # the server has been up for longer than this
        with History.open(url) as history:
            for until, is_free in ((time.time() + 3600, False), (time.time() - 3600, True)):
                with history._database.writing() as connection:
                    holder = Holder(token="x", process="elsewhere//pid 7 1.00", until=until)
                    write_holder(connection, "sweep study", holder)
                lease = Lease(history._database, "sweep study")
                assert (lease.take() is None) == is_free
            lease.give_back()

    def test_a_hold_is_renewed_while_it_lasts(self, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("redline.store.ledgers.LEASE_S", 0.3)
        with History.open(url) as history, history.sweep("study").held():
            untils = set()
            deadline = time.monotonic() + 30
            while len(untils) < 3 and time.monotonic() < deadline:
                with history._database.reading() as connection:
                    untils.add(connection.execute(queries.META, {"this_name": "holder of sweep study"}).scalar())
            assert len(untils) == 3

    def test_a_holder_is_seen_by_who_waited_for_its_renewal(self, server: Server, url: str) -> None:
        """A sweep stopped here as overtaken: the old entry was deleted, and who waits for it does not see the new one."""
        read: list[Holder | None] = []

        def ask() -> None:
            with history._database.writing() as connection:
                read.append(read_holder(connection, "sweep study"))

        first, renewed = (Holder(token="x", process="a//p 1 1.00", until=until) for until in (1.0, 2.0))
        asking = threading.Thread(target=ask)
        with History.open(url) as history:
            with history._database.writing() as connection:
                write_holder(connection, "sweep study", first)
            with history._database.writing() as connection:
                write_holder(connection, "sweep study", renewed)
                asking.start()
                waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                while asking.is_alive() and server.execute(waiting) == "0":
                    pass
            asking.join()
        assert read == [renewed]

    def test_one_who_was_overtaken_writes_no_more(self, url: str) -> None:
        with History.open(url) as history:
            ledger = history.sweep("study")
            with ledger.held():
                ledger.settle("its own", make_record())
                for other in (None, Holder(token="x", process="b//p 1 1.00", until=9e9)):
                    with history._database.writing() as connection:
                        write_holder(connection, "sweep study", other)
                    with pytest.raises(StoreError, match="another process has taken over sweep 'study'"):
                        ledger.settle("k", make_record())
            assert history.count() == 1
            with history._database.writing() as connection:
                found = read_holder(connection, "sweep study")
            assert found.token == "x", "what another one holds is not given back"

    def test_what_is_given_back_is_free_for_every_machine_at_once(self, url: str) -> None:
        with History.open(url) as history:
            with history.sweep("study").held():
                pass
            with history._database.writing() as connection:
                assert read_holder(connection, "sweep study") is None


GRID: dict[str, Any] = {
    "model": "m",
    "recipes": ["baseline", "fp16", "bf16"],
    "batch": [1, 2, 4, 8, 16],
    "name": "study",
    "launch": {"door": "fake"},
}


def fake_door() -> FakeDoor:
    return FakeDoor(Landscape(step_s=0.004))


class Killing(Observer):
    """Stops the server after some cells; the sweep has to wait until somebody starts it again."""

    def __init__(self, server: Server, after: int) -> None:
        self._server = server
        self._left = after
        self.notes: list[str] = []

    def settled(self, cell: Any, record: Any) -> None:
        self._left -= 1
        if self._left == 0:
            self._server.stop()
            threading.Timer(2.0, self._server.start).start()

    def noted(self, note: str) -> None:
        self.notes.append(note)


class TestSweeps:
    def test_a_sweep_outlives_its_server(self, stopped: Server, url: str) -> None:
        observer = Killing(stopped, after=4)
        with Workspace(door=fake_door(), history=url, observer=observer) as workspace:
            result = redline.run(**GRID, workspace=workspace)
        assert (result.about["cells"], result.about["done"]) == (15, 15)
        assert [note.rpartition(" is ")[2] for note in observer.notes] == ["away; waiting up to 300 s", "back"]
        with History.open(url) as history:
            assert history.count() == len(result) == 15

    def test_one_that_gives_up_waiting_goes_on_later(
        self, stopped: Server, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("redline.store.database.PATIENCE_S", 0.5)
        monkeypatch.setattr(stopped, "start", lambda: None)
        killing = Killing(stopped, after=4)
        with (
            Workspace(door=fake_door(), history=url, observer=killing) as workspace,
            pytest.raises(StoreError, match="a sweep or a search goes on from it"),
        ):
            redline.run(**GRID, workspace=workspace)
        monkeypatch.undo()
        stopped.start()
        with History.open(url) as history:
            kept = {cell.record_id for cell in history.sweep("study").cells().values()}
            assert len(kept) == 4, "all that were stored before it went away"
        with Workspace(door=fake_door(), history=url) as workspace:
            result = redline.run(**GRID, resume=True, workspace=workspace)
        assert kept < {row.record_id for row in result}
        with History.open(url) as history:
            assert history.count() == 15

    def test_a_second_desk_is_kept_out_when_connections_drop(self, server: Server, url: str) -> None:
        """Nineteen records for fifteen cells were seen when a lock went with its connection."""
        refused: list[str] = []

        class Dropping(Observer):
            def settled(self, cell: Any, record: Any) -> None:
                server.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
                    "AND backend_type = 'client backend'"
                )
                with (
                    Workspace(door=fake_door(), history=url) as second,
                    pytest.raises(UsageError, match="is being run by process") as error,
                ):
                    redline.run(**GRID, workspace=second)
                refused.append(str(error.value))

        with Workspace(door=fake_door(), history=url, observer=Dropping()) as workspace:
            redline.run(**GRID, workspace=workspace)
        assert len(refused) == 15
        with History.open(url) as history:
            assert history.count() == 15
