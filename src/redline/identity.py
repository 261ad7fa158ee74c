"""When do two records measure the same thing, and when may their numbers be set against each other?"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from redline.note import Note, note
from redline.record import Environment, RunRecord, device_of
from redline.spec import Frozen
from redline.units import format_bytes


class Benchmark(Frozen):
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
        batch=prepared.workload.batch if prepared else workload.batch,
        device=prepared.environment.device.kind if prepared else spec.device.partition(":")[0],
        settings=tuple((name, str(value)) for name, value in given.items() if value is not None),
    )


def whether_in_turns(one: RunRecord, other: RunRecord) -> bool:
    return one.group is not None and one.group == other.group and one.id != other.id


def differences(
    mine: Benchmark, first: Sequence[RunRecord], yours: Benchmark, other: Sequence[RunRecord]
) -> tuple[list[Note], list[Note]]:
    """What makes the two incomparable, and what is only worth knowing."""
    unlike = {name: _told(name, [ours], [theirs]) for name, ours, theirs in _unlike_benchmarks(mine, yours)}
    noted = []
    for name, look in _DECIDING.items():
        ours, theirs = _seen(first, look), _seen(other, look)
        if ours != theirs or len(ours) > 1:
            unlike[name] = _told(name, ours, theirs)
    for name, look in _WORTH_KNOWING.items():
        ours, theirs = _seen(first, look), _seen(other, look)
        if ours != theirs:
            noted.append(_told(name, ours, theirs))
    return list(unlike.values()), noted


def _unlike_benchmarks(mine: Benchmark, yours: Benchmark) -> list[tuple[str, str, str]]:
    """Name and both values of all that differs but the recipe: which of two recipes is faster is a fair question."""
    ours, theirs = _fields(mine), _fields(yours)
    names = [name for name in dict.fromkeys((*ours, *theirs)) if ours.get(name) != theirs.get(name)]
    return [(name, ours.get(name) or "default", theirs.get(name) or "default") for name in names]


def _fields(benchmark: Benchmark) -> dict[str, str | None]:
    batch = None if benchmark.batch is None else str(benchmark.batch)
    plain = {"model": benchmark.model, "task": benchmark.task, "batch": batch, "device": benchmark.device}
    return {**plain, **dict(benchmark.settings)}


def _seen(records: Sequence[RunRecord], look: Callable[[RunRecord], str | None]) -> list[str]:
    return sorted({look(record) or "unknown" for record in records})


def _told(name: str, ours: list[str], theirs: list[str]) -> Note:
    return note("differs", f"{name.replace('_', ' ')}: {' and '.join(ours)} against {' and '.join(theirs)}", about=name)


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


class Subject(Frozen):
    model: str
    task: str
    device: str
    """The device's name, or what was asked for where the bench never said it."""
    setting: str = ""
    """What else was asked for and changes the speed, in words; empty where nothing was."""

    def __str__(self) -> str:
        return " · ".join(part for part in (self.model, self.task, self.setting, self.device) if part)


def subjects_of(records: Sequence[RunRecord]) -> list[Subject]:
    """One per record. A record that broke before its device was named takes the name its siblings gave that device."""
    named: dict[str, set[str]] = {}
    for record in records:
        if name := _device_name(record):
            named.setdefault(device_of(record), set()).add(name)
    return [_subject(record, named) for record in records]


def _subject(record: RunRecord, named: dict[str, set[str]]) -> Subject:
    workload, device = record.spec.workload, device_of(record)
    known = named.get(device, set())
    name = _device_name(record) or (next(iter(known)) if len(known) == 1 else device)
    return Subject(model=workload.model, task=workload.task, device=name, setting=_setting(record))


def _device_name(record: RunRecord) -> str:
    return record.prepared.environment.device.name if record.prepared else ""


def batch_of(record: RunRecord) -> int | None:
    """As measured, else as asked for; None where it is unknown."""
    return record.prepared.workload.batch if record.prepared else record.spec.workload.batch


def is_capture(record: RunRecord) -> bool:
    """Timed only briefly, beside a profile: good for a row, but no rival of a record that was measured at length."""
    return record.trace is not None


def _setting(record: RunRecord) -> str:
    workload, limit = record.spec.workload, record.spec.launch.memory_limit_bytes
    words = (
        f"{workload.image_size} px" if workload.image_size else "",
        f"{workload.sequence_length} tokens" if workload.sequence_length else "",
        f"{workload.classes} classes" if workload.classes else "",
        workload.optimizer if workload.task == "train" and workload.optimizer != "sgd" else "",
        f"{record.spec.threads} threads" if record.spec.threads else "",
        f"within {format_bytes(limit)}" if limit else "",
    )
    return ", ".join(word for word in words if word)
