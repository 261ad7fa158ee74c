"""The text of traces: from files, folders of them and pipes, gunzipped where needed, and where its events begin and end.

Events are found quickly by a guess, exactly by counting brackets, and in damaged text by what looks like a border.
"""

from __future__ import annotations

import io
import os
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from redline.model.errors import TraceError
from redline.model.note import Note, note

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
            before = stream.copy()
            try:
                # No more than a block at a time: a few kilobytes of gzip can hold gigabytes.
                block = stream.decompress(compressed, BLOCK_BYTES)
            except zlib.error as error:
                yield _up_to_the_damage(before, compressed)
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


def _up_to_the_damage(stream: zlib._Decompress, compressed: bytes) -> bytes:
    """What comes out of a block before the byte that cannot be read: all at once, nothing would."""
    found = bytearray()
    try:
        for byte in compressed:
            found += stream.decompress(bytes((byte,)))
            if len(found) >= BLOCK_BYTES:
                break
    except zlib.error:
        pass
    return bytes(found)


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
    # Unlike rglob, a walk passes over folders that vanish meanwhile, and over those that may not be read.
    every = (Path(below, name) for below, _, names in os.walk(folder) for name in names)
    inside = sorted(path for path in every if path.name.endswith((".json", ".json.gz")) and path.is_file())
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


BLANKS = b" \t\r\n"
_MOST_GUESSES = 64

# A lone quote is a string that the buffer's end cuts off.
_TOKEN = re.compile(rb'(?s)"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]')
_EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')
_BORDER = re.compile(rb'\}[ \t\r\n]*+,[ \t\r\n]*+(?=\{[ \t\r\n]*+")')
_REALLY_OVER = re.compile(rb'[ \t\r\n]*+(?:\}|,[ \t\r\n]*+"|$)')
_QUOTE, _OPENING, _CLOSING, _END = ord('"'), frozenset(b"[{"), frozenset(b"]}"), ord("]")


_APART = ord("]") - ord("[")
"""From each opening bracket to its closing one: the same for both kinds."""


@dataclass(frozen=True)
class Scan:
    """What an exact look at a buffer that begins between two events found."""

    spans: list[tuple[int, int]]
    """Whole events."""
    strays: int
    """Values between events that are none: numbers, words, brackets."""
    consumed: int
    """Up to here the buffer is understood."""
    end: int | None
    """Where the closing bracket of the list of events stands, if it is in the buffer."""


def find_events(buffer: bytes) -> int | None:
    """Where the first event may begin; None when no list of events of the document itself is in the buffer."""
    bare = buffer.lstrip(BLANKS)
    if bare[:1] == b"[":
        return len(buffer) - len(bare) + 1
    depth = 0
    for token in _TOKEN.finditer(buffer):
        character = buffer[token.start()]
        if character == _QUOTE:
            found = _EVENTS.match(buffer, token.start()) if depth == 1 else None
            if found:
                return found.end()
        else:
            depth += 1 if character in _OPENING else -1
    return None


def find_any_events(buffer: bytes) -> int | None:
    """The same where the text before it is damaged, or where the list stands deeper in the document."""
    # A key never looks like this inside a string: its quotes would be escaped there.
    found = _EVENTS.search(buffer)
    return found.end() if found else None


def last_boundary(buffer: bytes) -> int | None:
    """The position of a comma that seems to stand between two events, as late as possible."""
    position = len(buffer)
    for _ in range(_MOST_GUESSES):
        position = buffer.rfind(b"{", 0, position)
        if position < 0:
            return None
        # Between two events there is little but a comma; an event is longer than what is looked at here.
        before = buffer[max(0, position - 64) : position].rstrip(BLANKS)
        if before.endswith(b",") and before[:-1].rstrip(BLANKS).endswith(b"}"):
            return buffer.rindex(b",", 0, position)
    return None


def scan(buffer: bytes) -> Scan:
    """Step over strings and count brackets, so that not even nonsense between them leads astray."""
    spans: list[tuple[int, int]] = []
    strays = start = consumed = 0
    opened: list[int] = []
    for token in _TOKEN.finditer(buffer):
        character = buffer[token.start()]
        if character in _OPENING:
            if not opened:
                start = token.start()
                strays += _strays(buffer[consumed:start])
            opened.append(character)
        elif character in _CLOSING:
            if not opened:
                between = _strays(buffer[consumed : token.start()])
                if character == _END and _REALLY_OVER.match(buffer, token.end()):
                    return Scan(spans, strays + between, consumed, token.start())
                strays += between + 1  # a bracket that closes nothing: events follow all the same
                consumed = token.end()
                continue
            if character - opened.pop() != _APART:
                break  # a bracket is missing: from here on they pair up wrongly
            if not opened:
                spans.append((start, token.end()))
                consumed = token.end()
        elif character == _QUOTE and token.end() - token.start() == 1:
            break
    return Scan(spans, strays, consumed, None)


def _strays(between: bytes) -> int:
    return sum(1 for word in between.split(b",") if word.strip(BLANKS))


def pieces(buffer: bytes) -> Iterator[tuple[int, int]]:
    """What lies between things that look like borders of events. In damaged text a missing quote or bracket would
    hide everything behind it from an exact look; here it costs the events it stands in."""
    begin = 0
    for border in _BORDER.finditer(buffer):
        yield begin, border.start() + 1
        begin = border.end()
    yield begin, len(buffer)
