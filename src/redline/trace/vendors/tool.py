"""Profilers that Redline puts in front of a worker: `VendorTool`, those of NVIDIA and ROCm, and the register `TOOLS`.

Nothing here runs anything. `nsys` and the five of ROCm were written from documentation and recorded files and never run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from redline.model.errors import TraceError
from redline.model.note import note
from redline.model.registry import Registry
from redline.trace.vendors.counters import CounterName, Reading
from redline.trace.vendors.tables import DURATION, SHARES, TRAFFIC, VendorTable, kernel_table, number, text_of


@dataclass(frozen=True)
class FollowUp:
    """A command to run after the profiled program has ended, and the file that takes what it prints."""

    command: tuple[str, ...]
    output: Path


class VendorTool:
    """A profiler in front of a worker. In its words, `{folder}` is the folder into which all files go."""

    name: ClassVar[str]
    devices: ClassVar[tuple[str, ...]]
    """Kinds of device it looks at."""
    how_to_get: ClassVar[str]
    also_in: ClassVar[tuple[str, ...]] = ()
    """Folders, as patterns, where it is often installed without being on the PATH."""
    steps: ClassVar[int] = 3
    """How many steps it is shown."""
    replays: ClassVar[bool] = False
    """Runs its target several times from the beginning, so that no connection to it can be kept."""
    exit_timeout_s: ClassVar[float] = 300.0
    """Until it has written its files once the worker has left."""
    words: ClassVar[str] = ""
    """The words in front of the worker's command."""
    files: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files with its table; the first that holds kernels counts."""
    remark: ClassVar[str] = ""
    """What to know about its table."""

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return tuple(word.format(folder=folder) for word in self.words.split())

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        """What turns its own files into readable ones."""
        return []

    def read(self, folder: Path) -> VendorTable:
        """Raises `TraceError` when it wrote nothing of use, with the reason it gave."""
        paths = [path for pattern in self.files for path in sorted(folder.rglob(pattern))]
        for path in paths:
            if (found := kernel_table(text_of(path), path.name)) is not None:
                own = (note("profiler", self.remark.format(folder=folder)),) if self.remark else ()
                return replace(found[1], notes=(*found[1].notes, *own))
        raise TraceError(f"{self.name} reports no kernels: {self.reason(paths)}; see {folder}")

    def reason(self, paths: list[Path]) -> str:
        return "no kernel was recorded" if paths else "it wrote no table"


TOOLS: Registry[type[VendorTool]] = Registry("profiler", package="redline.trace.vendors", group="redline.profilers")
"""Those of the house are below; other packages register a class under the entry-point group."""


@TOOLS.register("ncu")
class Ncu(VendorTool):
    """Hardware counters of every kernel. Each kernel is run several times, so its times are its own."""

    name = "ncu"
    devices = ("cuda",)
    also_in = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*")
    how_to_get = "install Nsight Compute (it comes with the CUDA toolkit, or developer.nvidia.com/nsight-compute)"
    steps = 1
    # By default clocks are held at their base, where nothing runs as fast as in real life.
    words = (
        "ncu --csv --log-file {folder}/ncu.csv --target-processes all --clock-control none --profile-from-start off "
        f"--metrics {','.join((DURATION, TRAFFIC, *SHARES))}"
    )
    files = ("ncu.csv",)

    def reason(self, paths: list[Path]) -> str:
        text = "".join(map(text_of, paths))
        if "ERR_NVGPUCTRPERM" in text:
            return (
                "the driver keeps its counters for administrators (ERR_NVGPUCTRPERM): run as root, give the container "
                "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
            )
        marked = [
            line.strip() for mark in ("==ERROR==", "==WARNING==") for line in text.splitlines() if line.startswith(mark)
        ]
        return (marked or ["it says nothing about why"])[0]


@TOOLS.register("nsys")
class Nsys(VendorTool):
    """A timeline of the whole process."""

    name = "nsys"
    devices = ("cuda",)
    also_in = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-systems*/*/bin")
    how_to_get = "install Nsight Systems (package nsight-systems-cli, or developer.nvidia.com/nsight-systems)"
    # Without the end of the range being told, it would end the worker together with the range.
    words = (
        "nsys profile --trace=cuda,nvtx --sample=none --capture-range=cudaProfilerApi --capture-range-end=stop "
        "--cuda-graph-trace=node --force-overwrite=true --output {folder}/report"
    )
    files = ("kernels.csv",)
    remark = "open {folder}/report.nsys-rep in Nsight Systems for the timeline"

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        words = ["nsys", "stats", "--report", "cuda_gpu_kern_sum", "--format", "csv", "--force-export=true"]
        return [FollowUp((*words, str(folder / "report.nsys-rep")), folder / "kernels.csv")]


class RocmTool(VendorTool):
    """What ROCm's profilers have in common. They cannot be told when to record."""

    devices = ("rocm",)
    also_in = ("/opt/rocm/bin",)
    how_to_get = "install the ROCm package rocprofiler (ROCm 7 ships rocprofv3 instead: try --tool rocprofv3)"
    steps = 20
    remark = "the table covers the whole worker, with building and warm-up: this tool cannot be told when to record"


