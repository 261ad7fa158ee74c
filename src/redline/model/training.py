"""A training: what is asked of it, and what it leaves behind: the data it saw, its epochs, and what feeding it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from redline.model.errors import SpecError
from redline.model.fields import MOST_ITEMS, MOST_ROWS, MOST_THREADS, Frozen
from redline.model.settings import DATA, check_settings, setting

DATA_PHASE = "data"
"""The phase in which a step waits for its batch. The other phases are those of the training step."""

Stem = Literal["imagenet", "cifar"]
Schedule = Literal["constant", "cosine", "one-cycle"]
Augment = Literal["none", "host", "device"]
LastBatch = Literal["run", "drop"]
FedPart = Literal["loader", "model", "together"]
LastBatchFate = Literal["none", "run", "run eagerly", "dropped"]


class DataSpec(Frozen):
    """Which data a training sees, and how they reach the device."""

    name: str
    """`cifar10`, `imagefolder`, `synthetic`, `synthetic-learnable`, or the user's own as `file.py:loaders`."""
    folder: Annotated[
        str | None,
        setting(
            "Folder of cifar10 or imagefolder. Its pickles are read, so it must be one you trust.",
            shape="DIR",
            group=DATA,
        ),
    ] = None
    train_samples: Annotated[
        int | None, setting("Train on this many samples only.", group=DATA, least=1, most=MOST_ITEMS)
    ] = None
    val_samples: Annotated[
        int | None, setting("Validate on this many samples only.", group=DATA, least=1, most=MOST_ITEMS)
    ] = None
    workers: Annotated[
        int,
        setting(
            "Processes that load batches; with 0 the training process loads them itself.",
            group=DATA,
            least=0,
            most=MOST_THREADS,
        ),
    ] = 0
    pin_memory: Annotated[
        bool, setting("Keep batches page-locked, so that a GPU copies them without waiting.", group=DATA)
    ] = True
    persistent_workers: Annotated[bool, setting("Keep the workers from one epoch to the next.", group=DATA)] = True
    prefetch_factor: Annotated[
        int, setting("Batches each worker keeps ready.", group=DATA, least=1, most=MOST_ITEMS)
    ] = 2
    prefetch: Annotated[
        bool,
        setting("Load and copy the next batch while this one computes, rather than one after the other.", group=DATA),
    ] = True
    on_device: Annotated[bool, setting("Keep the whole set in the device's memory.", group=DATA)] = False
    augment: Annotated[
        Augment, setting("Random shifts and mirror images, and where they are computed.", group=DATA)
    ] = "none"
    download: Annotated[bool, setting("Fetch CIFAR-10 into --folder first.", group=DATA)] = False
    loader_timeout_s: Annotated[
        float,
        setting(
            "Seconds without a batch after which the loader counts as hung.", option="--loader-timeout", group=DATA
        ),
    ] = 60.0

    def __post_init__(self) -> None:
        check_settings(self)
        if not self.loader_timeout_s > 0:
            raise SpecError(f"loader_timeout_s must be above 0, got {self.loader_timeout_s}")
        if self.on_device and (self.workers or self.augment == "host"):
            raise SpecError("data on the device pass no loader: leave out workers, and augment on the device")


class TrainSpec(Frozen):
    """A training on data, for epochs, to an accuracy."""

    data: DataSpec
    epochs: Annotated[int, setting("Number of epochs.", short="-e", least=1, most=MOST_ROWS)] = 1
    learning_rate: Annotated[
        float | None, setting("Highest learning rate. Default: SGD 0.1 per 256 samples, Adam 0.001.", short="--lr")
    ] = None
    weight_decay: Annotated[float, setting("Weight decay.")] = 5e-4
    schedule: Annotated[Schedule, setting("Schedule of the learning rate.")] = "one-cycle"
    target_accuracy: Annotated[
        float | None, setting("Stop after the epoch that reaches this accuracy, such as 0.9, and say when.")
    ] = None
    last_batch: Annotated[
        LastBatch,
        setting("What to do with the smaller last batch of an epoch; compiled and graphed recipes run it eagerly."),
    ] = "run"
    max_seconds: Annotated[
        float | None,
        setting("Stop training after this many seconds, even within an epoch, which is recorded as incomplete."),
    ] = None
    deterministic: Annotated[
        bool, setting("Use algorithms that give the same bits again, also on a GPU; some are slower.")
    ] = False

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("learning_rate", "max_seconds"):
            if (value := getattr(self, name)) is not None and not 0 < value < math.inf:
                raise SpecError(f"{name} must be above 0, got {value}")
        if not 0 <= self.weight_decay < math.inf:
            raise SpecError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.target_accuracy is not None and not 0 < self.target_accuracy <= 1:
            raise SpecError(f"target_accuracy must be above 0 and at most 1, got {self.target_accuracy}")


