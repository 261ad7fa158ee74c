"""A gate can be asked to look at more than speed: memory, numerics, time to compile and graph breaks. This module checks them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Literal

from redline.analyze.blocks import memory_of
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Numerics, RunRecord

CheckName = Literal["memory", "numerics", "compile", "graph-breaks"]

MEMORY_THRESHOLD = 0.05
"""Memory may grow by this share, unless another threshold is asked for."""
COMPILE_THRESHOLD = 0.2
"""The time to compile may grow by this share, unless another threshold is asked for."""
NUMERICS_GROWTH = 2.0
"""The error may grow to this many times that of the baseline: rounding alone changes it by less."""
SAME_OUTPUTS = 1e-4
"""Strict fp32 of two commits may differ by this share of what varies in the outputs: sums in another order move it by less."""
SAME_LOSSES = 0.02
"""The losses of two commits may differ by this share of the distance that the loss came."""


class Check(Frozen):
    """Something besides speed that the gate was asked to look at."""

    name: CheckName
    baseline: float | None
    candidate: float | None
    change: float | None
    """This is relative to the baseline. It is None where that means nothing."""
    threshold: float | None
    failed: bool
    said: Note


def check(
    name: CheckName,
    baseline: Sequence[RunRecord],
    candidate: Sequence[RunRecord],
    *,
    memory_threshold: float = MEMORY_THRESHOLD,
    compile_threshold: float = COMPILE_THRESHOLD,
) -> Check:
    """Checks one of the other figures of records of both sides."""
    if name == "memory":
        memories = [[memory_of(record) for record in side] for side in (baseline, candidate)]
        needed = [[float(each.needed_bytes) for each in side if each and each.needed_bytes] for side in memories]
        return _larger("memory", needed[0], needed[1], memory_threshold)
    if name == "compile":
        return _compile_check(baseline, candidate, compile_threshold)
    if name == "graph-breaks":
        breaks = [
            [record.prepared.cold_start.graph_breaks for record in side if record.prepared is not None]
            for side in (baseline, candidate)
        ]
        counted = [[count for count in side if count is not None] for side in breaks]
        return _count_check(*(max(side) if side else None for side in counted))
    return _numerics_check(baseline, candidate)


def _count_check(baseline: float | None, candidate: float | None) -> Check:
    """Counts do not vary from process to process: any more is a change."""
    if baseline is None or candidate is None:
        said = note("unknown", "the recipe does not compile")
        return _check("graph-breaks", baseline, candidate, None, failed=False, said=said)
    more = candidate - baseline
    text = "unchanged" if more == 0 else f"{abs(more):g} {'more' if more > 0 else 'fewer'}"
    return _check("graph-breaks", baseline, candidate, 0.0, failed=more > 0, said=note("counted", text))


def _larger(name: CheckName, ours: Sequence[float], theirs: Sequence[float], threshold: float) -> Check:
    """Fails if it grew by more than the threshold, and in every process: one that happened to need more is no change."""
    if not ours or not theirs:
        return _check(name, None, None, threshold, failed=False, said=note("unknown", "not known of both sides"))
    before, after = median(ours), median(theirs)
    grown = after / before - 1 if before else 0.0
    failed = grown > threshold and min(theirs) > max(ours)
    if grown > threshold and not failed:
        text = f"{grown:+.1%}, but the two sides overlap: not certain"
    else:
        text = f"{grown:+.1%} (threshold {threshold:.0%})"
    return _check(name, before, after, threshold, failed=failed, said=note("grown" if failed else "compared", text))


def _compile_check(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord], threshold: float) -> Check:
    """Compares only with the compiler's cache in the same state: filled, it takes a fraction of the time.

    The state that both sides were in most often: the first process fills the cache for those that follow.
    """
    states = {record.prepared.cold_start.compile_cache for record in (*baseline, *candidate) if record.prepared}
    sides = [[_compile_times(side, state) for side in (baseline, candidate)] for state in sorted(states, key=str)]
    ours, theirs = max(sides, key=lambda each: min(map(len, each)), default=([], []))
    if ours and theirs:
        return _larger("compile", ours, theirs, threshold)
    text = "no two processes of the two sides compiled with the cache in the same state"
    return _check("compile", None, None, threshold, failed=False, said=note("unknown", text))


def _compile_times(records: Sequence[RunRecord], state: str | None) -> list[float]:
    starts = [record.prepared.cold_start for record in records if record.prepared is not None]
    return [start.compile_s for start in starts if start.compile_cache == state and start.compile_s is not None]


def _numerics_check(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> Check:
    """Returns the error against strict fp32 of the same commit, and strict fp32 itself against the other commit's."""
    before, after = (_worst_numerics(side) for side in (baseline, candidate))
    apart, limit, varies = _outputs_apart(baseline, candidate)
    ours, theirs = (None if each is None else each.rel_l2 for each in (before, after))
    if before is not None and after is not None and after.is_wrong and not before.is_wrong:
        said, failed = note("wrong-answers", f"the outputs are too far from strict fp32: {after.reason or ''}"), True
    elif _is_lost(baseline) < _is_lost(candidate):
        said, failed = note("not-finite", "the outputs are not finite any more"), True
    elif ours is not None and theirs is not None and theirs > NUMERICS_GROWTH * max(ours, 1e-7):
        said, failed = note("grown", f"the relative error grew from {ours:.1e} to {theirs:.1e}"), True
    elif apart is not None and apart > limit and not varies:
        said, failed = note("other-outputs", f"it computes something else: outputs {apart:.1e} apart"), True
    elif (before is None or after is None) and apart is None:
        said, failed = note("unknown", "not checked on both sides"), False
    elif varies:
        said, failed = (
            note("outputs-vary", "the outputs differ from process to process, so they cannot be compared"),
            False,
        )
    else:
        said, failed = note("compared", "unchanged within rounding"), False
    return _check("numerics", ours, theirs, NUMERICS_GROWTH - 1, failed=failed, said=said)


