"""`redline show` and `redline export` over a history that is there already."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import msgspec
import pytest
from invoking import document, invoke
from reported import race_records

from redline.record import RunRecord
from redline.store import History
from redline.store.writer import is_gone, this_process


@pytest.fixture
def raced() -> list[RunRecord]:
    """Three recipes measured together."""
    records = race_records()
    with History.open() as history:
        for record in records:
            history.finish(record)
    return records


def test_the_ratio_of_a_record_is_the_same_wherever_it_is_told(raced: list[RunRecord]) -> None:
    wanted = raced[2].id
    (whole,) = [row for row in document(invoke("export", "--format", "json"))["results"] if row["record_id"] == wanted]
    ratio: dict[str, Any] = whole["vs_first"]
    assert ratio["recipe"] == "baseline"
    assert f"{ratio['ratio']:.2f}×" in invoke("show", wanted).stdout
    for told in (document(invoke("show", wanted, "--json")), document(invoke("export", wanted, "--format", "json"))):
        assert [row["record_id"] for row in told["results"]] == [wanted], "and of nothing else"
        assert told["results"][0]["vs_first"] == ratio
    (row,) = csv.DictReader(StringIO(invoke("export", wanted).stdout))
    assert float(row["ratio"]) == ratio["ratio"]
    two = document(invoke("export", wanted, raced[1].id, "--format", "json"))["results"]
    assert [row["record_id"] for row in two] == [wanted, raced[1].id]
    assert two[0]["vs_first"] == ratio


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        ("0", "limit must be 1 or more, got 0"),
        ("-3", "limit must be 1 or more, got -3"),
        ("99999999999999999999", "limit must be 1000000 or less"),
    ],
)
def test_a_limit_out_of_range_is_a_mistake(raced: list[RunRecord], limit: str, says: str) -> None:
    result = invoke("show", "--limit", limit)
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


BEGIN_AND_DIE = """
import os, signal, sys
from redline.store import History
from reported import race_records
(record,) = race_records(("baseline",))
import msgspec
with History.open() as history:
    history.begin(msgspec.structs.replace(record, stopped=None))
    print(record.id, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_run_whose_desk_was_killed_is_cut_off_and_one_that_lives_is_running() -> None:
    (record,) = race_records(("baseline",))
    living = msgspec.structs.replace(record, stopped=None)
    with History.open() as history:
        history.begin(living)
        tests = str(Path(__file__).parent.parent)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, *filter(None, sys.path)])}
        killed = subprocess.run(
            [sys.executable, "-c", BEGIN_AND_DIE], env=environment, capture_output=True, text=True
        ).stdout.strip()
        told = {row["id"]: row["status"] for row in document(invoke("show", "--json"))["records"]}
        assert told == {killed: "cut off", living.id: "running"}
        assert "running: still being measured, or killed on another machine" in invoke("show").stdout
        assert "cut off: the measuring process ended" in invoke("show", killed).stdout
        assert "running after" in invoke("show", living.id).stdout
        history.finish(record)
    assert {row["status"] for row in document(invoke("show", "--json"))["records"]} == {"cut off", "done"}
    assert "running" not in invoke("show").stdout
    with History.open() as history, history._database.reading() as connection:
        noted = connection.exec_driver_sql("SELECT count(*) FROM meta WHERE name LIKE 'writer%'").scalar()
    assert noted == 1, "what is done is noted no more"


@pytest.mark.parametrize("place", ["another-machine/pid:[1]", "x y/"])
def test_of_another_machine_nothing_is_said(place: str) -> None:
    assert not is_gone(f"{place} 4194303 1")


def test_a_number_that_went_to_another_process_is_not_the_writer() -> None:
    writer = this_process()
    assert writer is not None
    assert not is_gone(writer)
    assert is_gone(writer.rpartition(" ")[0] + " 1")


def test_a_closed_stdout_is_nobodys_mistake() -> None:
    """As under cron or a service that wants none of it."""
    done = subprocess.run(
        ["sh", "-c", '"$0" -m redline.cli.main --version >&-', sys.executable], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
