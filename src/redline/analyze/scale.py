"""How well a workload scales over ranks, and what is in the way.

The ideal is the throughput of the fewest ranks that were measured, in proportion. Ranks that share processors are shown
and never called scaling: what they lose says nothing about the model or the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from redline.analyze.bound import Bound
from redline.analyze.ranks import STRAGGLER, late_rank, oversubscription, rank_peaks
from redline.analyze.summary import RunSummary, summarize
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import Failure, RunRecord
from redline.model.spec import Task
from redline.model.units import format_bytes, format_seconds, format_share

Mode = Literal["weak", "strong"]
FindingCode = Literal[
    "local-batch-too-small", "slow-interconnect", "straggler", "host-bound", "oversubscribed-cpu", "unexplained"
]

GOOD_EFFICIENCY = 0.9
"""Above it nothing is looked for."""
NOTED_COMMUNICATION = 0.1
"""Of the step: exposed communication above it is in the way."""
SLOW_BUS = {"cpu": 0.5e9, "cuda": 10e9, "rocm": 10e9}
"""Bytes per second between ranks: below it not even memory shared by processes, or PCIe 3.0, is reached."""


class Communication(Frozen):
    """What the ranks said to each other in a profiled step, and how fast they can."""

    total_s: float | None = None
    """Per step, on the rank that waits least for others; None where nothing was profiled."""
    exposed_s: float | None = None
    """While nothing is computed."""
    waited_s: float | None = None
    """How much longer the rank that waits most is in collectives: it waits there for the last to arrive."""
    span_s: float | None = None
    """Of the profiled step."""
    probe_s: float | None = None
    """An all-reduce of as many bytes as a step sends."""
    probe_bytes: int | None = None


class ScalePoint(Frozen):
    """One number of ranks. None means unknown."""

    model: str
    task: Task
    recipe: str
    ranks: int
    global_batch: int | None = None
    batch_per_rank: int | None = None
    """Of the rank with most."""
    item: str = "item"
    throughput_per_s: float | None = None
    ideal_per_s: float | None = None
    efficiency: float | None = None
    """Throughput over the ideal; None where ranks share processors."""
    low: float | None = None
    """The 95 % interval of the efficiency."""
    high: float | None = None
    communication_s: float | None = None
    """Per step."""
    communication_share: float | None = None
    """Exposed communication, of a step."""
    overlap: float | None = None
    """The share of the communication that computing hides."""
    waiting_share: float | None = None
    """Share of a step spent in collectives waiting for the rank that arrives last."""
    gradient_bytes: int | None = None
    bus_bytes_per_s: float | None = None
    """By an all-reduce of as many bytes as a step sends, counted as NCCL's own tests count it."""
    peak_bytes: tuple[int | None, ...] = ()
    """For each rank: reserved on a GPU, resident on a CPU."""
    straggler: int | None = None
    """A rank that is clearly slower than the others."""
    straggler_why: Note | None = None
    trust: tuple[str, ...] = ()
    """The labels of its verdict: `valid`, or why it is to be doubted."""
    threads: int | None = None
    """For each rank, on a CPU."""
    oversubscribed: bool = False
    """More threads than processors: this is not scaling."""
    notes: tuple[Note, ...] = ()
    failure: Failure | None = None
    record_id: str = ""


class ScaleFinding(Frozen):
    code: FindingCode
    model: str
    ranks: int
    batch_per_rank: int | None
    evidence: str
    next: str


class ScaleRun(Frozen):
    """What was measured with one number of ranks."""

    record: RunRecord
    communication: Communication = Communication()


def points_of(runs: Sequence[ScaleRun], mode: Mode) -> list[ScalePoint]:
    rows = summarize([run.record for run in runs])
    bare = [_point(run, row) for run, row in zip(runs, rows, strict=True)]
    firsts: dict[tuple[str, int | None], tuple[ScalePoint, RunSummary]] = {}
    for point, row in sorted(zip(bare, rows, strict=True), key=lambda pair: pair[0].ranks):
        if point.throughput_per_s and not point.oversubscribed:
            firsts.setdefault(_series(point, mode), (point, row))
    return [_scaled(point, row, firsts.get(_series(point, mode))) for point, row in zip(bare, rows, strict=True)]


def _series(point: ScalePoint, mode: Mode) -> tuple[str, int | None]:
    """Points of one series are set against each other: the same batch per rank, or the same global batch."""
    return point.model, point.batch_per_rank if mode == "weak" else point.global_batch


