"""Holding something alone across processes: a lock the system lets go of when its holder dies, however that happens."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import text

if TYPE_CHECKING:
    from redline.store.database import Database


@contextmanager
def hold(database: Database, what: str) -> Iterator[str | None]:
    """Yields None to the holder, and to anyone else who it is. On a server the lock is the server's, for all machines."""
    key = hashlib.sha256(f"{database.place}\0{what}".encode()).digest()
    if database.on_server:
        with _server_lock(database, int.from_bytes(key[:8], signed=True)) as got:
            yield None if got else "another process"
    elif database.place == ":memory:":
        yield None  # nobody else can see it
    else:
        with _file_lock(Path(tempfile.gettempdir()) / "redline-locks" / f"{key.hex()[:24]}.lock") as holder:
            yield holder


@contextmanager
def _file_lock(path: Path) -> Iterator[str | None]:
    path.parent.mkdir(exist_ok=True)
    if path.parent.stat().st_uid == os.getuid():
        path.parent.chmod(0o1777)  # other users may share the same history
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield os.pread(descriptor, 200, 0).decode("utf-8", "replace") or "another process"
            return
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()}".encode(), 0)
        yield None
    finally:
        os.close(descriptor)


@contextmanager
def _server_lock(database: Database, key: int) -> Iterator[bool]:
    with database.lasting() as connection:
        got = bool(connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": key}).scalar())
        try:
            yield got
        finally:
            if got:
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": key})
