"""The summary of a sweep: its cells, their status, and how long the rest may take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from redline.note import Note
from redline.record import Failure, RunRecord
from redline.spec import Frozen, RunSpec, Task

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
    """Of generation."""
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
