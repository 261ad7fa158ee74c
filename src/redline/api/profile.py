"""`redline.profile`: capture a profile, read one, or compare two."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.profile import Profile, profile_of, with_tool
from redline.analyze.profile_diff import ProfileDiff, diff_profiles
from redline.api.settings import Settings, one_spec, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import BenchError, TraceError, UsageError
from redline.model.protocol import Profile as ProfileRequest
from redline.model.record import RunRecord, new_id
from redline.model.spec import RunSpec
from redline.search.profile import as_profiled, capture, check_device, find_tool, profile_behind
from redline.show.export import JsonDocument, json_document
from redline.show.notebook import Bars, Shown
from redline.show.profile import ProfileReport
from redline.show.profile_files import profile_page
from redline.trace.decode import read_trace, read_traces
from redline.trace.lanes import Lanes, lanes_of
from redline.trace.vendors.tables import merged, read_file
from redline.trace.vendors.tool import TOOLS

DEFAULT_STEPS = 3


class ProfileResult(Shown):
    """A profile, and the record of what was measured beside it where Redline captured it."""

    def __init__(self, profile: Profile, record: RunRecord | None = None) -> None:
        self.profile = profile
        self.record = record

    def report(self) -> RenderableType:
        return ProfileReport(self.profile)

    def frame_rows(self) -> Sequence[Any]:
        return self.profile.kernels or self.profile.operators

    def bars(self) -> Bars | None:
        rows = [row for row in self.profile.classes if row.total_s > 0]
        bars = [(row.name, 100 * row.share, None, None) for row in rows]
        return Bars("where the busy time goes", "% of the busy time", bars)

    def to_json(self) -> JsonDocument:
        return json_document("profile", self.profile)

    def to_html(self) -> str:
        """One page with the captured steps box by box; it fetches nothing."""
        return profile_page(self.profile, captured_lanes(self.profile))


@takes_settings
def profile(
    model: Any,
    inputs: Any | None = None,
    *,
    recipe: str = "baseline",
    loss: Any | None = None,
    steps: int | None = None,
    allocations: bool = False,
    stacks: bool = False,
    by_shape: bool = False,
    tool: str | None = None,
    folder: Path | None = None,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> ProfileResult:
    """Profile a few steps of a model under one recipe.

    `allocations` also records what operators allocate. With `tool` a vendor profiler captures instead of torch's. `folder` receives the trace, laid out for TensorBoard.
    """
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a profile", model, inputs, recipes=recipe, loss=loss, **settings)
        if steps is not None and steps < 1:
            raise UsageError(f"steps must be 1 or more, got {steps}")
        if tool is not None:
            return _profile_with_tool(spec, tool, working, steps=steps, folder=folder)
        request = ProfileRequest(
            path="",
            active=steps or DEFAULT_STEPS,
            memory=allocations,
            stacks=stacks,
        )
        return profile_spec(spec, request, working, folder=folder, by_shape=by_shape)


def profile_spec(
    spec: RunSpec,
    request: ProfileRequest,
    workspace: Workspace,
    *,
    folder: Path | None = None,
    by_shape: bool = False,
) -> ProfileResult:
    """Time a few blocks, capture a trace, and diagnose it. A worker that fails raises `BenchError`."""
    (spec,) = workspace.checked([as_profiled(spec)])
    record_id = new_id()
    # What is kept lies in the history's folder, and a copy of it in the one that was asked for.
    path = (workspace.traces / record_id if workspace.keeps or folder is None else folder.absolute()) / trace_name(spec)
    request = msgspec.structs.replace(request, path=str(path))
    with workspace.lock(spec.device, spec.ranks):
        door = workspace.door(spec.launch)
        record = capture(spec, request, door, workspace.journal, workspace.observer, record_id=record_id)
    if record.failure is not None:
        raise BenchError(
            record.failure.kind, f"{record.failure.stage}: {record.failure.told}", record.failure.traceback
        )
    assert record.trace is not None
    paths = [Path(each) for each in (record.trace.path, *record.trace.others)]
    if folder is not None:
        paths = [_copied(each, folder.absolute()) for each in paths]
        first, *others = map(str, paths)
        trace = msgspec.structs.replace(record.trace, path=first, others=tuple(others))
        record = msgspec.structs.replace(record, trace=trace)
    known = workspace.ceilings_of([record])(record)
    traces = [read_trace(each) for each in paths]
    return ProfileResult(profile_of(traces, record, by_shape=by_shape, ceilings=known), record)


def _copied(path: Path, folder: Path) -> Path:
    copy = folder / path.name
    if copy != path:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        except OSError as error:
            raise UsageError(f"cannot write {copy}: {error.strerror}") from None
    return copy


def _profile_with_tool(
    spec: RunSpec, tool: str, workspace: Workspace, *, steps: int | None, folder: Path | None
) -> ProfileResult:
    """The same steps under a vendor profiler: its kernel table, and hardware counters where it reads them."""
    chosen = TOOLS.get(tool)()
    find_tool(chosen)
    (spec,) = workspace.checked([spec])
    check_device(chosen, spec.device)
    folder = (folder or workspace.traces / f"{chosen.name}-{new_id()}").absolute()
    with workspace.lock(spec.device):
        record, table = profile_behind(spec, chosen, folder, steps, workspace.observer)
        workspace.observer.closed(record)
    if record.failure is not None or table is None:
        failure = record.failure
        raise BenchError(failure.kind if failure else "crash", f"{failure.stage}: {failure.told}" if failure else tool)
    return ProfileResult(with_tool(table.kernels, table.readings, record, chosen.name, table.notes), record)


def read_profile(*sources: str | Path, by_shape: bool = False, workspace: Workspace | None = None) -> Profile:
    """A profile from trace files, from a folder of them, or from the id of a record that was captured here."""
    if not sources:
        raise UsageError("name at least one trace file")
    paths = [Path(source).expanduser() for source in sources]
    if len(paths) == 1 and not paths[0].exists() and _may_be_id(str(sources[0])):
        with use(workspace) as opened:
            record = _captured_record(str(sources[0]), opened)
            known = opened.ceilings_of([record])(record)
        assert record.trace is not None
        every = [Path(each) for each in (record.trace.path, *record.trace.others)]
        traces = [read_trace(path) for path in every if path.exists()]
        return profile_of(traces, record, by_shape=by_shape, ceilings=known)
    return profile_of(read_traces(paths), by_shape=by_shape)


def import_profile(*sources: str | Path) -> Profile:
    """A profile from files that rocprof, rocprofv2, rocprofv3, nsys or ncu wrote; several of one tool are added up."""
    if not sources:
        raise UsageError("name at least one file of a profiler")
    found = [read_file(Path(source).expanduser()) for source in sources]
    tools = sorted({tool for tool, _ in found})
    if len(tools) > 1:
        raise UsageError(f"these files are of different tools ({', '.join(tools)}): import them one by one")
    table = merged([table for _, table in found])
    return with_tool(table.kernels, table.readings, None, tools[0], table.notes, tuple(map(str, sources)))


def captured_lanes(profile: Profile) -> Lanes | None:
    """The first trace of a profile as lanes of boxes; None where there is no trace file to read."""
    named = profile.capture.trace if profile.capture is not None else next(iter(profile.sources), None)
    if not named or not Path(named).is_file() or not (profile.strips or profile.operators):
        return None
    return lanes_of(read_trace(Path(named)))


def compare_profiles(
    before: str | Path | Profile, after: str | Path | Profile, *, workspace: Workspace | None = None
) -> ProfileDiff:
    """Which kernels and operators changed between two profiles, or between two sources `read_profile` takes."""
    sides = [
        read_profile(each, workspace=workspace) if isinstance(each, str | Path) else each for each in (before, after)
    ]
    return diff_profiles(*sides)


def trace_name(spec: RunSpec) -> str:
    """As TensorBoard's profiler plug-in wants it: `worker.time.pt.trace.json.gz`, the worker being what it shows."""
    workload = spec.workload
    words = [workload.model, workload.task, str(spec.recipe), f"b{workload.batch}" if workload.batch else ""]
    worker = "_".join(re.sub(r"[^A-Za-z0-9+-]+", "-", word).strip("-") for word in words if word)
    return f"{worker[:120]}.{time.time_ns()}.pt.trace.json.gz"


def _may_be_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{6,}", text) is not None


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
