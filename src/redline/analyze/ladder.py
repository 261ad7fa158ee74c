"""A ladder of trainings from one CPU thread to the best a GPU can do: each rung's gain, and what limits it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from redline.analyze.profile import Profile
from redline.analyze.train import TrainingSummary, training_of
from redline.record import RunRecord
from redline.spec import Frozen
from redline.units import format_share


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
        peak_bytes=row.peak_bytes,
        top_operator=top_operator(profile) if profile is not None else None,
        limit=limit_of(row, profile),
        epochs=len(row.epochs),
        is_cut=row.state == "cut",
        data_wait_share=row.data_wait_share,
        utilisation=row.utilisation,
        device_name=row.device_name,
        record_id=row.record_id,
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
    """By the time of the device where there is one, else of the host; without those it called."""
    times = {row.name: row.device_self_s if profile.has_device else row.cpu_self_s for row in profile.operators}
    best = max(times, key=lambda name: times[name], default=None)
    return best.removeprefix("aten::") if best is not None and times[best] > 0 else None


def limit_of(row: TrainingSummary, profile: Profile | None) -> str:
    if row.failure is not None or not row.epochs:
        return ""
    if row.bound.label == "data":
        return f"the loader: {row.bound.evidence}"
    if profile is not None and profile.bound.label not in ("unknown", "device"):
        return f"{profile.bound.label}: {profile.bound.evidence}"
    longest = max(row.phase_shares, key=lambda name: row.phase_shares[name], default=None)
    if longest is None:
        return "nothing was told apart"
    operator = top_operator(profile) if profile is not None else None
    most = f", most of it {operator}" if operator else ""
    busy = f"; the device is busy {format_share(row.utilisation)} of the time" if row.utilisation is not None else ""
    return f"the {longest} takes {format_share(row.phase_shares[longest])} of a step{most}{busy}"
