"""What was measured of one subject (its curves of throughput against batch), and which rows a recommendation may rest on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from redline.analyze.advice import command_line
from redline.analyze.batch import BatchTrial, Knee, supported_knee, timed_trial
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.analyze.trust import DISQUALIFYING
from redline.model.fields import Frozen
from redline.model.identity import Subject
from redline.model.note import Note
from redline.model.record import Failure, Numerics, RunRecord
from redline.model.spec import BASELINE, RunSpec
from redline.model.units import format_ratio, format_seconds, significant

CLEARLY_FASTER = 1.03
"""Rows that were not interleaved have no interval: smaller differences are ignored."""


def may_recommend(row: RunSummary, proven: Collection[str] = ()) -> bool:
    """Measured, trusted, with acceptable outputs, and not quantized, which only a check on real data can approve.

    `proven`: recipes whose answers are known from other batches, for rows that only timed. Numerics hardly depend on the
    batch.
    """
    is_right = row.numerics is not None and row.numerics.passed
    quantizes = row.capabilities is not None and row.capabilities.quantizes
    return _is_believable(row) and not quantizes and (is_right or (_is_unchecked(row) and row.recipe in proven))


def proven_recipes(rows: Sequence[RunSummary]) -> set[str]:
    """Recipes of one subject whose outputs passed and never failed. The baseline is the reference itself."""
    checks = [(row.recipe, row.numerics) for row in rows if row.numerics is not None]
    right = {recipe for recipe, numerics in checks if numerics.passed}
    return (right | {BASELINE}) - {recipe for recipe, numerics in checks if numerics.is_wrong}


def recommendable(lines: Sequence[Line]) -> list[RunSummary]:
    """The rows that a recommendation may rest on."""
    rows_of: dict[Subject, list[RunSummary]] = {}
    for line in lines:
        rows_of.setdefault(line.subject, []).append(line.row)
    proven = {subject: proven_recipes(own) for subject, own in rows_of.items()}
    return [line.row for line in lines if may_recommend(line.row, proven[line.subject])]


def _is_believable(row: RunSummary) -> bool:
    return row.throughput_per_s is not None and not DISQUALIFYING & set(row.verdict.labels)


def is_decided(row: RunSummary) -> bool:
    """Whether its comparison with the first settled the question, by times of both that are not doubted."""
    versus = row.vs_first
    return (
        versus is not None
        and versus.verdict != "inconclusive"
        and not versus.first_doubted
        and row.throughput_per_s is not None
        and row.verdict.settles
    )


def is_surely_faster(row: RunSummary) -> bool:
    """Faster than the first beyond doubt: what a headline may rest on."""
    return is_decided(row) and row.vs_first is not None and row.vs_first.verdict == "faster"


def why_wrong(numerics: Numerics) -> str:
    """Of outputs that did not pass."""
    if not numerics.finite:
        return "its outputs are not finite"
    if numerics.degenerate:
        return "its outputs could not be compared with strict fp32"
    return "its outputs are too far from strict fp32"


def _is_unchecked(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.is_left_out


def per_s(row: RunSummary) -> float:
    """What a user would get, stalls of the machine included."""
    return row.delivered_per_s or 0.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    subject: Subject
    curves: Sequence[Curve]
    rows: Sequence[RunSummary]
    """All of the subject, also those that others stand for in the curves."""
    specs: Mapping[str, RunSpec]
    """By record."""

    def may_recommend(self, row: RunSummary) -> bool:
        return may_recommend(row, self._proven)

    def is_unproven(self, row: RunSummary) -> bool:
        """Good enough, if its outputs were known to be acceptable."""
        return _is_believable(row) and _is_unchecked(row) and row.recipe not in self._proven

    def why_not(self, row: RunSummary) -> str:
        """Why a row may not be recommended."""
        if row.numerics is not None and row.numerics.is_wrong:
            return why_wrong(row.numerics)
        if not _is_believable(row):
            return f"that number is {', '.join(row.verdict.labels)}"
        return "its outputs were not checked"

    def sound(self, curve: Curve) -> list[RunSummary]:
        """What may be recommended of a curve, batches growing."""
        return [row for row in curve.measured if self.may_recommend(row) and row.latency_s is not None]

    def command(
        self, command: str, row: RunSummary, *, batch: int | None = None, recipes: Sequence[str] | None = None
    ) -> str | None:
        """What measures this again, or more of it; None where no command line can."""
        return command_line(command, self.specs[row.record_id], batch=batch, recipes=recipes)

    def asked_batch(self, row: RunSummary) -> int | None:
        """As the spec has it: a user's own inputs have a batch that was not asked for."""
        return self.specs[row.record_id].workload.batch

    @cached_property
    def _proven(self) -> set[str]:
        return proven_recipes(self.rows)


