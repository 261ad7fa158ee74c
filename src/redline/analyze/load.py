"""This module derives what a server does under load from the requests it served: percentiles per rate, and the rate that it sustains.

The verdict on a rate follows from the figures that stand beside it, and from nothing else. A rate that was offered several times is
represented by the run that went worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from redline.analyze.statistics import percentile
from redline.model.arrivals import LoadSpec, Served, rate_of
from redline.model.fields import Frozen
from redline.model.metrics import LATENCY_P50, LATENCY_P95, LATENCY_P99, Figure, Row
from redline.model.note import Note, note
from redline.model.record import RunRecord
from redline.model.units import format_rate

SETTLING = 0.1
"""This share of the requests finds a queue still filling up, and is left out of percentiles and means."""
KEEPS_UP = 0.97
"""This share of the rate that was offered must be completed: the band within which two speeds are the same."""
Verdict = Literal["kept", "above the target", "falls behind"]

FIGURES: tuple[tuple[Figure, str], ...] = (
    (Figure(name="rate", unit="req/s", header="rate/s", doc="Requests per second that were asked for."), "rate"),
    (Figure(name="offered_rate", unit="req/s", header="offered/s", doc="Requests that arrived per second."), "offered_rate"),
    (Figure(name="achieved_rate", unit="req/s", header="done/s", better="higher", doc="Completed per second."), "achieved_rate"),
    (LATENCY_P50, "p50_s"),
    (LATENCY_P95, "p95_s"),
    (LATENCY_P99, "p99_s"),
    (Figure(name="largest", unit="s", header="slowest", better="lower", doc="The slowest request."), "largest_s"),
    (Figure(name="queue", unit="s", doc="Mean wait for the device to finish other batches."), "queue_s"),
    (Figure(name="batching", unit="s", doc="Mean wait on an idle device for the batch to fill."), "batching_s"),
    (Figure(name="compute", unit="s", doc="Mean time of the batch that a request was in."), "compute_s"),
    (Figure(name="mean_batch", header="batch", doc="Requests per batch."), "mean_batch"),
    (Figure(name="busy", unit="share", doc="Share of the time spent computing."), "busy_share"),
    (Figure(name="padded", unit="share", doc="Share of the computed rows that no request asked for."), "padded_share"),
    (Figure(name="requests", doc="Requests behind the percentiles."), "requests"),
    (Figure(name="unfinished", doc="Requests that were not served when the run was ended."), "unfinished"),
)  # fmt: skip
"""Every figure of a rate, with the field of its point that has the value."""


class LoadPoint(Frozen):
    """Requests at one rate. Every time is a mean over requests unless its name says otherwise."""

    rate: float
    """This many requests per second were asked for."""
    offered_rate: float
    """This many arrived per second; in runs before 1.0 chance made it differ from the rate."""
    achieved_rate: float
    """Requests completed per second. What the last ones take after their arrival is latency and does not lower it."""
    requests: int
    """The percentiles are made of this many requests."""
    unfinished: int
    """Not served when the run was ended; their latency counts as long as they had waited by then."""
    mean_s: float
    p50_s: float
    p95_s: float | None
    """It is None with fewer than 130 requests."""
    p99_s: float | None
    """It is None with fewer than 662 requests."""
    largest_s: float
    mean_batch: float
    queue_s: float
    batching_s: float
    compute_s: float
    busy_share: float
    padded_share: float
    target_s: float | None = None
    """The p99 must stay within this."""
    runs: int = 1
    """The rate was offered so often. The figures are those of the run that went worst."""

    @property
    def tail_s(self) -> float:
        """Returns what is held against the target: p99, or the slowest request where there are too few for p99."""
        return self.largest_s if self.p99_s is None else self.p99_s

    @property
    def verdict(self) -> Verdict:
        if self.unfinished or self.achieved_rate < KEEPS_UP * self.offered_rate:
            return "falls behind"
        return "kept" if self.target_s is None or self.tail_s <= self.target_s else "above the target"

    @property
    def is_kept(self) -> bool:
        return self.verdict == "kept"


@dataclass(frozen=True)
class LoadSummary:
    """This is one model under one recipe, over the rates."""

    record: RunRecord
    points: tuple[LoadPoint, ...]
    """They are ordered by rising rate."""
    sustainable_rate: float | None
    """The highest measured rate that is kept, below which all others are too; None: none is."""

    @property
    def load(self) -> LoadSpec:
        assert self.record.spec.load is not None
        return self.record.spec.load

    @property
    def model(self) -> str:
        return self.record.spec.workload.model

    @property
    def recipe(self) -> str:
        return str(self.record.spec.recipe)

    @property
    def is_open_ended(self) -> bool:
        """Returns whether the highest rate that was asked for was sustained: the true limit is higher."""
        return bool(self.points) and self.sustainable_rate == self.points[-1].rate

    @property
    def notes(self) -> Iterator[Note]:
        if any(point.p99_s is None for point in self.points):
            judged = "; there the slowest request was judged" if self.load.slo_p99_s else ""
            yield note("few-samples", f"some rates had fewer than the 662 requests that p99 needs{judged}")
        beyond = [point for point in self.points if point.is_kept and point.rate > (self.sustainable_rate or 0.0)]
        if beyond:
            text = f"{format_rate(beyond[-1].rate)} requests/s were kept in one run and do not count as sustained"
            yield note("pace-changed", f"{text}: another run completed less, so the speed changed from run to run")
        if any(point.padded_share > 0.25 for point in self.points):
            yield note(
                "padding", "more than a quarter of the rows were padding: this recipe runs fixed batch sizes only"
            )


def load_of(record: RunRecord) -> LoadSummary:
    """Returns a record's loads, judged by its target."""
    assert record.spec.load is not None
    points = points_of(record.loads, record.spec.load.slo_p99_s)
    return LoadSummary(record, points, sustained(points))


