"""This module reads trace files, folders and pipes, gunzipped where needed, into typed events.

Only what some table needs is decoded. The text is cut at what looks like the end of an event, and decoding a piece checks
the cut. Only where that fails does Python's own JSON reader step from event to event, so that a damaged file still gives
everything that is whole in it.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias, TypeVar

import msgspec
import numpy as np

from redline.model.errors import TraceError
from redline.model.note import Note, note
from redline.trace.columns import UNKNOWN, Ints

T = TypeVar("T", bound=msgspec.Struct)

# This part reads files.

BLOCK_BYTES = 1 << 18
"""A block of this size is small enough that it and all that is decoded from it stay in the processor's cache."""

STDIN = "-"

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_WINDOW = 31
"""zlib reads a gzip header with this value. It is 15 for the largest window plus 16 for gzip."""
_PACKED_BYTES = 1024
"""Nothing can be read of a piece of gzip that is damaged, so the pieces are small."""


class TraceFile:
    """It goes once through a file. A file that ends too early raises no exception. `problem` then says so."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: str | None = None
        self.size_bytes = 0
        """This many bytes were read so far, uncompressed."""

    def blocks(self) -> Iterator[bytes]:
        try:
            is_stdin = str(self._path) == STDIN
            with open(sys.stdin.fileno(), "rb", closefd=False) if is_stdin else self._path.open("rb") as file:
                # The first bytes are looked at without reading them, because a pipe cannot be rewound.
                gzipped = file.peek(2)[:2] == _GZIP_MAGIC
                for block in self._gunzipped(file) if gzipped else iter(lambda: file.read(BLOCK_BYTES), b""):
                    self.size_bytes += len(block)
                    yield block
        except FileNotFoundError:
            raise TraceError(f"no such file: {self._path}") from None
        except OSError as error:
            raise TraceError(f"cannot read {self._path}: {error.strerror or error}") from None

    def _gunzipped(self, file: BinaryIO) -> Iterator[bytes]:
        """Yields whole blocks. A few kilobytes of gzip can hold gigabytes, so the file is never unpacked at once."""
        stream, text, rest = zlib.decompressobj(_GZIP_WINDOW), bytearray(), b""
        while packed := rest or file.read(_PACKED_BYTES):
            try:
                text += stream.decompress(packed, BLOCK_BYTES)
            except zlib.error as error:
                self.problem = f"the gzip data are damaged ({error})"
                break
            rest = stream.unconsumed_tail
            if len(text) >= BLOCK_BYTES:
                yield bytes(text)
                text.clear()
            if stream.eof:
                rest = stream.unused_data or file.read(_PACKED_BYTES)
                if not rest.startswith(_GZIP_MAGIC):
                    break
                # Several gzip files in a row count as one file.
                stream = zlib.decompressobj(_GZIP_WINDOW)
        else:
            self.problem = "the gzip data end early"
        yield bytes(text)


def rank_in_name(path: Path) -> int | None:
    """Returns the rank that a file's name tells. Tools name the files of a job `rank3.json` or `trace_rank_3.json.gz`."""
    match = re.search(r"rank[_-]?(\d{1,6})(?!\d)", path.name, re.IGNORECASE)
    return int(match.group(1)) if match else None


def trace_files(paths: Sequence[Path]) -> tuple[list[Path], list[Note]]:
    """Returns the trace files that paths stand for, each once, and a note on each that was named twice. A folder stands for
    the traces in it."""
    files: dict[str, Path] = {}
    notes: list[Note] = []
    for file in (file for path in paths for file in (_in_folder(path) if path.is_dir() else [path])):
        if files.setdefault(os.path.realpath(file), file) is not file:
            notes.append(note("given-twice", f"{file} was given twice and is counted once"))
    return list(files.values()), notes


MOST_FILES = 20_000
"""A folder of traces, with the folders below it, holds fewer files than this. One with more is a whole disk, and listing it takes long."""


def _in_folder(folder: Path) -> list[Path]:
    """Returns the traces that are named as TensorBoard names them, else every file that looks like a trace. Ranks are in
    the order of their number."""
    # Unlike rglob, a walk passes over folders that vanish meanwhile, and over those that may not be read.
    walk = (Path(below, name) for below, _, names in os.walk(folder) for name in names)
    paths = list(islice(walk, MOST_FILES))
    if len(paths) == MOST_FILES:
        raise TraceError(f"the folder {folder} holds {MOST_FILES} files or more: name the one that has the traces")
    inside = [path for path in paths if path.name.endswith((".json", ".json.gz")) and path.is_file()]
    named = [path for path in inside if path.name.endswith((".pt.trace.json", ".pt.trace.json.gz"))]
    traces = named or [path for path in inside if _looks_like_a_trace(path)]
    if not traces:
        raise TraceError(f"no trace (*.json, *.json.gz with a list 'traceEvents') in the folder {folder}")
    ranks = {path: rank_in_name(path) for path in traces}
    return sorted(traces, key=lambda path: (ranks[path] is None, ranks[path] or 0, path))


