"""`redline flops`: parameters, MACs, FLOPs and bytes of one step, module by module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from redline.analyze.advice import command_line
from redline.analyze.attainable import LimitedBy
from redline.analyze.measurement import Measurement, measurements
from redline.model.errors import UsageError
from redline.model.fields import MOST_DEPTH
from redline.model.metrics import Fact, Figure, Headline, Metric, Row, Table
from redline.model.note import note
from redline.model.protocol import AskCount, CountAnswer, Profile
from redline.model.record import RunRecord, WorkloadInfo
from redline.model.settings import OUTPUT, WHAT, setting
from redline.model.spec import RunSpec
from redline.model.work import NOT_COUNTED, PRODUCTS, Ceilings, ModuleWork, WorkCount
from redline.show.result import Result
from redline.trace.decode import read_trace
from redline.trace.tree import module_times
from redline.trace.window import recorded, steps_of
from redline.verbs.capture import DEFAULT_STEPS, profile_spec
from redline.verbs.verb import WORKLOAD, ModelName, OneRecipe, verb
from redline.verbs.workspace import Workspace, one_spec, use

SHOWN_DEPTH = 2
"""The tree of modules goes so deep where nobody says: a third level of most models is longer than a screen."""
MOST_LISTED = 200
"""Modules that a person is shown of models that are wide: those that do the most."""

PARAMS = Figure(name="params", unit="count", header="parameters", doc="Of the module and all inside it.")
PARAMS_SHARE = Figure(name="params_share", unit="share", header="params %", doc="Share of the model's parameters.")
MACS = Figure(name="macs", unit="count", header="MACs", doc="Multiplications with additions of the forward pass.")
MACS_SHARE = Figure(name="macs_share", unit="share", header="MACs %", doc="Share of the model's MACs.")
FLOPS = Figure(name="flops", unit="FLOP", header="FLOPs", doc="Products of the forward pass, two for each MAC.")
BACKWARD = Figure(name="backward_flops", unit="FLOP", header="backward FLOPs", doc="Products of the backward pass.")
OTHER = Figure(name="other_flops", unit="FLOP", header="other FLOPs", doc="Norms, elementwise work and reductions.")
MIN_BYTES = Figure(name="min_bytes", unit="B", header="min bytes", doc="Operator by operator, unfused, forward.")
BACKWARD_BYTES = Figure(name="backward_min_bytes", unit="B", doc="The same of the backward pass.")
COMPULSORY = Figure(name="compulsory_bytes", unit="B", header="compulsory bytes", doc="What fusion must still move.")
LATENCY = Figure(name="latency", unit="s", better="lower", doc="Time of one step, forward and backward.")
TIME_SHARE = Figure(name="time_share", unit="share", header="of time", doc="Share of the time in all modules.")
ACHIEVED = Figure(name="achieved", unit="FLOP/s", better="higher", doc="FLOPs over the time that they took.")

DISSOLVED = note("modules-dissolved", "no latency per module: under this recipe modules no longer run one by one")
UNMARKED = note("modules-not-marked", "no latency per module: no module of the model was seen in the trace")


@verb(
    takes=WORKLOAD,
    examples=("redline flops vit_b_16 --task train --depth 3", "redline flops resnet50 --batch 32 --latency"),
)
def flops(
    model: ModelName,
    inputs: Any | None = None,
    *,
    recipe: OneRecipe = "baseline",
    depth: Annotated[
        int | None,
        setting("How deep the module tree goes. Default: 2.", group=OUTPUT, least=0, most=MOST_DEPTH),
    ] = None,
    latency: Annotated[
        bool, setting("Run and profile a few steps, which gives each module its time.", group=WHAT)
    ] = False,
    loss: Any | None = None,
    workspace: Workspace | None = None,
    **settings: Any,
) -> Result:
    """Count parameters, MACs, FLOPs and bytes per module.

    Forward and backward are counted without running the model; a function of yours is called once. With --latency a few steps run
    under the profiler, and each module carries its time.
    """
    with use(workspace) as opened:
        spec, working = one_spec(opened, "a count", model, inputs, recipes=recipe, loss=loss, **settings)
        is_run = spec.workload.task == "step"
        again = command_line("flops", spec, batch=spec.workload.batch)
        if latency:
            return _with_latency(spec, working, depth)
        (spec,) = working.checked([spec if is_run else msgspec.structs.replace(spec, device="cpu")])
        with working.lock(spec.device) if is_run else nullcontext():
            counted = working.ask(AskCount(spec=spec), CountAnswer, spec.launch)
    found = result_of(spec, counted.workload, counted.work, depth)
    return replace(found, next=f"{again} --latency" if again else "")


def module_profile() -> Profile:
    """Returns a request that times each module."""
    return Profile(path="", active=DEFAULT_STEPS, shapes=False, modules=True)


def module_seconds(record: RunRecord) -> dict[str, float]:
    """Returns the seconds of a step directly in each module, from the record's own trace. It is empty where modules were not marked."""
    if record.trace is None or not Path(record.trace.path).is_file():
        return {}
    found = recorded(read_trace(Path(record.trace.path)))
    steps = steps_of([found])
    count = steps.count if steps else record.trace.steps
    return {path: seconds / max(count, 1) for path, seconds in module_times(found.links).items()}


