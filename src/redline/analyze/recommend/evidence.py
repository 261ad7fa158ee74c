"""What was measured of one subject, and which of its rows a recommendation may rest on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from redline.analyze.command_line import command_line
from redline.analyze.curves import Curve
from redline.analyze.subject import Subject
from redline.analyze.summary import RunSummary
from redline.spec import BASELINE, RunSpec

DISQUALIFYING = frozenset({"invalid", "throttled", "shared-gpu", "no-steady-state"})
"""Doubts about a number that no recommendation may rest on; `noisy` is said beside it."""
CLEARLY_FASTER = 1.03
"""What followed each other carries no interval: a smaller difference is none."""


def may_recommend(row: RunSummary, proven: Collection[str] = ()) -> bool:
    """Measured, believable, and with the right answers.

    `proven`: recipes whose answers are known from other batches, for rows that only timed. Numerics hardly depend on the
    batch.
    """
    is_right = row.numerics is not None and row.numerics.passed
    return _is_believable(row) and (is_right or (_is_unchecked(row) and row.recipe in proven))


def proven_recipes(rows: Sequence[RunSummary]) -> set[str]:
    """Of one subject: found right and never wrong. The baseline is what the others are held against."""
    checks = [(row.recipe, row.numerics) for row in rows if row.numerics is not None]
    right = {recipe for recipe, numerics in checks if numerics.passed}
    return (right | {BASELINE}) - {recipe for recipe, numerics in checks if numerics.is_wrong}


def recommendable(rows: Sequence[RunSummary], subjects: Sequence[Subject]) -> list[RunSummary]:
    """Those that a recommendation may rest on. `subjects`: one per row."""
    rows_of: dict[Subject, list[RunSummary]] = {}
    for row, subject in zip(rows, subjects, strict=True):
        rows_of.setdefault(subject, []).append(row)
    proven = {subject: proven_recipes(own) for subject, own in rows_of.items()}
    return [row for row, subject in zip(rows, subjects, strict=True) if may_recommend(row, proven[subject])]


def _is_believable(row: RunSummary) -> bool:
    return row.throughput_per_s is not None and not DISQUALIFYING & set(row.verdict.labels)


def _is_unchecked(row: RunSummary) -> bool:
    return row.numerics is not None and row.numerics.is_left_out


def per_s(row: RunSummary) -> float:
    return row.throughput_per_s or 0.0


@dataclass(frozen=True, kw_only=True)
class Evidence:
    subject: Subject
    curves: Sequence[Curve]
    rows: Sequence[RunSummary]
    """All of the subject, also those that others stand for in the curves."""
    firsts: Mapping[str, str]
    """Of each group, the id of the record that the others are set against."""
    specs: Mapping[str, RunSpec]
    """By record."""

    def may_recommend(self, row: RunSummary) -> bool:
        return may_recommend(row, self._proven)

    def is_unproven(self, row: RunSummary) -> bool:
        """Good enough, were its answers known to be right."""
        return _is_believable(row) and _is_unchecked(row) and row.recipe not in self._proven

    def why_not(self, row: RunSummary) -> str:
        """Of a row that may not be recommended."""
        if row.numerics is not None and row.numerics.is_wrong:
            return "its answers are too far from strict fp32"
        if not _is_believable(row):
            return f"that number is {', '.join(row.verdict.labels)}"
        return "its answers were not checked"

    def sound(self, curve: Curve) -> list[RunSummary]:
        """What may be recommended of a curve, batches growing."""
        return [row for row in curve.measured if self.may_recommend(row) and row.latency_s is not None]

    def command(
        self, command: str, row: RunSummary, *, batch: int | None = None, recipes: Sequence[str] = ()
    ) -> str | None:
        """What measures this again, or more of it; None where no command line can."""
        return command_line(command, self.specs[row.record_id], batch=batch, recipes=recipes)

    def asked_batch(self, row: RunSummary) -> int | None:
        """As the spec has it: inputs that a person brought along have a batch that nobody asked for."""
        return self.specs[row.record_id].workload.batch

    @cached_property
    def _proven(self) -> set[str]:
        return proven_recipes(self.rows)
