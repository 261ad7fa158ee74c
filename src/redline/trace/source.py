"""Where traces come from: files, folders of them and pipes, and their bytes, gunzipped where they are gzipped."""

from __future__ import annotations

import io
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from redline.errors import TraceError
from redline.note import Note, note

BLOCK_BYTES = 1 << 18
"""Small enough that a block and all that is decoded from it stay in the processor's cache."""

STDIN = "-"

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31


class TraceFile:
    """Goes once through a file. A file that ends before its time is no exception: `problem` then says so."""

    def __init__(self, path: Path, *, pipes: bool = True) -> None:
        """`pipes`: whether to wait for what somebody writes into one."""
        self._path = path
        self._pipes = pipes
        self.problem: str | None = None
        self.size_bytes = 0
        """Uncompressed, so far."""

    def blocks(self) -> Iterator[bytes]:
        try:
            with self._opened() as file:
                # Peeked at, not read and rewound: a pipe cannot be.
                gzipped = file.peek(2)[:2] == _GZIP_MAGIC
                for block in self._gunzipped(file) if gzipped else _plain(file):
                    self.size_bytes += len(block)
                    yield block
        except FileNotFoundError:
            raise TraceError(f"no such file: {self._path}") from None
        except OSError as error:
            raise TraceError(f"cannot read {self._path}: {error.strerror or error}") from None

    def _opened(self) -> io.BufferedReader:
        if str(self._path) == STDIN and self._pipes:
            return open(sys.stdin.fileno(), "rb", closefd=False)
        if not self._pipes and self._path.exists() and not self._path.is_file() and not self._path.is_dir():
            raise TraceError(f"{self._path} is not a regular file")
        return self._path.open("rb")

    def _gunzipped(self, file: BinaryIO) -> Iterator[bytes]:
        stream = zlib.decompressobj(_GZIP_WINDOW)
        rest = b""
        while compressed := rest or file.read(BLOCK_BYTES):
            try:
                # No more than a block at a time: a few kilobytes of gzip can hold gigabytes.
                block = stream.decompress(compressed, BLOCK_BYTES)
            except zlib.error as error:
                self.problem = f"the gzip data are damaged after {self.size_bytes:,} bytes ({error})"
                return
            if block:
                yield block
            rest = stream.unconsumed_tail
            if stream.eof:
                rest = stream.unused_data
                if rest[:2] != _GZIP_MAGIC:
                    return
                stream = zlib.decompressobj(_GZIP_WINDOW)  # several gzip files in a row are one
        yield stream.flush()
        self.problem = f"the gzip data end early, after {self.size_bytes:,} bytes"


def _plain(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(BLOCK_BYTES):
        yield block


def rank_in_name(path: Path) -> int | None:
    """Tools name the files of a job `rank3.json` or `trace_rank_3.json.gz`."""
    found = re.search(r"rank[_-]?(\d{1,6})(?!\d)", path.name, re.IGNORECASE)
    return int(found.group(1)) if found else None


def trace_files(paths: Sequence[Path]) -> tuple[list[Path], list[Note]]:
    """The trace files meant by paths, each once, and a note on each that was named twice.

    A folder stands for the traces in it.
    """
    files: list[Path] = []
    notes: list[Note] = []
    seen: set[str] = set()
    for file in (one for path in paths for one in (_in_folder(path) if path.is_dir() else [path])):
        real = os.path.realpath(file)
        if real in seen:
            notes.append(note("given-twice", f"{file} was given twice and is counted once"))
            continue
        seen.add(real)
        files.append(file)
    return files, notes


def _in_folder(folder: Path) -> list[Path]:
    """As TensorBoard lays them out; else every file in it that looks like a trace, ranks in the order of their number."""
    inside = sorted(path for path in folder.rglob("*") if path.name.endswith((".json", ".json.gz")) and path.is_file())
    named = [path for path in inside if path.name.endswith((".pt.trace.json", ".pt.trace.json.gz"))]
    found = named or [path for path in inside if _looks_like_a_trace(path)]
    if not found:
        raise TraceError(f"no trace (*.json, *.json.gz with a list 'traceEvents') in the folder {folder}")
    return sorted(found, key=lambda path: (_or_last(rank_in_name(path)), path))


def _or_last(rank: int | None) -> int:
    return rank if rank is not None else sys.maxsize


def _looks_like_a_trace(path: Path) -> bool:
    """By its first block: metadata before the list of events is short."""
    head = next(TraceFile(path, pipes=False).blocks(), b"")
    return b'"traceEvents"' in head or head.lstrip()[:1] == b"["
