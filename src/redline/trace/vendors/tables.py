"""CSV as profilers write it: lines of chatter before, between and after, and numbers made for people."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from redline.model.errors import TraceError
from redline.trace.kernels import NamedTime

LARGEST_FILE_BYTES = 512 << 20

_UNITS = {
    "n": 1e-9,
    "u": 1e-6,
    "µ": 1e-6,
    "m": 1e-3,
    "": 1.0,
}
_BYTES = {"byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}


GZIP = b"\x1f\x8b"


def _unpacked(path: Path, body: bytes) -> bytes:
    """No more of it than a file of this kind may hold."""
    try:
        with gzip.open(io.BytesIO(body)) as file:
            text = file.read(LARGEST_FILE_BYTES + 1)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{path} is a gzip archive that cannot be unpacked: {error}") from None
    if len(text) > LARGEST_FILE_BYTES:
        raise TraceError(f"{path} unpacks to more than {LARGEST_FILE_BYTES >> 20} MiB: profile fewer steps")
    return text


def text_of(path: Path) -> str:
    try:
        if path.stat().st_size > LARGEST_FILE_BYTES:
            raise TraceError(f"{path} is larger than {LARGEST_FILE_BYTES >> 20} MiB: profile fewer steps")
        body = path.read_bytes()
        if body.startswith(GZIP):
            body = _unpacked(path, body)
        wide = body.startswith((b"\xff\xfe", b"\xfe\xff"))  # as some shells redirect
        return body.decode("utf-16" if wide else "utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise TraceError(f"no such file: {path}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


def rows_under(text: str, needed: Sequence[str]) -> Iterator[dict[str, str]]:
    """The rows below lines that name all of `needed`; lines with another number of cells are chatter.

    A line without any number begins another table, whose rows belong to these only where it names all of them too.
    """
    header: list[str] | None = None
    for cells in csv.reader(safe_lines(text)):
        stripped = [cell.strip() for cell in cells]
        if header is None or (len(cells) == len(header) and all(number(cell) is None for cell in stripped)):
            header = stripped if all(name in stripped for name in needed) else None
        elif len(cells) == len(header):
            yield dict(zip(header, stripped, strict=True))


def rows_lost(text: str, needed: Sequence[str], used: int) -> int:
    """Rows below a header that were not `used`, and the last line where the file ends in the middle of it."""
    return max(sum(1 for _ in rows_under(text, needed)) - used, 0) + ends_in_a_row(text)


def ends_in_a_row(text: str) -> bool:
    """Whether the last line was cut off; a file may end without a line break and be whole."""
    if text.endswith(("\n", "\r")):
        return False
    *_, before, last = ["", *(line for line in text.splitlines() if line.strip())][-2:] or ["", ""]
    cells = [len(row) for row in csv.reader(safe_lines(f"{before}\n{last}"))]
    return last.count('"') % 2 == 1 or (len(cells) == 2 and cells[0] > max(cells[1], 1))


def safe_lines(text: str) -> Iterator[str]:
    # A NUL, or a cell larger than csv allows, would end the reading with an error.
    limit = csv.field_size_limit()
    return (line for line in io.StringIO(text.replace("\0", "")) if len(line) < limit)


def number(text: str | None) -> float | None:
    """`1,234.5` or `87 %`; None for `n/a`, nothing and nonsense."""
    if text is None:
        return None
    try:
        value = float(text.replace(",", "").replace("%", "").strip())
    except ValueError:
        return None
    return value if value == value and abs(value) != float("inf") else None


def nanoseconds(value: float, unit: str) -> float | None:
    """A time in ns, nsecond, us, usecond, ms, msecond, s or second."""
    word = unit.strip().lower()
    for ending in ("second", "sec", "s"):
        if word.endswith(ending) and word[: -len(ending)] in _UNITS:
            return value * _UNITS[word[: -len(ending)]] * 1e9
    return value if not word else None


def size_in_bytes(value: float, unit: str) -> float | None:
    """A size in byte, Kbyte, Mbyte, Gbyte; a bare number is bytes."""
    word = unit.strip().lower().removesuffix("s")
    return value * _BYTES[word] if word in _BYTES else (value if not word else None)


def added_up(calls: Iterable[tuple[str, float]]) -> list[NamedTime]:
    """From name and nanoseconds of each call to the table by name, longest first."""
    durations: dict[str, list[int]] = {}
    for name, nanosecond in calls:
        durations.setdefault(name, []).append(round(nanosecond))
    rows = [NamedTime(name, len(each), sum(each), min(each), max(each)) for name, each in durations.items()]
    return sorted(rows, key=lambda row: (-row.total_ns, row.name))


def dispatches(text: str) -> list[NamedTime]:
    """One row per dispatch with its beginning and end, as rocprofv2, rocprofv3 and rocprof-compute write them."""
    for start, end in (
        ("Start_Timestamp", "End_Timestamp"),
        ("Begin_Timestamp", "End_Timestamp"),
        ("BeginNs", "EndNs"),
    ):
        for name in ("Kernel_Name", "KernelName"):
            found = [
                (row[name], ended - began)
                for row in rows_under(text, (name, start, end))
                if (began := number(row[start])) is not None
                and (ended := number(row[end])) is not None
                and ended >= began
            ]
            if found:
                return added_up(found)
    return []


def statistics(text: str, columns: Mapping[str, str], unit_ns: float = 1.0) -> list[NamedTime]:
    """One row per kernel with its sums; `columns` maps name, calls, total, min and max to the tool's words.

    `unit_ns`: the nanoseconds of what its times count.
    """
    rows = []
    for row in rows_under(text, (columns["name"], columns["calls"], columns["total"])):
        calls, total = number(row[columns["calls"]]), number(row[columns["total"]])
        if calls is None or total is None or calls < 1 or total < 0:
            continue
        low, high = number(row.get(columns.get("min", ""))), number(row.get(columns.get("max", "")))
        rows.append(
            NamedTime(
                name=row[columns["name"]],
                calls=int(calls),
                total_ns=round(total * unit_ns),
                min_ns=None if low is None else round(low * unit_ns),
                max_ns=None if high is None else round(high * unit_ns),
            )
        )
    return sorted(rows, key=lambda row: (-row.total_ns, row.name))
