"""A profiler's own file, made anywhere: which tool wrote it is read from its contents, never from its name.

rocprof, rocprofv2 and rocprofv3 (CSV, JSON, rocpd database), nsys (`nsys stats` CSV, SQLite export) and ncu (CSV).
Written from the published formats; the ROCm files have not been tested on AMD hardware.
"""

from __future__ import annotations

import csv
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from redline.model.errors import TraceError
from redline.model.note import Note, note
from redline.model.units import counted
from redline.trace.kernels import NamedTime
from redline.trace.vendors.nvidia import NCU_COLUMNS, NSYS_COLUMNS, read_ncu
from redline.trace.vendors.rocm import STATISTICS_COLUMNS
from redline.trace.vendors.tables import (
    GZIP,
    added_up,
    dispatches,
    ends_in_a_row,
    number,
    rows_lost,
    rows_under,
    safe_lines,
    statistics,
    text_of,
)
from redline.trace.vendors.tool import CounterName, Reading, VendorTable

SQLITE = b"SQLite format 3\x00"
KNOWN = "rocprof, rocprofv2 or rocprofv3 (CSV, JSON, rocpd), nsys (stats CSV, SQLite) or ncu (CSV)"

# ROCm's derived counters by their published names; all are percentages.
ROCM_COUNTERS: dict[str, CounterName] = {
    "LDSBankConflict": "lds_conflicts",
    "OccupancyPercent": "occupancy",
    "L2CacheHit": "l2_hits",
    "MemUnitBusy": "bandwidth",
}
NSYS_UNITS = {"ns": 1.0, "us": 1e3, "μs": 1e3, "ms": 1e6, "s": 1e9}
"""What `nsys stats --timeunit` may have been told."""
_STAMPS = (("Start_Timestamp", "End_Timestamp"), ("Begin_Timestamp", "End_Timestamp"), ("BeginNs", "EndNs"))
_KERNEL_NAMES = ("Kernel_Name", "KernelName")
_DISPATCH_COLUMNS = [(name, *stamps) for name in _KERNEL_NAMES for stamps in _STAMPS]
TAB = 9
"""The first control character that a text may have."""
HEADER_LINES = 200
"""Among so many lines a header is looked for, to say what a file is like."""


def read_file(path: Path) -> tuple[str, VendorTable]:
    """The tool that wrote a file, and its table. Raises `TraceError` with what was found instead."""
    head = _head(path)
    if head.startswith(SQLITE):
        return _database(path)
    if head.lstrip()[:1] in (b"{", b"["):
        return _json(path)
    if what := _other_kind(path, head):
        raise TraceError(f"{path} {what}")
    return _csv(path, text_of(path))


_OTHER_KINDS = {b"\x89PNG": "a picture", b"\xff\xd8\xff": "a picture", b"GIF8": "a picture", b"%PDF": "a PDF"} | {
    b"PK\x03\x04": "a zip archive: unpack it first",
}


def _other_kind(path: Path, head: bytes) -> str:
    """What a file is that no reader here could read; nothing for text."""
    if path.suffix == ".nsys-rep":
        return f"is a report of nsys: 'nsys stats -r cuda_gpu_kern_sum --format csv {path}' makes a table of it"
    if path.suffix == ".ncu-rep":
        return f"is a report of ncu: 'ncu --import {path} --csv' makes a table of it"
    if found := next((what for magic, what in _OTHER_KINDS.items() if head.startswith(magic)), None):
        return f"is {found}; what can be read: {KNOWN}"
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):  # text in wide characters
        return ""
    if all(byte >= TAB for byte in head):
        return ""
    if head[:1] == b"\n":
        return (
            "looks like a Perfetto protobuf trace, which Redline does not read: "
            "write CSV or JSON instead (rocprofv3 --output-format csv json)"
        )
    return f"is a binary file that Redline does not know; what can be read: {KNOWN}"


def _head(path: Path) -> bytes:
    try:
        if path.is_dir():
            raise TraceError(f"{path} is a folder: name the file in it")
        if not path.is_file():
            raise TraceError(f"no such file: {path}")
        with path.open("rb") as file:
            head = file.read(4096)
        return text_of(path)[:4096].encode() if head.startswith(GZIP) else head
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


