"""From a trace file to columns: read a block, cut it between two events, decode the piece, keep what tables need.

Memory stays that of one block and of the columns, whatever the size of the file. A damaged file gives what is whole in
it, and `lost` says what that cost.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np

from redline.errors import TraceError
from redline.trace.building import Builder, NeedsExactTimes
from redline.trace.columns import Lost, Trace
from redline.trace.events import AnyEvent, coerce, exact_decoder, fast_decoder
from redline.trace.reading import TraceFile
from redline.trace.splitting import find_events, last_boundary, scan

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
