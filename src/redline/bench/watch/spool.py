"""This module writes the two files of a watched process: what was heard, as rows of numbers, and facts, as lines of JSON.

Rows go into a mapped file, whose pages belong to the kernel. Whatever ends the process (`os._exit`, a signal, running out
of memory) loses no row, and writing one takes no system call. Their reader, `analyze/watch.py`, decides what the rows mean.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from typing import Any

CALLS = ("data", "copy", "forward", "backward", "optimizer", "zero_grad", "saving", "upkeep", "pause", "replay")
MARKS = ("waiting", "fetched", "counted", "restart", "device", "closed")
KINDS = (*(call + end for call in CALLS for end in ("", " ended")), *MARKS)
DATA, COPY, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD, SAVING, UPKEEP, PAUSE, REPLAY = map(
    float, range(0, 2 * len(CALLS), 2)
)
WAITING, FETCHED, COUNTED, RESTART, DEVICE, CLOSED = map(float, range(2 * len(CALLS), len(KINDS)))
"""These are the kinds of rows. The number of a call plus one is the kind of its end. Each row has a key and a value:

| kind | key | value |
|---|---|---|
| data | the iterator; 0 while one is made | 1 where one is made, plus its workers if they end with it |
| data ended | the iterator | the samples of the batch; -1 where the loader is through |
| forward | the model; 0 for one that is not trained | 1 with gradients, plus 2 in training mode |
| forward ended | | its samples |
| optimizer, optimizer ended | the optimizer's number | at its end: 1 if the step was heard in full |
| upkeep | | an average of the weights is updated |
| pause | | 1 if the steps after it are profiled |
| replay | the graph | |
| waiting | | a rank's own part of the backward pass is done: it waits for the gradients of others |
| fetched | | seconds between a forward and its backward pass that made the next batch |
| counted | 1 if the step was heard in full | the samples of a step that the program counts itself |
| restart | | another thread trains: what was loaded before does not belong to its step |
| device | the number of the row | seconds of the device's clock when it reached that row |
"""
ROW = struct.Struct("<4d")
"""A row holds its kind, a key, a value and the time. The time is written last, so a row whose time is 0 is not written yet."""
CHUNK = 64 * mmap.ALLOCATIONGRANULARITY
"""This many bytes of the file are mapped at a time. It is a multiple of rows and of pages."""


class Spool:
    """These are the files of one process. Nothing is created before the first write."""

    def __init__(self, folder: str) -> None:
        self._name = os.path.join(folder, f"{os.getpid()}-{time.time_ns()}")
        self.rows = 0
        """It counts the rows that have been written."""
        self._files: dict[str, int] = {}
        self._chunk: Any = None
        self._at = CHUNK
        """This is the place of the next row in the chunk."""

    def put(self, kind: float, key: float, value: float, at: float) -> None:
        if self._at == CHUNK:
            self._next_chunk()
        ROW.pack_into(self._chunk, self._at, kind, key, value, at)
        self._at += 32
        self.rows += 1

    def _next_chunk(self) -> None:
        if not self.rows:
            os.write(self._open(".rows"), json.dumps(KINDS).encode().ljust(mmap.ALLOCATIONGRANULARITY, b"\n"))
        file = self._open(".rows")
        size = os.fstat(file).st_size
        # Writing to mapped space that a full disk does not have would end the process, so the space is reserved first.
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, size, CHUNK)
        else:
            os.ftruncate(file, size + CHUNK)
        self._chunk, self._at = mmap.mmap(file, CHUNK, offset=size), 0

    def fact(self, kind: str, **fields: Any) -> None:
        os.write(self._open(".facts"), json.dumps({"kind": kind, **fields}, default=str).encode() + b"\n")

    def path(self, suffix: str) -> str:
        return self._name + suffix

    def _open(self, suffix: str) -> int:
        if suffix not in self._files:
            flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._files[suffix] = os.open(self._name + suffix, flags, 0o600)
        return self._files[suffix]
