"""The served history in Chromium, while a search goes on: the page follows it by itself."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import redline
from redline.model.protocol import SwitchChoice
from redline.search.observer import Observer
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.workspace import Workspace

pytestmark = pytest.mark.browser


@pytest.fixture
def address(own_history: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "redline", "serve", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        found = re.fullmatch(r"redline: (http://127\.0\.0\.1:\d+/)\n", server.stderr.readline())
        assert found is not None
        try:
            yield found[1]
        finally:
            server.terminate()
            server.wait(120)


class Looking(Observer):
    """Waits in the middle of the search until the page tells of it."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.seen: list[str] = []

    def replicate(self, number: int, planned: int, recipes: Sequence[str]) -> None:
        if not self.seen:
            script = "const t = document.getElementById('now').textContent; return t.includes('tune ') ? t : null"
            self.seen.append(self._browser.until(script))


def test_a_page_follows_a_live_search(browser: Any, address: str) -> None:
    browser.driver.get_log("browser")
    browser.driver.get(address)
    browser.until("return document.getElementById('connection').textContent === 'live'")
    truth = Landscape(
        step_s={"fp16": 0.005, "*": 0.01},
        choices=(SwitchChoice(switch="fp16", family="precision"),),
        offset_sigma=0.001,
    )
    door, observer = FakeDoor(truth), Looking(browser)
    with Workspace(door=door, observer=observer) as workspace:
        redline.tune(
            "resnet50", batch=32, budget="5m", launch={"door": "fake"}, clock=lambda: door.clock_s, workspace=workspace
        )
    assert observer.seen
    assert "trials" in observer.seen[0]
    link = browser.until("const a = document.querySelector('a[href^=\"/series/\"]'); return a && a.href")
    browser.driver.get(link)
    assert browser.ask("return document.querySelectorAll('img.picture').length") == 1
    refused = [line for line in browser.console() if "Content Security Policy" in line]
    assert refused == []


def test_a_phone_shows_names_in_words_and_nothing_beside_the_screen(browser: Any, address: str) -> None:
    redline.run(
        "resnet50", batch=32, launch={"door": "fake"}, workspace=Workspace(door=FakeDoor(Landscape(step_s=0.01)))
    )
    browser.look_like(width=400)
    browser.driver.get(address)
    browser.until("return document.querySelector('a[href^=\"/series/\"]')")
    assert browser.ask("return document.documentElement.scrollWidth") <= 400
    tallest = "return Math.max(...[...document.querySelectorAll('td, dd')].map(each => each.offsetHeight))"
    assert browser.ask(tallest) < 100, "a name is not written one letter below the other"
