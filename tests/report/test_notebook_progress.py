"""What a notebook shows while it measures: one table per cell, written over, gone when the result comes."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from reported import fake_door, race_records

from redline.api.run import run
from redline.api.workspace import Workspace
from redline.model.protocol import Progress
from redline.report.notebook import NotebookProgress, Show, in_notebook


class Pages:
    """A notebook: each display is a list of what was written into it."""

    def __init__(self) -> None:
        self.displays: list[list[str]] = []
        self.cell = 1
        self.now = 0.0

    def display(self) -> Show:
        pages: list[str] = []
        self.displays.append(pages)
        return pages.append

    def clock(self) -> float:
        self.now += 0.2
        return self.now

    def observer(self) -> NotebookProgress:
        return NotebookProgress(self.display, self.clock, lambda: self.cell)


def test_a_cell_shows_what_each_recipe_is_doing_and_who_leads() -> None:
    pages = Pages()
    with Workspace(door=fake_door(), keep=False, observer=pages.observer()) as workspace:
        settings = {"batch": 32, "device": "cuda:0", "effort": "quick"}
        run("resnet50", recipes=["baseline", "fp16"], workspace=workspace, **settings)  # type: ignore[arg-type]
        (written,) = pages.displays
        text = "".join(written)
        assert "leader: fp16, 6" in text
        assert "2 of 2 done" in written[-1]
        assert "✓ 6" in written[-1]
        assert "<script" not in text
        pages.cell = 2
        run("resnet50", workspace=workspace, **settings)  # type: ignore[arg-type]
        assert len(pages.displays) == 2, "the next cell has a display of its own"
        assert "fp16" not in "".join(pages.displays[1])
    assert pages.displays[1][-1] == "", "the result takes its place"


def test_names_are_only_text() -> None:
    pages = Pages()
    observer = pages.observer()
    observer.noted("<img src=x>")
    observer.opened(race_records(("baseline",))[0])
    observer.asked(Progress(stage="ceilings", detail="fp16 matrix products"))
    page = pages.displays[0][-1]
    assert "<img" not in "".join(pages.displays[0])
    assert "measuring (fp16 matrix products)" in page


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    shell = SimpleNamespace(kernel=object(), execution_count=3)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook()
    assert isinstance(Workspace(keep=False).observer, NotebookProgress)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()
