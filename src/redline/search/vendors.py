"""Vendors' profilers in front of a worker: what each is called with, and running a few steps behind it.

`nsys` and the five of ROCm were written from documentation and recorded files and never run.
"""

from __future__ import annotations

import glob
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import msgspec

from redline.launch.workers import SpawnDoor, run_after, run_script
from redline.model.errors import TraceError, UsageError
from redline.model.identity import record_key
from redline.model.note import note
from redline.model.protocol import Prepare, PreparedReply, Profile, Progress, Request, TraceReply
from redline.model.record import RunRecord, TraceRef, new_id
from redline.model.registry import Registry
from redline.model.spec import LaunchSpec, RunSpec
from redline.search.group import failure_of
from redline.search.observer import Observer
from redline.trace.vendors import DURATION, SHARES, TRAFFIC, VendorTable, counters_in, kernel_table, text_of


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
    """The tool has so long to write its files once the worker has left."""
    words: ClassVar[str] = ""
    """These words stand in front of the worker's command."""
    files: ClassVar[tuple[str, ...]] = ()
    """Patterns of the files with its table; the first that holds kernels counts."""
    remark: ClassVar[str] = ""
    """Says what to know about its table."""

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return tuple(word.format(folder=folder) for word in self.words.split())

    def follow_ups(self, folder: Path) -> list[FollowUp]:
        """Returns what turns its own files into readable ones."""
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


TOOLS: Registry[type[VendorTool]] = Registry("profiler", group="redline.profilers")
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
    """ROCm's profilers have this in common. They cannot be told when to record."""

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


SCRIPT_TIMEOUT_S = 3600.0
"""A tool that replays runs the worker a dozen times or more."""


def find_tool(tool: VendorTool) -> str:
    """The path of the tool; where it is missing, the error says how to install it."""
    folders = [os.environ.get("PATH", os.defpath)]
    folders += [folder for pattern in tool.also_in for folder in sorted(glob.glob(pattern), reverse=True)]
    found = shutil.which(tool.name, path=os.pathsep.join(folders))
    if found is None:
        raise UsageError(f"{tool.name} is not installed, or not on the PATH: {tool.how_to_get}")
    return found


def check_device(tool: VendorTool, device: str) -> None:
    kind = device.partition(":")[0]
    if kind not in tool.devices:
        raise UsageError(f"{tool.name} looks at {' and '.join(tool.devices)} devices; this would run on {kind}")


def profile_behind(
    spec: RunSpec, tool: VendorTool, folder: Path, steps: int | None = None, observer: Observer | None = None
) -> tuple[RunRecord, VendorTable | None]:
    """Returns what the tool told of a few steps; no table where the worker failed, the record then says why."""
    observer = observer or Observer()
    command = find_tool(tool)
    folder.mkdir(parents=True, exist_ok=True)
    request = Profile(path=str(folder), wait=0, warmup=1, active=steps or tool.steps, outside=True)
    prefix = (command, *tool.prefix(folder)[1:])
    launch = LaunchSpec(door="spawn", command_prefix=prefix, close_timeout_s=tool.exit_timeout_s)
    spec = msgspec.structs.replace(spec, launch=launch)
    record = RunRecord(id=new_id(), spec=spec, created_at=time.time())
    observer.opened(record)
    record = _by_script(record, request, folder) if tool.replays else _by_door(record, request, observer)
    if record.failure is not None:
        return record, None
    observer.progress(record, Progress(stage="reading", detail=tool.name))
    for follow_up in tool.follow_ups(folder):
        run_after((command, *follow_up.command[1:]), follow_up.output)
    return record, tool.read(folder)


def _by_door(record: RunRecord, request: Profile, observer: Observer) -> RunRecord:
    door = SpawnDoor(record.spec.launch)
    try:
        session = door.open(record.spec)
        prepare = Prepare(spec=record.spec, bare=True)
        reply = session.ask(prepare, lambda progress: observer.progress(record, progress))
        if isinstance(reply, PreparedReply):
            key = record_key(record.spec, reply.prepared)
            record = msgspec.structs.replace(record, prepared=reply.prepared, key=key)
            observer.progress(record, Progress(stage="profile"))
            reply = session.ask(request)
            # The tool writes its files when the worker has left in peace: killing it would leave nothing.
            session.close()
    finally:
        door.close()
    if isinstance(reply, TraceReply):
        return msgspec.structs.replace(record, trace=reply.trace, stopped="target")
    return msgspec.structs.replace(record, failure=failure_of(reply), stopped="failed")


def _by_script(record: RunRecord, request: Profile, folder: Path) -> RunRecord:
    requests: list[Request] = [Prepare(spec=record.spec, bare=True), request]
    started = time.perf_counter()
    run_script(record.spec.launch, requests, folder, SCRIPT_TIMEOUT_S)
    trace = TraceRef(path=str(folder), steps=request.active, capture_s=time.perf_counter() - started, bytes=0)
    return msgspec.structs.replace(record, trace=trace, stopped="target")
