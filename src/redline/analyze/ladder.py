"""A ladder of trainings from one CPU thread to the best a GPU can do: each rung's gain, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from redline.analyze.profile import Profile
from redline.analyze.train import TrainingSummary, training_of
from redline.model.fields import Frozen
from redline.model.note import Note
from redline.model.record import RunRecord
from redline.model.units import format_share


class Rung(Frozen):
    """One way to train the same model on the same data. None is unknown; of a rung that was skipped nearly all is."""

    name: str
    device: str
    threads: int | None = None
    """CPU threads inside operators."""
    workers: int = 0
    recipe: str = "baseline"
    batch: int | None = None
    epoch_s: float | None = None
    samples_per_s: float | None = None
    accuracy: float | None = None
    steps: int = 0
    """Optimizer steps the accuracy was reached in: larger batches take fewer in as many epochs."""
    peak_bytes: int | None = None
    top_operator: str | None = None
    """The one that takes most of a step's time, where the rung was profiled."""
    gain_over_last: float | None = None
    """In samples per second, over the rung before that ran."""
    gain_over_first: float | None = None
    skipped: str | None = None
    """Why it was not trained."""
    limit: str = ""
    """What is in the way, in one sentence."""
    epochs: int = 0
    is_cut: bool = False
    """The time for a rung was over before its epochs were: the epoch time is what the whole would have taken."""
    data_wait_share: float | None = None
    utilisation: float | None = None
    device_name: str | None = None
    record_id: str | None = None
    doubts: tuple[Note, ...] = ()
    """Why its speed is not to be relied on."""
    failure: str | None = None


def rung_of(name: str, record: RunRecord, profile: Profile | None = None) -> Rung:
    row = training_of(record)
    return Rung(
        name=name,
        device=row.device,
        threads=row.threads,
        workers=row.workers,
        recipe=row.recipe,
        batch=row.batch,
        epoch_s=row.epoch_s,
        samples_per_s=row.samples_per_s,
        accuracy=row.accuracy,
        steps=sum(epoch.steps for epoch in row.epochs),
        peak_bytes=row.peak_bytes,
        top_operator=top_operator(profile) if profile is not None else None,
        limit=limit_of(row, profile, _cores(record)),
        epochs=len(row.epochs),
        is_cut=row.state == "cut",
        data_wait_share=row.data_wait_share,
        utilisation=row.utilisation,
        device_name=row.device_name,
        record_id=row.record_id,
        doubts=row.doubts,
        failure=row.failure,
    )


def with_gains(rungs: Sequence[Rung]) -> list[Rung]:
    """Each against the first that ran and against the one that ran before it."""
    climbed: list[Rung] = []
    first = last = None
    for rung in rungs:
        rate = rung.samples_per_s
        if rate:
            rung = msgspec.structs.replace(
                rung,
                gain_over_last=rate / last if last else None,
                gain_over_first=rate / first if first else None,
            )
            first, last = first or rate, rate
        climbed.append(rung)
    return climbed


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
    """What is in the way, in one sentence."""
    if row.failure is not None or not row.epochs:
        return ""
    if row.bound.label == "data":
        return f"the loader limits it: {row.bound.evidence}"
    found = profile.bound if profile is not None else row.bound
    if found.label not in ("unknown", "device") and row.device != "cpu":
        return f"{LIMITS[found.label]}: {found.evidence}"
    longest = max(row.phase_shares, key=lambda name: row.phase_shares[name], default=None)
    if longest is None:
        return "nothing was told apart"
    operator = top_operator(profile) if profile is not None else None
    most = f", most of it {operator}" if operator else ""
    whose = "the device limits it: " if found.label == "device" and row.device != "cpu" else ""
    phase = "recorded step" if longest == "step" else longest
    return f"{whose}the {phase} takes {format_share(row.phase_shares[longest])} of the time{most}{_busy(row, cores)}"


def _busy(row: TrainingSummary, cores: int | None) -> str:
    if row.utilisation is None:
        return ""
    if row.device == "cpu" and cores:
        return f"; {row.utilisation * cores:.1f} of the machine's {cores} cores are busy"
    return f"; the device is busy {format_share(row.utilisation)} of the time"


def _cores(record: RunRecord) -> int | None:
    return record.prepared.environment.logical_cores if record.prepared is not None else None
