"""Writes that a server could not take, kept in files of this machine until it is back."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import platformdirs

from redline.errors import StoreError
from redline.locks import file_lock
from redline.record import new_id
from redline.store.codec import DAMAGE
from redline.store.writer import NoSuchRecord, Write, read_write

SUFFIX = ".msgpack"


class Outbox:
    """The writes that wait for one server, in the order in which they were made."""

    def __init__(self, location: str) -> None:
        digest = hashlib.sha256(location.encode()).hexdigest()[:16]
        self.folder = Path(platformdirs.user_data_path("redline")) / "unsent" / digest

    def put(self, write: Write) -> None:
        """Write it; it is on disk when this returns."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path = self.folder / f"{new_id()}{SUFFIX}"
            unfinished = path.with_suffix(".part")
            with unfinished.open("wb") as file:
                file.write(msgspec.msgpack.encode(write))
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(path)
            descriptor = os.open(self.folder, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
        except OSError as error:
            raise StoreError(f"cannot keep what was measured in {self.folder}: {error.strerror}") from error

    def waiting(self) -> list[Path]:
        try:
            return sorted(path for path in self.folder.iterdir() if path.suffix == SUFFIX)
        except FileNotFoundError:
            return []

    def send(self, perform: Callable[[Write], None], on_note: Callable[[str], None]) -> None:
        """Perform every write that waits, also those of other processes of this user, each once.

        A file that cannot be read is moved aside and named to `on_note`.
        """
        if not self.waiting():
            return
        with file_lock(self.folder / "lock", mode=0o600, on_wait=lambda holder: None):
            for path in self.waiting():
                try:
                    write = read_write(path.read_bytes())
                except DAMAGE as error:
                    self._set_aside(path, error, on_note)
                    continue
                try:
                    perform(write)
                except NoSuchRecord as error:
                    self._set_aside(path, error, on_note)
                else:
                    path.unlink()

    def _set_aside(self, path: Path, error: Exception, on_note: Callable[[str], None]) -> None:
        aside = path.with_suffix(".damaged")
        path.rename(aside)
        on_note(f"a measurement that waited for the server cannot be sent: {error}; it is now {aside}")
