"""Throughput against the batch: one curve for each recipe of a subject, and the knee where larger batches stop paying."""

from __future__ import annotations

from collections.abc import Sequence

from redline.analyze.batch import BatchTrial, Knee, supported_knee, timed_trial
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.model.fields import Frozen
from redline.model.identity import Subject
from redline.model.note import Note
from redline.model.record import Failure


class Curve(Frozen):
    """The rows of one recipe, one for each batch, with the batches growing."""

    subject: Subject
    recipe: str
    rows: tuple[RunSummary, ...]
    knee: Knee | None = None
    """None if the measured batches do not show one."""

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
        points = chosen.setdefault((line.subject, line.row.recipe), {})
        if batch not in points or _standing(line) > _standing(points[batch]):
            points[batch] = line
    return [_curve(subject, recipe, points) for (subject, recipe), points in chosen.items()]


def _standing(line: Line) -> tuple[bool, bool, float, str]:
    """Of several lines of one batch the one with the highest standing is shown: it ran, was measured at length, and is the newest."""
    return line.row.failure is None, not line.is_capture, line.measured_at, line.record.id


def _curve(subject: Subject, recipe: str, points: dict[int, Line]) -> Curve:
    lines = [points[batch] for batch in sorted(points)]
    knee = supported_knee([_trial(line) for line in lines])
    return Curve(
        subject=subject,
        recipe=recipe,
        rows=tuple(line.row for line in lines),
        knee=None if isinstance(knee, Note) else knee,
    )


def _trial(line: Line) -> BatchTrial:
    row, batch = line.row, line.row.batch or 0
    if row.throughput_per_s is None:
        failure = row.failure or Failure(stage="measure", kind="crash", message="no step was timed")
        return BatchTrial(batch=batch, fits=False, failure=failure, record_id=line.record.id)
    return timed_trial(batch, line.record, row)
