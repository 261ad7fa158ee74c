"""This module reads kernel tables and hardware counters that other profilers write. What is in a file counts, never its name.

It reads rocprof, rocprofv2 and rocprofv3 (CSV, JSON, rocpd database), nsys (`nsys stats` CSV, SQLite export) and ncu (CSV).
There are lines of chatter before, between and after the rows, and numbers made for people. The readers were written from
the published formats. The ROCm files have not been tested on AMD hardware.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import sqlite3
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from redline.model.errors import TraceError
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.units import counted
from redline.trace.tables import NamedTime, added_up

# This part has hardware counters in one vocabulary.

CounterName = Literal["bandwidth", "occupancy", "l1_hits", "l2_hits", "compute", "traffic", "lds_conflicts"]
Verdict = Literal["memory-bound", "poor", "high", "fine"]


class Counter(Frozen):
    name: CounterName
    kernel: str | None
    """None means all kernels together, weighted by their time."""
    value: float
    """It is a share between 0 and 1. For `traffic` it is bytes."""
    verdict: Verdict
    meaning: str
    metric: str
    """This is the tool's own name for it."""
    unit: Literal["share", "bytes"] = "share"


@dataclass(frozen=True)
class Reading:
    """This is one value of one counter for one call of a kernel, or for all of them."""

    name: CounterName
    metric: str
    kernel: str
    value: float
    weight: float
    """It is nanoseconds, or 1 if the tool gives no time."""


_POOR_HITS: tuple[Verdict, str] = (
    "poor",
    "poor access pattern, or data used only once: strided or scattered reads, wrong layout",
)
_MEANINGS: dict[CounterName, tuple[float, tuple[Verdict, str], tuple[Verdict, str]]] = {
    "bandwidth": (
        0.8,
        ("fine", "device memory is not the limit"),
        ("memory-bound", "device memory is the limit: fuse (compile), use a smaller number format, move less"),
    ),
    "occupancy": (
        0.3,
        ("poor", "few threads in flight: small launches, or many registers or much shared memory per thread"),
        ("fine", "enough threads in flight to hide latency"),
    ),
    "l1_hits": (0.7, _POOR_HITS, ("fine", "most accesses are served by the cache")),
    "l2_hits": (0.7, _POOR_HITS, ("fine", "most accesses are served by the cache")),
    "compute": (
        0.8,
        ("fine", "the arithmetic units are not the limit"),
        ("high", "the arithmetic units are the limit: a faster number format is what is left"),
    ),
    "traffic": (0.0, ("fine", ""), ("fine", "bytes moved to and from device memory")),
    "lds_conflicts": (
        0.05,
        ("fine", "few bank conflicts in shared memory (LDS)"),
        ("poor", "shared memory (LDS) waits for bank conflicts: pad or swizzle the tile, or use a library kernel"),
    ),
}
"""Each counter has a threshold, as the vendors' own guides give it, and what values up to it and above it mean."""


def counters_of(readings: Iterable[Reading], kernels: Sequence[str]) -> list[Counter]:
    """Returns the counters over all kernels first, then those of each of `kernels` by itself."""
    gathered = list(readings)
    own = [([one for one in gathered if one.kernel == kernel], kernel) for kernel in kernels]
    return [counter for some, kernel in ((gathered, None), *own) for counter in _means(some, kernel)]


def bandwidth_share(counters: Iterable[Counter]) -> float | None:
    return next((one.value for one in counters if one.name == "bandwidth" and one.kernel is None), None)


def _means(readings: list[Reading], kernel: str | None) -> Iterable[Counter]:
    """Yields the means of the counters. Shares are weighted by time, because a kernel that runs long says more than one
    that runs often. Bytes are added up."""
    by_name: defaultdict[CounterName, list[Reading]] = defaultdict(list)
    for reading in readings:
        by_name[reading.name].append(reading)
    for name, (threshold, low, high) in _MEANINGS.items():
        is_sum = name == "traffic"
        weight = sum(1.0 if is_sum else one.weight for one in by_name[name])
        if weight <= 0:
            continue
        value = sum(one.value * (1.0 if is_sum else one.weight / weight) for one in by_name[name])
        verdict, meaning = high if value > threshold else low
        metric = by_name[name][-1].metric
        yield Counter(
            name=name,
            kernel=kernel,
            value=value,
            verdict=verdict,
            meaning=meaning,
            metric=metric,
            unit="bytes" if is_sum else "share",
        )


# This part has tables.