def _csv(path: Path, text: str) -> tuple[str, VendorTable]:
    if not text.strip():
        raise TraceError(f"{path} is empty")
    if (found := read_ncu(text)) is not None:
        return "ncu", _without(found, path, int(ends_in_a_row(text)))
    for unit, unit_ns in NSYS_UNITS.items():
        columns = _nsys_columns(unit)
        if kernels := statistics(text, columns, unit_ns):
            lost = rows_lost(text, _needed(columns), len(kernels))
            return "nsys", _without(VendorTable(kernels=kernels), path, lost)
    if kernels := statistics(text, STATISTICS_COLUMNS):
        lost = rows_lost(text, _needed(STATISTICS_COLUMNS), len(kernels))
        return "rocprof", _without(VendorTable(kernels=kernels), path, lost)
    readings = [*_counter_rows(text), *_counter_columns(text)]
    once = _once_per_dispatch(text)
    kernels = dispatches(once)
    if kernels:
        used = sum(kernel.calls for kernel in kernels)
        matching = (columns for columns in _DISPATCH_COLUMNS if any(True for _ in rows_under(once, columns)))
        lost = next((rows_lost(once, columns, used) for columns in matching), 0)
        table = VendorTable(kernels=kernels, readings=readings, notes=_unread_counters(text))
        return "rocprof", _without(table, path, lost)
    raise TraceError(f"{path} {_nearly(text)}")


def _nsys_columns(unit: str) -> dict[str, str]:
    return {key: column.replace("(ns)", f"({unit})") for key, column in NSYS_COLUMNS.items()}


def _needed(columns: Mapping[str, str]) -> tuple[str, str, str]:
    return columns["name"], columns["calls"], columns["total"]


def _without(table: VendorTable, path: Path, lost: int) -> VendorTable:
    """The table with a note of the rows that are missing in it."""
    if not lost:
        return table
    rows = counted(lost, "row")
    told = f"{rows} of {path.name} could not be read and {'are' if lost > 1 else 'is'} left out: the file is cut off or damaged"
    return replace(table, notes=(*table.notes, note("profiler", told)))


def _unread_counters(text: str) -> tuple[Note, ...]:
    names = {
        row["Counter_Name"]
        for kernel in _KERNEL_NAMES
        for row in rows_under(text, (kernel, "Counter_Name", "Counter_Value"))
    } - set(ROCM_COUNTERS)
    if not names:
        return ()
    told = f"not explained here: {', '.join(sorted(names)[:6])}; ask the profiler for {', '.join(ROCM_COUNTERS)}"
    return (note("profiler", told),)


def _nearly(text: str) -> str:
    """Why a text is no table: which one it is most like, and what is missing there."""
    kinds: list[tuple[str, Sequence[str]]] = [
        *(("nsys stats", _needed(_nsys_columns(unit))) for unit in NSYS_UNITS),
        ("rocprof --stats", _needed(STATISTICS_COLUMNS)),
        ("ncu --csv", NCU_COLUMNS),
        *(("a kernel trace of rocprof", columns) for columns in _DISPATCH_COLUMNS),
    ]
    lines = [{cell.strip() for cell in row} for row in islice(csv.reader(safe_lines(text)), HEADER_LINES)]
    found = [(len(line & set(needed)), kind, needed, line) for line in lines for kind, needed in kinds]
    most, kind, needed, line = max(found, key=lambda each: each[0] / len(each[2]), default=(0, "", (), set()))
    if needed and most == len(needed):
        return (
            f"has the columns of {kind} and no row that could be read: no kernel was recorded, or the file was cut off"
        )
    if most >= 2:
        missing = ", ".join(repr(name) for name in needed if name not in line)
        return f"looks like a table of {kind}, but its column {missing} is missing: was it renamed?"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"is no kernel table Redline knows ({KNOWN}); it begins with {first[:80]!r}"


def _counter_rows(text: str) -> Iterator[Reading]:
    """rocprofv3's counter collection: one row per dispatch and counter."""
    for kernel in _KERNEL_NAMES:
        for row in rows_under(text, (kernel, "Counter_Name", "Counter_Value")):
            name = ROCM_COUNTERS.get(row["Counter_Name"])
            value = number(row["Counter_Value"])
            if name is not None and value is not None and value >= 0:
                yield Reading(name, row["Counter_Name"], row[kernel], value / 100, _weight(row))


def _counter_columns(text: str) -> Iterator[Reading]:
    """rocprof and rocprofv2: one row per dispatch with a column per counter."""
    for kernel in _KERNEL_NAMES:
        for metric, name in ROCM_COUNTERS.items():
            for row in rows_under(text, (kernel, metric)):
                value = number(row[metric])
                if value is not None and value >= 0:
                    yield Reading(name, metric, row[kernel], value / 100, _weight(row))


