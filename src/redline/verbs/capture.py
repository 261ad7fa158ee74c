"""Several verbs share this part of profiling: capturing a spec, reading a profile again, and keeping what steps held in memory."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from redline.analyze.profile import Profile, profile_of
from redline.launch.door import Door, Session
from redline.model.errors import BenchError, TraceError, UsageError
from redline.model.note import Note, note
from redline.model.protocol import BlockReply, Measure, Progress, TraceReply
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord, new_id
from redline.model.spec import MeasureSpec, RunSpec
from redline.model.work import MemoryRow
from redline.search.group import OneRecord
from redline.search.observer import Journal, Observer
from redline.trace.decode import read_trace, read_traces
from redline.verbs.workspace import Workspace, use

DEFAULT_STEPS = 3
"""This many steps are captured unless more are asked for."""
TIMED_BLOCKS = 3
"""Blocks without the profiler come first, so that the cost of profiling is known."""
TIMED_SECONDS = 1.0
"""This is the ceiling written into the spec, so that a record of a profile is not taken for one of a run."""


def trace_name(spec: RunSpec) -> str:
    """Returns a name as TensorBoard's profiler plug-in wants it: `worker.time.pt.trace.json.gz`, the worker being what it shows."""
    workload = spec.workload
    words = [workload.model, workload.task, str(spec.recipe), f"b{workload.batch}" if workload.batch else ""]
    worker = "_".join(re.sub(r"[^A-Za-z0-9+-]+", "-", word).strip("-") for word in words if word)
    return f"{worker[:120]}.{time.time_ns()}.pt.trace.json.gz"


def as_profiled(spec: RunSpec) -> RunSpec:
    """Returns the spec with as much measuring as a profile needs."""
    quick = msgspec.structs.replace(MeasureSpec.for_effort("quick"), max_seconds=TIMED_SECONDS)
    return msgspec.structs.replace(spec, measure=quick)


def capture(
    spec: RunSpec,
    request: ProfileRequest,
    door: Door,
    journal: Journal,
    observer: Observer | None = None,
    *,
    record_id: str | None = None,
) -> RunRecord:
    """Returns one record, prepared, timed and profiled; what breaks is in its failure."""
    record = RunRecord(id=record_id or new_id(), spec=spec, created_at=time.time())
    capturing = OneRecord(spec, journal, observer or Observer(), record)
    return capturing.fill(door, lambda session: _time_and_profile(capturing, session, request))


def _time_and_profile(capturing: OneRecord, session: Session, request: ProfileRequest) -> None:
    if capturing.prepare(session, modules=request.modules) is None:
        return None
    measure = capturing.record.spec.measure
    capturing.observer.progress(capturing.record, Progress(stage="timing"))
    for number in range(TIMED_BLOCKS):
        block = Measure(
            kind="throughput", seconds=measure.block_seconds, settle_seconds=measure.settle_seconds, round=number
        )
        reply = session.ask(block)
        if not isinstance(reply, BlockReply):
            return capturing.fail(reply)
        capturing.journal.append(capturing.record.id, reply.block)
        capturing.change(blocks=(*capturing.record.blocks, reply.block))
    capturing.observer.progress(capturing.record, Progress(stage="profile"))
    reply = session.ask(request)
    if not isinstance(reply, TraceReply):
        return capturing.fail(reply)
    capturing.change(trace=reply.trace)
    capturing.stopped = "target"
    return None


class Captured(NamedTuple):
    """A profile with the record of what was measured beside it."""

    profile: Profile
    record: RunRecord


