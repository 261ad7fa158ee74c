"""`timm:NAME`: the models of timm, with random weights."""

from __future__ import annotations

from typing import Any

import torch

from redline.bench.workload.source import SOURCES, Source, refuse_options
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.errors import MissingExtra, SpecError, UnknownName
from redline.protocol import ModelName
from redline.spec import WorkloadSpec


class TimmSource(Source):
    needs_prefix = True

    def check(self, spec: WorkloadSpec) -> None:
        timm = _timm()
        if not timm.is_model(_bare(spec.model)):
            raise UnknownName("model", spec.model, (f"timm:{name}" for name in timm.list_models()))
        refuse_options(spec, "sequence_length", why="it takes images")

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        timm, name = _timm(), _bare(spec.model)
        notes: list[str] = []
        batch = choose_batch(spec.batch, spec.task, notes)
        settings = timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
        channels, height, width = settings.input_size
        options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
        if spec.image_size is not None:
            height = width = spec.image_size
            # A convolutional network takes any size and knows no such option; a transformer is built for one size.
            if settings.fixed_input_size:
                options["img_size"] = spec.image_size
        try:
            model = timm.create_model(name, pretrained=False, **options)
        except (AssertionError, TypeError, ValueError) as error:
            if not options:
                raise
            asked = ", ".join(f"{option}={value}" for option, value in options.items())
            raise SpecError(
                f"{spec.model} cannot be built with {asked}: {str(error) or type(error).__name__}"
            ) from error
        return assemble(
            model,
            ((torch.randn(batch, channels, height, width),), {}),
            task=spec.task,
            source="timm",
            identity=f"timm {timm.__version__} {name}",
            seed=seed,
            item="img",
            notes=notes,
        )

    def models(self) -> list[ModelName]:
        return [ModelName(name=f"timm:{name}", source="timm", kind="image") for name in _timm().list_models()]


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise MissingExtra("timm:NAME", "timm", "timm") from None
    return timm


def _bare(model: str) -> str:
    return model.removeprefix("timm:")


SOURCES.register("timm")(TimmSource())
