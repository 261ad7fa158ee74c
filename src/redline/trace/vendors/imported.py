"""A profiler's own file, made anywhere: which tool wrote it is read from its contents, never from its name.

rocprof, rocprofv2 and rocprofv3 (CSV, JSON, rocpd database), nsys (`nsys stats` CSV, SQLite export) and ncu (CSV).
Written from the published formats; the ROCm files have not been tested on AMD hardware.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from redline.errors import TraceError
from redline.trace.kernels import NamedTime
from redline.trace.vendors.ncu import read_ncu
from redline.trace.vendors.nsys import COLUMNS as NSYS_COLUMNS
from redline.trace.vendors.rocprof import STATISTICS_COLUMNS
from redline.trace.vendors.tables import added_up, dispatches, number, rows_under, statistics, text_of
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


def read_file(path: Path) -> tuple[str, VendorTable]:
    """The tool that wrote a file, and its table. Raises `TraceError` with what was found instead."""
    head = _head(path)
    if head.startswith(SQLITE):
        return _database(path)
    if head.lstrip()[:1] in (b"{", b"["):
        return _json(path)
    is_wide_text = head.startswith((b"\xff\xfe", b"\xfe\xff"))
    if not is_wide_text and (head[:1] == b"\n" or b"\x00" in head):
        raise TraceError(
            f"{path} looks like a Perfetto protobuf trace, which Redline does not read: "
            "write CSV or JSON instead (rocprofv3 --output-format csv json)"
        )
    return _csv(path, text_of(path))


def _head(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise TraceError(f"no such file: {path}")
        with path.open("rb") as file:
            return file.read(4096)
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None


def _csv(path: Path, text: str) -> tuple[str, VendorTable]:
    if not text.strip():
        raise TraceError(f"{path} is empty")
    if (found := read_ncu(text)) is not None:
        return "ncu", found
    for unit, unit_ns in NSYS_UNITS.items():
        columns = {key: column.replace("(ns)", f"({unit})") for key, column in NSYS_COLUMNS.items()}
        if kernels := statistics(text, columns, unit_ns):
            return "nsys", VendorTable(kernels=kernels)
    if kernels := statistics(text, STATISTICS_COLUMNS):
        return "rocprof", VendorTable(kernels=kernels)
    readings = [*_counter_rows(text), *_counter_columns(text)]
    kernels = dispatches(_once_per_dispatch(text))
    if kernels:
        return "rocprof", VendorTable(kernels=kernels, readings=readings)
    first = next((line for line in text.splitlines() if line.strip()), "")
    raise TraceError(f"{path} is no kernel table Redline knows ({KNOWN}); it begins with {first[:80]!r}")


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
        raise TraceError(f"{path} is a timeline: read it with 'redline profile --trace {path}'")
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
            sums[row.name] = row if held is None else _joined(held, row)
    kernels = sorted(sums.values(), key=lambda row: (-row.total_ns, row.name))
    return VendorTable(kernels=kernels, readings=[one for table in tables for one in table.readings])


def _joined(one: NamedTime, other: NamedTime) -> NamedTime:
    lows = [value for value in (one.min_ns, other.min_ns) if value is not None]
    highs = [value for value in (one.max_ns, other.max_ns) if value is not None]
    return NamedTime(
        name=one.name,
        calls=one.calls + other.calls,
        total_ns=one.total_ns + other.total_ns,
        min_ns=min(lows, default=None),
        max_ns=max(highs, default=None),
    )
