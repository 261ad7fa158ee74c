"""This module makes the roofline charts of the dashboard, which show what was measured under the ceilings of its device."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.measurement import CeilingsOf, Line, Measurement
from redline.model.fields import Frozen
from redline.model.units import counted, format_seconds, format_share
from redline.model.work import Ceilings


class Roof(Frozen):
    """A roof is a ceiling of bandwidth (bytes per second, the slope) or of arithmetic (FLOP per second, flat)."""

    label: str
    bytes_per_s: float | None = None
    flops_per_s: float | None = None


class OperatorPoint(Frozen):
    """This is one kind of operators at its own limit, unfused."""

    label: str
    intensity: float
    flops_per_s: float
    limited_by: str


class RooflinePoint(Frozen):
    row: int
    """This is the index of its line in the report."""
    label: str
    intensity: float
    """There are this many FLOP per compulsory byte."""
    flops_per_s: float
    told: str
    beaten: str = ""
    """It says why the point lies above a roof; it is empty if it does not."""
    operators: tuple[OperatorPoint, ...] = ()


class RooflineChart(Frozen):
    title: str
    roofs: tuple[Roof, ...]
    points: tuple[RooflinePoint, ...]


def roofline_charts(lines: Sequence[Line], ceilings_of: CeilingsOf) -> list[RooflineChart]:
    """Returns charts of the lines whose work was counted and whose device's ceilings are known."""
    points: dict[str, list[RooflinePoint]] = {}
    ceilings_by_title: dict[str, Ceilings] = {}
    formats: dict[str, dict[str, None]] = {}
    for number, line in enumerate(lines):
        record = line.record
        known, point = ceilings_of(record), _point(number, line.row)
        if known is None or point is None:
            continue
        title = _title(known)
        ceilings_by_title.setdefault(title, known)
        assert record.prepared is not None
        assert record.prepared.work is not None
        formats.setdefault(title, {}).update(dict.fromkeys(record.prepared.work.flops_by_format()))
        points.setdefault(title, []).append(point)
    return [
        RooflineChart(title=title, roofs=_roofs(ceilings_by_title[title], list(formats[title])), points=tuple(under))
        for title, under in points.items()
    ]


def _point(number: int, row: Measurement) -> RooflinePoint | None:
    found = row.roofline
    if found is None or not found.intensity:
        return None
    left = "n/a" if found.headroom is None else f"{found.headroom:.1f}×"
    wrong = f"; {found.error}" if found.error else ""
    told = f"{left} left to the roofline of {format_seconds(found.attainable_s)} ({found.limited_by or 'n/a'})"
    return RooflinePoint(
        row=number,
        label=f"{row.recipe} · b{row.batch}" if row.batch else row.recipe,
        intensity=found.intensity,
        flops_per_s=found.achieved_flops_per_s,
        told=f"{told}; {format_share(found.efficiency)} of the peak{wrong}",
        beaten=str(found.error) if found.error else "",
        operators=tuple(
            OperatorPoint(
                label=one.name,
                intensity=one.intensity,
                flops_per_s=one.flops / one.attainable_s,
                limited_by=one.limited_by,
            )
            for one in found.classes
            if one.flops and one.attainable_s and one.limited_by is not None
        ),
    )


def _roofs(ceilings: Ceilings, formats: Sequence[str]) -> tuple[Roof, ...]:
    bandwidth = ceilings.copy_bytes_per_s
    slope = Roof(label=f"copy, {bandwidth / 1e9:.4g} GB/s", bytes_per_s=bandwidth)
    flat = [
        Roof(label=f"{form}, {ceilings.flops_per_s[form] / 1e12:.3g} TFLOP/s", flops_per_s=ceilings.flops_per_s[form])
        for form in formats
        if form in ceilings.flops_per_s
    ]
    return (slope, *flat)


def _title(ceilings: Ceilings) -> str:
    """Returns a title with everything under which ceilings are stored, so that two devices never share a chart."""
    threads = counted(ceilings.threads, "thread") if ceilings.threads else ""
    driver = f"driver {ceilings.driver}" if ceilings.driver else ""
    torch = f"torch {ceilings.torch}" if ceilings.torch else ""
    return ", ".join(part for part in (ceilings.name or ceilings.kind, threads, driver, torch) if part)
