"""Several writers at once, and writers that are killed."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
import store_writer
from store_writer import make_block, make_record

from redline.store import History


def start(path: Path, what: str, number: int, stdout: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(store_writer.__file__), str(path), what, str(number)]
    return subprocess.Popen(command, stdout=stdout, text=True)


def assert_sound(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_processes_that_open_a_new_history_at_once_lose_nothing(path: Path) -> None:
    writers = [start(path, "write_records", 120) for _ in range(4)]
    assert [writer.wait() for writer in writers] == [0] * 4
    with History.open(path) as history:
        records = history.find()
    assert Counter(record.group for record in records) == {f"writer {writer.pid}": 120 for writer in writers}
    assert len({record.id for record in records}) == 480
    assert all([block.round for block in record.blocks] == [0, 1, 2] for record in records)
    assert {record.stopped for record in records} == {"target"}
    assert_sound(path)


@pytest.mark.parametrize("place", ["file", ":memory:"])
def test_threads_share_one_history(path: Path, place: str) -> None:
    errors: list[BaseException] = []

    def write() -> None:
        try:
            store_writer.write_records(history, 20)
        except BaseException as error:
            errors.append(error)

    with History.open(path if place == "file" else place) as history:
        threads = [threading.Thread(target=write) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert [len(record.blocks) for record in history.find()] == [3] * 120


def test_threads_appending_to_one_record_lose_no_block(history: History) -> None:
    record = make_record()
    history.begin(record)
    threads = [
        threading.Thread(
            target=lambda first=first: [history.append(record.id, make_block(first + n)) for n in range(25)]
        )
        for first in range(0, 100, 25)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(block.round for block in history.load(record.id).blocks) == list(range(100))


def test_an_open_history_survives_a_fork(path: Path) -> None:
    assert start(path, "write_across_fork", 60).wait() == 0
    with History.open(path) as history:
        records = history.find()
    assert sorted(Counter(record.group for record in records).values()) == [60, 61]
    assert all(len(record.blocks) == 3 for record in records)
    assert_sound(path)


def test_a_killed_writer_leaves_every_block_it_had_written(path: Path) -> None:
    chance = random.Random(1)
    safe: dict[str, int] = {}
    for _ in range(4):
        writer = start(path, "append_for_ever", 0, stdout=subprocess.PIPE)
        assert writer.stdout is not None
        record_id = writer.stdout.readline().strip()
        for _ in range(chance.randrange(1, 150)):
            safe[record_id] = int(writer.stdout.readline())
        writer.kill()
        writer.communicate()
    with History.open(path) as history:
        assert history.count() == len(safe)
        for record_id, number in safe.items():
            blocks = history.load(record_id).blocks
            assert len(blocks) >= number
            assert [block.samples for block in blocks] == [(float(n),) * 50 for n in range(len(blocks))]
        assert {row.status for row in history.rows()} == {"cut off"}
        store_writer.write_records(history, 1)
    assert_sound(path)


def test_a_block_in_the_making_is_not_there(path: Path) -> None:
    assert start(path, "die_inside", 5).wait() == -9
    with History.open(path) as history:
        (record,) = history.find()
        assert [block.round for block in record.blocks] == [0, 1, 2, 3, 4]
        history.append(record.id, make_block(5))
        assert len(history.load(record.id).blocks) == 6
    assert_sound(path)
