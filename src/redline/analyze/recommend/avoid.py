"""What to keep away from: wrong answers, batches that do not fit, what broke."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from redline.analyze.curves import Curve
from redline.analyze.recommend.advice import Advice, advise, work
from redline.analyze.recommend.evidence import Evidence
from redline.analyze.summary import FailureSummary, RunSummary

MOST_NAMED = 3
"""Recipes in a headline; the details have all."""

Broken = tuple[RunSummary, FailureSummary]


def what_to_avoid(evidence: Evidence) -> Iterator[Advice]:
    for curve in evidence.curves:
        wrong = [row for row in curve.measured if row.numerics and row.numerics.is_wrong]
        if wrong:
            told = f"Keep {curve.recipe} away from {work(curve.subject)}: its answers are too far from strict fp32"
            reason = wrong[0].numerics.reason if wrong[0].numerics else ""
            yield advise(curve.subject, "avoid", told, (reason,) if reason else (), wrong[0])
    yield from _too_large(evidence)
    yield from _reference_too_large(evidence)
    for curve in evidence.curves:
        yield from _failed(curve)


def _too_large(evidence: Evidence) -> Iterator[Advice]:
    """One line for all recipes that end at the same batch."""
    from_batch: dict[int | None, dict[str, list[RunSummary]]] = {}
    for curve in evidence.curves:
        rows = [row for row, failure in _broken(curve) if failure.kind == "oom" and not _is_of_reference(failure)]
        # A smaller one that broke where a larger one ran was short of memory for another reason than its size.
        largest = max((row.batch or 0 for row in curve.measured), default=0)
        least = min((row.batch for row in rows if row.batch and row.batch > largest), default=None)
        if rows:
            from_batch.setdefault(least, {})[curve.recipe] = rows
    for least, rows_of in from_batch.items():
        told = (
            f"{evidence.subject.model} does not fit from batch {least} on with {_some(rows_of)}: out of memory"
            if least is not None
            else f"{evidence.subject.model} ran out of memory with {_some(rows_of)}, though a larger batch ran"
        )
        yield advise(evidence.subject, "failed", told, _by_recipe(rows_of), next(iter(rows_of.values()))[0])


def _reference_too_large(evidence: Evidence) -> Iterator[Advice]:
    """No fault of a recipe: what its answers are held against did not fit."""
    rows_of: dict[str, list[RunSummary]] = {}
    for curve in evidence.curves:
        rows = [row for row, failure in _broken(curve) if failure.kind == "oom" and _is_of_reference(failure)]
        if rows:
            rows_of[curve.recipe] = rows
    if not rows_of:
        return
    first = next(iter(rows_of.values()))[0]
    search = evidence.command("batch", first, recipes=tuple(rows_of))
    told = (
        f"The strict fp32 reference of {evidence.subject.model} ran out of memory: whether {_some(rows_of)} would fit "
        "there was not seen"
    )
    details = [*_by_recipe(rows_of), *([f"'{search}' tries without the reference"] if search else [])]
    yield advise(evidence.subject, "failed", told, details, first)


def _failed(curve: Curve) -> Iterator[Advice]:
    """One line for each way in which it broke."""
    ways: dict[tuple[str, str], list[Broken]] = {}
    for row, failure in _broken(curve):
        if failure.kind != "oom":
            ways.setdefault((failure.kind, failure.stage), []).append((row, failure))
    for (kind, stage), broken in ways.items():
        first, failure = broken[0]
        batches = _batches([row for row, _ in broken])
        told = f"{curve.recipe} failed at batch {batches} ({curve.subject.model}): {kind} at {stage}"
        yield advise(curve.subject, "failed", told, (failure.message,), first)


def _broken(curve: Curve) -> list[Broken]:
    return [(row, row.failure) for row in curve.rows if row.failure is not None]


def _is_of_reference(failure: FailureSummary) -> bool:
    return failure.stage == "reference"


def _by_recipe(rows_of: dict[str, list[RunSummary]]) -> list[str]:
    return [f"{recipe}: {_batches(rows)}" for recipe, rows in rows_of.items()]


def _batches(rows: Sequence[RunSummary]) -> str:
    return ", ".join(str(row.batch) for row in rows)


def _some(recipes: dict[str, list[RunSummary]]) -> str:
    return ", ".join(recipes) if len(recipes) <= MOST_NAMED else f"{len(recipes)} recipes"
