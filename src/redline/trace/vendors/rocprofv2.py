"""rocprofv2. Written from its documentation; it has not met the hardware yet."""

from __future__ import annotations

from pathlib import Path

from redline.errors import TraceError
from redline.trace.vendors.rocprof import WHOLE_PROCESS, OlderRocprof
from redline.trace.vendors.tables import dispatches, text_of
from redline.trace.vendors.tool import TOOLS, VendorTable


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
