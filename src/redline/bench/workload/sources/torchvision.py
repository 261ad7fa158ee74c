"""Every model of torchvision by name, with random weights: nothing is downloaded."""

from __future__ import annotations

import msgspec
import torch
import torchvision
from torch import nn
from torchvision.models import get_model, get_model_weights

from redline.bench.workload.source import (
    SOURCES,
    ExampleCode,
    Source,
    give_cifar_stem,
    has_imagenet_stem,
    refuse_options,
)
from redline.bench.workload.vision import KINDS, Kind, Quantized, Segmentation
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import UnknownName
from redline.model.note import Note, note
from redline.model.questions import ModelName
from redline.model.spec import WorkloadSpec


class TorchvisionSource(Source):
    def check(self, spec: WorkloadSpec) -> None:
        name = _bare(spec.model)
        known = _kinds()
        if name not in known:
            raise UnknownName("torchvision model", name, known)
        refuse_options(spec, "sequence_length", why="it takes images")
        if spec.stem is not None and not self.has_stem(spec):
            refuse_options(spec, "stem", why="only ResNets begin with one of these stems")
        known[name].check(name, spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        name = _bare(spec.model)
        notes: list[Note] = []
        kind = _kinds()[name]
        batch = choose_batch(spec.batch, spec.task, notes)
        model = _make(name, spec, notes)
        inputs = kind.inputs(model, name, spec, batch)
        workload = assemble(
            model,
            inputs,
            task=spec.task,
            source="torchvision",
            identity=f"torchvision {torchvision.__version__} {name}",
            seed=seed,
            batch=batch,
            axes=kind.axes(inputs),
            item=kind.item,
            loss=kind.loss(spec),
            # What is to be found in an image cannot be drawn: boxes have corners.
            inputs_are_free=len(inputs[0]) == 1 or kind.name != "detection",
            notes=notes,
        )
        workload.is_cpu_only = isinstance(kind, Quantized)
        return workload

    def has_stem(self, spec: WorkloadSpec) -> bool:
        name = _bare(spec.model)
        if type(_kinds()[name]) is not Kind:
            return False
        with torch.device("meta"):  # shapes only
            return has_imagenet_stem(_make(name, msgspec.structs.replace(spec, stem=None), []))

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        name = _bare(spec.model)
        if spec.stem == "cifar":
            return None  # the model is changed after it is built
        kind = _kinds()[name]
        several_outputs = isinstance(kind, Segmentation) or name in ("inception_v3", "googlenet")
        if not kind.is_one_line or (spec.task == "train" and several_outputs):
            return None  # the inputs or the loss are more than one line
        batch, size = choose_batch(spec.batch, spec.task, []), spec.image_size or kind.default_size(name)
        options = "".join(f", {option}={value!r}" for option, value in kind.options(name, spec, []).items())
        categories = len(get_model_weights(name).DEFAULT.meta["categories"])
        return ExampleCode(
            imports=("import torchvision",),
            model=f'torchvision.models.get_model("{name}", weights=None{options})',
            inputs=f"((torch.randn({batch}, 3, {size}, {size}),), {{}})",
            items=batch,
            classes=spec.classes or categories,
        )

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return f"torchvision {torchvision.__version__}"

    def models(self) -> list[ModelName]:
        return [ModelName(name=name, source="torchvision", kind=kind.name) for name, kind in sorted(_kinds().items())]


def _make(name: str, spec: WorkloadSpec, notes: list[Note]) -> nn.Module:
    model: nn.Module = get_model(name, weights=None, **_kinds()[name].options(name, spec, notes))
    if spec.stem == "cifar":
        give_cifar_stem(model)
        notes.append(note("model", "CIFAR stem: a 3×3 convolution without pooling, for small images"))
    return model


def _kinds() -> dict[str, Kind]:
    return {name: kind for kind in KINDS for name in kind.names()}


def _bare(model: str) -> str:
    return model.removeprefix("torchvision:")


SOURCES.register("torchvision")(TorchvisionSource())
