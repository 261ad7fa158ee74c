"""The record of a watched script: from what its processes wrote and what was metered beside them."""

from __future__ import annotations

import hashlib
import platform
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np
import psutil

from redline import __version__
from redline.analyze.profile import profile_of
from redline.analyze.watch import Log, Rates, Steps, drift_of, growth_of, main_logs, rates_of
from redline.analyze.watch_findings import Evidence, advice_of, out_of_memory
from redline.api.workspace import Workspace
from redline.launch.meters import Meters
from redline.launch.watch import ProcessLog
from redline.model.environment import DeviceInfo, Environment, Memory
from redline.model.errors import RedlineError, StoreError
from redline.model.identity import record_key
from redline.model.note import Note, note
from redline.model.record import (
    Block,
    ColdStart,
    Failure,
    Numerics,
    Prepared,
    RunRecord,
    StopReason,
    TraceRef,
    Warmup,
    WorkloadInfo,
    new_id,
)
from redline.model.spec import RunSpec, WorkloadSpec
from redline.model.watching import PHASES, Watched, WatchFinding, Window
from redline.system.telemetry import cpu_name
from redline.trace.decode import read_trace

BLOCK_STEPS = 1000
MOST_BLOCKS = 100
"""How many blocks of steps of a long run are kept, evenly spread."""
INTERRUPTS = (-2, -15, 130, 143)


class Seen(msgspec.Struct, frozen=True):
    """All that was observed of one run."""

    name: str
    command: tuple[str, ...]
    started_at: float
    exit_code: int | None
    logs: Sequence[ProcessLog]
    meters: Meters
    is_to_profile: bool = False


def keep(seen: Seen, workspace: Workspace) -> RunRecord:
    """Make the record of what was seen, and write it into the history.

    Where it cannot be written the record says so: the script has run, and its figures and exit code stay.
    """
    record_id = new_id()
    try:
        _keep_snapshots(seen, workspace, record_id)
        profiles, windows, trace = _profiles(seen, workspace, record_id)
    except OSError as error:
        record = record_of(seen, record_id)
        return _with_note(record, note("not-kept", f"the history's folder cannot be written: {error.strerror}"))
    record = record_of(seen, record_id, findings=profiles, windows=windows, trace=trace)
    try:
        workspace.journal.begin(msgspec.structs.replace(record, blocks=()))
        workspace.journal.finish(record)
    except StoreError as error:
        return _with_note(record, note("not-kept", f"the record was not kept: {error}"))
    return record


def _with_note(record: RunRecord, told: Note) -> RunRecord:
    return msgspec.structs.replace(record, notes=(*record.notes, told))


def record_of(
    seen: Seen,
    record_id: str,
    *,
    findings: Sequence[WatchFinding] = (),
    windows: Sequence[Window] = (),
    trace: TraceRef | None = None,
) -> RunRecord:
    logs = main_logs(seen.logs)
    rates = rates_of(seen.logs)
    if _broken(logs):  # a few steps of many: where their time went says nothing of the rest
        rates = msgspec.structs.replace(rates, shares={}, host_shares={})
    watched = _watched(seen, rates, findings, windows)
    if not logs:
        spec = RunSpec(workload=WorkloadSpec(model=f"watch:{seen.name}", task="train"))
        why = (
            "no optimizer step, backward pass or batch of a DataLoader was seen: the command trains nothing with torch, or its "
            "interpreter ignores PYTHONPATH; a loop of another kind counts its steps by watch.step() in 'with redline.watch() as watch:'"
        )
        broken = _broken(seen.logs)
        failure = Failure(stage="watch", kind="user", message=f"{why}{f' ({broken[0]})' if broken else ''}")
        if told := out_of_memory_of(seen):
            failure = Failure(stage="watch", kind="oom", message=out_of_memory(told).text)
        return RunRecord(
            id=record_id, spec=spec, created_at=seen.started_at, watched=watched, failure=failure, stopped="failed"
        )
    steps = Steps(logs[0])
    process = logs[0].process
    prepared = _prepared(seen, logs[0], steps, rates)
    device = process.get("device", {"kind": "cpu"})
    where = device["kind"] if device.get("index") is None else f"{device['kind']}:{device['index']}"
    spec = RunSpec(
        workload=WorkloadSpec(model=f"watch:{seen.name}", task="train", batch=prepared.workload.batch), device=where
    )
    stopped, notes = _ending(seen.exit_code)
    if steps.is_by_batch:
        notes += (note("by-batch", "neither optimizer nor backward pass was seen: each batch counts as a step"),)
    if seen.is_to_profile and not windows:
        notes += (note("nothing-captured", "no steps were profiled: the loop ended before the capture did"),)
    if broken := _broken(seen.logs):
        notes += (note("interrupted", f"watching ended before the script did: {broken[0]}"),)
    return RunRecord(
        id=record_id,
        spec=spec,
        key=record_key(spec, prepared),
        created_at=seen.started_at,
        prepared=prepared,
        blocks=_blocks(seen, steps),
        watched=watched,
        trace=trace,
        stopped=stopped,
        notes=notes,
    )


