"""This module says what to do next: recipes worth trying, and the command that measures again what a spec measured.

Worth trying are recipes the bench found applicable to this model here, and that the device can gain from. A number format helps where the device multiplies faster in it, as its own ceilings say. What nobody has measured is
believed of a GPU, whose formats differ by factors, and not of a CPU, which emulates most of them.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence

import msgspec

from redline.model.fields import Frozen
from redline.model.identity import given
from redline.model.record import RunRecord
from redline.model.spec import LaunchSpec, MeasureSpec, Recipe, RunSpec
from redline.model.units import exact_bytes
from redline.model.work import Ceilings

SUGGESTED = 2
"""At most so many recipes are suggested, so that a reader has something to choose from and little to read."""
FASTER_FORMAT = 1.3
"""A format has to be this much faster than fp32 in products: casting costs time too."""
FORMATS = {
    "tf32": "tf32",
    "fp16": "fp16",
    "bf16": "bf16",
    "amp": "fp16",
    "amp-bf16": "bf16",
}
"""Each of these switches makes products compute in the format named beside it."""


def worth_trying(
    record: RunRecord, ceilings: Ceilings | None, *, host_bound: bool = False, known: Collection[str] = ()
) -> tuple[str, ...]:
    """Returns at most two recipes, of which the last is the more promising; none where nothing is known to help. `known`: measured already."""
    if record.prepared is None or record.failure is not None:
        return ()
    done = {Recipe.parse(text).canonical() for text in (*known, str(record.spec.recipe))}
    options = [
        text
        for text in record.prepared.applicable
        if Recipe.parse(text).canonical() not in done and not _has_all_of(record.spec.recipe, text)
    ]
    helpful = [text for text in options if _device_gains(text, record, ceilings)]
    if host_bound:
        helpful.sort(key=lambda text: not _takes_python_out(text))
    return tuple(reversed(helpful[:SUGGESTED]))


def _has_all_of(recipe: Recipe, text: str) -> bool:
    """Returns true if a recipe does already what another would: the same switches, with an argument where that has none."""
    own = {switch.name: switch.argument for switch in recipe.switches}
    return all(
        switch.name in own
        and (
            switch.argument in (None, "default", own[switch.name])
            or (switch.argument == "reduce-overhead" and "graphs" in own)
        )
        for switch in Recipe.parse(text).switches
    )


def _device_gains(text: str, record: RunRecord, ceilings: Ceilings | None) -> bool:
    formats = {FORMATS[switch.name] for switch in Recipe.parse(text).switches if switch.name in FORMATS}
    if not formats:
        return True
    work = record.prepared.work if record.prepared else None
    if work is not None and work.total_flops == 0:
        return False  # nothing is multiplied
    if ceilings is None or "fp32" not in ceilings.flops_per_s:
        return record.prepared is not None and record.prepared.environment.device.kind != "cpu"
    plain = ceilings.flops_per_s["fp32"]
    return all(ceilings.flops_per_s.get(form, 0.0) >= FASTER_FORMAT * plain for form in formats)


def _takes_python_out(text: str) -> bool:
    return any(
        switch.name == "graphs" or switch.argument == "reduce-overhead" for switch in Recipe.parse(text).switches
    )


FIRST_CHOICES = frozenset({"auto", "cuda", "cuda:0", "rocm", "rocm:0"})
"""Devices that need not be named: `auto` finds them. A CPU is named, because its machine may have a GPU too."""


WITH_RANKS = ("run", "profile")
"""Commands that take --ranks as `run` does."""
WITH_EFFORT = ("run",)
"""Commands that take --effort, --tail and --no-check, and any door."""
WITH_DOOR = (*WITH_EFFORT, "batch", "tune", "train", "train --find-workers")
"""Commands that can start their workers in more than one way."""
ON_DATA = ("train", "train --find-workers")


def command_line(
    command: str, spec: RunSpec, *, batch: int | None = None, recipes: Sequence[str] | None = None
) -> str | None:
    """`redline COMMAND MODEL` with every setting of the workload that is not the default; None for a live module and a
    watched script, which this command cannot name, for a load, for several ranks where COMMAND takes one, and for a training
    on data where COMMAND is another: `bare_step` makes a spec of it that others can measure.

    `batch` None says none: for a command that looks for it. `recipes`: in the place of the spec's own; an empty list
    says none. How long to look and what to check is not part of it: `options_of` has that.
    """
    workload = spec.workload
    if workload.artifact is not None or workload.model.startswith(("live:", "watch:")):
        return None
    if (spec.train is None) != (command not in ON_DATA) or spec.load is not None:
        return None
    if spec.ranks > 1 and command not in WITH_RANKS:
        return None
    unsaid = ("model", "batch", "artifact", *(("items",) if command == "batch" else ()))
    unsaid += () if spec.train is None else ("task",)
    words = ["redline", *command.split(), workload.model, *_options(workload, leave_out=unsaid)]
    words += ["--device", spec.device] if spec.device not in FIRST_CHOICES else []
    words += _options(spec, leave_out=("workload", "recipe", "measure", "launch", "device", "train"))
    if spec.train is not None:
        words += ["--data", spec.train.data.name, *_options(spec.train.data, leave_out=("name",))]
        if command == "train":
            words += ["--epochs", str(spec.train.epochs), *_options(spec.train, leave_out=("data", "epochs"))]
    limit = spec.launch.memory_limit_bytes
    words += ["--max-memory", exact_bytes(limit)] if limit is not None else []
    words += _door_options(command, spec)
    words += ["--batch", str(batch)] if batch is not None else []
    for recipe in [str(spec.recipe)] if recipes is None else recipes:
        words += ["-r", recipe]
    return shlex.join(words)


def options_of(command: str, spec: RunSpec) -> str:
    """Returns the options that say how it was measured, as far as COMMAND can be told: door, effort, tail, no check of numerics.

    Only the door for a trial whose settings no command line can give: a search chose them, or a file set them one by one.
    """
    measure, words = spec.measure, _door_options(command, spec)
    presets = {tail: MeasureSpec.for_effort(measure.effort, tail=tail) for tail in (False, True)}
    as_checked = msgspec.structs.replace(measure, check_numerics=True)
    tail = next((tail for tail, preset in presets.items() if preset == as_checked), None)
    if command in WITH_EFFORT and tail is not None:
        words += ["--effort", measure.effort] if measure.effort != MeasureSpec().effort else []
        words += [*["--tail"] * tail, *["--no-check"] * (not measure.check_numerics)]
    return shlex.join(words)


def bare_step(record: RunRecord) -> RunSpec | None:
    """Returns one step of a training on data, as other commands do measure it, or None where the images of the data cannot stand for its
    inputs: the loaders are the user's own, or the training was never prepared."""
    train, info = record.spec.train, record.prepared.data if record.prepared else None
    if train is None or ":" in train.data.name or info is None or len(info.shape) != 3:
        return None
    workload = msgspec.structs.replace(
        record.spec.workload, image_size=info.shape[-1], classes=info.classes, stem=info.stem
    )
    return msgspec.structs.replace(record.spec, workload=workload, train=None)


def tuning_command(record: RunRecord) -> str | None:
    """Returns the command that is looking for a faster recipe for the step of a training, or None where no command line can name it."""
    step, prepared = bare_step(record), record.prepared
    return command_line("tune", step, batch=prepared.workload.batch, recipes=()) if step and prepared else None


def _door_options(command: str, spec: RunSpec) -> list[str]:
    door, usual = spec.launch.door, "torchrun" if spec.ranks > 1 else LaunchSpec().door
    known = ("fork", "spawn", "inline", "torchrun") if command in WITH_EFFORT else ("fork", "spawn")
    words = ["--door", door] if door != usual and command in WITH_DOOR and door in known else []
    if spec.launch.rendezvous is not None and command == "run":
        words += ["--rendezvous", spec.launch.rendezvous]
    return words


def _options(struct: Frozen, leave_out: tuple[str, ...]) -> Iterator[str]:
    """Options are named as the fields are, without units."""
    for name, value in given(struct, leave_out).items():
        word = name.removesuffix("_s").replace("_", "-")
        if isinstance(value, bool):
            yield f"--{word}" if value else f"--no-{word}"
        else:
            yield f"--{word}"
            yield value if isinstance(value, str) else msgspec.json.encode(value).decode().removesuffix(".0")
