"""How a fake bench trains: a loader that takes its time, losses that fall, accuracy that rises to a known value."""

from __future__ import annotations

import math

from redline.record import Block, Memory
from redline.spec import RunSpec
from redline.testing.landscape import Landscape, look_up
from redline.training import DATA_PHASE, DataInfo, Epoch, Fed, FedPart

TRAIN_SAMPLES, VAL_SAMPLES, CLASSES = 10_240, 2_048, 10
PHASES = {"forward": 0.33, "backward": 0.6, "optimizer": 0.07}
VALIDATION = 0.25
"""Of a training step: what a step of the validation takes."""


def data_of(spec: RunSpec, truth: Landscape) -> DataInfo:
    assert spec.train is not None
    data = spec.train.data
    batch, samples = spec.workload.batch or truth.default_batch, data.train_samples or TRAIN_SAMPLES
    return DataInfo(
        name=data.name,
        train_samples=samples,
        val_samples=data.val_samples or VAL_SAMPLES,
        classes=CLASSES,
        shape=(3, 32, 32),
        fingerprint="fake",
        stem=spec.workload.stem or ("cifar" if "resnet" in spec.workload.model else None),
        steps_per_epoch=samples // batch,
        last_batch=samples % batch,
        last_batch_fate="dropped" if samples % batch else "none",
        learning_rate=spec.train.learning_rate or 0.1,
        workers=data.workers,
        augment=data.augment,
        random_labels=data.name == "synthetic",
    )


def epoch_of(spec: RunSpec, truth: Landscape, number: int, step_s: float, memory: Memory) -> tuple[Epoch, Block]:
    """Without noise: what is tested is what is made of it."""
    assert spec.train is not None
    info, settings = data_of(spec, truth), spec.train
    batch = spec.workload.batch or truth.default_batch
    wait_s = waiting_s(spec, truth, step_s, settings.data.workers, prefetch=settings.data.prefetch)
    steps = info.steps_per_epoch
    limit = settings.max_seconds
    most = steps if limit is None else max(1, min(steps, int(limit / (step_s + wait_s))))
    phases = {DATA_PHASE: wait_s, **{name: share * step_s for name, share in PHASES.items()}}
    learned = 1 - math.exp(-number)
    accuracy = 1 / CLASSES + (look_up(truth.accuracy, spec) - 1 / CLASSES) * learned
    train_s, validation_s = most * (step_s + wait_s), VALIDATION * step_s * info.val_samples / batch
    epoch = Epoch(
        number=number,
        seconds=train_s + validation_s,
        train_s=train_s,
        validation_s=validation_s,
        steps=most,
        samples=most * batch,
        train_loss=math.log(CLASSES) * (1 - 0.9 * learned),
        val_loss=math.log(CLASSES) * (1 - 0.8 * learned),
        val_accuracy=accuracy,
        learning_rate=info.learning_rate,
        phases_s={name: most * seconds for name, seconds in phases.items()},
        peak_bytes=memory.peak_rss_bytes if memory.peak_reserved_bytes is None else memory.peak_reserved_bytes,
        utilisation=step_s / (step_s + wait_s),
        energy_j=None if truth.power_w is None else look_up(truth.power_w, spec) * train_s,
        is_cut=most < steps,
    )
    block = Block(
        kind="throughput",
        clock="host",
        samples=(step_s + wait_s,) * most,
        phases={name: (seconds,) * most for name, seconds in phases.items()},
        wall_s=train_s,
        round=number,
        memory=memory,
        energy_j=epoch.energy_j,
    )
    return epoch, block


def fed_of(
    spec: RunSpec, truth: Landscape, part: FedPart, seconds: float, step_s: float, workers: int, prefetch: bool
) -> Fed:
    batch = spec.workload.batch or truth.default_batch
    wait_s = waiting_s(spec, truth, step_s, workers, prefetch=prefetch)
    loading_s = max(look_up(truth.load_s, spec) / max(1, workers), 1e-6)
    each_s = {"loader": loading_s, "model": step_s, "together": step_s + wait_s}[part]
    return Fed(
        part=part,
        samples=round(seconds / each_s * batch),
        seconds=seconds,
        wait_s=seconds * wait_s / each_s if part == "together" else 0.0,
        workers=workers,
        prefetch=prefetch,
    )


def waiting_s(spec: RunSpec, truth: Landscape, step_s: float, workers: int, *, prefetch: bool) -> float:
    """What a step waits for its batch: nothing where loading fits beside the step before."""
    loading_s = look_up(truth.load_s, spec) / max(1, workers)
    return loading_s if not workers and not prefetch else max(0.0, loading_s - step_s)
