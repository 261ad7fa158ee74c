"""What a model has to do, module by module, and what each module makes of the device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from redline.analyze.attainable import LimitedBy
from redline.analyze.summary import RunSummary
from redline.model.environment import DeviceInfo
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import WorkloadInfo
from redline.model.spec import RunSpec
from redline.model.work import PRODUCTS, Ceilings, ModuleWork, Uncounted, WorkCount


class ModuleRow(Frozen):
    path: str
    type: str
    depth: int
    params: int
    macs: int
    flops: int
    """Products of the forward pass."""
    backward_flops: int
    other_flops: int
    min_bytes: int
    """Per operator, unfused, of the forward pass."""
    params_share: float | None
    """Share of the model's parameters; None where it has none."""
    macs_share: float | None
    """Share of the model's MACs."""
    backward_min_bytes: int
    latency_s: float | None = None
    """For one step, forward and backward; None where modules were not told apart."""
    share: float | None = None
    """Share of the time in all modules."""
    achieved_flops_per_s: float | None = None
    bound: LimitedBy | None = None
    """Which of its two limits is the higher one; None without ceilings."""


class PhaseSpeed(Frozen):
    """What a part of the step makes of its time, without the profiler."""

    name: str
    """`forward`, `backward`, `optimizer`, or `step` for all of it."""
    latency_s: float
    flops: int
    flops_per_s: float


class FlopsSummary(Frozen):
    model: str
    task: str
    recipe: str
    batch: int | None
    item: str
    input_shapes: tuple[str, ...]
    params: int
    macs: int
    flops: int
    backward_flops: int | None
    """None where it could not be counted; `notes` then says why."""
    min_bytes: int
    """What the operators of the forward pass must move, each by itself."""
    backward_min_bytes: int
    compulsory_bytes: int
    """What perfect fusion must still move."""
    other_flops: dict[str, int]
    """Norms, elementwise work and the like, forward: not part of `flops`."""
    flops_by_format: dict[str, int]
    """Of the forward pass."""
    uncounted: tuple[Uncounted, ...]
    for_these_inputs: str | None
    notes: tuple[Note, ...]
    modules: tuple[ModuleRow, ...]
    latency_s: float | None = None
    """Time in all modules, of one step."""
    latency_by: Literal["kernels", "operators"] | None = None
    """Whose times were added up: a CPU has no kernels."""
    device_name: str | None = None
    phases: tuple[PhaseSpeed, ...] = ()
    """Empty where nothing ran."""
    count_s: float = 0.0


def flops_summary(
    spec: RunSpec,
    info: WorkloadInfo,
    work: WorkCount,
    *,
    times: Mapping[str, float] | None = None,
    ceilings: Ceilings | None = None,
    device: DeviceInfo | None = None,
    measured: RunSummary | None = None,
    notes: tuple[Note, ...] = (),
) -> FlopsSummary:
    """`times`: seconds of a step directly in each module, by path."""
    inside = _with_all_inside(work.modules, times or {})
    whole = inside.get("") if times else None
    forward = [one for one in work.operators if one.phase == "forward"]
    has_backward = any(one.phase == "backward" for one in work.operators)
    return FlopsSummary(
        model=spec.workload.model,
        task=spec.workload.task,
        recipe=str(spec.recipe),
        batch=info.batch,
        item=info.item,
        input_shapes=info.input_shapes,
        params=work.params,
        macs=work.macs,
        flops=work.flops,
        backward_flops=work.backward_flops if has_backward else None,
        min_bytes=sum(one.bytes * one.calls for one in forward),
        backward_min_bytes=sum(one.bytes * one.calls for one in work.operators if one.phase == "backward"),
        compulsory_bytes=work.compulsory_bytes,
        other_flops=_other(work),
        flops_by_format=msgspec.structs.replace(work, operators=tuple(forward)).flops_by_format(),
        uncounted=work.uncounted,
        for_these_inputs=work.for_these_inputs,
        notes=(*info.notes, *work.notes, *notes),
        modules=tuple(
            _row(one, work, inside.get(one.path) if times else None, whole, ceilings) for one in work.modules
        ),
        latency_s=whole,
        latency_by=None if whole is None or device is None else "operators" if device.kind == "cpu" else "kernels",
        device_name=device.name if device is not None else None,
        phases=tuple(_phase_speeds(work, measured)) if measured is not None else (),
        count_s=work.seconds,
    )


def _phase_speeds(work: WorkCount, measured: RunSummary) -> Iterator[PhaseSpeed]:
    flops = {"forward": work.flops, "backward": work.backward_flops, "optimizer": 0}
    phases = measured.phases_s or ({"forward": measured.step_s} if measured.step_s else {})
    for name, seconds in phases.items():
        if name in flops and seconds:
            yield PhaseSpeed(name=name, latency_s=seconds, flops=flops[name], flops_per_s=flops[name] / seconds)
    if measured.step_s and measured.task == "train":
        whole = work.total_flops
        yield PhaseSpeed(name="step", latency_s=measured.step_s, flops=whole, flops_per_s=whole / measured.step_s)


def _row(
    one: ModuleWork, work: WorkCount, latency_s: float | None, whole_s: float | None, ceilings: Ceilings | None
) -> ModuleRow:
    return ModuleRow(
        path=one.path,
        type=one.type,
        depth=one.path.count(".") + 1 if one.path else 0,
        params=one.params,
        macs=one.flops // 2,
        flops=one.flops,
        backward_flops=one.backward_flops,
        other_flops=one.other_flops,
        min_bytes=one.bytes,
        params_share=one.params / work.params if work.params else None,
        macs_share=one.flops / work.flops if work.flops else None,
        backward_min_bytes=one.backward_bytes,
        latency_s=latency_s,
        share=latency_s / whole_s if latency_s is not None and whole_s else None,
        achieved_flops_per_s=(one.flops + one.backward_flops) / latency_s if latency_s else None,
        bound=_bound(one, ceilings),
    )


def _bound(one: ModuleWork, ceilings: Ceilings | None) -> LimitedBy | None:
    moved, flops = one.bytes + one.backward_bytes, one.flops + one.backward_flops
    if ceilings is None or not moved:
        return None
    peak = ceilings.flops_per_s.get(one.number_format)
    if flops and peak is None:
        return None
    return "compute" if peak and flops / peak >= moved / ceilings.copy_bytes_per_s else "memory"


def _other(work: WorkCount) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in work.operators:
        if one.phase == "forward" and one.kind not in PRODUCTS and one.flops:
            found[one.kind] = found.get(one.kind, 0) + one.flops * one.calls
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _with_all_inside(modules: tuple[ModuleWork, ...], own_s: Mapping[str, float]) -> dict[str, float]:
    """By path, its own time and that of everything below it."""
    total = {one.path: own_s.get(one.path, 0.0) for one in modules}
    for path in sorted(total, key=lambda path: -len(path)):
        if path:
            above = path.rpartition(".")[0]
            while above and above not in total:
                above = above.rpartition(".")[0]
            if above in total:
                total[above] += total[path]
    return total
