"""What a server does under load, from the requests it served: percentiles per rate, the knee, the rate it sustains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.analyze.statistics import percentile
from redline.model.arrivals import Served
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Failure, Numerics, RunRecord, device_of

SETTLING = 0.1
"""Share of the requests that find a queue still filling up, and are left out of percentiles and means."""
KEEPS_UP = 0.97
"""Of the rate that was offered: a server that completes less falls behind."""
ABOVE_CAPACITY = 1.01
"""Offered so many times what the server ever completed: no short run that still looks well proves otherwise."""
FEWEST_FOR_KNEE = 3

SLICES = 10
FEWEST_IN_SLICE = 5
CLEARLY_RISING = 27
"""Of 45 pairs of slices, how many more rise than fall: by chance once in a hundred times (Mann and Kendall)."""
SLOWS = 1.05
"""A batch that takes so many times as long at the end of a run is worth a word."""
NEAR_CAPACITY = 0.95
"""Of the most that the server completed: so near to it, queues take far longer to settle than a run lasts."""


class LoadPoint(Frozen):
    """Requests at one rate. Every time is a mean over requests unless its name says otherwise."""

    rate: float
    """Asked for, in requests per second."""
    offered_rate: float
    """What the random arrivals came to."""
    achieved_rate: float
    """Requests completed per second, from the first arrival to the last completion."""
    pace: float
    """Requests completed per second, from the first completion to the last."""
    requests: int
    """Behind the percentiles."""
    unfinished: int
    """Not served when the run was ended; their latency counts as long as they had waited by then."""
    mean_s: float
    p50_s: float
    p95_s: float | None
    """None with fewer than 130 requests."""
    p99_s: float | None
    """None with fewer than 662 requests."""
    largest_s: float
    mean_batch: float
    batches: dict[int, int]
    """How often each batch size formed."""
    queue_s: float
    """Waited for the device to finish other batches."""
    batching_s: float
    """Waited on an idle device for the batch to fill."""
    compute_s: float
    busy_share: float
    """Share of the time spent computing."""
    padded_share: float
    """Share of the computed rows that no request asked for."""
    is_saturated: bool
    keeps_target: bool
    """Not saturated, and p99 within the target where there is one, each time that the rate was offered. With too few
    requests for p99 the slowest request must be within it."""
    runs: int = 1
    """How often it was offered: the sustainable rate is offered again, with other arrivals and for longer."""
    last_pace: float | None = None
    """As `pace`, of the last time that the rate was offered; None in documents from before rates were offered again."""
    slowing: float = 1.0
    """How many times as long a batch took at the end of the run as at its start; 1 where there is no clear trend."""


class LoadSummary(Frozen):
    """One model under one recipe, over the rates."""

    record_id: str
    model: str
    recipe: str
    device: str
    device_name: str
    max_batch: int
    max_wait_s: float
    slo_p99_s: float | None
    points: tuple[LoadPoint, ...]
    """By rising rate."""
    sustainable_rate: float | None
    """The highest measured rate that keeps the target, below which all others do too; None: none does."""
    is_open_ended: bool
    """The highest rate that was asked for was sustained: the true limit is higher."""
    knee_rate: float | None
    """Where rate over mean latency is highest; None where that is at an end of the range."""
    arrivals: str
    """`poisson` or `file`."""
    numerics: Numerics | None = None
    failure: Failure | None = None
    notes: tuple[Note, ...] = ()

    @property
    def is_sound(self) -> bool:
        return self.failure is None and bool(self.points)


def load_of(record: RunRecord) -> LoadSummary:
    """A record's loads, judged by its target."""
    assert record.spec.load is not None
    load, prepared = record.spec.load, record.prepared
    slo_p99_s = load.slo_p99_s
    points = points_of(record.loads, slo_p99_s)
    kept = sustained(points)
    return LoadSummary(
        record_id=record.id,
        model=record.spec.workload.model,
        recipe=str(record.spec.recipe),
        device=device_of(record),
        device_name=prepared.environment.device.name if prepared else "",
        max_batch=load.max_batch,
        max_wait_s=load.max_wait_s,
        slo_p99_s=slo_p99_s,
        points=points,
        sustainable_rate=kept,
        is_open_ended=bool(points) and kept == points[-1].rate,
        knee_rate=knee_of(points),
        arrivals="file" if any(served.seed is None for served in record.loads) else "poisson",
        numerics=prepared.numerics if prepared else None,
        failure=record.failure.brief() if record.failure else None,
        notes=tuple(_notes(points, kept, slo_p99_s)),
    )


def points_of(loads: Iterable[Served], slo_p99_s: float | None = None) -> tuple[LoadPoint, ...]:
    """A point for each rate, by rising rate; what was offered twice is one point of all its requests."""
    by_rate: dict[float, list[Served]] = {}
    for served in loads:
        by_rate.setdefault(served.rate, []).append(served)
    return curve_of(load_point(first, slo_p99_s, again) for first, *again in by_rate.values())


