"""Throughput against batch, one curve per workload and recipe, from records."""

from __future__ import annotations

import math
from collections.abc import Sequence

from redline.analyze.batch import BatchTrial, curve_of, items_of_one, supported_knee
from redline.analyze.blocks import needed_bytes, retries_while_timed
from redline.analyze.summary import RunSummary
from redline.identity import Subject, batch_of, is_capture, subjects_of
from redline.note import Note
from redline.record import Failure, RunRecord
from redline.spec import Frozen


class Curve(Frozen):
    """The newest record of each batch, batches growing; failed ones are points without a speed."""

    subject: Subject
    recipe: str
    points: tuple[BatchTrial, ...]
    rows: tuple[RunSummary, ...]
    """The row behind each point."""
    knee_batch: int | None = None
    limit_per_s: float | None = None
    """The limit of throughput for large batches, where the knee is known."""

    @property
    def measured(self) -> list[RunSummary]:
        return [row for row in self.rows if row.throughput_per_s is not None]


def curves_of(records: Sequence[RunRecord], rows: Sequence[RunSummary]) -> list[Curve]:
    """In the order in which subjects and recipes first appear."""
    chosen: dict[tuple[Subject, str], dict[int, tuple[RunRecord, RunSummary]]] = {}
    for record, row, subject in zip(records, rows, subjects_of(records), strict=True):
        batch = batch_of(record)
        if batch is None:
            continue
        curve = chosen.setdefault((subject, row.recipe), {})
        if batch not in curve or standing(record) > standing(curve[batch][0]):
            curve[batch] = (record, row)
    return [_curve(subject, recipe, points) for (subject, recipe), points in chosen.items()]


def standing(record: RunRecord) -> tuple[bool, bool, bool, float, str]:
    """Which of several records of one batch stands for it: measured at length, then with its answers checked (the later
    replicates of a race check nothing), then the newest."""
    is_checked = record.prepared is not None and not record.prepared.numerics.is_left_out
    return record.failure is None, not is_capture(record), is_checked, record.created_at, record.id


def _curve(subject: Subject, recipe: str, points: dict[int, tuple[RunRecord, RunSummary]]) -> Curve:
    ordered = [points[batch] for batch in sorted(points)]
    trials = tuple(_point(batch, *points[batch]) for batch in sorted(points))
    knee, limit = _knee(trials)
    return Curve(
        subject=subject,
        recipe=recipe,
        points=trials,
        rows=tuple(row for _, row in ordered),
        knee_batch=knee,
        limit_per_s=limit,
    )


def _point(batch: int, record: RunRecord, row: RunSummary) -> BatchTrial:
    if row.throughput_per_s is None:
        failure = row.failure or Failure(stage="measure", kind="crash", message="no step was timed")
        return BatchTrial(batch=batch, fits=False, failure=failure, record_id=record.id)
    return BatchTrial(
        batch=batch,
        fits=True,
        throughput_per_s=row.throughput_per_s,
        items_per_step=row.items_per_step,
        latency_p50_s=row.latency_s.p50 if row.latency_s else None,
        latency_p95_s=row.latency_s.p95 if row.latency_s else None,
        needed_bytes=needed_bytes(record),
        bound=row.bound.label,
        allocator_retries=retries_while_timed(record),
        record_id=record.id,
    )


def _knee(points: Sequence[BatchTrial]) -> tuple[int | None, float | None]:
    curve, knee = curve_of(points), supported_knee(points)
    smallest = min((point.batch for point in points if point.fits), default=0)
    if curve is None or isinstance(knee, Note) or knee < smallest:
        return None, None
    return math.ceil(knee), curve.limit_per_s * items_of_one(points)