LARGEST_FILE_BYTES = 512 << 20
"""Larger files are refused, because a table is read into memory as a whole."""
HEADER_LINES = 200
"""A header is looked for among this many lines, to say what kind of file it is."""
KNOWN = "rocprof, rocprofv2 or rocprofv3 (CSV, JSON, rocpd), nsys (stats CSV, SQLite) or ncu (CSV)"
GZIP, SQLITE = b"\x1f\x8b", "SQLite format 3"


@dataclass(frozen=True)
class VendorTable:
    """This is what a tool told, in Redline's own terms."""

    kernels: Sequence[NamedTime]
    readings: Sequence[Reading] = ()
    notes: tuple[Note, ...] = ()


def merged(tables: Sequence[VendorTable]) -> VendorTable:
    """Returns several files of one program as one table. Their kernels are added up and their readings joined."""
    if len(tables) == 1:
        return tables[0]
    return VendorTable(
        kernels=added_up(row for table in tables for row in table.kernels),
        readings=[one for table in tables for one in table.readings],
        notes=tuple(dict.fromkeys(one for table in tables for one in table.notes)),
    )


def _call(name: str, duration: float) -> NamedTime:
    ns = round(duration)
    return NamedTime(name, 1, ns, ns, ns)


# This part reads text and numbers.


def text_of(path: Path) -> str:
    try:
        with path.open("rb") as file, gzip.open(file) if file.peek(2)[:2] == GZIP else file as body:
            text = body.read(LARGEST_FILE_BYTES + 1)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise TraceError(f"{path} is a gzip archive that cannot be unpacked: {error}") from None
    except FileNotFoundError:
        raise TraceError(f"no such file: {path}") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if len(text) > LARGEST_FILE_BYTES:
        raise TraceError(f"{path} is larger than {LARGEST_FILE_BYTES >> 20} MiB: profile fewer steps")
    return text.decode("utf-8-sig", errors="replace").replace("\0", "")


def lines_of(text: str) -> Iterator[list[str]]:
    # A cell larger than csv allows would end the reading with an error, so such lines are skipped.
    return csv.reader(line for line in io.StringIO(text) if len(line) < csv.field_size_limit())


def rows_under(text: str, needed: Iterable[str]) -> Iterator[dict[str, str]]:
    """Yields the rows below lines that name all of `needed`. Lines with another number of cells are chatter.

    A line without any number begins another table, whose rows belong to these only if it names all of them too.
    """
    header: list[str] | None = None
    for cells in lines_of(text):
        stripped = [cell.strip() for cell in cells]
        if header is None or (len(cells) == len(header) and all(number(cell) is None for cell in stripped)):
            header = stripped if set(needed) <= set(stripped) else None
        elif len(cells) == len(header):
            yield dict(zip(header, stripped, strict=True))


def ends_in_a_row(text: str) -> bool:
    """Returns whether the last line was cut off. A file may end without a line break and be whole."""
    before, last = ["", "", *(line for line in text.splitlines() if line.strip())][-2:]
    cells = [len(row) for row in lines_of(f"{before}\n{last}")]
    is_short = last.count('"') % 2 == 1 or (len(cells) == 2 and cells[0] > max(cells[1], 1))
    return is_short and not text.endswith(("\n", "\r"))


def number(text: str | None) -> float | None:
    """Returns the number in `1,234.5` or `87 %`. Returns None for `n/a`, nothing, nonsense, and values that are below zero
    or not finite."""
    try:
        value = float((text or "").replace(",", "").replace("%", "").strip())
    except ValueError:
        return None
    return value if 0 <= value < float("inf") else None


