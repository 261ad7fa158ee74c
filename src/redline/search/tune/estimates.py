"""What each recipe of a search takes.

A trial is measured in turns with the fastest recipe so far, so its time is that one's time by their ratio: what drifts
over the minutes of a search cancels. The chain begins with the baseline's own time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

from redline.analyze.blocks import round_medians_s
from redline.analyze.bound import HOST_BOUND_SHARE, host_share
from redline.analyze.pairs import kind_measured, log_ratio
from redline.model.note import Note
from redline.model.record import RunRecord, TimeKind
from redline.search.tune.lessons import rejection
from redline.search.tune.record import TuneRecord

Records = Mapping[str, RunRecord]

PROCESS_SD = 0.006
"""How far two processes of one recipe lie apart, beyond what a single process shows of its noise."""
SMALLEST_ERROR = 0.002
"""Two or three rounds may agree by chance."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One recipe. Logarithms of seconds per step, or of joules where those are the objective."""

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
        why = rejection(record, tune) if record is not None else None
        if why is not None and why.about == "numerics":
            found.pop(trial.recipe, None)  # this look was closer than the first
        if record is None or record.failure is not None or not record.blocks:
            continue
        if kind == "energy" and not round_medians_s(record, kind):
            continue  # the device did not tell
        known = found.get(trial.recipe)
        time = _time_of(record, records.get(trial.anchor_id or ""), on_scale, kind)
        if known is not None and trial.anchor_id is None:
            time = (known.log_s, known.error)  # opened again to go on from: the scale is the one it gave
        on_scale[record.id] = time
        if why is None or why.code == "too-late":
            share = None if kind == "energy" else _issue_share(record)
            found[trial.recipe] = _estimate(trial.recipe, record, time, trial.cost_s, why, share)
    return found


def _time_of(
    record: RunRecord, anchor: RunRecord | None, on_scale: Mapping[str, tuple[float, float]], kind: TimeKind
) -> tuple[float, float]:
    """The logarithm of a step's seconds on the scale of the search, and its standard error."""
    log = log_ratio(record, anchor, kind) if anchor is not None and anchor.id in on_scale else None
    if log is not None and anchor is not None:
        log_s, error = on_scale[anchor.id]
        return log_s + log.centre, math.hypot(max(log.error, SMALLEST_ERROR), error, log.doubt / 2)
    times = [math.log(seconds) for seconds in round_medians_s(record, kind_measured(record, kind)).values()]
    return fmean(times), 0.0


def _issue_share(record: RunRecord) -> float | None:
    """Of a step, the time to issue it; None where that is not known, or includes the device's own time."""
    synchronises = record.prepared is not None and record.prepared.step_synchronises
    return None if synchronises else host_share(record)


def _estimate(
    recipe: str, record: RunRecord, time: tuple[float, float], cost_s: float, late: Note | None, share: float | None
) -> Estimate:
    return Estimate(
        recipe=recipe,
        record_id=record.id,
        log_s=time[0],
        error=time[1],
        host_log_s=None if share is None else time[0] + math.log(max(share, 1e-3)),
        is_host_bound=share is not None and share > HOST_BOUND_SHARE,
        cost_s=cost_s,
        too_late=late,
    )
