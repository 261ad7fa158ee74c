"""What is known of a grid: its cells and how they stand, how long the rest may take, and what each run of a study gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from redline.analyze.profile import Profile
from redline.analyze.train import TrainingSummary, training_of
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import Failure, RunRecord
from redline.model.spec import Task
from redline.model.units import format_share

CellStatus = Literal["done", "failed", "pending"]


class GridCell(Frozen):
    """One combination of the grid."""

    model: str
    task: Task
    recipe: str
    batch: int | None
    """None: the model's own default."""
    threads: int | None
    status: CellStatus
    run: str = ""
    """The name of the [[run]] it belongs to, in a file whose runs have names."""
    axes: dict[str, Any] = {}
    """Its values of the settings that are not the same in all cells, apart from model, task and recipe."""
    prompt: int | None = None
    new_tokens: int | None = None
    """For generation."""
    replicate: int = 1
    """Which of the processes that measure this combination."""
    record_id: str | None = None
    failure: Failure | None = None


class LeftOut(Frozen):
    """What is not measured: an impossible combination, such as training with a switch for inference, or a missing device."""

    model: str
    task: Task
    recipe: str
    batch: int | None
    reason: Note
    run: str = ""


class IdleExclusion(Frozen):
    """An exclusion that matches nothing in the grid: left over from another grid, or misspelt."""

    exclusion: dict[str, list[Any]]
    reason: Note

    def __str__(self) -> str:
        fields = (f"{axis} {', '.join(map(str, values))}" for axis, values in self.exclusion.items())
        return f"the exclusion of {'; '.join(fields)}: {self.reason}"


class GridSummary(Frozen):
    """The whole of a grid."""

    name: str
    planned: int
    done: int
    failed: int
    cells: tuple[GridCell, ...]
    left_out: tuple[LeftOut, ...] = ()
    idle_exclusions: tuple[IdleExclusion, ...] = ()

    @property
    def pending(self) -> int:
        return self.planned - self.done - self.failed

    @property
    def sweeps(self) -> bool:
        """Whether more than models and recipes differ: batches, threads, devices, named runs."""
        return any(cell.axes or cell.run for cell in self.cells)


def grid_summary(
    name: str,
    cells: Sequence[GridCell],
    left_out: Sequence[LeftOut] = (),
    idle_exclusions: Sequence[IdleExclusion] = (),
) -> GridSummary:
    return GridSummary(
        name=name,
        planned=len(cells),
        done=sum(cell.status == "done" for cell in cells),
        failed=sum(cell.status == "failed" for cell in cells),
        cells=tuple(cells),
        left_out=tuple(left_out),
        idle_exclusions=tuple(idle_exclusions),
    )


class Estimate(Frozen):
    """How long cells may take, from what the history knows of their models."""

    seconds: float
    known: int
    """Cells that the seconds are about."""
    unknown: int
    unknown_models: tuple[str, ...] = ()


def seconds_each(together: Sequence[RunRecord]) -> float | None:
    """Returns the seconds that each of the records measured together took, from opening the first worker to the last block."""
    blocks = [record.blocks[-1] for record in together if record.blocks]
    if not blocks:
        return None
    last = max(block.started_at + block.wall_s for block in blocks)
    seconds = (last - min(record.created_at for record in together)) / len(together)
    return seconds if seconds > 0 else None  # a simulated bench has a clock of its own


class Rung(Frozen):
    """What one training of a study gains over those before it, and what limits it. Speeds that are unknown gain nothing."""

    record_id: str
    run: str
    gain_over_last: float | None = None
    """In samples per second, over the training before that ran."""
    gain_over_first: float | None = None
    limit: str = ""
    """What is in the way, in one sentence."""
    top_operator: str | None = None
    """The one that takes most of a step's time, where the training was profiled."""


def rungs_of(trainings: Sequence[tuple[str, RunRecord]], profiles: Mapping[str, Profile]) -> list[Rung]:
    """Each training, by the name of its run, against the first that ran and against the one that ran before it."""
    rungs: list[Rung] = []
    first = last = None
    for name, record in trainings:
        row, profile = training_of(record), profiles.get(record.id)
        cores = record.prepared.environment.logical_cores if record.prepared is not None else None
        rung = Rung(
            record_id=record.id,
            run=name,
            limit=limit_of(row, profile, cores),
            top_operator=top_operator(profile) if profile is not None else None,
        )
        if rate := row.samples_per_s:
            rung = msgspec.structs.replace(
                rung, gain_over_last=rate / last if last else None, gain_over_first=rate / first if first else None
            )
            first, last = first or rate, rate
        rungs.append(rung)
    return rungs


def top_operator(profile: Profile) -> str | None:
    """By the time of the device where there is one, else of the host; without those it called.

    A replayed graph is one launch: of its kernels the class that takes most is named.
    """
    times = {row.name: row.device_self_s if profile.has_device else row.cpu_self_s for row in profile.operators}
    best = max(times, key=lambda name: times[name], default=None)
    if best is None or times[best] <= 0:
        return None
    replayed = any(row.name == best and row.source == "graph" for row in profile.operators)
    most = max(profile.classes, key=lambda row: row.total_s, default=None) if replayed else None
    return best.removeprefix("aten::") if most is None else f"{most.name} kernels of the graph"


LIMITS: dict[str, str] = {
    "host": "the host, which issues the work, limits it",
    "launch": "the gaps between kernels limit it",
    "compute": "arithmetic limits it",
    "memory": "memory bandwidth limits it",
    "data": "copies to the device limit it",
    "communication": "communication limits it",
}


def limit_of(row: TrainingSummary, profile: Profile | None, cores: int | None) -> str:
    """What is in the way of a training, in one sentence."""
    if row.failure is not None or not row.epochs:
        return ""
    if row.bound.label == "data":
        return f"the loader limits it: {row.bound.evidence}"
    bound = profile.bound if profile is not None else row.bound
    if bound.label not in ("unknown", "device") and row.device != "cpu":
        return f"{LIMITS[bound.label]}: {bound.evidence}"
    longest = max(row.phase_shares, key=lambda name: row.phase_shares[name], default=None)
    if longest is None:
        return "its phases were not timed"
    operator = top_operator(profile) if profile is not None else None
    most = f", most of it {operator}" if operator else ""
    whose = "the device limits it: " if bound.label == "device" and row.device != "cpu" else ""
    phase = "recorded step" if longest == "step" else longest
    return f"{whose}the {phase} takes {format_share(row.phase_shares[longest])} of the time{most}{_busy(row, cores)}"


def _busy(row: TrainingSummary, cores: int | None) -> str:
    if row.utilisation is None:
        return ""
    if row.device == "cpu" and cores:
        return f"; {row.utilisation * cores:.1f} of the machine's {cores} cores are busy"
    return f"; the device is busy {format_share(row.utilisation)} of the time"
