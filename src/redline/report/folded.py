"""Several records of one thing in one line: the heats of a race, a run that was repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import msgspec

from redline.analyze.curves import standing
from redline.analyze.recommend import rate_text
from redline.analyze.subject import Subject, is_capture
from redline.analyze.summary import RunSummary
from redline.record import RunRecord
from redline.report.contents import Contents
from redline.spec import BASELINE


@dataclass(frozen=True)
class Line:
    """One record for all that measured the same."""

    subject: Subject
    record: RunRecord
    row: RunSummary
    """Its ratio is left out where it is against another than most ratios of its subject are."""
    rates: tuple[float, ...]
    """Items per second of each of them, in the order in which they were measured."""
    measured_at: float
    """The newest of them."""

    @property
    def told(self) -> str:
        """How many there were and how far apart; the intervals of single processes do not show that."""
        if len(self.rates) < 2:
            return "1"
        low, high = (rate_text(each, None).removesuffix(" items/s") for each in (min(self.rates), max(self.rates)))
        return f"{len(self.rates)}: {low}–{high}"


def folded(contents: Contents) -> list[Line]:
    """In the order in which things were first measured. What failed, and what ran beside a profile, stays apart."""
    together: dict[Hashable, list[tuple[Subject, RunRecord, RunSummary]]] = {}
    usual = _usual_firsts(contents)
    for subject, record, row in zip(contents.subjects, contents.records, contents.rows, strict=True):
        if row.vs_first is not None and row.vs_first.recipe != usual[subject]:
            row = msgspec.structs.replace(row, vs_first=None)
        together.setdefault(_same(subject, record, row), []).append((subject, record, row))
    return [_line(each) for each in together.values()]


def _usual_firsts(contents: Contents) -> dict[Subject, str]:
    """The baseline where any ratio of a subject is against it: an ablation sets its recipes against the winner.

    Else what most are against.
    """
    counts: dict[Subject, Counter[str]] = {}
    for subject, row in zip(contents.subjects, contents.rows, strict=True):
        if row.vs_first is not None:
            counts.setdefault(subject, Counter())[row.vs_first.recipe] += 1
    return {
        subject: BASELINE if BASELINE in firsts else firsts.most_common(1)[0][0] for subject, firsts in counts.items()
    }


def _same(subject: Subject, record: RunRecord, row: RunSummary) -> Hashable:
    if row.throughput_per_s is None or is_capture(record) or record.prepared is None:
        return record.id
    environment = record.prepared.environment
    return subject, row.recipe, row.batch, environment.versions.get("torch"), environment.device.driver


def _line(measured: Sequence[tuple[Subject, RunRecord, RunSummary]]) -> Line:
    subject, record, row = max(measured, key=lambda each: standing(each[1]))
    rates = tuple(each.throughput_per_s for _, _, each in measured if each.throughput_per_s is not None)
    return Line(subject, record, row, rates, max(each.created_at for _, each, _ in measured))