def _broken(logs: Sequence[Log]) -> list[str]:
    """Why watching ended before the script did; empty where it did not."""
    return [str(log.facts["broken"]["error"]) for log in logs if "broken" in log.facts]


def out_of_memory_of(seen: Seen) -> dict[str, Any]:
    """What the first process that ran out of memory wrote about it; empty where none did."""
    return next((log.facts["oom"] for log in seen.logs if "oom" in log.facts), {})


def _keep_snapshots(seen: Seen, workspace: Workspace, record_id: str) -> None:
    """The allocator's snapshots, beside the history: the folder they lie in goes away."""
    for number, log in enumerate(seen.logs):
        told = log.facts.get("oom", {})
        if told.get("snapshot") and Path(told["snapshot"]).is_file():
            workspace.traces.mkdir(parents=True, exist_ok=True)
            kept = workspace.traces / f"watch-{record_id}-oom-{number}.pickle"
            shutil.move(told["snapshot"], kept)
            told["snapshot"] = str(kept)


def _ending(exit_code: int | None) -> tuple[StopReason, tuple[Any, ...]]:
    if not exit_code:
        return "target", ()
    if exit_code in INTERRUPTS:
        return "interrupted", ()
    told = f"exit code {exit_code}" if exit_code > 0 else f"signal {-exit_code}"
    return "interrupted", (note("failed", f"the script ended with {told}; its steps until then are reported"),)


def _watched(seen: Seen, rates: Rates, findings: Sequence[WatchFinding], windows: Sequence[Window]) -> Watched:
    logs = main_logs(seen.logs)
    uuids = card_uuids(seen.logs)
    lead: Log | None = logs[0] if logs else None
    steps = Steps(lead) if lead is not None else None
    broke = out_of_memory_of(seen)
    evidence = Evidence(rates=rates, out_of_memory=broke)
    if lead is not None and steps is not None:
        evidence = Evidence(
            rates=rates,
            process=lead.process,
            models=lead.facts.get("models", {}),
            usage=lead.facts.get("usage", {}),
            drift=drift_of(steps),
            growth=growth_of(lead.pulses, seen.meters.resident),
            out_of_memory=broke,
        )
    energy = seen.meters.energy_j(uuids)
    seconds = (
        float(steps.ended_s[-1] - steps.ended_s[0] + steps.wall_s[0]) if steps is not None and steps.count else 0.0
    )
    known = {each.code for each in findings}
    return Watched(
        command=seen.command,
        exit_code=seen.exit_code,
        started_at=seen.started_at,
        seconds=seconds,
        steps=rates.steps,
        samples=rates.samples,
        ranks=max(len(logs), 1),
        steps_per_s=rates.steps_per_s,
        samples_per_s=rates.samples_per_s,
        shares=rates.shares,
        device_clock=rates.device_clock,
        paused_s=rates.paused_s,
        first_step_s=rates.first_step_s,
        outliers=rates.outliers,
        outlier_share=rates.outlier_share,
        loss=rates.loss,
        gpu_utilisation=seen.meters.utilisation(uuids),
        energy_j=energy,
        power_w=energy / seconds if energy is not None and seconds > 0 else None,
        peak_bytes=_peak_bytes(seen, logs),
        findings=tuple(
            sorted(
                [*(each for each in advice_of(evidence) if each.code not in known), *findings],
                key=lambda each: -each.gain_bound,
            )
        ),
        windows=tuple(windows),
    )


def card_uuids(logs: Sequence[Any]) -> set[str]:
    """Of the GPUs that the watched processes compute on."""
    found = {str(log.process.get("device", {}).get("uuid") or "") for log in logs}
    return {uuid.removeprefix("GPU-") for uuid in found if uuid}


def _peak_bytes(seen: Seen, logs: Sequence[Log]) -> int | None:
    on_device = [pulse["memory"]["reserved"] for log in logs for pulse in log.pulses if pulse.get("memory")]
    if on_device:
        return int(max(on_device))
    return max((size for _, size in seen.meters.resident), default=None)


