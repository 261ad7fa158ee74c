"""JSON documents that are read back are shown as the result that wrote them printed itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from reported import CEILINGS, fake_door, race_records

import redline
from redline.analyze.ceilings import ceilings_summary
from redline.api.ceilings import CeilingsResult
from redline.api.report import documents_in
from redline.api.study import StudyResult
from redline.api.workspace import Workspace
from redline.questions import SwitchChoice

Settings = dict[str, Any]
FAKE: Settings = {"batch": 4, "effort": "quick", "launch": {"door": "fake"}}


def tune() -> Any:
    door = fake_door(choices=(SwitchChoice(switch="fp16", family="precision"),))
    with Workspace(door=door, keep=False) as workspace:
        return redline.tune("resnet50", **FAKE, budget="5m", clock=lambda: door.clock_s, workspace=workspace)


RESULTS: dict[str, Callable[[Workspace], Any]] = {
    "run": lambda workspace: redline.run("resnet50", recipes=["baseline", "fp16"], **FAKE, workspace=workspace),
    "study": lambda workspace: StudyResult(race_records()),
    "sweep": lambda workspace: redline.sweep("resnet50", batches=[1, 2], launch=FAKE["launch"], workspace=workspace),
    "batch": lambda workspace: redline.find_batch("resnet50", launch=FAKE["launch"], max_batch=64, workspace=workspace),
    "tune": lambda workspace: tune(),
    "load": lambda workspace: redline.load("resnet50", rate=20, seconds=1, **FAKE, workspace=workspace),
    "train": lambda workspace: redline.train("resnet50", data="synthetic", epochs=1, **FAKE, workspace=workspace),
    "ceilings": lambda workspace: CeilingsResult(ceilings_summary(CEILINGS), CEILINGS),
    "scale": lambda workspace: redline.scale("resnet50", ranks=[1, 2], launch=FAKE["launch"], workspace=workspace),
}


@pytest.mark.parametrize("kind", RESULTS)
def test_a_document_is_shown_as_its_result_was(kind: str, tmp_path: Path) -> None:
    with Workspace(door=fake_door(), history=tmp_path / "history.sqlite") as workspace:
        found = RESULTS[kind](workspace)
    file = tmp_path / "found.json"
    file.write_text(found.to_json())
    (document,) = documents_in([str(file)])
    assert document.kind == kind
    assert str(document) == str(found)
