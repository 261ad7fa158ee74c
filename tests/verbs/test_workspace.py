"""A workspace that keeps nothing creates nothing, whatever is asked of it; one that reads creates nothing either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import redline
from redline.launch.door import Session
from redline.model.errors import Interrupted, StoreError
from redline.model.protocol import AskCeilings, CeilingsAnswer, OnProgress, Profile, Reply
from redline.model.record import Block, Closed, RunRecord
from redline.model.spec import LaunchSpec, RunSpec, WorkloadSpec
from redline.model.work import Ceilings
from redline.search.observer import Observer
from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.capture import capture
from redline.verbs.workspace import Workspace

pytestmark = pytest.mark.usefixtures("brief")

FAKE: dict[str, Any] = {"launch": {"door": "fake"}, "effort": "quick"}
QUICK: dict[str, Any] = {"device": "cpu", "threads": 1, "batch": 2, "image_size": 32, "effort": "quick"}

FAKED: dict[str, Callable[[Workspace], object]] = {
    "run": lambda workspace: redline.run("m", workspace=workspace, **FAKE),
    "grid": lambda workspace: redline.run("m", batch=[1, 2], workspace=workspace, **FAKE),
    "batch": lambda workspace: redline.batch("m", workspace=workspace, **FAKE),
    "decide": lambda workspace: redline.run(
        "m", recipes=["baseline", "fp16"], decide=True, workspace=workspace, **FAKE
    ),
    "tune": lambda workspace: redline.tune("m", budget="20s", workspace=workspace, launch={"door": "fake"}),
}
REAL: dict[str, Callable[[Workspace], object]] = {
    "profile": lambda workspace: redline.profile("simple_cnn", workspace=workspace, **QUICK),
    "flops": lambda workspace: redline.flops("simple_cnn", workspace=workspace, **QUICK),
    "flops with latency": lambda workspace: redline.flops("simple_cnn", latency=True, workspace=workspace, **QUICK),
    "ceilings": lambda workspace: redline.roofline(device="cpu", threads=1, workspace=workspace),
    "roofline": lambda workspace: redline.roofline("simple_cnn", workspace=workspace, **QUICK),
    "doctor": lambda workspace: redline.doctor(workspace=workspace),
    "models": lambda workspace: redline.models(workspace=workspace),
}


def fake_door() -> FakeDoor:
    return FakeDoor(Landscape(step_s=0.004, device_kind="cuda", memory_limit_bytes=2**30))


class Measured(Workspace):
    """Ceilings take half a minute; these are made up."""

    def ask(self, question: Any, answer: Any, launch: LaunchSpec | None = None) -> Any:
        if not isinstance(question, AskCeilings):
            return super().ask(question, answer, launch)
        figures = {"flops_per_s": {"fp32": 1e11}, "copy_bytes_per_s": 1e10, "launch_s": 1e-5, "measured_at": 1.7e9}
        return CeilingsAnswer(ceilings=Ceilings(kind="cpu", name="a CPU", driver=None, torch="2", threads=1, **figures))


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], list[Path]]:
    """What is in the folder that holds the history and this user's data."""
    return lambda: sorted(path for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("verb", [*FAKED, *REAL])
def test_keeping_nothing_creates_nothing(verb: str, files: Callable[[], list[Path]]) -> None:
    with Measured(door=fake_door() if verb in FAKED else None, keep=False) as workspace:
        {**FAKED, **REAL}[verb](workspace)
        assert files() == []
    assert files() == []


class Told:
    """A journal of the caller's own."""

    def __init__(self) -> None:
        self.records: list[RunRecord] = []

    def begin(self, record: RunRecord) -> None: ...

    def append(self, record_id: str, block: Block) -> None: ...

    def finish(self, record: RunRecord) -> None:
        self.records.append(record)


def test_a_journal_in_place_of_the_history_creates_nothing_either(files: Callable[[], list[Path]]) -> None:
    journal = Told()
    with Workspace(journal=journal) as workspace:
        result = redline.profile("simple_cnn", workspace=workspace, **QUICK)
    assert result.record is not None
    assert [record.id for record in journal.records] == [result.record.id]
    assert files() == []


class Busy(Session):
    """A bench that is asked for something long, until the user has enough."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    def wait(self, on_progress: OnProgress | None = None, timeout_s: float | None = None) -> Reply | None:
        raise KeyboardInterrupt

    def close(self) -> Closed:
        self.ended.append("closed")
        return Closed()

    def kill(self) -> None:
        self.ended.append("killed")


class BusyDoor:
    def __init__(self) -> None:
        self.session = Busy()

    def open(self, spec: RunSpec | None = None) -> Session:
        return self.session

    def close(self) -> None: ...


def test_an_interrupted_question_does_not_wait_for_its_answer() -> None:
    """Closing would: a bench in the middle of the ceilings hears of it 20 s later."""
    asked, captured = BusyDoor(), BusyDoor()
    with Workspace(door=asked, keep=False) as workspace, pytest.raises(KeyboardInterrupt):
        workspace.ask(AskCeilings(device="cpu", threads=1), CeilingsAnswer)
    assert asked.session.ended[0] == "killed"
    with pytest.raises(KeyboardInterrupt):
        capture(RunSpec(workload=WorkloadSpec(model="m")), Profile(path=""), captured, Told())
    assert captured.session.ended[0] == "killed"


@pytest.mark.parametrize("keep", [True, False])
def test_an_interrupt_says_whether_records_were_written(keep: bool) -> None:
    class Enough(Observer):
        def closed(self, record: RunRecord) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught, Workspace(door=fake_door(), keep=keep, observer=Enough()) as mine:
        redline.run("m", workspace=mine, **FAKE)
    assert isinstance(caught.value, Interrupted) == keep
    with pytest.raises(KeyboardInterrupt) as caught, Workspace(door=BusyDoor()) as mine:
        mine.ask(AskCeilings(device="cpu", threads=1), CeilingsAnswer)
    assert not isinstance(caught.value, Interrupted)


READING: dict[str, Callable[[Workspace], object]] = {
    "report": lambda workspace: redline.report((), out="report", workspace=workspace),
    "compare": lambda workspace: redline.compare("a", "b", workspace=workspace),
    "kept_tune": lambda workspace: redline.kept_tune("study", workspace=workspace),
    "profile": lambda workspace: redline.profile("0123456789", workspace=workspace),
    "roofline --last": lambda workspace: redline.roofline(last=True, workspace=workspace),
}


@pytest.mark.parametrize("verb", FAKED)
def test_a_history_that_cannot_be_written_to_is_told_before_anything_is_measured(
    verb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(history: History) -> None:
        raise StoreError(f"cannot write to {history.location}")

    monkeypatch.setattr(History, "require_writable", refuse)
    door, place = fake_door(), tmp_path / "kept.sqlite"
    with Workspace(door=door, history=place) as workspace, pytest.raises(StoreError, match=r"kept\.sqlite"):
        FAKED[verb](workspace)
    assert door.clock_s == 0.0


def test_a_profile_is_kept_in_the_folder_of_its_history(tmp_path: Path) -> None:
    place, out = tmp_path / "team" / "history.sqlite", tmp_path / "out"
    with Workspace(history=place) as workspace:
        result = redline.profile("simple_cnn", out=out, workspace=workspace, **QUICK)
        shown = Path(result.record.trace.path)
    assert shown.parent == out
    moved = place.parent.rename(tmp_path / "moved")
    with History.open(moved / "history.sqlite") as history:
        (record,) = history.find()
    kept = Path(record.trace.path)
    assert kept == moved / "traces" / record.id / shown.name
    assert kept.read_bytes() == shown.read_bytes()
    with Workspace(history=moved / "history.sqlite") as workspace:
        assert redline.profile(record.id, workspace=workspace).table("operators").rows
