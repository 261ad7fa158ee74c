"""What to do in production, drawn from the records and nothing else: which recipe, which batch, and what each costs.

A recommendation rests on rows that were measured, that keep the numerics and that may be believed. Where the rows do
not support an answer, there is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from redline.analyze.curves import Curve
from redline.analyze.knee import SATURATED
from redline.analyze.subject import Subject
from redline.analyze.summary import RunSummary
from redline.spec import Spec
from redline.units import format_bytes, format_seconds, format_share, significant

AdviceKind = Literal["recipe", "latency", "throughput", "avoid", "failed"]

FLAT_LATENCY = 1.10
"""Batches whose latency is within this factor of the lowest cost next to nothing in latency."""
CLEARLY_FASTER = 1.03
"""What followed each other carries no interval: a smaller difference is none."""
DISQUALIFYING = frozenset({"invalid", "throttled", "shared-gpu", "no-steady-state"})
"""Doubts about a number that no recommendation may rest on; `noisy` is said beside it."""


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


def recommend(
    curves: Sequence[Curve], rows: Sequence[RunSummary], subjects: Sequence[Subject], firsts: Mapping[str, str]
) -> list[Advice]:
    """Per subject: the recipe first, then the batches, then what to keep away from.

    `subjects`: one per row. `firsts`: of each group, the id of the record that the others are set against.
    """
    rows_of: dict[Subject, list[RunSummary]] = {}
    for row, subject in zip(rows, subjects, strict=True):
        rows_of.setdefault(subject, []).append(row)
    curves_of: dict[Subject, list[Curve]] = {}
    for curve in curves:
        curves_of.setdefault(curve.subject, []).append(curve)
    advice: list[Advice] = []
    for subject, of_subject in curves_of.items():
        chosen = _recipe(subject, of_subject, rows_of[subject], firsts)
        if chosen is not None:
            advice.append(chosen)
        best = _curve_to_advise(of_subject, chosen)
        if best is not None:
            advice += _batches(best, _fastest(of_subject))
        advice += _avoid(of_subject)
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
        return "No step was timed"
    return f"{fastest.model} runs at {rate(fastest)} with {fastest.recipe}; nothing here may be recommended yet"


def may_recommend(row: RunSummary) -> bool:
    """Measured, believable, and with the right answers."""
    sound = row.numerics is not None and row.numerics.passed
    return row.throughput_per_s is not None and sound and not DISQUALIFYING & set(row.verdict.labels)


def rate(row: RunSummary) -> str:
    assert row.throughput_per_s is not None
    return rate_text(row.throughput_per_s, row.item)


def rate_text(per_s: float, item: str | None) -> str:
    return f"{significant(per_s, max(3, len(str(round(per_s)))))} {item or 'items'}/s"


# Recipes


def _recipe(
    subject: Subject, curves: Sequence[Curve], rows: Sequence[RunSummary], firsts: Mapping[str, str]
) -> Advice | None:
    first_rows = {row.group: row for row in rows if row.group and firsts.get(row.group) == row.record_id}
    measured = {group: row for group, row in first_rows.items() if row.throughput_per_s}
    return _interleaved_recipe(subject, rows, measured) or _separate_recipe(subject, curves)


def _interleaved_recipe(
    subject: Subject, rows: Sequence[RunSummary], firsts: Mapping[str, RunSummary]
) -> Advice | None:
    """The best ratio of all groups that were measured in turns: only those carry an interval."""
    rivals = [row for row in rows if row.vs_first and row.vs_first.low is not None]
    if not rivals:
        return None
    sound = [row for row in rivals if may_recommend(row) and row.group in firsts]
    best = max(sound, key=lambda row: _ratio(row)[0], default=None)
    if best is None or _ratio(best)[1] <= 1:
        first = next((row for row in firsts.values() if may_recommend(row)), None)
        if first is None:
            return None
        told = f"Stay with {first.recipe} for {_work(subject)}: nothing that keeps the numerics was clearly faster"
        details = () if best is None else (f"next best: {best.recipe}, {ratio_text(best)} of its speed",)
        return _advice(subject, "recipe", told, details, first)
    assert best.group is not None
    first = firsts[best.group]
    ratio = _ratio(best)[0]
    does = "trains" if subject.task == "train" else "runs"
    told = (
        f"{best.recipe} {does} {subject.model} {significant(ratio, 3)}× as fast as {first.recipe} on {subject.device}"
    )
    speed = (
        f"{ratio_text(best)} at batch {best.batch}, measured in turns: "
        f"{rate(best)} against {rate(first)}{_noise_remark(best)}"
    )
    advice = _advice(subject, "recipe", told, (speed, *costs(best, first)), best)
    return msgspec.structs.replace(advice, **dict(zip(("ratio", "low", "high"), _ratio(best), strict=True)))


def _separate_recipe(subject: Subject, curves: Sequence[Curve]) -> Advice | None:
    """The fastest at the largest batch that the most recipes share; rows that followed each other carry no interval."""
    by_batch: dict[int, list[RunSummary]] = {}
    for curve in curves:
        for row in curve.measured:
            if row.batch is not None:
                by_batch.setdefault(row.batch, []).append(row)
    shared = {batch: rows for batch, rows in by_batch.items() if len(rows) > 1}
    if not shared:
        return None
    batch = max(shared, key=lambda each: (len(shared[each]), each))
    sound = [row for row in shared[batch] if may_recommend(row)]
    best = max(sound, key=lambda row: row.throughput_per_s or 0.0, default=None)
    if best is None:
        return None
    first = next((row for row in shared[batch] if row.recipe == "baseline"), shared[batch][0])
    if best.recipe == first.recipe:
        told = f"Stay with {best.recipe} for {_work(subject)}: it is the fastest here that keeps the numerics"
        return _advice(subject, "recipe", told, (f"{rate(best)} at batch {batch}{_noise_remark(best)}",), best)
    ratio = (best.throughput_per_s or 0.0) / (first.throughput_per_s or 1.0)
    told = f"{best.recipe} is the fastest for {_work(subject)} on {subject.device}: {rate(best)} at batch {batch}"
    speed = (
        f"about {significant(ratio, 2)}× {first.recipe} ({rate(first)}); they were measured one after the other, "
        f"so this carries no interval: '{_again(best, first)}' gives one{_noise_remark(best)}"
    )
    return _advice(subject, "recipe", told, (speed, *costs(best, first)), best)


def _again(best: RunSummary, first: RunSummary) -> str:
    task = " --task train" if best.task == "train" else ""
    return f"redline run {best.model}{task} --batch {best.batch} -r {first.recipe} -r {best.recipe}"


def costs(best: RunSummary, first: RunSummary) -> Iterator[str]:
    """What the faster recipe asks for in return."""
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
    compile_s = best.cold_start_s.compile if best.cold_start_s else None
    if not compile_s or not best.throughput_per_s or not first.throughput_per_s or not best.batch:
        return
    saved_s = best.batch / first.throughput_per_s - best.batch / best.throughput_per_s
    cache = best.cold_start_s.compile_cache if best.cold_start_s else None
    told = f"start: {format_seconds(compile_s)} of compiling" + (f" (cache {cache})" if cache else "")
    yield f"{told}, paid back after {_about(compile_s / saved_s)} steps" if saved_s > 0 else told


def _about(count: float) -> str:
    """With two digits: nobody can say it more exactly."""
    return significant(float(f"{count:.2g}"), max(2, len(str(round(count)))))


def held_bytes(row: RunSummary) -> int | None:
    """What must fit: reserved on a device, resident on a host."""
    if row.memory is None:
        return None
    reserved = row.memory.peak_reserved_bytes
    return reserved if reserved is not None else row.memory.peak_rss_bytes


# Batches


def _curve_to_advise(curves: Sequence[Curve], chosen: Advice | None) -> Curve | None:
    """The recommended recipe's, or the fastest of those with more than one batch that may be recommended."""
    sound = {curve.recipe: [row for row in curve.measured if may_recommend(row)] for curve in curves}
    several = [curve for curve in curves if len(sound[curve.recipe]) > 1]
    wanted = [curve for curve in several if chosen is not None and curve.recipe == chosen.recipe]

    def fastest(curve: Curve) -> float:
        return max(row.throughput_per_s or 0.0 for row in sound[curve.recipe])

    return max(wanted or several, key=fastest, default=None)