@TOOLS.register("rocprof")
class Rocprof(RocmTool):
    name = "rocprof"
    words = "rocprof --stats -o {folder}/results.csv"
    files = ("results.stats.csv",)


@TOOLS.register("rocprofv2")
class Rocprofv2(RocmTool):
    name = "rocprofv2"
    # Its timelines for Perfetto are protobuf; the file plug-in writes the same dispatches as text.
    words = "rocprofv2 --kernel-trace --plugin file -d {folder} -o results"
    files = ("*.csv",)


@TOOLS.register("rocprofv3")
class Rocprofv3(RocmTool):
    name = "rocprofv3"
    how_to_get = "install the ROCm package rocprofiler-sdk"
    # Without the format ROCm 7 writes a database instead.
    words = "rocprofv3 --kernel-trace --stats --output-format csv -d {folder} -o results --"
    files = ("*kernel_stats.csv", "*kernel_trace.csv")


@TOOLS.register("rocprof-compute")
class RocprofCompute(RocmTool):
    """It runs its target once for each group of counters, so the worker follows a script instead of a desk."""

    name = "rocprof-compute"
    how_to_get = "install the ROCm package rocprofiler-compute, and its Python requirements"
    steps = 1
    replays = True
    words = "rocprof-compute profile -n redline -p {folder}/workload --"
    files = ("pmc_perf.csv",)

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        where = next((path.parent for path in sorted(folder.rglob("pmc_perf.csv"))), folder / "workload")
        command = ("rocprof-compute", "analyze", "-p", str(where), "-b", "2", "3", "4")
        return [FollowUp(command, folder / "analysis.txt")]

    def read(self, folder: Path) -> VendorTable:
        table = super().read(folder)
        return replace(table, readings=list(counters_in(text_of(folder / "analysis.txt"))))


_ANALYSED: tuple[tuple[str, CounterName, bool], ...] = (
    (r"^hbm (bandwidth|bw)$|^l2-fabric read (bandwidth|bw)$", "bandwidth", True),
    (r"^wave(front)? occupancy$", "occupancy", True),
    (r"^(vector l1d?|vl1d) cache hit rate$|^vl1d hit rate$", "l1_hits", False),
    (r"^l2 (cache )?hit rate$", "l2_hits", False),
)
"""Names differ between versions; the share is either the value itself or, where it says so here, the share of the peak."""


def counters_in(text: str) -> Iterator[Reading]:
    """The counters in the tables that `rocprof-compute analyze` draws with lines, each once."""
    columns: list[str] = []
    seen: set[CounterName] = set()
    for line in text.splitlines():
        cells = [cell.strip() for cell in re.split("[│|]", line)[1:-1]]
        lowered = [cell.lower() for cell in cells]
        if {"metric", "unit"} <= set(lowered):
            columns = lowered
            continue
        row = dict(zip(columns, cells, strict=False)) if len(cells) == len(columns) else {}
        metric = row.get("metric", "")
        for rule, name, of_peak in _ANALYSED:
            if name in seen or not re.match(rule, metric.lower()):
                continue
            keys = ("pct of peak", "pop", "percent of peak") if of_peak else ("avg", "value", "mean")
            value = number(next((row[key] for key in keys if key in row), None))
            if value is not None:
                seen.add(name)
                yield Reading(name, metric, "all kernels", value / 100, 1.0)
