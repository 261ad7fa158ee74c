"""The records that the checks on a GPU write beside their figures."""

from __future__ import annotations

import gzip
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

import redline
from redline.model.record import Closed, RunRecord
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace

if TYPE_CHECKING:
    from records import RawRecords

TOOLS = Path(__file__).parents[2] / "tools" / "gpu"
MODEL = f"{TOOLS}/some_model.py:net"


@pytest.fixture
def kind(monkeypatch: pytest.MonkeyPatch) -> type[RawRecords]:
    monkeypatch.syspath_prepend(str(TOOLS))
    from records import RawRecords

    return RawRecords


def measure(raw: RawRecords, model: str = MODEL) -> None:
    truth = Landscape(step_s={"*": 0.01})
    with Workspace(journal=raw.journal, door=FakeDoor(truth)) as workspace:
        redline.run(model, batch=4, effort="quick", launch={"door": "fake"}, workspace=workspace)


def records_in(folder: Path) -> list[RunRecord]:
    with History.open(":memory:") as history:
        with Workspace(history=history) as workspace:
            workspace.history.add_file(folder / "records.redline.gz")
        return history.find(newest_first=False)


def test_all_records_of_several_calls_are_in_one_file(kind: type[RawRecords], tmp_path: Path) -> None:
    for model in ("first", "second"):
        with kind(tmp_path) as raw:
            measure(raw, model)
    found = records_in(tmp_path)
    assert [record.spec.workload.model for record in found] == ["first", "second"]
    assert all(block.samples for record in found for block in record.blocks)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records.redline.gz"]


def test_neither_the_machine_nor_its_folders_are_named(kind: type[RawRecords], tmp_path: Path) -> None:
    with kind(tmp_path) as raw:
        measure(raw)
        (as_measured,) = raw.journal.find()
        told = f"/a/.venv/lib/python3.11/site-packages/torch/a.py:3] {Path.home()}/x and /opt/b/lib/python3.11/os.py"
        raw.journal.finish(msgspec.structs.replace(as_measured, closed=Closed(printed=told)))
    (record,) = records_in(tmp_path)
    assert as_measured.spec.workload.model == MODEL
    assert record.spec.workload.model == "tools/gpu/some_model.py:net"
    assert record.prepared.environment.hostname == ""
    assert record.blocks == as_measured.blocks
    assert record.closed is not None
    assert record.closed.printed == "site-packages/torch/a.py:3] ~/x and lib/python3.11/os.py"
    assert str(TOOLS.parents[1]).encode() not in gzip.decompress((tmp_path / "records.redline.gz").read_bytes())


def test_a_script_that_is_told_to_end_writes_what_it_has(kind: type[RawRecords], tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with kind(tmp_path) as raw:
        measure(raw)
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGTERM)
        assert len(records_in(tmp_path)) == 1
    assert len(records_in(tmp_path)) == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_check_without_records_writes_no_file(kind: type[RawRecords], tmp_path: Path) -> None:
    with kind(tmp_path) as raw:
        raw.write()
    assert not list(tmp_path.iterdir())
