"""Trainings read from their records: speed, accuracy, what they waited for, and what the loader has to do with it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Any

from redline.analyze.advice import command_line, tuning_command
from redline.analyze.bound import DATA_WAIT_SHARE, Bound, bound
from redline.analyze.trust import verdict
from redline.model.fields import Frozen
from redline.model.note import Note, note
from redline.model.record import Epoch, Fed, FedPart, RunRecord, device_of, steady_epochs, wait_share
from redline.model.spec import Stem
from redline.model.units import format_share
from redline.model.work import Ceilings

DATA_BOUND_SHARE = DATA_WAIT_SHARE
"""A training is data-bound if it waits for batches for more than this share of its time."""


class TrainingSummary(Frozen):
    """This is one training. None is unknown, never a guess."""

    record_id: str
    model: str
    recipe: str
    data: str
    device: str
    bound: Bound
    device_name: str | None = None
    threads: int | None = None
    workers: int = 0
    batch: int | None = None
    item: str | None = None
    parameters: int | None = None
    flops: int | None = None
    """One step needs this many operations for its products, forward and backward."""
    stem: Stem | None = None
    loss: str = ""
    """It names the loss that is trained on: the user's, the model's own, or the one chosen for the targets."""
    seed: int = 0
    epochs: tuple[Epoch, ...] = ()
    planned_epochs: int = 1
    epoch_s: float | None = None
    """This is the median of the whole epochs, without the first if there are others."""
    samples_per_s: float | None = None
    """It is that of the same epochs, and leaves out validation."""
    samples_per_s_with_validation: float | None = None
    train_loss: float | None = None
    val_loss: float | None = None
    accuracy: float | None = None
    """This is the accuracy after the last epoch."""
    judged: int = 0
    """The accuracy is a share of this many held-out targets."""
    best_accuracy: float | None = None
    target_accuracy: float | None = None
    time_to_target_s: float | None = None
    """This counts training and validation up to the end of the epoch that reached the target."""
    data_wait_share: float | None = None
    phase_shares: dict[str, float] = {}
    """They are shares of the time from the first step of an epoch to its last."""
    peak_bytes: int | None = None
    utilisation: float | None = None
    energy_per_sample_j: float | None = None
    doubts: tuple[Note, ...] = ()
    """These say why its speed is not to be relied on. They are empty if nothing speaks against it."""
    notes: tuple[Note, ...] = ()
    failure: str | None = None
    state: str = ""
    """It is done, failed, interrupted or cut."""
    tuned_by: str | None = None
    """This command looks for a faster recipe for the same step. It is None if no command line can name it."""
    fed_by: str | None = None
    """This command measures loader and model apart and together."""

    @property
    def steps(self) -> int:
        """Returns how many steps all epochs had."""
        return sum(epoch.steps for epoch in self.epochs)


def training_of(record: RunRecord, ceilings: Ceilings | None = None) -> TrainingSummary:
    settings, prepared, info = record.spec.train, record.prepared, record.prepared.data if record.prepared else None
    assert settings is not None
    epochs = record.epochs
    steady = steady_epochs(epochs)
    last = epochs[-1] if epochs else None
    return TrainingSummary(
        record_id=record.id,
        model=record.spec.workload.model,
        recipe=str(record.spec.recipe),
        data=settings.data.name,
        device=device_of(record),
        device_name=prepared.environment.device.name or None if prepared else None,
        threads=prepared.environment.threads if prepared else record.spec.threads,
        workers=info.workers if info else settings.data.workers,
        batch=prepared.workload.items_per_step if prepared else record.spec.workload.batch,
        item=prepared.workload.item if prepared else None,
        parameters=prepared.workload.parameters if prepared else None,
        flops=prepared.work.total_flops if prepared and prepared.work else None,
        stem=info.stem if info else record.spec.workload.stem,
        loss=prepared.workload.loss if prepared else "",
        seed=record.spec.seed,
        epochs=epochs,
        planned_epochs=settings.epochs,
        epoch_s=_epoch_s(record, steady),
        samples_per_s=_known(median, (epoch.samples_per_s for epoch in steady)),
        samples_per_s_with_validation=_known(median, (epoch.samples_per_s_with_validation for epoch in steady)),
        train_loss=last.train_loss if last else None,
        val_loss=last.val_loss if last else None,
        accuracy=last.val_accuracy if last else None,
        judged=last.val_judged if last else 0,
        best_accuracy=_known(max, (epoch.val_accuracy for epoch in epochs)),
        target_accuracy=settings.target_accuracy,
        time_to_target_s=time_to_target_s(epochs, settings.target_accuracy),
        data_wait_share=wait_share(steady),
        phase_shares=_phase_shares(steady),
        peak_bytes=_known(max, (epoch.peak_bytes for epoch in epochs)),
        utilisation=_known(fmean, (epoch.utilisation for epoch in steady)),
        energy_per_sample_j=_energy(steady),
        bound=bound(record, ceilings),
        doubts=verdict(record).reasons if record.failure is None and any(one.samples for one in record.blocks) else (),
        notes=tuple(_notes(record)),
        failure=record.failure.message if record.failure else None,
        state=_state(record),
        tuned_by=tuning_command(record),
        fed_by=command_line("train --find-workers", record.spec, batch=record.spec.workload.batch),
    )


def time_to_target_s(epochs: Sequence[Epoch], target: float | None) -> float | None:
    passed = 0.0
    for epoch in epochs:
        passed += epoch.seconds
        if target is not None and epoch.val_accuracy is not None and epoch.val_accuracy >= target:
            return passed
    return None


# Loader and model


def latest_feed(record: RunRecord, part: FedPart, workers: int | None = None, prefetch: bool = True) -> Fed | None:
    """Returns the last measurement of a part, with the workers that were asked for unless `workers` names others."""
    assert record.spec.train is not None
    # The model alone has no loader, whatever its measurement says of workers.
    wanted = record.spec.train.data.workers if workers is None and part != "model" else workers
    fitting = [fed for fed in record.feeds if fed.part == part and fed.prefetch == prefetch]
    return next((fed for fed in reversed(fitting) if wanted in (None, fed.workers)), None)


def loading_share(record: RunRecord) -> float:
    """Returns the most that loading can take of the time together: what it takes alone, with nothing beside it."""
    loader, together = latest_feed(record, "loader"), latest_feed(record, "together")
    return min(1.0, together.per_s / loader.per_s) if loader and together and loader.per_s > 0 else 1.0


def is_data_bound(record: RunRecord) -> bool:
    """Returns True if the training waits for its loader with the workers that were asked for.

    On a CPU, loader and model share the processor: waiting that loading is too quick to explain is the hand-over between
    threads, which no number of workers ends.
    """
    together = latest_feed(record, "together")
    if together is None or together.wait_share <= DATA_BOUND_SHARE:
        return False
    return device_of(record) != "cpu" or loading_share(record) > DATA_BOUND_SHARE


def best_workers(record: RunRecord) -> tuple[int | None, bool]:
    """Returns the fewest workers with which the training does not wait, or the fastest where none suffice; and whether they do.

    There is no such number if the loaders are the user's own, or the data lie on the device.
    """
    assert record.spec.train is not None
    data, together = record.spec.train.data, latest_feed(record, "together")
    assert together is not None
    tried = [fed for fed in record.feeds if fed.part == "together" and fed.prefetch]
    # On a CPU, workers may end the waiting and take the processor from the model.
    enough = [fed.workers for fed in tried if fed.wait_share <= DATA_BOUND_SHARE and fed.per_s >= together.per_s]
    fastest = max(tried, key=lambda fed: fed.per_s).workers
    return None if data.on_device or ":" in data.name else min(enough, default=fastest), bool(enough)


def cores_for_workers(record: RunRecord) -> int:
    """Returns the most workers worth trying, because more workers than cores only take turns."""
    assert record.prepared is not None
    environment = record.prepared.environment
    return len(environment.affinity) or environment.logical_cores or 1


def about_the_loader(record: RunRecord) -> str:
    """Returns what to do about it."""
    assert record.spec.train is not None
    data = record.spec.train.data
    if not is_data_bound(record):
        line = tuning_command(record)
        return "the loader is fast enough" + (f"; '{line}' looks for a faster recipe" if line else "")
    if ":" in data.name:
        info = record.prepared.data if record.prepared else None
        if info is not None and info.workers >= (cores := cores_for_workers(record)):
            return f"load less: your loader has a process for each of the {cores} cores already"
        return "load in more processes that stay (num_workers and persistent_workers of a DataLoader), or load less"
    if data.on_device:
        return "the data are on the device already: give each step more to do with a larger --batch"
    if (best := best_workers(record)[0]) not in (None, data.workers):
        return f"train with --workers {best}"
    cheaper = "--augment device, or " if data.augment == "host" else ""
    return f"make loading cheaper: {cheaper}keep the whole set on the device with --on-device"


def where_time_goes(training: TrainingSummary) -> str:
    """Returns the share of each phase in words, or nothing if no step was timed."""
    return ", ".join(f"{name} {format_share(share)}" for name, share in training.phase_shares.items())


def _epoch_s(record: RunRecord, steady: Sequence[Epoch]) -> float | None:
    """Returns the time of an epoch. For one that was cut, it is what a whole one would have taken at that speed."""
    if not steady:
        return None
    if not steady[-1].is_cut:
        return median(epoch.seconds for epoch in steady)
    info, rate = record.prepared.data if record.prepared else None, steady[-1].samples_per_s
    return info.train_samples / rate + steady[-1].validation_s if info and info.train_samples and rate else None


def _phase_shares(epochs: Sequence[Epoch]) -> dict[str, float]:
    names = dict.fromkeys(name for epoch in epochs for name in epoch.phases_s)
    sums = {name: sum(epoch.phases_s.get(name, 0.0) for epoch in epochs) for name in names}
    whole = sum(sums.values())
    return {name: seconds / whole for name, seconds in sums.items()} if whole > 0 else {}


def _energy(epochs: Sequence[Epoch]) -> float | None:
    metered = [epoch for epoch in epochs if epoch.energy_j is not None]
    samples = sum(epoch.samples for epoch in metered)
    return sum(epoch.energy_j or 0.0 for epoch in metered) / samples if samples else None


FATES = {
    "dropped": "is dropped in every epoch",
    "run": "ends every epoch",
    "run eagerly": "ends every epoch, run eagerly: the recipe's program is made for whole batches",
}
"""These words say what becomes of a smaller last batch."""


def _notes(record: RunRecord) -> Iterator[Note]:
    info = None
    if (prepared := record.prepared) is not None:
        info = prepared.data
        yield from (*prepared.workload.notes, *prepared.recipe_notes)
    yield from record.notes
    if info is not None and info.last_batch:
        yield note("last-batch", f"a smaller batch of {info.last_batch} {FATES[info.last_batch_fate]}")
    if info is not None and info.random_labels:
        yield note("random-labels", "the classes are random: nothing can be learned, and accuracy says nothing")
    yield from _doubts(record.epochs, learnable=info is None or not info.random_labels)


def _doubts(epochs: Sequence[Epoch], *, learnable: bool) -> Iterator[Note]:
    """Yields what makes the losses or the accuracy of a training suspect."""
    unknown = [epoch for epoch in epochs if epoch.val_batches_not_finite]
    if unknown:
        share = f"{unknown[-1].val_batches_not_finite} of {unknown[-1].val_batches} batches"
        text = f"in epoch {unknown[-1].number} the validation loss was not a number, in {share}"
        yield note(
            "not-finite", f"{text}: look for held-out samples that are no numbers, and for overflow in eval mode"
        )
    last = epochs[-1] if epochs else None
    if last is not None and last.unchanged and last.unchanged == last.trainable:
        scaled = ", or the gradient scaler skipped every step" if last.gradient_scale is not None else ""
        yield note("unchanged", f"no parameter changed in epoch {last.number}: the optimizer did nothing{scaled}")
    if not learnable or last is None or not last.val_judged:
        return
    guess, reached = last.val_most_frequent or 1.0, last.val_accuracy or 0.0
    if guess < 1 and reached <= guess + 2 * math.sqrt(guess * (1 - guess) / last.val_judged):  # two standard errors
        text = f"accuracy {format_share(reached)} is no better than always naming the most frequent class ({format_share(guess)})"
        yield note("not-learned", f"{text}: check labels, augmentation and learning rate, or train longer")


def _state(record: RunRecord) -> str:
    states = {"failed": "failed", "interrupted": "interrupted", "ceiling": "cut", None: "interrupted"}
    return "failed" if record.failure else states.get(record.stopped, "done")


def _known(middle: Callable[[list[Any]], Any], values: Iterable[Any]) -> Any:
    """Returns the mean or the median of the values that are known."""
    known = [value for value in values if value is not None]
    return middle(known) if known else None
