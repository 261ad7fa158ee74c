"""A damaged SQLite file: one line says so, and what can still be read is added to a new history."""

from __future__ import annotations

import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from msgspec.structs import replace
from reported import race_records
from typer.testing import CliRunner

from redline.cli.main import filled
from redline.model.errors import RedlineError
from redline.model.record import Block, RunRecord
from redline.store import History
from redline.verbs import NAMES

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
    # Some blocks are so long that they have pages of their own.
    samples = (0.01,) * (700 if number % 10 == 9 else 7)
    blocks = tuple(Block(kind="throughput", clock="host", samples=samples, round=place) for place in range(3))
    own = {"id": f"19f0{number:017x}", "created_at": 1.7e9 + number, "group": None, "stopped": "target"}
    return replace(race_records()[0], **own, blocks=blocks)


@pytest.fixture
def path(own_history: Path) -> Path:
    with History.open(own_history) as history:
        for number in range(40):
            history.finish(make_record(number))
        history.mark(make_record(3).id, "tag", "release", at=1.0)
    return own_history


def flip(path: Path, bits: int, seed: int) -> bytes:
    """Flip bits anywhere but in the header, and return what is in the file then."""
    chance, body = random.Random(seed), bytearray(path.read_bytes())
    for _ in range(bits):
        body[chance.randrange(100, len(body))] ^= 1 << chance.randrange(8)
    path.write_bytes(body)
    return bytes(body)


@pytest.mark.parametrize("seed", range(4))
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
        assert f"'redline history import {path}'" in line or (is_record and words in LOOKING), (words, line)
    assert path.read_bytes() == damaged, "nothing was written to it"


def test_a_damaged_schema_is_named_and_read_as_far_as_it_goes(path: Path, tmp_path: Path) -> None:
    """SQLite quotes what it cannot read, and its message is then no text."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        connection.execute("UPDATE sqlite_schema SET sql = CAST(x'ff43524541' AS TEXT) WHERE name = 'meta'")
        connection.commit()
    for only_to_read in (True, False):
        with pytest.raises(RedlineError, match=r"is damaged \(.*\): 'redline history import"):
            History.open(path, only_to_read=only_to_read).rows()
    with History.open(tmp_path / "new.sqlite") as new:
        assert new.add_file(path).added == 40
        assert [mark.words for mark in new.marks()] == ["release"]


@pytest.mark.parametrize("seed", range(6))
def test_what_the_damage_left_alone_comes_back_as_it_was(path: Path, tmp_path: Path, seed: int) -> None:
    """A few bits: each damages one record at most, or a page that leads to many of them."""
    with History.open(path) as history:
        sound = {record.id: record for record in history.find()}
    damaged = flip(path, 12, seed)
    with History.open(tmp_path / "new.sqlite") as new:
        new.add_file(path)
        back = new.find()
    assert path.read_bytes() == damaged
    assert sum(record == sound.get(record.id) for record in back) >= 40 - 12
