"""The command that measures again what a spec measured, as a person would type it."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

import msgspec

from redline.spec import Frozen, RunSpec
from redline.units import exact_bytes

FIRST_CHOICES = frozenset({"auto", "cuda", "cuda:0", "rocm", "rocm:0"})
"""Devices that need not be named: `auto` finds them. A CPU is named, because its machine may have a GPU too."""


def command_line(command: str, spec: RunSpec, *, batch: int | None = None, recipes: Sequence[str] = ()) -> str | None:
    """`redline COMMAND MODEL` with every setting of the workload that is not the default; None for a live module, which
    no command line can name.

    `batch` None says none: for a command that looks for it. `recipes`: in the place of the spec's own. How long to look
    is not part of it: whoever measures again may want to know it better.
    """
    workload = spec.workload
    if workload.artifact is not None or workload.model.startswith("live:"):
        return None
    unsaid = ("model", "batch", "artifact", *(("items",) if command == "batch" else ()))
    words = ["redline", command, workload.model, *_options(workload, leave_out=unsaid)]
    words += ["--device", spec.device] if spec.device not in FIRST_CHOICES else []
    words += _options(spec, leave_out=("workload", "recipe", "measure", "launch", "device"))
    limit = spec.launch.memory_limit_bytes
    words += ["--max-memory", exact_bytes(limit)] if limit is not None else []
    words += ["--batch", str(batch)] if batch is not None else []
    for recipe in recipes or [str(spec.recipe)]:
        words += ["-r", recipe]
    return shlex.join(words)


def _options(struct: Frozen, leave_out: tuple[str, ...]) -> Iterator[str]:
    """Options are named as the fields are."""
    for field in msgspec.structs.fields(struct):
        value = getattr(struct, field.name)
        if field.name not in leave_out and value != field.default:
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            yield from (f"--{field.name.replace('_', '-')}", text)
