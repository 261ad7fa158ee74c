"""Which recipe to use, and what it costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from redline.analyze.recommend.evidence import (
    CLEARLY_FASTER,
    Advice,
    Curve,
    Evidence,
    advise,
    held_bytes,
    is_decided,
    is_surely_faster,
    may_recommend,
    noise_remark,
    per_s,
    rate,
    ratio_of,
    ratio_text,
    why_wrong,
    work,
)
from redline.analyze.summary import RunSummary
from redline.model.record import Failure
from redline.model.spec import BASELINE
from redline.model.units import format_bytes, format_seconds, format_share, significant


def recipe_to_use(evidence: Evidence) -> Advice | None:
    return _interleaved_recipe(evidence) or _separate_recipe(evidence)


def _interleaved_recipe(evidence: Evidence) -> Advice | None:
    """The best ratio of all that were measured in turns: only those carry an interval."""
    rivals = [row for row in evidence.rows if row.vs_first and row.vs_first.low is not None]
    sound = [row for row in rivals if may_recommend(row) and _first_of(evidence, row) is not None]
    if not rivals:
        return None
    proven = max(filter(is_surely_faster, sound), key=_lowest_ratio, default=None)
    if proven is not None:
        return _proven(evidence, proven)
    best = max(sound, key=lambda row: ratio_of(row)[0], default=None)
    first = next((row for row in _firsts(evidence, rivals) if may_recommend(row)), None)
    if first is None:
        return None
    subject = evidence.subject
    doubtful = [row for row in sound if not is_decided(row)]
    if doubtful:
        return _undecided(evidence, max(doubtful, key=lambda row: ratio_of(row)[0]), first)
    told = f"Stay with {first.recipe} for {work(subject)}: nothing with acceptable outputs was clearly faster"
    details = () if best is None else (f"next best: {best.recipe}, {ratio_text(best)} of its speed",)
    return advise(subject, "recipe", told, details, first)


def _lowest_ratio(row: RunSummary) -> float:
    """What it is surely faster by, as a user would see it: a stalling machine delivers less."""
    stalls = per_s(row) / row.throughput_per_s if row.throughput_per_s else 1.0
    return ratio_of(row)[1] * min(stalls, 1.0)


def _first_of(evidence: Evidence, row: RunSummary) -> RunSummary | None:
    """What it was set against."""
    named = row.vs_first.recipe if row.vs_first is not None else ""
    own = [each for each in evidence.rows if each.recipe == named and each.batch == row.batch and each.throughput_per_s]
    return next((each for each in own if each.group == row.group), own[0] if own else None)


def _firsts(evidence: Evidence, rivals: Sequence[RunSummary]) -> list[RunSummary]:
    return [first for row in rivals if (first := _first_of(evidence, row)) is not None]


def _proven(evidence: Evidence, best: RunSummary) -> Advice:
    subject, first = evidence.subject, _first_of(evidence, best)
    assert first is not None
    ratio, low, high = ratio_of(best)
    does = "trains" if subject.task == "train" else "runs"
    told = (
        f"{best.recipe} {does} {subject.model} {significant(ratio, 3)}× ({low:.2f}–{high:.2f}) as fast as {first.recipe} "
        f"on {subject.device}"
    )
    speed = (
        f"{ratio_text(best)} at batch {best.batch}, interleaved: {rate(best)} against {rate(first)}{noise_remark(best)}"
    )
    advice = advise(subject, "recipe", told, (speed, *costs(best, first)), best)
    return msgspec.structs.replace(advice, ratio=ratio, low=low, high=high)


def _undecided(evidence: Evidence, best: RunSummary, first: RunSummary) -> Advice:
    """What may be faster, and what would decide it."""
    subject = evidence.subject
    seems, but = ("may be faster", "no gain at all") if ratio_of(best)[0] >= 1 else ("seems slower", "a gain")
    why = "its times are doubted" if not best.verdict.trusted else f"its interval allows for {but}"
    told = f"Not decided: {best.recipe} {seems} than {first.recipe} for {work(subject)}, but {why}"
    again = evidence.command("run", best, batch=evidence.asked_batch(best), recipes=(first.recipe, best.recipe))
    details = [
        f"{ratio_text(best)} at batch {best.batch}: {rate(best)} against {rate(first)}{noise_remark(best)}",
        *([f"'{again} --decide' decides it"] if again else []),
    ]
    return msgspec.structs.replace(advise(subject, "recipe", told, details, first), decided=False)


def _separate_recipe(evidence: Evidence) -> Advice | None:
    """The fastest at the largest batch that the most recipes share; rows that followed each other carry no interval."""
    by_batch: dict[int, list[RunSummary]] = {}
    for curve in evidence.curves:
        for row in curve.measured:
            if row.batch is not None:
                by_batch.setdefault(row.batch, []).append(row)
    shared = {batch: rows for batch, rows in by_batch.items() if len(rows) > 1}
    if not shared:
        return None
    batch = max(shared, key=lambda each: (len(shared[each]), each))
    best = max((row for row in shared[batch] if evidence.may_recommend(row)), key=per_s, default=None)
    if best is None:
        return None
    subject = evidence.subject
    first = next((row for row in shared[batch] if row.recipe == BASELINE), shared[batch][0])
    if evidence.may_recommend(first) and not _is_clearly_faster(best, first):
        best = first
    unproven = [row for row in shared[batch] if evidence.is_unproven(row) and per_s(row) > CLEARLY_FASTER * per_s(best)]
    if best.recipe == first.recipe:
        why = "nothing here with acceptable outputs is clearly faster"
        if unproven:
            other = max(unproven, key=per_s)
            why = f"{other.recipe} is faster, but {evidence.why_not(other)}"
        told = f"Stay with {best.recipe} for {work(subject)}: {why}"
        details = [f"{rate(best)} at batch {batch}{noise_remark(best)}"]
    else:
        told = f"{best.recipe} is the fastest for {work(subject)} on {subject.device}: {rate(best)} at batch {batch}"
        details = [_speed(evidence, best, first), *costs(best, first)]
    advice = advise(subject, "recipe", told, [*details, *_not_checked(evidence, best, unproven)], best)
    # Rows that followed each other carry no interval, so nothing is decided between them.
    return msgspec.structs.replace(advice, decided=False)


def _is_clearly_faster(row: RunSummary, first: RunSummary) -> bool:
    """By the median step and by what the machine delivered: where these two disagree, it is not clear."""
    by_median = (row.throughput_per_s or 0.0) > CLEARLY_FASTER * (first.throughput_per_s or 0.0)
    return by_median and per_s(row) > CLEARLY_FASTER * per_s(first)


def _speed(evidence: Evidence, best: RunSummary, first: RunSummary) -> str:
    again = _in_turns(evidence, first, best)
    gives_one = f": '{again}' gives one" if again else ""
    in_turns = best.group is not None and best.group == first.group
    how = "measured in turns, but in too few rounds" if in_turns else "measured one after the other"
    return (
        f"about {significant(per_s(best) / per_s(first), 2)}× {first.recipe} ({rate(first)}); they were {how}, so "
        f"this has no interval{gives_one}{noise_remark(best)}"
    )


def _not_checked(evidence: Evidence, best: RunSummary, faster: Sequence[RunSummary]) -> Iterator[str]:
    for row in faster:
        again = _in_turns(evidence, best, row)
        told = f"{row.recipe} ran at {rate(row)}, but {evidence.why_not(row)}"
        yield f"{told}: '{again}' checks them" if again else told


def _in_turns(evidence: Evidence, first: RunSummary, other: RunSummary) -> str | None:
    batch = evidence.asked_batch(other)
    return evidence.command("run", other, batch=batch, recipes=(first.recipe, other.recipe))


def costs(best: RunSummary, first: RunSummary) -> Iterator[str]:
    """What the faster recipe costs: accuracy, memory, compile time."""
    numerics = best.numerics
    if numerics is not None and numerics.is_compared and numerics.rel_l2 is not None:
        allowed = (
            f", {format_share(numerics.rel_l2 / numerics.tolerance)} of what is allowed" if numerics.tolerance else ""
        )
        agreement = numerics.top1_agreement
        top1 = f"; the same first choice on {agreement:.1%} of the inputs" if agreement is not None else ""
        after = f" over {numerics.steps} steps" if numerics.steps is not None else ""
        yield f"accuracy: {numerics.rel_l2:.1e} away from strict fp32{after}{allowed}{top1}"
    own, other = held_bytes(best), held_bytes(first)
    if own is not None and other:
        yield f"memory: {format_bytes(own)} against {format_bytes(other)} ({own / other - 1:+.0%})"
    yield from _start_cost(best, first)


def _start_cost(best: RunSummary, first: RunSummary) -> Iterator[str]:
    compile_s = best.cold_start_s.compile_s if best.cold_start_s else None
    if not compile_s or not best.throughput_per_s or not first.throughput_per_s or not best.items_per_step:
        return
    saved_s = best.items_per_step / first.throughput_per_s - best.items_per_step / best.throughput_per_s
    cache = best.cold_start_s.compile_cache if best.cold_start_s else None
    told = f"start: {format_seconds(compile_s)} of compiling" + (f" (cache {cache})" if cache else "")
    yield f"{told}, paid back after {_about(compile_s / saved_s)} steps" if saved_s > 0 else told


def _about(count: float) -> str:
    """Rounded to two digits."""
    return significant(float(f"{count:.2g}"), max(2, len(str(round(count)))))


MOST_NAMED = 3
"""Recipes in a headline; the details have all."""

Broken = tuple[RunSummary, Failure]


def what_to_avoid(evidence: Evidence) -> Iterator[Advice]:
    for curve in evidence.curves:
        wrong = [row for row in curve.measured if row.numerics and row.numerics.is_wrong]
        if wrong:
            numerics = wrong[0].numerics
            assert numerics is not None
            told = f"Do not use {curve.recipe} for {work(curve.subject)}: {why_wrong(numerics)}"
            reason = numerics.reason
            yield advise(curve.subject, "avoid", told, (str(reason),) if reason else (), wrong[0])
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
    """Not the recipe's fault: the fp32 reference did not fit."""
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
        f"The strict fp32 reference of {evidence.subject.model} ran out of memory: it is not known whether "
        f"{_some(rows_of)} would fit there"
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
        yield advise(curve.subject, "failed", told, (failure.told,), first)


def _broken(curve: Curve) -> list[Broken]:
    return [(row, row.failure) for row in curve.rows if row.failure is not None]


def _is_of_reference(failure: Failure) -> bool:
    return failure.stage == "reference"


def _by_recipe(rows_of: dict[str, list[RunSummary]]) -> list[str]:
    return [f"{recipe}: {_batches(rows)}" for recipe, rows in rows_of.items()]


def _batches(rows: Sequence[RunSummary]) -> str:
    return ", ".join(str(row.batch) for row in rows)


def _some(recipes: dict[str, list[RunSummary]]) -> str:
    return ", ".join(recipes) if len(recipes) <= MOST_NAMED else f"{len(recipes)} recipes"
