"""Recommendations from records alone: which recipe, which batch, and what each costs.

A recommendation rests on rows that were measured, that keep the numerics and that may be believed. Where the rows do
not support an answer, there is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from redline.analyze.curves import Curve
from redline.analyze.recommend.batches import batches_to_use
from redline.analyze.recommend.evidence import (
    Advice,
    Evidence,
    held_bytes,
    may_recommend,
    noise_remark,
    rate,
    rate_figure,
    ratio_text,
    recommendable,
    work,
)
from redline.analyze.recommend.recipes import costs, recipe_to_use, what_to_avoid
from redline.analyze.summary import RunSummary
from redline.identity import Subject
from redline.spec import RunSpec

__all__ = [
    "Advice",
    "costs",
    "headline",
    "held_bytes",
    "may_recommend",
    "noise_remark",
    "rate",
    "rate_figure",
    "ratio_text",
    "recommend",
    "recommendable",
    "work",
]


def recommend(
    curves: Sequence[Curve],
    rows: Sequence[RunSummary],
    subjects: Sequence[Subject],
    firsts: Mapping[str, str],
    specs: Mapping[str, RunSpec],
) -> list[Advice]:
    """Per subject: the recipe first, then the batches, then what to keep away from.

    `subjects`: one per row. `firsts`: of each group, the id of the record that the others are set against. `specs`: by
    record, for the commands that are suggested.
    """
    rows_of: dict[Subject, list[RunSummary]] = {}
    for row, subject in zip(rows, subjects, strict=True):
        rows_of.setdefault(subject, []).append(row)
    curves_of: dict[Subject, list[Curve]] = {}
    for curve in curves:
        curves_of.setdefault(curve.subject, []).append(curve)
    advice: list[Advice] = []
    for subject, of_subject in curves_of.items():
        evidence = Evidence(subject=subject, curves=of_subject, rows=rows_of[subject], firsts=firsts, specs=specs)
        chosen = recipe_to_use(evidence)
        advice += [chosen] if chosen is not None else []
        advice += batches_to_use(evidence, chosen)
        advice += what_to_avoid(evidence)
    return advice


def headline(advice: Sequence[Advice], rows: Sequence[RunSummary]) -> str:
    """The one sentence at the top."""
    if not rows:
        return "There is nothing to report yet"
    for kind in ("recipe", "throughput", "latency"):
        told = next((each for each in advice if each.kind == kind), None)
        if told is not None:
            return told.headline
    failed = sum(row.failure is not None for row in rows)
    if failed == len(rows):
        what = "the run" if failed == 1 else f"all {failed} runs"
        return f"Nothing could be measured: {what} failed"
    fastest = max(rows, key=lambda row: row.throughput_per_s or 0.0)
    if fastest.throughput_per_s is None:
        return _load_headline(rows) or "No step was timed"
    return f"{fastest.model} runs at {rate(fastest)} with {fastest.recipe}; nothing here can be recommended yet"


def _load_headline(rows: Sequence[RunSummary]) -> str | None:
    """Of a report that is about requests alone."""
    loads = [row.load for row in rows if row.load is not None and row.load.sustainable_rate]
    best = max(loads, key=lambda load: load.sustainable_rate or 0.0, default=None)
    if best is None:
        return None
    return f"{best.model} with {best.recipe} sustains {best.sustainable_rate:.4g} requests per second"