_SCALES = {"n": 1.0, "u": 1e3, "µ": 1e3, "μ": 1e3, "m": 1e6, "": 1e9}
_BYTES = {"": 1.0, "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12}


def nanoseconds(value: float, unit: str) -> float | None:
    """Returns a time in ns, nsecond, us, usecond, ms, msecond, s or second as nanoseconds. A bare number is nanoseconds."""
    word = unit.strip().lower()
    prefix = next((word[: -len(end)] for end in ("second", "sec", "s") if word.endswith(end)), "?") if word else "n"
    return value * _SCALES[prefix] if prefix in _SCALES else None


def size_in_bytes(value: float, unit: str) -> float | None:
    """Returns a size in byte, Kbyte, Mbyte or Gbyte as bytes. A bare number is bytes."""
    word = unit.strip().lower().removesuffix("s")
    return value * _BYTES[word] if word in _BYTES else None


# This part reads tables with sums, and tables with one row for each dispatch.


@dataclass(frozen=True)
class Layout:
    """This is one way to write kernels as rows. Its columns are a kernel's name, calls and time, or name, beginning and end."""

    tool: str
    kind: str
    """People call such a file by this name."""
    columns: tuple[str, ...]
    extremes: tuple[str, ...] = ()
    """These columns have the shortest and the longest call of a sum. There are none if each row is one dispatch."""
    unit: str = "ns"

    def rows(self, text: str) -> tuple[list[NamedTime], int]:
        """Returns the rows that could be read, and how many could not."""
        found, lost, counter = [], int(ends_in_a_row(text)), None
        name, *values = self.columns
        for row in rows_under(text, self.columns):
            # A collection of counters repeats each dispatch for every counter.
            counter = counter or row.get("Counter_Name")
            if row.get("Counter_Name") != counter:
                continue
            first, second, *extremes = (number(row.get(column)) for column in (*values, *self.extremes))
            if first is None or second is None or (first < 1 if self.extremes else second < first):
                lost += 1
            elif not self.extremes:
                found.append(_call(row[name], second - first))
            else:
                ns = [
                    None if value is None else round(nanoseconds(value, self.unit) or 0)
                    for value in (second, *extremes)
                ]
                found.append(NamedTime(row[name], int(first), ns[0] or 0, ns[1], ns[2]))
        return found, lost


_STAMPS = (("Start_Timestamp", "End_Timestamp"), ("Begin_Timestamp", "End_Timestamp"), ("BeginNs", "EndNs"))
_KERNEL_NAMES = ("Kernel_Name", "KernelName")
NCU_COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Value")
LAYOUTS = (
    *(
        Layout(
            "nsys",
            "nsys stats",
            ("Name", "Instances", f"Total Time ({unit})"),
            (f"Min ({unit})", f"Max ({unit})"),
            unit,
        )
        for unit in ("ns", "us", "μs", "ms", "s")  # `nsys stats --timeunit` chooses the unit
    ),
    Layout("rocprof", "rocprof --stats", ("Name", "Calls", "TotalDurationNs"), ("MinNs", "MaxNs")),
    *(Layout("rocprof", "a kernel trace of rocprof", (name, *stamps)) for stamps in _STAMPS for name in _KERNEL_NAMES),
)


def kernel_table(text: str, source: str = "") -> tuple[str, VendorTable] | None:
    """Returns the tool that wrote a text, and its table. Returns None if no row of a kernel can be read."""
    tool, found, lost = "ncu", read_ncu(text), int(ends_in_a_row(text))
    for layout in LAYOUTS if found is None else ():
        rows, lost = layout.rows(text)
        if rows:
            readings, notes = ([], ()) if layout.extremes else _rocm_counters(text)
            tool, found = layout.tool, VendorTable(added_up(rows), readings, notes)
            break
    if found is None:
        return None
    told = f"{counted(lost, 'row')} of {source} could not be read and left out: the file is cut off or damaged"
    return tool, replace(found, notes=(*found.notes, note("profiler", told))) if lost else found


ROCM_COUNTERS: dict[str, CounterName] = {
    "LDSBankConflict": "lds_conflicts",
    "OccupancyPercent": "occupancy",
    "L2CacheHit": "l2_hits",
    "MemUnitBusy": "bandwidth",
}
"""These are ROCm's derived counters by their published names. All are percentages."""


def _rocm_counters(text: str) -> tuple[list[Reading], tuple[Note, ...]]:
    """Reads counters that have a column each, as rocprof and rocprofv2 write them, or a row each, as rocprofv3 does."""
    readings, unknown = [], set()
    for kernel in _KERNEL_NAMES:
        for row in rows_under(text, (kernel,)):
            told = {row["Counter_Name"]: row.get("Counter_Value")} if "Counter_Name" in row else row
            unknown |= told.keys() - ROCM_COUNTERS.keys() if told is not row else set()
            stamps = ((number(row.get(start)), number(row.get(end))) for start, end in _STAMPS)
            # If the file has no times, all dispatches weigh the same.
            weight = next(
                (max(end - start, 0.0) for start, end in stamps if start is not None and end is not None), 1.0
            )
            readings += [
                Reading(name, metric, row[kernel], value / 100, weight)
                for metric, name in ROCM_COUNTERS.items()
                if (value := number(told.get(metric))) is not None
            ]
    text = f"not explained here: {', '.join(sorted(unknown)[:6])}; ask the profiler for {', '.join(ROCM_COUNTERS)}"
    return readings, (note("profiler", text),) if unknown else ()


# This part reads Nsight Compute.

DURATION = "gpu__time_duration.sum"
TRAFFIC = "dram__bytes.sum"
SHARES: dict[str, CounterName] = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "bandwidth",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "l1tex__t_sector_hit_rate.pct": "l1_hits",
    "lts__t_sector_hit_rate.pct": "l2_hits",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
}
_METRICS: dict[str, Callable[[float, str], float | None]] = {
    DURATION: nanoseconds,
    TRAFFIC: size_in_bytes,
    **dict.fromkeys(SHARES, lambda value, unit: value / 100),
}
_WORDS = ("DRAM Throughput", "Achieved Occupancy", "L1/TEX Hit Rate", "L2 Hit Rate", "Compute (SM) Throughput")
_IN_WORDS = {"Duration": DURATION, **dict(zip(_WORDS, SHARES, strict=True))}
"""ncu's own report names metrics like this in its sections, if no metric was asked for by name."""