def curve_of(points: Iterable[LoadPoint]) -> tuple[LoadPoint, ...]:
    """By rising rate, each judged by what the whole curve tells.

    In a short run a queue that grows slowly is not seen. Where other rates have shown what the server completes at most,
    a rate above that falls behind, however well it looked and however few requests chance has brought. A server that
    falls behind at a rate that it has kept before can do less now, at all rates.
    """
    ordered = tuple(sorted(points, key=lambda point: point.rate))
    if not any(point.is_saturated for point in ordered):
        return ordered
    most = max(max(point.achieved_rate, point.pace) for point in ordered)
    again = [each for each in ordered if each.runs > 1 and each.is_saturated]
    most = ABOVE_CAPACITY * min([most, *(each.last_pace for each in again if each.last_pace is not None)])
    return tuple(
        msgspec.structs.replace(point, is_saturated=True, keeps_target=False) if point.rate > most else point
        for point in ordered
    )


class _Run:
    """The requests of one run, less those that found a queue still filling up."""

    def __init__(self, served: Served) -> None:
        arrivals = np.asarray(served.arrivals_s)
        self.sizes = np.asarray(served.sizes, dtype=np.int64)
        started, finished = np.asarray(served.started_s), np.asarray(served.finished_s)
        self.rate, self.padded, self.done = served.rate, served.padded, int(self.sizes.sum())
        self.unfinished = int(arrivals.size - self.done)
        of_batch = np.repeat(np.arange(self.sizes.size), self.sizes)
        idle_from = np.concatenate([[0.0], finished])[:-1]
        # While the batch before still ran a request queued; from then on it waited for company.
        served_at, free_at = started[of_batch], np.minimum(idle_from, started)[of_batch]
        came = arrivals[: self.done]
        # Those still waiting are counted, or a server that falls behind would look better the earlier it is stopped.
        latency = np.concatenate([finished[of_batch] - came, served.ended_s - arrivals[self.done :]])
        first = int(SETTLING * arrivals.size)
        self.latency = np.maximum(latency, 0.0)[first:]
        self.queued = np.maximum(free_at - came, 0.0)[first:]
        self.batching = np.maximum(served_at - np.maximum(came, free_at), 0.0)[first:]
        self.batch_s = finished - started
        self.compute = self.batch_s[of_batch][first:]
        steady = of_batch[first:]
        self.steady_sizes = self.sizes[steady[0] :] if steady.size else self.sizes
        self.span_s = float(finished[-1] - arrivals[0]) if self.done else 0.0
        self.arrived, self.arriving_s = arrivals.size - 1, float(arrivals[-1] - arrivals[0])
        # What the last requests take after their arrival is latency, and no sign that the server falls behind.
        self.paced = int(self.sizes[1:].sum())
        self.pacing_s = float(finished[-1] - finished[0]) if finished.size > 1 else 0.0

    def is_saturated(self) -> bool:
        offered = _over(self.arrived, self.arriving_s, self.rate)
        reached = max(_over(self.done, self.span_s), _over(self.paced, self.pacing_s))
        return self.unfinished > 0 or reached < KEEPS_UP * min(offered, self.rate)

    def tail_s(self) -> float:
        p99 = percentile(self.latency, 0.99)
        return float(self.latency.max()) if p99 is None else p99


def load_point(served: Served, slo_p99_s: float | None = None, again: Sequence[Served] = ()) -> LoadPoint:
    """One rate. Each time that it was offered must have kept the target."""
    runs = [_Run(each) for each in (served, *again)]
    latency, sizes = _joined(run.latency for run in runs), _joined(run.steady_sizes for run in runs)
    done, span_s = sum(run.done for run in runs), sum(run.span_s for run in runs)
    padded = sum(run.padded for run in runs)
    is_saturated = any(run.is_saturated() for run in runs)
    return LoadPoint(
        rate=runs[0].rate,
        runs=len(runs),
        offered_rate=_over(sum(run.arrived for run in runs), sum(run.arriving_s for run in runs), runs[0].rate),
        achieved_rate=_over(done, span_s),
        pace=_over(sum(run.paced for run in runs), sum(run.pacing_s for run in runs)),
        last_pace=_over(runs[-1].paced, runs[-1].pacing_s),
        requests=int(latency.size),
        unfinished=sum(run.unfinished for run in runs),
        mean_s=float(latency.mean()),
        p50_s=float(np.median(latency)),
        p95_s=percentile(latency, 0.95),
        p99_s=percentile(latency, 0.99),
        largest_s=float(latency.max()),
        mean_batch=_mean(sizes),
        batches=dict(sorted(Counter(size for run in runs for size in run.sizes.tolist()).items())),
        queue_s=_mean(_joined(run.queued for run in runs)),
        batching_s=_mean(_joined(run.batching for run in runs)),
        compute_s=_mean(_joined(run.compute for run in runs)),
        busy_share=_over(float(sum(run.batch_s.sum() for run in runs)), span_s),
        padded_share=_over(padded, done + padded),
        slowing=max(_slowing(run) for run in runs),
        is_saturated=is_saturated,
        keeps_target=not is_saturated and (slo_p99_s is None or all(run.tail_s() <= slo_p99_s for run in runs)),
    )