def _with_latency(spec: RunSpec, workspace: Workspace, depth: int | None) -> Result:
    record = profile_spec(spec, module_profile(), workspace).record
    assert record is not None
    assert record.prepared is not None
    work = record.prepared.work
    if work is None:
        notes = record.prepared.workload.notes
        why = next((str(each) for each in notes if each.code in NOT_COUNTED), "work not counted")
        raise UsageError(f"{spec.workload.model}: {why}")
    return result_of(record.spec, record.prepared.workload, work, depth, record, workspace)


# What it shows


def result_of(
    spec: RunSpec,
    info: WorkloadInfo,
    work: WorkCount,
    depth: int | None = None,
    record: RunRecord | None = None,
    workspace: Workspace | None = None,
) -> Result:
    """Returns the whole step, the parts of a step that were timed, and the tree of modules. `record`: a profile with times per module."""
    times: Mapping[str, float] = {}
    ceilings: Ceilings | None = None
    device: dict[str, Fact] = {}
    phases: tuple[Row, ...] = ()
    notes = (*info.notes, *work.notes)
    if record is not None and record.prepared is not None and workspace is not None:
        times = _with_all_inside(work.modules, module_seconds(record))
        ceilings_of = workspace.ceilings_of([record])
        ceilings = ceilings_of(record)
        phases = tuple(_phase_rows(work, measurements([record], ceilings_of)[0]))
        found = record.prepared.environment.device
        device = {"device": found.name, "latency_by": "operators" if found.kind == "cpu" else "kernels"}
        if not times:
            notes += (DISSOLVED if record.prepared.capabilities.dissolves_modules else UNMARKED,)
    whole = _whole_row(work, times)
    about: dict[str, Fact] = {"model": spec.workload.model, "task": spec.workload.task, "batch": info.batch}
    about |= {"recipe": str(spec.recipe), "inputs": ", ".join(info.input_shapes), **device}
    about |= {"for_these_inputs": work.for_these_inputs} if work.for_these_inputs else {}
    title = (about["model"], about["task"], f"batch {info.batch}" if info.batch else "", about["recipe"])
    return Result(
        verb="flops",
        headline=_headline(spec, info, whole, work),
        tables=(
            Table(
                name="step",
                title=" · ".join(str(part) for part in title if part),
                rows=(whole,),
                columns=("step", "params", "macs", "flops", "backward_flops", "compulsory_bytes", "latency"),
            ),
            Table(name="phases", title="parts of a step, timed without the profiler", rows=phases),
            Table(
                name="modules",
                title="modules, each with everything inside it",
                rows=tuple(_module_rows(work, times, ceilings, depth)),
                columns=(
                    "module",
                    "params",
                    "params_share",
                    "macs",
                    "macs_share",
                    "min_bytes",
                    "latency",
                    "time_share",
                ),
            ),
            Table(name="others", title="not products", rows=tuple(_other_rows(work)), is_detail=True),
        ),
        about=about,
        notes=tuple(notes),
        record_ids=(record.id,) if record is not None else (),
    )


def _headline(spec: RunSpec, info: WorkloadInfo, whole: Row, work: WorkCount) -> Headline:
    figures = {"model": spec.workload.model, "params": whole["params"], "macs": whole["macs"], "flops": whole["flops"]}
    batch = f" for a batch of {info.batch}" if info.batch else ""
    text = "{model} has {params} parameters and takes {macs} MACs ({flops} FLOPs) forward" + batch
    if "backward_flops" in whole:
        figures["backward"] = whole["backward_flops"]
        text += ", and {backward} FLOPs backward"
    if work.uncounted:
        text += f"; {len(work.uncounted)} operators have no formula and are not counted"
    return Headline(template=f"{text}.", figures=figures)


def _whole_row(work: WorkCount, times: Mapping[str, float]) -> Row:
    moved = {
        phase: sum(one.bytes * one.calls for one in work.operators if one.phase == phase)
        for phase in ("forward", "backward")
    }
    has_backward = any(one.phase == "backward" for one in work.operators)
    uncounted = ", ".join(f"{one.name} ({one.calls}×)" for one in work.uncounted)
    formats: dict[str, int] = {}
    for one in work.operators:
        if one.kind in PRODUCTS and one.phase == "forward":
            formats[one.number_format] = formats.get(one.number_format, 0) + one.flops * one.calls
    return Row(
        facts={"step": "whole step", "formats": ", ".join(formats), "not_counted": uncounted or None},
        metrics=(
            PARAMS(work.params),
            MACS(work.macs),
            FLOPS(work.flops),
            *([BACKWARD(work.backward_flops)] if has_backward else []),
            MIN_BYTES(moved["forward"]),
            BACKWARD_BYTES(moved["backward"]),
            COMPULSORY(work.compulsory_bytes),
            *(Figure(name=f"{form}_flops", unit="FLOP")(count) for form, count in formats.items()),
            *([LATENCY(times[""])] if "" in times else []),
            Figure(name="count_time", unit="s", doc="What counting took.")(work.seconds),
        ),
    )


