"""One recommendation, and the words that all of them are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from redline.analyze.subject import Subject
from redline.analyze.summary import RunSummary
from redline.spec import Spec
from redline.units import format_seconds, significant

AdviceKind = Literal["recipe", "latency", "throughput", "avoid", "failed"]


class Advice(Spec):
    """One recommendation, with what it rests on."""

    subject: Subject
    kind: AdviceKind
    headline: str
    details: tuple[str, ...] = ()
    recipe: str = ""
    batch: int | None = None
    record_id: str = ""
    ratio: float | None = None
    """Of a recipe, against what it was set against, where they were measured in turns."""
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
    return rate_text(row.throughput_per_s, row.item)


def rate_text(per_s: float, item: str | None) -> str:
    return f"{significant(per_s, max(3, len(str(round(per_s)))))} {item or 'items'}/s"


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
    return f"{ratio:.2f}× ({low:.2f}–{high:.2f})"


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
        else f"; the number is {', '.join(row.verdict.labels)}: look again before relying on it"
    )


def held_bytes(row: RunSummary) -> int | None:
    """What must fit: reserved on a device, resident on a host."""
    if row.memory is None:
        return None
    reserved = row.memory.peak_reserved_bytes
    return reserved if reserved is not None else row.memory.peak_rss_bytes
