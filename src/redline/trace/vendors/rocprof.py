"""rocprof, the first one. Written from its documentation; it has not met the hardware yet."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from redline.errors import TraceError
from redline.note import note
from redline.trace.vendors.tables import dispatches, statistics, text_of
from redline.trace.vendors.tool import TOOLS, VendorTable, VendorTool

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
