"""The command that measures again what a spec measured, as a person would type it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import msgspec

from redline.identity import given
from redline.spec import DataSpec, Frozen, RunSpec, TrainSpec
from redline.units import exact_bytes

FIRST_CHOICES = frozenset({"auto", "cuda", "cuda:0", "rocm", "rocm:0"})
"""Devices that need not be named: `auto` finds them. A CPU is named, because its machine may have a GPU too."""


def command_line(
    command: str, spec: RunSpec, *, batch: int | None = None, recipes: Sequence[str] | None = None
) -> str | None:
    """`redline COMMAND MODEL` with every setting of the workload that is not the default; None for a live module and a
    watched script, which this command cannot name, and for a training on data where COMMAND is another: its data decide on image size, classes
    and stem, which the other command would have to be told.

    `batch` None says none: for a command that looks for it. `recipes`: in the place of the spec's own; an empty list
    says none. How long to look is not part of it: whoever measures again may want to know it better.
    """
    workload = spec.workload
    if workload.artifact is not None or workload.model.startswith(("live:", "watch:")):
        return None
    if (spec.train is None) != (command != "train"):
        return None
    unsaid = ("model", "batch", "artifact", *(("items",) if command == "batch" else ()))
    unsaid += () if spec.train is None else ("task",)
    words = ["redline", command, workload.model, *_options(workload, leave_out=unsaid)]
    words += ["--device", spec.device] if spec.device not in FIRST_CHOICES else []
    words += _options(spec, leave_out=("workload", "recipe", "measure", "launch", "device", "train"))
    words += _training_options(spec.train) if spec.train is not None else []
    limit = spec.launch.memory_limit_bytes
    words += ["--max-memory", exact_bytes(limit)] if limit is not None else []
    words += ["--batch", str(batch)] if batch is not None else []
    for recipe in [str(spec.recipe)] if recipes is None else recipes:
        words += ["-r", recipe]
    return shlex.join(words)


def _training_options(train: TrainSpec) -> list[str]:
    data = train.data
    flags = ("prefetch", "pin_memory", "persistent_workers", "on_device", "download")
    told = ["--data", data.name, *_options(data, leave_out=("name", "loader_timeout_s", *flags))]
    for name in flags:
        value, word = getattr(data, name), name.replace("_", "-")
        if value != getattr(DataSpec(name=data.name), name):
            told.append(f"--{word}" if value else f"--no-{word}")
    if data.loader_timeout_s != DataSpec(name=data.name).loader_timeout_s:
        told += ["--loader-timeout", f"{data.loader_timeout_s:g}"]
    told += ["--epochs", str(train.epochs), *_options(train, leave_out=("data", "epochs", "deterministic"))]
    return [*told, "--deterministic"] if train.deterministic else told


def _options(struct: Frozen, leave_out: tuple[str, ...]) -> Iterator[str]:
    """Options are named as the fields are."""
    for name, value in given(struct, leave_out).items():
        text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield from (f"--{name.replace('_', '-')}", text)