def _fastest(curves: Sequence[Curve]) -> RunSummary | None:
    """Of all recipes and batches."""
    sound = [row for curve in curves for row in curve.measured if may_recommend(row)]
    return max(sound, key=lambda row: row.throughput_per_s or 0.0, default=None)


def _batches(curve: Curve, fastest: RunSummary | None) -> Iterator[Advice]:
    """`fastest`: what nothing that is said of batches may hide."""
    rows = [row for row in curve.measured if may_recommend(row) and row.latency_s is not None]
    if len(rows) < 2:
        return
    yield _for_latency(curve, rows)
    yield _for_throughput(curve, rows, fastest)


def _for_latency(curve: Curve, rows: Sequence[RunSummary]) -> Advice:
    lowest = min(rows, key=_p50)
    nearly = [row for row in rows if _p50(row) <= FLAT_LATENCY * _p50(lowest)]
    best = max(nearly, key=lambda row: row.throughput_per_s or 0.0)
    told = f"For latency {_do(curve.subject)} at batch {best.batch}: {latency_text(best)}, {rate(best)}"
    details = []
    if best is not lowest:
        gain = (best.throughput_per_s or 0.0) / (lowest.throughput_per_s or 1.0)
        details.append(
            f"within {FLAT_LATENCY - 1:.0%} of the lowest median ({format_seconds(_p50(lowest))} at batch {lowest.batch}) "
            f"and {significant(gain, 2)}× its throughput"
        )
    details.append(f"with {curve.recipe}{_noise_remark(best)}")
    return _advice(curve.subject, "latency", told, details, best)


