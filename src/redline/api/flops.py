"""`redline.flops`: parameters, MACs, FLOPs and bytes of one step, module by module."""

from __future__ import annotations

from typing import Any, Unpack

import msgspec

from redline.analyze.ceilings import module_seconds
from redline.analyze.flops import FlopsSummary, flops_summary
from redline.api.profile import DEFAULT_STEPS, profile_spec
from redline.api.settings import Settings, one_spec, takes_settings
from redline.api.workspace import Workspace, use
from redline.errors import UsageError
from redline.note import note
from redline.protocol import AskCount, CountAnswer, Profile
from redline.record import RunRecord
from redline.report.export import JsonDocument, json_document
from redline.report.flops import FlopsReport
from redline.report.terminal import as_text
from redline.spec import RunSpec

DISSOLVED = note("modules-dissolved", "no latency per module: under this recipe modules no longer run one by one")
UNMARKED = note("modules-not-marked", "no latency per module: no module of the model was seen in the trace")


class FlopsResult:
    def __init__(self, summary: FlopsSummary, record: RunRecord | None = None) -> None:
        self.summary = summary
        self.record = record

    def __str__(self) -> str:
        return as_text(FlopsReport(self.summary))

    def to_json(self) -> JsonDocument:
        return json_document("flops", self.summary)


@takes_settings
def flops(
    model: Any,
    inputs: Any | None = None,
    *,
    recipe: str = "baseline",
    loss: Any | None = None,
    latency: bool = False,
    workspace: Workspace | None = None,
    **settings: Unpack[Settings],
) -> FlopsResult:
    """Count one step, module by module. Nothing runs and no memory is needed.

    With `latency` a few steps run under the profiler, and each module carries its time.
    """
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a count", model, inputs, recipes=recipe, loss=loss, **settings)
        if latency:
            return _flops_with_latency(spec, working)
        (spec,) = working.checked([msgspec.structs.replace(spec, device="cpu")])
        counted = working.ask(AskCount(spec=spec), CountAnswer, spec.launch)
    return FlopsResult(flops_summary(spec, counted.workload, counted.work))


def module_profile() -> Profile:
    """A request that times each module."""
    return Profile(path="", active=DEFAULT_STEPS, shapes=False, modules=True)


def _flops_with_latency(spec: RunSpec, workspace: Workspace) -> FlopsResult:
    record = profile_spec(spec, module_profile(), workspace).record
    assert record is not None
    assert record.prepared is not None
    work = record.prepared.work
    if work is None:
        notes = record.prepared.workload.notes
        why = next((str(each) for each in notes if each.code == "work-not-counted"), "work not counted")
        raise UsageError(f"{spec.workload.model}: {why}")
    times = module_seconds(record)
    summary = flops_summary(
        record.spec,
        record.prepared.workload,
        work,
        times=times or None,
        ceilings=workspace.ceilings_of([record])(record),
        device=record.prepared.environment.device,
        notes=() if times else (DISSOLVED if record.prepared.capabilities.dissolves_modules else UNMARKED,),
    )
    return FlopsResult(summary, record)