def _point(run: ScaleRun, row: RunSummary) -> ScalePoint:
    record, spec = run.record, run.record.spec
    prepared, told = record.prepared, run.communication
    late = late_rank(record)
    shares = [rank.items_per_step for rank in prepared.ranks] if prepared else []
    batch = row.batch if row.batch is not None else spec.workload.batch
    point = ScalePoint(
        model=row.model,
        task=row.task,
        recipe=row.recipe,
        ranks=spec.ranks,
        global_batch=batch,
        batch_per_rank=-(-batch // spec.ranks) if batch else max(shares, default=None),
        item=row.item or "item",
        throughput_per_s=row.throughput_per_s,
        gradient_bytes=prepared.gradient_bytes if prepared else None,
        bus_bytes_per_s=_bus(told, spec.ranks),
        peak_bytes=rank_peaks(record.blocks),
        straggler=late.rank if late is not None else None,
        straggler_why=late.why if late is not None else None,
        trust=row.verdict.labels,
        notes=tuple(each for each in prepared.workload.notes if each.code == "uneven-batch") if prepared else (),
        failure=row.failure,
        record_id=row.record_id,
    )
    if told.total_s is not None and told.span_s:
        exposed = told.exposed_s or 0.0
        hidden = 1 - exposed / told.total_s if told.total_s > 0 else None
        point = msgspec.structs.replace(
            point,
            communication_s=told.total_s,
            communication_share=exposed / told.span_s,
            overlap=hidden,
            waiting_share=None if told.waited_s is None else told.waited_s / told.span_s,
        )
    return _with_processors(point, record)


def _with_processors(point: ScalePoint, record: RunRecord) -> ScalePoint:
    """Marked where the ranks on one machine have more threads than it has processors."""
    environment = record.prepared.environment if record.prepared else None
    if environment is None or environment.device.kind != "cpu":
        return point
    crowded = oversubscription(record)
    notes = (*point.notes, crowded) if crowded is not None else point.notes
    return msgspec.structs.replace(point, threads=environment.threads, oversubscribed=crowded is not None, notes=notes)


def _scaled(point: ScalePoint, row: RunSummary, first: tuple[ScalePoint, RunSummary] | None) -> ScalePoint:
    reached = point.throughput_per_s
    if first is None or not reached:
        return point
    base, base_row = first
    assert base.throughput_per_s
    times = point.ranks / base.ranks
    ideal = base.throughput_per_s * times
    point = msgspec.structs.replace(point, ideal_per_s=ideal)
    if point.oversubscribed:
        return point
    point = msgspec.structs.replace(point, efficiency=reached / ideal)
    mine, its = row.throughput_interval, base_row.throughput_interval
    if point.ranks == base.ranks or mine is None or its is None:
        return point
    return msgspec.structs.replace(point, low=mine.low / (its.high * times), high=mine.high / (its.low * times))


def _bus(told: Communication, ranks: int) -> float | None:
    if not told.probe_s or not told.probe_bytes or ranks < 2:
        return None
    return told.probe_bytes / told.probe_s * 2 * (ranks - 1) / ranks


def diagnose_scale(points: Sequence[ScalePoint], bounds: Sequence[Bound], kinds: Sequence[str]) -> list[ScaleFinding]:
    """What keeps each point from its ideal; `bounds` and `kinds` of devices are those of the points."""
    found = []
    for point, bound, kind in zip(points, bounds, kinds, strict=True):
        found += _findings(point, bound, kind)
    return found


def _findings(point: ScalePoint, bound: Bound, kind: str) -> list[ScaleFinding]:
    def finding(code: FindingCode, evidence: str, todo: str) -> ScaleFinding:
        return ScaleFinding(
            code=code,
            model=point.model,
            ranks=point.ranks,
            batch_per_rank=point.batch_per_rank,
            evidence=evidence,
            next=todo,
        )

    if point.oversubscribed:
        todo = "ask for fewer ranks or threads, or measure on a machine with more processors"
        return [finding("oversubscribed-cpu", str(point.notes[-1]), todo)]
    is_slow = point.efficiency is not None and point.ranks > 1 and point.efficiency < GOOD_EFFICIENCY
    found = []
    if point.straggler is not None:
        evidence = f"rank {point.straggler} takes over {STRAGGLER - 1:.0%} longer than the others in most blocks"
        evidence += f": {point.straggler_why}" if point.straggler_why is not None else ""
        todo = "look at that rank's device and machine: clocks, temperature, other processes, its part of the data"
        found.append(finding("straggler", evidence, todo))
    if not is_slow:
        return found
    waiting = point.waiting_share
    if point.straggler is None and waiting is not None and waiting > NOTED_COMMUNICATION:
        evidence = f"ranks wait for each other {format_share(waiting)} of a step, and not always for the same one"
        todo = "redline profile with --ranks says who is late where; on shared machines, measure again with --effort strict"
        found.append(finding("straggler", evidence, todo))
    share = point.communication_share
    if share is not None and share > NOTED_COMMUNICATION:
        found.append(_about_communication(point, share, kind, finding))
    if bound.label == "host":
        todo = "-r compile or -r compile:reduce-overhead: the GPUs wait for Python, and more ranks only wait more"
        found.append(finding("host-bound", str(bound.evidence), todo))
    if not found:
        evidence = f"efficiency {format_share(point.efficiency)}, and communication does not explain it"
        todo = "redline profile with --ranks shows each rank; on shared machines, measure again with --effort strict"
        found.append(finding("unexplained", evidence, todo))
    return found


def _about_communication(
    point: ScalePoint, share: float, kind: str, finding: Callable[[FindingCode, str, str], ScaleFinding]
) -> ScaleFinding:
    sent = f"{format_bytes(point.gradient_bytes)} of gradients" if point.gradient_bytes else "what the ranks exchange"
    exposed = f"{format_share(share)} of a step is communication that nothing hides ({sent}"
    bus = point.bus_bytes_per_s
    exposed += f", {format_seconds(point.communication_s)} per step)" if point.communication_s else ")"
    if bus is not None and bus < SLOW_BUS[kind]:
        evidence = f"{exposed}; an all-reduce moves only {format_bytes(bus)}/s between ranks"
        link = "(NVLink, InfiniBand, NCCL_DEBUG=INFO)" if kind != "cpu" else "(ranks on CPUs talk over TCP)"
        todo = f"check the link {link}, or send less: larger buckets, accumulation, a larger batch per rank"
        return finding("slow-interconnect", evidence, todo)
    enough = round((point.batch_per_rank or 1) * share / (1 - share) * (1 - NOTED_COMMUNICATION) / NOTED_COMMUNICATION)
    speed = f"; the link does {format_bytes(bus)}/s" if bus else ""
    evidence = (
        f"{exposed}{speed}, and a batch of {point.batch_per_rank} per rank leaves too little to compute meanwhile"
    )
    todo = f"--batch-per-rank {max(enough, 2 * (point.batch_per_rank or 1))}: computing grows with it, communication does not"
    return finding("local-batch-too-small", evidence, todo)