def _prepared(seen: Seen, log: Log, steps: Steps, rates: Rates) -> Prepared:
    models, usage = log.facts.get("models", {}).get("models", []), log.facts.get("usage", {})
    samples = steps.samples[steps.counted]
    samples = samples[samples > 0]  # several steps may share a batch
    batch = max(round(median(samples.tolist())), 1) if len(samples) else None
    inputs = tuple(usage.get("inputs", []))
    return Prepared(
        environment=_environment(seen, log.process),
        workload=WorkloadInfo(
            source="a watched script",
            class_name=" and ".join(model["class_name"] for model in models[:3]) or "unknown",
            parameters=sum(int(model["parameters"]) for model in models),
            items_per_step=batch or 1,
            item="sample" if batch else "step",
            batch=batch,
            batch_from="declared" if batch else "unknown",
            input_shapes=inputs,
            model_hash=_digest(model["hash"] for model in models),
            input_hash=_digest(shape.partition("×")[2] for shape in inputs),
        ),
        cold_start=ColdStart(first_call_s=rates.first_step_s),
        numerics=Numerics(method="unchecked", passed=True, reason=note("unchecked", "a script's own arithmetic")),
        warmup=Warmup(steady=True),
        memory=Memory(),
    )


def _digest(words: Any) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]


def _environment(seen: Seen, process: dict[str, Any]) -> Environment:
    told = process.get("device", {"kind": "cpu"})
    device = {"name": cpu_name(), **told} if told.get("kind") == "cpu" else told
    return Environment(
        device=DeviceInfo(**{**device, **seen.meters.facts(card_uuids(seen.logs))}),
        hostname=socket.gethostname(),
        platform=platform.platform(),
        python=str(process.get("python", "")),
        redline=__version__,
        cpu=cpu_name(),
        physical_cores=psutil.cpu_count(logical=False),
        logical_cores=psutil.cpu_count(),
        memory_bytes=psutil.virtual_memory().total,
        threads=process.get("threads"),
        versions={name: version for name, version in process.get("versions", {}).items() if version},
    )


def _blocks(seen: Seen, steps: Steps) -> tuple[Block, ...]:
    """The counted steps in pieces; of a long run some pieces. The last piece carries what was metered."""
    kept = np.flatnonzero(steps.counted)
    pieces = np.array_split(kept, max(1, -(-len(kept) // BLOCK_STEPS)))
    chosen = [pieces[number] for number in sorted({round(x) for x in np.linspace(0, len(pieces) - 1, MOST_BLOCKS)})]
    uuids = card_uuids(seen.logs)
    blocks = []
    for number, piece in enumerate(chosen):
        is_last = number == len(chosen) - 1
        blocks.append(
            Block(
                kind="throughput",
                clock="host",
                samples=tuple(steps.wall_s[piece].tolist()),
                phases={name: tuple(steps.phases_s[piece, at].tolist()) for at, name in enumerate(PHASES)},
                wall_s=float(steps.wall_s[piece].sum()),
                started_at=seen.started_at,
                round=number,
                memory=Memory(peak_rss_bytes=_peak_bytes(seen, [])) if is_last else Memory(),
                telemetry=seen.meters.telemetry(uuids) if is_last else (),
            )
        )
    return tuple(blocks)


def _profiles(
    seen: Seen, workspace: Workspace, record_id: str
) -> tuple[list[WatchFinding], list[Window], TraceRef | None]:
    """The captured windows: kept beside the history, and what the last one says."""
    logs = main_logs(seen.logs)
    captured = logs[0].windows if logs else []  # type: ignore[attr-defined]
    if not captured:
        return [], [], None
    steps = Steps(logs[0])
    findings: list[WatchFinding] = []
    windows, trace = [], None
    for number, fact in enumerate(captured):
        folder = workspace.traces
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"watch-{record_id}-{number}.pt.trace.json"
        shutil.move(fact["path"], path)
        around = np.flatnonzero(steps.counted & (np.abs(np.arange(steps.count) - fact["ended_with"]) < 100))
        try:
            profile = profile_of([read_trace(path)])
            findings = [
                WatchFinding(code=each.code, text=each.evidence, change=each.next, gain_bound=each.gain_bound)
                for each in profile.findings
            ]
        except RedlineError as error:
            findings = [
                WatchFinding(code="no-profile", text=f"the capture cannot be read: {error}", change="", gain_bound=1.0)
            ]
        at = min(int(fact["ended_with"]), steps.count) - 1
        windows.append(
            Window(
                at_s=max(float(steps.ended_s[at] - steps.ended_s[0]), 0.0),
                step=int(fact["ended_with"]),
                steps=int(fact["steps"]),
                step_s=float(np.median(steps.wall_s[around])) if len(around) else None,
                trace=path.name,
                top=tuple(each.code for each in findings[:3]),
            )
        )
        trace = TraceRef(path=str(path), steps=int(fact["steps"]), capture_s=0.0, bytes=path.stat().st_size)
    return findings, windows, trace