def profile_spec(
    spec: RunSpec,
    request: ProfileRequest,
    workspace: Workspace,
    *,
    folder: Path | None = None,
) -> Captured:
    """Measures a few blocks, then captures a trace and diagnoses it. A worker that fails raises `BenchError`."""
    (spec,) = workspace.checked([as_profiled(spec)])
    record_id = new_id()
    # The trace is kept in the history's folder, and a copy of it in the one that was asked for.
    path = (workspace.traces / record_id if workspace.keeps or folder is None else folder.absolute()) / trace_name(spec)
    request = msgspec.structs.replace(request, path=str(path))
    with workspace.lock(spec.device, spec.ranks):
        door = workspace.door(spec.launch)
        record = capture(spec, request, door, workspace.journal, workspace.observer, record_id=record_id)
    require_profiled(record)
    assert record.trace is not None
    paths = [Path(each) for each in (record.trace.path, *record.trace.others)]
    if folder is not None:
        first, *others = (str(_copied(each, folder.absolute())) for each in paths)
        record = msgspec.structs.replace(
            record, trace=msgspec.structs.replace(record.trace, path=first, others=tuple(others))
        )
    return Captured(_profile_of_record(record, workspace), record)


def require_profiled(record: RunRecord) -> None:
    """Raise the failure of a record that has one."""
    if (failure := record.failure) is not None:
        raise BenchError(failure.kind, f"{failure.stage}: {failure.told}", failure.traceback)


def _profile_of_record(record: RunRecord, workspace: Workspace) -> Profile:
    assert record.trace is not None
    paths = [Path(each) for each in (record.trace.path, *record.trace.others)]
    traces = [read_trace(path) for path in paths if path.exists()]
    return profile_of(traces, record, ceilings=workspace.ceilings_of([record])(record))


def _copied(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    if copy != path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        except OSError as error:
            raise UsageError(f"cannot write {copy}: {error.strerror}") from None
    return copy


def read_profile(*sources: str | Path, workspace: Workspace | None = None) -> Profile:
    """Returns a profile from trace files, from a folder of them, or from the id of a record that was captured here."""
    paths = [Path(source).expanduser() for source in sources]
    if len(paths) == 1 and not paths[0].exists() and re.fullmatch(r"[0-9a-f]{6,}", str(sources[0])):
        with use(workspace) as opened:
            return _profile_of_record(_captured_record(str(sources[0]), opened), opened)
    return profile_of(read_traces(paths))


def _captured_record(record_id: str, workspace: Workspace) -> RunRecord:
    with workspace.reading() as history:
        record = history.load(record_id)
    if record.trace is None:
        raise TraceError(f"record {record.id} has no trace: it was measured, not profiled")
    if not record.trace.path:
        raise TraceError(f"the trace of record {record.id} is not in the folder of this history: give the file itself")
    if not Path(record.trace.path).exists():
        raise TraceError(f"the trace of record {record.id} is gone: {record.trace.path}")
    return record


KEPT = ".memory.json"
"""Files with rows of memory end so; they lie beside the history's traces."""


def keep_memory(row: MemoryRow, workspace: Workspace) -> None:
    """Keeps a row of memory in the history, for the dashboard."""
    if workspace.keeps:
        workspace.traces.mkdir(parents=True, exist_ok=True)
        (workspace.traces / f"{new_id()}{KEPT}").write_bytes(msgspec.json.encode(row))


def kept_memories(workspace: Workspace) -> tuple[list[MemoryRow], list[Note]]:
    """Returns the newest row of each model, task, recipe, batch and device, and notes on files that cannot be read."""
    newest: dict[tuple[Any, ...], MemoryRow] = {}
    unreadable = []
    paths: list[Path] = []
    if workspace.keeps:
        with workspace.reading() as history:
            paths = sorted((history.folder / "traces").glob(f"*{KEPT}"))
    for path in paths:
        try:
            row = msgspec.json.decode(path.read_bytes(), type=MemoryRow)
        except (OSError, msgspec.DecodeError) as error:
            unreadable.append(note("unreadable", f"left out {path.name}: {error}", about=path.name))
            continue
        newest[row.model, row.task, row.recipe, row.batch, row.device] = row
    return list(newest.values()), unreadable
