"""Recommendations from records alone: which recipe, which batch, and what each costs.

A recommendation rests on rows that were measured, that keep the numerics and that may be believed. Where the rows do
not support an answer, there is none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from redline.analyze.recommend.evidence import (
    CLEARLY_FASTER,
    Advice,
    Curve,
    Evidence,
    advise,
    do,
    held_bytes,
    interval_text,
    is_decided,
    is_surely_faster,
    latency_text,
    may_recommend,
    noise_remark,
    p50_s,
    per_s,
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
from redline.model.identity import Subject
from redline.model.spec import RunSpec
from redline.model.units import format_bytes, format_seconds, significant

__all__ = [
    "Advice",
    "costs",
    "headline",
    "held_bytes",
    "interval_text",
    "is_decided",
    "is_surely_faster",
    "largest_gain",
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
    alike = Counter((subject.model, subject.task, subject.device) for subject in curves_of)
    for subject, of_subject in curves_of.items():
        evidence = Evidence(subject=subject, curves=of_subject, rows=rows_of[subject], specs=specs)
        chosen = recipe_to_use(evidence)
        found = [chosen] if chosen is not None else []
        found += [*batches_to_use(evidence, chosen), *what_to_avoid(evidence)]
        if alike[subject.model, subject.task, subject.device] > 1 and subject.setting:
            # Two answers about one model would contradict each other without it.
            found = [msgspec.structs.replace(each, headline=f"{each.headline} ({subject.setting})") for each in found]
        advice += found
    return advice


def largest_gain(advice: Sequence[Advice]) -> Advice | None:
    """Of the decided answers about several subjects, the one that gains most; None where nothing is decided."""
    decided = [each for each in advice if each.kind == "recipe" and each.decided]
    return max(decided, key=lambda each: each.ratio or 0.0, default=None)


def headline(advice: Sequence[Advice], lines: Sequence[Line]) -> str:
    """The one sentence at the top: a decided comparison with its interval, else only what was measured."""
    if not lines:
        return "There is nothing to report yet"
    best = largest_gain(advice)
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
    """The headline of a report that is only about loads."""
    loads = [row.load for row in rows if row.load is not None and row.load.sustainable_rate]
    best = max(loads, key=lambda load: load.sustainable_rate or 0.0, default=None)
    if best is None:
        return None
    return f"{best.model} with {best.recipe} sustains {best.sustainable_rate:.4g} requests per second"


FLAT_LATENCY = 1.10
"""Batches whose latency is within this factor of the lowest cost next to nothing in latency."""


def batches_to_use(evidence: Evidence, chosen: Advice | None) -> Iterator[Advice]:
    """`chosen`: the recipe that was recommended."""
    curve = _curve_to_advise(evidence, chosen)
    if curve is None:
        return
    # Advice about one recipe's batches must not hide a faster recipe.
    of_all = [row for each in evidence.curves for row in evidence.sound(each)]
    yield _for_latency(evidence, of_all)
    yield _for_throughput(evidence, curve, max(of_all, key=per_s))


def _curve_to_advise(evidence: Evidence, chosen: Advice | None) -> Curve | None:
    """The recommended recipe's, or the fastest of those with more than one batch that may be recommended."""
    several = [curve for curve in evidence.curves if len(evidence.sound(curve)) > 1]
    wanted = [curve for curve in several if chosen is not None and curve.recipe == chosen.recipe]
    return max(wanted or several, key=lambda curve: max(map(per_s, evidence.sound(curve))), default=None)


def _for_latency(evidence: Evidence, rows: Sequence[RunSummary]) -> Advice:
    """Of all recipes; what is noisy speaks only where nothing else does."""
    believed = [row for row in rows if row.verdict.trusted] or rows
    lowest = min(believed, key=p50_s)
    best = max((row for row in believed if p50_s(row) <= FLAT_LATENCY * p50_s(lowest)), key=per_s)
    told = f"For latency {do(evidence.subject)} at batch {best.batch}: {latency_text(best)}, {rate(best)}"
    details = []
    if best is not lowest:
        other = f" with {lowest.recipe}" if lowest.recipe != best.recipe else ""
        details.append(
            f"within {FLAT_LATENCY - 1:.0%} of the lowest median ({format_seconds(p50_s(lowest))} at batch "
            f"{lowest.batch}{other}) and {significant(per_s(best) / per_s(lowest), 2)}× its throughput"
        )
    details.append(f"with {best.recipe}{noise_remark(best)}")
    least = min(rows, key=p50_s)
    if p50_s(least) * CLEARLY_FASTER < p50_s(lowest):
        details.append(
            f"{least.recipe} showed {format_seconds(p50_s(least))} at batch {least.batch}{noise_remark(least)}"
        )
    return advise(evidence.subject, "latency", told, details, best)


