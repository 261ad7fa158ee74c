"""The ledger of a sweep: a record and the cell it settles are there together or not at all."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from sqlalchemy import Column, MetaData, Table, Text
from store_writer import make_block, make_record

from redline.model.errors import StoreError, UsageError
from redline.model.record import Failure, TelemetrySample
from redline.store import History, writer


def test_cells_are_settled_by_records(history: History) -> None:
    ledger = history.sweep("study")
    done = make_record(stopped="target", blocks=(make_block(),))
    failed = make_record(failure=Failure(stage="compile", kind="oom", message="no room"), stopped="failed")
    ledger.settle("a", done)
    ledger.settle("b", failed)
    cells = ledger.cells()
    assert (cells["a"].status, cells["a"].record_id, cells["a"].failure_kind) == ("done", done.id, None)
    assert (cells["b"].status, cells["b"].failure_kind, cells["b"].failure_message) == ("failed", "oom", "no room")
    assert history.load_many([done.id, failed.id, "nowhere"]) == {done.id: done, failed.id: failed}
    assert history.sweep("another").cells() == {}


def test_those_who_look_on_see_how_far_it_is(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 50.0
    monkeypatch.setattr("redline.store.ledgers.time.monotonic", lambda: now)
    ledger = history.sweep("study")
    ledger.announce(3, 4, "nobody holds it", done_before=0)
    assert history.activities() == []
    with ledger.held():
        ledger.observe(TelemetrySample(at_s=0.25))
        (said,) = history.activities()
        assert (said.name, said.done, said.done_before, said.total, said.is_over) == ("study", 0, 0, None, False)
        ledger.announce(3, 4, "resnet", done_before=2)
        now += 0.75
        ledger.observe(TelemetrySample(at_s=1.0))
        (said,) = history.activities()
        assert (said.done, said.total, said.now, said.done_before) == (3, 4, "resnet", 2)
        assert said.telemetry == TelemetrySample(at_s=0.25), "too soon after the last"
        now += 0.25
        ledger.observe(TelemetrySample(at_s=1.25))
        assert history.activities()[0].telemetry == TelemetrySample(at_s=1.25)
    assert history.activities() == []


def test_a_cell_is_settled_by_the_newest(history: History) -> None:
    ledger = history.sweep("study")
    first, second = make_record(stopped="target"), make_record(stopped="target")
    ledger.settle("a", first)
    ledger.settle("a", second)
    assert {cell.record_id for cell in ledger.cells().values()} == {second.id}
    assert history.count() == 2


def test_forgetting_keeps_the_records_and_other_sweeps(history: History) -> None:
    for name in ("study", "another"):
        history.sweep(name).settle("a", make_record())
    history.sweep("study").forget()
    assert history.sweep("study").cells() == {}
    assert len(history.sweep("another").cells()) == 1
    assert history.count() == 2


def test_cells_of_other_sweeps_are_found_and_taken_over(history: History) -> None:
    done = make_record(stopped="target", blocks=(make_block(),))
    history.sweep("grid-1").settle("a", done)
    history.sweep("grid-1").settle(
        "b", make_record(failure=Failure(stage="build", kind="oom", message="no room"), stopped="failed")
    )
    history.sweep("mine").settle("c", make_record(stopped="target"))
    ledger = history.sweep("grid-2")
    keys = ["a", "b", "c", *(f"key {number}" for number in range(2000))]
    found = ledger.elsewhere(keys, lambda name: name.startswith("grid"))
    assert found.keys() == {"a"}, "neither what failed nor what belongs to somebody else"
    ledger.adopt(found.values())
    ledger.adopt(found.values())
    assert ledger.cells()["a"].record_id == done.id
    assert history.count() == 3


def test_a_record_without_its_cell_is_never_seen(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Table("nowhere", MetaData(), Column("sweep", Text, primary_key=True))
    monkeypatch.setattr(writer, "sweep_cells", nowhere)
    with pytest.raises(StoreError):
        history.sweep("study").settle("a", make_record())
    assert history.count() == 0


def test_holding_is_by_sweep_and_by_history(location: str, tmp_path: Path) -> None:
    with (
        History.open(location) as one,
        History.open(location) as same,
        History.open(tmp_path / "other.sqlite") as other,
    ):
        with one.sweep("study").held():
            with same.sweep("another").held(), other.sweep("study").held():
                pass
            with pytest.raises(Exception, match="is being run by process"), same.sweep("study").held():
                pass
        with same.sweep("study").held():
            pass


def test_a_hold_is_seen_from_another_temporary_folder(location: str, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom redline.store import History\n"
        "with History.open(sys.argv[1]).sweep('study').held():\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", program, location],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert other.stdout.readline().strip() == "held"
    with History.open(location) as history:
        refused = pytest.raises(UsageError, match=f"sweep 'study' is being run by process {other.pid}")
        with refused, history.sweep("study").held():
            pass
        other.communicate("")
        with history.sweep("study").held():
            pass


def test_a_hold_that_failed_leaves_the_ledger_usable(history: History) -> None:
    ledger = history.sweep("study")
    with pytest.raises(RuntimeError, match="broke"), ledger.held():
        raise RuntimeError("broke")
    ledger.settle("a", make_record())
    with ledger.held():
        ledger.settle("b", make_record())
    assert sorted(ledger.cells()) == ["a", "b"]
