"""Every test that asks for a `history` runs on a SQLite file and on a PostgreSQL server that the tests start."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from postgres_server import Server, binaries, new_server

from redline.store import History


@pytest.fixture
def hasty_history() -> None:
    """None here: the store is tested as people have it."""


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    if binaries() is None:
        pytest.skip("no PostgreSQL here: install Debian's postgresql, or put postgres on the PATH")
    pytest.importorskip("psycopg", reason="the extra postgres is not installed")
    server = new_server()
    yield server
    server.stop()
    shutil.rmtree(server.folder)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Of a SQLite file, for tests that look into it."""
    return tmp_path / "history.sqlite"


@pytest.fixture(params=["sqlite", "postgres"])
def location(request: pytest.FixtureRequest, path: Path) -> str:
    if request.param == "sqlite":
        return str(path)
    url: str = request.getfixturevalue("server").new_database()
    return url


@pytest.fixture
def history(location: str) -> Iterator[History]:
    with History.open(location) as history:
        yield history
