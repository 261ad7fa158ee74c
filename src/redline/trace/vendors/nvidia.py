"""NVIDIA's profilers: Nsight Compute and Nsight Systems. The latter is written from its documentation and was never run."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

from redline.model.errors import TraceError
from redline.model.note import note
from redline.trace.vendors.tables import (
    added_up,
    nanoseconds,
    number,
    rows_under,
    safe_lines,
    size_in_bytes,
    statistics,
    text_of,
)
from redline.trace.vendors.tool import TOOLS, CounterName, FollowUp, Reading, VendorTable, VendorTool

DURATION = "gpu__time_duration.sum"
TRAFFIC = "dram__bytes.sum"
SHARES: dict[str, CounterName] = {
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "bandwidth",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy",
    "l1tex__t_sector_hit_rate.pct": "l1_hits",
    "lts__t_sector_hit_rate.pct": "l2_hits",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "compute",
}

IN_WORDS = {
    "Duration": DURATION,
    "DRAM Throughput": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "Achieved Occupancy": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "L1/TEX Hit Rate": "l1tex__t_sector_hit_rate.pct",
    "L2 Hit Rate": "lts__t_sector_hit_rate.pct",
    "Compute (SM) Throughput": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
}
"""Metrics as the sections of ncu's own report call them, where no metric was asked for by name."""
NCU_COLUMNS = ("ID", "Kernel Name", "Metric Name", "Metric Value")
_NCU_RAW_COLUMNS = ("ID", "Kernel Name", DURATION)
_NO_PERMISSION = "ERR_NVGPUCTRPERM"


@TOOLS.register("ncu")
class Ncu(VendorTool):
    """Hardware counters of every kernel. Each kernel is run several times, so its times are its own."""

    name = "ncu"
    devices: ClassVar[tuple[str, ...]] = ("cuda",)
    also_in: ClassVar[tuple[str, ...]] = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")
    how_to_get = "install Nsight Compute (it comes with the CUDA toolkit, or developer.nvidia.com/nsight-compute)"
    steps: ClassVar[int] = 1

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return (
            "ncu",
            "--csv",
            "--log-file",
            str(folder / "ncu.csv"),
            "--target-processes",
            "all",
            # Its default holds clocks at their base, where nothing runs as fast as in real life.
            "--clock-control",
            "none",
            "--profile-from-start",
            "off",
            "--metrics",
            ",".join((DURATION, TRAFFIC, *SHARES)),
        )

    def read(self, folder: Path) -> VendorTable:
        text = text_of(folder / "ncu.csv")
        found = read_ncu(text)
        if found is None:
            raise TraceError(f"ncu reports no kernels: {_reason(text)}")
        return found


def read_ncu(text: str) -> VendorTable | None:
    """The table in ncu's CSV; None where the text is something else."""
    calls = list(_calls(text))
    times = [(name, metrics[DURATION]) for name, metrics in calls if DURATION in metrics]
    if not times:
        return None
    readings = [reading for name, metrics in calls for reading in _readings(name, metrics)]
    how = "ncu runs each kernel by itself, several times and with cold caches: times differ from those of a step"
    return VendorTable(kernels=added_up(times), readings=readings, notes=(note("profiler", how),))


def _calls(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """Each call of a kernel with its metrics: times in nanoseconds, sizes in bytes, shares between 0 and 1."""
    calls: dict[tuple[str, str], tuple[str, dict[str, float]]] = {}
    for row in rows_under(text, NCU_COLUMNS):
        metric, unit = IN_WORDS.get(row["Metric Name"], row["Metric Name"]), row.get("Metric Unit", "")
        value = _value(metric, number(row["Metric Value"]), unit)
        key = (row.get("Process ID", ""), row["ID"])
        _, metrics = calls.setdefault(key, (row["Kernel Name"], {}))
        if value is not None:
            metrics[metric] = value
    yield from calls.values()
    yield from _raw_calls(text)


def _raw_calls(text: str) -> Iterator[tuple[str, dict[str, float]]]:
    """`ncu --csv --page raw`: one row per call, a column per metric, and a row of units below the header."""
    units: dict[str, str] | None = None
    for cells in csv.reader(safe_lines(text)):
        if units is None and all(name in cells for name in _NCU_RAW_COLUMNS):
            header, units = cells, {}
        elif units == {} and len(cells) == len(header):
            units = dict(zip(header, cells, strict=True))
        elif units and len(cells) == len(header):
            row = dict(zip(header, cells, strict=True))
            read = {
                name: _value(name, number(row.get(name)), units.get(name, "")) for name in (DURATION, TRAFFIC, *SHARES)
            }
            yield row["Kernel Name"], {name: value for name, value in read.items() if value is not None}


def _value(metric: str, value: float | None, unit: str) -> float | None:
    if value is None or value < 0:
        return None
    if metric == DURATION:
        return nanoseconds(value, unit)
    if metric == TRAFFIC:
        return size_in_bytes(value, unit)
    return value / 100 if metric in SHARES else None


def _readings(kernel: str, metrics: dict[str, float]) -> Iterator[Reading]:
    weight = metrics.get(DURATION, 0.0)
    for metric, name in SHARES.items():
        if metric in metrics:
            yield Reading(name=name, metric=metric, kernel=kernel, value=metrics[metric], weight=weight)
    if TRAFFIC in metrics:
        yield Reading(name="traffic", metric=TRAFFIC, kernel=kernel, value=metrics[TRAFFIC], weight=1.0)


def _reason(text: str) -> str:
    if _NO_PERMISSION in text:
        return (
            "the driver keeps its counters for administrators (ERR_NVGPUCTRPERM): run as root, give the container "
            "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        )
    errors = [line.strip() for line in text.splitlines() if line.startswith("==ERROR==")]
    warnings = [line.strip() for line in text.splitlines() if line.startswith("==WARNING==")]
    return (errors or warnings or ["it says nothing about why"])[0]


NSYS_COLUMNS = {
    "name": "Name",
    "calls": "Instances",
    "total": "Total Time (ns)",
    "min": "Min (ns)",
    "max": "Max (ns)",
}


@TOOLS.register("nsys")
class Nsys(VendorTool):
    """A timeline of the whole process."""

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
        kernels = statistics(text_of(folder / "kernels.csv"), NSYS_COLUMNS)
        if not kernels:
            raise TraceError(f"nsys reports no kernels: see {folder / 'kernels.csv'}")
        return VendorTable(
            kernels=kernels,
            notes=(note("profiler", f"open {folder / 'report.nsys-rep'} in Nsight Systems for the timeline"),),
        )
