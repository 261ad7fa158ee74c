"""ROCm's profilers: rocprof, rocprofv2, rocprofv3, and rocprof-compute (once Omniperf), which reads hardware counters.

Written from their documentation; not tested on AMD GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from redline.model.errors import TraceError
from redline.model.note import note
from redline.trace.vendors.tables import dispatches, number, statistics, text_of
from redline.trace.vendors.tool import TOOLS, CounterName, FollowUp, Reading, VendorTable, VendorTool

STATISTICS_COLUMNS = {
    "name": "Name",
    "calls": "Calls",
    "total": "TotalDurationNs",
    "min": "MinNs",
    "max": "MaxNs",
}
WHOLE_PROCESS = note(
    "profiler", "the table covers the whole worker, with building and warm-up: this tool cannot be told when to record"
)


class OlderRocprof(VendorTool):
    """What the tools before rocprofv3 have in common."""

    devices: ClassVar[tuple[str, ...]] = ("rocm",)
    also_in: ClassVar[tuple[str, ...]] = ("/opt/rocm/bin",)
    how_to_get = "install the ROCm package rocprofiler (ROCm 7 ships rocprofv3 instead: try --tool rocprofv3)"
    steps: ClassVar[int] = 20


@TOOLS.register("rocprof")
class Rocprof(OlderRocprof):
    name = "rocprof"

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return ("rocprof", "--stats", "-o", str(folder / "results.csv"))

    def read(self, folder: Path) -> VendorTable:
        kernels = statistics(text_of(folder / "results.stats.csv"), STATISTICS_COLUMNS)
        if not kernels:
            raise TraceError(f"rocprof reports no kernels: see {folder}")
        return VendorTable(kernels=kernels, notes=(WHOLE_PROCESS,))


@TOOLS.register("rocprofv2")
class Rocprofv2(OlderRocprof):
    name = "rocprofv2"

    def prefix(self, folder: Path) -> tuple[str, ...]:
        # Its timelines for Perfetto are protobuf; the file plug-in writes the same dispatches as text.
        return ("rocprofv2", "--kernel-trace", "--plugin", "file", "-d", str(folder), "-o", "results")

    def read(self, folder: Path) -> VendorTable:
        for path in sorted(folder.rglob("*.csv")):
            kernels = dispatches(text_of(path))
            if kernels:
                return VendorTable(kernels=kernels, notes=(WHOLE_PROCESS,))
        raise TraceError(f"rocprofv2 reports no kernels: see {folder}")


@TOOLS.register("rocprofv3")
class Rocprofv3(VendorTool):
    name = "rocprofv3"
    devices: ClassVar[tuple[str, ...]] = ("rocm",)
    also_in: ClassVar[tuple[str, ...]] = ("/opt/rocm/bin",)
    how_to_get = "install the ROCm package rocprofiler-sdk"
    steps: ClassVar[int] = 20

    def prefix(self, folder: Path) -> tuple[str, ...]:
        # Without the format ROCm 7 writes a database instead.
        options = ("--kernel-trace", "--stats", "--output-format", "csv", "-d", str(folder), "-o", "results", "--")
        return ("rocprofv3", *options)

    def read(self, folder: Path) -> VendorTable:
        for path in sorted(folder.rglob("*kernel_stats.csv")):
            kernels = statistics(text_of(path), STATISTICS_COLUMNS)
            if kernels:
                return VendorTable(kernels=kernels, notes=(WHOLE_PROCESS,))
        for path in sorted(folder.rglob("*kernel_trace.csv")):
            kernels = dispatches(text_of(path))
            if kernels:
                return VendorTable(kernels=kernels, notes=(WHOLE_PROCESS,))
        raise TraceError(f"rocprofv3 reports no kernels: see {folder}")


# Names differ between versions; the share is either the value itself or the share of the peak.
_METRICS: tuple[tuple[str, CounterName, bool], ...] = (
    (r"^hbm (bandwidth|bw)$", "bandwidth", True),
    (r"^l2-fabric read (bandwidth|bw)$", "bandwidth", True),
    (r"^wave(front)? occupancy$", "occupancy", True),
    (r"^(vector l1d?|vl1d) cache hit rate$|^vl1d hit rate$", "l1_hits", False),
    (r"^l2 (cache )?hit rate$", "l2_hits", False),
)
_ALL_KERNELS = "all kernels"


@TOOLS.register("rocprof-compute")
class RocprofCompute(VendorTool):
    """It runs its target once for each group of counters, so the worker follows a script instead of a desk."""

    name = "rocprof-compute"
    devices: ClassVar[tuple[str, ...]] = ("rocm",)
    also_in: ClassVar[tuple[str, ...]] = ("/opt/rocm/bin",)
    how_to_get = "install the ROCm package rocprofiler-compute, and its Python requirements"
    steps: ClassVar[int] = 1
    replays: ClassVar[bool] = True

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return ("rocprof-compute", "profile", "-n", "redline", "-p", str(folder / "workload"), "--")

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        where = next((path.parent for path in sorted(folder.rglob("pmc_perf.csv"))), folder / "workload")
        command = ("rocprof-compute", "analyze", "-p", str(where), "-b", "2", "3", "4")
        return [FollowUp(command=command, output=folder / "analysis.txt")]

    def read(self, folder: Path) -> VendorTable:
        for path in sorted(folder.rglob("pmc_perf.csv")):
            kernels = dispatches(text_of(path))
            if kernels:
                readings = list(counters_in(text_of(folder / "analysis.txt")))
                return VendorTable(kernels=kernels, readings=readings, notes=(WHOLE_PROCESS,))
        raise TraceError(f"rocprof-compute reports no kernels: see {folder}")


def counters_in(text: str) -> Iterator[Reading]:
    """From the tables that `analyze` draws with lines."""
    columns: list[str] = []
    seen: set[CounterName] = set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│|]", line)[1:-1]]
        lowered = [cell.lower() for cell in cells]
        if "metric" in lowered and "unit" in lowered:
            columns = lowered
        elif columns and len(cells) == len(columns):
            row = dict(zip(columns, cells, strict=True))
            reading = _reading(row)
            if reading is not None and reading.name not in seen:
                seen.add(reading.name)
                yield reading


def _reading(row: dict[str, str]) -> Reading | None:
    metric = row["metric"]
    for rule, name, of_peak in _METRICS:
        if not re.match(rule, metric.lower()):
            continue
        peak = next((row[key] for key in ("pct of peak", "pop", "percent of peak") if key in row), None)
        own = next((row[key] for key in ("avg", "value", "mean") if key in row), None)
        value = number(peak if of_peak else own)
        if value is not None and value >= 0:
            return Reading(name=name, metric=metric, kernel=_ALL_KERNELS, value=value / 100, weight=1.0)
    return None
