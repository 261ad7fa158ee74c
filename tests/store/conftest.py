from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from redline.store import History


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "history.sqlite"


@pytest.fixture
def history(path: Path) -> Iterator[History]:
    with History.open(path) as history:
        yield history
