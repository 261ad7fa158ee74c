"""What each recipe of a search takes, on one scale.

A trial is measured in turns with the fastest recipe so far, so its time is that one's time by their ratio: what drifts
over the minutes of a search cancels. The chain begins with the baseline's own time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from redline.analyze.blocks import round_medians_s, timed_blocks
from redline.analyze.bound import HOST_BOUND_SHARE, host_share
from redline.analyze.race import kind_measured, log_ratio
from redline.analyze.statistics import percentile
from redline.note import Note, note
from redline.record import BlockKind, Numerics, RunRecord
from redline.search.tune.record import LARGEST_TOLERANCE, NUMERICS_FACTOR, Metric, Tolerance, TuneRecord
from redline.units import format_seconds

Records = Mapping[str, RunRecord]

SMALLEST_ERROR = 0.002
"""Two or three rounds may agree by chance."""
CHECK_LOSS = 0.01
"""Share of the baseline's metric that a recipe may lose."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One recipe. Logarithms of seconds per step."""

    recipe: str
    record_id: str
    log_s: float
    error: float
    """Standard error within the processes that were measured."""
    host_log_s: float | None
    """Time to issue a step; None where nothing is issued ahead of the device."""
    is_host_bound: bool
    cost_s: float
    too_late: Note | None = None
    """Why it does not keep the latency target."""


def estimates(tune: TuneRecord, records: Records) -> dict[str, Estimate]:
    """Every recipe that was timed and kept its numbers, by its text; the last look at it counts."""
    kind = tune.tune.kind
    on_scale: dict[str, tuple[float, float]] = {}
    found: dict[str, Estimate] = {}
    for trial in tune.trials:
        record = records.get(trial.record_id)
        if record is None or record.failure is not None or not record.blocks:
            continue
        known = found.get(trial.recipe)
        place = _place(record, records.get(trial.anchor_id or ""), on_scale, kind)
        if known is not None and trial.anchor_id is None:
            place = (known.log_s, known.error)  # opened again to go on from: the scale is the one it gave
        on_scale[record.id] = place
        why = rejection(record, tune)
        if why is None or why.code == "too-late":
            found[trial.recipe] = _estimate(trial.recipe, record, place, trial.cost_s, why)
    return found


def rejection(record: RunRecord, tune: TuneRecord) -> Note | None:
    """Why this recipe must not be recommended; None where it may be."""
    if record.failure is not None:
        return note("failed", f"{record.failure.kind}: {record.failure.told}", about=record.failure.kind)
    if record.prepared is not None and not accepts(record.prepared.numerics, tune.tune.tolerance):
        found = numerics_reason(record.prepared.numerics, tune.tune.tolerance)
        return note(found.code, f"numerics: {found}", about="numerics")
    return too_late(record, tune.tune.slo_p95_s)


def accepts(numerics: Numerics, tolerance: Tolerance) -> bool:
    limit = limit_of(numerics, tolerance)
    if limit is None or not numerics.is_compared:
        return not numerics.is_wrong
    sound = numerics.finite and not numerics.degenerate
    return sound and numerics.rel_l2 is not None and numerics.rel_l2 <= limit


def limit_of(numerics: Numerics, tolerance: Tolerance) -> float | None:
    """The largest relative error that passes; None: as the bench judged."""
    if tolerance.absolute is not None:
        return min(tolerance.absolute, LARGEST_TOLERANCE)
    if tolerance.factor is not None and numerics.tolerance is not None:
        return min(numerics.tolerance * tolerance.factor / NUMERICS_FACTOR, LARGEST_TOLERANCE)
    return None