def _looks_like_a_trace(path: Path) -> bool:
    """Returns whether the first block looks like a trace. Looking further is not needed, because metadata before the list
    of events is short."""
    head = next(TraceFile(path).blocks(), b"")
    return b'"traceEvents"' in head or head.lstrip()[:1] == b"["


# This part describes events.

EXACT_BELOW_US = 2.0**43
"""Below this, neighbouring floats are less than a nanosecond apart. Above it, rounding would move events."""

LARGEST_US = 4.0e15
"""In nanoseconds this time still fits 64 bits. It is in the year 2096."""

LONGEST_US = 3.0e12
"""No event lasts longer than 35 days. A longer time has wrapped around, and would spoil every sum."""

NO_TIME = int(np.iinfo(np.int64).min)

Whole: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]

NOTHING = msgspec.Raw(b"")


class Args(msgspec.Struct, gc=False):
    correlation: Whole = UNKNOWN
    external: Whole = msgspec.field(default=UNKNOWN, name="External id")
    device: Whole = UNKNOWN
    stream: Whole = UNKNOWN
    bytes: Whole = UNKNOWN
    sequence: Whole = msgspec.field(default=UNKNOWN, name="Sequence number")
    forward_thread: Whole = msgspec.field(default=0, name="Fwd thread id")
    dims: msgspec.Raw = msgspec.field(default=NOTHING, name="Input Dims")
    types: msgspec.Raw = msgspec.field(default=NOTHING, name="Input type")
    values: msgspec.Raw = msgspec.field(default=NOTHING, name="Concrete Inputs")
    # Memory events have these.
    allocated: Whole = msgspec.field(default=0, name="Bytes")
    device_type: Whole = msgspec.field(default=0, name="Device Type")
    # Collectives have these, on the kernel and on the operator that describes it.
    collective: msgspec.Raw = msgspec.field(default=NOTHING, name="Collective name")
    dtype: msgspec.Raw = NOTHING
    in_elements: Whole = msgspec.field(default=UNKNOWN, name="In msg nelems")
    out_elements: Whole = msgspec.field(default=UNKNOWN, name="Out msg nelems")
    group_size: Whole = msgspec.field(default=UNKNOWN, name="Group size")
    group: msgspec.Raw = msgspec.field(default=NOTHING, name="Process Group Name")


NO_ARGS = Args()


class _WithoutTimes(msgspec.Struct, gc=False):
    """Both kinds of event have these fields. They differ in how they hold times, which are in microseconds."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str = UNKNOWN
    tid: int | str = UNKNOWN
    args: Args | None = None


class Event(_WithoutTimes, gc=False):
    """This event is decoded fast. Its times are floats, which are exact to the nanosecond below `EXACT_BELOW_US`."""

    ts: float = math.nan
    dur: float = -1.0


class ExactEvent(_WithoutTimes, gc=False):
    """This event has exact times, for traces that count from 1970."""

    ts: Decimal = Decimal("NaN")
    dur: Decimal = Decimal(-1)


AnyEvent: TypeAlias = Event | ExactEvent

# The decoder is not strict, because ROCm writes some numbers as text.
_fast_decoder = msgspec.json.Decoder(list[Event], strict=False)
_exact_decoder = msgspec.json.Decoder(list[ExactEvent], strict=False)

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Decoding raises these when a piece of text is not a list of events of the right types."""


class NeedsExactTimes(Exception):
    """The times are so large that floats blur them. The batch must be decoded again, with exact times."""


def start_and_duration(events: Sequence[AnyEvent]) -> tuple[Ints, Ints]:
    """Returns both in whole nanoseconds. Times that are missing or out of range are NO_TIME and UNKNOWN."""
    if isinstance(events[0], ExactEvent):
        starts = (_whole(event.ts, LARGEST_US, NO_TIME) for event in events)
        durations = (_whole(event.dur, LONGEST_US, UNKNOWN) for event in events)
        return np.fromiter(starts, np.int64, len(events)), np.fromiter(durations, np.int64, len(events))
    start = np.array([event.ts for event in events], np.float64)
    duration = np.array([event.dur for event in events], np.float64)
    # Comparisons with NaN are false, so an event without a time does not ask for exactness.
    if (np.abs(start) >= EXACT_BELOW_US).any():
        raise NeedsExactTimes
    return _nanoseconds(start, LARGEST_US, NO_TIME), _nanoseconds(duration, LONGEST_US, UNKNOWN)


