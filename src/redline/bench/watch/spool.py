"""The two files that a watched process writes: what was heard, as rows of numbers, and facts, as lines of JSON.

Rows go into a mapped file, whose pages belong to the kernel. Whatever ends the process (`os._exit`, a signal, running out of
memory) loses no row, and writing one takes no system call. What the rows mean is decided by their reader, `analyze/watch.py`.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import time
from typing import Any

KINDS = (
    "data", "data ended", "copy", "copy ended", "forward", "forward ended", "backward", "backward ended", "optimizer", "optimizer ended",
    "zero_grad", "zero_grad ended", "saving", "saving ended", "upkeep", "upkeep ended", "waiting", "pause", "pause ended", "capture", "capture ended", "replay", "replay ended",
    "called", "fetched", "counted", "restart", "device", "closed",
)  # fmt: skip
(
    DATA, DATA_ENDED, COPY, COPY_ENDED, FORWARD, FORWARD_ENDED, BACKWARD, BACKWARD_ENDED, OPTIMIZER, OPTIMIZER_ENDED,
    ZERO_GRAD, ZERO_GRAD_ENDED, SAVING, SAVING_ENDED, UPKEEP, UPKEEP_ENDED, WAITING, PAUSE, PAUSE_ENDED, CAPTURE, CAPTURE_ENDED, REPLAY, REPLAY_ENDED,
    CALLED, FETCHED, COUNTED, RESTART, DEVICE, CLOSED,
) = map(float, range(len(KINDS)))  # fmt: skip
"""What a row says. Each row has a key and a value:

| kind | key | value |
|---|---|---|
| data | the iterator; 0 while one is made | 1 where one is made, plus its workers if they end with it |
| data ended | the iterator | the samples of the batch; -1 where the loader is through |
| forward | the model; 0 for one that is not trained | 1 with gradients, plus 2 in training mode |
| forward ended | | its samples |
| optimizer, optimizer ended | the optimizer's number | at its end: 1 if the step was heard in full |
| upkeep | | an average of the weights is updated |
| waiting | | a rank's own part of the backward pass is done: it waits for the gradients of others |
| pause | | 1 if the steps after it are profiled |
| replay, capture ended | the graph | |
| called | a compiled function | the samples it was called with |
| fetched | | seconds between a forward and its backward pass that made the next batch |
| counted | | the samples of a step that the program counts itself |
| restart | | another thread trains: 1 if nothing before this belongs to its step, 0 if batches do not |
| device | the number of the row | seconds of the device's clock when it reached that row |
| closed | | |
"""
ROW = struct.Struct("<4d")
"""Kind, key, value and when. The time is written last: a row whose time is 0 is not written yet."""
CHUNK = 64 * mmap.ALLOCATIONGRANULARITY
"""Bytes of the file that are mapped at a time: whole rows and whole pages."""


class Spool:
    """The files of one process. Nothing is created before the first write."""

    def __init__(self, folder: str) -> None:
        self._name = os.path.join(folder, f"{os.getpid()}-{time.time_ns()}")
        self.folder = folder
        self.rows = 0
        """How many have been written."""
        self._file: int | None = None
        self._facts: int | None = None
        self._chunk: Any = None
        self._at = CHUNK
        """The place of the next row in the chunk."""

    def put(self, kind: float, key: float, value: float, at: float) -> None:
        if self._at == CHUNK:
            self._next_chunk()
        ROW.pack_into(self._chunk, self._at, kind, key, value, at)
        self._at += 32
        self.rows += 1

    def _next_chunk(self) -> None:
        page = mmap.ALLOCATIONGRANULARITY
        if self._file is None:
            self._file = self._open(".rows")
            os.write(self._file, json.dumps(KINDS).encode().ljust(page, b"\n"))
        else:
            self._chunk.close()
        size = os.fstat(self._file).st_size
        if hasattr(os, "posix_fallocate"):  # writing to mapped space that a full disk does not have ends the process
            os.posix_fallocate(self._file, size, CHUNK)
        else:
            os.ftruncate(self._file, size + CHUNK)
        self._chunk, self._at = mmap.mmap(self._file, CHUNK, offset=size), 0

    def fact(self, kind: str, **fields: Any) -> None:
        if self._facts is None:
            self._facts = self._open(".facts")
        os.write(self._facts, json.dumps({"kind": kind, "at": time.time(), **fields}, default=str).encode() + b"\n")

    def path(self, suffix: str) -> str:
        return self._name + suffix

    def _open(self, suffix: str) -> int:
        return os.open(self._name + suffix, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
