"""What else tells a row from its neighbours: inputs, threads, memory limit, versions; as fields, and in words for a headline."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from redline.model.fields import Frozen
from redline.model.record import RunRecord, device_of
from redline.model.spec import DEFAULT_NEW_TOKENS, DEFAULT_PROMPT, RunSpec, WorkloadSpec
from redline.model.units import counted, format_bytes


def text_lengths(workload: WorkloadSpec) -> dict[str, int]:
    """Prompt and new tokens of a generation, asked for or not; empty for other tasks."""
    if workload.task != "generate":
        return {}
    return {
        "prompt": workload.prompt or DEFAULT_PROMPT,
        "new_tokens": workload.new_tokens or DEFAULT_NEW_TOKENS,
    }


def data_words(spec: RunSpec) -> str | None:
    """The data of a training and how they are fed, on which its speed depends; None where one batch is timed."""
    if spec.train is None:
        return None
    data = spec.train.data
    words = (
        data.name,
        f"{data.train_samples} samples" if data.train_samples else "",
        counted(data.workers, "loader worker") if data.workers else "",
        f"augmented on the {data.augment}" if data.augment != "none" else "",
        "on the device" if data.on_device else "",
        "" if data.prefetch else "no prefetch",
    )
    return ", ".join(word for word in words if word)


class Conditions(Frozen):
    """What else tells a row from its neighbours: None is unknown, or means nothing here."""

    inputs: tuple[str, ...] = ()
    """Shapes and dtypes."""
    image_size: int | None = None
    sequence_length: int | None = None
    prompt: int | None = None
    new_tokens: int | None = None
    """For generation."""
    classes: int | None = None
    """As asked for; None is the model's own number."""
    optimizer: str | None = None
    """For training."""
    loss: str | None = None
    stem: str | None = None
    """For a ResNet, where it was chosen."""
    data: str | None = None
    """For a training on data: which, and how they are fed."""
    threads: int | None = None
    """CPU threads inside operators, as they were."""
    max_memory_bytes: int | None = None
    ranks: int = 1
    """Processes that worked together."""
    seed: int = 0
    effort: str = ""
    torch: str | None = None
    driver: str | None = None
    redline: str | None = None


def conditions_of(record: RunRecord) -> Conditions:
    """As measured; where the bench never said it, as asked for."""
    spec, workload, prepared = record.spec, record.spec.workload, record.prepared
    lengths = text_lengths(workload)
    found = Conditions(
        prompt=lengths.get("prompt"),
        new_tokens=lengths.get("new_tokens"),
        image_size=workload.image_size,
        sequence_length=workload.sequence_length,
        classes=workload.classes,
        optimizer=workload.optimizer if workload.task == "train" else None,
        stem=workload.stem,
        data=data_words(spec),
        threads=spec.threads,
        max_memory_bytes=spec.launch.memory_limit_bytes,
        ranks=spec.ranks,
        seed=spec.seed,
        effort=spec.measure.effort,
    )
    if prepared is None:
        return found
    info, environment = prepared.workload, prepared.environment
    return msgspec.structs.replace(
        found,
        inputs=info.input_shapes,
        image_size=info.image_size or found.image_size,
        sequence_length=info.sequence_length or found.sequence_length,
        optimizer=info.optimizer or found.optimizer,
        prompt=prepared.generation.prompt if prepared.generation else found.prompt,
        new_tokens=prepared.generation.new_tokens if prepared.generation else found.new_tokens,
        loss=info.loss or None,
        stem=prepared.data.stem if prepared.data else found.stem,
        threads=environment.threads or found.threads,
        torch=environment.versions.get("torch"),
        driver=environment.device.driver,
        redline=environment.redline or None,
    )


def condition_words(conditions: Conditions, device: str) -> dict[str, str]:
    """The conditions that matter on this device, in words for a headline, by the name of their field."""
    on_cpu = device.partition(":")[0] == "cpu"
    sized = conditions.image_size or conditions.sequence_length or conditions.prompt
    told = {
        "image_size": conditions.image_size and f"{conditions.image_size} px",
        "sequence_length": conditions.sequence_length and f"length {conditions.sequence_length}",
        "prompt": conditions.prompt and f"prompt {conditions.prompt}",
        "new_tokens": conditions.new_tokens and f"{conditions.new_tokens} new tokens",
        "inputs": "" if sized else _inputs_told(conditions.inputs),
        "classes": conditions.classes and f"{conditions.classes} classes",
        "optimizer": conditions.optimizer,
        "loss": conditions.loss,
        "stem": conditions.stem and f"{conditions.stem} stem",
        "data": conditions.data and f"trained on {conditions.data}",
        "ranks": conditions.ranks > 1 and f"{conditions.ranks} ranks",
        "threads": on_cpu and conditions.threads and counted(conditions.threads, "thread"),
        "max_memory_bytes": conditions.max_memory_bytes and f"within {format_bytes(conditions.max_memory_bytes)}",
        "torch": conditions.torch and f"torch {conditions.torch}",
        "driver": conditions.driver and f"driver {conditions.driver}",
    }
    return {name: str(words) for name, words in told.items() if words}


def conditions_text(record: RunRecord) -> str:
    return " · ".join(condition_words(conditions_of(record), device_of(record)).values())


MOST_INPUTS = 2
"""Named in a headline; more are counted."""


def _inputs_told(inputs: Sequence[str]) -> str:
    return ", ".join(inputs) if len(inputs) <= MOST_INPUTS else counted(len(inputs), "input")
