"""This module puts vendors' profilers in front of a worker: it knows how each is called, and runs a few steps behind it.

`nsys` and the five of ROCm were written from documentation and recorded files and never run.
"""

from __future__ import annotations

import glob
import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from redline.launch.workers import WorkerDoor, run_after, run_script
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
class VendorTool:
    """This is a profiler that is put in front of a worker. In its words, `{folder}` is the folder into which all files go."""

    name: str
    devices: tuple[str, ...]
    """The tool looks at these kinds of device."""
    how_to_get: str
    words: str
    """These words are put in front of the worker's command."""
    files: tuple[str, ...]
    """These are patterns of the files with its table; the first file that holds kernels counts."""
    also_in: tuple[str, ...] = ()
    """These are patterns of folders where it is often installed without being on the PATH."""
    steps: int = 3
    """The tool is shown this many steps."""
    replays: bool = False
    """It is True if the tool runs its target several times from the beginning, so that no connection to it can be kept."""
    exit_timeout_s: float = 300.0
    """The tool has this long to write its files once the worker has left."""
    remark: str = ""
    """It says what to know about the table."""
    follow_up: str = ""
    """This command is run after the profiled program has ended; `{counted}` is the folder of its counters."""
    output: str = ""
    """What the follow-up command prints is written to this file."""

    def prefix(self, folder: Path) -> tuple[str, ...]:
        return tuple(word.format(folder=folder) for word in self.words.split())

    def follow_ups(self, folder: Path) -> tuple[str, ...]:
        """Returns the words of the command that turns the tool's own files into readable ones. They are empty if it needs none."""
        counted = next((path.parent for path in sorted(folder.rglob("pmc_perf.csv"))), folder / "workload")
        return tuple(word.format(folder=folder, counted=counted) for word in self.follow_up.split())

    def read(self, folder: Path) -> VendorTable:
        """Returns the tool's table. Raises `TraceError` if it wrote nothing of use, with the reason that it gave."""
        paths = [path for pattern in self.files for path in sorted(folder.rglob(pattern))]
        for path in paths:
            if (found := kernel_table(text_of(path), path.name)) is not None:
                own = (note("profiler", self.remark.format(folder=folder)),) if self.remark else ()
                analysed = folder / self.output if self.replays else None
                readings = list(counters_in(text_of(analysed))) if analysed is not None else found[1].readings
                return replace(found[1], notes=(*found[1].notes, *own), readings=readings)
        text = "".join(map(text_of, paths))
        said = (line.strip() for line in text.splitlines() if line.startswith(("==ERROR==", "==WARNING==")))
        reason = (
            _NO_COUNTERS
            if "ERR_NVGPUCTRPERM" in text
            else next(said, "no kernel was recorded" if paths else "it wrote no table")
        )
        raise TraceError(f"{self.name} reports no kernels: {reason}; see {folder}")


_NO_COUNTERS = (
    "the driver keeps its counters for administrators (ERR_NVGPUCTRPERM): run as root, give the container "
    "CAP_SYS_ADMIN, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
)
TOOLS: Registry[VendorTool] = Registry("profiler", group="redline.profilers")
"""Redline's own are registered below; other packages register theirs under the entry-point group."""


def _of_rocm(name: str, words: str, *files: str, package: str = "rocprofiler-sdk", **more: Any) -> None:
    """Registers one of ROCm's profilers. They cannot be told when to record, so that each has the same remark and more steps."""
    remark = "the table covers the whole worker, with building and warm-up: this tool cannot be told when to record"
    more = {"steps": 20, "remark": remark, "also_in": ("/opt/rocm/bin",), **more}
    TOOLS.register(name)(
        VendorTool(name, ("rocm",), f"install the ROCm package {package}", f"{name} {words}", files, **more)
    )


TOOLS.register("ncu")(
    # It reads hardware counters of every kernel, which it runs several times. By default it holds clocks at their base, where
    # nothing runs as fast as in real life; `--clock-control none` prevents that.
    VendorTool(
        "ncu",
        ("cuda",),
        "install Nsight Compute (it comes with the CUDA toolkit, or developer.nvidia.com/nsight-compute)",
        "ncu --csv --log-file {folder}/ncu.csv --target-processes all --clock-control none --profile-from-start off "
        f"--metrics {','.join((DURATION, TRAFFIC, *SHARES))}",
        ("ncu.csv",),
        also_in=("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute/*"),
        steps=1,
    )
)
TOOLS.register("nsys")(
    # It records a timeline of the whole process. Without `--capture-range-end=stop` it would end the worker together with the range.
    VendorTool(
        "nsys",
        ("cuda",),
        "install Nsight Systems (package nsight-systems-cli, or developer.nvidia.com/nsight-systems)",
        "nsys profile --trace=cuda,nvtx --sample=none --capture-range=cudaProfilerApi --capture-range-end=stop "
        "--cuda-graph-trace=node --force-overwrite=true --output {folder}/report",
        ("kernels.csv",),
        also_in=("/usr/local/cuda/bin", "/opt/nvidia/nsight-systems*/*/bin"),
        remark="open {folder}/report.nsys-rep in Nsight Systems for the timeline",
        follow_up="nsys stats --report cuda_gpu_kern_sum --format csv --force-export=true {folder}/report.nsys-rep",
        output="kernels.csv",
    )
)
_OLDER = "rocprofiler (ROCm 7 ships rocprofv3 instead: try --tool rocprofv3)"
_of_rocm("rocprof", "--stats -o {folder}/results.csv", "results.stats.csv", package=_OLDER)
# Its timelines for Perfetto are protobuf; the file plug-in writes the same dispatches as text.
_of_rocm("rocprofv2", "--kernel-trace --plugin file -d {folder} -o results", "*.csv", package=_OLDER)
# Without `--output-format csv`, the tool of ROCm 7 writes a database instead.
_of_rocm(
    "rocprofv3",
    "--kernel-trace --stats --output-format csv -d {folder} -o results --",
    "*kernel_stats.csv",
    "*kernel_trace.csv",
)
# It runs its target once for each group of counters, so that the worker must follow a script instead of a desk.
_of_rocm(
    "rocprof-compute",
    "profile -n redline -p {folder}/workload --",
    "pmc_perf.csv",
    package="rocprofiler-compute, and its Python requirements",
    steps=1,
    replays=True,
    follow_up="rocprof-compute analyze -p {counted} -b 2 3 4",
    output="analysis.txt",
)


SCRIPT_TIMEOUT_S = 3600.0
"""A tool that replays has this long in all, because it runs the worker a dozen times or more."""


def find_tool(tool: VendorTool) -> str:
    """Returns the path of the tool; if it is missing, the error says how to install it."""
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
    """Returns a record of a few steps with the tool's table of them. There is no table if the worker failed; the record then says why."""
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
    if follow_up := tool.follow_ups(folder):
        run_after((command, *follow_up[1:]), folder / tool.output)
    return record, tool.read(folder)


def _by_door(record: RunRecord, request: Profile, observer: Observer) -> RunRecord:
    door = WorkerDoor(record.spec.launch)
    try:
        session = door.open(record.spec)
        prepare = Prepare(spec=record.spec, bare=True)
        reply = session.ask(prepare, lambda progress: observer.progress(record, progress))
        if isinstance(reply, PreparedReply):
            key = record_key(record.spec, reply.prepared)
            record = msgspec.structs.replace(record, prepared=reply.prepared, key=key)
            observer.progress(record, Progress(stage="profile"))
            reply = session.ask(request)
            # The tool writes its files when the worker has ended by itself; a worker that is killed leaves none.
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
