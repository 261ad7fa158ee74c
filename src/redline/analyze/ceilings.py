"""Rows that the commands about limits show: a device's ceilings beside its datasheet, and a record under them."""

from __future__ import annotations

from pathlib import Path

from redline.analyze.advice import command_line, worth_trying
from redline.analyze.profile import Profile
from redline.analyze.roofline import Datasheet, Roofline, roofline_of
from redline.model.conditions import conditions_text
from redline.model.errors import UsageError
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import RunRecord
from redline.model.work import NOT_COUNTED, Ceilings
from redline.trace.classes import class_of
from redline.trace.decode import read_trace
from redline.trace.operators import module_times
from redline.trace.window import recorded, steps_of


class Figure(Frozen):
    """One limit, as measured and as the datasheet has it; None where there is none."""

    measured: float | None
    """The best of all bursts."""
    datasheet: float | None
    usual: float | None = None
    """What half of the bursts reached."""


class CeilingsSummary(Frozen):
    device_kind: str
    """`cpu`, `cuda` or `rocm`."""
    name: str
    driver: str | None
    torch: str | None
    threads: int | None
    tflops: dict[str, Figure]
    """Matrix products by number format, in TFLOP/s."""
    shapes: dict[str, str]
    copy_bytes_per_s: Figure
    launch_s: Figure
    cache_bytes: int | None
    card: str | None
    """What the datasheet calls it; None for a card that is not listed."""
    source: str | None
    verified: bool | None
    measured_at: float
    trusted: bool
    doubts: tuple[Note, ...]
    """Why the figures may be too low. They are then measured again at their next use."""
    notes: tuple[Note, ...]


class Point(Frozen):
    """A point under the roofline: a module without submodules."""

    name: str
    kind: str
    flops: int
    bytes: int
    seconds: float


class RooflineRow(Roofline, kw_only=True):
    """A record under the roofline of its device."""

    model: str
    task: str
    recipe: str
    batch: int | None
    device_name: str
    record_id: str
    setting: str = ""
    """Sizes, threads, versions, in words."""
    profiled: str | None = None
    """The command that shows where its time goes; None for a live module."""
    worth_trying: tuple[str, ...] = ()
    """Recipes that model and device allow, and that the device gains from by its own ceilings."""
    formats: tuple[str, ...]
    """What its products compute in."""
    points: tuple[Point, ...] = ()
    """Only where modules were told apart."""


def ceilings_summary(ceilings: Ceilings) -> CeilingsSummary:
    sheet = Datasheet.of(ceilings.name)
    peaks = sheet.flops_per_s if sheet else {}
    formats = dict.fromkeys((*ceilings.flops_per_s, *peaks))
    return CeilingsSummary(
        device_kind=ceilings.kind,
        name=ceilings.name,
        driver=ceilings.driver,
        torch=ceilings.torch,
        threads=ceilings.threads,
        tflops={
            form: Figure(
                measured=_tera(ceilings.flops_per_s.get(form)),
                datasheet=_tera(peaks.get(form)),
                usual=_tera(ceilings.usual.get(form)),
            )
            for form in formats
        },
        shapes=ceilings.shapes,
        copy_bytes_per_s=Figure(
            measured=ceilings.copy_bytes_per_s,
            datasheet=sheet.bytes_per_s if sheet else None,
            usual=ceilings.usual.get("copy"),
        ),
        launch_s=Figure(measured=ceilings.launch_s, datasheet=None),
        cache_bytes=ceilings.cache_bytes,
        card=sheet.card if sheet else None,
        source=sheet.source if sheet else None,
        verified=sheet.verified if sheet else None,
        measured_at=ceilings.measured_at,
        trusted=ceilings.is_trusted,
        doubts=ceilings.doubts,
        notes=ceilings.notes,
    )


def roofline_row(record: RunRecord, ceilings: Ceilings, profile: Profile | None = None) -> RooflineRow:
    """With a profile, each class of operators also carries the time it took."""
    prepared = record.prepared
    # Where a recipe dissolves operators, one kernel does the work of several kinds.
    is_whole = prepared is not None and not prepared.capabilities.dissolves_modules
    found = roofline_of(record, ceilings, class_times=class_seconds(profile) if profile and is_whole else None)
    if found is None or prepared is None or prepared.work is None:
        raise UsageError(f"{record.spec.workload.model} under {record.spec.recipe}: {_why_not(record)}")
    values = {name: getattr(found, name) for name in Roofline.__struct_fields__}
    return RooflineRow(
        **values,
        model=record.spec.workload.model,
        task=record.spec.workload.task,
        recipe=str(record.spec.recipe),
        batch=prepared.workload.batch,
        device_name=prepared.environment.device.name,
        record_id=record.id,
        setting=conditions_text(record),
        profiled=command_line("profile", record.spec, batch=record.spec.workload.batch),
        worth_trying=worth_trying(record, ceilings, host_bound=found.bound.label == "host"),
        formats=tuple(prepared.work.flops_by_format()),
        points=tuple(_points(record)),
    )


def module_seconds(record: RunRecord) -> dict[str, float]:
    """Seconds of a step directly in each module, from the record's own trace; empty where modules were not marked."""
    if record.trace is None or not Path(record.trace.path).is_file():
        return {}
    found = recorded(read_trace(Path(record.trace.path)))
    steps = steps_of([found])
    count = steps.count if steps else record.trace.steps
    return {path: nanoseconds / 1e9 / max(count, 1) for path, nanoseconds in module_times(found.links).items()}


def _points(record: RunRecord) -> list[Point]:
    work = record.prepared.work if record.prepared else None
    times = module_seconds(record) if work is not None and work.modules else {}
    if work is None or not times:
        return []
    around = {module.path.rpartition(".")[0] for module in work.modules if module.path}
    return [
        Point(
            name=module.path,
            kind=module.type,
            flops=module.flops + module.backward_flops,
            bytes=module.bytes + module.backward_bytes,
            seconds=times[module.path],
        )
        for module in work.modules
        if module.path not in around and times.get(module.path) and module.flops
    ]


def class_seconds(profile: Profile) -> dict[str, float]:
    """Seconds of a step by the operator that launched the work: a convolution may run as a kernel called gemm."""
    seconds: dict[str, float] = {}
    for row in profile.operators:
        own_s = row.device_self_s if profile.has_device else row.cpu_self_s
        kind = class_of(row.name)
        seconds[kind] = seconds.get(kind, 0.0) + own_s / (profile.steps_seen or 1)
    return {kind: taken for kind, taken in seconds.items() if taken > 0}


OF_GENERATION = "a generation has its roofline in 'redline run --task generate': the share of the copy bandwidth that decoding reaches"


def _why_not(record: RunRecord) -> str:
    if record.spec.workload.task == "generate":
        return OF_GENERATION
    notes = record.prepared.workload.notes if record.prepared else ()
    return next((str(each) for each in notes if each.code in NOT_COUNTED), "nothing was counted or measured")


def _tera(value: float | None) -> float | None:
    return None if value is None else value / 1e12
