"""What is known of one recipe over all of its processes: its speed, ratio, interval and bound.

Every output takes these from here: the terminal, Markdown, the dashboard, pictures, CSV and JSON. Samples of one process
share what that process was born with, so an interval over processes is made of one figure for each of them, never of
their pooled samples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, stdev

import msgspec

from redline.analyze.blocks import Latency, ThroughputInterval
from redline.analyze.pairs import log_ratio, ratio_over
from redline.analyze.roofline import at_step
from redline.analyze.statistics import student_t
from redline.analyze.summary import CeilingsOf, RunSummary, VersusFirst, agreeing, first_of_each_group, summarize
from redline.analyze.trust import Verdict, farthest
from redline.model.identity import Subject, is_capture, subjects_of
from redline.model.note import note
from redline.model.record import RunRecord
from redline.model.spec import BASELINE
from redline.model.units import significant

Process = tuple[RunRecord, RunSummary]


def replicate_rows(records: Sequence[RunRecord], ceilings_of: CeilingsOf | None = None) -> list[RunSummary]:
    """One row for all records of one spec, in the order of their first; a record alone keeps its own row."""
    rows = summarize(records, ceilings_of)
    together: dict[tuple[bytes, int], list[Process]] = {}
    copies: Counter[tuple[bytes, str]] = Counter()
    for record, row in zip(records, rows, strict=True):
        # A recipe that is compared with itself has the same spec several times in a group.
        spec = msgspec.msgpack.encode(record.spec)
        copies[spec, record.group or record.id] += 1
        together.setdefault((spec, copies[spec, record.group or record.id]), []).append((record, row))
    firsts = first_of_each_group(records)
    return agreeing([joined_row(processes, firsts) for processes in together.values()])


@dataclass(frozen=True)
class Line:
    """One recipe at one batch of one subject, over all processes that measured it."""

    subject: Subject
    record: RunRecord
    """The one that `row.record_id` names."""
    row: RunSummary
    """Its ratio is left out where it is against another recipe than most ratios of its subject are."""
    processes: tuple[Process, ...]
    """In the order in which they were measured."""

    @property
    def rates(self) -> tuple[float, ...]:
        """Items per second of each process."""
        return tuple(row.throughput_per_s for _, row in self.processes if row.throughput_per_s is not None)

    @property
    def measured_at(self) -> float:
        """The newest of them."""
        return max(record.created_at for record, _ in self.processes)

    @property
    def is_capture(self) -> bool:
        return is_capture(self.record)

    @property
    def told(self) -> str:
        """How many processes there were and how much they differ."""
        if len(self.rates) < 2:
            return "1"
        low, high = (significant(each, max(3, len(str(round(each))))) for each in (min(self.rates), max(self.rates)))
        return f"{len(self.rates)}: {low}–{high}"


def lines_of(records: Sequence[RunRecord], rows: Sequence[RunSummary]) -> list[Line]:
    """In the order in which things were first measured, those of a group as they were asked for: a race opens them in any order.

    What failed, and what ran beside a profile, stays apart. `rows`: one per record.
    """
    together: dict[Hashable, list[Process]] = {}
    subjects = subjects_of(records)
    usual = _usual_firsts(subjects, rows)
    of_key: dict[Hashable, Subject] = {}
    for index in _as_asked(records):
        subject, record, row = subjects[index], records[index], rows[index]
        if row.vs_first is not None and row.vs_first.recipe != usual[subject]:
            row = msgspec.structs.replace(row, vs_first=None)
        key = _same(subject, record, row)
        of_key[key] = subject
        together.setdefault(key, []).append((record, row))
    firsts = first_of_each_group(records)
    lines = [_line(of_key[key], processes, firsts) for key, processes in together.items()]
    agreed = agreeing([line.row for line in lines])
    return _with_failures([replace(line, row=row) for line, row in zip(lines, agreed, strict=True)])


def _as_asked(records: Sequence[RunRecord]) -> list[int]:
    """Their numbers, with those of a group by position, where the first of the group stands."""
    begun: dict[str, int] = {}
    for index, record in enumerate(records):
        begun.setdefault(record.group or record.id, index)
    return sorted(
        range(len(records)), key=lambda at: (begun[records[at].group or records[at].id], records[at].position)
    )


def _with_failures(lines: Sequence[Line]) -> list[Line]:
    """Lines that say how often the same failed since it was first measured: what works now and then is no sure thing."""
    failed: dict[Hashable, list[Line]] = {}
    for line in lines:
        if line.row.failure is not None:
            failed.setdefault((line.subject, line.row.recipe, line.row.batch), []).append(line)
    told = []
    for line in lines:
        since = min(record.created_at for record, _ in line.processes)
        broken = failed.get((line.subject, line.row.recipe, line.row.batch), ())
        ways = [each.row.failure for each in broken if each.measured_at >= since]
        if line.row.failure is None and ways and ways[0] is not None:
            text = f"{len(ways)} more process{'es' if len(ways) > 1 else ''} failed: {ways[0].kind} at {ways[0].stage}"
            verdict = line.row.verdict
            noted = msgspec.structs.replace(verdict, notes=(*verdict.notes, note("also-failed", text)))
            line = replace(line, row=msgspec.structs.replace(line.row, verdict=noted))
        told.append(line)
    return told


def _line(subject: Subject, processes: Sequence[Process], firsts: Mapping[str, RunRecord]) -> Line:
    row = joined_row(processes, firsts)
    record = next(record for record, _ in processes if record.id == row.record_id)
    return Line(subject, record, row, tuple(processes))


def _usual_firsts(subjects: Sequence[Subject], rows: Sequence[RunSummary]) -> dict[Subject, str]:
    """The baseline where any ratio of a subject is against it: an ablation sets its recipes against the winner.

    Else what most are against.
    """
    counts: dict[Subject, Counter[str]] = {}
    for subject, row in zip(subjects, rows, strict=True):
        if row.vs_first is not None:
            counts.setdefault(subject, Counter())[row.vs_first.recipe] += 1
    return {
        subject: BASELINE if BASELINE in firsts else firsts.most_common(1)[0][0] for subject, firsts in counts.items()
    }


def _same(subject: Subject, record: RunRecord, row: RunSummary) -> Hashable:
    if row.throughput_per_s is None or is_capture(record) or record.prepared is None or record.spec.train is not None:
        return record.id
    environment = record.prepared.environment
    return subject, row.recipe, row.batch, environment.versions.get("torch"), environment.device.driver


def joined_row(processes: Sequence[Process], firsts: Mapping[str, RunRecord]) -> RunSummary:
    """The row over all processes of one thing. `firsts`: of each group, what the others are set against.

    Processes whose numbers are doubted are left out where others are sound, and the row says how many.
    """
    if len(processes) == 1:
        return processes[0][1]
    ids = tuple(row.record_id for _, row in processes)
    # That of the first, for all who were measured with it: whose middle process is in which group is chance.
    group = processes[0][1].group
    broken = next((row for _, row in processes if row.failure is not None), None)
    if broken is not None:  # what works in some processes only does not work
        return msgspec.structs.replace(broken, replicate_ids=ids, group=group)
    timed = [process for process in processes if process[1].throughput_per_s is not None]
    sound = [process for process in timed if process[1].verdict.trusted] or timed
    rows = [row for _, row in sound]
    if not rows:
        return msgspec.structs.replace(processes[0][1], replicate_ids=ids)
    middle = sorted(rows, key=lambda row: row.throughput_per_s or 0.0)[len(rows) // 2]
    joined = msgspec.structs.replace(
        middle,
        numerics=farthest(row.numerics for _, row in processes),
        cold_start_s=processes[0][1].cold_start_s,
        verdict=_verdict(rows, len(timed) - len(rows), middle),
        replicate_ids=ids,
        group=group,
    )
    if len(rows) == 1:
        return msgspec.structs.replace(joined, vs_first=_versus(timed, firsts))
    interval = _interval([row.throughput_per_s or 0.0 for row in rows])
    per_s = math.sqrt(interval.low * interval.high)
    # Each process stalls for a share of its own time; the rates of processes differ for other reasons too.
    shares = [(row.delivered_per_s or 0.0) / (row.throughput_per_s or 1.0) for row in rows]
    have_stalled = 2 * sum(row.sustained_per_s is not None for row in rows) > len(rows)
    return msgspec.structs.replace(
        joined,
        throughput_per_s=per_s,
        throughput_interval=interval,
        sustained_per_s=per_s * median(shares) if have_stalled else None,
        latency_s=_latency([row.latency_s for row in rows if row.latency_s is not None]),
        vs_first=_versus(timed, firsts),
        roofline=at_step(middle.roofline, middle.items_per_step / per_s)
        if middle.roofline and middle.items_per_step
        else None,
    )


def _verdict(rows: Sequence[RunSummary], left_out: int, middle: RunSummary) -> Verdict:
    found = next((row.verdict for row in rows if not row.verdict.trusted), middle.verdict)
    # An interval over several processes is not that of one.
    notes = [each for each in found.notes if each.code != "one-process" or len(rows) == 1]
    if left_out:
        told = f"{left_out} of {len(rows) + left_out} processes left out: their numbers are doubted"
        notes.append(note("left-out", told))
    return msgspec.structs.replace(found, notes=tuple(notes))


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


def _versus(processes: Sequence[Process], firsts: Mapping[str, RunRecord]) -> VersusFirst | None:
    """The mean over all processes of what was seen in turns; its interval covers what differs between them.

    Processes whose own speed is doubted count too: what disturbed them disturbed the first as well, and a race, which
    stops by this interval, cannot choose among its replicates.
    """
    compared = [(record, row.vs_first) for record, row in processes if row.vs_first is not None]
    logs = [log for record, _ in compared if (log := log_ratio(firsts[record.group or ""], record)) is not None]
    # As a race computes it, which is looked at after each replicate: one recipe has one interval, whoever prints it.
    met = ratio_over(logs)
    if met is None:
        return next((versus for _, versus in compared if versus.low is not None), compared[0][1] if compared else None)
    doubted = all(versus.first_doubted for _, versus in compared)
    return msgspec.structs.replace(compared[0][1], ratio=met.ratio, low=met.low, high=met.high, first_doubted=doubted)
