"""The files that a watched process writes: one row per step, and facts.

Rows go into a mapped file, whose pages belong to the kernel: whatever ends the process (`os._exit`, a signal, running out
of memory) loses nothing that was written, and writing takes no system call.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import time
from typing import Any

PHASES = ("data", "copy", "forward", "backward", "optimizer", "other")

COLUMNS = (
    "kind", "step", "ended", *PHASES, "paused", "loaded", "fed", "backwards", "loss", "caller", "profiled", "models",
    "before", *(f"aside_{name}" for name in PHASES),
)  # fmt: skip
"""Of a row, all 64-bit floats.

`kind`: 0 a step by the host's clock, 1 the phases of a step by the device's clock: its `ended` is then the device's time
since the moment `paused` of the host's clock; 2 what has passed since the last step when a loader was through. `caller`: the optimizer's number; -1
a step that the program counted itself, -2 one that ended with its backward pass, because no optimizer was called yet; -3 one of which only the batch was seen.
`models`: the modules that were called, as bits. `before`: of `other`, what passed before the batch was first used.
`aside_*`: what had passed when the last forward pass in evaluation mode ended, before the training went on.
"""
ROW = struct.Struct(f"<{len(COLUMNS) + 1}d")
WRITTEN = "written"
"""The last column in the file: 1 where the row is whole, 0 in space that is not used yet."""
ENDED = struct.Struct("<2d")
ENDED_AT = mmap.ALLOCATIONGRANULARITY - ENDED.size - 1
"""Where in the first page stands how many steps have ended and when the last one did: of some the rows may follow later."""
CHUNK = math.lcm(ROW.size, mmap.ALLOCATIONGRANULARITY)
"""Bytes of the file that are mapped at a time: whole rows and whole pages."""


class Spool:
    """The files of one process: rows of steps, and facts as lines of JSON. Nothing is created before the first write."""

    def __init__(self, folder: str) -> None:
        self._name = os.path.join(folder, f"{os.getpid()}-{time.time_ns()}")
        self.folder = folder
        self._rows: int | None = None
        self._facts: int | None = None
        self._chunk: mmap.mmap | None = None
        self._head: mmap.mmap | None = None
        self._at = CHUNK
        """Where the next row goes, in the chunk."""
        self._size = mmap.ALLOCATIONGRANULARITY
        """Of the file: the column names take the first page."""

    def row(self, values: tuple[float, ...]) -> None:
        if self._at == CHUNK:
            self._next_chunk()
        ROW.pack_into(self._chunk, self._at, *values, 1.0)  # type: ignore[arg-type]
        self._at += ROW.size

    def ended(self, steps: int, at: float) -> None:
        """So many steps have ended in all, the last one at this moment."""
        if self._head is not None:
            ENDED.pack_into(self._head, ENDED_AT, steps, at)

    def _next_chunk(self) -> None:
        if self._rows is None:
            self._rows = self._open(".steps")
            columns = json.dumps({"columns": [*COLUMNS, WRITTEN], "ended_at": ENDED_AT}).encode() + b"\n"
            os.write(self._rows, columns.ljust(self._size, b"\0"))
            self._head = mmap.mmap(self._rows, self._size)
        if self._chunk is not None:
            self._chunk.close()
        if hasattr(os, "posix_fallocate"):  # writing to mapped space that a full disk does not have ends the process
            os.posix_fallocate(self._rows, self._size, CHUNK)
        else:
            os.ftruncate(self._rows, self._size + CHUNK)
        self._chunk = mmap.mmap(self._rows, CHUNK, offset=self._size)
        self._size += CHUNK
        self._at = 0

    def fact(self, kind: str, **fields: Any) -> None:
        if self._facts is None:
            self._facts = self._open(".facts")
        os.write(self._facts, json.dumps({"kind": kind, "at": time.time(), **fields}, default=str).encode() + b"\n")

    def path(self, suffix: str) -> str:
        return self._name + suffix

    def _open(self, suffix: str) -> int:
        return os.open(self._name + suffix, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
