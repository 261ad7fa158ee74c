"""What a notebook shows while it measures: one bar for what runs, gone when the result comes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from reported import fake_door, race_records

from redline.model.protocol import Progress
from redline.show.notebook import NotebookProgress, in_notebook
from redline.verbs.run import run
from redline.verbs.workspace import Workspace


class Pages:
    """A notebook: each display is a list of what was written into it."""

    def __init__(self) -> None:
        self.displays: list[list[str]] = []
        self.now = 0.0

    def display(self) -> Callable[[str], None]:
        pages: list[str] = []
        self.displays.append(pages)
        return pages.append

    def clock(self) -> float:
        self.now += 0.3
        return self.now

    def observer(self) -> NotebookProgress:
        return NotebookProgress(self.display, self.clock)


def test_a_bar_says_how_much_is_done_and_goes_when_the_result_comes() -> None:
    pages = Pages()
    for number in (1, 2):
        with Workspace(door=fake_door(), keep=False, observer=pages.observer()) as workspace:
            run(
                "resnet50", recipes=["baseline", "fp16"], batch=32, device="cuda:0", effort="quick", workspace=workspace
            )
        assert len(pages.displays) == number, "each has a display of its own"
    *_, last, cleared = pages.displays[0]
    assert '<progress value="2" max="2">' in last
    assert "2 of 2 done, best so far: fp16, 2.50× (2.50–2.50) the first, resnet50 fp16: 6" in last
    assert cleared == ""


def test_names_are_only_text() -> None:
    pages = Pages()
    observer = pages.observer()
    observer.noted("<img src=x>")
    observer.opened(race_records(("baseline",))[0])
    observer.asked(Progress(stage="ceilings", detail="fp16 matrix products"))
    assert "<img" not in "".join(pages.displays[0])
    assert "measuring (fp16 matrix products)" in pages.displays[0][-1]


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not in_notebook()
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook()
    assert isinstance(Workspace(keep=False).observer, NotebookProgress)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))
    assert not in_notebook()
