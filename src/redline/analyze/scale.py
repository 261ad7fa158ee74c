"""This module says how well a workload scales over ranks, and what is in the way.

The ideal is the throughput of the fewest ranks that were measured, in proportion. Ranks that share processors are shown
and never called scaling: what they lose says nothing about the model or the network.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from redline.analyze.bound import Bound, bound
from redline.analyze.finding import Finding, Removal, Rule, findings_of, words_of
from redline.analyze.measurement import Measurement, measurements
from redline.analyze.ranks import LateRank, late_rank, oversubscription, own_seconds, rank_peaks
from redline.analyze.rows import metric_of
from redline.model.fields import Frozen
from redline.model.metrics import MEMORY, THROUGHPUT, Fact, Figure, Metric, Row
from redline.model.record import RunRecord
from redline.model.units import format_seconds, format_share

Mode = Literal["weak", "strong"]

IDEAL = Figure(name="ideal", unit="{item}/s", header="ideal", doc="Of the fewest ranks measured, in proportion.")
EFFICIENCY = Figure(name="efficiency", unit="share", better="higher", doc="Throughput over the ideal.")
COMMUNICATION = Figure(name="communication", unit="s", better="lower", doc="Time in collectives per step.")
EXPOSED = Figure(
    name="exposed", unit="share", better="lower", doc="Of a step: communication while nothing is computed."
)
HIDDEN = Figure(name="hidden", unit="share", better="higher", doc="Of the communication: what computing hides.")
WAITING = Figure(
    name="waiting", unit="share", better="lower", doc="Of a step: time in collectives until the last rank arrives."
)
GRADIENTS = Figure(name="gradients", unit="B", doc="What each rank sends per training step.")
BUS = Figure(
    name="bus",
    unit="B/s",
    better="higher",
    doc="By an all-reduce of as many bytes as a step sends, counted as NCCL's own tests count it.",
)


class Communication(Frozen):
    """This holds what the ranks said to each other in a profiled step, and how fast they can. None means unknown."""

    total_s: float | None = None
    """It is the time per step on the rank that waits least for others."""
    exposed_s: float | None = None
    """The part of it in which nothing is computed."""
    waited_s: float | None = None
    """The rank that waits most is so much longer in collectives: it waits there for the last to arrive."""
    span_s: float | None = None
    """This is the time of the profiled step."""
    probe_s: float | None = None
    """An all-reduce of as many bytes as a step sends takes so long."""
    probe_bytes: int | None = None


class ScaleRun(Frozen):
    """This holds what was measured with one number of ranks."""

    record: RunRecord
    communication: Communication = Communication()


@dataclass(frozen=True)
class ScalePoint:
    """A point is one number of ranks: its row, and the facts that the rules look at."""

    run: ScaleRun
    row: Row
    bound: Bound
    late: LateRank | None
    step_s: float
    """0 where nothing was timed."""

    @property
    def whole_s(self) -> float:
        return self.step_s

    def words(self, gone: Removal) -> Mapping[str, str]:
        return words_of(gone) | {metric.name: str(metric) for metric in self.row.metrics}

    @property
    def lost_s(self) -> float:
        """Returns how much longer a step takes than the ideal says, or 0 where there is no ideal."""
        ideal, reached = self.row.value("ideal"), self.row.value("throughput")
        return max(self.step_s * (1 - reached / ideal), 0.0) if ideal else 0.0

    @property
    def findings(self) -> list[Finding]:
        """Nothing is looked for where ranks share processors: a note of the row says so."""
        if self.row["is_oversubscribed"]:
            return []
        return findings_of(RULES, self) or findings_of((UNEXPLAINED,), self)


def points_of(runs: Sequence[ScaleRun], mode: Mode) -> list[ScalePoint]:
    """Returns each run, which is compared with the fewest ranks with the same batch per rank (weak) or the same global batch (strong)."""
    series = "batch_per_rank" if mode == "weak" else "global_batch"
    rows = [
        (run, row, _facts(run.record, row))
        for run, row in zip(runs, measurements([run.record for run in runs]), strict=True)
    ]
    firsts: dict[tuple[Fact, Fact], tuple[int, Metric]] = {}
    for run, row, facts in sorted(rows, key=lambda each: each[0].record.spec.ranks):
        speed = metric_of(row, "throughput")
        if speed is not None and speed.value and not facts["is_oversubscribed"]:
            firsts.setdefault((row.model, facts[series]), (run.record.spec.ranks, speed))
    return [_point(run, row, facts, firsts.get((row.model, facts[series]))) for run, row, facts in rows]


def _facts(record: RunRecord, row: Measurement) -> dict[str, Fact]:
    ranks, prepared = record.spec.ranks, record.prepared
    batch = row.batch if row.batch is not None else record.spec.workload.batch
    shares = [rank.items_per_step for rank in prepared.ranks] if prepared else []
    on_cpu = prepared is not None and prepared.environment.device.kind == "cpu"
    return {
        "ranks": ranks,
        "model": row.model,
        "task": row.task,
        "recipe": row.recipe,
        "global_batch": batch,
        "batch_per_rank": -(-batch // ranks) if batch else max(shares, default=None),
        "threads": prepared.environment.threads if prepared is not None and on_cpu else None,
        "trust": ", ".join(row.verdict.labels),
        "is_oversubscribed": oversubscription(record) is not None,
    }


def _point(run: ScaleRun, row: Measurement, facts: dict[str, Fact], first: tuple[int, Metric] | None) -> ScalePoint:
    record, speed, late, prepared = run.record, metric_of(row, "throughput"), late_rank(run.record), run.record.prepared
    metrics = [speed] if speed is not None else []
    if first is not None and speed is not None and speed.value:
        metrics += _against(first, speed, record.spec.ranks, is_scaling=not facts["is_oversubscribed"], item=row.item)
    metrics += _communication(run.communication, record.spec.ranks)
    if prepared is not None and prepared.gradient_bytes:
        metrics.append(GRADIENTS(prepared.gradient_bytes))
    peaks = [peak for peak in rank_peaks(record.blocks) if peak is not None]
    metrics += [MEMORY(max(peaks))] if peaks else []
    notes = [each for each in prepared.workload.notes if each.code == "uneven-batch"] if prepared else []
    notes += [crowded] if (crowded := oversubscription(record)) is not None else []
    return ScalePoint(
        run=run,
        row=Row(
            facts={**facts, "straggler": late.rank if late is not None else None},
            metrics=tuple(metrics),
            notes=tuple(notes),
            failure=row.failure.told if row.failure is not None else "",
            record_id=record.id,
        ),
        bound=bound(record),
        late=late,
        step_s=(row.items_per_step or 1) / speed.value if speed is not None and speed.value else 0.0,
    )


def _communication(known: Communication, ranks: int) -> Iterator[Metric]:
    if known.total_s is not None and known.span_s:
        exposed_s = known.exposed_s or 0.0
        yield COMMUNICATION(known.total_s)
        yield EXPOSED(exposed_s / known.span_s)
        if known.total_s > 0:
            yield HIDDEN(1 - exposed_s / known.total_s)
        if known.waited_s is not None:
            yield WAITING(known.waited_s / known.span_s)
    if known.probe_s and known.probe_bytes and ranks > 1:
        yield BUS(known.probe_bytes / known.probe_s * 2 * (ranks - 1) / ranks)


def _against(
    first: tuple[int, Metric], speed: Metric, ranks: int, *, is_scaling: bool, item: str | None
) -> Iterator[Metric]:
    """Yields the ideal, and how much of it is reached."""
    base_ranks, base = first
    assert base.value
    assert speed.value
    times = ranks / base_ranks
    yield IDEAL(base.value * times, item=item)
    if is_scaling:
        is_apart = ranks != base_ranks and speed.low and speed.high and base.low and base.high
        low = speed.low / (base.high * times) if is_apart and speed.low and base.high else None
        high = speed.high / (base.low * times) if is_apart and speed.high and base.low else None
        yield EFFICIENCY(speed.value / (base.value * times), low, high)


def rank_rows(record: RunRecord) -> Iterator[Row]:
    """Each rank of a run: its share of the batch, its own speed, and what it does by itself in each phase."""
    prepared, peaks = record.prepared, rank_peaks(record.blocks)
    for info in prepared.ranks if prepared is not None else ():
        blocks = [block.ranks[info.rank] for block in record.blocks if block.ranks]
        samples = [seconds for block in blocks for seconds in block.samples]
        phases = [own_seconds(block) for block in blocks]
        own = [
            Figure(name=f"own_{name}", unit="s", better="lower")(median(each[name] for each in phases if name in each))
            for name in dict.fromkeys(name for each in phases for name in each)
        ]
        speed = info.items_per_step / median(samples) if samples else None
        item = prepared.workload.item if prepared is not None else None
        yield Row(
            facts={"ranks": record.spec.ranks, "rank": info.rank, "host": info.host, "items": info.items_per_step},
            metrics=(THROUGHPUT(speed, item=item), *own, *([MEMORY(peaks[info.rank])] if peaks else [])),
        )


# What is in the way


def _lost(point: ScalePoint) -> Removal:
    """Returns all that is missing to the ideal."""
    return Removal(saves_s=point.lost_s, seconds=point.lost_s)


def _exposed(point: ScalePoint) -> Removal:
    seconds = point.row.value("exposed") * point.step_s
    return Removal(saves_s=seconds, seconds=seconds)


def _says_exposed(point: ScalePoint, gone: Removal) -> str:
    row = point.row
    sent = f"{row['gradients']} of gradients" if "gradients" in row else "what the ranks exchange"
    speed = f"; an all-reduce of as many bytes moves {row['bus']} between ranks" if "bus" in row else ""
    return f"{row['exposed']} of a step is communication that nothing hides ({sent}, {row['communication']} per step){speed}"


def _larger_batch(point: ScalePoint, gone: Removal) -> str:
    """Says with which batch communication is worth no further word: what is computed grows with it, communication
    does not."""
    share, most, batch = point.row.value("exposed"), WORTH_SAYING, int(point.row.facts["batch_per_rank"] or 1)
    enough = round(batch * share / (1 - share) * (1 - most) / most) if share < 1 else 2 * batch
    return (
        f"--batch-per-rank {max(enough, 2 * batch)}: computing grows with it, communication does not; or send less often (larger buckets, "
        "accumulation), and check the link where it is slower than it should be (NVLink, InfiniBand, NCCL_DEBUG=INFO; ranks on CPUs talk over TCP)"
    )


def _late(point: ScalePoint) -> Removal | None:
    if point.late is not None:
        return Removal(saves_s=point.late.seconds, seconds=point.late.seconds)
    seconds = point.row.value("waiting") * point.step_s
    return Removal(saves_s=seconds, seconds=seconds)


def _says_late(point: ScalePoint, gone: Removal) -> str:
    late = point.late
    if late is None:
        return f"ranks wait for each other {format_share(point.row.value('waiting'))} of a step, and not always for the same one"
    longer = f"takes {format_seconds(late.seconds)} a step longer than the others, most of it in {late.phase}"
    return f"rank {late.rank} {longer}: {late.why}"


def _about_late(point: ScalePoint, gone: Removal) -> str:
    if point.late is None:
        return "redline profile with --ranks says who is late where; on shared machines, measure again with --effort strict"
    return "look at that rank's device and machine: clocks, temperature, other processes, its part of the data"


WORTH_SAYING = 0.1
"""The least share of a step that is worth a finding: efficiencies above 90 % are good."""

RULES: tuple[Rule[ScalePoint], ...] = (
    Rule(code="straggler", removes=_late, says=_says_late, change=_about_late, least_share=WORTH_SAYING),
    Rule(
        code="communication-bound",
        removes=_exposed,
        says=_says_exposed,
        change=_larger_batch,
        least_share=WORTH_SAYING,
    ),
    Rule(
        code="host-bound",
        removes=lambda point: _lost(point) if point.bound.label == "host" else None,
        says=lambda point, gone: str(point.bound.evidence),
        change="-r compile or -r compile:reduce-overhead: the GPUs wait for Python, and more ranks only wait more",
        least_share=WORTH_SAYING,
    ),
)
UNEXPLAINED: Rule[ScalePoint] = Rule(
    code="unexplained",
    removes=_lost,
    says="efficiency {efficiency}, and communication does not explain it",
    change="redline profile with --ranks shows each rank; on shared machines, measure again with --effort strict",
    least_share=WORTH_SAYING,
)
