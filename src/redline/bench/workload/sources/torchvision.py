"""Every classification and segmentation model of torchvision by name, with random weights: nothing is downloaded."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import torch
import torchvision
from torch import nn
from torchvision.models import get_model, get_model_weights, list_models, segmentation

from redline.bench.workload.source import (
    SOURCES,
    ExampleCode,
    Source,
    give_cifar_stem,
    has_imagenet_stem,
    refuse_options,
)
from redline.bench.workload.workload import Workload, assemble, choose_batch
from redline.errors import SpecError, UnknownName
from redline.note import Note, note
from redline.protocol import ModelName
from redline.spec import WorkloadSpec

MAXVIT_STEP = 224
"""Its windows of 7 must divide the feature maps of all four stages, the smallest being 1/32 of the image."""
INCEPTION_TRAINING_SIZE = 299
"""Below it the auxiliary head, which only training uses, runs out of pixels."""
_PATCH = re.compile(r"vit_[a-z]_(\d+)")


class TorchvisionSource(Source):
    def check(self, spec: WorkloadSpec) -> None:
        name = _bare(spec.model)
        known = _kinds()
        if name not in known:
            raise UnknownName("torchvision model", name, known)
        refuse_options(spec, "sequence_length", why="it takes images")
        if spec.stem is not None and not self.has_stem(spec):
            refuse_options(spec, "stem", why="only ResNets begin with one of these stems")
        if spec.image_size is not None:
            _check_image_size(name, spec.image_size)
        if spec.task == "train":
            _check_training(name, spec)

    def build(self, spec: WorkloadSpec, seed: int) -> Workload:
        name, notes = _bare(spec.model), []  # type: tuple[str, list[Note]]
        batch = choose_batch(spec.batch, spec.task, notes)
        size = spec.image_size or default_image_size(name)
        return assemble(
            _make(name, spec, size, notes),
            ((torch.randn(batch, 3, size, size),), {}),
            task=spec.task,
            source="torchvision",
            identity=f"torchvision {torchvision.__version__} {name}",
            seed=seed,
            batch=batch,
            item="img",
            notes=notes,
        )

    def has_stem(self, spec: WorkloadSpec) -> bool:
        name = _bare(spec.model)
        if _kinds()[name] == "segmentation":
            return False
        with torch.device("meta"):  # shapes only
            return has_imagenet_stem(
                _make(name, msgspec.structs.replace(spec, stem=None), default_image_size(name), [])
            )

    def example_code(self, spec: WorkloadSpec) -> ExampleCode | None:
        name = _bare(spec.model)
        if spec.stem == "cifar":
            return None  # the model is changed after it is built
        if spec.task == "train" and (_kinds()[name] == "segmentation" or name in ("inception_v3", "googlenet")):
            return None  # several outputs: the loss is more than one line
        batch, size = choose_batch(spec.batch, spec.task, []), spec.image_size or default_image_size(name)
        options = "".join(f", {option}={value!r}" for option, value in _options(name, spec, size, []).items())
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
        return [ModelName(name=name, source="torchvision", kind=kind) for name, kind in sorted(_kinds().items())]


def default_image_size(name: str) -> int:
    """The crop of the published weights, the smallest where several were published: vit_h_14 has 518 and 224.

    Only the description of the weights is read. Segmentation has no crop, but a size to resize to.
    """
    settings = [weights.transforms.keywords for weights in get_model_weights(name)]
    return int(min(setting.get("crop_size") or setting["resize_size"] for setting in settings))


def _make(name: str, spec: WorkloadSpec, size: int, notes: list[Note]) -> nn.Module:
    model: nn.Module = get_model(name, weights=None, **_options(name, spec, size, notes))
    if spec.stem == "cifar":
        give_cifar_stem(model)
        notes.append(note("model", "CIFAR stem: a 3×3 convolution without pooling, for small images"))
    return model


def _options(name: str, spec: WorkloadSpec, size: int, notes: list[Note]) -> dict[str, Any]:
    """What the constructor is told beyond `weights=None`; what a person should know about it goes to the notes."""
    options: dict[str, Any] = {}
    if spec.classes is not None:
        options["num_classes"] = spec.classes
    if _kinds()[name] == "segmentation":
        # torch's own training script trains with the auxiliary head where there is one.
        if spec.task == "train" and not name.startswith("lraspp"):
            options["aux_loss"] = True
            notes.append(note("model", "trains with its auxiliary head, weight 0.5"))
        return {"weights_backbone": None, **options}
    if name.startswith("vit_"):
        options["image_size"] = size
    elif name.startswith("maxvit"):
        options["input_size"] = (size, size)
    elif name in ("inception_v3", "googlenet"):
        # Left unsaid it warns; True draws truncated normals, twice as slow to build.
        options["init_weights"] = False
        # Inference never looks at the auxiliary heads; they would only take memory.
        options["aux_logits"] = spec.task == "train"
        if spec.task == "train":
            notes.append(note("model", "trains with its auxiliary heads"))
    return options


def _check_image_size(name: str, size: int) -> None:
    patch = _PATCH.fullmatch(name)
    step = int(patch.group(1)) if patch else MAXVIT_STEP if name.startswith("maxvit") else 1
    if size % step:
        below, above = size // step * step, (size // step + 1) * step
        nearest = " or ".join(str(candidate) for candidate in (below, above) if candidate)
        raise SpecError(f"image_size must be a multiple of {step} for {name}, got {size}: try {nearest}")
    # For these torchvision writes the published size; they take any (Swin pads) or were dealt with above.
    if patch or name.startswith(("maxvit", "swin")):
        return
    smallest = max(max(weights.meta.get("min_size", (1, 1))) for weights in get_model_weights(name))
    if size < smallest:
        raise SpecError(f"image_size must be {smallest} or more for {name}, got {size}")


def _check_training(name: str, spec: WorkloadSpec) -> None:
    pools_to_one_value = name == "inception_v3" or name.startswith("deeplabv3")
    if spec.batch == 1 and pools_to_one_value:
        raise SpecError(
            f"batch must be 2 or more to train {name}, got 1: BatchNorm needs more than one value per channel"
        )
    if name == "inception_v3" and spec.image_size is not None and spec.image_size < INCEPTION_TRAINING_SIZE:
        raise SpecError(
            f"image_size must be {INCEPTION_TRAINING_SIZE} or more to train {name} (its auxiliary head), got {spec.image_size}"
        )


def _kinds() -> dict[str, str]:
    names = dict.fromkeys(list_models(module=torchvision.models), "classification")
    return names | dict.fromkeys(list_models(module=segmentation), "segmentation")


def _bare(model: str) -> str:
    return model.removeprefix("torchvision:")


SOURCES.register("torchvision")(TorchvisionSource())
