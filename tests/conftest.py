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

GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "long: takes ten seconds or more, and is started first")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the rewritten tests, also where the environment forbids byte-code: rewriting them takes each worker 9 s.

    What was imported by then stays: no collection of garbage looks at it, neither meanwhile, which takes each worker a second,
    nor afterwards, as every bench begins with one.
    """
    forbidden, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    gc.disable()
    try:
        return (yield)
    finally:
        sys.dont_write_bytecode = forbidden
        gc.freeze()
        gc.enable()


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


@pytest.fixture(scope="session")
def lock_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machine") / "locks"


@pytest.fixture(autouse=True)
def own_locks(lock_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU of a fake is no GPU that tests in other processes would have to wait for. One that is here is shared."""
    from redline.system import locks

    if not any(map(os.path.exists, GPU_FILES)):
        monkeypatch.setattr(locks, "MACHINE_FOLDER", lock_folder)


@pytest.fixture(autouse=True)
def hasty_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """A history in this process is written without waiting for the disk: 60 ms each on a busy one.

    That only matters when the power fails. The tests of the store keep it as it is.
    """
    from redline.store import database

    monkeypatch.setattr(database, "SYNCHRONOUS", dict.fromkeys(database.SYNCHRONOUS, "OFF"))


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real benches are timed for less than a second."""
    shorten_efforts(monkeypatch.setattr)
