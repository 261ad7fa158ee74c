"""Every test keeps its own history, so that none writes into the person's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "history.sqlite"
    monkeypatch.setenv("REDLINE_STORE", str(place))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return place
