"""JSON documents that are read back are shown as the result that wrote them printed itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from reported import CEILINGS, captured, fake_door, race_records

import redline
from redline.analyze.ceilings import ceilings_summary, roofline_row
from redline.analyze.profile import profile_of
from redline.api.ceilings import CeilingsResult
from redline.api.memory import MemoryResult
from redline.api.profile import ProfileResult
from redline.api.report import documents_in
from redline.api.roofline import RooflineResult
from redline.api.run import RunResult
from redline.api.workspace import Workspace
from redline.model.questions import SwitchChoice
from redline.model.work import MemoryCategory, MemoryHolder, MemoryUse
from redline.report.document import FORMS
from redline.report.export import DocumentKind
from redline.report.gate import BisectStep, bisect_json, bisect_report
from redline.report.grid import pair_line
from redline.report.memory import MemoryRow
from redline.report.terminal import as_text
from redline.trace.decode import read_trace

Settings = dict[str, Any]
FAKE: Settings = {"batch": 4, "effort": "quick", "launch": {"door": "fake"}}


def tune() -> Any:
    door = fake_door(choices=(SwitchChoice(switch="fp16", family="precision"),))
    with Workspace(door=door, keep=False) as workspace:
        return redline.tune("resnet50", **FAKE, budget="5m", clock=lambda: door.clock_s, workspace=workspace)


RESULTS: dict[str, Callable[[Workspace], Any]] = {
    "run": lambda workspace: redline.run("resnet50", recipes=["baseline", "fp16"], **FAKE, workspace=workspace),
    "batch": lambda workspace: redline.find_batch("resnet50", launch=FAKE["launch"], max_batch=64, workspace=workspace),
    "tune": lambda workspace: tune(),
    "load": lambda workspace: redline.load("resnet50", rate=20, seconds=1, **FAKE, workspace=workspace),
    "train": lambda workspace: redline.train("resnet50", data="synthetic", epochs=1, **FAKE, workspace=workspace),
    "ceilings": lambda workspace: CeilingsResult(ceilings_summary(CEILINGS), CEILINGS),
    "scale": lambda workspace: redline.scale("resnet50", ranks=[1, 2], launch=FAKE["launch"], workspace=workspace),
}


def profiled(workspace: Workspace) -> ProfileResult:
    record = captured()
    assert record.trace is not None
    return ProfileResult(profile_of([read_trace(Path(record.trace.path))], record), record)


def roofline(workspace: Workspace) -> RooflineResult:
    return RooflineResult([roofline_row(each, CEILINGS) for each in race_records()], ceilings_summary(CEILINGS))


def memory(workspace: Workspace) -> MemoryResult:
    holder = MemoryHolder(module="layer4", bytes=2**29, category="activations", line="resnet.py:154")
    kinds: dict[MemoryCategory, int] = {"weights": 2**28, "activations": 2**31}
    use = MemoryUse(peak_bytes=3 * 2**30, peak_phase="backward", categories=kinds, holders=(holder,))
    row = MemoryRow(model="resnet50", task="train", recipe="amp", batch=32, device="NVIDIA H200", use=use)
    return MemoryResult([row])


RESULTS |= {"profile": profiled, "roofline": roofline, "memory": memory}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_document_is_shown_as_its_result_was(kind: str, tmp_path: Path) -> None:
    with Workspace(door=fake_door(), history=tmp_path / "history.sqlite") as workspace:
        found = RESULTS[kind](workspace)
    file = tmp_path / "found.json"
    file.write_text(found.to_json())
    (document,) = documents_in([str(file)])
    assert document.kind == kind
    assert str(document) == str(found)


def test_a_grid_is_shown_as_it_was(tmp_path: Path) -> None:
    with Workspace(door=fake_door(), history=tmp_path / "history.sqlite") as workspace:
        found = redline.run("resnet50", batch=[1, 2], launch=FAKE["launch"], workspace=workspace)
    (tmp_path / "found.json").write_text(found.to_json())
    (document,) = documents_in([str(tmp_path / "found.json")])
    assert str(document) == str(found)


def test_a_bisection_is_shown_as_it_was(tmp_path: Path) -> None:
    step = BisectStep(name="a3f9c2d41b7e", about="Use one lock", verdict="slower", ratio=0.93, low=0.91, high=0.95)
    found = ("resnet50", "commit", [step], ["a3f9c2d41b7e"], "Use one lock")
    (tmp_path / "found.json").write_text(bisect_json(*found))
    (document,) = documents_in([str(tmp_path / "found.json")])
    assert str(document) == as_text(bisect_report(*found))


def test_a_decision_shows_its_rows_and_what_it_says_of_each_pair(tmp_path: Path) -> None:
    replicates = [race_records(), race_records()]
    found = RunResult([record for replicate in replicates for record in replicate], decided=[replicates])
    (tmp_path / "found.json").write_text(found.to_json())
    (document,) = documents_in([str(tmp_path / "found.json")])
    assert all(pair_line(pair) in " ".join(str(document).split()) for pair in found.pairs)


def test_every_kind_of_figures_has_a_table() -> None:
    """A new kind must say how it is shown, or be listed here."""
    without = {
        "report", "models", "doctor", "micro", "tag", "import", "delete", "prune", "monitor", "watch",
    }  # fmt: skip
    assert set(get_args(DocumentKind)) == FORMS.keys() | without
