"""A history in memory, and a search on a simulated bench."""

from __future__ import annotations

from typing import Any

import pytest
from tune_bench import Tune, landscape, tuned

from redline.store import History
from redline.testing.fake import FakeDoor
from redline.testing.landscape import Landscape
from redline.verbs.tune import TuneResult


@pytest.fixture
def history() -> Any:
    with History.open("sqlite://") as opened:
        yield opened


@pytest.fixture
def tune(history: History) -> Tune:
    def run(truth: Landscape | None = None, **settings: Any) -> TuneResult:
        return tuned(FakeDoor(truth or landscape()), history, **settings)

    return run