def _whole(time: Any, largest_us: float, otherwise: int) -> int:
    # `abs` is not used, because it would round, and overflow on 1e9999999.
    return round(time * 1000) if time.is_finite() and time.copy_abs() <= largest_us else otherwise


def _nanoseconds(microseconds: Any, largest_us: float, otherwise: int) -> Ints:
    """Returns times that are exact below `EXACT_BELOW_US`. The whole part is multiplied as an integer, so the fraction loses nothing."""
    usable = np.abs(microseconds) <= largest_us
    known = np.where(usable, microseconds, 0.0)
    whole = np.floor(known)
    exact = whole.astype(np.int64) * 1000 + np.rint((known - whole) * 1000).astype(np.int64)
    return np.where(usable, exact, otherwise)


# This part handles damaged text.

_ESCAPE = re.compile(
    rb"(?s)\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\."
)
"""It matches a whole surrogate pair, half of one, or any other escape."""
_CONTROL = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f]")


def mended(text: bytes) -> bytes:
    """Returns the same text with every byte that no JSON string may hold replaced: bad UTF-8, lone surrogates, control bytes.

    Profilers write names straight from memory, and one broken name must not cost the events around it.
    """
    text = text.decode("utf-8", "replace").encode()
    text = _ESCAPE.sub(lambda escape: rb"\ufffd" if escape.group(1) else escape.group(0), text)
    return _CONTROL.sub(b" ", text)


# It takes NaN, which some tools write, and control bytes in names.
_PYTHONS_JSON = json.JSONDecoder(parse_float=str, parse_constant=str, strict=False)


