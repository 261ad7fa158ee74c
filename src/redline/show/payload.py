"""This module makes the table of the dashboard, column by column: it has what `results.csv` has, and what only the charts need."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, get_args

import msgspec
import numpy as np

from redline.analyze.blocks import latency_blocks
from redline.analyze.profile import Profile
from redline.model.metrics import Table
from redline.model.record import RunRecord, TelemetrySample
from redline.model.work import MemoryCategory
from redline.show.contents import Contents, line_row
from redline.show.result import Result, columns_of

DIGITS = 6
"""The page keeps this many digits of a number; `results.csv` and `results.json` keep all of them."""


def page_columns(contents: Contents) -> dict[str, Any]:
    """Returns each column as a list, or as a list of distinct texts with an index for each row. Columns without a value are left out."""
    rows = [line_row(line) for line in contents.lines]
    table = columns_of(Table(name="results", rows=tuple(rows)))
    table |= {
        "subject": [str(line.subject) for line in contents.lines],
        "item": [line.row.item for line in contents.lines],
        "notes": ["; ".join(map(str, row.notes)) or None for row in rows],
        "bound_evidence": [str(line.row.bound.evidence) for line in contents.lines],
        "command": [line.row.command("run", [line.row.recipe]) for line in contents.lines],
    }
    return {name: _packed(values) for name, values in table.items() if any(value is not None for value in values)}


def _shown(contents: Contents) -> dict[str, Any]:
    """Returns every figure as all outputs write it, by its name. The page shows these texts and rounds nothing itself."""
    rows = [line_row(line) for line in contents.lines]
    names = dict.fromkeys(metric.name for row in rows for metric in row.metrics)
    return {name: _packed([row.cell(name) if row.metric(name) is not None else None for row in rows]) for name in names}


def _packed(values: Sequence[Any]) -> Any:
    if any(isinstance(value, str) for value in values):
        texts = list(dict.fromkeys(value for value in values if value is not None))
        index = {text: number for number, text in enumerate(texts)}
        return {"texts": texts, "at": [None if value is None else index[value] for value in values]}
    return [short(value) for value in values]


def short(value: Any, digits: int = DIGITS) -> Any:
    """Returns a number with few digits; one that is not finite is unknown."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return value


PAYLOAD_SCHEMA = 1
DRAWN = ("epochs", "loads", "knees", "gains")
"""These tables of the report are drawn as charts, too."""

DISTRIBUTIONS = 200
TELEMETRY_RECORDS = 60
PROFILES = 40
MEMORIES = 20
MOST_LINES = 5000
"""Only this many of the newest are in the page, because a page of thousands of records must still open at once."""
QUANTILES = 61
"""A distribution of latency has at most this many points."""
TELEMETRY_SAMPLES = 400
"""The telemetry of a record is thinned out to about this many looks."""
KERNELS = 40

TELEMETRY = ("utilisation", "memory_used_bytes", "power_w", "temperature_c", "clock_hz")


def payload_of(contents: Contents, result: Result) -> dict[str, Any]:
    """Returns what the page's scripts draw. Charts of epochs, loads, knees and gains read the tables of the report itself."""
    return {
        "schema": PAYLOAD_SCHEMA,
        "count": len(contents.lines),
        "records": len(contents.records),
        "columns": page_columns(contents),
        "shown": _shown(contents),
        "tables": {table.name: _lines(table, contents) for table in result.tables if table.name in DRAWN},
        "csv_columns": list(columns_of(Table(name="results", rows=tuple(map(line_row, contents.lines))))),
        "distributions": list(_distributions(contents)),
        "telemetry": list(_telemetry(contents)),
        "profiles": list(_profiles(contents)),
        "rooflines": msgspec.to_builtins(contents.rooflines),
        "lanes": list(_lanes(contents)),
        "processes": _processes(contents),
        "memories": list(_memories(contents)),
    }


def as_json(payload: dict[str, Any]) -> str:
    """Returns JSON that may stand inside a script element: nothing in it ends the element or, in older engines, a line."""
    text = msgspec.json.encode(payload).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _lines(table: Table, contents: Contents) -> dict[str, Any]:
    """Returns a table column by column, with the number of the dashboard's row that each of its rows is about."""
    numbers, rows = numbers_of(contents), table.rows[-MOST_LINES:]
    columns = columns_of(msgspec.structs.replace(table, rows=rows))
    return {
        "rows": [numbers.get(row.record_id) for row in rows],
        "columns": {name: _packed(values) for name, values in columns.items()},
    }


def numbers_of(contents: Contents) -> dict[str, int]:
    """Returns, for each record, the number of the line to which it belongs."""
    return {record.id: number for number, line in enumerate(contents.lines) for record, _ in line.processes}


def _distributions(contents: Contents) -> Iterator[dict[str, Any]]:
    """Yields the quantile function of each record's latency, which shows two humps where a box would hide them."""
    records, numbers = contents.records, numbers_of(contents)
    for number in _newest(records, DISTRIBUTIONS, lambda record: record.failure is None and bool(_latencies(record))):
        samples = _latencies(records[number])
        shares = np.linspace(0, 1, min(QUANTILES, len(samples)))
        line = numbers[records[number].id]
        yield {"row": line, "n": len(samples), "s": [short(float(each)) for each in np.quantile(samples, shares)]}