def numerics_reason(numerics: Numerics, tolerance: Tolerance) -> Note:
    limit = limit_of(numerics, tolerance)
    if (
        limit is None
        or not numerics.is_compared
        or not numerics.finite
        or numerics.degenerate
        or numerics.rel_l2 is None
    ):
        return numerics.reason or note("above-tolerance", "the outputs are too far from strict fp32")
    text = f"the tolerance {limit:.2g} that was asked for"
    if numerics.rel_l2 <= limit:
        return note("within-tolerance", f"error {numerics.rel_l2:.2g} is within {text}")
    return note("above-tolerance", f"error {numerics.rel_l2:.2g} is above {text}")


def too_late(record: RunRecord, slo_p95_s: float | None) -> Note | None:
    """Why it misses the latency target; with too few samples for a p95, the median must miss it."""
    if slo_p95_s is None or not record.blocks:
        return None
    kind = kind_measured(record, "latency")
    samples = [sample for block in timed_blocks(record, kind) for sample in block.samples]
    if not samples:
        return None
    p95_s = percentile(samples, 0.95)
    told = p95_s if p95_s is not None else median(samples)
    if told <= slo_p95_s:
        return None
    figure = "p95" if p95_s is not None else "p50"
    text = f"latency: {figure} {format_seconds(told)} is over the target {format_seconds(slo_p95_s)}"
    return note("too-late", text, about="latency")


def quantizing_of(switches: Iterable[str], tune: TuneRecord) -> set[str]:
    """Those that change the weights themselves: a switch is what its name says, whatever its options."""
    names = {switch.partition(":")[0] for switch in tune.quantizing}
    return {switch for switch in switches if switch.partition(":")[0] in names}


def metric_of(recipe: str, tune: TuneRecord) -> Metric | None:
    """What the user's check said about a recipe; None where it was not run on it."""
    return next((metric for metric in tune.metrics if metric.recipe == recipe), None)


def unproven(recipe: str, tune: TuneRecord) -> Note | None:
    """Why a recipe must not be recommended, however fast it is: the user's check says so, or it is quantized without one.

    None for what the check approves, and for what is not quantized and not checked yet.
    """
    quantized = ", ".join(sorted(quantizing_of(recipe.split("+"), tune)))
    metric = metric_of(recipe, tune)
    if metric is None and not quantized:
        return None
    if tune.tune.check is None:
        text = "accuracy of a quantized model cannot be judged on random weights; give a check of your own (--check)"
        return note("no-check", f"{quantized}: {text}")
    if metric is None:
        return note("check-not-run", f"{quantized}: your check has not been run on it")
    if metric.failure is not None or metric.value is None or metric.baseline is None:
        return note("check-error", f"your check raised an error: {metric.failure or 'it gave no number'}")
    if metric.value < metric.baseline - CHECK_LOSS * abs(metric.baseline):
        return note("check-failed", f"your check fell from {metric.baseline:.4g} to {metric.value:.4g}")
    return None


def _place(
    record: RunRecord, anchor: RunRecord | None, on_scale: Mapping[str, tuple[float, float]], kind: BlockKind
) -> tuple[float, float]:
    log = log_ratio(record, anchor, kind) if anchor is not None and anchor.id in on_scale else None
    if log is not None and anchor is not None:
        log_s, error = on_scale[anchor.id]
        return log_s + log.mean, math.hypot(max(log.error, SMALLEST_ERROR), error)
    times = [math.log(seconds) for seconds in round_medians_s(record, kind_measured(record, kind)).values()]
    return fmean(times), 0.0


def _estimate(recipe: str, record: RunRecord, place: tuple[float, float], cost_s: float, late: Note | None) -> Estimate:
    share = host_share(record)
    if share is not None and record.prepared is not None and record.prepared.step_synchronises:
        share = None  # issuing then includes the device's own time
    return Estimate(
        recipe=recipe,
        record_id=record.id,
        log_s=place[0],
        error=place[1],
        host_log_s=None if share is None else place[0] + math.log(max(share, 1e-3)),
        is_host_bound=share is not None and share > HOST_BOUND_SHARE,
        cost_s=cost_s,
        too_late=late,
    )
