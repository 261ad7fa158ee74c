"""The bytes of a trace file, gunzipped where they are gzipped, block by block."""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

from redline.errors import TraceError
from redline.trace.building import AnyEvent, Builder, NeedsExactTimes, coerce, exact_decoder, fast_decoder
from redline.trace.columns import Lost, Trace

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
            # A pipe would be waited for, for ever; opened so, it is not.
            with open(self._path, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise TraceError(f"{self._path} is not a regular file")
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


_BLANKS = b" \t\r\n"
_MOST_GUESSES = 64

# A lone quote is a string that the buffer's end cuts off.
_TOKEN = re.compile(rb'(?s)"[^"\\]*+(?:\\.[^"\\]*+)*+"|["\[\]{}]')
_EVENTS = re.compile(rb'"traceEvents"\s*+:\s*+\[')
_QUOTE, _OPENING, _CLOSING, _END = ord('"'), frozenset(b"[{"), frozenset(b"]}"), ord("]")


@dataclass(frozen=True)
class Scan:
    """What an exact look at a buffer that begins between two events found."""

    spans: list[tuple[int, int]]
    """Whole events."""
    strays: int
    """Values between events that are none: numbers, words."""
    consumed: int
    """Up to here the buffer is understood."""
    end: int | None
    """Where the closing bracket of the list of events stands, if it is in the buffer."""


def find_events(buffer: bytes) -> int | None:
    """Where the first event may begin; None when the list of events is not in the buffer."""
    # A key never looks like this inside a string: its quotes would be escaped there.
    found = _EVENTS.search(buffer)
    if found:
        return found.end()
    bare = buffer.lstrip(_BLANKS)
    return len(buffer) - len(bare) + 1 if bare[:1] == b"[" else None


def last_boundary(buffer: bytes) -> int | None:
    """The place of a comma that seems to stand between two events, as late as possible."""
    position = len(buffer)
    for _ in range(_MOST_GUESSES):
        position = buffer.rfind(b"{", 0, position)
        if position < 0:
            return None
        # Between two events there is little but a comma; an event is longer than what is looked at here.
        before = buffer[max(0, position - 64) : position].rstrip(_BLANKS)
        if before.endswith(b",") and before[:-1].rstrip(_BLANKS).endswith(b"}"):
            return buffer.rindex(b",", 0, position)
    return None


def scan(buffer: bytes) -> Scan:
    """Step over strings and count brackets, so that not even nonsense between them leads astray."""
    spans: list[tuple[int, int]] = []
    strays = depth = start = consumed = 0
    for token in _TOKEN.finditer(buffer):
        character = buffer[token.start()]
        if character in _OPENING:
            if depth == 0:
                start = token.start()
                strays += _strays(buffer[consumed:start])
            depth += 1
        elif character in _CLOSING:
            if depth == 0:
                end = token.start() if character == _END else None
                return Scan(spans, strays + _strays(buffer[consumed : token.start()]), consumed, end)
            depth -= 1
            if depth == 0:
                spans.append((start, token.end()))
                consumed = token.end()
        elif character == _QUOTE and token.end() - token.start() == 1:
            break
    return Scan(spans, strays, consumed, None)


def _strays(between: bytes) -> int:
    return sum(1 for word in between.split(b",") if word.strip(_BLANKS))


LONGEST_EVENT_BYTES = 64 << 20
"""Nothing that is a trace goes on so long without an event ending, or before its list of events begins."""

MOST_DEVICES = 256

_LONGEST_FOOTER_BYTES = 16 << 20


class _Distributed(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class _Device(msgspec.Struct):
    name: str = ""


class Header(msgspec.Struct):
    """What stands around the list of events; all of it optional."""

    distributed: _Distributed | None = msgspec.field(default=None, name="distributedInfo")
    devices: list[_Device] = msgspec.field(default_factory=list, name="deviceProperties")


def read_trace(path: Path) -> Trace:
    file = TraceFile(path)
    builder = Builder()
    document = Document(path, file.blocks(), builder)
    document.read()
    lost = _lost(file, document, builder)
    header = document.header()
    if not builder.events:
        raise TraceError(f"{path} holds no whole event" + _because(lost))
    tables = builder.finish()
    devices = len(np.unique(tables["work"].device))
    if devices > MOST_DEVICES:
        raise TraceError(f"{path} names {devices:,} devices: this is not the trace of one process")
    if not len(tables["operators"]) and not len(tables["work"]):
        what = f"{path} holds {builder.events:,} events, but neither operators nor device work"
        raise TraceError(what + _because(lost))
    distributed = header.distributed or _Distributed()
    return Trace(
        source=str(path),
        size_bytes=file.size_bytes,
        events=builder.events,
        rank=distributed.rank if distributed.rank is not None else _rank_in_name(path),
        world_size=distributed.world_size,
        devices=tuple(device.name for device in header.devices),
        names=list(builder.names),
        shapes=builder.shapes,
        threads=[f"{pid}/{tid}" for pid, tid in builder.threads],
        lost=lost,
        **tables,
    )


class Document:
    """The JSON around the events is kept aside, the events go to the builder batch by batch."""

    def __init__(self, path: Path, blocks: Iterable[bytes], builder: Builder) -> None:
        self._path = path
        self._blocks: Iterator[bytes] = iter(blocks)
        self._builder = builder
        self._pending = b""
        self._before = b""
        self._after = b""
        self._exact = False
        self._worth_scanning = 0
        self.ended = False
        """Whether the end of the list of events was seen."""
        self.unreadable = 0
        """Values in the list that are no events."""

    @property
    def left_over(self) -> int:
        """Bytes of an event that the file's end cut off."""
        return 0 if self.ended else len(self._pending.strip(b", \t\r\n"))

    def read(self) -> None:
        self._skip_to_events()
        for block in self._blocks:
            self._take(block)
            if self.ended:
                break
        if not self.ended:
            self._decode_scanned()
        for block in self._blocks:
            if len(self._after) < _LONGEST_FOOTER_BYTES:
                self._after += block

    def header(self) -> Header:
        """What could be understood of it: a damaged one says nothing, and nothing depends on it."""
        if not self._before.strip().startswith(b"{"):
            return Header()
        for rest in (self._after, b"}"):
            try:
                return msgspec.json.decode(self._before + b"]" + rest, type=Header)
            except (msgspec.DecodeError, RecursionError):
                continue
        return Header()

    def _skip_to_events(self) -> None:
        text = b""
        for block in self._blocks:
            text += block
            begin = find_events(text)
            if begin is not None:
                self._before, self._pending = text[:begin], text[begin:]
                return
            if len(text) > LONGEST_EVENT_BYTES:
                break
        raise TraceError(f"{self._path} is not a Chrome or Kineto trace: {_what_it_is(text)}")

    def _take(self, block: bytes) -> None:
        cut = last_boundary(block)
        # The one place where text is copied: the rest of the block before, and this block up to its last event.
        if cut is not None and self._decode_whole(b"".join((b"[", self._pending, memoryview(block)[:cut], b"]"))):
            self._pending = block[cut + 1 :]
            return
        self._pending += block
        if len(self._pending) >= self._worth_scanning:
            self._decode_scanned()
            # Looking again at every block at an event that goes on and on would take time with its square.
            self._worth_scanning = 2 * len(self._pending)
        if len(self._pending) > LONGEST_EVENT_BYTES:
            raise TraceError(f"{self._path}: no event ends within {LONGEST_EVENT_BYTES >> 20} MiB; this is not a trace")

    def _decode_whole(self, piece: bytes) -> bool:
        """False when the piece is not a list of events of the right types, wherever the fault lies."""
        if not self._exact:
            try:
                self._builder.add(fast_decoder.decode(piece))
                return True
            except NeedsExactTimes:
                self._exact = True
            except (msgspec.DecodeError, RecursionError):
                return False
        try:
            self._builder.add(exact_decoder.decode(piece))
            return True
        except (msgspec.DecodeError, RecursionError):
            return False

    def _decode_scanned(self) -> None:
        """Find each event's end exactly, and lose no more than those that cannot be understood."""
        found = scan(self._pending)
        whole = b"".join((b"[", self._pending[: found.consumed], b"]"))
        if found.strays or not self._decode_whole(whole):
            self._decode_one_by_one([self._pending[start:end] for start, end in found.spans])
            self.unreadable += found.strays
        if found.end is not None:
            self.ended = True
            self._after = self._pending[found.end + 1 :]
            self._pending = b""
        else:
            self._pending = self._pending[found.consumed :]

    def _decode_one_by_one(self, bodies: Iterable[bytes]) -> None:
        events: list[AnyEvent] = []
        for body in bodies:
            event = coerce(body)
            if event is None:
                self.unreadable += 1
            else:
                events.append(event)
        self._builder.add(events)


def _lost(file: TraceFile, document: Document, builder: Builder) -> Lost:
    reasons = []
    truncated = not document.ended
    if truncated:
        where = file.problem or f"the file ends early, after {file.size_bytes:,} bytes"
        inside = f", inside an event ({document.left_over:,} bytes of it)" if document.left_over else ""
        reasons.append(f"{where}{inside}: whatever came later is missing")
    if document.unreadable:
        reasons.append(f"{document.unreadable:,} events left out: not readable as events")
    reasons += [f"{count:,} events left out: {why}" for why, count in builder.rejected.items() if count]
    return Lost(
        truncated=truncated,
        bytes=document.left_over,
        events=document.unreadable + sum(builder.rejected.values()),
        reasons=tuple(reasons),
    )


def _because(lost: Lost) -> str:
    return f" ({'; '.join(lost.reasons)})" if lost.reasons else ""


def _what_it_is(text: bytes) -> str:
    begin = text.lstrip()[:40].decode("utf-8", "replace")
    if not begin:
        return "it is empty"
    if begin.startswith("{"):
        return "it has no list 'traceEvents'"
    return f"it begins with {begin!r}"


def _rank_in_name(path: Path) -> int | None:
    """Tools name the files of a job `rank3.json` or `trace_rank_3.json.gz`."""
    found = re.search(r"rank[_-]?(\d{1,6})(?!\d)", path.name, re.IGNORECASE)
    return int(found.group(1)) if found else None


def trace_files(paths: Sequence[Path]) -> list[Path]:
    """The trace files meant by paths: a folder stands for the traces in it, as TensorBoard lays them out."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(
                file for file in path.rglob("*") if file.name.endswith((".pt.trace.json", ".pt.trace.json.gz"))
            )
            if not inside:
                raise TraceError(f"no trace (*.pt.trace.json, *.pt.trace.json.gz) in the folder {path}")
            files += inside
        else:
            files.append(path)
    return files


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    return [read_trace(path) for path in trace_files(paths)]
