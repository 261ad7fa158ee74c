"""Several writers at once, and writers that are killed."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing

import pytest
import store_writer
from store_writer import make_block, make_record

from redline.store import History


def start(location: str, what: str, number: int, stdout: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, str(store_writer.__file__), location, what, str(number)]
    return subprocess.Popen(command, stdout=stdout, text=True)


def assert_sound(location: str) -> None:
    if "://" in location:
        return  # a server sees to that by itself
    with closing(sqlite3.connect(location)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def test_processes_that_open_a_new_history_at_once_lose_nothing(location: str) -> None:
    writers = [start(location, "write_records", 15) for _ in range(8)]
    assert [writer.wait() for writer in writers] == [0] * 8
    with History.open(location) as history:
        records = history.find()
    assert Counter(record.group for record in records) == {f"writer {writer.pid}": 15 for writer in writers}
    assert len({record.id for record in records}) == 120
    assert all([block.round for block in record.blocks] == [0, 1, 2] for record in records)
    assert {record.stopped for record in records} == {"target"}
    assert_sound(location)


@pytest.mark.parametrize("in_memory", [False, True])
def test_threads_share_one_history(location: str, in_memory: bool) -> None:
    errors: list[BaseException] = []

    def write() -> None:
        try:
            store_writer.write_records(history, 20)
        except BaseException as error:
            errors.append(error)

    with History.open(":memory:" if in_memory else location) as history:
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


def test_an_open_history_survives_a_fork(location: str) -> None:
    assert start(location, "write_across_fork", 60).wait() == 0
    with History.open(location) as history:
        records = history.find()
    assert sorted(Counter(record.group for record in records).values()) == [60, 61]
    assert all(len(record.blocks) == 3 for record in records)
    assert_sound(location)


def test_a_killed_writer_leaves_every_block_it_had_written(location: str) -> None:
    chance = random.Random(1)
    safe: dict[str, int] = {}
    for _ in range(4):
        writer = start(location, "append_for_ever", 0, stdout=subprocess.PIPE)
        record_id = writer.stdout.readline().strip()
        for _ in range(chance.randrange(1, 150)):
            safe[record_id] = int(writer.stdout.readline())
        writer.kill()
        writer.communicate()
    with History.open(location) as history:
        assert history.count() == len(safe)
        for record_id, number in safe.items():
            blocks = history.load(record_id).blocks
            assert len(blocks) >= number
            assert [block.samples for block in blocks] == [(float(n),) * 50 for n in range(len(blocks))]
        assert {row.status for row in history.rows()} == {"cut off"}
        store_writer.write_records(history, 1)
    assert_sound(location)


def test_a_block_in_the_making_is_not_there(location: str) -> None:
    assert start(location, "die_inside", 5).wait() == -9
    with History.open(location) as history:
        (record,) = history.find()
        assert [block.round for block in record.blocks] == [0, 1, 2, 3, 4]
        history.append(record.id, make_block(5))
        assert len(history.load(record.id).blocks) == 6
    assert_sound(location)
