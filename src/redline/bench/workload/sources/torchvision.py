"""Every model of torchvision by name, with random weights: nothing is downloaded."""

from __future__ import annotations

import torchvision
from torchvision.models import get_model, get_model_weights

from redline.bench.workload.source import SOURCES, ExampleCode, Source, refuse_options
from redline.bench.workload.vision import KINDS, Kind, Quantized, Segmentation
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.errors import UnknownName
from redline.protocol import ModelName
from redline.spec import WorkloadSpec


class TorchvisionSource(Source):
    def check(self, spec: WorkloadSpec) -> None:
        name = _bare(spec.model)
        known = _kinds()
        if name not in known:
            raise UnknownName("torchvision model", name, known)
        refuse_options(spec, "sequence_length", why="it takes images")
        known[name].check(name, spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        name = _bare(spec.model)
        notes: list[Note] = []
        kind = _kinds()[name]
        batch = choose_batch(spec.batch, spec.task, notes)
        model = get_model(name, weights=None, **kind.options(name, spec, notes))
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

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        name = _bare(spec.model)
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


def default_image_size(name: str) -> int:
    return _kinds()[name].default_size(name)


def _kinds() -> dict[str, Kind]:
    return {name: kind for kind in KINDS for name in kind.names()}


def _bare(model: str) -> str:
    return model.removeprefix("torchvision:")


SOURCES.register("torchvision")(TorchvisionSource())