def _phase_rows(work: WorkCount, measured: Measurement) -> Iterator[Row]:
    """Yields a row on what each part of a step makes of its time."""
    flops = {"forward": work.flops, "backward": work.backward_flops, "optimizer": 0, "step": work.total_flops}
    times = dict(measured.phases_s or ({"forward": measured.step_s} if measured.step_s else {}))
    times |= {"step": measured.step_s} if measured.step_s and measured.task == "train" else {}
    for name, seconds in times.items():
        if name in flops and seconds:
            metrics = (LATENCY(seconds), FLOPS(flops[name]), ACHIEVED(flops[name] / seconds if flops[name] else None))
            yield Row(facts={"phase": name}, metrics=metrics)


def _module_rows(
    work: WorkCount, times: Mapping[str, float], ceilings: Ceilings | None, depth: int | None
) -> Iterator[Row]:
    """Yields the tree as deep as asked. Of a model that is wide those that do the most are shown; the others are details."""
    deepest = SHOWN_DEPTH if depth is None else depth
    within = [one for one in work.modules if _depth(one) <= deepest]
    ranked = sorted(within, key=lambda one: (-one.flops, -one.params, -one.bytes))
    shown = {one.path for one in (ranked[:MOST_LISTED] if depth is None else ranked)}
    for one in work.modules:
        own = one.path.rpartition(".")[2]
        facts: dict[str, Fact] = {
            "module": f"{own} ({one.type})" if own else one.type,
            "path": one.path,
            "type": one.type,
            "depth": _depth(one),
        }
        bound = _bound(one, ceilings)
        yield Row(
            facts=facts | ({"bound": bound} if bound else {}),
            metrics=tuple(_module_metrics(one, work, times)),
            depth=_depth(one),
            is_detail=one.path not in shown,
        )


def _depth(one: ModuleWork) -> int:
    return one.path.count(".") + 1 if one.path else 0


def _module_metrics(one: ModuleWork, work: WorkCount, times: Mapping[str, float]) -> Iterator[Metric]:
    yield PARAMS(one.params)
    yield PARAMS_SHARE(one.params / work.params if work.params else None)
    yield MACS(one.flops // 2)
    yield MACS_SHARE(one.flops / work.flops if work.flops else None)
    yield MIN_BYTES(one.bytes)
    yield FLOPS(one.flops)
    yield BACKWARD(one.backward_flops)
    yield OTHER(one.other_flops)
    yield BACKWARD_BYTES(one.backward_bytes)
    if seconds := times.get(one.path):
        yield LATENCY(seconds)
        yield TIME_SHARE(seconds / times[""])
        yield ACHIEVED((one.flops + one.backward_flops) / seconds)


def _bound(one: ModuleWork, ceilings: Ceilings | None) -> LimitedBy | None:
    """Returns which of its two limits is the higher one, or None where that is not known."""
    moved, flops = one.bytes + one.backward_bytes, one.flops + one.backward_flops
    peak = ceilings.flops_per_s.get(one.number_format) if ceilings is not None else None
    if ceilings is None or not moved or (flops and peak is None):
        return None
    return "compute" if peak and flops / peak >= moved / ceilings.copy_bytes_per_s else "memory"


def _other_rows(work: WorkCount) -> Iterator[Row]:
    """Norms, elementwise work and the like of the forward pass, which are not part of the FLOPs."""
    found: dict[str, int] = {}
    for one in work.operators:
        if one.phase == "forward" and one.kind not in PRODUCTS and one.flops:
            found[one.kind] = found.get(one.kind, 0) + one.flops * one.calls
    for kind, count in sorted(found.items(), key=lambda item: -item[1]):
        yield Row(facts={"kind": kind}, metrics=(OTHER(count),))


def _with_all_inside(modules: tuple[ModuleWork, ...], own_s: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds by path, with those of everything below it. It is empty where no module was timed."""
    if not own_s:
        return {}
    total = {one.path: own_s.get(one.path, 0.0) for one in modules}
    for path in sorted(total, key=lambda path: -len(path)):
        above: str | None = path
        while above and (above := above.rpartition(".")[0]) not in total:
            pass
        if path and above is not None and above in total:
            total[above] += total[path]
    return total
