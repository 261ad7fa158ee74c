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
    interval_text,
    is_decided,
    is_surely_faster,
    may_recommend,
    noise_remark,
    rate,
    rate_figure,
    rate_text,
    ratio_text,
    recommendable,
    work,
)
from redline.analyze.recommend.recipes import costs, recipe_to_use, what_to_avoid
from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.identity import Subject
from redline.spec import RunSpec

__all__ = [
    "Advice",
    "costs",
    "headline",
    "held_bytes",
    "interval_text",
    "is_decided",
    "is_surely_faster",
    "may_recommend",
    "noise_remark",
    "rate",
    "rate_figure",
    "rate_text",
    "ratio_text",
    "recommend",
    "recommendable",
    "work",
]


def recommend(curves: Sequence[Curve], lines: Sequence[Line], specs: Mapping[str, RunSpec]) -> list[Advice]:
    """Per subject: the recipe first, then the batches, then what to keep away from.

    `specs`: by record, for the commands that are suggested.
    """
    rows_of: dict[Subject, list[RunSummary]] = {}
    for line in lines:
        rows_of.setdefault(line.subject, []).append(line.row)
    curves_of: dict[Subject, list[Curve]] = {}
    for curve in curves:
        curves_of.setdefault(curve.subject, []).append(curve)
    advice: list[Advice] = []
    for subject, of_subject in curves_of.items():
        evidence = Evidence(subject=subject, curves=of_subject, rows=rows_of[subject], specs=specs)
        chosen = recipe_to_use(evidence)
        advice += [chosen] if chosen is not None else []
        advice += batches_to_use(evidence, chosen)
        advice += what_to_avoid(evidence)
    return advice


def headline(advice: Sequence[Advice], lines: Sequence[Line]) -> str:
    """The one sentence at the top: a decided comparison with its interval, else only what was measured."""
    if not lines:
        return "There is nothing to report yet"
    decided = [each for each in advice if each.kind == "recipe" and each.decided]
    # Of several subjects, the one with the largest proven gain.
    best = max(decided, key=lambda each: each.ratio or 0.0, default=None)
    if best is not None:
        return best.headline
    failed = sum(line.row.failure is not None for line in lines)
    if failed == len(lines):
        what = "the run" if failed == 1 else f"all {failed} runs"
        return f"Nothing could be measured: {what} failed"
    timed = [line.row for line in lines if line.row.throughput_per_s is not None]
    if not timed:
        return _load_headline([line.row for line in lines]) or "No step was timed"
    models = list(dict.fromkeys(row.model for row in timed))
    named = models[0] if len(models) == 1 else f"{len(models)} models"
    recipes = len({row.recipe for row in timed})
    if recipes == 1:
        fastest = max(timed, key=lambda row: row.delivered_per_s or 0.0)
        at = f" at batch {fastest.batch}" if fastest.batch else ""
        where = f"{fastest.model} with {fastest.recipe}{at}" if len(models) == 1 else named
        speed = f": {rate(fastest)}{noise_remark(fastest)}" if len(models) == 1 else ""
        return f"{where} measured{speed}; no other recipe was tried"
    return f"{recipes} recipes of {named} measured; no comparison is decided yet"


def _load_headline(rows: Sequence[RunSummary]) -> str | None:
    """Of a report that is about requests alone."""
    loads = [row.load for row in rows if row.load is not None and row.load.sustainable_rate]
    best = max(loads, key=lambda load: load.sustainable_rate or 0.0, default=None)
    if best is None:
        return None
    return f"{best.model} with {best.recipe} sustains {best.sustainable_rate:.4g} requests per second"