def read_ncu(text: str) -> VendorTable | None:
    """Returns the table in ncu's CSV. Returns None if the text is something else."""
    calls: dict[tuple[str, str], tuple[str, dict[str, float]]] = {}
    for row in rows_under(text, NCU_COLUMNS):
        metric, value = _IN_WORDS.get(row["Metric Name"], row["Metric Name"]), number(row["Metric Value"])
        _, metrics = calls.setdefault((row.get("Process ID", ""), row["ID"]), (row["Kernel Name"], {}))
        if metric in _METRICS and value is not None:
            told = _METRICS[metric](value, row.get("Metric Unit", ""))
            metrics |= {} if told is None else {metric: told}
    times = [_call(name, metrics[DURATION]) for name, metrics in calls.values() if DURATION in metrics]
    readings = [
        Reading(SHARES.get(metric, "traffic"), metric, kernel, value, metrics.get(DURATION, 0.0))
        for kernel, metrics in calls.values()
        for metric, value in metrics.items()
        if metric != DURATION
    ]
    how = "ncu runs each kernel by itself, several times and with cold caches: times differ from those of a step"
    return VendorTable(added_up(times), readings, (note("profiler", how),)) if times else None


# The rest of this file reads whole files.

_EXPORTS = {
    ".nsys-rep": "is a report of nsys: 'nsys stats -r cuda_gpu_kern_sum --format csv {path}' makes a table of it",
    ".ncu-rep": "is a report of ncu: 'ncu --import {path} --csv' makes a table of it",
}


def read_file(path: Path) -> tuple[str, VendorTable]:
    """Returns the tool that wrote a file, and its table. Raises `TraceError` with a text that says what was found instead."""
    if path.is_dir():
        raise TraceError(f"{path} is a folder: name the file in it")
    if path.suffix in _EXPORTS:
        raise TraceError(f"{path} {_EXPORTS[path.suffix].format(path=path)}")
    text = text_of(path)
    if text.startswith(SQLITE):
        return _database(path)
    if text.lstrip()[:1] in ("{", "["):
        return _json(path, text)
    if (found := kernel_table(text, path.name)) is not None:
        return found
    raise TraceError(f"{path} {_nearly(text) if text.strip() else 'is empty'}")


def _nearly(text: str) -> str:
    """Returns why a text is no table: which table it is most like, and what is missing there."""
    kinds = [*((layout.kind, layout.columns) for layout in LAYOUTS), ("ncu --csv", NCU_COLUMNS)]
    lines = [{cell.strip() for cell in row} for row in islice(lines_of(text), HEADER_LINES)]
    found = [(len(line & set(needed)), kind, needed, line) for line in lines for kind, needed in kinds]
    most, kind, needed, line = max(found, key=lambda one: one[0] / len(one[2]), default=(0, "", (), set()))
    if needed and most == len(needed):
        return (
            f"has the columns of {kind} and no row that could be read: no kernel was recorded, or the file was cut off"
        )
    if most >= 2:
        missing = ", ".join(repr(name) for name in needed if name not in line)
        return f"looks like a table of {kind}, but its column {missing} is missing: was it renamed?"
    first = next((line for line in text.splitlines() if line.strip()), "")
    return f"is no kernel table Redline knows ({KNOWN}); it begins with {first[:80]!r}"