def _numerics_of(records: Sequence[RunRecord]) -> list[Numerics]:
    return [record.prepared.numerics for record in records if record.prepared is not None]


def _is_lost(records: Sequence[RunRecord]) -> bool:
    """Returns whether a model's outputs, or what a function returned, are not finite."""
    return any(not each.finite for each in _numerics_of(records))


def finite_check(records: Sequence[RunRecord]) -> Check:
    """Returns all that can be said of numerics where there is nothing to compare with."""
    failed = _is_lost(records)
    said = (
        note("not-finite", "the outputs are not finite") if failed else note("unknown", "nothing to compare with yet")
    )
    return _check("numerics", None, None, None, failed=failed, said=said)


def _outputs_apart(baseline: Sequence[RunRecord], candidate: Sequence[RunRecord]) -> tuple[float | None, float, bool]:
    """Returns how far outputs, or losses, of the two sides are apart, how far they may be, and whether those of one side are as far."""
    sides = [
        [_comparable_outputs(each) for each in _numerics_of(side) if each.sketch or each.reference_losses]
        for side in (baseline, candidate)
    ]
    if not all(sides):
        return None, SAME_OUTPUTS, False
    first, limit = sides[0][0], sides[0][0][2]
    apart = _distance(first, sides[1][0])
    within = max(_distance(side[0], each) for side in sides for each in side)
    return apart, limit, within > limit and apart < NUMERICS_GROWTH * within


def _comparable_outputs(found: Numerics) -> tuple[tuple[float, ...], float, float]:
    """Numbers that say what was computed, their size, and the share of it that may differ."""
    if not found.reference_losses:
        return found.sketch, (found.sketch_signal or 0.0) * math.sqrt(len(found.sketch)), SAME_OUTPUTS
    losses = tuple(math.inf if loss is None else loss for loss in found.reference_losses)
    return losses, math.sqrt(sum((loss - losses[0]) ** 2 for loss in losses)), SAME_LOSSES


def _distance(one: tuple[tuple[float, ...], float, float], other: tuple[tuple[float, ...], float, float]) -> float:
    if len(one[0]) != len(other[0]):
        return math.inf
    apart = math.dist(one[0], other[0])
    return apart / one[1] if one[1] else (math.inf if apart else 0.0)


def _worst_numerics(records: Sequence[RunRecord]) -> Numerics | None:
    found = [
        record.prepared.numerics for record in records if record.prepared and not record.prepared.numerics.is_left_out
    ]
    return max(found, key=lambda each: (each.is_wrong, each.rel_l2 or 0.0), default=None)


def _check(
    name: CheckName,
    baseline: float | None,
    candidate: float | None,
    threshold: float | None,
    *,
    failed: bool,
    said: Note,
) -> Check:
    change = candidate / baseline - 1 if baseline and candidate is not None else None
    return Check(
        name=name, baseline=baseline, candidate=candidate, change=change, threshold=threshold, failed=failed, said=said
    )