def _latencies(record: RunRecord) -> list[float]:
    return list(chain.from_iterable(block.samples for block in latency_blocks(record)))


def _telemetry(contents: Contents) -> Iterator[dict[str, Any]]:
    """Yields how the device was seen, by seconds since the record's first block. An empty look stands between two blocks."""
    records, numbers = contents.records, numbers_of(contents)
    for number in _newest(records, TELEMETRY_RECORDS, _has_telemetry):
        looks = _looks(records[number])
        start = min(at for at, _ in looks)
        series = {name: [short(getattr(look, name), 4) for _, look in looks] for name in TELEMETRY}
        known = {name: values for name, values in series.items() if any(value is not None for value in values)}
        throttle = [";".join(look.throttle) for _, look in looks]
        yield {
            "row": numbers[records[number].id],
            "t": [round(at - start, 3) for at, _ in looks],
            "series": known,
            "throttle": throttle if any(throttle) else [],
        }


def _looks(record: RunRecord) -> list[tuple[float, TelemetrySample]]:
    """Returns looks with their times, thinned out. An empty one ends each block, so that no line is drawn across a gap."""
    every = sum(len(block.telemetry) for block in record.blocks)
    step = max(1, every // TELEMETRY_SAMPLES)
    looks: list[tuple[float, TelemetrySample]] = []
    for block in sorted(record.blocks, key=lambda block: block.started_at):
        kept = block.telemetry[::step]
        looks += [(block.started_at + look.at_s, look) for look in kept]
        if kept:
            looks.append((block.started_at + kept[-1].at_s, TelemetrySample(at_s=kept[-1].at_s)))
    return looks[:-1]


def _has_telemetry(record: RunRecord) -> bool:
    return any(
        getattr(look, name) is not None for block in record.blocks for look in block.telemetry for name in TELEMETRY
    )


def _profiles(contents: Contents) -> Iterator[dict[str, Any]]:
    numbers = numbers_of(contents)
    for profile in contents.profiles[-PROFILES:]:
        if profile.capture is not None and profile.capture.record_id in numbers:
            yield {"row": numbers[profile.capture.record_id], **_profile(profile)}


def _profile(profile: Profile) -> dict[str, Any]:
    return {
        "bound": profile.bound.label,
        "classes": [
            {"name": row.name, "total_s": short(row.total_s), "share": short(row.share), "calls": row.calls}
            for row in profile.classes
        ],
        "phases": [
            {"name": phase.name, "host_s": short(phase.host_s), "device_s": short(phase.device_s)}
            for phase in profile.phases
        ],
        "steps": profile.steps_seen,
        "findings": [finding.code for finding in profile.findings],
        "kernels": [
            {
                "name": row.short_name[:120],
                "class": row.kernel_class,
                "calls": row.calls,
                "total_s": short(row.total_s),
                "mean_s": short(row.mean_s),
                "share": short(row.share),
            }
            for row in profile.kernels[:KERNELS]
        ],
    }


def _lanes(contents: Contents) -> Iterator[dict[str, Any]]:
    numbers = numbers_of(contents)
    for record_id, lanes in contents.lanes.items():
        if record_id in numbers:
            yield {"row": numbers[record_id], **msgspec.to_builtins(lanes)}


PROCESSES = 30
"""Each line shows this many of its processes, which are the newest."""


def _processes(contents: Contents) -> dict[str, list[list[Any]]]:
    """Returns what is shown of each process: its record, its speed and how far it can be trusted. The key is the number of its line.

    Lines that only one process has measured are left out.
    """
    return {
        str(number): [
            [record.id, short(row.throughput_per_s), ", ".join(row.verdict.labels)]
            for record, row in line.processes[-PROCESSES:]
        ]
        for number, line in enumerate(contents.lines)
        if len(line.processes) > 1
    }


def _memories(contents: Contents) -> Iterator[dict[str, Any]]:
    """Yields the bytes that each kind takes over a step, and what the allocator reserved; the newest come first."""
    for row in list(reversed(contents.memories))[:MEMORIES]:
        points = row.use.timeline
        kinds = [kind for kind in get_args(MemoryCategory) if any(point.categories.get(kind) for point in points)]
        batch = f"batch {row.batch}" if row.batch else ""
        yield {
            "name": " · ".join(part for part in (row.model, row.task, row.recipe, batch, row.device) if part),
            "at": [short(point.at) for point in points],
            "phase": [point.phase for point in points],
            "kinds": {kind: [point.categories.get(kind, 0) for point in points] for kind in kinds},
            "reserved": [point.reserved_bytes for point in points],
            "peak_bytes": row.use.peak_bytes,
        }


def _newest(records: Sequence[RunRecord], most: int, fits: Any) -> list[int]:
    """Returns the indices that the newest of the fitting records have, in their own order."""
    fitting = [number for number, record in enumerate(records) if fits(record)]
    newest = sorted(fitting, key=lambda number: records[number].created_at)[-most:]
    return sorted(newest)
