"""Rows over several processes of one thing: what `--replicates` measures.

Samples of one process share what that process was born with, so an interval over processes is made of one figure for
each of them, never of their pooled samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

import msgspec

from redline.analyze.race import half_width, log_ratio
from redline.analyze.statistics import student_t
from redline.analyze.summary import (
    CeilingsOf,
    Latency,
    RunSummary,
    ThroughputInterval,
    VersusFirst,
    first_of_each_group,
    summarize,
)
from redline.record import RunRecord


def replicate_rows(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> list[RunSummary]:
    """One row for all records of one spec, in the order of their first; a record alone keeps its own row."""
    rows = summarize(records, ceilings_of)
    together: dict[tuple[bytes, int], list[int]] = {}
    for index, record in enumerate(records):
        # A recipe that is set against itself has the same spec twice in a group, at another position.
        key = msgspec.msgpack.encode(record.spec), record.position if record.group else 0
        together.setdefault(key, []).append(index)
    firsts = first_of_each_group(records)
    return [
        rows[indices[0]]
        if len(indices) == 1
        else _joined([records[index] for index in indices], [rows[index] for index in indices], firsts)
        for indices in together.values()
    ]


def _joined(records: Sequence[RunRecord], rows: Sequence[RunSummary], firsts: dict[str, RunRecord]) -> RunSummary:
    ids = tuple(row.record_id for row in rows)
    broken = next((row for row in rows if row.failure is not None), None)
    if broken is not None:  # what works in some processes only does not work
        return msgspec.structs.replace(broken, replicate_ids=ids)
    timed = [row for row in rows if row.throughput_per_s is not None]
    if len(timed) < 2:
        return msgspec.structs.replace(rows[0], replicate_ids=ids)
    middle = sorted(timed, key=lambda row: row.throughput_per_s or 0.0)[len(timed) // 2]
    doubted = next((row.verdict for row in rows if not row.verdict.trusted), middle.verdict)
    interval = _interval([row.throughput_per_s or 0.0 for row in timed])
    return msgspec.structs.replace(
        middle,
        throughput_per_s=math.sqrt(interval.low * interval.high),
        throughput_interval=interval,
        latency_s=_latency([row.latency_s for row in timed if row.latency_s is not None]),
        vs_first=_versus(records, rows, firsts),
        verdict=doubted,
        replicate_ids=ids,
    )


def _interval(values: Sequence[float]) -> ThroughputInterval:
    """Student's interval on the mean of the logarithms."""
    logs = [math.log(value) for value in values]
    half = student_t(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    centre = fmean(logs)
    return ThroughputInterval(low=math.exp(centre - half), high=math.exp(centre + half), half_width=math.expm1(half))


def _latency(of_each: Sequence[Latency]) -> Latency | None:
    """Of the middle process; its p50 with an interval over all of them."""
    if len(of_each) < 2:
        return of_each[0] if of_each else None
    middle = sorted(of_each, key=lambda latency: latency.p50)[len(of_each) // 2]
    interval = _interval([latency.p50 for latency in of_each])
    return msgspec.structs.replace(
        middle, p50=median(latency.p50 for latency in of_each), low=interval.low, high=interval.high
    )


def _versus(
    records: Sequence[RunRecord], rows: Sequence[RunSummary], firsts: dict[str, RunRecord]
) -> VersusFirst | None:
    """The mean over replicates of what was seen in turns; its interval covers what differs between processes."""
    own = [row.vs_first for row in rows if row.vs_first is not None]
    pairs = [(firsts[record.group], record) for record in records if record.group and firsts[record.group] != record]
    logs = [log for first, record in pairs if (log := log_ratio(first, record)) is not None]
    if not own or not logs:
        return own[0] if own else None
    centre, half = fmean(log.mean for log in logs), half_width(logs, looks=False)
    return msgspec.structs.replace(
        own[0],
        ratio=math.exp(centre),
        low=None if half is None else math.exp(centre - half),
        high=None if half is None else math.exp(centre + half),
    )
