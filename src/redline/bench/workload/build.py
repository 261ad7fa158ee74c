"""This builds a workload on the CPU from a spec, and finds the source that knows a name."""

from __future__ import annotations

import fnmatch
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from redline.bench.workload.batch import proven_axes, resize, size_along
from redline.bench.workload.inputs import Inputs, seeded
from redline.bench.workload.source import SOURCES, Source
from redline.bench.workload.workload import Workload
from redline.model.errors import MissingExtra, SpecError, UnknownName
from redline.model.note import note
from redline.model.protocol import ModelName
from redline.model.spec import WorkloadSpec


def build_workload(
    spec: WorkloadSpec, seed: int, within: AbstractContextManager[Any] | None = None, inputs: Inputs | None = None
) -> Workload:
    """Returns the model with its inputs on the CPU. The same seed gives the same weights and inputs.

    `within` is held while the source builds, such as a mode that gives tensors no memory. `inputs` are a batch of the data
    that the model is built for.
    """
    source = source_of(spec)
    source.check(spec)
    with seeded(seed), within or nullcontext():
        return source.build(spec, seed) if inputs is None else source.build_for(spec, seed, inputs)


def settle_batch(workload: Workload, spec: WorkloadSpec, *, ask: bool = True) -> None:
    """Prove the batch if it is not known yet, and give the inputs the one that was asked for.

    `ask` lets the model be run twice for that. A batch that cannot be given is a `SpecError`.
    """
    if workload.step is not None:
        return  # what its setup takes is known, and nothing else can be asked of a function
    why, inputs = "", (workload.args, workload.kwargs)
    if workload.batch is None and ((ask and workload.items is None) or spec.batch is not None):
        found = proven_axes(workload.model, inputs)
        if isinstance(found, str):
            why = found
        else:
            workload.axes, workload.batch_from, workload.batch = found, "scaled", size_along(inputs, found)
    old, axes = workload.batch, workload.axes
    if spec.batch is None or spec.batch == old:
        if why:
            hint = "add --batch-axis N (batch_axis=N) or --items N (items=N)"
            workload.notes.append(note("batch-unknown", f"batch unknown, so steps are counted: {why}; {hint}"))
        return
    if axes is None or old is None:
        raise SpecError(
            f"batch {spec.batch} cannot be honoured for {spec.model}: {why or 'its axes are not known'}; "
            f"add --batch-axis N (batch_axis=N), or let the factory take batch"
        )
    if workload.items is not None and spec.items is None:
        if spec.batch % old:
            raise SpecError(f"batch {spec.batch} cannot be honoured: items were given for {old}, and it is no multiple")
        workload.items = workload.items * spec.batch // old
    workload.loss.select([row % old for row in range(spec.batch)], old)
    workload.put(resize(inputs, axes, spec.batch))
    workload.batch = spec.batch
    workload.notes.append(note("changed-batch", f"the inputs' {old} items became {spec.batch}"))


def check_model(spec: WorkloadSpec) -> None:
    """Raise a `UsageError` for an unknown name, a missing package or file, or options that cannot be honoured."""
    source = source_of(spec)
    if spec.task == "generate" and not source.writes_text:
        raise SpecError(
            f"{spec.model} writes no text: --task generate takes hf:NAME, or a model of yours with forward(tokens, cache)"
        )
    source.check(spec)


def understood(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns the spec with the task that its source knows: a function called `step` is timed as it is."""
    return msgspec.structs.replace(spec, task=source_of(spec).task_of(spec))


def fingerprint_of(spec: WorkloadSpec) -> str:
    """Returns which source it is, and what that knows of a checked spec's model without building it."""
    source = source_of(spec)
    return f"{type(source).__name__} {source.fingerprint(spec)}"


def source_of(spec: WorkloadSpec) -> Source:
    return SOURCES.get("live") if spec.artifact is not None else find_source(spec.model)


def find_source(model: str) -> Source:
    """Returns the source in front of the colon, else the one that claims the name."""
    prefix, colon, _ = model.partition(":")
    if colon and prefix in SOURCES:
        return SOURCES.get(prefix)
    # Those that need their name in front stay out: importing timm to answer a slip of the pen would take seconds.
    candidates = [source for source in map(SOURCES.get, SOURCES) if not source.needs_prefix]
    for source in candidates:
        if source.claims(model):
            return source
    known = [model.name for source in candidates for model in source.models()]
    raise UnknownName("model", model, known, hint="`redline models` lists them")


def list_models(pattern: str | None = None) -> tuple[list[ModelName], list[str]]:
    """Returns models by name that match (part of a name, or a pattern with `*`), and the sources whose package is missing.

    A name matches with its source in front or without: `resnet5*` finds timm's too.
    """
    found: list[ModelName] = []
    missing: list[str] = []
    for name in SOURCES:
        try:
            found += SOURCES.get(name).models()
        except MissingExtra as error:
            missing.append(str(error))
    wanted = (pattern or "*").lower()
    wanted = wanted if any(sign in wanted for sign in "*?[") else f"*{wanted}*"
    names = {model.name: (model.name.lower(), model.name.lower().partition(":")[2]) for model in found}
    return [model for model in found if fnmatch.filter(names[model.name], wanted)], missing
