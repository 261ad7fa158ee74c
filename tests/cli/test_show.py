"""`redline history show` and `redline history export` over a history that is there already."""

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

from redline.model.record import Closed, Failure, RunRecord
from redline.store import History


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
    (whole,) = [
        row for row in document(invoke("history export --format json"))["results"] if row["record_id"] == wanted
    ]
    ratio: dict[str, Any] = whole["ratio"]
    assert whole["compared_with"] == "baseline"
    assert f"{ratio['value']:.2f}×" in invoke("history show", wanted).stdout
    (row,) = document(invoke("history show", wanted, "--json"))["tables"]["record"]
    assert (row["record_id"], row["ratio"]) == (wanted, ratio)
    (told,) = document(invoke("history export", wanted, "--format", "json"))["results"]
    assert (told["record_id"], told["ratio"]) == (wanted, ratio), "and of nothing else"
    (row,) = csv.DictReader(StringIO(invoke("history export", wanted).stdout))
    assert (float(row["ratio"]), float(row["ratio_low"])) == (ratio["value"], ratio["low"])
    two = document(invoke("history export", wanted, raced[1].id, "--format", "json"))["results"]
    assert [row["record_id"] for row in two] == [wanted, raced[1].id]


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
        told = {row["record_id"]: row["status"] for row in document(invoke("history show --json"))["tables"]["records"]}
        assert told == {killed: "cut off", living.id: "running"}
        assert "running: still being measured, or killed on another machine" in invoke("history show").stdout
        assert "cut off: the measuring process ended" in invoke("history show", killed).stdout
        assert "running after" in invoke("history show", living.id).stdout
        history.finish(record)
    assert {row["status"] for row in document(invoke("history show --json"))["tables"]["records"]} == {
        "cut off",
        "done",
    }
    assert "running:" not in invoke("history show").stdout
    with History.open() as history, history._database.reading() as connection:
        noted = connection.exec_driver_sql("SELECT count(*) FROM holders WHERE name LIKE 'record%'").scalar()
    assert noted == 1, "what is done is noted no more"


def test_a_closed_stdout_is_nobodys_mistake() -> None:
    """As under cron or a service that wants none of it."""
    done = subprocess.run(
        ["sh", "-c", '"$0" -m redline.cli.main --version >&-', sys.executable], capture_output=True, text=True
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0


def test_a_hostile_history_cannot_speak_to_the_terminal() -> None:
    """Escape sequences in names, messages and what was printed: listed, shown, reported and complained about."""
    hostile = "\x1b]0;owned\x07\x1b[31m\x9b31mred"
    first = race_records()[0]
    device = msgspec.structs.replace(first.prepared.environment.device, name=hostile)
    environment = msgspec.structs.replace(first.prepared.environment, device=device, versions={"torch": hostile})
    workload = msgspec.structs.replace(first.prepared.workload, item=hostile, class_name=hostile)
    prepared = msgspec.structs.replace(first.prepared, environment=environment, workload=workload)
    failure = Failure(stage=hostile, kind="user", message=hostile, traceback=hostile)
    closed = Closed(printed=hostile)
    spec = msgspec.structs.replace(first.spec, workload=msgspec.structs.replace(first.spec.workload, model=hostile))
    measured = msgspec.structs.replace(first, id="a", spec=spec, prepared=prepared, closed=closed)
    failed = msgspec.structs.replace(measured, id="b", failure=failure)
    with History.open() as history:
        for record in (measured, failed):
            history.finish(record)
    for words in (
        ("history", "show"),
        ("history", "show", "a"),
        ("history", "show", "b"),
        ("history", "show", hostile),
        ("compare", "a", hostile),
    ):
        told = invoke(*words)
        assert not set(told.stdout + told.stderr) & set("\x1b\x07\x9b"), words
    assert "red" in invoke("history show b").stdout


def test_the_unit_is_escaped_in_a_report(tmp_path: Path) -> None:
    first = race_records()[0]
    workload = msgspec.structs.replace(first.prepared.workload, item="a|b<script>")
    with History.open() as history:
        history.finish(
            msgspec.structs.replace(first, prepared=msgspec.structs.replace(first.prepared, workload=workload))
        )
    assert invoke("report -o", str(tmp_path / "out")).exit_code == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert "a\\|b&lt;script&gt;/s" in text
    assert "<script>" not in text


def test_show_tells_how_a_run_failed_and_what_it_printed() -> None:
    first = race_records()[0]
    failure = Failure(stage="build", kind="user", message="no such dataset", where="net.py:3 in build")
    record = msgspec.structs.replace(first, id="a", failure=failure, closed=Closed(printed="loading\nfailing"))
    with History.open() as history:
        history.finish(record)
    shown = invoke("history show a").stdout
    assert "user at build: no such dataset (net.py:3 in build)" in shown
    assert "failing" in shown