def _for_throughput(evidence: Evidence, curve: Curve, of_all: RunSummary) -> Advice:
    rows = evidence.sound(curve)
    fastest = max(rows, key=per_s)
    if per_s(of_all) > CLEARLY_FASTER * per_s(fastest):
        return _not_of_batches(evidence, curve, fastest, of_all)
    knee = curve.knee
    best = fastest if knee is None else next((row for row in rows if (row.batch or 0) >= knee.batch), None)
    if best is None:
        return _below_the_knee(evidence, curve, fastest)
    told = f"For throughput {do(curve.subject)} at batch {best.batch}: {rate(best)}, {latency_text(best)}"
    details = [*_knee(curve, best.item)]
    if best is not fastest:
        more = per_s(fastest) / per_s(best) - 1
        slower = p50_s(fastest) / p50_s(best)
        details.append(f"batch {fastest.batch} brings {more:.0%} more at {significant(slower, 2)}× the latency")
    if (held := held_bytes(best)) is not None:
        details.append(f"memory: {format_bytes(held)}")
    details.append(f"with {curve.recipe}{noise_remark(best)}")
    details += _faster_but(evidence, curve, fastest)
    return advise(curve.subject, "throughput", told, details, best)


def _knee(curve: Curve, item: str | None) -> Iterator[str]:
    if curve.knee is not None:
        limit = rate_text(curve.knee.limit_per_s, item)
        yield f"the knee is at batch {curve.knee.batch}: {curve.knee.share:.0%} of the {limit} that larger batches near"


def _faster_but(evidence: Evidence, curve: Curve, fastest: RunSummary) -> Iterator[str]:
    """What a reader of the table sees, and why it is not recommended."""
    others = [row for row in curve.measured if not evidence.may_recommend(row)]
    best = max(others, key=per_s, default=None)
    if best is not None and per_s(best) > CLEARLY_FASTER * per_s(fastest):
        yield f"batch {best.batch} ran at {rate(best)}, but {evidence.why_not(best)}"


def _below_the_knee(evidence: Evidence, curve: Curve, fastest: RunSummary) -> Advice:
    """A knee that only rows show which may not be recommended: far below it is no place to send anyone."""
    assert curve.knee is not None
    told = (
        f"For throughput {work(curve.subject)} needs batch {curve.knee.batch} or more, and nothing that was measured "
        "there may be recommended yet"
    )
    again = evidence.command("run", fastest, batch=curve.knee.batch)
    details = [
        *_knee(curve, fastest.item),
        *_faster_but(evidence, curve, fastest),
        f"below it {curve.recipe} reaches {rate(fastest)} at batch {fastest.batch}{noise_remark(fastest)}",
        *([f"'{again}' measures and checks it there"] if again else []),
    ]
    return msgspec.structs.replace(advise(curve.subject, "throughput", told, details, fastest), batch=None)


def _not_of_batches(evidence: Evidence, curve: Curve, fastest: RunSummary, of_all: RunSummary) -> Advice:
    """Advice where another recipe is faster at a batch than this one is at any."""
    told = (
        f"For throughput the recipe matters more than the batch: {curve.recipe} reaches {rate(fastest)} at batch "
        f"{fastest.batch}, a faster one {rate(of_all)} at batch {of_all.batch}"
    )
    search = evidence.command("batch", of_all)
    details = (
        f"that is {of_all.recipe}{noise_remark(of_all)}",
        "other batches may be faster" + (f": '{search}' searches" if search else ""),
    )
    return advise(curve.subject, "throughput", told, details, of_all)
