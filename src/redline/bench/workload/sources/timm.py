"""This source has the models of timm, as `timm:NAME`, with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from redline.bench.workload.build import SOURCES, Source, bare, give_cifar_stem, has_imagenet_stem, refuse_options
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.model.errors import MissingExtra, SpecError, UnknownName
from redline.model.note import Note
from redline.model.protocol import ModelName
from redline.model.spec import WorkloadSpec


class TimmSource(Source):
    needs_prefix = True

    def check(self, spec: WorkloadSpec) -> None:
        timm = _timm()
        if not timm.is_model(bare(spec)):
            raise UnknownName("model", spec.model, (f"timm:{name}" for name in timm.list_models()))
        refuse_options(spec, "sequence_length", why="it takes images")

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        timm, name = _timm(), bare(spec)
        notes: list[Note] = []
        batch = choose_batch(spec.batch, spec.task, notes)
        settings = timm.get_pretrained_cfg(name) or timm.models.PretrainedCfg()
        channels, height, width = settings.input_size
        options: dict[str, Any] = {} if spec.classes is None else {"num_classes": spec.classes}
        if spec.image_size is not None:
            height = width = spec.image_size
            # A convolutional network takes any size and knows no such option, but a transformer is built for one size.
            if settings.fixed_input_size:
                options["img_size"] = spec.image_size
        model = _create(timm, name, options, spec)
        if spec.stem == "cifar":
            if not has_imagenet_stem(model):
                refuse_options(spec, "stem", why="only ResNets begin with one of these stems")
            give_cifar_stem(model, notes)
        return assemble(
            model,
            ((torch.randn(batch, channels, height, width),), {}),
            task=spec.task,
            source="timm",
            identity=f"timm {timm.__version__} {name}",
            seed=seed,
            batch=batch,
            item="img",
            notes=notes,
        )

    def has_stem(self, spec: WorkloadSpec) -> bool:
        # Only shapes are needed here, so the weights get no memory.
        with torch.device("meta"):
            return has_imagenet_stem(_create(_timm(), bare(spec), {}, spec))

    def fingerprint(self, spec: WorkloadSpec) -> str:
        return f"timm {_timm().__version__}"

    def models(self) -> list[ModelName]:
        return [ModelName(name=f"timm:{name}", source="timm", kind="image") for name in _timm().list_models()]


def _create(timm: Any, name: str, options: dict[str, Any], spec: WorkloadSpec) -> nn.Module:
    try:
        model: nn.Module = timm.create_model(name, pretrained=False, **options)
    except (AssertionError, TypeError, ValueError) as error:
        if not options:
            raise
        asked = ", ".join(f"{option}={value}" for option, value in options.items())
        said = str(error) or type(error).__name__
        raise SpecError(f"{spec.model} cannot be built with {asked}: {said}") from error
    # timm itself notices this only in the first forward.
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if spec.image_size is not None and isinstance(patch, tuple) and any(spec.image_size % side for side in patch):
        raise SpecError(f"image_size must be a multiple of {max(patch)} for {spec.model}, got {spec.image_size}")
    return model


def _timm() -> Any:
    try:
        import timm
    except ImportError:
        raise MissingExtra("timm:NAME", "timm", "timm") from None
    return timm


SOURCES.register("timm")(TimmSource())
