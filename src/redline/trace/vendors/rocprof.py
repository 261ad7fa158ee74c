"""rocprof, the first one. Written from its documentation; it has not met the hardware yet."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from redline.errors import TraceError
from redline.trace.vendors.tables import statistics, text_of
from redline.trace.vendors.tool import TOOLS, VendorTable, VendorTool

STATISTICS_COLUMNS = {
    "name": "Name",
    "calls": "Calls",
    "total": "TotalDurationNs",
    "min": "MinNs",
    "max": "MaxNs",
}
WHOLE_PROCESS = (
    "the table holds the whole worker, building and warming up included: this tool cannot be told when to look"
)


class OlderRocprof(VendorTool):
    """What the tools before rocprofv3 have in common."""

    devices: ClassVar[tuple[str, ...]] = ("rocm",)
    also_in: ClassVar[tuple[str, ...]] = ("/opt/rocm/bin",)
    how_to_get = "install the ROCm package rocprofiler (ROCm 7 ships rocprofv3 instead: try --tool rocprofv3)"
    steps: ClassVar[int] = 20
    sees_everything: ClassVar[bool] = True


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