def _slowing(run: _Run) -> float:
    """How many times as long a batch takes at the end of a run as at its start; 1 where that is no clear trend.

    Batches are compared with others of their size, in slices of equal count, whose medians must keep rising.
    """
    if run.sizes.size < SLICES * FEWEST_IN_SLICE:
        return 1.0
    usual = {size: float(np.median(run.batch_s[run.sizes == size])) for size in np.unique(run.sizes).tolist()}
    relative = run.batch_s / np.array([max(usual[size], 1e-12) for size in run.sizes.tolist()])
    medians = [float(np.median(part)) for part in np.array_split(relative, SLICES)]
    rising = sum(
        int(np.sign(later - earlier)) for index, earlier in enumerate(medians) for later in medians[index + 1 :]
    )
    return max(medians[-1] / medians[0], 1.0) if rising >= CLEARLY_RISING and medians[0] > 0 else 1.0


def sustained(points: Sequence[LoadPoint]) -> float | None:
    """The highest rate that keeps its target, counting only rates below the first that does not."""
    rate = None
    for point in sorted(points, key=lambda point: point.rate):
        if not point.keeps_target:
            break
        rate = point.rate
    return rate


class RateRatio(Frozen):
    """The sustainable rate of a curve over that of the first."""

    record_id: str
    recipe: str
    ratio: float | None
    """None for another model, and where either sustains nothing."""
    bound: Literal["exact", "at least", "at most", "unknown"]
    """For a curve that sustains the highest rate it was asked for, only a lower bound is known."""


def ratios_to_first(rows: Sequence[LoadSummary]) -> list[RateRatio]:
    return [_ratio_to(row, rows[0]) for row in rows]


def _ratio_to(row: LoadSummary, first: LoadSummary) -> RateRatio:
    ratio: float | None = None
    if row.model == first.model and row.sustainable_rate and first.sustainable_rate:
        ratio = row.sustainable_rate / first.sustainable_rate
    bounds: dict[tuple[bool, bool], Literal["exact", "at least", "at most", "unknown"]] = {
        (True, True): "unknown", (True, False): "at least", (False, True): "at most", (False, False): "exact",
    }  # fmt: skip
    bound = "exact" if row is first else bounds[row.is_open_ended, first.is_open_ended]
    return RateRatio(record_id=row.record_id, recipe=row.recipe, ratio=ratio, bound=bound)


def knee_of(points: Sequence[LoadPoint]) -> float | None:
    """Kleinrock's knee: more load than that costs more in latency than it brings in throughput."""
    if len(points) < FEWEST_FOR_KNEE:
        return None
    ordered = sorted(points, key=lambda point: point.rate)
    powers = [point.achieved_rate / point.mean_s if point.mean_s > 0 else 0.0 for point in ordered]
    best = int(np.argmax(powers))
    return ordered[best].rate if 0 < best < len(ordered) - 1 else None


def _notes(points: Sequence[LoadPoint], kept: float | None, slo_p99_s: float | None) -> list[Note]:
    told = []
    if any(point.p99_s is None for point in points):
        text = "some rates had fewer than the 662 requests that p99 needs; there the slowest request was judged"
        told.append(
            note("few-samples", text if slo_p99_s else "some rates had fewer than the 662 requests that p99 needs")
        )
    slowing = [point for point in points if point.slowing >= SLOWS]
    if slowing:
        worst = max(slowing, key=lambda point: point.slowing)
        text = (
            f"batches took longer and longer: {worst.slowing:.2f} times as long at the end of the run at "
            f"{worst.rate:.4g} requests/s as at its start; a longer run would sustain less (try --seconds)"
        )
        told.append(note("slowing", text))
    most = max((max(point.achieved_rate, point.pace) for point in points if point.is_saturated), default=None)
    if slo_p99_s and most and kept and kept > NEAR_CAPACITY * most:
        text = (
            f"{kept:.4g} requests/s is {kept / most:.0%} of the most that was completed: so near to the limit "
            "queues grow for longer than these runs lasted, and p99 with them"
        )
        told.append(note("near-capacity", text))
    late = [point for point in points if point.padded_share > 0.25]
    if late:
        text = "more than a quarter of the rows were padding: this recipe runs fixed batch sizes only"
        told.append(note("padding", text))
    return told


def _mean(values: NDArray[Any]) -> float:
    return float(values.mean()) if values.size else 0.0


def _joined(parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(list(parts))


def _over(count: float, seconds: float, otherwise: float = 0.0) -> float:
    return count / seconds if seconds > 0 else otherwise
