"""rocprofv3, of the ROCprofiler SDK. Written from its documentation; it has not met the hardware yet."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from redline.errors import TraceError
from redline.trace.vendors.rocprof import STATISTICS_COLUMNS, WHOLE_PROCESS
from redline.trace.vendors.tables import dispatches, statistics, text_of
from redline.trace.vendors.tool import TOOLS, VendorTable, VendorTool


@TOOLS.register("rocprofv3")
class Rocprofv3(VendorTool):
    name = "rocprofv3"
    devices: ClassVar[tuple[str, ...]] = ("rocm",)
    also_in: ClassVar[tuple[str, ...]] = ("/opt/rocm/bin",)
    how_to_get = "install the ROCm package rocprofiler-sdk"
    steps: ClassVar[int] = 20
    sees_everything: ClassVar[bool] = True

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