def _weight(row: dict[str, str]) -> float:
    """Nanoseconds of the dispatch; 1 where the file has no times."""
    for start, end in _STAMPS:
        began, ended = number(row.get(start)), number(row.get(end))
        if began is not None and ended is not None and ended >= began:
            return ended - began
    return 1.0


def _once_per_dispatch(text: str) -> str:
    """A counter collection repeats each dispatch for every counter: keep the rows of the first counter."""
    first: str | None = None
    kept = []
    header: list[str] | None = None
    for line in text.splitlines():
        cells = [cell.strip().strip('"') for cell in line.split(",")]
        if header is None:
            if "Counter_Name" not in cells:
                kept.append(line)
                if any(name in cells for name in _KERNEL_NAMES):
                    return text
                continue
            header = cells
            kept.append(line)
            continue
        row = next(rows_under("\n".join((",".join(header), line)), ("Counter_Name",)), None)
        if row is None:
            continue
        first = first or row["Counter_Name"]
        if row["Counter_Name"] == first:
            kept.append(line)
    return "\n".join(kept)


def _json(path: Path) -> tuple[str, VendorTable]:
    try:
        document = json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not whole JSON: {error}") from None
    if isinstance(document, dict) and "rocprofiler-sdk-tool" in document:
        kernels = added_up(_sdk_dispatches(document["rocprofiler-sdk-tool"]))
        if not kernels:
            raise TraceError(f"{path}: rocprofv3 recorded no kernel in it (was --kernel-trace given?)")
        return "rocprofv3", VendorTable(kernels=kernels)
    if isinstance(document, list) or (isinstance(document, dict) and "traceEvents" in document):
        raise TraceError(f"{path} is a timeline: read it with 'redline profile {path}'")
    raise TraceError(f"{path} is JSON, but none that Redline knows: {KNOWN}")


def _sdk_dispatches(processes: Any) -> Iterator[tuple[str, float]]:
    for process in processes if isinstance(processes, list) else [processes]:
        symbols = _at(process, "kernel_symbols")
        names = {
            symbol.get("kernel_id"): symbol.get("formatted_kernel_name") or symbol.get("kernel_name")
            for symbol in symbols
            if isinstance(symbol, dict)
        }
        for record in _at(process, "buffer_records", "kernel_dispatch"):
            if not isinstance(record, dict):
                continue
            kernel_id = (record.get("dispatch_info") or {}).get("kernel_id")
            began, ended = record.get("start_timestamp"), record.get("end_timestamp")
            if isinstance(began, int) and isinstance(ended, int) and ended >= began:
                yield str(names.get(kernel_id) or f"kernel {kernel_id}"), float(ended - began)


def _at(found: Any, *path: str) -> Sequence[Any]:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, list) else []


def _database(path: Path) -> tuple[str, VendorTable]:
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro&immutable=1", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            for tool, needed, query in _QUERIES:
                if needed <= tables:
                    kernels = added_up(_finite(connection.execute(query)))
                    if not kernels:
                        raise TraceError(f"{path}: {tool} recorded no kernel in it")
                    return tool, VendorTable(kernels=kernels)
    except sqlite3.Error as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    raise TraceError(
        f"{path} is a database without kernels Redline knows; it has {', '.join(sorted(tables)[:6]) or 'no table'}"
    )


_QUERIES: tuple[tuple[str, set[str], str], ...] = (
    (
        "nsys",
        {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"},
        'SELECT s.value, k."end" - k.start FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName',
    ),
    ("rocprofv3", {"kernels"}, 'SELECT name, "end" - start FROM kernels'),
)
"""nsys export --type sqlite, and the rocpd database that ROCm 7 writes unless it is told otherwise."""


def _finite(rows: Iterable[tuple[Any, Any]]) -> Iterator[tuple[str, float]]:
    for name, duration in rows:
        if isinstance(duration, int | float) and duration >= 0:
            yield str(name), float(duration)


def merged(tables: Sequence[VendorTable]) -> VendorTable:
    """Several files of one program: their kernels added up, their readings together."""
    if len(tables) == 1:
        return tables[0]
    sums: dict[str, NamedTime] = {}
    for table in tables:
        for row in table.kernels:
            held = sums.get(row.name)
            sums[row.name] = row if held is None else held.plus(row)
    kernels = sorted(sums.values(), key=lambda row: (-row.total_ns, row.name))
    return VendorTable(
        kernels=kernels,
        readings=[one for table in tables for one in table.readings],
        notes=tuple(dict.fromkeys(one for table in tables for one in table.notes)),
    )