class DataInfo(Frozen):
    """The data of a training as they turned out, and what was chosen because of them."""

    name: str
    train_samples: int
    val_samples: int
    classes: int | None = None
    """None: the targets are no classes."""
    shape: tuple[int, ...] = ()
    """The shape of one sample as the model sees it."""
    fingerprint: str = ""
    """Of names, sizes and the first samples: whether two trainings saw the same data."""
    stem: Stem | None = None
    """For a ResNet; None for other models."""
    steps_per_epoch: int = 0
    last_batch: int = 0
    """Samples in the smaller batch that ends an epoch; 0: all are whole."""
    last_batch_fate: LastBatchFate = "none"
    learning_rate: float = 0.0
    """The highest of the schedule."""
    workers: int = 0
    augment: Augment = "none"
    random_labels: bool = False
    """Nothing can be learned: accuracy says nothing."""


class Epoch(Frozen):
    """One pass over the training set, and over the held-out set after it."""

    number: int
    """From 1."""
    seconds: float
    """Training and validation, by the wall clock."""
    train_s: float
    steps: int
    samples: int
    """Trained on."""
    train_loss: float | None
    """Mean over the epoch; None: not finite."""
    validation_s: float = 0.0
    val_loss: float | None = None
    val_accuracy: float | None = None
    val_judged: int = 0
    """Held-out targets that the accuracy is a share of."""
    val_most_frequent: float | None = None
    """The share of the most frequent class among them: the accuracy of always naming that one."""
    val_batches: int = 0
    val_batches_not_finite: int = 0
    """Held-out batches whose loss was no number; the validation loss is then unknown."""
    trainable: int = 0
    """Tensors that the optimizer may change."""
    unchanged: int = 0
    """How many of them were the same after the epoch as before."""
    learning_rate: float = 0.0
    """Of the last step."""
    phases_s: dict[str, float] = {}
    """Seconds of all steps together, by phase; `data` is waiting for batches. The other phases are timed in some of the steps,
    and divide the time of all."""
    host_wait_s: float = 0.0
    """Host seconds blocked on the loader: on a GPU they need not hold it up."""
    gradient_scale: float | None = None
    """GradScaler's, at the end; None where gradients are not scaled."""
    peak_bytes: int | None = None
    """What must fit: reserved by the allocator, on a CPU the resident memory."""
    utilisation: float | None = None
    """Mean of the looks at the device."""
    energy_j: float | None = None
    """During training only, as is the utilisation."""
    is_cut: bool = False
    """Ended before its last batch, because the time was over."""

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second of training, without validation."""
        return self.samples / self.train_s if self.train_s > 0 else None

    @property
    def samples_per_s_with_validation(self) -> float | None:
        """Samples per second, with the time of validation."""
        return self.samples / self.seconds if self.seconds > 0 else None

    @property
    def data_wait_share(self) -> float | None:
        """The share of the training time in which no batch was there to work on."""
        whole = sum(self.phases_s.values())
        return self.phases_s[DATA_PHASE] / whole if whole > 0 and DATA_PHASE in self.phases_s else None


def steady_epochs(epochs: Sequence[Epoch]) -> list[Epoch]:
    """Epochs that speeds are computed from: not the first, which pays for start-up, nor an incomplete one."""
    whole = [epoch for epoch in epochs if not epoch.is_cut]
    return whole[1:] or whole or list(epochs)


def wait_share(epochs: Sequence[Epoch]) -> float | None:
    """Share of the training time of all epochs."""
    whole = sum(sum(epoch.phases_s.values()) for epoch in epochs)
    return sum(epoch.phases_s.get(DATA_PHASE, 0.0) for epoch in epochs) / whole if whole > 0 else None


class Fed(Frozen):
    """A stretch of loading alone, of the model alone on batches that are there already, or of both."""

    part: FedPart
    samples: int
    seconds: float
    wait_s: float = 0.0
    """With both together: seconds in which the device had no batch."""
    workers: int = 0
    prefetch: bool = True

    @property
    def per_s(self) -> float:
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_share(self) -> float:
        return self.wait_s / self.seconds if self.seconds > 0 else 0.0


class TrainingProgress(Frozen):
    """Where a training is."""

    epoch: int
    epochs: int
    step: int
    steps: int
    """In this epoch; 0: unknown, because the user's loader does not say how long it is."""
    loss: float | None = None
    """Mean over the epoch so far, a moment ago."""
    samples_per_s: float | None = None
