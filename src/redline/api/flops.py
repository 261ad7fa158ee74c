"""`redline.flops`: parameters, MACs, FLOPs and bytes of one step, module by module."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Unpack

import msgspec
from rich.console import RenderableType

from redline.analyze.ceilings import module_seconds
from redline.analyze.flops import FlopsSummary, flops_summary
from redline.analyze.summary import summarize
from redline.api.profile import DEFAULT_STEPS, profile_spec
from redline.api.settings import Settings, one_spec, takes_settings
from redline.api.workspace import Workspace, use
from redline.model.errors import UsageError
from redline.model.note import note
from redline.model.protocol import Profile
from redline.model.questions import AskCount, CountAnswer
from redline.model.record import RunRecord
from redline.model.spec import RunSpec
from redline.model.work import NOT_COUNTED
from redline.report.export import JsonDocument, json_document
from redline.report.flops import FlopsReport
from redline.report.notebook import Shown

DISSOLVED = note("modules-dissolved", "no latency per module: under this recipe modules no longer run one by one")
UNMARKED = note("modules-not-marked", "no latency per module: no module of the model was seen in the trace")


class FlopsResult(Shown):
    def __init__(self, summary: FlopsSummary, record: RunRecord | None = None) -> None:
        self.summary = summary
        self.record = record

    def report(self) -> RenderableType:
        return FlopsReport(self.summary)

    def frame_rows(self) -> Sequence[Any]:
        return [self.summary]

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
    """Count one step, module by module. Nothing runs and no memory is needed; a function of yours is called once.

    With `latency` a few steps run under the profiler, and each module carries its time.
    """
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a count", model, inputs, recipes=recipe, loss=loss, **settings)
        if latency:
            return _flops_with_latency(spec, working)
        (on_cpu,) = working.checked([msgspec.structs.replace(spec, device="cpu")])
        is_run = on_cpu.workload.task == "step"
        (spec,) = working.checked([spec]) if is_run else (on_cpu,)
        with working.lock(spec.device) if is_run else nullcontext():
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
        why = next((str(each) for each in notes if each.code in NOT_COUNTED), "work not counted")
        raise UsageError(f"{spec.workload.model}: {why}")
    times = module_seconds(record)
    ceilings_of = workspace.ceilings_of([record])
    unmarked = () if times else (DISSOLVED if record.prepared.capabilities.dissolves_modules else UNMARKED,)
    summary = flops_summary(
        record.spec,
        record.prepared.workload,
        work,
        times=times or None,
        ceilings=ceilings_of(record),
        device=record.prepared.environment.device,
        measured=summarize([record], ceilings_of)[0],
        notes=unmarked,
    )
    return FlopsResult(summary, record)