def understood(body: bytes) -> ExactEvent | None:
    """Returns what can be understood of one event that is not as it should be. Returns None if that is nothing.

    What the event is must be right. A wrong time or argument counts as not given.
    """
    try:
        plain = _PYTHONS_JSON.decode(mended(body).decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(plain, dict) or not all(isinstance(plain.get(key, ""), str) for key in ("ph", "cat", "name")):
        return None
    args = plain.pop("args", None)
    event = _filled(ExactEvent(), plain)
    event.args = _filled(Args(), args) if isinstance(args, dict) else None
    return event


def _filled(struct: T, plain: dict[str, Any]) -> T:
    """Returns the struct with every value of the right type."""
    for field in msgspec.structs.fields(type(struct)):
        if field.encode_name in plain and field.type is not msgspec.Raw:
            with suppress(msgspec.ValidationError):
                setattr(struct, field.name, msgspec.convert(plain[field.encode_name], field.type, strict=False))
    return struct


# This part goes from text to events.

LONGEST_EVENT_BYTES = 64 << 20
"""No trace goes on for so long without an event ending, or without its list of events beginning."""

_BLANKS = b" \t\r\n"
_EVENTS = re.compile(rb'\A\s*+\[|"traceEvents"\s*+:\s*+\[')
_SEPARATORS = re.compile(r"[ \t\r\n,]*+")
_NEXT_EVENT = re.compile(r',[ \t\r\n]*+(?=\{[ \t\r\n]*+")')
_REALLY_OVER = re.compile(r'\][ \t\r\n]*+(?:\}|,[ \t\r\n]*+"|$)')
_MOST_GUESSES = 64
"""At most this many opening braces are tried, counted from the end of a block, as the beginning of an event."""
_CUT_WORD = 8
"""A word or an escape that the end of the text cuts off, such as `-Infinit`, begins at most this far before the end."""
_TOO_DEEP = 500
"""Python's JSON reader gives up on nested brackets after no fewer characters than this."""


class EventReader:
    """It goes through a file once. The JSON around the events is kept aside, and the events are handed on batch by batch."""

    def __init__(self, file: TraceFile, path: Path, take: Callable[[Sequence[AnyEvent]], None]) -> None:
        """`take` may raise `NeedsExactTimes` before it takes anything of a batch."""
        self._path, self._blocks, self._take = path, file.blocks(), take
        self._pending = self._before = self._after = b""
        self._exact = False
        self.ended = False
        """It is true once the end of the list of events was seen."""
        self.unreadable = 0
        """It counts values in the list that are no events."""

    @property
    def left_over(self) -> int:
        """Counts the bytes of an event that the file's end cut off."""
        return 0 if self.ended else len(self._pending.strip(b", \t\r\n"))

    def read(self) -> None:
        self._skip_to_events()
        worth_stepping = 0
        for block in self._blocks:
            cut = _last_boundary(block)
            # This is the one place where text is copied. It joins the rest of the block before with this block up to its last event.
            if cut is not None and self._decoded(b"".join((b"[", self._pending, memoryview(block)[:cut], b"]"))):
                self._pending = block[cut + 1 :]
                continue
            self._pending += block
            if len(self._pending) >= worth_stepping:
                self._step(is_last=False)
                # An event that goes on and on is not looked at again in every block, because the time for that would grow
                # with its square.
                worth_stepping = 2 * len(self._pending)
            if self.ended:
                break
            if len(self._pending) > LONGEST_EVENT_BYTES:
                most = f"{LONGEST_EVENT_BYTES >> 20} MiB"
                raise TraceError(f"{self._path}: no event ends within {most}; this is not a trace")
        if not self.ended:
            self._step(is_last=True)
        for block in self._blocks:
            self._after += block[: max(LONGEST_EVENT_BYTES - len(self._after), 0)]

    def header(self) -> dict[str, msgspec.Raw]:
        """Returns what stands around the list of events. If the header is damaged it is empty, and nothing depends on it."""
        for rest in (self._after, b"}") if self._before.strip().startswith(b"{") else ():
            with suppress(*UNREADABLE):
                return msgspec.json.decode(mended(self._before + b"]" + rest), type=dict[str, msgspec.Raw])
        return {}

    def _skip_to_events(self) -> None:
        text, found = b"", None
        for block in self._blocks:
            text += block
            # If damage hides what is text and what is a name, the first list with this name is taken.
            if (found := _EVENTS.search(text)) is not None or len(text) > LONGEST_EVENT_BYTES:
                break
        if found is None:
            raise TraceError(f"{self._path} is not a Chrome or Kineto trace: {_what_it_is(text)}")
        self._before, self._pending = text[: found.end()], text[found.end() :]

    def _decoded(self, piece: bytes) -> bool:
        """Hands on a list of events. Returns False if the piece is no such list, wherever the fault lies."""
        for change in (bytes, mended):
            with suppress(*UNREADABLE):
                events = None if self._exact else _fast_decoder.decode(change(piece))
                try:
                    self._take(_exact_decoder.decode(change(piece)) if events is None else events)
                except NeedsExactTimes:
                    self._exact = True
                    self._take(_exact_decoder.decode(change(piece)))
                return True
        return False

    def _step(self, *, is_last: bool) -> None:
        """Goes from one pending event to the next, and loses no more than those that cannot be understood.

        `is_last` means that nothing comes after what is pending, so that what has no end there is damaged.
        """
        # Bytes that are not UTF-8 keep their place, so that the rest can be turned into the same bytes again.
        text = self._pending.decode("utf-8", "surrogateescape")
        bodies: list[tuple[int, int]] = []
        damaged, position = 0, 0
        while (position := _end_of_match(_SEPARATORS, text, position)) < len(text):
            if _REALLY_OVER.match(text, position):
                self.ended = True
                break
            try:
                value, end = _PYTHONS_JSON.raw_decode(text, position)
            except (ValueError, RecursionError) as error:
                wrong = error.pos if isinstance(error, json.JSONDecodeError) else position + _TOO_DEEP
                is_cut = wrong + _CUT_WORD >= len(text) or str(error).startswith("Unterminated")
                # The next event may begin at the place that is wrong, so the comma in front of it counts.
                before = text[max(position, wrong - 64) : wrong]
                border = _NEXT_EVENT.search(text, wrong - len(before) + max(len(before.rstrip()) - 1, 0))
                if border is None or (is_cut and not is_last):
                    break
                damaged, position = damaged + 1, border.end()
                continue
            if isinstance(value, dict):
                bodies.append((position, end))
            else:
                damaged += 1
            position = end
        rest = text[position + self.ended :].encode("utf-8", "surrogateescape")
        whole = text[:position].rstrip(", \t\r\n").encode("utf-8", "surrogateescape")
        if damaged or not self._decoded(b"[" + whole + b"]"):
            events = [understood(text[begin:end].encode("utf-8", "surrogateescape")) for begin, end in bodies]
            self._take([event for event in events if event is not None])
            self.unreadable += damaged + events.count(None)
        self._pending, self._after = (b"", rest) if self.ended else (rest, b"")


def _end_of_match(rule: re.Pattern[str], text: str, position: int) -> int:
    match = rule.match(text, position)
    return match.end() if match else position


def _last_boundary(block: bytes) -> int | None:
    """Returns the position of a comma that seems to stand between two events, as late as possible."""
    position = len(block)
    for _ in range(_MOST_GUESSES):
        if (position := block.rfind(b"{", 0, position)) < 0:
            break
        # Between two events there is little but a comma, and an event is longer than the part that is looked at here.
        before = block[max(0, position - 64) : position].rstrip(_BLANKS)
        if before.endswith(b",") and before[:-1].rstrip(_BLANKS).endswith(b"}"):
            return block.rindex(b",", 0, position)
    return None


def _what_it_is(text: bytes) -> str:
    begin = text.lstrip()[:40].decode("utf-8", "replace")
    if begin.startswith("{"):
        return "it has no list 'traceEvents'"
    return f"it begins with {begin!r}" if begin else "it is empty"
