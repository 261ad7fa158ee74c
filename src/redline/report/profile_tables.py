"""A profile's tables for other programs: kernels as CSV, everything as a workbook or as Parquet files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from redline.analyze.profile import Profile
from redline.errors import UsageError
from redline.report.export import harmless

COLUMNS = ("Name", "Calls", "TotalDurationNs", "AverageNs", "Percentage")

TABLES = (
    "findings", "losses", "classes", "kernels", "operators", "limits", "copies", "waits", "collectives", "stragglers",
    "phases", "counters", "parts",
)  # fmt: skip
"""The fields of a profile that are tables, in the order of a workbook's sheets."""

LONGEST_CELL = 32_000
"""A workbook's cell holds no more."""


def kernel_csv(profile: Profile) -> str:
    """The kernel table in the layout of `rocprof --stats`; where the host is the device, its operators."""
    text = io.StringIO()
    # rocprof quotes names and nothing else.
    writer = csv.writer(text, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n")
    writer.writerow(COLUMNS)
    for name, calls, seconds, share in _kernels_or_operators(profile):
        total = round(seconds * 1e9)
        writer.writerow((harmless(name), calls, total, round(total / calls) if calls else 0, round(share * 100, 6)))
    return text.getvalue()


def _kernels_or_operators(profile: Profile) -> list[tuple[str, int, float, float]]:
    if profile.has_device:
        return [(row.name, row.calls, row.total_s, row.share) for row in profile.kernels]
    whole = sum(row.cpu_self_s for row in profile.operators)
    rows = sorted(profile.operators, key=lambda row: -row.cpu_self_s)
    return [(row.name, row.calls, row.cpu_self_s, row.cpu_self_s / whole if whole else 0.0) for row in rows]


def tables_of(profile: Profile) -> dict[str, list[dict[str, Any]]]:
    """Each table as rows of plain values; those without rows are left out."""
    found = {name: [_plain(row) for row in getattr(profile, name)] for name in TABLES}
    found["ranks"] = [_plain(row) for row in profile.ranks]
    found["critical path"] = [_plain(row) for row in profile.path.parts] if profile.path is not None else []
    return {name: rows for name, rows in found.items() if rows}


def write_tables(profile: Profile, path: Path) -> list[Path]:
    """A workbook where the path ends in `.xlsx`, else a folder with a Parquet file per table. Returns what was written."""
    tables = tables_of(profile)
    if path.suffix.lower() == ".xlsx":
        return [_write_workbook(tables, path)]
    if path.suffix.lower() in (".csv", ".json", ".parquet", ".xls"):
        raise UsageError(f"--tables takes a file .xlsx, or a folder for Parquet files; got {path}")
    return _write_parquet(tables, path)


def _write_workbook(tables: dict[str, list[dict[str, Any]]], path: Path) -> Path:
    try:
        from openpyxl import Workbook
    except ImportError:
        raise UsageError("a workbook needs openpyxl: pip install 'redline[tables]'") from None
    book = Workbook(write_only=True)
    for name, rows in tables.items():
        sheet = book.create_sheet(name)
        header = list(dict.fromkeys(key for row in rows for key in row))
        sheet.append(header)
        for row in rows:
            sheet.append([_cell(row.get(key)) for key in header])
    path.parent.mkdir(parents=True, exist_ok=True)
    book.save(path)
    return path


def _cell(value: Any) -> Any:
    # A workbook refuses control characters, and takes what begins with = for a formula.
    return (
        harmless("".join(one for one in value if one.isprintable()))[:LONGEST_CELL] if isinstance(value, str) else value
    )


def _write_parquet(tables: dict[str, list[dict[str, Any]]], folder: Path) -> list[Path]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UsageError("Parquet files need pyarrow: pip install 'redline[tables]'") from None
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, rows in tables.items():
        header = list(dict.fromkeys(key for row in rows for key in row))
        columns = {key: [row.get(key) for row in rows] for key in header}
        written.append(folder / f"{name}.parquet")
        parquet.write_table(pyarrow.table(columns), written[-1])
    return written


def _plain(row: msgspec.Struct) -> dict[str, Any]:
    """Values of one row; what is nested becomes columns of its own."""
    return _flat(msgspec.to_builtins(row))


def _flat(value: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, one in value.items():
        if isinstance(one, dict):
            found |= _flat(one, f"{prefix}{key}.")
        else:
            found[prefix + key] = (
                ", ".join(map(str, one)) if isinstance(one, Sequence) and not isinstance(one, str) else one
            )
    return found