def _json(path: Path, text: str) -> tuple[str, VendorTable]:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{path} is not whole JSON: {error}") from None
    if isinstance(document, dict) and "rocprofiler-sdk-tool" in document:
        return "rocprofv3", _recorded(path, "rocprofv3", _sdk_dispatches(document["rocprofiler-sdk-tool"]))
    if isinstance(document, list) or "traceEvents" in document:
        raise TraceError(f"{path} is a timeline: read it with 'redline profile {path}'")
    raise TraceError(f"{path} is JSON, but none that Redline knows: {KNOWN}")


def _recorded(path: Path, tool: str, calls: Iterable[tuple[Any, Any, Any]]) -> VendorTable:
    """Returns the table of kernels with when they began and ended."""
    times = [
        _call(str(name), ended - began)
        for name, began, ended in calls
        if isinstance(began, int | float) and isinstance(ended, int | float) and ended >= began
    ]
    if not times:
        raise TraceError(f"{path}: {tool} recorded no kernel in it (was --kernel-trace given?)")
    return VendorTable(kernels=added_up(times))


def _sdk_dispatches(processes: Any) -> Iterator[tuple[Any, Any, Any]]:
    for process in processes if isinstance(processes, list) else [processes]:
        names = {
            symbol.get("kernel_id"): symbol.get("formatted_kernel_name") or symbol.get("kernel_name")
            for symbol in _dicts_at(process, "kernel_symbols")
        }
        for record in _dicts_at(process, "buffer_records", "kernel_dispatch"):
            kernel_id = (record.get("dispatch_info") or {}).get("kernel_id")
            yield (
                names.get(kernel_id) or f"kernel {kernel_id}",
                record.get("start_timestamp"),
                record.get("end_timestamp"),
            )


def _dicts_at(found: Any, *path: str) -> list[dict[str, Any]]:
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


_QUERIES: tuple[tuple[str, set[str], str], ...] = (
    (
        "nsys",
        {"CUPTI_ACTIVITY_KIND_KERNEL", "StringIds"},
        'SELECT s.value, k.start, k."end" FROM CUPTI_ACTIVITY_KIND_KERNEL k JOIN StringIds s ON s.id = k.demangledName',
    ),
    ("rocprofv3", {"kernels"}, 'SELECT name, start, "end" FROM kernels'),
)
"""The first query reads what `nsys export --type sqlite` writes, the second the rocpd database that ROCm 7 writes unless it
is told otherwise."""


def _database(path: Path) -> tuple[str, VendorTable]:
    try:
        with closing(sqlite3.connect(f"file:{path.absolute()}?mode=ro&immutable=1", uri=True)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}
            for tool, needed, query in _QUERIES:
                if needed <= tables:
                    return tool, _recorded(path, tool, connection.execute(query))
    except sqlite3.Error as error:
        raise TraceError(f"cannot read {path}: {error}") from None
    raise TraceError(
        f"{path} is a database without kernels Redline knows; it has {', '.join(sorted(tables)[:6]) or 'no table'}"
    )


# This part reads what `rocprof-compute analyze` prints.

_ANALYSED: tuple[tuple[str, CounterName, tuple[str, ...]], ...] = (
    (r"hbm (bandwidth|bw)$|l2-fabric read (bandwidth|bw)$", "bandwidth", ("pct of peak", "pop", "percent of peak")),
    (r"wave(front)? occupancy$", "occupancy", ("pct of peak", "pop", "percent of peak")),
    (r"(vector l1d?|vl1d) cache hit rate$|vl1d hit rate$", "l1_hits", ("avg", "value", "mean")),
    (r"l2 (cache )?hit rate$", "l2_hits", ("avg", "value", "mean")),
)
"""Names differ between versions. The share is either the value itself or the share of the peak, in one of these columns."""


def counters_in(text: str) -> Iterator[Reading]:
    """Yields the counters in the tables that `rocprof-compute analyze` draws with lines, each once."""
    columns: list[str] = []
    found: dict[CounterName, Reading] = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│|]", line)[1:-1]]
        if {"metric", "unit"} <= {cell.lower() for cell in cells}:
            columns = [cell.lower() for cell in cells]
            continue
        row = dict(zip(columns, cells, strict=False)) if len(cells) == len(columns) else {}
        metric = row.get("metric", "")
        for rule, name, keys in _ANALYSED:
            value = number(next((row[key] for key in keys if key in row), None))
            if re.match(rule, metric.lower()) and value is not None:
                found.setdefault(name, Reading(name, metric, "all kernels", value / 100, 1.0))
    yield from found.values()