def points_of(loads: Iterable[Served], slo_p99_s: float | None = None) -> tuple[LoadPoint, ...]:
    """Returns a point for each rate, by rising rate: the run that went worst, as a rate must be kept each time."""
    runs: dict[float, list[LoadPoint]] = {}
    for served in loads:
        runs.setdefault(served.rate, []).append(load_point(served, slo_p99_s))
    worst = {
        rate: max(some, key=lambda one: (not one.is_kept, one.unfinished, one.tail_s)) for rate, some in runs.items()
    }
    return tuple(msgspec.structs.replace(worst[rate], runs=len(runs[rate])) for rate in sorted(runs))


def load_point(served: Served, slo_p99_s: float | None = None) -> LoadPoint:
    """Returns one run at one rate, less the requests that found a queue still filling up."""
    arrivals, sizes = np.asarray(served.arrivals_s), np.asarray(served.sizes, dtype=np.int64)
    started, finished = np.asarray(served.started_s), np.asarray(served.finished_s)
    done = int(sizes.sum())
    batch_of = np.repeat(np.arange(sizes.size), sizes)
    came, began = arrivals[:done], started[batch_of]
    # A request queued while the batch before still ran; from then on it waited for company.
    free = np.minimum(np.concatenate([[0.0], finished])[:-1], started)[batch_of]
    # Those still waiting are counted, or a server that falls behind would look better the earlier it is stopped.
    waits = np.concatenate([finished[batch_of] - came, served.ended_s - arrivals[done:]])
    first = int(SETTLING * arrivals.size)
    latency, steady = np.maximum(waits, 0.0)[first:], batch_of[first:]
    span_s = float(finished[-1] - arrivals[0]) if done else 0.0
    pace = (float(sizes[1:].sum()), float(finished[-1] - finished[0])) if done else (0.0, 0.0)
    batch_s = finished - started

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if values.size else 0.0

    return LoadPoint(
        rate=served.rate,
        offered_rate=rate_of(served.arrivals_s),
        achieved_rate=max(_over(done, span_s), _over(*pace)),
        requests=int(latency.size),
        unfinished=int(arrivals.size - done),
        mean_s=float(latency.mean()),
        p50_s=float(np.median(latency)),
        p95_s=percentile(latency, 0.95),
        p99_s=percentile(latency, 0.99),
        largest_s=float(latency.max()),
        mean_batch=mean(sizes[steady[0] :] if steady.size else sizes),
        queue_s=mean(np.maximum(free - came, 0.0)[first:]),
        batching_s=mean(np.maximum(began - np.maximum(came, free), 0.0)[first:]),
        compute_s=mean(batch_s[steady]),
        busy_share=_over(float(batch_s.sum()), span_s),
        padded_share=_over(served.padded, done + served.padded),
        target_s=slo_p99_s,
    )


def sustained(points: Sequence[LoadPoint]) -> float | None:
    """Returns the highest rate that is kept, as all below it are.

    A rate above what a run that fell short has completed does not count: it was kept while the server was faster.
    """
    broken = [point for point in points if not point.is_kept]
    most = min((min(point.rate, point.achieved_rate / KEEPS_UP) for point in broken), default=np.inf)
    return max((point.rate for point in points if point.is_kept and point.rate < most), default=None)


def _over(count: float, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0


def load_rows(load: LoadSummary) -> Iterator[Row]:
    """Returns one row for each rate of requests. What its verdict rests on stands in it."""
    for point in load.points:
        metrics = (figure(getattr(point, field)) for figure, field in FIGURES)
        is_best = point.rate == load.sustainable_rate
        yield Row(
            facts={
                "recipe": load.recipe,
                "model": load.model,
                "verdict": "sustained" if is_best else point.verdict,
                "keeps_target": point.is_kept,
                "runs": point.runs,
            },
            metrics=tuple(metric for metric in metrics if metric.value is not None),
            record_id=load.record.id,
        )
