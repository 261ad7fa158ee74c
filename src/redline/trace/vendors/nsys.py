"""Nsight Systems: a timeline of the whole process. Written from its documentation; it has not been run here yet."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from redline.errors import TraceError
from redline.note import note
from redline.trace.vendors.tables import statistics, text_of
from redline.trace.vendors.tool import TOOLS, FollowUp, VendorTable, VendorTool

COLUMNS = {
    "name": "Name",
    "calls": "Instances",
    "total": "Total Time (ns)",
    "min": "Min (ns)",
    "max": "Max (ns)",
}


@TOOLS.register("nsys")
class Nsys(VendorTool):
    name = "nsys"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    also_in: ClassVar[tuple[str, ...]] = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-systems*/*/bin")
    how_to_get = "install Nsight Systems (package nsight-systems-cli, or developer.nvidia.com/nsight-systems)"

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return (
            "nsys",
            "profile",
            "--trace=cuda,nvtx",
            "--sample=none",
            "--capture-range=cudaProfilerApi",
            # By itself it would end the worker together with the range.
            "--capture-range-end=stop",
            "--cuda-graph-trace=node",
            "--force-overwrite=true",
            "--output",
            str(folder / "report"),
        )

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        report = folder / "report.nsys-rep"
        command = (
            "nsys",
            "stats",
            "--report",
            "cuda_gpu_kern_sum",
            "--format",
            "csv",
            "--force-export=true",
            str(report),
        )
        return [FollowUp(command=command, output=folder / "kernels.csv")]

    def read(self, folder: Path) -> VendorTable:
        kernels = statistics(text_of(folder / "kernels.csv"), COLUMNS)
        if not kernels:
            raise TraceError(f"nsys reports no kernels: see {folder / 'kernels.csv'}")
        return VendorTable(
            kernels=kernels,
            notes=(note("profiler", f"open {folder / 'report.nsys-rep'} in Nsight Systems for the timeline"),),
        )
