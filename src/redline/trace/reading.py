"""The bytes of a trace file, gunzipped where they are gzipped, block by block."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from redline.errors import TraceError

BLOCK_BYTES = 1 << 20
"""Small enough that a block and all that is decoded from it stay in the processor's cache."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31


class TraceFile:
    """Goes once through a file. A file that ends before its time is no exception: `problem` then says so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: str | None = None
        self.size_bytes = 0
        """Uncompressed, so far."""

    def blocks(self) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                gzipped = file.read(2) == _GZIP_MAGIC
                file.seek(0)
                for block in self._gunzipped(file) if gzipped else _plain(file):
                    self.size_bytes += len(block)
                    yield block
        except FileNotFoundError:
            raise TraceError(f"no such file: {self._path}") from None
        except OSError as error:
            raise TraceError(f"cannot read {self._path}: {error.strerror}") from None

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
