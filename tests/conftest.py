"""Every test keeps its own history, so that none writes into the person's own."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
from brief import shorten_efforts

# Torch's threads sleep while they wait for each other. Spinning, as they do otherwise, takes most of the processor's time
# where several tests run at once: 45 to 68 s instead of 14 s for one file on a busy machine.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes ten seconds or more, and is started first")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the rewritten tests, also where the environment forbids byte-code: rewriting them takes each worker 9 s.

    What was imported by then stays: no collection of garbage needs to look at it again, and every bench begins with one.
    """
    forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = forbidden
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # otherwise libraries tell of leaks when the interpreter ends


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long tests first: a worker that begins one when the others are done makes all of them wait."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(autouse=True)
def own_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "history.sqlite"
    monkeypatch.setenv("REDLINE_STORE", str(path))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return path


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real benches are timed for less than a second."""
    shorten_efforts(monkeypatch.setattr)
