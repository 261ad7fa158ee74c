"""A damaged SQLite file: one line says so, and every record that can still be read is written to a new file."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from reported import race_records
from typer.testing import CliRunner

from redline.cli.main import filled
from redline.model.errors import RedlineError
from redline.model.record import Block, RunRecord
from redline.store import History
from redline.verbs import NAMES
from redline.verbs.history import recover

LOOKING = (
    ["history", "show"],
    ["history", "show", "19f000000000000000007"],
    ["history"],
    ["report", "-o", "report"],
    ["compare", "19f000000000000000001", "19f000000000000000002"],
)
"""Commands that read a part of the history. Where that is sound, they answer."""
WHOLE = (
    ["history", "export", "--format", "json", "--raw"],
    ["gate", "bench.toml", "--baseline", "history"],
    ["run", "resnet50", "--device", "cpu"],
)
"""Commands that read all of it, or would write to it."""


def make_record(number: int) -> RunRecord:
    from msgspec.structs import replace

    base = race_records()[0]
    # Some blocks are so long that they have pages of their own.
    samples = (0.01,) * (700 if number % 10 == 9 else 7)
    blocks = [Block(kind="throughput", clock="host", samples=samples, round=place) for place in range(3)]
    return replace(
        base, id=f"19f0{number:017x}", created_at=1.7e9 + number, group=None, stopped="target", blocks=(*blocks,)
    )


@pytest.fixture
def path(own_history: Path) -> Path:
    with History.open(own_history) as history:
        for number in range(40):
            history.finish(make_record(number))
        history.mark(make_record(3).id, "tag", "release", at=1.0)
        history.sweep("night").settle("cell", make_record(5))
    return own_history


def flip(path: Path, bits: int, seed: int, *, first: int = 100) -> bytes:
    """Flip bits anywhere but in the header, and return what is in the file then."""
    chance, body = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(bits):
        body[chance.randrange(first, len(body))] ^= 1 << chance.randrange(8)
    path.write_bytes(body)
    return bytes(body)


@pytest.mark.parametrize("seed", range(6))
def test_500_flipped_bits_are_one_line_that_says_what_to_do(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    damaged = flip(path, 500, seed)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bench.toml").write_text('[[run]]\nmodel = "resnet50"\n')
    for words in (*LOOKING, *WHOLE):
        result = CliRunner().invoke(filled(*NAMES), words)
        if words in LOOKING and result.exit_code == 0:
            continue
        assert isinstance(result.exception, SystemExit), (words, result.exception)
        (line,) = result.stderr.strip().splitlines()
        # A record that SQLite hands out whole may still be damaged inside: then it is the record that is named.
        is_record = line.startswith("redline: record 19f0") and " is damaged: " in line
        assert "is damaged (" in line or (is_record and words in LOOKING), (words, line)
        assert "'redline history recover'" in line or is_record
    assert path.read_bytes() == damaged, "nothing was written to it"


def test_a_damaged_schema_is_named(path: Path) -> None:
    """SQLite quotes what it cannot read, and its message is then no text."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = CAST(x'ff43524541' AS TEXT) WHERE name = 'meta'")
        connection.commit()
    for only_to_read in (True, False):
        with pytest.raises(RedlineError, match=r"is damaged \(.*\): 'redline history recover'"):
            History.open(path, only_to_read=only_to_read).rows()


def test_a_sound_file_comes_back_whole(path: Path, tmp_path: Path) -> None:
    found = recover(tmp_path / "new.sqlite")
    assert (found.about["added"], found.rows) == (40, ())
    with History.open(path) as old, History.open(tmp_path / "new.sqlite") as new:
        assert new.find() == old.find()
        assert new.marks() == old.marks()
        assert new.sweep("night").cells() == old.sweep("night").cells()
        assert new.series() == old.series()
    with pytest.raises(RedlineError, match="is already there: name a new file"):
        recover(tmp_path / "new.sqlite")


@pytest.mark.parametrize("seed", range(6))
def test_what_the_damage_left_alone_comes_back_as_it_was(path: Path, tmp_path: Path, seed: int) -> None:
    """A few bits: each damages one record at most, or a page that leads to many of them."""
    with History.open(path) as history:
        sound = {record.id: record for record in history.find()}
    damaged = flip(path, 12, seed)
    found = recover(tmp_path / "new.sqlite")
    assert path.read_bytes() == damaged
    with History.open(tmp_path / "new.sqlite") as new:
        back = {record.id: record for record in new.find()}
    assert found.about["added"] == len(back)
    same = [record_id for record_id, record in back.items() if record == sound.get(record_id)]
    assert len(same) >= 40 - 12


def test_records_that_only_the_log_has_are_read_too(path: Path, tmp_path: Path) -> None:
    """As a killed writer leaves them: appended to the write-ahead log and not yet in the file."""
    with History.open(path) as history:
        history.finish(make_record(99))
        copy = tmp_path / "copy.sqlite"
        for suffix in ("", "-wal"):
            copy.with_name(copy.name + suffix).write_bytes(path.with_name(path.name + suffix).read_bytes())
    copy.write_bytes(copy.read_bytes()[:2000] + b"\xff" * 60 + copy.read_bytes()[2060:])
    recover(tmp_path / "new.sqlite", history=copy)
    with History.open(tmp_path / "new.sqlite") as new:
        assert new.load(make_record(99).id) == make_record(99)


def test_a_deleted_record_stays_deleted(path: Path, tmp_path: Path) -> None:
    with History.open(path) as history:
        history.delete([make_record(number).id for number in range(10, 30)])
    assert recover(tmp_path / "new.sqlite").about["added"] == 20


@pytest.mark.parametrize("body", [b"", b"SQLite format 3\0", b"\xff" * 50_000, bytes(5000)])
def test_a_file_without_any_record_makes_no_new_one(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "old.sqlite").write_bytes(body)
    with pytest.raises(RedlineError, match="no record can be read in"):
        recover(tmp_path / "new.sqlite", history=tmp_path / "old.sqlite")
    assert not (tmp_path / "new.sqlite").exists()
