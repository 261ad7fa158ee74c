"""Profiles, as notebooks and the command line ask for them: capture one, read one, set two side by side."""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from redline.api import checked, opened, specs_of
from redline.errors import BenchError, TraceError, UsageError
from redline.launch.lock import device_lock
from redline.protocol import Profile as ProfileRequest
from redline.record import RunRecord, new_id
from redline.search.interleave import Journal, Observer

if TYPE_CHECKING:
    from redline.analyze.profile import Profile
    from redline.analyze.profile_diff import ProfileDiff
    from redline.launch import Door
    from redline.spec import RunSpec

DEFAULT_STEPS = 3


class ProfileResult:
    """A profile, and the record of what was measured beside it where Redline captured it."""

    def __init__(self, profile: Profile, record: RunRecord | None = None) -> None:
        self.profile = profile
        self.record = record

    def __str__(self) -> str:
        from redline.report.profile import profile_text

        return profile_text(self.profile)

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self.profile)).decode()


def profile(
    model: Any,
    inputs: Any | None = None,
    *,
    recipe: str = "baseline",
    loss: Any | None = None,
    steps: int | None = None,
    wait: int = 1,
    warmup: int = 2,
    shapes: bool = True,
    memory: bool = False,
    stacks: bool = False,
    by_shape: bool = False,
    tool: str | None = None,
    folder: Path | None = None,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: Observer | None = None,
    **settings: Any,
) -> ProfileResult:
    """Profile a few steps of a model under one recipe; `settings` are those of `redline.run`.

    With `tool` a vendor's profiler looks on instead of torch's. `folder` takes the trace, laid out as TensorBoard wants.
    """
    specs, own_door = specs_of(model, inputs, recipes=recipe, loss=loss, **settings)
    if len(specs) != 1:
        raise UsageError(
            f"a profile is of one model under one recipe, got {len(specs)}; set two side by side with --diff"
        )
    for name, count, least in (("steps", steps, 1), ("wait", wait, 0), ("warmup", warmup, 0)):
        if count is not None and count < least:
            raise UsageError(f"{name} must be {least} or more, got {count}")
    if tool is not None:
        return profile_with_tool(specs[0], tool, steps=steps, folder=folder, observer=observer)
    request = ProfileRequest(
        path="",
        wait=wait,
        warmup=warmup,
        active=steps or DEFAULT_STEPS,
        shapes=shapes,
        memory=memory,
        stacks=stacks,
    )
    return profile_spec(
        specs[0], request, folder=folder, by_shape=by_shape, door=own_door or door, journal=journal, observer=observer
    )


def profile_spec(
    spec: RunSpec,
    request: ProfileRequest,
    *,
    folder: Path | None = None,
    by_shape: bool = False,
    door: Door | None = None,
    journal: Journal | None = None,
    observer: Observer | None = None,
) -> ProfileResult:
    """Time a few blocks, capture a trace, and say what is in the way. A worker that breaks raises `BenchError`."""
    from redline.analyze.profile import profile_of
    from redline.search.profile import as_profiled, capture
    from redline.store import ceilings_of
    from redline.trace.decode import read_trace

    observer = observer or Observer()
    with ExitStack() as stack:
        door = door or stack.enter_context(opened(spec.launch))
        (spec,) = checked([as_profiled(spec)], door)
        if journal is None:
            from redline.store import History

            journal = stack.enter_context(History.open())
        record_id = new_id()
        path = (folder or traces_folder() / record_id) / trace_name(spec)
        request = msgspec.structs.replace(request, path=str(path.absolute()))
        stack.enter_context(device_lock(spec.device, on_wait=observer.waiting))
        record = capture(spec, request, door, journal, observer, record_id=record_id)
    if record.failure is not None:
        raise BenchError(record.failure.kind, f"{record.failure.stage}: {record.failure.message}")
    known = ceilings_of([record])(record)
    return ProfileResult(profile_of([read_trace(path)], record, by_shape=by_shape, ceilings=known), record)


def profile_with_tool(
    spec: RunSpec,
    tool: str,
    *,
    steps: int | None = None,
    folder: Path | None = None,
    observer: Observer | None = None,
) -> ProfileResult:
    """The same steps under a vendor's profiler: its kernel table, and hardware counters where it reads them."""
    from redline.analyze.profile import with_tool
    from redline.search.outside import check_device, find_tool, profile_behind
    from redline.trace.vendors.tool import TOOLS

    chosen = TOOLS.get(tool)()
    find_tool(chosen)
    observer = observer or Observer()
    with ExitStack() as stack:
        (spec,) = checked([spec], stack.enter_context(opened(spec.launch)))
        check_device(chosen, spec.device)
        folder = (folder or traces_folder() / f"{chosen.name}-{new_id()}").absolute()
        stack.enter_context(device_lock(spec.device, on_wait=observer.waiting))
        record, table = profile_behind(spec, chosen, folder, steps, observer)
        observer.closed(record)
    if record.failure is not None or table is None:
        failure = record.failure
        raise BenchError(
            failure.kind if failure else "crash", f"{failure.stage}: {failure.message}" if failure else tool
        )
    return ProfileResult(with_tool(table.kernels, table.readings, record, chosen.name, table.notes), record)


def read_profile(*places: str | Path, by_shape: bool = False) -> Profile:
    """A profile from trace files, from a folder of them, or from the id of a record that was captured here."""
    from redline.analyze.profile import profile_of
    from redline.store import ceilings_of
    from redline.trace.decode import read_traces

    if not places:
        raise UsageError("name at least one trace file")
    paths = [Path(place).expanduser() for place in places]
    if len(paths) == 1 and not paths[0].exists() and _may_be_id(str(places[0])):
        record = _record(str(places[0]))
        assert record.trace is not None
        known = ceilings_of([record])(record)
        return profile_of(read_traces([Path(record.trace.path)]), record, by_shape=by_shape, ceilings=known)
    return profile_of(read_traces(paths), by_shape=by_shape)


def compare_profiles(before: str | Path | Profile, after: str | Path | Profile) -> ProfileDiff:
    """Two profiles, or what `read_profile` takes for one: which kernels and operators changed."""
    from redline.analyze.profile_diff import compare_profiles as compare

    sides = [read_profile(each) if isinstance(each, str | Path) else each for each in (before, after)]
    return compare(*sides)


def traces_folder() -> Path:
    import platformdirs

    return Path(platformdirs.user_data_path("redline")) / "traces"


def trace_name(spec: RunSpec) -> str:
    """As TensorBoard's profiler plug-in wants it: `worker.time.pt.trace.json.gz`, the worker being what it shows."""
    workload = spec.workload
    words = [workload.model, workload.task, str(spec.recipe), f"b{workload.batch}" if workload.batch else ""]
    worker = "_".join(re.sub(r"[^A-Za-z0-9+-]+", "-", word).strip("-") for word in words if word)
    return f"{worker[:120]}.{time.time_ns()}.pt.trace.json.gz"


def _may_be_id(text: str) -> bool:
    return re.fullmatch(r"[0-9a-f]{6,}", text) is not None


def _record(record_id: str) -> RunRecord:
    from redline.store import History

    with History.open() as history:
        record = history.load(record_id)
    if record.trace is None:
        raise TraceError(f"record {record.id} has no trace: it was measured, not profiled")
    if not Path(record.trace.path).exists():
        raise TraceError(f"the trace of record {record.id} is gone: {record.trace.path}")
    return record
