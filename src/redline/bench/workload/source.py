"""What a source of models is, and the table of those there are. Adding one is adding a file in `sources/`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from redline.bench.workload.decoder import Decoder, WriterCode
from redline.bench.workload.hf_decoder import writer_code
from redline.bench.workload.inputs import Inputs
from redline.bench.workload.workload import Workload
from redline.model.errors import SpecError
from redline.model.names import SOURCES_GROUP
from redline.model.note import Note, note
from redline.model.protocol import ModelName
from redline.model.registry import Registry
from redline.model.spec import Task, WorkloadSpec


@dataclass(frozen=True, kw_only=True)
class ExampleCode:
    """Expressions of Python that make a workload with random weights."""

    imports: tuple[str, ...]
    model: str
    inputs: str
    """A tuple of positional arguments and a dict of keywords."""
    items: int
    classes: int = 0
    """How many classes a target for training may name."""


class Source(ABC):
    """Where models come from. It always answers to its name in front (`timm:NAME`), and may claim names without."""

    needs_prefix: ClassVar[bool] = False
    """Its names are only understood with the source in front; asking for the list may be slow."""
    is_built_elsewhere: ClassVar[bool] = False
    """Somebody else decides on the image size and the classes: data are taken as they are."""
    writes_text: ClassVar[bool] = False
    """Its models can be asked to generate."""

    def claims(self, model: str) -> bool:
        """Returns whether a name without a source in front is this one's."""
        return any(known.name == model for known in self.models())

    @abstractmethod
    def check(self, spec: WorkloadSpec) -> None:
        """Raise a `UsageError` if the spec cannot be honoured. Builds nothing."""

    @abstractmethod
    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        """Returns the workload of a checked spec, on the CPU; random state is already seeded."""

    def build_for(self, spec: WorkloadSpec, seed: int, inputs: Inputs) -> Workload:
        """Returns the workload of a checked spec for data that are there: `inputs` are of its first batch."""
        return self.build(spec, seed)

    def task_of(self, spec: WorkloadSpec) -> Task:
        """Returns the task of a checked spec, as this source understands it."""
        if spec.task == "step":
            raise SpecError(
                "task step is for a function of yours: give it as file.py:step, or as redline.run(function)"
            )
        return spec.task

    def fingerprint(self, spec: WorkloadSpec) -> str:
        """Returns what is known of the model's identity before it is built; a sweep that goes on by it must not be misled."""
        return ""

    def has_stem(self, spec: WorkloadSpec) -> bool:
        """Returns whether the model of a checked spec begins as a ResNet does, so that `stem` means something."""
        return False

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        """Returns how to make the same model and inputs in a few lines; None if that takes more, or the user."""
        return None

    def writer_code(self, spec: WorkloadSpec) -> WriterCode:
        """Returns what a snippet of a generation must know of the model of a checked spec."""
        model = self.build(spec, 0).model
        assert isinstance(model, Decoder)
        return writer_code(model)

    def models(self) -> list[ModelName]:
        """Returns what goes by name, as one writes it in a spec. Raises `MissingExtra` if the package is not installed."""
        return []


SOURCES: Registry[Source] = Registry("model source", package="redline.bench.workload.sources", group=SOURCES_GROUP)


def bare(spec: WorkloadSpec) -> str:
    """Returns the model's name without a source in front."""
    source, colon, name = spec.model.partition(":")
    return name if colon and source in SOURCES else spec.model


def refuse_options(spec: WorkloadSpec, *options: str, why: str) -> None:
    """A `SpecError` for the first of these options that was set."""
    for option in options:
        if getattr(spec, option) is not None:
            raise SpecError(f"{option} {getattr(spec, option)} cannot be honoured for {spec.model}: {why}")


def has_imagenet_stem(model: nn.Module) -> bool:
    """Returns whether it begins as a ResNet for large images: a convolution that halves them, and a pooling that does it again."""
    first, pooling = getattr(model, "conv1", None), getattr(model, "maxpool", None)
    return isinstance(first, nn.Conv2d) and first.stride == (2, 2) and isinstance(pooling, nn.MaxPool2d)


def give_cifar_stem(model: nn.Module, notes: list[Note]) -> None:
    """Begin with a 3×3 convolution that keeps the size and no pooling: of 32 pixels the other stem leaves 8."""
    first = model.conv1
    assert isinstance(first, nn.Conv2d)
    model.conv1 = nn.Conv2d(
        first.in_channels, first.out_channels, kernel_size=3, stride=1, padding=1, bias=first.bias is not None
    )
    # As torchvision begins its convolutions.
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    model.maxpool = nn.Identity()
    notes.append(note("model", "CIFAR stem: a 3×3 convolution without pooling, for small images"))
