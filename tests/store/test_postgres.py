"""A server that goes away, and who works on what when it is back. All else about it is tested with SQLite's tests."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import store_writer
from postgres_server import Server
from sqlalchemy import Connection, update
from sqlalchemy.exc import OperationalError
from store_writer import make_block, make_record

import redline
from redline.model.errors import StoreError, UsageError
from redline.search.observer import Observer
from redline.store import History, schema
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace


@pytest.fixture
def url(server: Server) -> str:
    return server.new_database()


@pytest.fixture
def stopped(server: Server) -> Iterator[Server]:
    """The server, to be stopped by the test; it runs again afterwards."""
    yield server
    if not server.is_running:
        server.start()


def drop_connections(server: Server) -> None:
    server.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() "
        "AND backend_type = 'client backend'"
    )


class TestAway:
    def test_writing_and_reading_wait_and_say_so(self, stopped: Server, url: str) -> None:
        """The server is back after a while: everything is there once, in order."""
        notes: list[str] = []
        with History.open(url, on_note=notes.append, patience_s=60.0) as history:
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
            stopped.stop()
            starter = threading.Timer(1.0, stopped.start)
            starter.start()
            assert history.count() == 1
            starter.join()
        assert [note.rpartition(" is ")[2] for note in notes] == ["away; waiting up to 60 s", "back"] * 2

    def test_one_who_waits_in_vain_says_what_to_do_and_keeps_what_was_stored(self, stopped: Server, url: str) -> None:
        record = make_record()
        with History.open(url, patience_s=0.5) as history:
            history.begin(record)
            history.append(record.id, make_block(0))
            stopped.stop()
            with pytest.raises(StoreError, match=r"has been away for 0.5 s: start it and give the same command again"):
                history.append(record.id, make_block(1))
        stopped.start()
        with History.open(url) as history:
            assert [block.round for block in history.load(record.id).blocks] == [0]

    def test_a_block_that_was_committed_unheard_is_not_stored_twice(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The answer to a commit is lost with the connection: whether it was heard cannot be known."""
        record, unheard = make_record(), [True]
        with History.open(url) as history:
            history.begin(record)
            usual = history._database._engine.dialect.do_commit

            def commit(connection: Any) -> None:
                usual(connection)
                if unheard:
                    unheard.clear()
                    lost = Exception("server closed the connection unexpectedly")
                    raise OperationalError("COMMIT", None, lost, connection_invalidated=True)

            monkeypatch.setattr(history._database._engine.dialect, "do_commit", commit)
            for number in range(2):
                history.append(record.id, make_block(number))
            assert not unheard
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
    def test_neither_a_dropped_connection_nor_a_restart_lets_somebody_in(self, stopped: Server, url: str) -> None:
        with History.open(url) as one, History.open(url) as other, one.sweep("study").held():
            drop_connections(stopped)
            with pytest.raises(UsageError, match="is being run by process"), other.sweep("study").held():
                pass
            stopped.stop()
            stopped.start()

            def leave(connection: Connection) -> None:
                # As on another machine, where nobody can see whether the holder lives; long after its last word.
                gone = {"token": "x", "process": "elsewhere//pid 7 1.00", "until": 0.0}
                connection.execute(update(schema.holders).values(**gone))

            other._database.write(leave)
            with pytest.raises(UsageError, match="process 7 on elsewhere"), other.sweep("study").held():
                pass

    def test_of_many_who_take_the_hold_of_a_dead_process_one_gets_it(self, url: str) -> None:
        program = (
            "import os, sys\nfrom redline.store import History\n"
            "with History.open(sys.argv[1]).sweep('study').held():\n    os._exit(0)\n"
        )
        subprocess.run([sys.executable, "-c", program, url], check=True)
        start, done, outcomes = threading.Barrier(8), threading.Barrier(8), list[str]()

        def take() -> None:
            with History.open(url) as history:
                start.wait()
                try:
                    with history.sweep("study").held():
                        outcomes.append("held")
                        done.wait()
                except UsageError:
                    outcomes.append("refused")
                    done.wait()

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(outcomes) == ["held", *["refused"] * 7]


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
                drop_connections(server)
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
