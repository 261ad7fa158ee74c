"""Reads what a damaged SQLite file still holds, for a new one. The damaged file is never written to.

SQLite refuses a whole table when one page on the way to it is damaged, and the whole file when its schema is. The rows
themselves lie in leaf pages that are complete without the rest (https://www.sqlite.org/fileformat2.html), so this looks at
every page by itself, takes what is a row of ours, and lets the history store it anew. A row whose bytes changed without
becoming invalid cannot be told from a sound one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from redline.model.errors import RecordError, UsageError
from redline.model.record import RunRecord
from redline.model.work import Ceilings
from redline.store.codec import TuneRow, read_ceilings, unpack

TABLE_LEAF = 0x0D
"""The first byte of a page that holds rows."""
FREE_PAGES_AT = 32
"""Here the header of a file names the first of the pages that are not used any more."""
WAL_HEADER, WAL_FRAME = 32, 24
"""Bytes before the first page in a write-ahead log, and before each of its pages."""
MARK_KINDS = ("tag", "note", "gate")

Value = None | int | float | str | bytes
Pages = dict[int, bytes]


class Salvage(msgspec.Struct, frozen=True):
    """These rows could be read."""

    records: list[tuple[RunRecord, bool]]
    """With whether nothing more was to come."""
    cut: list[str]
    """Records that have lost some of their blocks."""
    unreadable: list[str]
    """Records of which only the id could be read."""
    marks: list[tuple[str, Any, str, float]]
    cells: list[tuple[str, str, str]]
    """Sweep, key and record of what was settled."""
    tunes: list[tuple[TuneRow, bytes]]
    ceilings: list[Ceilings]


def salvage(path: Path) -> Salvage:
    """Read every page of a SQLite file and of the write-ahead log beside it."""
    try:
        pages, reserved = _pages(path)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    heads: dict[str, tuple[bytes, str]] = {}
    blocks: dict[str, dict[int, bytes]] = {}
    marks, cells, tunes, ceilings = [], [], [], []
    free = _free(pages)
    for number, page in pages.items():
        if number in free:
            continue
        for row in _rows(pages, number, page, reserved):
            match row:
                case [str(key), int() | float(), *_, str(status), str() | None, int(), bytes(head)] if len(row) == 15:
                    heads[key] = (head, status)
                case [str(key), int(place), bytes(body)] if place >= 0:
                    blocks.setdefault(key, {})[place] = body
                case [str(key), str(kind), str(words), int() | float() as moment] if kind in MARK_KINDS:
                    marks.append((key, kind, words, float(moment)))
                case [str(sweep), str(cell), "done" | "failed", str(key), _, _, _]:
                    cells.append((sweep, cell, key))
                case [str(name), int() | float() as moment, str(model), str(task), str(state), bytes(body)]:
                    row_of_tune = TuneRow(name=name, created_at=float(moment), model=model, task=task, state=state)
                    tunes.append((row_of_tune, body))
                case [str(), str(), int() | float(), bytes(body)] if (read := read_ceilings(body)) is not None:
                    ceilings.append(read)
    records, cut, unreadable = [], [], []
    for key, (head, status) in sorted(heads.items()):
        own = blocks.get(key, {})
        record: RunRecord | None = None
        with suppress(RecordError):
            record = unpack(key, head, [own[place] for place in sorted(own)])
        if record is None or record.id != key:
            unreadable.append(key)
            continue
        records.append((record, status != "running"))
        if sorted(own) != list(range(len(own))):
            cut.append(key)
    return Salvage(records, cut, unreadable, marks, cells, tunes, ceilings)


def _pages(path: Path) -> tuple[Pages, int]:
    """The pages by number, the newest of each, and how many bytes at their ends are not used."""
    body = path.read_bytes()
    size = int.from_bytes(body[16:18], "big")
    size = 65536 if size == 1 else size
    if size < 512 or size & (size - 1):
        size = 4096  # the size that SQLite gives a new file, where the header does not say
    reserved = body[20] if len(body) > 20 and size - body[20] >= 480 else 0
    pages = {index // size + 1: body[index : index + size] for index in range(0, len(body) - size + 1, size)}
    log = path.with_name(f"{path.name}-wal")
    written = log.read_bytes() if log.exists() else b""
    waiting: Pages = {}
    for start in range(WAL_HEADER, len(written) - size - WAL_FRAME + 1, size + WAL_FRAME):
        number, pages_after_commit = struct.unpack(">II", written[start : start + 8])
        if written[start + 8 : start + 16] != written[16:24]:
            break  # of an earlier use of the log
        waiting[number] = written[start + WAL_FRAME : start + WAL_FRAME + size]
        if pages_after_commit:
            pages |= waiting
            waiting = {}
    return pages, reserved


def _free(pages: Pages) -> set[int]:
    """Pages that are not used any more: their rows were deleted, or lie elsewhere by now."""
    free: set[int] = set()
    trunk = int.from_bytes(pages.get(1, b"")[FREE_PAGES_AT : FREE_PAGES_AT + 4], "big")
    while trunk in pages and trunk not in free:
        page = pages[trunk]
        following, count = struct.unpack(">II", page[:8])
        count = min(count, len(page) // 4 - 2)
        free |= {trunk, *struct.unpack(f">{count}I", page[8 : 8 + 4 * count])}
        trunk = following
    return free


def _rows(pages: Pages, number: int, page: bytes, reserved: int) -> Iterator[list[Value]]:
    """The rows of a page that holds rows; one that is damaged is left out."""
    start = 100 if number == 1 else 0
    if page[start] != TABLE_LEAF:
        return
    count = int.from_bytes(page[start + 3 : start + 5], "big")
    usable = len(page) - reserved
    for place in range(start + 8, min(start + 8 + 2 * count, usable - 1), 2):
        try:
            yield _row(_payload(pages, page, int.from_bytes(page[place : place + 2], "big"), usable))
        except (IndexError, KeyError, ValueError, struct.error):  # a UnicodeDecodeError is a ValueError
            continue


def _payload(pages: Pages, page: bytes, at: int, usable: int) -> bytes:
    """The bytes of one row, of which the end may lie on pages of their own."""
    length, at = _number(page, at)
    _, at = _number(page, at)
    whole, least = usable - 35, (usable - 12) * 32 // 255 - 23
    if length <= whole:
        return _exactly(page[at : at + length], length)
    own = least + (length - least) % (usable - 4)
    own = own if own <= whole else least
    if length > usable * len(pages):
        raise ValueError("longer than the file")
    parts, left = [page[at : at + own]], length - own
    following = int.from_bytes(page[at + own : at + own + 4], "big")
    while left > 0:
        more = pages[following]
        parts.append(more[4 : min(usable, 4 + left)])
        left -= usable - 4
        following = int.from_bytes(more[:4], "big")
    return _exactly(b"".join(parts), length)


def _row(body: bytes) -> list[Value]:
    """The values of a row: a header with the type of each, then the values."""
    end, at = _number(body, 0)
    types = []
    while at < end:
        kind, at = _number(body, at)
        types.append(kind)
    found: list[Value] = []
    for kind in types:
        length = (0, 1, 2, 3, 4, 6, 8, 8, 0, 0)[kind] if kind < 10 else (kind - 12) // 2
        if kind in (10, 11):
            raise ValueError("no such type")
        raw = _exactly(body[at : at + length], length)
        at += length
        if kind == 0:
            found.append(None)
        elif kind == 7:
            found.append(struct.unpack(">d", raw)[0])
        elif kind in (8, 9):
            found.append(kind - 8)
        elif kind < 8:
            found.append(int.from_bytes(raw, "big", signed=True))
        else:
            found.append(raw.decode() if kind % 2 else raw)
    return found


def _number(body: bytes, at: int) -> tuple[int, int]:
    """Returns a number of one to nine bytes, and where it ends."""
    value = 0
    for index in range(8):
        byte = body[at + index]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, at + index + 1
    return value << 8 | body[at + 8], at + 9


def _exactly(found: bytes, length: int) -> bytes:
    if len(found) != length:
        raise ValueError("cut short")
    return found
