"""Files that a person names are opened without waiting and read up to a limit, because any name may be typed."""

from __future__ import annotations

import errno
import os
from io import BufferedIOBase, BufferedReader
from pathlib import Path

from redline.model.errors import UsageError

MOST_SETTINGS_BYTES = 16 * 2**20
"""A file that a person writes, such as TOML, may have so many bytes: ten times as much as 20 000 runs in full."""
MOST_DOCUMENT_BYTES = 2**30
"""A JSON document may have so many bytes, unpacked. A back-up has no such limit: it is read record by record."""


def open_to_read(path: Path) -> BufferedReader:
    """Returns the file, open. A pipe that nobody writes into is empty; opening it in the usual way would wait for a writer."""
    if "\0" in str(path):  # no file can have this name, and Python would raise a ValueError
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    os.set_blocking(descriptor, True)  # a writer that is there already is waited for
    try:
        return open(descriptor, "rb")
    except OSError:  # a folder
        os.close(descriptor)
        raise


def read_up_to(file: BufferedIOBase, most_bytes: int, name: str) -> bytes:
    """Returns all that the file holds; more than `most_bytes` is refused, as of `/dev/zero` or of a small file that unpacks to much."""
    body = file.read(most_bytes + 1)
    if len(body) > most_bytes:
        raise UsageError(f"{name} holds more than {most_bytes >> 20} MiB, which is the most that is read")
    return body


def is_file(word: str) -> bool:
    try:
        return Path(word).is_file()
    except (OSError, ValueError):  # too long for a name, or a zero byte in it
        return False
