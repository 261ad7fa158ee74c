"""Throughput against batch, one curve per workload and recipe, from records."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.batch import BatchTrial, Knee, supported_knee
from redline.analyze.blocks import needed_bytes, retries_while_timed
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.identity import Subject
from redline.note import Note
from redline.record import Failure, RunRecord
from redline.spec import Frozen


class Curve(Frozen):
    """One line of each batch, batches growing; failed ones are points without a speed."""

    subject: Subject
    recipe: str
    points: tuple[BatchTrial, ...]
    rows: tuple[RunSummary, ...]
    """The row behind each point."""
    knee: Knee | None = None
    """None where the measured batches do not show one."""

    @property
    def measured(self) -> list[RunSummary]:
        return [row for row in self.rows if row.throughput_per_s is not None]


def curves_of(lines: Sequence[Line]) -> list[Curve]:
    """In the order in which subjects and recipes first appear."""
    chosen: dict[tuple[Subject, str], dict[int, Line]] = {}
    for line in lines:
        batch = line.row.batch
        if batch is None:
            continue
        curve = chosen.setdefault((line.subject, line.row.recipe), {})
        if batch not in curve or _standing(line) > _standing(curve[batch]):
            curve[batch] = line
    return [_curve(subject, recipe, points) for (subject, recipe), points in chosen.items()]


def _standing(line: Line) -> tuple[bool, bool, float, str]:
    """Which of several lines of one batch stands for it: one that ran, measured at length, the newest."""
    return line.row.failure is None, not line.is_capture, line.measured_at, line.record.id


def _curve(subject: Subject, recipe: str, points: dict[int, Line]) -> Curve:
    ordered = [points[batch] for batch in sorted(points)]
    trials = tuple(_point(batch, points[batch].record, points[batch].row) for batch in sorted(points))
    knee = supported_knee(trials)
    return Curve(
        subject=subject,
        recipe=recipe,
        points=trials,
        rows=tuple(line.row for line in ordered),
        knee=None if isinstance(knee, Note) else knee,
    )


def _point(batch: int, record: RunRecord, row: RunSummary) -> BatchTrial:
    if row.throughput_per_s is None:
        failure = row.failure or Failure(stage="measure", kind="crash", message="no step was timed")
        return BatchTrial(batch=batch, fits=False, failure=failure, record_id=record.id)
    return BatchTrial(
        batch=batch,
        fits=True,
        throughput_per_s=row.throughput_per_s,
        throughput_interval=row.throughput_interval,
        trust=row.verdict.labels,
        items_per_step=row.items_per_step,
        latency_p50_s=row.latency_s.p50 if row.latency_s else None,
        latency_p95_s=row.latency_s.p95 if row.latency_s else None,
        needed_bytes=needed_bytes(record),
        bound=row.bound.label,
        allocator_retries=retries_while_timed(record),
        record_id=record.id,
    )
