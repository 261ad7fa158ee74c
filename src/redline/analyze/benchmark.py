"""When do two records measure the same thing, and when may their numbers be set against each other?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from redline.record import Environment, RunRecord
from redline.spec import Spec


class Benchmark(Spec):
    """What was measured, whoever measured it and wherever."""

    model: str
    task: str
    recipe: str
    """Canonical: the order of its steps does not matter."""
    batch: int | None
    device: str
    """`cpu`, `cuda` or `rocm`."""
    settings: tuple[tuple[str, str], ...] = ()
    """Other fields of the spec that decide what is computed, where they were given."""

    def __str__(self) -> str:
        batch = f"batch {self.batch}" if self.batch else ""
        settings = ", ".join(f"{name} {value}" for name, value in self.settings)
        return " · ".join(part for part in (self.model, self.task, self.recipe, batch, settings, self.device) if part)


def benchmark_of(record: RunRecord) -> Benchmark:
    spec, workload, prepared = record.spec, record.spec.workload, record.prepared
    given = {
        "image_size": workload.image_size,
        "classes": workload.classes,
        "sequence_length": workload.sequence_length,
        "optimizer": workload.optimizer if workload.task == "train" and workload.optimizer != "sgd" else None,
        "threads": spec.threads,
        "max_memory": spec.launch.memory_limit_bytes,
    }
    return Benchmark(
        model=workload.model,
        task=workload.task,
        recipe=spec.recipe.canonical(),
        batch=prepared.workload.items_per_step if prepared else workload.batch,
        device=prepared.environment.device.kind if prepared else spec.device.partition(":")[0],
        settings=tuple((name, str(value)) for name, value in given.items() if value is not None),
    )


def whether_in_turns(one: RunRecord, other: RunRecord) -> bool:
    return one.group is not None and one.group == other.group and one.id != other.id


def differences(
    mine: Benchmark, first: Sequence[RunRecord], yours: Benchmark, other: Sequence[RunRecord]
) -> tuple[list[str], list[str]]:
    """What makes the two incomparable, and what is only worth knowing."""
    unlike = [f"{name} {ours!r} against {theirs!r}" for name, ours, theirs in _unlike_benchmarks(mine, yours)]
    noted = []
    for name, look in _DECIDING.items():
        ours, theirs = _seen(first, look), _seen(other, look)
        if ours != theirs or len(ours) > 1:
            unlike.append(_told(name, ours, theirs))
    for name, look in _WORTH_KNOWING.items():
        ours, theirs = _seen(first, look), _seen(other, look)
        if ours != theirs:
            noted.append(_told(name, ours, theirs))
    return unlike, noted


def _unlike_benchmarks(mine: Benchmark, yours: Benchmark) -> list[tuple[str, Any, Any]]:
    """All that differs but the recipe: which of two recipes is faster is a fair question."""
    names = [field.name for field in msgspec.structs.fields(Benchmark) if field.name != "recipe"]
    pairs = [(name, getattr(mine, name), getattr(yours, name)) for name in names]
    return [(name, ours, theirs) for name, ours, theirs in pairs if ours != theirs]


def _seen(records: Sequence[RunRecord], look: Callable[[RunRecord], str | None]) -> list[str]:
    return sorted({look(record) or "unknown" for record in records})


def _told(name: str, ours: list[str], theirs: list[str]) -> str:
    return f"{name}: {' and '.join(ours)} against {' and '.join(theirs)}"


def _of_environment(look: Callable[[Environment], str | None]) -> Callable[[RunRecord], str | None]:
    return lambda record: look(record.prepared.environment) if record.prepared else None


def _version(package: str) -> Callable[[RunRecord], str | None]:
    return _of_environment(lambda environment: environment.versions.get(package))


_DECIDING: dict[str, Callable[[RunRecord], str | None]] = {
    "device": _of_environment(lambda environment: environment.device.name),
    "driver": _of_environment(lambda environment: environment.device.driver),
    "torch": _version("torch"),
    "benchmark version": lambda record: record.benchmark_version,
    "model (its structure)": lambda record: record.prepared.workload.model_hash if record.prepared else None,
    "inputs": lambda record: record.prepared.workload.input_hash if record.prepared else None,
    "threads": _of_environment(lambda environment: str(environment.threads) if environment.threads else None),
}
"""Where these differ, the numbers are of two different things."""

_WORTH_KNOWING: dict[str, Callable[[RunRecord], str | None]] = {
    "machine": _of_environment(lambda environment: environment.hostname),
    "power limit": _of_environment(lambda environment: str(environment.device.power_limit_w)),
    "cuDNN": _version("cudnn"),
    "Triton": _version("triton"),
    "effort": lambda record: record.spec.measure.effort,
    "code": _of_environment(lambda environment: environment.git_commit),
}
