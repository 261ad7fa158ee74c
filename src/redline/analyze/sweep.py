"""The summary of a sweep: its cells, their status, how long the rest may take, and which generations keep their targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from redline.analyze.summary import RunSummary
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import Failure, RunRecord
from redline.model.spec import RunSpec, Task

SweepStatus = Literal["done", "failed", "pending"]


class SweepCell(Frozen):
    """One combination of the grid."""

    model: str
    task: Task
    recipe: str
    batch: int | None
    """None: the model's own default."""
    threads: int | None
    status: SweepStatus
    prompt: int | None = None
    new_tokens: int | None = None
    """For generation."""
    replicate: int = 1
    """Which of the processes that measure this combination."""
    record_id: str | None = None
    failure: Failure | None = None


class LeftOut(Frozen):
    """An impossible combination, such as training with a switch for inference, where both occur in the grid."""

    model: str
    task: Task
    recipe: str
    batch: int | None
    reason: Note


class IdleExclusion(Frozen):
    """An exclusion that matches nothing in the grid: left over from another grid, or misspelt."""

    exclusion: dict[str, list[Any]]
    reason: Note

    def __str__(self) -> str:
        fields = (f"{axis} {', '.join(map(str, values))}" for axis, values in self.exclusion.items())
        return f"the exclusion of {'; '.join(fields)}: {self.reason}"


class SweepSummary(Frozen):
    """The whole of a sweep."""

    name: str
    planned: int
    done: int
    failed: int
    cells: tuple[SweepCell, ...]
    left_out: tuple[LeftOut, ...] = ()
    idle_exclusions: tuple[IdleExclusion, ...] = ()

    @property
    def pending(self) -> int:
        return self.planned - self.done - self.failed


class Estimate(Frozen):
    """How long cells may take, from what the history knows of their models."""

    seconds: float
    known: int
    """Cells that the seconds are about."""
    unknown: int
    unknown_models: tuple[str, ...] = ()


def cell_of(
    spec: RunSpec,
    status: SweepStatus,
    record_id: str | None = None,
    failure: Failure | None = None,
    replicate: int = 1,
) -> SweepCell:
    return SweepCell(
        model=spec.workload.model,
        task=spec.workload.task,
        recipe=str(spec.recipe),
        batch=spec.workload.batch,
        threads=spec.threads,
        prompt=spec.workload.prompt,
        new_tokens=spec.workload.new_tokens,
        replicate=replicate,
        status=status,
        record_id=record_id,
        failure=failure,
    )


def sweep_summary(
    name: str,
    cells: Sequence[SweepCell],
    left_out: Sequence[LeftOut] = (),
    idle_exclusions: Sequence[IdleExclusion] = (),
) -> SweepSummary:
    return SweepSummary(
        name=name,
        planned=len(cells),
        done=sum(cell.status == "done" for cell in cells),
        failed=sum(cell.status == "failed" for cell in cells),
        cells=tuple(cells),
        left_out=tuple(left_out),
        idle_exclusions=tuple(idle_exclusions),
    )


def elapsed_s(record: RunRecord) -> float | None:
    """Seconds from opening a worker to the last timed block. None for records measured interleaved with others."""
    if record.group is not None or not record.blocks:
        return None
    last = record.blocks[-1]
    elapsed = last.started_at + last.wall_s - record.created_at
    return elapsed if elapsed > 0 else None  # a simulated bench has a clock of its own


class TokenTargets(Frozen):
    ttft_s: float | None = None
    """For the median time to the first token."""
    tpot_s: float | None = None
    """For p95 of the time per token after the first; with too few tokens for p95, for the median."""


class UnderTargets(Frozen):
    """The fastest row that keeps the targets."""

    targets: TokenTargets
    kept: tuple[str, ...]
    """Ids of the records that keep them."""
    record_id: str | None
    """None: no row does."""
    recipe: str | None = None
    batch: int | None = None
    prompt: int | None = None
    new_tokens: int | None = None
    decode_tokens_per_s: float | None = None


def under_targets(rows: Sequence[RunSummary], targets: TokenTargets) -> UnderTargets:
    kept = [row for row in rows if _keeps(row, targets)]
    best = max(kept, key=lambda row: row.decode_tokens_per_s or row.throughput_per_s or 0.0, default=None)
    if best is None:
        return UnderTargets(targets=targets, kept=(), record_id=None)
    return UnderTargets(
        targets=targets,
        kept=tuple(row.record_id for row in kept),
        record_id=best.record_id,
        recipe=best.recipe,
        batch=best.batch,
        prompt=best.conditions.prompt,
        new_tokens=best.conditions.new_tokens,
        decode_tokens_per_s=best.decode_tokens_per_s or best.throughput_per_s,
    )


def _keeps(row: RunSummary, targets: TokenTargets) -> bool:
    if row.ttft_s is None or (row.numerics is not None and row.numerics.is_wrong):
        return False
    first_kept = targets.ttft_s is None or row.ttft_s <= targets.ttft_s
    if row.tpot_s is None or targets.tpot_s is None:  # a single token, which no other follows
        return first_kept
    return first_kept and (row.tpot_s.p50 if row.tpot_s.p95 is None else row.tpot_s.p95) <= targets.tpot_s
