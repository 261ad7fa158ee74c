"""From the bytes of a trace file to its columns.

The text is cut into pieces at what looks like the end of an event; decoding a piece checks the cut. Only where that
fails is the text scanned exactly, so that a damaged file still gives everything that is whole in it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from redline.model.errors import TraceError
from redline.model.note import Note, note
from redline.trace.building import Builder
from redline.trace.columns import DeviceInfo, Lost, Trace
from redline.trace.events import (
    UNREADABLE,
    AnyEvent,
    NeedsExactTimes,
    coerce,
    exact_decoder,
    fast_decoder,
    mended,
)
from redline.trace.intervals import distinct
from redline.trace.processes import split_by_process
from redline.trace.source import (
    TraceFile,
    find_any_events,
    find_events,
    last_boundary,
    pieces,
    rank_in_name,
    scan,
    trace_files,
)

LONGEST_EVENT_BYTES = 64 << 20
"""Nothing that is a trace goes on so long without an event ending."""

LONGEST_HEAD_BYTES = 16 << 20
"""Nor does it have so much before its list of events."""

MOST_DEVICES = 256
LARGEST_SUM_NS = 2.0**62
"""Durations that add up to more would overflow the sums made of them."""

DAMAGED_BYTES = 4 << 20
"""Text that is not understood for so long is damaged: it is then cut at what looks like a border between events."""

_LONGEST_FOOTER_BYTES = 16 << 20


class EventReader:
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
        if not self.ended:
            self._decode_damaged(at_end=True)
        for block in self._blocks:
            if len(self._after) < _LONGEST_FOOTER_BYTES:
                self._after += block

    def header(self) -> dict[str, msgspec.Raw]:
        """What stands around the list of events. A damaged header says nothing, and nothing depends on it."""
        if not self._before.strip().startswith(b"{"):
            return {}
        for rest in (self._after, b"}"):
            try:
                text = mended(self._before + b"]" + rest)
                return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            except UNREADABLE:
                continue
        return {}

    def _skip_to_events(self) -> None:
        text = b""
        worth_looking = 0
        for block in self._blocks:
            text += block
            if len(text) < worth_looking:
                continue
            if self._begin(text, find_events(text)):
                return
            if len(text) > LONGEST_HEAD_BYTES:
                break
            # Looking again after every block would take time with the square of the head's length.
            worth_looking = 2 * len(text)
        if not self._begin(text, find_events(text) or find_any_events(text)):
            raise TraceError(f"{self._path} is not a Chrome or Kineto trace: {_what_it_is(text)}")

    def _begin(self, text: bytes, begin: int | None) -> bool:
        if begin is not None:
            self._before, self._pending = text[:begin], text[begin:]
        return begin is not None

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
        if len(self._pending) > DAMAGED_BYTES:
            self._decode_damaged()
        if len(self._pending) > LONGEST_EVENT_BYTES:
            raise TraceError(f"{self._path}: no event ends within {LONGEST_EVENT_BYTES >> 20} MiB; this is not a trace")

    def _decode_whole(self, piece: bytes) -> bool:
        """False when the piece is not a list of events of the right types, wherever the fault lies."""
        if self._decoded(piece):
            return True
        repaired = mended(piece)
        return repaired != piece and self._decoded(repaired)

    def _decoded(self, piece: bytes) -> bool:
        try:
            if not self._exact:
                try:
                    self._builder.add(fast_decoder.decode(piece))
                    return True
                except NeedsExactTimes:
                    self._exact = True
            self._builder.add(exact_decoder.decode(piece))
            return True
        except UNREADABLE:
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

    def _decode_damaged(self, *, at_end: bool = False) -> None:
        """Take what is whole between borders; the last piece may go on in the next block."""
        found = list(pieces(self._pending))
        if len(found) < 2 and not at_end:
            return
        bodies = [self._pending[begin:end] for begin, end in found]
        last = bodies.pop()
        if len(found) > 1:
            self._decode_one_by_one(bodies)
            self._pending = last
        if at_end and len(found) > 1:
            self._decode_scanned()

    def _decode_one_by_one(self, bodies: Iterable[bytes]) -> None:
        events: list[AnyEvent] = []
        for body in bodies:
            event = coerce(body)
            if event is None:
                self.unreadable += 1
            else:
                events.append(event)
        self._builder.add(events)


def read_file(path: Path, *, all_frames: bool = False, pipes: bool = True) -> list[Trace]:
    """A trace for each process in the file. `all_frames`: keep every Python function, not only the long ones."""
    file = TraceFile(path, pipes=pipes)
    builder = Builder(all_frames=all_frames)
    reader = EventReader(path, file.blocks(), builder)
    reader.read()
    lost = _lost(file, reader, builder)
    if not builder.events:
        raise TraceError(f"{path} holds no whole event" + _because(lost))
    tables = builder.finish()
    _check(path, builder, tables, lost)
    header = reader.header()
    distributed = _part(header, "distributedInfo", dict[str, Any], {})
    whole = Trace(
        source=str(path),
        size_bytes=file.size_bytes,
        events=builder.events,
        rank=_count(distributed.get("rank"), rank_in_name(path)),
        world_size=_count(distributed.get("world_size")),
        devices=_devices(header),
        names=list(builder.names),
        shapes=list(builder.shapes),
        collectives=list(builder.collectives),
        threads=list(builder.threads),
        lost=lost,
        trace_id=_part(header, "trace_id", str, "") or None,
        notes=tuple(_notes(builder)),
        **tables,
    )
    return split_by_process(whole, builder.device_numbers())


def read_trace(path: Path) -> Trace:
    """The trace of a regular file that holds one process, as profilers write it."""
    found = read_file(path, pipes=False)
    if len(found) > 1:
        raise TraceError(f"{path} holds {len(found)} processes")
    return found[0]


def read_traces(paths: Sequence[Path]) -> list[Trace]:
    """All traces in files and folders; of a trace that is there twice, one."""
    files, notes = trace_files(paths)
    traces: list[Trace] = []
    seen: dict[tuple[str | None, int | None, str | None, int], str] = {}
    for path in files:
        for trace in read_file(path):
            key = (trace.trace_id, trace.rank, trace.process, trace.events)
            if trace.trace_id is not None and key in seen:
                text = f"{trace.source} is the same trace as {seen[key]} and is counted once"
                notes.append(note("given-twice", text))
                continue
            seen[key] = trace.source
            traces.append(trace)
    if notes:
        traces[0] = replace(traces[0], notes=(*notes, *traces[0].notes))
    return traces


def _check(path: Path, builder: Builder, tables: dict[str, Any], lost: Lost) -> None:
    devices = len(distinct(tables["work"].device))
    if devices > MOST_DEVICES:
        raise TraceError(f"{path} names {devices:,} devices: this is not the trace of one process")
    if not len(tables["operators"]) and not len(tables["work"]):
        what = f"{path} holds {builder.events:,} events, but neither operators nor device work"
        raise TraceError(what + _because(lost))
    for name in ("operators", "calls", "annotations", "work"):
        if tables[name].duration.sum(dtype=np.float64) > LARGEST_SUM_NS:
            raise TraceError(f"{path}: the durations of its {name} add up to more than a century; they are damaged")


def _lost(file: TraceFile, reader: EventReader, builder: Builder) -> Lost:
    reasons = []
    truncated = not reader.ended
    if truncated:
        where = file.problem or f"the file ends early, after {file.size_bytes:,} bytes"
        inside = f", inside an event ({reader.left_over:,} bytes of it)" if reader.left_over else ""
        reasons.append(f"{where}{inside}: whatever came later is missing")
    if reader.unreadable:
        reasons.append(f"{reader.unreadable:,} events left out: not readable as events")
    reasons += [f"{count:,} events left out: {why}" for why, count in builder.rejected.items() if count]
    return Lost(
        truncated=truncated,
        bytes=reader.left_over,
        events=reader.unreadable + sum(builder.rejected.values()),
        reasons=tuple(reasons),
    )


def _notes(builder: Builder) -> Iterator[Note]:
    if builder.unused:
        most = sorted(builder.unused.items(), key=lambda item: -item[1])[:5]
        listed = ", ".join(f"{count:,} of {category[:40]!r}" for category, count in most)
        yield note("unknown-events", f"events of categories that Redline does not know are not counted: {listed}")


def _because(lost: Lost) -> str:
    return f" ({'; '.join(lost.reasons)})" if lost.reasons else ""


_OTHER_FORMS = {
    b"\xff\xfe": "in UTF-16 or UTF-32: save it as UTF-8",
    b"\xfe\xff": "in UTF-16: save it as UTF-8",
    b"{\x00": "in UTF-16: save it as UTF-8",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it first",
    b"\xfd7zXZ\x00": "compressed with xz: unpack it first",
    b"BZh": "compressed with bzip2: unpack it first",
}
"""What files begin with that may hold a trace in another form."""


def _what_it_is(text: bytes) -> str:
    for magic, told in _OTHER_FORMS.items():
        if text.startswith(magic):
            return f"it is {told}"
    begin = text.lstrip()[:40].decode("utf-8", "replace")
    if not begin:
        return "it is empty"
    if begin.startswith("{"):
        return "it has no list 'traceEvents'"
    return f"it begins with {begin!r}"


T = TypeVar("T")


def _part(header: dict[str, msgspec.Raw], name: str, kind: type[T], otherwise: T) -> T:
    try:
        return msgspec.json.decode(header[name], type=kind) if name in header else otherwise
    except UNREADABLE:
        return otherwise


def _devices(header: dict[str, msgspec.Raw]) -> tuple[DeviceInfo, ...]:
    listed = _part(header, "deviceProperties", list[dict[str, Any]], [])
    return tuple(
        DeviceInfo(
            index=_count(one.get("id")),
            name=one["name"] if isinstance(one.get("name"), str) else "",
            capability=_capability(one),
            multiprocessors=_count(one.get("numSms")),
            memory_bytes=_count(one.get("totalGlobalMem")),
        )
        for one in listed[:MOST_DEVICES]
    )


def _capability(device: dict[str, Any]) -> tuple[int, int] | None:
    major, minor = _count(device.get("computeMajor")), _count(device.get("computeMinor"))
    return None if major is None or minor is None else (major, minor)


def _count(value: Any, otherwise: int | None = None) -> int | None:
    """A number that counts something; what else stands there says nothing."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53 else otherwise