AdviceKind = Literal["recipe", "latency", "throughput", "avoid", "failed"]


class Advice(Frozen):
    """One recommendation, with what it rests on."""

    subject: Subject
    kind: AdviceKind
    headline: str
    details: tuple[str, ...] = ()
    recipe: str = ""
    batch: int | None = None
    record_id: str = ""
    decided: bool = True
    """False where the numbers leave it open: never a headline."""
    ratio: float | None = None
    """For a recipe, against what it was set against, where they were measured in turns."""
    low: float | None = None
    high: float | None = None


def advise(subject: Subject, kind: AdviceKind, told: str, details: Sequence[str], row: RunSummary) -> Advice:
    """`row`: what it rests on."""
    return Advice(
        subject=subject,
        kind=kind,
        headline=told,
        details=tuple(details),
        recipe=row.recipe,
        batch=row.batch,
        record_id=row.record_id,
    )


def rate(row: RunSummary) -> str:
    assert row.throughput_per_s is not None
    told = rate_text(row.throughput_per_s, row.item)
    return told if row.sustained_per_s is None else f"{told} (sustained {rate_text(row.sustained_per_s, row.item)})"


def rate_text(per_s: float, item: str | None) -> str:
    return f"{rate_figure(per_s)} {item or 'items'}/s"


def rate_figure(per_s: float) -> str:
    """Without its unit."""
    return significant(per_s, max(3, len(str(round(per_s)))))


def work(subject: Subject) -> str:
    return f"training {subject.model}" if subject.task == "train" else subject.model


def do(subject: Subject) -> str:
    return f"{'train' if subject.task == 'train' else 'run'} {subject.model}"


def latency_text(row: RunSummary) -> str:
    assert row.latency_s is not None
    tail = f", p95 {format_seconds(row.latency_s.p95)}" if row.latency_s.p95 is not None else ""
    return f"p50 {format_seconds(row.latency_s.p50)}{tail}"


def ratio_text(row: RunSummary) -> str:
    ratio, low, high = ratio_of(row)
    return f"{format_ratio(ratio)} ({interval_text(low, high)})"


def interval_text(low: float, high: float) -> str:
    """The ends of a ratio's interval; two or three processes that differ widely leave nearly everything open."""
    return f"{'<0.01' if low < 0.01 else f'{low:.2f}'}–{'>100' if high > 100 else f'{high:.2f}'}"


def ratio_of(row: RunSummary) -> tuple[float, float, float]:
    """With its interval: of rows that were measured in turns."""
    versus = row.vs_first
    assert versus is not None
    assert versus.low is not None
    assert versus.high is not None
    return versus.ratio, versus.low, versus.high


def p50_s(row: RunSummary) -> float:
    assert row.latency_s is not None
    return row.latency_s.p50


def noise_remark(row: RunSummary) -> str:
    return (
        ""
        if row.verdict.trusted
        else f"; the number is {', '.join(row.verdict.labels)}: measure again before relying on it"
    )


def held_bytes(row: RunSummary) -> int | None:
    """What must fit: reserved on a device, resident on a host."""
    if row.memory is None:
        return None
    reserved = row.memory.peak_reserved_bytes
    return reserved if reserved is not None else row.memory.peak_rss_bytes


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
    return timed_trial(batch, record, row)