def _for_throughput(curve: Curve, rows: Sequence[RunSummary], of_all: RunSummary | None) -> Advice:
    fastest = max(rows, key=lambda row: row.throughput_per_s or 0.0)
    best = next((row for row in rows if curve.knee_batch and (row.batch or 0) >= curve.knee_batch), fastest)
    if of_all is not None and (of_all.throughput_per_s or 0.0) > CLEARLY_FASTER * (fastest.throughput_per_s or 0.0):
        return _not_of_batches(curve, fastest, of_all)
    told = f"For throughput {_do(curve.subject)} at batch {best.batch}: {rate(best)}, {latency_text(best)}"
    details = []
    if curve.knee_batch is not None and curve.limit_per_s is not None:
        limit = rate_text(curve.limit_per_s, best.item)
        details.append(
            f"the knee lies at batch {curve.knee_batch}: {SATURATED:.0%} of the {limit} that larger batches near"
        )
    if best is not fastest:
        more = (fastest.throughput_per_s or 0.0) / (best.throughput_per_s or 1.0) - 1
        slower = _p50(fastest) / _p50(best)
        details.append(f"batch {fastest.batch} brings {more:.0%} more at {significant(slower, 2)}× the latency")
    if (held := held_bytes(best)) is not None:
        details.append(f"memory: {format_bytes(held)}")
    details.append(f"with {curve.recipe}{_noise_remark(best)}")
    return _advice(curve.subject, "throughput", told, details, best)


def _not_of_batches(curve: Curve, fastest: RunSummary, of_all: RunSummary) -> Advice:
    """The batches of one recipe say nothing of what another, which is faster, would gain from them."""
    told = (
        f"For throughput the recipe matters more than the batch: {curve.recipe} reaches {rate(fastest)} at batch "
        f"{fastest.batch}, a faster one {rate(of_all)} at batch {of_all.batch}"
    )
    task = " --task train" if of_all.task == "train" else ""
    details = (
        f"that is {of_all.recipe}{_noise_remark(of_all)}",
        f"other batches may bring it more: 'redline batch {of_all.model}{task} -r {of_all.recipe}' tells",
    )
    return _advice(curve.subject, "throughput", told, details, of_all)


