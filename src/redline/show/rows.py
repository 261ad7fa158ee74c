"""Records as rows of metrics: what every page, table, CSV file and document of a report is made of."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from redline.analyze.replicates import Line
from redline.analyze.summary import RunSummary
from redline.analyze.train import TrainingSummary
from redline.analyze.trust import error_text
from redline.model import figures
from redline.model.identity import Subject, is_capture
from redline.model.metrics import Fact, Figure, Metric, Row
from redline.model.note import Note, note
from redline.model.record import RunRecord


def line_row(line: Line) -> Row:
    """What is known of one recipe at one batch, over all processes that measured it."""
    return row_of(line.row, line.subject, line.record, measured_at=line.measured_at, processes=len(line.rates))


def row_of(
    row: RunSummary, subject: Subject, record: RunRecord, *, measured_at: float | None = None, processes: int = 1
) -> Row:
    """A record's row: what identifies it, and its figures."""
    at = datetime.fromtimestamp(record.created_at if measured_at is None else measured_at, UTC)
    facts: dict[str, Fact] = {
        "recipe": row.recipe,
        "model": row.model,
        "task": row.task,
        "batch": row.batch,
        "setting": subject.setting or None,
        "device": subject.device,
        "numerics": error_text(row.numerics, with_steps=True),
        "bound": row.bound.label,
        "verdict": verdict_of(row),
        "compared_with": row.vs_first.recipe if row.vs_first else None,
        "kind": "profile" if is_capture(record) else "run",
        "processes": processes,
        "compile_cache": row.cold_start_s.compile_cache if row.cold_start_s else None,
        "measured_at": at.strftime("%Y-%m-%d %H:%M"),
    }
    return Row(
        facts=facts,
        metrics=tuple(metric for metric in _metrics(row) if metric.value is not None),
        notes=row.verdict.reasons,
        failure=f"{row.failure.kind} at {row.failure.stage}: {row.failure.told}" if row.failure is not None else "",
        record_id=row.record_id,
    )


def verdict_of(row: RunSummary) -> str:
    """Whether to believe a row and its numerics, in the words of its labels."""
    if row.failure is not None:
        return "failed"
    is_wrong = row.numerics is not None and row.numerics.is_wrong
    return ", ".join([*row.verdict.labels, *(["wrong numerics"] if is_wrong else [])])


def _metrics(row: RunSummary) -> Iterator[Metric]:
    speed, latency, memory, versus = row.throughput_interval, row.latency_s, row.memory, row.vs_first
    phases, cold = row.phases_s or {}, row.cold_start_s
    doubt = doubt_of(row)
    yield figures.THROUGHPUT(
        row.throughput_per_s,
        speed.low if speed else None,
        speed.high if speed else None,
        item=row.item,
        doubt=doubt if row.throughput_per_s is not None else None,
    )
    yield figures.SUSTAINED(row.sustained_per_s, item=row.item)
    if versus is not None:
        yield figures.SPEEDUP(versus.ratio, versus.low, versus.high, doubt=doubt)
    if latency is not None:
        yield figures.LATENCY_P50(latency.p50, latency.low, latency.high)
        yield figures.LATENCY_P95(latency.p95)
        yield figures.LATENCY_P99(latency.p99)
        yield figures.LATENCY_MEAN(latency.mean)
    if memory is not None:
        reserved = memory.peak_reserved_bytes
        yield figures.MEMORY(reserved if reserved is not None else memory.peak_rss_bytes)
    if row.numerics is not None and row.numerics.is_compared:
        yield figures.REL_ERROR(row.numerics.rel_l2)
    if row.roofline is not None:
        yield figures.OF_PEAK(row.roofline.efficiency)
        yield figures.HEADROOM(row.roofline.headroom, doubt=row.roofline.error)
    yield figures.TTFT(row.ttft_s)
    if row.tpot_s is not None:
        yield figures.TPOT(row.tpot_s.p50)
        yield figures.TPOT_P95(row.tpot_s.p95)
    yield figures.PREFILL_RATE(row.prefill_tokens_per_s)
    yield figures.DECODE_RATE(row.decode_tokens_per_s)
    yield figures.BANDWIDTH_SHARE(row.bandwidth_share)
    yield figures.ENERGY(row.energy_per_item_j)
    yield figures.POWER(row.power_w)
    yield figures.UTILISATION(row.utilisation)
    yield figures.COST(row.cost_per_million)
    yield figures.FORWARD(phases.get("forward"))
    yield figures.BACKWARD(phases.get("backward"))
    yield figures.OPTIMIZER(phases.get("optimizer"))
    if cold is not None:
        compiling = cold.compile_s or 0.0
        yield figures.START(cold.start_s)
        yield figures.BUILD(cold.build_s)
        yield figures.FIRST_CALL(None if cold.first_call_s is None else max(0.0, cold.first_call_s - compiling))
        yield figures.COMPILE(cold.compile_s)
    if (training := row.training) is not None:
        yield figures.EPOCH_TIME(training.epoch_s)
        yield figures.ACCURACY(training.accuracy)
        yield figures.TRAIN_LOSS(training.train_loss)
        yield figures.VAL_LOSS(training.val_loss)
        yield figures.DATA_WAIT(training.data_wait_share)
    if row.load is not None:
        yield figures.SUSTAINABLE_RATE(row.load.sustainable_rate)


def doubt_of(row: RunSummary) -> Note | None:
    """Why the speed of a row is not to be relied on."""
    return (
        None if row.verdict.trusted else next(iter(row.verdict.reasons), note("noisy", ", ".join(row.verdict.labels)))
    )


EPOCH_SECONDS = Figure(name="seconds", unit="s", better="lower", doc="The whole epoch, validation included.")


def epoch_rows(training: TrainingSummary) -> Iterator[Row]:
    """One row for each epoch."""
    for epoch in training.epochs:
        metrics = (
            EPOCH_SECONDS(epoch.seconds),
            figures.THROUGHPUT(epoch.samples_per_s, item=training.item),
            figures.TRAIN_LOSS(epoch.train_loss),
            figures.VAL_LOSS(epoch.val_loss),
            figures.ACCURACY(epoch.val_accuracy),
            figures.DATA_WAIT(epoch.data_wait_share),
            figures.MEMORY(epoch.peak_bytes),
            figures.UTILISATION(epoch.utilisation),
        )
        phases = tuple(Figure(name=f"{name}_time", unit="s")(seconds) for name, seconds in epoch.phases_s.items())
        yield Row(
            facts={
                "recipe": training.recipe,
                "model": training.model,
                "batch": training.batch,
                "data": training.data,
                "epoch": epoch.epoch,
                "is_cut": epoch.is_cut,
            },
            metrics=tuple(metric for metric in (*metrics, *phases) if metric.value is not None),
            record_id=training.record_id,
        )
