"""Records under the ceilings of their device, as the dashboard draws them: one picture per device and torch."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.summary import CeilingsOf, RunSummary
from redline.record import RunRecord
from redline.spec import Spec
from redline.units import format_seconds, format_share
from redline.work import Ceilings


class Roof(Spec):
    """A ceiling: of bandwidth (bytes per second, the slope) or of arithmetic (FLOP per second, flat)."""

    label: str
    bytes_per_s: float | None = None
    flops_per_s: float | None = None


class RooflinePoint(Spec):
    row: int
    """The place of its record in the report."""
    label: str
    intensity: float
    """FLOP per compulsory byte."""
    flops_per_s: float
    told: str


class RooflineChart(Spec):
    title: str
    roofs: tuple[Roof, ...]
    points: tuple[RooflinePoint, ...]


def roofline_charts(
    records: Sequence[RunRecord], rows: Sequence[RunSummary], ceilings_of: CeilingsOf
) -> list[RooflineChart]:
    """Of the records whose work was counted and whose device's ceilings are known."""
    points: dict[str, list[RooflinePoint]] = {}
    places: dict[str, Ceilings] = {}
    formats: dict[str, dict[str, None]] = {}
    for number, (record, row) in enumerate(zip(records, rows, strict=True)):
        known, point = ceilings_of(record), _point(number, row)
        if known is None or point is None:
            continue
        title = _title(known)
        places.setdefault(title, known)
        assert record.prepared is not None
        assert record.prepared.work is not None
        formats.setdefault(title, {}).update(dict.fromkeys(record.prepared.work.flops_by_format()))
        points.setdefault(title, []).append(point)
    return [
        RooflineChart(title=title, roofs=_roofs(places[title], list(formats[title])), points=tuple(under))
        for title, under in points.items()
    ]


def _point(number: int, row: RunSummary) -> RooflinePoint | None:
    found = row.roofline
    if found is None or not found.intensity:
        return None
    left = "n/a" if found.headroom is None else f"{found.headroom:.1f}×"
    wrong = f"; {found.error}" if found.error else ""
    told = f"{left} left to the roofline of {format_seconds(found.attainable_s)} ({found.limited_by})"
    return RooflinePoint(
        row=number,
        label=f"{row.recipe} · b{row.batch}" if row.batch else row.recipe,
        intensity=found.intensity,
        flops_per_s=found.achieved_flops_per_s,
        told=f"{told}; {format_share(found.efficiency)} of the peak{wrong}",
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
    """All that ceilings are kept by: two places with one title would share their roofs."""
    threads = f"{ceilings.threads} threads" if ceilings.threads else ""
    driver = f"driver {ceilings.driver}" if ceilings.driver else ""
    torch = f"torch {ceilings.torch}" if ceilings.torch else ""
    return ", ".join(part for part in (ceilings.name or ceilings.kind, threads, driver, torch) if part)
