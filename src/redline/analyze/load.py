"""What a server does under load, from the requests it served: percentiles per rate, the knee, the rate it sustains."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from redline.analyze.statistics import percentile
from redline.arrivals import Served
from redline.fields import Frozen
from redline.note import Note, note
from redline.record import Failure, Numerics, RunRecord, device_of

SETTLING = 0.1
"""Share of the requests that find a queue still filling up, and are left out of percentiles and means."""
KEEPS_UP = 0.97
"""Of the rate that was offered: a server that completes less falls behind."""
ABOVE_CAPACITY = 1.01
"""Offered so many times what the server ever completed: no short run that still looks well proves otherwise."""
FEWEST_FOR_KNEE = 3

Floats = NDArray[np.float64]


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
    """Of the time, spent computing."""
    padded_share: float
    """Of the rows computed, those that no request asked for."""
    is_saturated: bool
    keeps_target: bool
    """Not saturated, and p99 within the target where there is one. With too few requests for p99 the slowest request
    must be within it."""


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
    points = curve_of(load_point(served, slo_p99_s) for served in record.loads)
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
        notes=tuple(_notes(points, slo_p99_s)),
    )


def curve_of(points: Iterable[LoadPoint]) -> tuple[LoadPoint, ...]:
    """By rising rate, each judged by what the whole curve tells.

    In a short run a queue that grows slowly is not seen. Where other rates have shown what the server completes at most,
    a rate above that falls behind, however well it looked and however few requests chance has brought.
    """
    ordered = tuple(sorted(points, key=lambda point: point.rate))
    if not any(point.is_saturated for point in ordered):
        return ordered
    most = ABOVE_CAPACITY * max(max(point.achieved_rate, point.pace) for point in ordered)
    return tuple(
        msgspec.structs.replace(point, is_saturated=True, keeps_target=False) if point.rate > most else point
        for point in ordered
    )


def load_point(served: Served, slo_p99_s: float | None = None) -> LoadPoint:
    arrivals = np.asarray(served.arrivals_s)
    sizes = np.asarray(served.sizes, dtype=np.int64)
    started, finished = np.asarray(served.started_s), np.asarray(served.finished_s)
    done = int(sizes.sum())
    of_batch = np.repeat(np.arange(sizes.size), sizes)
    idle_from = np.concatenate([[0.0], finished])[:-1]
    # While the batch before still ran a request queued; from then on it waited for company.
    served_at, free_at = started[of_batch], np.minimum(idle_from, started)[of_batch]
    queued = np.maximum(free_at - arrivals[:done], 0.0)
    batching = np.maximum(served_at - np.maximum(arrivals[:done], free_at), 0.0)
    compute = (finished - started)[of_batch]
    # Those still waiting are counted, or a server that falls behind would look better the earlier it is stopped.
    latency = np.concatenate([finished[of_batch] - arrivals[:done], served.ended_s - arrivals[done:]])
    latency = np.maximum(latency, 0.0)
    first = int(SETTLING * arrivals.size)
    steady_batches = of_batch[first:]
    steady_sizes = sizes[steady_batches[0] :] if steady_batches.size else sizes
    span_s = float(finished[-1] - arrivals[0]) if done else 0.0
    offered = (arrivals.size - 1) / float(arrivals[-1] - arrivals[0]) if arrivals.size > 1 else served.rate
    achieved = done / span_s if span_s > 0 else 0.0
    unfinished = int(arrivals.size - done)
    kept = latency[first:]
    p99 = percentile(kept.tolist(), 0.99)
    pace = _pace(sizes, finished)
    is_saturated = unfinished > 0 or max(achieved, pace) < KEEPS_UP * min(offered, served.rate)
    tail = float(kept.max()) if p99 is None else p99
    return LoadPoint(
        rate=served.rate,
        offered_rate=offered,
        achieved_rate=achieved,
        pace=pace,
        requests=int(kept.size),
        unfinished=unfinished,
        mean_s=float(kept.mean()),
        p50_s=float(np.median(kept)),
        p95_s=percentile(kept.tolist(), 0.95),
        p99_s=p99,
        largest_s=float(kept.max()),
        mean_batch=float(steady_sizes.mean()) if steady_sizes.size else 0.0,
        batches=dict(sorted(Counter(sizes.tolist()).items())),
        queue_s=_mean(queued[first:]),
        batching_s=_mean(batching[first:]),
        compute_s=_mean(compute[first:]),
        busy_share=float((finished - started).sum()) / span_s if span_s > 0 else 0.0,
        padded_share=served.padded / (done + served.padded) if done else 0.0,
        is_saturated=is_saturated,
        keeps_target=not is_saturated and (slo_p99_s is None or tail <= slo_p99_s),
    )


def _pace(sizes: NDArray[np.int64], finished: Floats) -> float:
    """Requests completed per second from the first completion to the last.

    What the last requests take after their arrival is latency, and no sign that the server falls behind.
    """
    span_s = float(finished[-1] - finished[0]) if finished.size > 1 else 0.0
    return float(sizes[1:].sum()) / span_s if span_s > 0 else 0.0


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
    """Of a curve that sustains the highest rate it was asked for, only a lower bound is known."""


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


def _notes(points: Sequence[LoadPoint], slo_p99_s: float | None) -> list[Note]:
    told = []
    if any(point.p99_s is None for point in points):
        text = "some rates had fewer than the 662 requests that p99 needs; there the slowest request was judged"
        told.append(
            note("few-samples", text if slo_p99_s else "some rates had fewer than the 662 requests that p99 needs")
        )
    late = [point for point in points if point.padded_share > 0.25]
    if late:
        text = "more than a quarter of the rows were padding: this recipe runs fixed batch sizes only"
        told.append(note("padding", text))
    return told


def _mean(values: Floats) -> float:
    return float(values.mean()) if values.size else 0.0
