"""A few timed blocks without the profiler, then a few steps under it, so that the cost of profiling is known."""

from __future__ import annotations

import glob
import os
import re
import shutil
import time
from pathlib import Path

import msgspec

from redline.launch.door import Door, Session
from redline.launch.spawn import SpawnDoor, run_after, run_script
from redline.model.errors import UsageError
from redline.model.identity import record_key
from redline.model.protocol import BlockReply, Measure, Prepare, PreparedReply, Profile, Progress, Request, TraceReply
from redline.model.record import RunRecord, TraceRef, new_id
from redline.model.spec import LaunchSpec, MeasureSpec, RunSpec
from redline.search.group import OneRecord, failure_of
from redline.search.observer import Journal, Observer
from redline.trace.vendors.tables import VendorTable
from redline.trace.vendors.tool import VendorTool

TIMED_BLOCKS = 3
TIMED_SECONDS = 1.0
"""The ceiling written into the spec: a record of a profile is not taken for one of a run."""


def trace_name(spec: RunSpec) -> str:
    """As TensorBoard's profiler plug-in wants it: `worker.time.pt.trace.json.gz`, the worker being what it shows."""
    workload = spec.workload
    words = [workload.model, workload.task, str(spec.recipe), f"b{workload.batch}" if workload.batch else ""]
    worker = "_".join(re.sub(r"[^A-Za-z0-9+-]+", "-", word).strip("-") for word in words if word)
    return f"{worker[:120]}.{time.time_ns()}.pt.trace.json.gz"


def as_profiled(spec: RunSpec) -> RunSpec:
    """The spec with as much measuring as a profile needs."""
    quick = msgspec.structs.replace(MeasureSpec.for_effort("quick"), max_seconds=TIMED_SECONDS)
    return msgspec.structs.replace(spec, measure=quick)


def capture(
    spec: RunSpec,
    request: Profile,
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    *,
    record_id: str | None = None,
) -> RunRecord:
    """One record with its trace; what breaks is in its failure."""
    record = RunRecord(id=record_id or new_id(), spec=spec, created_at=time.time())
    return _Captured(spec, journal, observer or Observer(), record).run(door, request)


class _Captured(OneRecord):
    """A record on its way: prepared, timed, profiled."""

    def run(self, door: Door, request: Profile) -> RunRecord:
        return self.fill(door, lambda session: self._profile(session, request))

    def _profile(self, session: Session, request: Profile) -> None:
        if self.prepare(session, modules=request.modules) is None:
            return None
        measure = self.record.spec.measure
        self.observer.progress(self.record, Progress(stage="timing"))
        for number in range(TIMED_BLOCKS):
            block = Measure(
                kind="throughput", seconds=measure.block_seconds, settle_seconds=measure.settle_seconds, round=number
            )
            reply = session.ask(block)
            if not isinstance(reply, BlockReply):
                return self.fail(reply)
            self.journal.append(self.record.id, reply.block)
            self.change(blocks=(*self.record.blocks, reply.block))
        self.observer.progress(self.record, Progress(stage="profile"))
        reply = session.ask(request)
        if not isinstance(reply, TraceReply):
            return self.fail(reply)
        self.change(trace=reply.trace)
        self.stopped = "target"
        return None


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
    """What the tool told of a few steps; no table where the worker failed, the record then says why."""
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