# What to keep away from


def _avoid(curves: Sequence[Curve]) -> Iterator[Advice]:
    for curve in curves:
        wrong = [row for row in curve.measured if row.numerics and row.numerics.is_wrong]
        if wrong:
            told = f"Keep {curve.recipe} away from {_work(curve.subject)}: its answers are too far from strict fp32"
            reason = wrong[0].numerics.reason if wrong[0].numerics else ""
            yield _advice(curve.subject, "avoid", told, (reason,) if reason else (), wrong[0])
    broken = [(curve, row) for curve in curves for row in curve.rows if row.failure is not None]
    yield from _too_large([(curve, row) for curve, row in broken if row.failure and row.failure.kind == "oom"])
    for curve in curves:
        odd = [row for other, row in broken if other is curve and row.failure and row.failure.kind != "oom"]
        if odd:
            yield _failed(curve, odd)


def _too_large(broken: Sequence[tuple[Curve, RunSummary]]) -> Iterator[Advice]:
    """One line for all that ran out of memory, recipe by recipe."""
    if not broken:
        return
    curve, row = broken[0]
    batches: dict[str, list[str]] = {}
    for each, failed in broken:
        batches.setdefault(each.recipe, []).append(str(failed.batch) if failed.batch else "its own batch")
    details = [f"{recipe}: {', '.join(each)}" for recipe, each in batches.items()]
    least = min((failed.batch for _, failed in broken if failed.batch), default=None)
    told = (
        f"{curve.subject.model} does not fit from batch {least} on" if least else f"{curve.subject.model} does not fit"
    )
    yield _advice(curve.subject, "failed", f"{told}: out of memory", details, row)


def _failed(curve: Curve, broken: Sequence[RunSummary]) -> Advice:
    first = broken[0]
    assert first.failure is not None
    batches = ", ".join(str(row.batch) for row in broken if row.batch)
    where = f" at batch {batches}" if batches else ""
    told = f"{curve.recipe} failed{where} ({curve.subject.model}): {first.failure.kind} at {first.failure.stage}"
    return _advice(curve.subject, "failed", told, (first.failure.message,), first)


def _work(subject: Subject) -> str:
    return f"training {subject.model}" if subject.task == "train" else subject.model


def _do(subject: Subject) -> str:
    return f"{'train' if subject.task == 'train' else 'run'} {subject.model}"


def latency_text(row: RunSummary) -> str:
    assert row.latency_s is not None
    tail = f", p95 {format_seconds(row.latency_s.p95)}" if row.latency_s.p95 is not None else ""
    return f"p50 {format_seconds(row.latency_s.p50)}{tail}"


def ratio_text(row: RunSummary) -> str:
    ratio, low, high = _ratio(row)
    return f"{ratio:.2f}× ({low:.2f}–{high:.2f})"


def _ratio(row: RunSummary) -> tuple[float, float, float]:
    versus = row.vs_first
    assert versus is not None
    assert versus.low is not None
    assert versus.high is not None
    return versus.ratio, versus.low, versus.high


def _p50(row: RunSummary) -> float:
    assert row.latency_s is not None
    return row.latency_s.p50


def _noise_remark(row: RunSummary) -> str:
    return (
        ""
        if row.verdict.trusted
        else f"; the number is {', '.join(row.verdict.labels)}: look again before relying on it"
    )


def _advice(subject: Subject, kind: AdviceKind, told: str, details: Sequence[str], row: RunSummary) -> Advice:
    return Advice(
        subject=subject,
        kind=kind,
        headline=told,
        details=tuple(details),
        recipe=row.recipe,
        batch=row.batch,
        record_id=row.record_id,
    )
