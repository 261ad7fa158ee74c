"""This module says what a source of models is, holds the table of sources, and builds a workload from a spec.

To add a source is to add a file in `sources/`.
"""

from __future__ import annotations

import fnmatch
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from torch import nn

from redline.bench.workload.batch import proven_axes, resize, size_along
from redline.bench.workload.decoder import Decoder, WriterCode, writer_code
from redline.bench.workload.inputs import Inputs, seeded
from redline.bench.workload.workload import Workload
from redline.model.errors import MissingExtra, SpecError, UnknownName
from redline.model.names import SOURCES_GROUP
from redline.model.note import Note, note
from redline.model.protocol import ModelName
from redline.model.registry import Registry
from redline.model.spec import Task, WorkloadSpec


@dataclass(frozen=True, kw_only=True)
class ExampleCode:
    """These expressions of Python make a workload with random weights."""

    imports: tuple[str, ...]
    model: str
    inputs: str
    """This gives a tuple of positional arguments and a dict of keywords."""
    items: int
    classes: int = 0
    """A target for training may name one of this many classes."""


class Source(ABC):
    """Models come from a source. It answers to its own name in front (`timm:NAME`), and may claim names without a prefix."""

    needs_prefix: ClassVar[bool] = False
    """Its names need the source in front, because asking for the list may be slow."""
    is_built_elsewhere: ClassVar[bool] = False
    """Code of somebody else decides on the image size and the classes, so data are taken as they are."""
    writes_text: ClassVar[bool] = False
    """Its models can be asked to generate."""

    def claims(self, model: str) -> bool:
        """Returns whether a name without a source in front belongs to this source."""
        return any(known.name == model for known in self.models())

    @abstractmethod
    def check(self, spec: WorkloadSpec) -> None:
        """Raises a `UsageError` if the spec cannot be honoured. It builds nothing."""

    @abstractmethod
    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        """Returns the workload of a checked spec, on the CPU. The random state is already seeded."""

    def build_for(self, spec: WorkloadSpec, seed: int, inputs: Inputs) -> Workload:
        """Returns the workload of a checked spec for data that are there. `inputs` are of the first batch of the data."""
        return self.build(spec, seed)

    def task_of(self, spec: WorkloadSpec) -> Task:
        """Returns the task of a checked spec, as this source understands it."""
        if spec.task == "step":
            raise SpecError(
                "task step is for a function of yours: give it as file.py:step, or as redline.run(function)"
            )
        return spec.task

    def fingerprint(self, spec: WorkloadSpec) -> str:
        """Returns what is known of the model's identity before it is built. A resumed sweep trusts it, so models that
        differ must differ in it."""
        return ""

    def has_stem(self, spec: WorkloadSpec) -> bool:
        """Returns whether the model of a checked spec begins as a ResNet does, so that `stem` means something."""
        return False

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        """Returns how to make the same model and inputs in a few lines. Returns None if that takes more lines, or the user's own code."""
        return None

    def writer_code(self, spec: WorkloadSpec) -> WriterCode:
        """Returns what a snippet of a generation must know of the model of a checked spec."""
        model = self.build(spec, 0).model
        assert isinstance(model, Decoder)
        return writer_code(model)

    def models(self) -> list[ModelName]:
        """Returns the models that go by name, as one writes them in a spec. Raises `MissingExtra` if the package is not installed."""
        return []


SOURCES: Registry[Source] = Registry("model source", package="redline.bench.workload.sources", group=SOURCES_GROUP)


def bare(spec: WorkloadSpec) -> str:
    """Returns the model's name without a source in front."""
    source, colon, name = spec.model.partition(":")
    return name if colon and source in SOURCES else spec.model


def refuse_options(spec: WorkloadSpec, *options: str, why: str) -> None:
    """Raises a `SpecError` for the first of these options that was set."""
    for option in options:
        if getattr(spec, option) is not None:
            raise SpecError(f"{option} {getattr(spec, option)} cannot be honoured for {spec.model}: {why}")


def has_imagenet_stem(model: nn.Module) -> bool:
    """Returns whether the model begins as a ResNet for large images: with a convolution that halves them, and a pooling
    that does so again."""
    first, pooling = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    return isinstance(first, nn.Conv2d) and first.stride == (2, 2) and isinstance(pooling, nn.MaxPool2d)


def give_cifar_stem(model: nn.Module, notes: list[Note]) -> None:
    """Replaces the beginning by a 3×3 convolution that keeps the size, without pooling. Of 32 pixels the other stem would leave 8."""
    first = model.conv1
    assert isinstance(first, nn.Conv2d)
    model.conv1 = nn.Conv2d(
        first.in_channels, first.out_channels, kernel_size=3, stride=1, padding=1, bias=first.bias is not None
    )
    # The weights are drawn as torchvision draws those of its convolutions.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    notes.append(note("model", "CIFAR stem: a 3×3 convolution without pooling, for small images"))


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
    """Proves the batch if it is not known yet, and gives the inputs the batch that was asked for.

    `ask` lets the model be run twice for that. A batch that cannot be given raises a `SpecError`.
    """
    if workload.step is not None:
        # What its setup takes is known, and nothing else can be asked of a function.
        return
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
    """Raises a `UsageError` for an unknown name, a missing package or file, or options that cannot be honoured."""
    source = source_of(spec)
    if spec.task == "generate" and not source.writes_text:
        raise SpecError(
            f"{spec.model} writes no text: --task generate takes hf:NAME, or a model of yours with forward(tokens, cache)"
        )
    source.check(spec)


def understood(spec: WorkloadSpec) -> WorkloadSpec:
    """Returns the spec with the task that its source knows. For example, a function called `step` is timed as it is."""
    return msgspec.structs.replace(spec, task=source_of(spec).task_of(spec))


def fingerprint_of(spec: WorkloadSpec) -> str:
    """Returns which source it is, and what that source knows of a checked spec's model without building it."""
    source = source_of(spec)
    return f"{type(source).__name__} {source.fingerprint(spec)}"


def source_of(spec: WorkloadSpec) -> Source:
    return SOURCES.get("live") if spec.artifact is not None else find_source(spec.model)


def find_source(model: str) -> Source:
    """Returns the source in front of the colon. Without a colon it is the source that claims the name."""
    prefix, colon, _ = model.partition(":")
    if colon and prefix in SOURCES:
        return SOURCES.get(prefix)
    # Sources that need their name in front are left out, because importing timm to answer a typing mistake would take seconds.
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
